"""Functions of one element under ``torch.vmap``: numbers become tensors there, positions indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotkit_runtime_wrappers.errors import MetadataMismatchError

TABLE = torch.linspace(-1, 1, 17)
SQUARE = torch.arange(64.0).reshape(8, 8).sin()

# Written with s (a float of the matrix), i and j (its row and column).
NUMBERS = """
s / 5 | 5 / s | s * True | s + 2 | 2 - s | s ** 2 | 2 ** s | torch.pow(2, s) | torch.rsub(s, 2) | torch.square(s) - 1
torch.where(s > 0, s, 5) | torch.where(s > 0, 5, s) | torch.where(i > 3, 1, 2) | torch.where(i > 3, 1.5, s)
torch.clamp(s, -1, 2) | torch.clamp(s, min=i) | torch.maximum(s, torch.tensor(0.5)) | torch.minimum(s, j)
i // 3 | i % 3 + s | torch.remainder(i, 3) | torch.fmod(s, 2) | (i & 3) + s | (i >> 1) + s | (i << 1) + s | (i ^ 5) + s
torch.lerp(s, s * 2, 0.3) | torch.addcmul(s, s, s, value=2) | torch.addcdiv(s, s, s + 9, value=2)
s.masked_fill(i > 3, 7) | s.to(torch.bfloat16) * 2 | s.double() / 3 | torch.div(i, 2, rounding_mode='floor') + s
torch.full_like(s, 3) + s | s.new_full((), 5) + i | torch.tensor(3) + s | torch.heaviside(s.detach(), torch.tensor(0.5))
torch.nn.functional.gelu(s) * 3 | torch.nn.functional.threshold(s, 0.1, 20) | torch.nn.functional.softplus(s, 2)
torch.xlogy(2, s.abs() + 1) | torch.nan_to_num(s / 0, 1, 2, 3) | torch.float_power(s.abs(), 2) | torch.ne(i, 3)
torch.div(s, 2, rounding_mode='trunc') | torch.copysign(s, torch.tensor(-1.0)) | torch.bitwise_and(i, 6)
"""
PLACES = """
TABLE[i] + s | TABLE[i - j + 8] * s | SQUARE[i, j] | SQUARE[i][j] + s | SQUARE[i].sum() + s | (i >= j).float() * s
torch.dot(SQUARE[i], SQUARE[j]) * s | torch.stack([s, s * 2]).max() | torch.cat([s[None], s[None] * 2]).mean()
torch.softmax(torch.stack([s, i * 1.0]), 0)[0] | torch.cumsum(SQUARE[i], 0)[3] * s | torch.sort(SQUARE[i]).values[2]
torch.argmax(SQUARE[i]) + s | SQUARE[i].max(0).values | torch.gather(TABLE, 0, i[None])[0]
torch.index_select(TABLE, 0, i) | (i - j).abs() * s | torch.arange(4).sum() + s | s.clone().add_(1) | s.clone().mul_(i)
"""


def functions(text: str) -> list[Callable[..., torch.Tensor]]:
    lines = text.replace("\n", "|").split("|")  # none of them has a bar of its own
    return [eval(f"lambda s, i, j: {each}") for line in lines if (each := line.strip())]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("half", [0, 1], ids=["even", "odd"])
@pytest.mark.parametrize("text", [NUMBERS, PLACES], ids=["numbers", "places"])
def test_functions_of_an_element_are_compiled(text: str, half: int) -> None:
    index = torch.arange(8)
    rows, columns = index.repeat_interleave(8), index.repeat(8)

    def mapped(number: int, each: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """A few are mapped twice: the frontend inlines the map for each function, which is most of the time here."""
        if number % 8:
            return torch.vmap(each)(x.reshape(64), rows, columns)
        return torch.vmap(torch.vmap(each, (0, None, 0)), (0, 0, None))(x, index, index)

    chosen = functions(text)[half::2]

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [mapped(number, each, x) for number, each in enumerate(chosen)]

    def gradient(results: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        loss = sum(each.double().nan_to_num(0, 0, 0).sin().sum() for each in results if each.requires_grad)
        return torch.autograd.grad(loss, x)[0]  # type: ignore[arg-type]

    x, y = (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    want, got = f(x), torch.compile(f, backend="aotkit", fullgraph=True, options={"fallback": "error"})(y)
    for number, (expected, result) in enumerate(zip(want, got)):
        assert result.dtype == expected.dtype and result.stride() == expected.stride(), number
        torch.testing.assert_close(result, expected, equal_nan=True, msg=lambda m, n=number: f"{n}: {m}")
    torch.testing.assert_close(gradient(got, y), gradient(want, x), equal_nan=True)


MANY_BACKWARDS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "products": (lambda x, w: (x @ w).relu().softmax(-1), ((3, 6), (6, 5))),
    "two results": (lambda x, w: (x.sin() * w, (x * w).sum()), ((6,), (6,))),
    "strides": (lambda x: (x.t().contiguous().t().sin(), x.t() * 2), ((3, 4),)),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (6,)), ((3, 6),)),
}


@pytest.mark.parametrize("name", MANY_BACKWARDS)
def test_many_backwards_at_once_are_run_operator_by_operator(name: str) -> None:
    fn, sizes = MANY_BACKWARDS[name]
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    args = tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    run = torch.compile(fn, backend="aotkit", options={"cache": False, "fallback": "error"})
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(run, args, vectorize=True), jacobian(fn, args))
    given = [a.requires_grad_() for a in args]
    first = torch.utils._pytree.tree_leaves(run(*given))[0]
    tangents = torch.eye(first.numel(), dtype=first.dtype).view(-1, *first.shape)
    (got,) = torch.vmap(lambda v: torch.autograd.grad(first, given[:1], v, retain_graph=True))(tangents)
    want = jacobian(lambda *a: torch.utils._pytree.tree_leaves(fn(*a))[0], args)[0]
    torch.testing.assert_close(got, want.reshape(got.shape))


def test_a_backward_inside_of_a_transform_is_run_operator_by_operator() -> None:
    """Gradients that ``grad`` and ``vjp`` of torch.func wrap have no memory for kernels, as those under ``vmap``."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.sin() * x, backend="aotkit", options={"cache": False, "fallback": "error"})
    x = torch.linspace(-1, 1, 5).requires_grad_()
    y, tangent = run(x), torch.ones(5)

    def weighted(tangent: torch.Tensor) -> torch.Tensor:
        return (torch.autograd.grad(y, x, tangent, retain_graph=True)[0] * tangent).sum()

    want = (x.sin() + x * x.cos()).detach()
    torch.testing.assert_close(torch.func.grad(weighted)(tangent), want)
    value, pullback = torch.func.vjp(weighted, tangent)
    torch.testing.assert_close((value, pullback(torch.tensor(2.0))[0]), (want.sum(), 2 * want))
    torch.testing.assert_close(torch.vmap(torch.func.grad(weighted))(tangent.expand(2, 5)), want.expand(2, 5))


def test_gradients_of_many_backwards_at_once_are_refused() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.sin() ** 2, backend="aotkit", options={"cache": False, "fallback": "error"})
    with pytest.raises(MetadataMismatchError, match="many backwards at once"):
        torch.autograd.functional.jacobian(run, torch.randn(3), vectorize=True, create_graph=True)
