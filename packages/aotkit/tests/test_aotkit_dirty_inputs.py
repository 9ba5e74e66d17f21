"""Custom autograd functions that write to an argument and say so (``mark_dirty``): it gets their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Check = Callable[..., None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does
]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class _Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.copy_(w * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (w,) = ctx.saved_tensors
        return None, grad * w * 5


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "and more": lambda x, w: _Doubled.apply(x) + 1,
    "itself": lambda x, w: _Doubled.apply(x),
    "result not used": lambda x, w: (_Doubled.apply(x), x * w)[1],
    "twice": lambda x, w: _Doubled.apply(_Doubled.apply(x)) * w,
    "part": lambda x, w: _Doubled.apply(x[1]) + w[0],
    "then written to": lambda x, w: _Doubled.apply(x).add_(w).sin(),
    "after a write": lambda x, w: _Doubled.apply(x.mul_(w)) + 1,
    "intermediate": lambda x, w: _Doubled.apply(x * w) + 1,
    "intermediate and its view": lambda x, w: _after(x * w, lambda y: [y[0], _Doubled.apply(y) + 1]),
    "from another": lambda x, w: (x * 0.5).sum() + _Filled.apply(x, w),
    "beside a write without grad": lambda x, w: _without_grad(_Doubled.apply(x)),
}


def _after(value: Tensor, fn: Callable[[Tensor], Any]) -> Any:
    return fn(value)


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    return x * 2


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("history", [True, False], ids=["with a history", "without"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_dirty_input_gets_the_functions_own_backward(captured_same_as_eager: Check, name: str, history: bool) -> None:
    fn = PROGRAMS[name]

    def call(x: Tensor, w: Tensor) -> list[Tensor]:
        results = fn(x, w)
        return results if isinstance(results, list) else [results]

    def make() -> list[Tensor]:
        x, w = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
        return [x.requires_grad_() * 1.5 if history else x, w]

    captured_same_as_eager(call, make, lone_view=True, with_inputs=True)
