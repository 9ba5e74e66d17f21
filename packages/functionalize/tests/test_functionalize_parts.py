"""Functional tensors, size texts and overlap: the single questions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    ModularIndexing,
    OpaqueUnaryFn_log2,
    OpaqueUnaryFn_sqrt,
    RoundDecimal,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

from aotkit_functionalize import (
    FunctionalLayer,
    Unsupported,
    collect_metadata,
    fake_arguments,
    function_inputs,
    functional_layer,
)
from aotkit_functionalize._records import Format
from aotkit_functionalize.metadata import GraphMetadata
from aotkit_functionalize.overlap import definitely_disjoint
from aotkit_functionalize.records import (
    InputInfo,
    InputKind,
    MutationKind,
    OutputInfo,
    OutputKind,
    StorageChange,
    TensorMeta,
    ViewSpec,
)
from aotkit_functionalize.symbols import _text
from aotkit_functionalize.tracing import (
    below_functional_layer,
    count_data_mutations,
    fake_twin,
    from_functional,
    has_data_mutation,
    is_autograd_identity,
    is_functional,
    reentered_inputs,
    renew,
    to_functional,
)

aten = torch.ops.aten


@pytest.fixture(params=list(FunctionalLayer), ids=lambda layer: layer.value)
def layer(request):
    return request.param


@pytest.mark.covers("F1.1", "F1.5")
def test_a_functional_tensor_shows_writes_made_through_its_views(layer):
    mode, (plain,) = fake_arguments([torch.ones(2, 3)])
    with mode, functional_layer(layer):
        x = to_functional(plain)
        assert is_functional(x) and not is_functional(plain)
        assert from_functional(x) is plain
        view = x[0]
        view.add_(1)
        assert has_data_mutation(x) and from_functional(x) is not plain
        assert is_functional(torch.ones(2))
        with below_functional_layer():
            assert not is_functional(torch.ones(2))
    assert not is_functional(torch.ones(2))


@pytest.mark.covers("F1.22")
def test_a_differentiable_input_enters_as_a_non_leaf_over_the_same_tensor(layer):
    caller = torch.ones(2, 3, requires_grad=True)
    mode, plain = fake_arguments([caller])
    with mode, functional_layer(layer):
        (entered,) = function_inputs(plain, [caller])
        assert entered.value.requires_grad and not entered.value.is_leaf and entered.leaf.is_leaf
        assert from_functional(entered.value) is plain[0]
        entered.value.mul_(2)
        (gradient,) = torch.autograd.grad(entered.value.sin().sum(), [entered.leaf])
        assert is_functional(gradient)


def test_fake_arguments_keep_their_mode_and_their_sharing():
    base = torch.ones(4)
    mode, (a, b) = fake_arguments([base[:2], base[2:]])
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.fake_mode is mode
    assert fake_arguments([a])[1][0] is a
    other, (c,) = fake_arguments([torch.ones(2)])
    assert other is not mode
    with pytest.raises(Unsupported, match="another mode"):
        fake_arguments([a, c])
    with torch.inference_mode():
        _, (inference,) = fake_arguments([torch.ones(2)])
    assert not inference.is_inference()


s0, s1 = sympy.symbols("s0 s1", positive=True, integer=True)


@pytest.mark.parametrize(
    "expr",
    [
        s0 * s1 + 1,
        s0 - 3 * s1,
        FloorDiv(s0 * s1 + 5, s1),
        FloorDiv(FloorDiv(s0, 2), s1 + 1),
        Mod(s0 + 7, 3),
        ModularIndexing(s0 * 9, 2, 5),
        Max(s0, s1 * 2 - 4),
        Min(3, s0 + s1) * 2,
        (s0 + s1) ** 2 * s1,
        -s0 * (s1 - 8),
        2 * FloorDiv(s0 + 1, 2) - Mod(s1, 2) * 3,
        sympy.Abs(s0 - s1) * 2,
        TruncToInt(0.5 * ToFloat(s0)) + 1,
        TruncToInt(ToFloat(s0) * 0.75 + 2.5),
        FloorToInt(IntTrueDiv(s0 - s1, 3)) * s1,
        CeilToInt(FloatTrueDiv(ToFloat(s0), sympy.Float(2.5))),
        CeilToInt(IntTrueDiv(s0, s1)),
        TruncToInt(0.5 * ToFloat(s0 - s1)),
        TruncToInt(FloatPow(ToFloat(s0 * s1 + 3), sympy.Float(0.5))) * 2 - s1,
        FloorToInt(OpaqueUnaryFn_sqrt(ToFloat(s0))),
        TruncToInt(1.7 * ToFloat(s0 - s1)) + 2 * s1,  # with the floats of Python from here on
        RoundToInt(IntTrueDiv(s0, s1 + 2)),
        CeilToInt(FloatPow(ToFloat(s0), sympy.Float(0.5))),
        FloorToInt(ToFloat(s0) * FloatTrueDiv(sympy.Float(8.0), ToFloat(Min(s0, s1)))),
        TruncToInt(-1.5e-05 * ToFloat(s0) + 1e17 * IntTrueDiv(s0, 7)),
    ],
    ids=str,
)
def test_size_texts_are_python_with_the_value_of_the_expression(expr):
    for a, b in [(6, 4), (1, 9), (12, 5)]:
        ours = eval(_text(expr), {"min": min, "max": max, **vars(math)}, {"s0": a, "s1": b})
        assert ours == int(expr.subs({s0: a, s1: b})), _text(expr)


UNKNOWN_ORDER = [
    TruncToInt(0.7 * ToFloat(s0) * ToFloat(s1)),
    FloorToInt(0.7 * ToFloat(s0) + IntTrueDiv(s0, 3) + 0.1),
    TruncToInt(OpaqueUnaryFn_log2(ToFloat(s0))),
    TruncToInt(RoundDecimal(0.3 * ToFloat(s0), sympy.Integer(1))),
]


@pytest.mark.parametrize("expr", [sympy.sqrt(s0), *UNKNOWN_ORDER], ids=str)
def test_an_expression_without_such_a_text_is_refused(expr):
    with pytest.raises(Unsupported, match="has no form in the metadata"):
        _text(expr)


@pytest.mark.covers("F1.47")
@pytest.mark.parametrize(
    ("first", "second", "disjoint"),
    [
        (lambda b: b[:2], lambda b: b[2:], True),
        (lambda b: b[:3], lambda b: b[2:], False),
        (lambda b: b[:, :3], lambda b: b[:, 3:], True),
        (lambda b: b[:, :4], lambda b: b[:, 3:], False),
        (lambda b: b[0], lambda b: b[1], True),
        (lambda b: b[:0], lambda b: b, True),
        (lambda b: b, lambda b: b.t(), False),
        (lambda b: b.view(torch.int32)[:2], lambda b: b[2:], True),
    ],
)
def test_disjoint_views_are_told_from_overlapping_ones(first, second, disjoint):
    base = torch.ones(4, 6)
    assert definitely_disjoint(first(base), second(base)) is disjoint
    assert definitely_disjoint(second(base), first(base)) is disjoint


def test_metadata_of_every_field_survives_json_and_another_version_is_refused():
    meta = TensorMeta("float32", "cpu", ("s0", 3), (3, 1), "s0*2", True)
    view = ViewSpec("int32", (2,), (1,), "s0 + 1", True, True)
    metadata = GraphMetadata(
        inputs=(
            InputInfo(0, InputKind.TENSOR, meta, False, MutationKind.DATA_AND_METADATA, new_view=view),
            InputInfo(
                1,
                InputKind.TENSOR,
                meta,
                mutation=MutationKind.STORAGE,
                storage=StorageChange(0, 1, True, view, "s0*4"),
            ),
        ),
        outputs=(OutputInfo(0, OutputKind.ALIAS_OF_INPUT, meta, 0, view, dynamic_dims=(0,), same_as=None),),
        intermediate_bases=(meta,),
        forward_requires_grad=(True,),
        is_training=True,
    )
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    with pytest.raises(ValueError, match="version 9"):
        GraphMetadata.from_json(metadata.to_json().replace('"version":5', '"version":9'))


def test_a_function_may_be_entered_from_within_a_run(layer):
    """Gradients reach the outer values; what the inner function writes does not."""
    caller = torch.ones(2, 3, requires_grad=True)
    mode, plain = fake_arguments([caller, 3])
    infos = [InputInfo(0, InputKind.TENSOR, is_leaf=False), InputInfo(1, InputKind.OTHER)]
    with mode, functional_layer(layer):
        outer, number = function_inputs(plain, [caller, 3])
        inner, passed = reentered_inputs([outer.value, number.value], infos)
        assert inner.leaf is outer.value and inner.requires_grad and not inner.is_leaf and passed.value == 3
        assert is_autograd_identity(inner.value.grad_fn) and not is_autograd_identity((outer.value * 2).grad_fn)
        inner.value.mul_(passed.value)
        assert has_data_mutation(inner.value) and not has_data_mutation(outer.value)
        assert torch.autograd.grad(inner.value.sum(), [outer.leaf])[0].shape == (2, 3)
        (constant,) = reentered_inputs([outer.value.detach()], infos[:1])
        assert constant.leaf is None and not constant.value.requires_grad


def test_a_renewed_tensor_and_its_views_stand_for_other_elements(layer):
    plain, other = torch.ones(2, 3), torch.full((2, 3), 5.0)
    with functional_layer(layer):
        x = to_functional(plain)
        view = x[1]
        renew(x, other)
        writes = count_data_mutations(x)
        assert from_functional(view * 1).tolist() == [5, 5, 5] and from_functional(x).tolist() == other.tolist()
        view.add_(1)
        assert from_functional(x).tolist() == [[5, 5, 5], [6, 6, 6]] and count_data_mutations(x) == writes + 1


def test_a_fake_twin_is_what_autograd_sees():
    mode, _ = fake_arguments([torch.ones(2)])
    leaf = torch.ones(2, 3, requires_grad=True)
    for value in (leaf, leaf * 2, leaf.detach()):
        twin = fake_twin(value, mode, static=True)
        assert (twin.requires_grad, twin.is_leaf) == (value.requires_grad, value.is_leaf) and twin.shape == (2, 3)


def recorded(function, *args):
    """The graph of a function's forward values, as a tracer records them."""

    def run(*plain):
        with functional_layer(FunctionalLayer.MODE) as storages:
            inputs = function_inputs(plain, args)
            outputs = function(*(i.value for i in inputs))
            modes = (torch.is_grad_enabled(), torch.is_grad_enabled())
            values = collect_metadata(inputs, outputs, grad_mode=modes, storages=storages).forward_values
            return [from_functional(value) for value in values]

    with preserve_node_meta():
        return make_fx(run, tracing_mode="fake")(*args)


