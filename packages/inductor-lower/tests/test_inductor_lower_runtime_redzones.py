"""The memory of a call between redzones: writes beside a buffer and reads of dead memory do not go unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.runtime import RedzoneError, bind_program
from aotkit_inductor_lower.targets.cpu.generate import generate

# The second nest writes one row more than its buffer has (the verifier, which would say so, is not asked).
TOO_FAR = """aotkit-ir 2
program outside
input x
buffer x : float32[4, 5] strides [5, 1] input on cpu
buffer t : float32[4, 5] strides [5, 1] temporary on cpu
buffer o : float32[4, 5] strides [5, 1] output on cpu
loop shifted(i0 < 4, i1 < 5):
  stage():
    %a = load x[i0, i1] : f32
    store t[i0 + SHIFT_T, i1] = %a
loop written(i0 < 4, i1 < 5):
  stage():
    %a = load t[i0, i1] : f32
    store o[i0 + SHIFT_O, i1] = %a
return o
"""


def run(shift_t: int, shift_o: int) -> list[torch.Tensor]:
    text = TOO_FAR.replace(" + SHIFT_T", f" {shift_t:+d}".replace("+", "+ ").replace("-", "- ") if shift_t else "")
    text = text.replace(" + SHIFT_O", f" + {shift_o}" if shift_o else "")
    bound = bind_program(generate(parse_program(text)), redzones=True)
    return bound([torch.arange(20.0).reshape(4, 5)])


def test_a_write_behind_a_temporary_names_step_and_buffer() -> None:
    with pytest.raises(RedzoneError, match=r"kernels shifted, written.* behind buffer t"):
        run(1, 0)


def test_a_write_before_a_temporary_is_found() -> None:
    with pytest.raises(RedzoneError, match="before buffer t"):
        run(-1, 0)


def test_a_write_behind_a_result_is_found() -> None:
    with pytest.raises(RedzoneError, match="behind buffer o"):
        run(0, 1)


def test_a_program_that_stays_inside_gives_its_results_in_tensors_of_their_own() -> None:
    (got,) = run(0, 0)
    assert torch.equal(got, torch.arange(20.0).reshape(4, 5))
    assert not got._is_view() and got.storage_offset() == 0


def two_temporaries(x: torch.Tensor) -> torch.Tensor:
    a = torch.logcumsumexp(x + 1, 0)  # an ATen call between two kernels: what it reads lives in the arena
    return torch.logcumsumexp(a * 2, 0) + 1


def test_what_is_read_after_its_planned_life_is_poison() -> None:
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    compiled = compile_graph(make_fx(two_temporaries, tracing_mode="fake")(x)).compiled
    (right,) = bind_program(compiled, redzones=True)([x])
    torch.testing.assert_close(right, two_temporaries(x))
    shortened = tuple(replace(buffer, last=buffer.first) for buffer in compiled.plan.arena)
    assert shortened and shortened != compiled.plan.arena
    (wrong,) = bind_program(replace(compiled, plan=replace(compiled.plan, arena=shortened)), redzones=True)([x])
    assert wrong.isnan().all()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_verified_graphs_run_between_redzones_for_every_size(mode: str) -> None:
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    compiled = compile_graph(make_fx(two_temporaries, tracing_mode=mode)(x), options=LowerOptions(redzones=True))
    assert "guard.after" in compiled._bound.source
    for given in [x] if mode == "fake" else [x, torch.linspace(-1, 1, 63).reshape(9, 7)]:
        sizes = [] if mode == "fake" else list(given.shape)
        (got,) = compiled([*sizes, given]) if len(compiled.compiled.plan.inputs) > 1 else compiled([given])
        torch.testing.assert_close(got, two_temporaries(given))


def test_without_redzones_a_call_does_nothing_more() -> None:
    x = torch.randn(4, 5)
    compiled = compile_graph(make_fx(two_temporaries, tracing_mode="fake")(x))
    assert "guard" not in compiled._bound.source
