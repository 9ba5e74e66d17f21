"""Attention that is written out, and its gradients, become one call each; what is not attention alone stays."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.graph_passes.attention_nodes import number_of, scaled_by
from aotkit_inductor_lower.graph_passes.attention_operands import read_operands
from aotkit_inductor_lower.graph_passes.recognize_attention import recognize_attention
from aotkit_inductor_lower.graph_passes.remove_noops import remove_noops
from aotkit_inductor_lower.graph_passes.rewriting import drop_dead_nodes
from aotkit_inductor_lower.graph_passes.turned_casts import copy_before_turning
from aotkit_inductor_lower.ops.attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_SCORES

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
B, H, S, D = 2, 4, 12, 8
Function = Callable[..., Tensor]


def operands(shared: int = 1, keys: int = S) -> list[Tensor]:
    """Query, key, value, a mask of numbers and one of bools."""
    torch.manual_seed(0)
    sizes = ((H, S), (H // shared, keys), (H // shared, keys))
    heads = [torch.randn(B, length, count, D).transpose(1, 2) for count, length in sizes]
    seen = torch.rand(B, 1, S, keys) < 0.6
    seen[..., 0] = True
    return [*heads, torch.randn(1, H, S, keys), seen]


def joint(function: Function, given: Sequence[Tensor], trained: Sequence[int]) -> GraphModule:
    """Forward and backward in one graph."""

    def both(*tensors: Tensor) -> list[Tensor]:
        gradient, *inputs = tensors
        needed = [tensor.detach().requires_grad_(k in trained) for k, tensor in enumerate(inputs)]
        out = function(*needed)
        return [out, *torch.autograd.grad(out, [needed[k] for k in trained], gradient)]

    out = function(*given)
    gm = make_fx(both, decompositions(), tracing_mode="fake")(torch.randn_like(out), *given)
    remove_noops(gm.graph, 1000)  # detached tensors, which a captured graph doesn't have
    drop_dead_nodes(gm.graph)
    return gm


def rewritten(gm: GraphModule, *passes: Callable[..., int]) -> set[Any]:
    """The calls of attention after the passes, which must compute what the graph did."""
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    torch.manual_seed(1)
    real = [torch.rand(v.shape) < 0.6 if v.dtype is torch.bool else torch.randn(v.shape) for v in inputs]
    for tensor in real:
        if tensor.dtype is torch.bool:
            tensor[..., 0] = True
    torch.manual_seed(2)
    want = gm(*real)
    for each in passes:
        each(gm.graph, 100, lambda *_: True)
    drop_dead_nodes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(2)
    for x, y in zip(gm(*real), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    targets = {node.target for node in gm.graph.nodes}
    known = {
        ATTENTION,
        ATTENTION_BACKWARD,
        ATTENTION_BACKWARD_WITH_SCORES,
        FLASH,
        FLASH_BACKWARD,
        aten._softmax.default,
    }
    return targets & known


def copies(x: Tensor) -> Tensor:
    batch, count, length, width = x.shape
    return x[:, :, None].expand(batch, count, 2, length, width).reshape(batch, 2 * count, length, width)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (torch.matmul(q, k.mT) / 2.0 + bias).softmax(3) @ v


def scaled_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return ((q * 0.3) @ k.mT).softmax(-1) @ v


def hidden(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT + torch.where(seen, bias, -math.inf)).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT + bias).masked_fill(~seen, -1e9).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, q @ k.mT, -math.inf).softmax(-1) @ v


def drop(x: Tensor, kept: float) -> Tensor:
    """Dropout as a captured graph has it."""
    noise = aten.div.Scalar(aten.bernoulli.p(torch.empty_like(x), kept), kept)
    assert isinstance(noise, Tensor)
    return x * noise


def dropped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return drop((q @ k.mT).softmax(-1), 0.7) @ v


def turned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return plain(q, k, v, bias, seen).transpose(1, 2).reshape(B, S, H * D) * 2


def shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return plain(q, copies(k), copies(v), bias, seen)


def places() -> tuple[Tensor, Tensor]:
    """The numbers of queries and of keys."""
    return torch.arange(S)[:, None], torch.arange(S)


def earlier(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    i, j = places()
    return torch.where((i >= j).expand(B, H, S, S), q @ k.mT, -math.inf).softmax(-1) @ v


def earlier_and_seen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    i, j = places()
    return torch.where(seen & (j <= i), q @ k.mT * 0.3 - bias, -math.inf).softmax(-1) @ v


def earlier_or_zero(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    i, j = places()
    scores = torch.where(seen & (j <= i), q @ k.mT * 0.3 - bias, -math.inf)
    return aten._safe_softmax.default(scores, -1) @ v


def triangle_and_seen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    triangle = torch.where(torch.ones(S, S, dtype=torch.bool).tril(), 0.0, -math.inf)
    return (q @ k.mT * 0.3 + torch.where(seen, 0.0, -math.inf) + triangle).softmax(-1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT + bias - bias.flip(-1)).softmax(-1) @ v


def bias_below_a_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """What the mask hides keeps its bias: it isn't hidden by infinity."""
    return (q @ k.mT + bias + torch.where(seen, 0.0, -3.0)).softmax(-1) @ v


