"""Attention that is written out, of sizes that change from call to call: found without a guard, right for all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit_inductor_lower import decompositions
from aotkit_inductor_lower.graph_passes.attention_operands import read_operands
from aotkit_inductor_lower.graph_passes.known_sizes import dense_order, is_dense, is_usable
from aotkit_inductor_lower.graph_passes.recognize_attention import recognize_attention
from aotkit_inductor_lower.graph_passes.remove_noops import remove_noops
from aotkit_inductor_lower.graph_passes.rewriting import drop_dead_nodes
from aotkit_inductor_lower.ops.attention import ATTENTION, ATTENTION_BACKWARD
from aotkit_inductor_lower.ops.positions import same_number

aten = torch.ops.aten
H, D = 4, 8
Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TRACED = (H, 12, 12)  # batch, queries, keys: as many as heads, and as many as each other
SIZES = ((3, 5, 7), (1, 1, 9), (2, 6, 1))


def operands(batch: int, queries: int, keys: int) -> list[Tensor]:
    """Query, key, value, a mask of numbers and one of bools."""
    torch.manual_seed(batch + queries * 10 + keys * 100)
    heads = [torch.randn(batch, length, H, D).transpose(1, 2) for length in (queries, keys, keys)]
    seen = torch.rand(batch, H, queries, keys) < 0.6
    seen[..., 0] = True
    return [*heads, torch.randn(batch, H, queries, keys), seen]


def symbolic(given: Sequence[Tensor]) -> tuple[ShapeEnv, FakeTensorMode, list[Tensor]]:
    """Fake tensors, each of whose sizes has a symbol of its own, but 1, heads and their numbers."""
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    made = []
    for number, tensor in enumerate(given):
        changes = [
            DimDynamic.STATIC if size in (1, D) or (dim == 1 and size == H) else DimDynamic.DYNAMIC
            for dim, size in enumerate(tensor.shape)
        ]
        context = StatelessSymbolicContext(dynamic_sizes=changes)
        made.append(mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"t{number}")))
    return env, mode, made


def step(function: Function, trained: Sequence[int]) -> Callable[..., list[Tensor]]:
    """The result, and gradients of what is trained."""

    def both(gradient: Tensor, *given: Tensor) -> list[Tensor]:
        needed = [tensor.detach().requires_grad_(k in trained) for k, tensor in enumerate(given)]
        out = function(*needed)
        if not trained:
            return [out]
        return [out, *torch.autograd.grad(out, [needed[k] for k in trained], gradient)]

    return both


def captured(function: Function, trained: Sequence[int], given: list[Tensor]) -> tuple[ShapeEnv, GraphModule]:
    env, mode, fake = symbolic([torch.randn_like(function(*given)), *given])
    with mode, enable_python_dispatcher():  # before torch 2.12 the kernel of matmul takes sizes as they are otherwise
        gm = make_fx(step(function, trained), decompositions(), _allow_non_fake_inputs=True)(*fake)
    remove_noops(gm.graph, 1000)  # detached tensors, which a captured graph doesn't have
    drop_dead_nodes(gm.graph)
    return env, gm


def check(
    function: Function, trained: Sequence[int], passes: Callable[..., int], sizes: Sequence[tuple[int, ...]] = SIZES
) -> set[object]:
    """Capture, rewrite, and compare with eager for all sizes. Gives the calls that are left."""
    env, gm = captured(function, trained, operands(*TRACED))
    before = len(env.guards), dict(env.replacements), dict(env.var_to_range)
    passes(gm.graph, 100, lambda *_: True)
    assert (len(env.guards), dict(env.replacements), dict(env.var_to_range)) == before
    drop_dead_nodes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for size in sizes:
        given = operands(*size)
        gradient = torch.randn_like(function(*given))
        torch.manual_seed(0)
        want = step(function, trained)(gradient, *given)
        torch.manual_seed(0)
        for x, y in zip(gm(gradient, *given), want, strict=True):
            assert x.shape == y.shape
            assert x.is_contiguous() or not y.is_contiguous()
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    return {node.target for node in gm.graph.nodes} & {ATTENTION, ATTENTION_BACKWARD, aten._softmax.default}


def copies(x: Tensor) -> Tensor:
    """Heads of which two heads of queries share one, as language models write it."""
    batch, count, length, width = x.shape
    return x[:, :, None].expand(batch, count, 2, length, width).reshape(batch, 2 * count, length, width)


def triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def scaled_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return ((q * 0.3) @ k.mT + bias).softmax(-1) @ v


def hidden(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT + torch.where(seen, bias, -math.inf)).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT / 3.0).masked_fill(~triangle(q, k), -math.inf).softmax(-1) @ v


def causal_and_seen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen & triangle(q, k), q @ k.mT, -math.inf).softmax(-1) @ v


def lower(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return (q @ k.mT).masked_fill(~ones.tril(), -math.inf).softmax(-1) @ v


def shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    weights = (q @ copies(k[:, :2]).mT * 0.3 + bias[:, :1]).softmax(-1)
    return (weights @ copies(v[:, :2])).transpose(1, 2).reshape(q.shape[0], q.shape[2], H * D) * 2


def dropped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    noise = aten.div.Scalar(aten.bernoulli.p(torch.empty_like(weights), 0.7), 0.7)
    return (weights * noise) @ v


FOUND = [plain, scaled_query, hidden, causal, causal_and_seen, lower, shared, dropped]


@pytest.mark.parametrize("function", FOUND)
def test_it_is_found_and_right_for_other_sizes(function: Function) -> None:
    assert check(function, (), recognize_attention) == {ATTENTION}


@pytest.mark.parametrize("function", FOUND)
def test_so_are_its_gradients(function: Function) -> None:
    assert check(function, (0, 1, 2), recognize_attention) == {ATTENTION, ATTENTION_BACKWARD}


SHAPES = [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0), (1, 1, 1, 0), (0, 0, 0, 1)]


@pytest.mark.parametrize("ones", SHAPES, ids=str)
@pytest.mark.parametrize("bools", [False, True])
def test_masks_that_are_repeated_along_dimensions(ones: tuple[int, ...], bools: bool) -> None:
    """One along keys stays as it is written: kernels read a number for each key."""
    cut = tuple(slice(1) if one else slice(None) for one in ones)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        scores = torch.where(seen[cut], scores, -1e9) if bools else scores + bias[cut]
        return scores.softmax(-1) @ v

    found = check(function, (0, 1, 2), recognize_attention, SIZES[:2])
    assert found == ({aten._softmax.default} if ones[3] else {ATTENTION, ATTENTION_BACKWARD})


def turned_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(triangle(k, q).mT, -1e9).softmax(-1) @ v


def positions_of_both(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """The queries are the last of the keys: of as many it is a triangle."""
    i = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    return (q @ k.mT).masked_fill(i < torch.arange(k.shape[2]), -1e9).softmax(-1) @ v


@pytest.mark.parametrize("function", [turned_mask, positions_of_both])
def test_sizes_that_are_equal_by_chance_make_no_triangle(function: Function) -> None:
    assert check(function, (), recognize_attention) == {ATTENTION}


def over_batch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Attention whose heads are what looks like a batch, where there are as many."""
    return (q.transpose(0, 1) @ k.transpose(0, 1).mT).softmax(-1) @ v.transpose(0, 1)


