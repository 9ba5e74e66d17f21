"""Sizes that only data tells, and integers of either sign, in graphs with and without tensor inputs: against eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import aotkit

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
whole_graphs = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def assert_like_eager(fn: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None) -> int:
    """Compares results, strides and gradients of each call; returns how often Dynamo asked for a compile."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return aotkit.make_backend(aotkit.Options(fallback="error"))(graph, examples)

    with whole_graphs:
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
        for args in calls:
            got, want = flat(compiled(*args)), flat(fn(*args))
            assert [t.stride() for t in got] == [t.stride() for t in want]
            torch.testing.assert_close(got, want, equal_nan=True)
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves))
    return len(graphs)


def flat(result: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(r) for r in (result if isinstance(result, tuple | list) else [result])]


def gradients(results: list[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
    losses = [(r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in results if r.requires_grad]
    return torch.autograd.grad(losses, leaves, allow_unused=True) if losses and leaves else ()


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def full_of_an_item() -> torch.Tensor:
    full = torch.full((), 11)
    return torch.full((full.item(),), 0)


WITHOUT_TENSORS = {
    "nonzero": lambda: torch.arange(3).nonzero(),
    "item as size": full_of_an_item,
    "mask": lambda: torch.arange(5)[torch.arange(5) > 2] * 2,
    "unique": lambda: torch.arange(4).remainder(2).unique(),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.arange(3), torch.arange(3)),
}


@pytest.mark.parametrize("name", WITHOUT_TENSORS)
def test_sizes_that_depend_on_data_in_a_function_without_arguments(name: str) -> None:
    assert_like_eager(WITHOUT_TENSORS[name], (), ())


# -- sizes computed from several numbers ----------------------------------------------------------------


def joined(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_ones(more.item(), x.shape[1])]) * 2


def of_a_sum(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return x.sum() + torch.ones(sum(sizes.tolist()))


def views_of_a_sum(x: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = sizes.tolist()
    y = x.new_zeros(first + second) + x.sum()
    return y, y[1:], y.view(-1, 1)


def cut(x: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
    return [part.exp() for part in x.split(sizes.tolist())]


def where_positive(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.where(x > 0)


def where_positive_and_more(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = torch.where(x > 0)
    return rows + 1, x[rows, columns] * 2, torch.nonzero(x > 0) * 3


def wide(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, n * 4).view(n, 4).requires_grad_()


def below(n: int) -> torch.Tensor:
    return (-wide(n).detach().abs()).requires_grad_()


SIZES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "cat": (joined, [(wide(3), torch.tensor(n)) for n in (2, 0, 1, 5)]),
    "sum": (of_a_sum, [(grad(3), torch.tensor(s)) for s in ([2, 3, 4], [0, 1, 0], [0, 0, 0])]),
    "views": (views_of_a_sum, [(grad(3), torch.tensor(s)) for s in ([2, 3], [1, 0], [0, 4])]),
    "split": (cut, [(grad(6), torch.tensor(s)) for s in ([1, 2, 3], [6, 0, 0], [4, 1, 1])]),
    "where": (where_positive, [(wide(4),), (below(5),), (wide(1),)]),
    "where in an index": (where_positive_and_more, [(wide(4),), (below(5),), (wide(2),)]),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_computed_from_data_equal_eager(name: str) -> None:
    fn, calls = SIZES[name]
    assert_like_eager(fn, *calls)


LIBRARY = torch.library.Library("aotkit_unbacked_test", "FRAGMENT")


def _sums(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.stack([part.sum() for part in x.split(list(sizes))])


def _spread(sums: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.cat([one.expand(n) for one, n in zip(sums, sizes, strict=True)])


LIBRARY.define("sums(Tensor x, SymInt[] sizes) -> Tensor")
LIBRARY.impl("sums", _sums, "CPU")
LIBRARY.impl("sums", lambda x, sizes: x.new_empty(len(sizes)), "Meta")
LIBRARY.define("spread(Tensor sums, SymInt[] sizes) -> Tensor")
LIBRARY.impl("spread", _spread, "CPU")
LIBRARY.impl("spread", lambda sums, sizes: sums.new_empty(sum(sizes)), "Meta")
torch.library.register_autograd(
    "aotkit_unbacked_test::sums",
    lambda ctx, g: (torch.ops.aotkit_unbacked_test.spread(g, ctx.sizes), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "sizes", inputs[1]),
    lib=LIBRARY,
)


def test_a_custom_operator_that_keeps_sizes_from_data_for_its_backward() -> None:
    def fn(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.ops.aotkit_unbacked_test.sums(x * 2, sizes.tolist()) * 3

    assert_like_eager(fn, *((grad(6), torch.tensor(s)) for s in ([1, 2, 3], [4, 0, 2], [0, 0, 6])))


# -- integers and floats of either sign -----------------------------------------------------------------


def test_steps_of_either_sign_and_type() -> None:
    def fn(step: float) -> torch.Tensor:
        first, last = (512, -512) if step < 0 else (-512, 512)
        return torch.arange(first, last, step)

    whole, fractions = (-1, -3, 7), (-1.0, -2.5, 1.5)
    if RELEASE < (2, 15):
        assert_like_eager(fn, *((step,) for step in (*whole, *fractions)), dynamic=True)
        return
    # The size that torch 2.15 tells has a case for either sign of a whole step.
    assert_like_eager(fn, *((step,) for step in fractions), dynamic=True)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="Piecewise has no form in the metadata"):
        torch.compile(fn, backend="aotkit", dynamic=True, options={"fallback": "error"})(-1)


NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "factor": lambda x, n: x * n + n,
    "quotient": lambda x, n: x * (7 // n) - 17 % n,
    "extremes": lambda x, n: x * max(n, 2) + min(n, -1) + abs(n),
    "size": lambda x, n: x.new_ones((20 - n) // 3) * n,
    "places": lambda x, n: torch.arange(5, dtype=torch.int64) * n + x.sum().long(),
    "float": lambda x, n: x * (n / 4) + math.sqrt(abs(n)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_argument_may_be_negative(name: str) -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    compiles = assert_like_eager(NUMBERS[name], *((x, n) for n in (3, 5, -3, 17, -11, -2)), dynamic=True)
    assert compiles <= 3  # Dynamo's own conditions on the sign


def test_a_scale_factor_after_sizes_that_were_rounded_up() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        side = math.ceil((x.shape[2] - 1) // 8 * 2 + 2)
        y = F.interpolate(x, size=(side, side))
        return F.interpolate(y, scale_factor=2)

    images = [torch.linspace(0, 1, 2 * n * m).view(1, 2, n, m) for n, m in ((9, 9), (17, 13), (33, 5))]
    calls = [(image.requires_grad_(),) for image in images]
    assert_like_eager(fn, *calls, dynamic=True)


ROOTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "factor": lambda x: x * math.sqrt(x.shape[0]) / x.shape[1] ** 0.5,
    "power": lambda x: x * x.shape[0] ** -0.5 + x.shape[1] ** 2,
    "argument": lambda x: F.softplus(x, beta=math.sqrt(x.shape[0])) + F.leaky_relu(x, 1 / x.shape[1]),
    "product": lambda x: torch.addmm(x[:, :1], x, x.t(), beta=1 / x.shape[0], alpha=math.sqrt(x.shape[1])),
    "sine": lambda x: x * math.sin(x.shape[0]),
    "fill": lambda x: x + x.new_full((2, 1, 1), math.sqrt(x.shape[0])),
}


@pytest.mark.parametrize("name", ROOTS)
def test_floats_that_depend_on_sizes(name: str) -> None:
    calls = [(torch.linspace(-1, 1, n * 4, dtype=torch.float64).view(n, 4).requires_grad_(),) for n in (5, 9, 2)]
    assert assert_like_eager(ROOTS[name], *calls, dynamic=True) == 1


@whole_graphs
@pytest.mark.parametrize(
    "read", [lambda x, mask: x[mask], lambda x, mask: mask.nonzero(), lambda x, mask: x[: mask.sum().item()] * 2]
)
def test_sizes_that_depend_on_data_beside_arguments_that_share_memory(read: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        found = read(x, mask)
        a.add_(1)
        return found, b * 2, read(x, mask)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error"})
    for mask in (torch.tensor([True, False, True]), torch.tensor([True, True, True])):
        rows, theirs = torch.ones(2, 3), torch.ones(2, 3)
        got = compiled(torch.arange(3.0), mask, rows[0], rows[0])
        want = fn(torch.arange(3.0), mask, theirs[0], theirs[0])
        torch.testing.assert_close((*got, rows), (*want, theirs))


def test_a_part_of_an_argument_whose_place_tensors_tell_beside_a_result_with_a_gradient() -> None:
    def fn(x: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = x.detach().narrow(0, start, length)
        return part, x * 2

    assert_like_eager(fn, *((grad(6, 2), torch.tensor(a), torch.tensor(b)) for a, b in ((1, 2), (0, 6), (4, 0))))