def less_below_a_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT - bias + torch.where(seen, -2.0, 0.0)).softmax(-1) @ v


def triangle_below_a_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    triangle = torch.where(torch.ones(S, S, dtype=torch.bool).tril(), 0.0, -math.inf)
    return (q @ k.mT + triangle + torch.where(seen, 0.0, -3.0)).softmax(-1) @ v


FOUND = [
    (bias_below_a_mask, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (bias_below_a_mask, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (less_below_a_mask, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (triangle_below_a_mask, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (earlier, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (earlier_and_seen, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (earlier_and_seen, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (earlier_or_zero, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (triangle_and_seen, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (plain, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (divided, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (scaled_query, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (hidden, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (two_masks, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (two_masks, 1, (0, 1, 2, 3), ATTENTION_BACKWARD_WITH_SCORES),
    (filled, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (chosen, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (dropped, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (turned, 1, (0, 1, 2), ATTENTION_BACKWARD),
    (shared, 2, (0, 1, 2), ATTENTION_BACKWARD),
]


@pytest.mark.parametrize(("function", "times", "trained", "backward"), FOUND, ids=lambda x: getattr(x, "__name__", ""))
def test_it_is_found_with_its_gradients(function: Function, times: int, trained: Sequence[int], backward: Any) -> None:
    given = operands(times)
    assert rewritten(joint(function, given, trained), recognize_attention) == {ATTENTION, backward}


def lines(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return plain(q, k, v, bias, seen).transpose(1, 2).reshape(B, S, H * D)


def squares_of_lines(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return lines(q, k, v, bias, seen).square()


def squares_of_columns(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return plain(q, k, v, bias, seen).mT.contiguous().square()


@pytest.mark.parametrize(
    ("function", "left"),
    [(squares_of_lines, 0), (lines, 1), (squares_of_columns, 1)],  # the caller's own memory; it lies otherwise
    ids=["lines", "returned", "columns"],
)
def test_a_copy_of_the_result_that_lies_as_the_result_does_is_left_out(function: Function, left: int) -> None:
    """Both would be kept for the backward."""
    gm = joint(function, operands(), (0, 1, 2))
    assert rewritten(gm, recognize_attention) == {ATTENTION, ATTENTION_BACKWARD}
    assert len([node for node in gm.graph.nodes if node.target is aten.clone.default and made_of_result(node)]) == left


def made_of_result(node: Node) -> bool:
    while node.target in (aten.transpose.int, aten.permute.default, aten.clone.default):
        node = node.all_input_nodes[0]
    return node.target is operator.getitem and node.all_input_nodes[0].target is ATTENTION


ALONE = [plain, divided, hidden, filled, turned, earlier, earlier_and_seen, triangle_and_seen]


@pytest.mark.parametrize("function", ALONE)
def test_it_is_found_without_gradients(function: Function) -> None:
    gm = make_fx(lambda *given: [function(*given)], decompositions(), tracing_mode="fake")(*operands())
    assert rewritten(gm, recognize_attention) == {ATTENTION}


@pytest.mark.parametrize(("function", "seen"), [(earlier, False), (earlier_or_zero, True)])
def test_what_hides_later_keys_is_no_mask(function: Function, seen: bool) -> None:
    gm = joint(function, operands(), (0, 1, 2))
    rewritten(gm, recognize_attention)
    for target, place in ((ATTENTION, 3), (ATTENTION_BACKWARD, 7)):
        (call,) = gm.graph.find_nodes(op="call_function", target=target)
        assert (call.args[place + 1] is not None) is seen and call.args[place + 7] is True
    left = gm.graph.find_nodes(op="call_function", target=aten.ge.Tensor)
    assert not left and not gm.graph.find_nodes(op="call_function", target=aten.arange.default)


@pytest.mark.parametrize("gradients", [False, True])
def test_where_a_query_may_see_nothing_its_gradients_ask_for_the_whole_condition(gradients: bool) -> None:
    """They are nan for later keys, too."""
    if gradients:
        gm = joint(earlier_and_seen, operands(), (0, 1, 2))
    else:
        gm = make_fx(lambda *given: [earlier_and_seen(*given)], decompositions(), tracing_mode="fake")(*operands())
    rewritten(gm, recognize_attention)
    (call,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    assert call.args[4] is not None and call.args[10] is not gradients


WINDOWS = [
    (lambda i, j: (i >= j) & (i - j < 3), 3),
    (lambda i, j: (i - j <= 3) & (j <= i) & (i < j + 7), 4),
    (lambda i, j: ~(i < 0) & (j > i - 5) & (i >= j), 5),
    (lambda i, j: (i >= j) & (i - j + 2 <= 2), 1),
    (lambda i, j: (i >= j) & (i - j < -1), 0),
    (lambda i, j: (i >= j) & (i + j < 9), 0),
    (lambda i, j: (i >= j) & (j - i < 3), 0),
]


@pytest.mark.parametrize(("condition", "window"), WINDOWS)
@pytest.mark.parametrize("windows", [False, True])
def test_a_window_is_no_mask_where_the_target_knows_windows(condition: Any, window: int, windows: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        scores = torch.where(condition(*places()), q @ k.mT, -math.inf)
        return aten._safe_softmax.default(scores, -1) @ v

    gm = joint(function, operands(), (0, 1, 2))
    if windows:
        rewritten(gm, lambda *given: recognize_attention(*given, bodies=True))
    else:
        rewritten(gm, recognize_attention)
    for target, place in ((ATTENTION, 4), (ATTENTION_BACKWARD, 8)):
        (call,) = gm.graph.find_nodes(op="call_function", target=target)
        assert call.args[place + 6] is True
        assert call.args[place + 8 :] == ((window, 0.0) if window and windows else ())


def capped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (3 * torch.tanh(q @ k.mT / 4) + bias).masked_fill(~seen, -1e9).softmax(-1) @ v


@pytest.mark.parametrize(("trained", "backward"), [((0, 1, 2), ATTENTION_BACKWARD)])
def test_a_cap_is_found_where_the_target_knows_caps(trained: Sequence[int], backward: Any) -> None:
    gm = joint(capped, operands(), trained)
    assert rewritten(gm, recognize_attention) == {aten._softmax.default}
    assert rewritten(gm, lambda *given: recognize_attention(*given, bodies=True)) == {ATTENTION, backward}
    (call,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    assert call.args[12:] == (0, 3.0) and call.args[6] == 0.75


def capped_twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(q @ k.mT)).softmax(-1) @ v


def term_in_the_cap(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT + bias).softmax(-1) @ v


def turned_cap(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (-2 * torch.tanh(q @ k.mT)).softmax(-1) @ v


@pytest.mark.parametrize("function", [capped_twice, term_in_the_cap, turned_cap])
def test_other_tangents_stay(function: Function) -> None:
    gm = joint(function, operands(), (0, 1, 2))
    assert rewritten(gm, lambda *given: recognize_attention(*given, bodies=True)) == {aten._softmax.default}


def later(i: Tensor, j: Tensor) -> Tensor:
    return i <= j


def with_gap(i: Tensor, j: Tensor) -> Tensor:
    return i + 1 >= j


def turned_places(i: Tensor, j: Tensor) -> Tensor:
    return j >= i


@pytest.mark.parametrize("condition", [later, with_gap, turned_places])
def test_other_conditions_of_places_are_masks(condition: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        return torch.where(condition(*places()), q @ k.mT, -math.inf).softmax(-1) @ v

    gm = joint(function, operands(), (0, 1, 2))
    assert rewritten(gm, recognize_attention) == {ATTENTION, ATTENTION_BACKWARD}
    (call,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    assert call.args[4] is not None and call.args[10] is False


def in_float(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """With scores of float32 from operands of fewer bits."""
    weights = (q.float() @ copies(k).float().mT * 0.3).softmax(-1)
    return weights.to(v.dtype) @ copies(v)


def test_operands_that_are_widened_for_the_scores_are_read_as_they_are() -> None:
    given = [x.bfloat16() if x.is_floating_point() else x for x in operands(2)]
    gm = joint(in_float, given, (0, 1, 2))
    gradient = torch.randn(B, H, S, D).bfloat16()
    want = gm(gradient, *given)
    assert recognize_attention(gm.graph, 100, lambda *_: True) == 1
    drop_dead_nodes(gm.graph)
    gm.recompile()
    for target in (ATTENTION, ATTENTION_BACKWARD):
        (call,) = gm.graph.find_nodes(op="call_function", target=target)
        assert {x.meta["val"].dtype for x in call.args[:3]} == {torch.bfloat16}
    assert not gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for x, y in zip(gm(gradient, *given), want, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x - y).float().norm() <= 1e-2 * y.float().norm()


def widened_and_changed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return ((q.float() + 1) @ k.float().mT).softmax(-1).to(v.dtype) @ v


def test_what_is_computed_in_float32_stays() -> None:
    given = [x.bfloat16() if x.is_floating_point() else x for x in operands()]
    assert recognize_attention(joint(widened_and_changed, given, (0, 1, 2)).graph, 100, lambda *_: True) == 0


def returns_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True)


def scaled_late(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return ((q @ k.mT + bias) * 0.5).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def own_noise(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * bias) @ v


@pytest.mark.parametrize("function", [returns_weights, scaled_late, over_queries, own_noise])
def test_something_else_stays(function: Function) -> None:
    found = rewritten(joint(function, operands(), (0, 1, 2)), recognize_attention)
    assert found == {aten._softmax.default}


def test_scores_that_may_become_infinite_in_float16_stay() -> None:
    def narrowed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        return (q @ k.mT).half().softmax(-1).float() @ v

    assert rewritten(joint(narrowed, operands(), (0, 1, 2)), recognize_attention) == {aten._softmax.default}


def test_what_returns_the_gradient_of_a_mask_is_no_step_of_it() -> None:
    """Scores without their mask are a result too, so that only the mask's gradient is that of the softmax."""

    def with_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        return torch.cat([torch.softmax(scores + bias, -1) @ v, scores], -1)

    q, k, v, _, seen = operands()
    gm = joint(with_scores, [q, k, v, torch.randn(B, H, S, S), seen], (0, 1, 2, 3))
    assert rewritten(gm, recognize_attention) == {aten._softmax.default}


def test_without_the_gradient_of_one_operand_it_stays() -> None:
    assert rewritten(joint(plain, operands(), (0, 2)), recognize_attention) == {aten._softmax.default}


def test_random_numbers_are_drawn_as_bytes_in_their_order() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        return drop(dropped(drop(q, 0.8), k, v, bias, seen), 0.6)

    gm = joint(function, operands(), (0, 1, 2))
    assert rewritten(gm, recognize_attention) == {ATTENTION, ATTENTION_BACKWARD}
    drawn = [node.meta["val"].dtype for node in gm.graph.find_nodes(op="call_function", target=aten.bernoulli.p)]
    assert drawn == [torch.float32, torch.bool, torch.float32]


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, copies(k), copies(v), is_causal=True)


def fused_bools(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, copies(k), copies(v), seen) * 2


def test_shared_heads_are_read_where_they_are() -> None:
    gm = joint(fused, operands(2), (0, 1, 2))
    assert rewritten(gm, read_operands) == {FLASH, FLASH_BACKWARD}
    for target, place in ((FLASH, 1), (FLASH_BACKWARD, 2)):
        (call,) = gm.graph.find_nodes(op="call_function", target=target)
        assert [node.meta["val"].shape[1] for node in call.args[place : place + 2]] == [H // 2] * 2
    assert not gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)


def test_bools_are_read_as_they_are() -> None:
    gm = joint(fused_bools, operands(2), (0, 1, 2))
    assert rewritten(gm, read_operands) == {ATTENTION, ATTENTION_BACKWARD}
    (call,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    assert call.args[3] is None and call.args[4].meta["val"].dtype is torch.bool
    assert not gm.graph.find_nodes(op="call_function", target=aten.where.self)


@pytest.mark.parametrize("turned", [1, 2])
def test_shared_heads_whose_numbers_lie_apart_are_copied(turned: int) -> None:
    """The call reads the numbers of a head side by side, as only the copies have them."""
    given = operands(2)
    given[turned] = given[turned].mT.contiguous().mT
    assert rewritten(joint(fused, given, (0, 1, 2)), read_operands) == {FLASH, FLASH_BACKWARD}
    compiled = compile_graph(make_fx(lambda *args: [fused(*args)], tracing_mode="fake")(*given))
    torch.testing.assert_close(compiled(list(given))[0], fused(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_bools_stay_numbers_where_the_gradients_are_those_of_something_else(place: int) -> None:
    """Of other queries, keys or values, or of another result."""
    gm = joint(fused_bools, operands(2), (0, 1, 2))
    (backward,) = gm.graph.find_nodes(op="call_function", target=FLASH_BACKWARD)
    with gm.graph.inserting_before(backward):
        other = gm.graph.call_function(aten.mul.Tensor, (backward.args[place], 0.5))
        other.meta["val"] = backward.args[place].meta["val"] * 0.5
    backward.update_arg(place, other)
    gm.recompile()
    assert rewritten(gm, read_operands) == {FLASH, FLASH_BACKWARD}


def test_gradients_that_pass_whole_numbers_stay() -> None:
    gm = joint(plain, operands(), (0, 1, 2))
    (backward,) = gm.graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default)
    with gm.graph.inserting_before(backward):
        source = backward.args[0]
        for dtype in (torch.int32, torch.float32):
            whole = gm.graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
            whole.meta["val"] = source.meta["val"].to(dtype)
            source = whole
    backward.update_arg(0, source)
    gm.recompile()
    assert rewritten(gm, recognize_attention) == {aten._softmax.default}


def test_gradients_of_a_softmax_over_queries_stay() -> None:
    gm = joint(plain, operands(), (0, 1, 2))
    (backward,) = gm.graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default)
    backward.update_arg(2, 2)
    gm.recompile()
    assert rewritten(gm, recognize_attention) == {aten._softmax.default}


@pytest.mark.parametrize(("number", "dtype"), [(-math.inf, torch.bool), (0.5, torch.int64), (-1, torch.uint8)])
def test_a_number_that_its_type_does_not_hold_hides_nothing(number: float, dtype: torch.dtype) -> None:
    """Eager mode adds 1, 0 and 255 there."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        zero, other = aten.full.default([], 0.0), aten.full.default([], number, dtype=dtype)
        return F.scaled_dot_product_attention(q, k, v, torch.where(seen, zero, other))

    gm = make_fx(lambda *args: [function(*args)], decompositions(), tracing_mode="fake")(*operands())
    fills = gm.graph.find_nodes(op="call_function", target=aten.full.default)
    assert [number_of(node) for node in fills] == [0, None]
    rewritten(gm, read_operands)


def test_a_factor_that_only_a_call_tells_is_no_number() -> None:
    graph = Graph()
    x, factor = graph.placeholder("x"), graph.placeholder("factor")
    factor.meta["val"] = ShapeEnv().create_unbacked_symfloat()
    for target in (aten.mul.Tensor, aten.div.Tensor):
        assert scaled_by(graph.call_function(target, (x, factor))) is None


def test_a_term_that_only_a_call_tells_is_no_mask() -> None:
    gm = joint(lambda q, k, v, bias, seen: (q @ k.mT + 3.0).softmax(-1) @ v, operands(), (0, 1, 2))
    (add,) = (n for n in gm.graph.nodes if n.target is aten.add.Tensor)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        term = gm.graph.placeholder("term")
    term.meta["val"] = ShapeEnv().create_unbacked_symfloat()
    add.update_arg(1, term)
    assert recognize_attention(gm.graph, 100, lambda *_: True) == 0


def scaled_by_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.0) @ k.mT).softmax(-1) @ v


def scaled_by_short_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.full((), 0.1118, dtype=torch.bfloat16)).softmax(-1) @ v


def hidden_by_too_large_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Which becomes infinite in the scores' type, so that the query which sees no key has nan."""
    queries, keys = (torch.arange(length)[:, None] for length in (q.shape[2], k.shape[2]))
    return torch.where((queries != 3) & (keys.mT < 40), q @ k.mT, -3.4e38).softmax(-1) @ v


def hidden_before_a_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = (torch.arange(length)[:, None] for length in (q.shape[2], k.shape[2]))
    scores = torch.where((queries != 3) & (keys.mT < 40), (q @ k.mT).float(), -3.4e38)
    return scores.to(q.dtype).softmax(-1) @ v


NUMBERS = [
    (hidden_before_a_cast, torch.bfloat16),
    (scaled_by_zero, torch.float32),
    (scaled_by_short_number, torch.float32),
    (hidden_by_too_large_a_number, torch.bfloat16),
]


@pytest.mark.parametrize(("function", "dtype"), NUMBERS, ids=lambda x: getattr(x, "__name__", ""))
def test_numbers_are_those_that_eager_has(function: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 48, 16).div(2).to(dtype) for _ in range(3))
    given = [query, key, value]
    gm = joint(function, given, (0, 1, 2))
    needed = [tensor.clone().requires_grad_() for tensor in given]
    want = function(*needed)
    gradient = torch.randn_like(want)
    wanted = [want, *torch.autograd.grad(want, needed, gradient)]
    got = compile_graph(gm)([gradient, *given])
    narrow = dtype is not torch.float32
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=3e-2 if narrow else 2e-6, equal_nan=True)
    alone = make_fx(lambda *args: [function(*args)], decompositions(), tracing_mode="fake")(*given)
    (x,) = compile_graph(alone)(list(given))
    torch.testing.assert_close(x, want.detach(), rtol=0, atol=3e-2 if narrow else 2e-6, equal_nan=True)


TURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "of a product": (lambda q, k: q.bfloat16() @ k.transpose(2, 3).bfloat16(), 1),
    "to a wider type": (lambda q, k: q @ k.bfloat16().mT.float(), 1),
    "of two products": (lambda q, k: (lambda t: (q.bfloat16() @ t, q.bfloat16() * 2 @ t))(k.mT.bfloat16()), 1),
    "read besides": (lambda q, k: (lambda t: (q.bfloat16() @ t, t + 1))(k.mT.bfloat16()), 1),
    "returned": (lambda q, k: (lambda t: (q.bfloat16() @ t, t))(k.mT.bfloat16()), 0),
    "of heads with gaps": (lambda q, k: q.bfloat16() @ k[:, :, :1].expand(B, H, S, D).mT.bfloat16(), 0),
    "of queries": (lambda q, k: k.mT.bfloat16().mT.contiguous() @ q.bfloat16().mT.contiguous(), 0),
    "of other dimensions": (lambda q, k: q.bfloat16() @ k.transpose(1, 2).bfloat16().reshape(B, H, D, S), 0),
    "to no type of attention": (lambda q, k: q.double() @ k.mT.double(), 0),
    "of no product": (lambda q, k: k.mT.bfloat16() + 1, 0),
}


@pytest.mark.parametrize("name", TURNED)
def test_heads_that_are_turned_and_copied_to_another_type_are_copied_first(name: str) -> None:
    """The results have the same bits, and lie in memory as before."""
    function, count = TURNED[name]
    q, k = torch.randn(B, H, S, D), torch.randn(B, S, H, D).transpose(1, 2)
    gm = make_fx(function, decompositions(), tracing_mode="fake")(q, k)
    assert copy_before_turning(gm.graph) == count
    gm.graph.lint()
    gm.recompile()
    got, want = gm(q, k), function(q, k)
    for x, y in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        assert torch.equal(x, y) and x.stride() == y.stride()


def test_attention_whose_keys_are_turned_before_they_are_copied_is_found_each_way() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.bfloat16() @ k.mT.bfloat16() * 0.3).float()
        return (scores.softmax(-1).bfloat16() @ v.bfloat16()).float()

    gm = joint(attention, operands()[:3], (0, 1, 2))
    assert recognize_attention(gm.graph, 100, lambda *_: True) == 1
    drop_dead_nodes(gm.graph)
    targets = {node.target for node in gm.graph.nodes}
    assert {ATTENTION, ATTENTION_BACKWARD} <= targets and aten._softmax.default not in targets
