"""Plain results whose gradients are tensor subclasses, and views of subclasses under ``no_grad``, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import aotkit
from aotkit_runtime_wrappers import WrapperError


def two(requires_grad: bool = True) -> TwoTensor:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    return TwoTensor(*parts).requires_grad_(requires_grad)


def plain(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()


def parts(value: Any) -> Any:
    return (value.a, value.b) if isinstance(value, TwoTensor) else value


def by_dynamo(program: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="aotkit", options={"fallback": "error"}, **settings)


def by_hand(program: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return aotkit.aot_function(program, aotkit.nop, **settings)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "a product": (lambda x, y, z: (x.sin(), y.cos()), lambda o: (o[0] * o[1]).sum()),
    "a sum": (lambda x, y, z: (x.sin(), y.cos() * z), lambda o: o[0].sum() + o[1].sum()),
    "a plain graph": (lambda x, y, z: (y.cos() * z,), lambda o: (o[0] * two(False)).sum()),
    "one of two": (lambda x, y, z: (y.cos(), z.exp(), y * z), lambda o: (o[1] * two(False)).sum() + o[0].sum()),
    "gradients left out": (lambda x, y, z: (y.cos(), z.exp()), lambda o: (o[0] * two(False)).sum()),
    "a transposed one": (lambda x, y, z: (y.cos().t(), z.exp()), lambda o: (o[0] * two(False).t()).sum()),
}


@pytest.mark.covers("F6.1")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("compiler", [by_hand, by_dynamo])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_that_is_a_subclass_reaches_a_plain_result(name: str, compiler: Any) -> None:
    program, loss = PROGRAMS[name]

    def gradients(call: Callable[..., Any]) -> list[Any]:
        given = [two(), plain(), plain(2)]
        loss(call(*given)).backward()
        return [parts(leaf.grad) for leaf in given]

    call, expected = compiler(program), gradients(program)
    for _ in range(2):
        torch.testing.assert_close(gradients(call), expected)


@pytest.mark.covers("F6.1")
def test_symbolic_sizes_are_no_obstacle() -> None:
    def gradients(call: Callable[..., Any], rows: int) -> list[Any]:
        y, z = plain()[:rows].detach().requires_grad_(), plain(2)[:rows].detach().requires_grad_()
        (call(y, z)[0] * two(False)[:rows]).sum().backward()
        return [parts(y.grad), parts(z.grad)]

    def program(y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return y.cos().view(-1).view(y.shape) * z, z.exp()

    call = by_hand(program, dynamic=True)
    for rows in (3, 2):
        torch.testing.assert_close(gradients(call, rows), gradients(program, rows))


@pytest.mark.covers("F6.1")
def test_what_eager_alone_can_do_with_such_a_gradient_is_refused() -> None:
    call = by_hand(lambda x, y: (x * y, y.cos()))
    first, second = call(two(), plain())
    with pytest.raises(WrapperError, match="would become part of the gradient of a tensor subclass"):
        (first + second).sum().backward()
    (out,) = by_hand(lambda y: (y.cos(),))(plain())
    with pytest.raises(WrapperError, match="is a TwoTensor where the backward was compiled for a plain tensor"):
        (out * two(False)).sum().backward(create_graph=True)


VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x.unbind(0),
    lambda x: x.split(1),
    lambda x: x.chunk(2, 1),
    lambda x: [a * 1 for a in x.unbind(0)],
    lambda x: (x[0], x[1]),
    lambda x: x.tensor_split(2),
]


@pytest.mark.covers("F6.1")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("compiler", [by_hand, by_dynamo])
@pytest.mark.parametrize("number", range(len(VIEWS)))
@pytest.mark.parametrize("make", [two, plain])
def test_views_under_no_grad_are_those_of_eager(number: int, make: Callable[[], Tensor], compiler: Any) -> None:
    def observed(call: Callable[..., Any]) -> list[Any]:
        x = make()
        with torch.no_grad():
            results = call(x)
        flags = [(r.requires_grad, r.is_leaf, r._is_view(), r._base is x, r.grad_fn is None) for r in results]
        return [flags, [parts(r.detach()) for r in results]]

    got, expected = observed(compiler(VIEWS[number])), observed(VIEWS[number])
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1])
