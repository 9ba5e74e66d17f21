"""The forbidden-import check and the import contracts: planted violations are caught, the checkout has none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tools.check_forbidden_imports import check_source, main
from tools.workspace import PACKAGES, ROOT, import_name, load_package

FORBIDDEN_SOURCES = {
    "import statement": "import torch._functorch.config\n",
    "from import": "from torch._inductor import config\n",
    "from import of a submodule name": "from torch import _inductor\n",
    "import inside a function": "def f():\n    from functorch.compile import aot_function\n    return aot_function\n",
    "import under TYPE_CHECKING": "import typing\nif typing.TYPE_CHECKING:\n    import torch._inductor.ir\n",
    "attribute chain": "import torch\nx = torch._inductor.config\n",
    "attribute chain through an alias": "import torch as t\nx = t._functorch\n",
    "attribute chain through a submodule alias": "import torch._dynamo as d\nx = d.backends.common.aot_autograd\n",
    "import_module": "import importlib\nx = importlib.import_module('torch._inductor.compile_fx')\n",
    "import_module by name": "from importlib import import_module as load\nx = load('torch._functorch')\n",
    "__import__": "x = __import__('functorch')\n",
    "getattr": "import torch\nx = getattr(torch, '_inductor')\n",
    "backend helper": "from torch._dynamo.backends.common import aot_autograd\n",
    "pickle": "import pickle\n",
    "pickle from a function": "def f(data):\n    import pickle\n    return pickle.loads(data)\n",
    "torch.load": "import torch\nx = torch.load('file')\n",
    "torch.load by name": "from torch import load\n",
    "graph pickler": "from torch.fx._graph_pickler import GraphPickler\n",
    "run_decompositions": "def f(program):\n    return program.run_decompositions()\n",
    "sibling's submodule": "from aotkit_partition.min_cut import solve\n",
    "below a sibling's public module": "from aotkit_functionalize.subclasses.meta import describe\n",
}

ALLOWED_SOURCES = {
    "own submodule": "from aotkit_cache.entry import Entry\n",
    "sibling's root": "from aotkit_partition import Partition\n",
    "sibling's public module": "from aotkit_functionalize.subclasses import is_subclass\n",
    "torch primitives": "from torch.fx.experimental.proxy_tensor import make_fx\nimport torch._dynamo\n",
    "registered operators": "import torch\nx = torch.ops.inductor.resize_storage_bytes_\n",
    "a word in a string": "text = 'torch._inductor is not used'\n",
    "an attribute of something else": "class A:\n    _inductor = 1\nx = A()._inductor\n",
    "a longer name": "import picklejar\n",
}


@pytest.mark.parametrize("source", FORBIDDEN_SOURCES.values(), ids=FORBIDDEN_SOURCES.keys())
def test_a_forbidden_use_is_found_however_it_is_written(source: str) -> None:
    assert check_source(source, Path("planted.py"), owner="aotkit_cache")


@pytest.mark.parametrize("source", ALLOWED_SOURCES.values(), ids=ALLOWED_SOURCES.keys())
def test_an_allowed_use_is_not_reported(source: str) -> None:
    assert check_source(source, Path("planted.py"), owner="aotkit_cache") == []


def test_the_report_names_file_line_and_remedy() -> None:
    (violation,) = check_source("x = 1\nimport pickle\n", Path("planted.py"))
    assert str(violation).startswith("planted.py:2: pickle: ")


def test_a_violation_planted_in_a_copy_of_a_package_fails_the_command(tmp_path: Path) -> None:
    copy = tmp_path / "packages" / "cache" / "src"
    shutil.copytree(ROOT / "packages" / "cache" / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert main([str(copy)]) == 0
    planted = copy / "aotkit_cache" / "planted.py"
    planted.write_text("def f():\n    import torch._inductor\n")
    assert main([str(copy)]) == 1


def test_an_empty_folder_is_not_a_pass(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1


def write_skeletons(folder: Path) -> None:
    """Packages that only import what their `pyproject.toml` declares, below a copy of the root configuration without
    the contracts between modules of one package."""
    mark = "[[tool.importlinter.contracts]]"
    head, *contracts = (ROOT / "pyproject.toml").read_text().split(mark)
    whole = [text for text in contracts if "containers = " not in text and not re.search(r'"aotkit_\w+\.', text)]
    (folder / "pyproject.toml").write_text(mark.join([head, *whole]))
    for name in PACKAGES:
        package = folder / import_name(name)
        package.mkdir()
        siblings = sorted(import_name(sibling) for sibling in load_package(name).siblings())
        (package / "__init__.py").write_text("".join(f"import {sibling}\n" for sibling in siblings) + "import torch\n")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "lint-imports"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(program), "--no-cache"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_declared_dependencies_keep_the_import_contracts(tmp_path: Path) -> None:
    write_skeletons(tmp_path)
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("aotkit_functionalize", "aotkit_aot_trace"),
        ("aotkit_partition", "aotkit_functionalize"),
        ("aotkit_partition", "aotkit_cache"),
        ("aotkit_cache", "aotkit"),
        ("aotkit_inductor_lower", "aotkit_partition"),
        ("aotkit_cudagraphs", "aotkit_functionalize"),
        ("aotkit_aot_trace", "aotkit_runtime_wrappers"),
        ("aotkit", "pickle"),
        ("aotkit_aot_trace", "functorch"),
        ("aotkit_partition", "networkx"),
        ("aotkit_runtime_wrappers", "llvmlite"),
    ],
)
def test_a_planted_import_breaks_a_contract(tmp_path: Path, importer: str, imported: str) -> None:
    write_skeletons(tmp_path)
    (tmp_path / importer / "planted.py").write_text(f"def f():\n    import {imported}\n    return {imported}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert f"{importer}.planted -> {imported}" in result.stdout


def test_the_contracts_inside_a_package_hold_and_planted_imports_break_them(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for name in PACKAGES:
        source = load_package(name).source
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    assert lint_imports(tmp_path).returncode == 0
    package = "aotkit_inductor_lower"
    planted = [
        ("ir.planted", "..lowering", f"{package}.lowering"),
        ("targets.cpu.planted", "..triton.records", f"{package}.targets.triton.records"),
        ("lowering.planted", "llvmlite", "llvmlite"),
        ("runtime.planted", "..kernel_ir.nodes", f"{package}.kernel_ir.nodes"),
    ]
    for importer, written, _ in planted:
        (tmp_path / package / (importer.replace(".", "/") + ".py")).write_text(
            f"def f():\n    from {written} import g\n"
        )
    found = "".join(lint_imports(tmp_path).stdout.split())
    for importer, _, imported in planted:
        assert f"{package}.{importer}->{imported}" in found


def test_every_target_is_in_the_contract_that_none_knows_another() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (c for c in config["tool"]["importlinter"]["contracts"] if c["id"] == "targets-are-independent")
    folders = (load_package("inductor-lower").source / "targets").glob("*/target.py")
    assert contract["modules"] == sorted(f"aotkit_inductor_lower.targets.{path.parent.name}" for path in folders)
