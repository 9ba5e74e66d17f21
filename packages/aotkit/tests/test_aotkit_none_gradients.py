"""Which gradients are None: those of inputs that only ignored outputs lead to, as in eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import aotkit
from aotkit_runtime_wrappers._torch_compat import backward_can_be_pasted

Program = Callable[..., tuple[Tensor, ...]]

# Dynamo looks at `.grad` of arguments, and makes instances of autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]


def apart(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.sin() * 2, (y * 3).exp()


def shared(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x * y, y * z, z.cos()


def zero_derivative(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.floor() + 0 * y, torch.zeros_like(y) * z, x.sign() * x.detach()


def no_derivative(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torch.linalg.vector_norm(x * 2, 0) + y.sum(), torch.norm(z, 0)


def views_of_one(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    base = x * y
    return base[:1], base[1:].t(), (z * 2).view(-1)


def written_views(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    base = x * 2
    row = base[0]
    row.mul_(y[0])
    return base, row, z.exp()


def overwritten(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    out = x * 2
    out.copy_(y)
    return out, x + z.detach(), z.clone().zero_()


def written_inputs(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    x.mul_(y)
    z.copy_(y)
    return x + 1, (y * 2).sin()


def through_inputs(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.view(-1), y[0], (z * x.detach()).cumsum(0)


def detached(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        hidden = x * y
    return (hidden + z), (x.detach() * y), hidden.sum()


def several_results(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    first, second = torch.stack([x, y]).unbind()
    values, indices = z.max(0)
    mean = torch.var_mean(first, 0)
    return second, values, mean[1], indices


class OneOfTwo(torch.autograd.Function):
    """Its backward gives the second input nothing."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 3, None


