"""What several of this package's tests share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    bind_program,
    compile_graph,
    interpret_program,
    lower_graph,
    schedule_program,
    verify_program,
)
from aotkit_inductor_lower.ops.fixups import FIX_UP_ROWS


@pytest.fixture(autouse=True)
def _compiled_once(equal_kernels_are_compiled_once: None, quick_interpreter: None) -> None:
    """For all tests of this package."""


#: What a compile of this package imports.
COMPILER = (
    *("torch.fx.experimental.proxy_tensor", "torch.fx.experimental.validator", "torch._dynamo"),
    *("torch._inductor.fx_passes.dedupe_symint_uses", "torch._inductor.compiler_bisector", "torch._inductor.utils"),
    *("aotkit_inductor_lower.driver", "aotkit_inductor_lower.targets.cpu.generate"),
    "aotkit_inductor_lower.targets.cpu.load",
)


@pytest.fixture(scope="session")
def warm_python(warm_processes: Any) -> Iterator[Any]:
    """``warm_python.run(["-c", code])`` starts Python with torch and this package already imported."""
    processes = warm_processes.WarmPython(COMPILER, seeds=("1",))
    yield processes
    processes.close()


@dataclass(frozen=True)
class Checked:
    """A function that passed: its compiled graph."""

    compiled: CompiledGraph

    @property
    def kernels(self) -> int:
        """How many kernels were generated."""
        return self.compiled.report().kernel_count

    @property
    def externs(self) -> list[str]:
        """The ATen calls left."""
        return [extern.target for extern in self.compiled.report().externs]


def aten_calls(compiled: CompiledGraph) -> set[str]:
    """Names of the ATen calls left, without overloads; `fix_up_rows` is none: it belongs to the kernels that sort."""
    targets = (extern.target for extern in compiled.report().externs)
    return {target.split(".")[1] if target.startswith("aten.") else target for target in targets} - {FIX_UP_ROWS}


def fresh(args: tuple[Any, ...]) -> list[Any]:
    """The arguments, tensors copied with their strides."""
    return [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def assert_same(got: list[Any], want: list[Any], stage: str, tolerance: float | None) -> None:
    """Values within tolerance; dtypes, shapes and strides exactly."""
    assert len(got) == len(want), stage
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            assert g == w, stage
            continue
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride()), stage
        wide = w.dtype in (torch.float32, torch.float64)
        bound = tolerance if wide else None
        torch.testing.assert_close(
            g, w, rtol=bound, atol=bound, equal_nan=True, msg=lambda text: f"after {stage}: {text}"
        )


def assert_stages_same(graph: torch.fx.GraphModule, args: tuple[Any, ...], want: list[Any], tolerance: float) -> None:
    """The lowered program, the scheduled one and the kernels, all interpreted, give what eager gives."""
    lowered = lower_graph(graph)
    verify_program(lowered)
    scheduled, _ = schedule_program(lowered)
    verify_program(scheduled)
    assert_same(interpret_program(lowered, fresh(args)), want, "lowering", tolerance)
    assert_same(interpret_program(scheduled, fresh(args)), want, "scheduling", tolerance)
    interpreted = compile_graph(graph, options=LowerOptions(processor="interpreter"))
    assert_same(interpreted(fresh(args)), want, "kernel passes", tolerance)


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Callable[..., Checked]:
    """Compare eager with the generated code, with and without guarded memory, and with the stages before it.

    The stages are looked at in a sixth of the tests, in all with ``--whole``, and where the generated code is wrong: to
    find the first of them that is.

    All of the function must be generated, also its views: a test of a rule would pass without the rule otherwise, for
    ATen answers. What is left to ATen on purpose is named, ``aten=("mm",)``, and must be left to it.
    """

    every_stage = request.config.getoption("--whole") or zlib.crc32(request.node.nodeid.encode()) % 6 == 0

    def run(
        f: Callable[..., Any],
        *args: Any,
        table: dict[Any, Any] | None = None,
        mode: str = "fake",
        tolerance: float = 3e-6,
        aten: tuple[str, ...] = (),
    ) -> Checked:
        graph = make_fx(lambda *given: f(*given), decomposition_table=table or {}, tracing_mode=mode)(*fresh(args))
        result = f(*fresh(args))
        want = list(result) if isinstance(result, tuple | list) else [result]
        if every_stage:
            assert_stages_same(graph, args, want, tolerance)
        compiled = compile_graph(graph, options=LowerOptions(verify=True))
        assert aten_calls(compiled) == set(aten), "what is left to ATen"
        got = compiled(fresh(args))
        try:
            assert_same(got, want, "code generation", tolerance)
        except AssertionError:
            assert_stages_same(graph, args, want, tolerance)
            raise
        if isinstance(compiled, CompiledGraph):
            watched = bind_program(compiled.compiled, compiled.constants, redzones=True)
            assert_same(watched(fresh(args)), want, "code generation, between redzones", tolerance)
        return Checked(compiled)

    return run
