"""A backward without the tangents of outputs that the loss does not depend on."""

import pytest
import torch
from torch.nn import functional as F

from aotkit_partition import partition
from aotkit_partition.missing_tangents import without_tangents

aten = torch.ops.aten


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def loss_and_scores(x, w):
    scores = (x @ w).view(2, 3, 5)
    return F.log_softmax(scores.view(6, 5), -1)[:, 0].mean(), scores


def two_heads(x, w):
    hidden = (x @ w).sin()
    return hidden.sum(1), (hidden.t() @ hidden).exp().mean(0) * 2


def twice_the_same(x, w):
    y = x * w.sum()
    return y * 2, y.view(-1).unsqueeze(0)


def not_known_to_be_linear(x, w):
    return x.cumsum(1).sin(), (x.detach() * w.sum()).cumsum(0)


class Shifted(torch.autograd.Function):
    """A backward that is not linear, as only the user can write one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone(), x * 2

    @staticmethod
    def backward(ctx, first, second):
        return ctx.saved_tensors[0] + second + 0 * first


def shifted(x, w):
    one, two = Shifted.apply(x)
    return one * w.sum(), two


PROGRAMS = [loss_and_scores, two_heads, twice_the_same, not_known_to_be_linear, shifted]


def backward_of(joint_of, program, tracing_mode="fake"):
    x, w = leaf(6, 4), leaf(4, 5, seed=1)
    joint, count = joint_of(program, x, w, tracing_mode=tracing_mode)
    result = partition(joint, count)
    outputs = result.forward(x.detach(), w.detach())
    return result, list(outputs[count:]), [torch.randn_like(o) for o in outputs[:count]]


@pytest.mark.covers("F4.29")
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_backward_without_a_tangent_gives_what_zeros_in_its_place_give(joint_of, program, missing):
    torch.manual_seed(2)
    result, saved, tangents = backward_of(joint_of, program)
    tangents[missing] = torch.zeros_like(tangents[missing])
    expected = result.backward(*saved, *tangents)
    without = without_tangents(result.backward, [len(saved) + missing])
    given = [None if i == missing else t for i, t in enumerate(tangents)]
    got = without(*saved, *given)
    torch.testing.assert_close(list(got), list(expected))
    memory = {t.untyped_storage().data_ptr() for t in saved}
    assert all(g is None or g.untyped_storage().data_ptr() not in memory for g in got)


@pytest.mark.covers("F4.29")
def test_no_zeros_are_made_where_a_gradient_is_only_added_to(joint_of):
    result, saved, _ = backward_of(joint_of, loss_and_scores)
    without = without_tangents(result.backward, [len(saved) + 1])
    targets = [node.target for node in without.graph.nodes]
    assert aten.add.Tensor not in targets and aten.full.default not in targets
    assert len(without.graph.find_nodes(op="placeholder")) == len(saved) + 2
    before = [node.target for node in result.backward.graph.nodes]
    assert aten.add.Tensor in before  # the original stays


@pytest.mark.covers("F4.29")
def test_the_part_of_a_graph_behind_a_missing_tangent_is_not_computed(joint_of):
    result, saved, _ = backward_of(joint_of, two_heads)
    without = without_tangents(result.backward, [len(saved) + 1])
    count = [sum(n.target is aten.mm.default for n in g.graph.nodes) for g in (result.backward, without)]
    assert count[1] < count[0]


@pytest.mark.covers("F4.29")
def test_tangents_of_sizes_that_are_not_known_stay(joint_of):
    result, _, _ = backward_of(joint_of, loss_and_scores, tracing_mode="symbolic")
    inputs = result.backward.graph.find_nodes(op="placeholder")
    tangents = [place for place, node in enumerate(inputs) if "tangents" in node.name]
    assert any(type(size) is not int for size in inputs[tangents[1]].meta["val"].shape)
    assert without_tangents(result.backward, [tangents[1]]) is None


@pytest.mark.covers("F4.29")
def test_unwanted_results_are_none_and_not_computed(joint_of):
    result, saved, tangents = backward_of(joint_of, two_heads)
    expected = result.backward(*saved, *tangents)
    without = without_tangents(result.backward, [len(saved) + 1], [1])
    only = without_tangents(result.backward, [], [1])
    for graph, given in ((without, [tangents[0], None]), (only, tangents)):
        got = graph(*saved, *given)
        assert len(got) == len(expected) and got[1] is None and got[0] is not None
        assert len(graph.graph.nodes) < len(result.backward.graph.nodes)
    torch.testing.assert_close(only(*saved, *tangents)[0], expected[0])
    assert all(node is not None for node in result.backward.graph.output_node().args[0])  # the original stays
