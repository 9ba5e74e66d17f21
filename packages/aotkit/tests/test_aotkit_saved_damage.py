"""Saved compiles that were damaged, forged, or made for something else: a typed error each, never another result."""

from __future__ import annotations

import io
import os
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit
from aotkit_cache.sealed import seal, unseal

KEY = "a key of sixteen or more"


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).sum()


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return aotkit.saved.compile_to_save(function, arguments())


@pytest.fixture(scope="module")
def files(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved")
    aotkit.saved.save_compiled_function(compiled, folder / "plain")
    aotkit.saved.save_compiled_function(compiled, folder / "signed", signing_key=KEY)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aotkit.saved.compile_step(model, optimizer, lambda model, x: model(x).sum(), (torch.randn(5, 4),))
    step.save(folder / "step")
    compiled.save_compiled_function(str(folder / "torch"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(path: Path, kind: str) -> Any:
    if kind == "step":
        return aotkit.saved.load_step(path)
    return aotkit.saved.load_compiled_function(path, signing_key=KEY if kind == "signed" else None)


@pytest.mark.parametrize("kind", ["plain", "signed", "step"])
def test_of_200_damaged_files_each_is_refused(
    files: dict[str, bytes], kind: str, tmp_path: Path, damaged: Callable[..., bytes]
) -> None:
    chance, tried = random.Random(18), 0
    while tried < 200:
        data = damaged(files[kind], chance)
        if data == files[kind]:
            continue
        tried += 1
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(aotkit.PackageError, match="can't be used"):
            load(tmp_path / "file", kind)


def test_what_torch_keeps_of_ours_is_refused_when_it_is_damaged(files: dict[str, bytes]) -> None:
    data, chance = files["torch"], random.Random(18)
    begin = data.index(b"AOTKITCE")
    for _ in range(20):  # one bit each: torch's own reader is not what is tested
        at = chance.randrange(begin, begin + 8000)
        changed = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        with pytest.raises(aotkit.PackageError, match="can't be read"):
            torch.compiler.load_compiled_function(io.BytesIO(changed), f_globals=function.__globals__)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda meta: meta["environment"].update(torch="2.9.0"), "compiled with torch 2.9.0"),
        (lambda meta: meta["environment"].update(system="Plan9 mips"), "compiled for system 'Plan9 mips'"),
        (lambda meta: meta["environment"]["features"].append("avx9000"), "features that this one"),
        (lambda meta: meta["environment"].update(artifact=1), "has format 1"),
        (lambda meta: meta.update(format=0), "has format 0"),
        (lambda meta: meta["function"].update(python="cpython-27"), "was saved by cpython-27"),
        (lambda meta: meta.pop("function"), "holds no compiled function"),
        (lambda meta: meta["operators"].append({"name": "a::b", "overload": "", "schema": "", "source": ""}), "a::b"),
    ],
)  # fmt: skip
def test_a_file_for_something_else_says_what_it_is_for(
    files: dict[str, bytes], change: Callable[[Any], Any], told: str, tmp_path: Path
) -> None:
    entry = unseal(files["plain"])
    meta: Any = dict(entry.meta)
    change(meta)
    (tmp_path / "file").write_bytes(seal(entry.sections, meta))
    with pytest.raises(aotkit.PackageError, match=told):
        aotkit.saved.load_compiled_function(tmp_path / "file")


def test_with_a_key_nothing_of_another_file_is_looked_at(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_bytes(files["plain"])
    entry = unseal(files["signed"], KEY)
    (tmp_path / "forged").write_bytes(seal(entry.sections, entry.meta, "another key of an attacker"))

    def parsed(*args: Any) -> Any:
        raise AssertionError("a file was parsed before its signature held")

    monkeypatch.setattr("aotkit_cache.entry.json.loads", parsed)
    for name in ("plain", "forged"):
        with pytest.raises(aotkit.PackageError, match="another signing key"):
            aotkit.saved.load_compiled_function(tmp_path / name, signing_key=KEY)


OPERATOR = """
import torch
@torch.library.custom_op("starts::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}
@scale.register_fake
def _(x):
    return torch.empty_like(x)
def inner(x):
    return x + {term}
def f(x):
    return scale(inner(x)).sin()
"""


def test_changed_sources_of_an_operator_or_a_traced_function_are_told(tmp_path: Path, warm_python: Any) -> None:
    def python(script: str, **numbers: float) -> str:
        (tmp_path / "ops.py").write_text(OPERATOR.format(**numbers))
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        program = "import torch, aotkit, ops\n" + textwrap.dedent(script)
        done = warm_python.run(["-B", "-c", program], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    save = """
    from aotkit.saved import *
    save_compiled_function(compile_to_save(ops.f, (torch.ones(3),)), "f")
    class Model(torch.nn.Module):
        forward = staticmethod(ops.f)
    aotkit.aot_compile(Model(), (torch.ones(3),), "package")
    """
    python(save, factor=2, term=1)
    call = """
    try: print(torch.equal(aotkit.saved.load_compiled_function("f")(torch.ones(3)), ops.f(torch.ones(3))))
    except aotkit.PackageError as error: print(error)
    """
    assert python(call, factor=2, term=1) == "True\n"
    assert "source of the custom operator starts::scale has changed" in python(call, factor=3, term=1)
    assert "the source of ops, lines" in python(call, factor=2, term=5)
    package = call.replace('saved.load_compiled_function("f")', 'load("package")')
    assert python(package, factor=2, term=1) == "True\n"
    assert "source of the custom operator starts::scale has changed" in python(package, factor=3, term=1)
