"""What targets can do, and that nothing else asks which device it is."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit_inductor_lower
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.options import INTERPRETERS
from aotkit_inductor_lower.target import NO_MACHINE, on_host
from aotkit_inductor_lower.targets import LOADERS
from aotkit_inductor_lower.targets.cpu.tile_forms import FORMS
from aotkit_inductor_lower.targets.select import named_target, target_for

SOURCES = Path(aotkit_inductor_lower.__file__).parent
DEVICE = re.compile(r"""\.device\.type\b|startswith\(["']cuda|["'](triton-)?interpreter["']|\.is_cuda\b""")
WHERE_DEVICES_ARE_KNOWN = ("target.py", "options.py", "targets/")


def traced(device: str) -> torch.fx.GraphModule:
    with FakeTensorMode():
        return make_fx(lambda x: (x + 1,))(torch.empty(3, device=device))


def test_only_targets_ask_which_device_it_is() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if not str(path.relative_to(SOURCES)).startswith(WHERE_DEVICES_ARE_KNOWN)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DEVICE.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("device", "options", "name", "owned"),
    [
        ("cpu", LowerOptions(), "cpu:", "cpu"),
        ("cpu", LowerOptions(processor="x86-64"), "cpu:x86-64", "cpu"),
        ("cpu", LowerOptions(processor="interpreter"), "interpreter", "cpu"),
        ("cpu", LowerOptions(processor="triton-interpreter"), "triton-interpreter", "cpu"),
        ("cuda:1", LowerOptions(), "cuda:1", "cuda:1"),
        ("cuda:1", LowerOptions(processor="interpreter"), "cuda:1", "cuda:1"),
    ],
)
def test_a_graph_and_options_tell_the_target(device: str, options: LowerOptions, name: str, owned: str) -> None:
    target = target_for(traced(device), options)
    assert target.id.startswith(name)
    capabilities = target.capabilities
    assert capabilities.owns(torch.device(owned)) and not capabilities.owns(torch.device("cuda:3"))
    kernels_of_the_cpu = name.startswith(("cpu:", "interpreter"))
    assert capabilities.arena == capabilities.sorts_rows == kernels_of_the_cpu
    assert capabilities.host_memory == (owned == "cpu") and capabilities.unordered == (owned != "cpu")
    assert bool(capabilities.atomics) == (not kernels_of_the_cpu)
    if capabilities.atomics:
        assert capabilities.contraction_forms == ("dot", "rows", "attention", "implicit")
    else:
        tiles = tuple(form.name for form in FORMS.values())
        assert capabilities.contraction_forms in ((), ("fma",), ("fma", *tiles))
    assert not capabilities.tiles_products or capabilities.contraction_forms[0] == "fma"


def test_every_folder_is_a_target_that_is_loaded_and_every_interpreter_is_found_by_its_name() -> None:
    folders = {path.parent.name for path in (SOURCES / "targets").glob("*/target.py")}
    assert folders == set(LOADERS)
    for home in LOADERS.values():
        assert callable(import_module(home).load)
    for name in INTERPRETERS:
        assert named_target(name) == target_for(traced("cpu"), LowerOptions(processor=name))
        assert named_target(name).id == name
    with pytest.raises(ValueError, match="there are cpu, cpu:NAME, cuda:NUMBER, interpreter, triton-interpreter"):
        named_target("abacus")
    with pytest.raises(ValueError, match="there is no target cpu:x86-64-v9"):
        named_target("cpu:x86-64-v9")


def test_levels_of_x86_are_targets_wherever_passes_run() -> None:
    assert [named_target(f"cpu:{name}").machine.vector_bits for name in ("x86-64", "x86-64-v3", "x86-64-v4")] == [
        128,
        256,
        512,
    ]


def test_no_machine_is_any_processor() -> None:
    assert NO_MACHINE.capabilities.owns(torch.device("cpu")) and on_host(torch.empty(1))
    assert not on_host(torch.empty(1, device="meta"))
