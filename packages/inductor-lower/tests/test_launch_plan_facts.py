"""Memory over a call, and calls of ATen, as a launch plan tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledProgram, LowerOptions, compile_to_program
from aotkit_inductor_lower.launch_plan.facts import UnknownSize, extern_calls, memory_of

OPTIONS = LowerOptions(contractions="aten")
KIB = 1024


def program_of(fn: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> CompiledProgram:
    return compile_to_program(make_fx(fn, tracing_mode=mode)(*args), options=OPTIONS).program  # type: ignore[union-attr]


def test_a_result_is_held_and_a_temporary_is_gone_when_it_is_not_used_any_more() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() @ w).t() @ w.cos()  # each 16 KiB

    program = program_of(chain, torch.ones(64, 64), torch.ones(64, 64))
    assert [target for target, _ in extern_calls(program)] == ["aten.mm.default"] * 3
    over = memory_of(program)
    assert over.backward == len(over.moments) >= 4
    kinds = {moment.step: {kind: size // KIB for kind, size in moment.bytes.items() if size} for moment in over.moments}
    assert kinds["sin"] == {"arena": 16}, "it is written over the product, whose memory is in the arena as well"
    assert kinds["cos"] == {"arena": 32} and kinds["aten.mm"] == {"arena": 32, "result": 16}
    assert over.peak.total == 48 * KIB and over.peak.largest[0][1] == 16 * KIB


def test_a_view_of_an_input_is_no_memory_and_an_unknown_size_is_refused() -> None:
    program = program_of(lambda x: (x.t(), x.sin()), torch.ones(32, 32))
    over = memory_of(program)
    assert [moment.bytes["result"] for moment in over.moments] == [4 * KIB]
    symbolic = program_of(lambda x: x.sin() + x.shape[0], torch.ones(32, 32), mode="symbolic")
    with pytest.raises(UnknownSize, match="is not known before the call"):
        memory_of(symbolic)


def test_what_a_backward_frees_is_held_until_then() -> None:
    forward = program_of(lambda x, w: (x.sin().sum(), x.cos(), w), torch.ones(64, 64), torch.ones(64, 64))
    graph = make_fx(lambda saved, w, g: saved * g + w, tracing_mode="fake")(
        torch.ones(64, 64), torch.ones(64, 64), torch.ones(())
    )
    first, second, *_ = graph.graph.find_nodes(op="placeholder")
    backward = compile_to_program(graph, options=OPTIONS).program  # type: ignore[union-attr]
    over = memory_of(forward, backward, [first.name, None])
    turn = over.moments[over.backward]
    assert turn.bytes["saved"] == 16 * KIB, f"{second.name} is the caller's"
    assert over.moments[over.backward - 1].bytes["saved"] == 16 * KIB
    assert {name for name, _ in turn.largest} >= {first.name}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
def test_what_was_waited_for_is_the_memory_of_the_collective() -> None:
    import torch.distributed._functional_collectives  # its operators' fake kernels

    ops = torch.ops._c10d_functional

    def gathered(part: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = ops.wait_tensor(ops.all_gather_into_tensor(part, 2, "0"))  # 32 KiB
        return (x @ whole).sin(), ops.wait_tensor(ops.all_reduce(x, "sum", "0"))

    over = memory_of(program_of(gathered, torch.ones(32, 128), torch.ones(64, 64)))
    kinds = {moment.step: {kind: size // KIB for kind, size in moment.bytes.items() if size} for moment in over.moments}
    assert kinds["aten.mm"] == {"call result": 32, "result": 32 + 16}, "the gathered matrix is there once"
    assert kinds["sin"] == {"result": 32 + 16}, "and goes with the name that it has when it was waited for"
    assert over.peak.total == 80 * KIB
