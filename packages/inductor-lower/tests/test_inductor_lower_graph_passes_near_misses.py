"""Programs that are almost what a graph pass looks for, and mean something else: each was computed wrong once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.driver import prepare_joint_graph

aten = torch.ops.aten
S = 20
Function = Callable[..., tuple[Tensor, ...]]


def equal_to_eager(function: Function, *given: Tensor, joint: bool = False) -> None:
    """Results, and what was written to inputs."""
    graph = make_fx(function, decompositions(), tracing_mode="fake")(*given)
    options = LowerOptions(contractions="generated", verify=True, rng="eager")
    graph = prepare_joint_graph(graph, options) if joint else graph
    compiled = compile_graph(graph, options=options)
    mine, theirs = [each.clone() for each in given], [each.clone() for each in given]
    torch.manual_seed(1)
    got = compiled(list(mine))
    torch.manual_seed(1)
    for x, y in zip([*got, *mine], [*function(*theirs), *theirs], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)


def operands(heads: int = 2, queries: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, queries, 16, generator=generator)
    key, value = torch.randn(2, 2, heads, S, 16, generator=generator)
    return query, key, value


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT) * 0.25


# -- attention -----------------------------------------------------------------------------------------------------


def test_scores_that_are_multiplied_by_zero() -> None:
    """With a mask of bools the scale 0 was taken for none, so for the usual one."""
    seen = torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(2)) < 0.7

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(q, k, v, seen, scale=0.0),)

    equal_to_eager(function, *operands(), seen)


@pytest.mark.parametrize("part", [slice(4, S + 4), slice(0, 2 * S, 2)])
def test_another_part_of_a_padded_mask(part: slice) -> None:
    """Not the mask that was padded."""
    seen = torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(2)) < 0.7

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        mask = F.pad(torch.where(seen, 0.0, -math.inf), (0, S))[..., part]
        return (F.scaled_dot_product_attention(q, k, v, mask),)

    equal_to_eager(function, *operands(), seen)


@pytest.mark.parametrize("hides", [True, False])
def test_a_mask_of_another_view_of_scores(hides: bool) -> None:
    """Its second dimension is none of heads, though as long as that."""
    mask = torch.randn(4, 1, S, generator=torch.Generator().manual_seed(2))

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        mixed = scores(q, k).view(10, 4, 2, S)
        mixed = torch.where(mask > 0, mixed, -math.inf) if hides else mixed + mask
        return (mixed.view(2, 4, 10, S).softmax(-1) @ v,)

    equal_to_eager(function, *operands(4, 10), mask)


@pytest.mark.parametrize(("dtype", "more"), [(torch.uint8, 0), (torch.int8, 120)])
def test_positions_that_wrap_around(dtype: torch.dtype, more: int) -> None:
    """A difference of bytes is never negative, and a sum of some is less than another of smaller ones."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(S, dtype=dtype)
        seen = (places[:, None] + more >= places + more) if more else (places[:, None] - places >= 0)
        return (torch.where(seen, scores(q, k), -math.inf).softmax(-1) @ v,)

    equal_to_eager(function, *operands())


def test_positions_that_wrap_around_by_several_numbers() -> None:
    """Each of which is small enough."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        many, places = 715827879, torch.arange(S, dtype=torch.int32)
        seen = places[:, None] + many + many + many >= places + many + many + many
        return (torch.where(seen, scores(q, k), -math.inf).softmax(-1) @ v,)

    equal_to_eager(function, *operands())


def test_a_triangle_says_what_is_not_seen() -> None:
    """It was taken for one of what is seen. The last query sees no key."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        mask = torch.where(torch.ones(S, S, dtype=torch.bool).tril(), -math.inf, 0.0)
        return ((scores(q, k) + mask).softmax(-1) @ v,)

    equal_to_eager(function, *operands())


def test_weights_as_rows_of_other_lengths() -> None:
    """Two heads side by side: the product has half as many matrices."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        weights = scores(q, k).softmax(-1).view(2, S, 2 * S)
        return ((weights @ v.reshape(2, 2 * S, 16)).sin(),)

    equal_to_eager(function, *operands())


@pytest.mark.parametrize("one_call", [True, False])
def test_what_dropout_kept_is_read_by_others(one_call: bool) -> None:
    """It was drawn once for attention, and once more for them; so other numbers came behind it, too."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        weights = scores(q, k).softmax(-1)
        if one_call:
            dropped, kept = aten.native_dropout(weights, 0.2, True)
        else:
            kept = aten.bernoulli.p(torch.empty_like(weights), 0.8)
            dropped = weights * aten.div.Scalar(kept, 0.8)
        return dropped @ v, kept * 2.0, torch.rand(3)

    equal_to_eager(function, *operands())


# -- other passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", ["next", "turned"])
def test_indices_of_a_pool_are_changed(indices: str) -> None:
    """Gradients go to other elements than the largest ones, which relu may have made 0."""

    def function(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        y = aten.relu(x)
        pooled, places = aten.max_pool2d_with_indices(y, [2, 2], [2, 2])
        places = (places + 1).clamp(max=15) if indices == "next" else places.flip(-1)
        back = aten.max_pool2d_with_indices_backward(gradient, y, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        return pooled.sin(), aten.threshold_backward(back, y, 0)

    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, 3, 4, 4, generator=generator), torch.randn(2, 3, 2, 2, generator=generator)
    equal_to_eager(function, x, gradient, joint=True)


@pytest.mark.parametrize("view", ["view", "t"])
def test_a_view_is_read_before_and_behind_a_write(view: str) -> None:
    """Two equal calls, with another input in between."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        seen = x.view(-1) if view == "view" else x.t()
        before = seen + 1
        x.copy_(y)
        return before * 2, (seen + 1) * 3

    equal_to_eager(function, torch.arange(20.0).view(4, 5), torch.ones(4, 5))