class TwoResults(torch.autograd.Function):
    """Its backward gives gradients to both inputs, whichever result they come from."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first * 2, second * 3


def custom_that_gives_nothing(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return OneOfTwo.apply(x, y) * z, y.sin()


def custom_with_two_results(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    first, second = TwoResults.apply(x, y)
    return first * z, second.cos()


PROGRAMS: list[Program] = [
    apart,
    shared,
    zero_derivative,
    no_derivative,
    views_of_one,
    written_views,
    overwritten,
    written_inputs,
    through_inputs,
    detached,
    several_results,
    custom_that_gives_nothing,
    custom_with_two_results,
]


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def run(call: Callable[..., Any], wanted: Callable[[int], bool]) -> list[Tensor | None]:
    """Gradients of leaves, as ``.grad``; the function gets copies, which it may write to."""
    given = leaves()
    arguments = [leaf * 1 for leaf in given]
    outputs = list(call(*arguments))
    results = [o for o in (*outputs, *arguments) if o.requires_grad]
    loss = [r.sum() * (n + 1) for n, r in enumerate(results) if wanted(n)]
    if loss:
        torch.stack(loss).sum().backward()
    return [leaf.grad for leaf in given]


def direct(call: Callable[..., Any], wanted: Callable[[int], bool]) -> list[Tensor | None]:
    """The same where the leaves are the arguments."""
    given = leaves()
    results = [o for o in call(*given) if o.requires_grad]
    loss = [r.sum() * (n + 1) for n, r in enumerate(results) if wanted(n)]
    if not loss:
        return [None] * 3
    return list(torch.autograd.grad(torch.stack(loss).sum(), given, allow_unused=True))


def patterns() -> list[Callable[[int], bool]]:
    """First all outputs, and last; in between every choice of the first three."""
    chosen = [frozenset(c) for n in range(1, 4) for c in itertools.combinations(range(3), n)]
    return [lambda n, c=c: n in c for c in chosen] + [lambda n: True, lambda n: n == 0]


def compare(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [g is None for g in got] == [e is None for e in expected]
    for g, e in zip(got, expected, strict=True):
        if g is not None and e is not None:
            torch.testing.assert_close(g, e)


def by_dynamo(program: Program) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend = aotkit.make_backend(aotkit.Options(fallback="error", lowering="none"))
    return torch.compile(program, backend=backend, fullgraph=True)


def by_hand(program: Program) -> Callable[..., Any]:
    return aotkit.aot_function(program, aotkit.nop)


@pytest.mark.sample(ways=1)
@pytest.mark.covers("F4.29")
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("compiler", [by_dynamo, by_hand])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_gradient_is_none_where_that_of_eager_is(program: Program, compiler: Any, order: int) -> None:
    call = compiler(program)
    for wanted in patterns()[::order]:
        compare(run(call, wanted), run(program, wanted))
    if program is not written_inputs:  # which are leaves here
        for wanted in patterns()[::order]:
            compare(direct(call, wanted), direct(program, wanted))


@pytest.mark.covers("F4.29")
def test_a_parameter_behind_an_ignored_output_is_left_alone_by_the_optimizer() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).relu()
            return self.first(hidden), self.second(hidden)

    def train(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Heads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        step = torch.compile(model, backend="aotkit", options={"fallback": "error"}) if compiled else model
        for turn in range(4):
            optimizer.zero_grad()
            first, second = step(torch.ones(2, 3))
            (second if turn == 2 else first).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for got, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.covers("F4.29", "F5f.1")
@pytest.mark.parametrize("settings", [{}, {"dynamic": True}], ids=["static", "dynamic"])
def test_generated_kernels_and_a_cache_hit_give_the_same_none(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    for _ in range(2):  # the second time from the cache
        torch._dynamo.reset()
        call = torch.compile(shared, backend="aotkit", options={"fallback": "error"}, **settings)
        for wanted in patterns()[:4]:
            compare(direct(call, wanted), direct(shared, wanted))


@pytest.mark.covers("F4.29")
def test_a_second_backward_of_one_call_with_other_tangents() -> None:
    def twice(call: Callable[..., Any]) -> list[list[Tensor | None]]:
        given = leaves()
        first, second, third = call(*given)
        found = []
        for results in ([first], [third], [second, third], [first]):
            loss = torch.stack([r.sum() for r in results]).sum()
            found.append(list(torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True)))
        return found

    for got, expected in zip(twice(by_dynamo(shared)), twice(shared), strict=True):
        compare(got, expected)


@pytest.mark.covers("F4.29", "F4.30")
@pytest.mark.parametrize("compiler", [by_dynamo, by_hand])
def test_second_derivatives_are_none_where_those_of_eager_are(compiler: Any) -> None:
    def derivatives(call: Callable[..., Any], which: int) -> list[Tensor | None]:
        given = leaves()
        loss = call(*given)[which].square().sum()
        first = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
        total = torch.stack([g.square().sum() for g in first if g is not None]).sum()
        return [*first, *torch.autograd.grad(total, given, allow_unused=True)]

    call = compiler(shared)
    for which in (0, 1, 2, 0):
        compare(derivatives(call, which), derivatives(shared, which))


@pytest.mark.covers("F4.29", "F2.48")
@pytest.mark.parametrize("which", [0, 1, 2])
def test_compiled_autograd_gives_none_where_eager_does(which: int) -> None:
    call = torch.compile(shared, backend="aotkit", options={"fallback": "error"})
    whole = backward_can_be_pasted()  # before torch 2.13 the graph breaks around ours
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=whole)):
        got = run(call, lambda n: n == which)
    compare(got, run(shared, lambda n: n == which))


@pytest.mark.covers("F4.29", "F6.1")
def test_gradients_of_subclasses_are_none_where_those_of_eager_are() -> None:
    def derivatives(call: Callable[..., Any], which: Sequence[int]) -> list[Tensor | None]:
        x, y, z = leaves()
        given = [TwoTensor(x.detach(), x.detach() + 1).requires_grad_(), y, z]
        results = call(*given)
        chosen = [results[n] for n in which]
        found = torch.autograd.grad(chosen, given, [o.detach() * 2 for o in chosen], allow_unused=True)
        return [g.a + g.b if isinstance(g, TwoTensor) else g for g in found]

    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), x * 2, y * z, z.exp()

    call = by_hand(program)
    for which in ([0, 1], [2], [0, 2], [3], [1, 3], [0, 1, 2, 3], [2, 3]):
        compare(derivatives(call, which), derivatives(program, which))
