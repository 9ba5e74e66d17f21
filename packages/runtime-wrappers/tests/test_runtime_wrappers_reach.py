"""Gradients that are None, foreign gradients, new leaves, grad mode in spite of the caller's, written down and read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import GraphMetadata, records
from aotkit_runtime_wrappers import DoubleBackwardError, SerializableFunction, WrapperPlan, bind, build_plan, interpret
from aotkit_runtime_wrappers.errors import MetadataMismatchError, PlanError

TENSOR, FRESH = records.InputKind.TENSOR, records.OutputKind.FRESH
LIKE = records.TensorMeta("float32", "cpu", (3,), (1,), 0, True)
TANGENT = replace(LIKE, requires_grad=False)
HOWS = pytest.mark.parametrize("how", [bind, interpret], ids=["bind", "interpret"])


def two_outputs(reached_by=((0,), (0, 1)), **changes):
    """``x * y`` and ``y * 2``: the first gradient comes from the first output alone."""
    made = GraphMetadata(
        inputs=tuple(records.InputInfo(i, TENSOR, LIKE) for i in range(2)),
        outputs=tuple(records.OutputInfo(i, FRESH, LIKE, graph_output=i) for i in range(2)),
        tangents=tuple(records.TangentInfo(i, TANGENT) for i in range(2)),
        num_forward_outputs=2,
        forward_requires_grad=(True, True),
        differentiable_inputs=(0, 1),
        is_training=True,
        reached_by=reached_by,
    )
    return replace(made, **changes)


def forward(args):
    x, y = args
    args.clear()
    return [x * y, y * 2, x, y]


def backward(args):
    x, y, first, second = args
    args.clear()
    return [first * y, first * x + second * 2]


forward._boxed_call = backward._boxed_call = True


def leaves():
    return [torch.arange(1.0, 4).requires_grad_(), torch.full((3,), 5.0).requires_grad_()]


def plan_of(described):
    plan = build_plan(described, num_saved_tensors=2, saved_inputs=(0, 1))
    assert WrapperPlan.from_json(plan.to_json()) == plan
    return plan


@pytest.mark.covers("F4.29")
@HOWS
def test_an_input_behind_an_ignored_output_has_no_gradient_in_whatever_order_calls_come(how):
    call = how(plan_of(two_outputs()), forward, backward)
    for which in (1, 0, 1, None, 0):
        x, y = leaves()
        outputs = call([x, y])
        given = outputs if which is None else [outputs[which]]
        found = torch.autograd.grad([o.sum() for o in given], [x, y], allow_unused=True)
        expected = {0: [y, x], 1: [None, torch.full((3,), 2.0)], None: [y, x + 2]}[which]
        assert [g is None for g in found] == [e is None for e in expected]
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right)


@pytest.mark.covers("F4.29")
@HOWS
def test_without_a_record_every_gradient_comes_from_every_tangent(how):
    x, y = leaves()
    _, second = how(plan_of(two_outputs(reached_by=())), forward, backward)([x, y])
    second.sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros(3))


@pytest.mark.covers("F4.29", "F4.30")
@HOWS
def test_a_refused_second_derivative_leaves_the_first_ones_right_and_none_where_they_are(how):
    x, y = leaves()
    _, second = how(plan_of(two_outputs()), forward, backward)([x, y])
    first = torch.autograd.grad(second.square().sum(), [x, y], create_graph=True, allow_unused=True)
    assert first[0] is None
    torch.testing.assert_close(first[1], 8 * y)
    with pytest.raises(DoubleBackwardError):
        first[1].sum().backward()


@pytest.mark.covers("F4.29")
def test_a_backward_for_missing_tangents_is_asked_for_once_and_gets_none_in_their_place():
    asked = []

    def special(missing):
        asked.append(missing)

        def run(args):
            assert args[2] is None and args[3] is not None
            return [torch.full((3,), 9.0), args[3] * 2]

        run._boxed_call = True
        return run

    call = bind(plan_of(two_outputs()), forward, lambda: backward, specialize=special)
    for _ in range(2):
        x, y = leaves()
        call([x, y])[1].sum().backward()
        assert x.grad is None and y.grad.tolist() == [2, 2, 2]
    assert asked == [(True, False)]
    x, y = leaves()
    call([x, y])[0].sum().backward()
    torch.testing.assert_close(x.grad, y.detach())
    assert asked == [(True, False)]


def test_a_record_for_some_of_the_inputs_only_is_refused():
    with pytest.raises(PlanError, match="1 of 2 inputs say which tangents reach them"):
        build_plan(two_outputs(reached_by=((0,),)), num_saved_tensors=2)


class BackwardGraph(torch.nn.Module):
    def forward(self, x, y, first, second):
        return [first * y, first * x + second * 2]


@pytest.mark.covers("F6.1")
def test_a_subclass_as_the_gradient_of_a_plain_output_runs_the_backward_graph():
    graph = torch.fx.symbolic_trace(BackwardGraph())
    call = bind(plan_of(two_outputs()), forward, backward, backward_graph=graph)
    gradient = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    x, y = leaves()
    outputs = call([x, y])
    torch.autograd.backward(outputs, [gradient, torch.ones(3)])
    assert x.grad.a.tolist() == [5, 5, 5] and x.grad.b.tolist() == [10, 10, 10]
    assert y.grad.a.tolist() == [3, 4, 5] and y.grad.b.tolist() == [4, 6, 8]
    x, y = leaves()
    call([x, y])[1].backward(gradient)
    assert x.grad is None and y.grad.b.tolist() == [4, 4, 4]


@pytest.mark.covers("F6.1")
@pytest.mark.parametrize("create_graph", [False, True])
def test_such_a_gradient_is_refused_without_a_graph_and_for_second_derivatives(create_graph):
    graph = torch.fx.symbolic_trace(BackwardGraph()) if create_graph else None
    x, y = leaves()
    first, _ = bind(plan_of(two_outputs()), forward, backward, backward_graph=graph)([x, y])
    with pytest.raises(MetadataMismatchError, match="is a TwoTensor where the backward was compiled for a plain"):
        first.backward(TwoTensor(torch.ones(3), torch.ones(3)), create_graph=create_graph)


@HOWS
@pytest.mark.parametrize("others", [(), (records.EffectInfo("token", "Ordered"),)], ids=["alone", "with a token"])
def test_grad_mode_is_on_for_the_call_where_the_function_turns_it_on(how, others):
    effects = (records.EffectInfo("enables_grad", True), *others)
    call = how(plan_of(two_outputs(effects=effects)), forward, backward)
    x, y = leaves()
    with torch.no_grad():
        first, second = call([x, y])
        assert not torch.is_grad_enabled()
    assert first.requires_grad and second.requires_grad
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(y.grad, x.detach() + 2)


@HOWS
def test_in_inference_mode_a_function_that_turns_grad_mode_on_runs_its_forward_alone(how):
    call = how(plan_of(two_outputs(effects=(records.EffectInfo("enables_grad", True),))), forward, backward)
    with torch.inference_mode():
        x, y = leaves()  # as tensors of inference mode, which autograd does not save
        results = call([x, y])
    assert [(t.requires_grad, t.is_inference()) for t in results] == [(False, True)] * 2
    torch.testing.assert_close(results, forward([x, y])[:2])


@HOWS
def test_arguments_and_results_become_leaves_or_leave_the_graph(how):
    plain = replace(LIKE, requires_grad=False)
    inputs = (
        records.InputInfo(0, TENSOR, LIKE, sets_requires_grad=False),
        records.InputInfo(1, TENSOR, plain, sets_requires_grad=True),
        records.InputInfo(2, TENSOR, LIKE),
    )
    outputs = (records.OutputInfo(0, FRESH, plain, graph_output=0, is_new_leaf=True),)
    outputs += (records.OutputInfo(1, FRESH, plain, graph_output=1),)
    plan = build_plan(GraphMetadata(inputs, outputs, num_forward_outputs=2))
    assert WrapperPlan.from_json(plan.to_json()) == plan
    assert "in0.detach_()" in str(plan) and "in1.requires_grad_()" in str(plan)
    x, y, z = torch.ones(3).requires_grad_() * 2, torch.ones(3), torch.ones(3).requires_grad_()
    made, other = how(plan, lambda a, b, c: [a.detach() + b, b * 2])([x, y, z])
    assert [t.requires_grad for t in (x, y, z, made, other)] == [False, True, True, True, False]
    assert x.grad_fn is None and made.is_leaf


def test_a_function_is_written_down_and_read_back():
    def load(data):
        return {b"forward": forward, b"backward": backward}[data]

    function = SerializableFunction(plan_of(two_outputs()), b"forward", b"backward", load)
    data = function.serialize()
    read = SerializableFunction.deserialize(data, load)
    assert read.serialize() == data and read.plan == function.plan and read.source == function.source
    x, y = leaves()
    read([x, y])[1].sum().backward()
    assert x.grad is None and y.grad.tolist() == [2, 2, 2]
    other = data.replace(b'"version": 1}', b'"version": 7}')
    for damaged in (data[:-1], data[:-3] + b"abc", b"nothing", other):
        with pytest.raises(PlanError):
            SerializableFunction.deserialize(damaged, load)
    with pytest.raises(PlanError, match="a training plan came with no compiled backward"):
        SerializableFunction(function.plan, b"forward", None, load)