@pytest.mark.parametrize("detach", [lambda y: y.data, lambda y: y[1:].detach()])
def test_late_writes_to_what_several_results_are_views_of_are_recorded(detach):
    def views(x):
        y = x * 2
        base = detach(y)
        views = [base[:1], base[1:]]
        y.add_(1)
        return views

    graph = recorded(views, torch.zeros(3))
    x = torch.arange(3.0)
    assert torch.equal(graph(x)[0], detach(x * 2 + 1))


@pytest.mark.parametrize("read", [lambda view: view * 3, lambda view: torch.cat([view, view])])
def test_a_view_that_is_taken_again_keeps_what_the_user_noted_at_it(read):
    def function(x):
        with annotate({"part": "first"}):
            y = x * 2
            view = y[1:]
        y.add_(1)
        return [read(view)]

    nodes = recorded(function, torch.zeros(3)).graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    assert [node.meta.get("custom") for node in nodes] == [{"part": "first"}] * 2


@dataclass(frozen=True)
class Counts:
    by_name: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Numbered:
    by_number: dict[int, int]


def test_records_hold_mappings_of_names() -> None:
    codec = Format(Counts, "counts", 1)
    record = Counts({"a": (1, 2), "b": ()})
    assert codec.from_text(codec.to_text(record)) == record
    with pytest.raises(TypeError, match=r"no form for dict\[int, int\]"):
        Format(Numbered, "numbered", 1).to_raw(Numbered({1: 2}))
