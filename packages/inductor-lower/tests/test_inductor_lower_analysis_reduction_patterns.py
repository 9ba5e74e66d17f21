"""Which stages compute a softmax's maximum and sum together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotkit_inductor_lower.analysis.reduction_patterns import online_pair
from aotkit_inductor_lower.ir import LoopNest, Reduce
from aotkit_inductor_lower.ir.parse import parse_program

SOFTMAX = """\
aotkit-ir 2
program p
input x
input z
buffer x : float32[4, 9] strides [9, 1] input on cpu
buffer z : float32[4] strides [1] input on cpu
buffer y : float32[4] strides [1] output on cpu
loop y(i < 4):
  stage(r < 9):
    %v = load x[i, r] : f32
    %most = reduce max %v : f32
  stage():
    %other = load z[i] : f32
    %sum = add %other, %most : f32
  stage(q < 9):
    %w = load x[i, q] : f32
    %below = sub %w, %most : f32
    %power = exp %below : f32
    %total = reduce sum %power : f32
  stage():
    store y[i] = %total
return y
"""


def nest(text: str = SOFTMAX) -> LoopNest:
    (step,) = parse_program(text).steps
    assert isinstance(step, LoopNest)
    return step


def test_a_sum_of_exponentials_below_the_maximum_goes_with_it() -> None:
    found = online_pair(nest().stages, 0)
    assert found is not None and (found.position, found.total.result) == (2, "total")
    assert online_pair(nest().stages, 2) is None


@pytest.mark.parametrize(("buffer", "index", "together"), [("x", "i, 0", False), ("z", "i", True)])
def test_not_if_what_is_read_again_is_written_in_between(buffer: str, index: str, together: bool) -> None:
    text = SOFTMAX.replace("    %sum = add %other, %most : f32\n", f"    store {buffer}[{index}] = %other\n")
    assert (online_pair(nest(text).stages, 0) is not None) is together


def test_not_with_a_running_maximum() -> None:
    first, *rest = nest().stages
    body = tuple(replace(i, running=True) if isinstance(i, Reduce) else i for i in first.body)
    assert online_pair([first.with_body(body), *rest], 0) is None