def test_batch_and_heads_of_one_size_are_not_mistaken() -> None:
    assert check(over_batch, (0, 1, 2), recognize_attention) == {ATTENTION, ATTENTION_BACKWARD}


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    hides = torch.where(seen[:, :1], 0.0, -math.inf)
    return torch.nn.functional.scaled_dot_product_attention(q, copies(k[:, :2]), copies(v[:, :2]), hides)


@pytest.mark.parametrize("trained", [(), (0, 1, 2)])
def test_operands_of_fused_attention_are_read_without_a_guard(trained: tuple[int, ...]) -> None:
    assert ATTENTION in check(fused, trained, read_operands)


def test_what_is_certain_of_sizes() -> None:
    env, _, (x, y) = symbolic([torch.randn(6, 3, 6), torch.randn(2, 3, 6)])
    a, b = x.shape[0], x.shape[2]
    assert same_number(a * 3 * b, b * a * 3) and same_number(2 * (a + 1), a * 2 + 2) and same_number(3, 3)
    assert not same_number(a, b) and not same_number(a, 6) and not same_number(y.shape[0] * 3, a)
    assert is_usable(a) and is_usable(a - 1) and not is_usable(0)
    assert not is_usable(a - 3)  # of 2 it would be less than nothing
    assert not is_usable(a // 7 + 1)  # which is 1 at hand
    assert is_dense(x) and not is_dense(x.transpose(0, 1))
    assert dense_order(x.permute(2, 0, 1)) == (1, 2, 0) and dense_order(x[:, :1]) is None
    assert not env.guards
