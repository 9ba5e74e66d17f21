"""Builds of torch whose threads kernels can use, and builds where they say why they use one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, compile_graph
from aotkit_inductor_lower.native import symbol_address
from aotkit_inductor_lower.targets.cpu import machine as machine_module
from aotkit_inductor_lower.targets.cpu.threads import RUNTIME, why_one_thread

#: The end of what ``torch.__config__.parallel_info()`` says in several builds.
OPENMP, NATIVE, TBB, LATER = (
    f"ATen/Parallel:\n\tat::get_num_threads() : 4\nATen parallel backend: {name}\n"
    for name in ("OpenMP", "native thread pool", "native thread pool and TBB", "fibers")
)


def table(*missing: str) -> dict[str, int]:
    """The functions of a process by name, where each is."""
    return {name: 0x1000 for name in RUNTIME if name not in missing}


@pytest.mark.parametrize("told", [OPENMP, OPENMP.replace("OpenMP", "openmp"), "no such line"])
def test_a_build_with_openmp_is_entered(told: str) -> None:
    assert why_one_thread(told, table().get) == ""


@pytest.mark.parametrize(
    ("told", "named"),
    [(NATIVE, "(native thread pool)"), (TBB, "(native thread pool and TBB)"), (LATER, "(fibers)")],
)
def test_another_pool_is_named_and_not_entered_though_openmp_is_in_the_process(told: str, named: str) -> None:
    """NumPy, SciPy and oneDNN bring an OpenMP runtime of their own, of which torch's settings know nothing."""
    assert why_one_thread(told, table().get).endswith(f"another pool of threads than OpenMP's {named}")


@pytest.mark.parametrize("missing", [("GOMP_parallel",), RUNTIME])
def test_functions_that_the_runtime_lacks_are_named(missing: tuple[str, ...]) -> None:
    """Intel's runtime for Windows has no entry points of GCC's."""
    assert why_one_thread(OPENMP, table(*missing).get).endswith(f"has no {', '.join(missing)}")


def test_this_build_is_taken_for_what_it_is() -> None:
    entered = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info() and all(map(symbol_address, RUNTIME))
    assert (why_one_thread() == "") == entered == machine_module.host_machine().threads


@pytest.fixture
def fresh_machine() -> Iterator[None]:
    machine_module.host_machine.cache_clear()
    yield
    machine_module.host_machine.cache_clear()


@pytest.mark.usefixtures("fresh_machine")
@pytest.mark.parametrize("told", [OPENMP, NATIVE])
def test_kernels_call_the_runtime_of_a_build_with_openmp_only(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: told)
    x = torch.linspace(-3, 3, 1 << 18).reshape(512, 512)
    compiled = compile_graph(make_fx(lambda x: (x.sin() * x).sum(1), tracing_mode="fake")(x))
    assert isinstance(compiled, CompiledGraph)
    called = set(compiled.compiled.binary.facts["imports"])
    assert called & set(RUNTIME) == (set(RUNTIME) if told is OPENMP else set())
    torch.testing.assert_close(compiled([x])[0], (x.sin() * x).sum(1))
