"""The metadata that one run of a function gives."""

from __future__ import annotations

import json

import pytest
import torch

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    OverlappingMutation,
    Unsupported,
    analyze,
    functional_layer,
)
from aotkit_functionalize.records import InputKind, MutationKind, OutputKind
from aotkit_functionalize.tracing import to_functional


@pytest.fixture(params=list(FunctionalLayer), ids=lambda layer: layer.value)
def layer(request):
    return request.param


def everything(x, y, z):
    x.mul_(y)
    z.t_()
    a = x.sin()
    return [a.view(-1), a[1], x, x[1:], y + 1, None, 3, z]


@pytest.mark.covers("F1.6", "F1.7", "F1.28", "F1.29", "F1.30")
def test_one_run_tells_mutations_and_aliases(layer):
    calls = []

    def counted(*args):
        calls.append(args)
        return everything(*args)

    args = [torch.ones(2, 3, requires_grad=True) * 1, torch.ones(2, 3), torch.ones(4, 5)]
    metadata = analyze(counted, args, layer=layer)
    assert len(calls) == 1
    assert [i.mutation for i in metadata.inputs] == [MutationKind.DATA, MutationKind.NONE, MutationKind.METADATA]
    assert [o.kind.value for o in metadata.outputs] == [
        *["alias_of_intermediate"] * 2,
        "input",
        "alias_of_input",
        "fresh",
        "constant",
        "constant",
        "input",
    ]
    assert metadata.inputs[2].new_view is not None and metadata.inputs[2].new_view.strides == (1, 5)
    assert metadata.outputs[3].view is not None and metadata.outputs[3].view.offset_delta == 3
    assert metadata.num_mutated == 1 and len(metadata.intermediate_bases) == 1 and metadata.num_forward_outputs == 3
    assert [t.forward_output for t in metadata.tangents] == [0, 2] and metadata.differentiable_inputs == (0,)
    assert metadata.is_training and metadata.forward_requires_grad == (True, False, True)
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    assert torch.equal(args[2], torch.ones(4, 5)), "the caller's tensors are left alone"


@pytest.mark.covers("F2.10", "F1.50")
def test_training_is_decided_by_grad_mode_and_what_is_computed(layer):
    x = torch.ones(3, requires_grad=True)
    assert analyze(lambda x: [x * 2], [x], layer=layer).is_training
    assert not analyze(lambda x: [x * 2], [x], layer=layer, training=False).is_training
    with torch.no_grad():
        assert not analyze(lambda x: [x * 2], [x], layer=layer).is_training
    with pytest.raises(Unsupported, match="nothing that the function computes requires grad"):
        analyze(lambda x: [x * 2], [torch.ones(3)], layer=layer, training=True)


@pytest.mark.covers("F1.40", "F2.6")
def test_sizes_become_text_over_symbols_bound_from_the_inputs(layer):
    metadata = analyze(lambda x: [x.reshape(-1)[2:], x.shape[0] // 2], [torch.ones(6, 4)], dynamic=True, layer=layer)
    names = {b.name: (b.source, b.dim) for b in metadata.symbols}
    rows, columns = metadata.inputs[0].meta.sizes
    assert names == {rows: ("size", 0), columns: ("size", 1)}
    (size,) = metadata.outputs[0].meta.sizes
    assert eval(size, {}, {rows: 6, columns: 4}) == 22 and metadata.outputs[0].dynamic_dims == (0,)
    assert metadata.outputs[1].kind is OutputKind.SYMINT


def test_inputs_that_are_no_tensors_are_recorded_as_such():
    metadata = analyze(lambda x, n, s: [x * n], [torch.ones(2), 3, "a"])
    assert [i.kind for i in metadata.inputs] == [InputKind.TENSOR, InputKind.OTHER, InputKind.OTHER]


@pytest.mark.covers("F1.46", "F1.47")
def test_overlapping_inputs_are_named_if_one_is_mutated(layer):
    base = torch.ones(10)
    with pytest.raises(OverlappingMutation) as refusal:
        analyze(lambda a, b: [a.mul_(2), b], [base[:6], base[4:]], layer=layer)
    assert refusal.value.groups == ((0, 1),)
    assert analyze(lambda a, b: [a.mul_(2), b], [base[:5], base[5:]], layer=layer).num_mutated == 1
    assert analyze(lambda a, b: [a * b], [base[:6], base[4:]], layer=layer).num_mutated == 0


@pytest.mark.covers("F1.36")
def test_an_output_and_its_detached_twin_share_memory_and_differ_in_grad(layer):
    metadata = analyze(lambda x: (lambda y: [y, y.detach()])(x * 2), [torch.ones(3, requires_grad=True)], layer=layer)
    assert [o.kind for o in metadata.outputs] == [OutputKind.FRESH, OutputKind.ALIAS_OF_OUTPUT]
    assert [o.meta.requires_grad for o in metadata.outputs] == [True, False]


def test_one_object_returned_twice_is_recorded_as_one(layer):
    metadata = analyze(lambda x: (lambda y: [y, y, x[1:]])(x * 2), [torch.ones(3)], layer=layer)
    assert [o.same_as for o in metadata.outputs] == [None, 0, None]
    assert metadata.outputs[0].graph_output == metadata.outputs[1].graph_output == 0


@pytest.mark.covers("F1.48", "F1.60")
def test_refusals_say_what_why_and_what_to_do():
    class Mine(torch.Tensor):
        pass

    cases = [
        (lambda x: [x.set_(torch.ones(9))], torch.ones(3), "another storage"),
        (lambda x: [{"a": x}], torch.ones(3), "output 0 is a dict"),
        (lambda x: [x], torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda x: [x], torch.ones(2).as_subclass(Mine), "tensor subclass"),
    ]
    for fn, arg, text in cases:
        with pytest.raises(Unsupported, match=text) as refusal:
            analyze(fn, [arg])
        assert refusal.value.what and refusal.value.why and refusal.value.do


def test_a_refusal_names_the_users_line():
    stack = '  File "a.py", line 3, in f\n    g(x)\n  File "b.py", line 7, in g\n    x.set_(y)\n'
    refusal = Unsupported("x is set", "it cannot be", "Don't").at(stack)
    assert "b.py:7: x.set_(y)" in str(refusal)
    assert refusal.at('  File "c.py", line 1, in h\n    z') is refusal
    overlap = OverlappingMutation(((0, 1),), (0,)).at(stack)
    assert isinstance(overlap, OverlappingMutation) and overlap.groups == ((0, 1),) and "b.py:7" in str(overlap)


def test_writes_to_lists_of_tensors_move_their_version_counters():
    def f(x, y):
        torch._foreach_add_([x, y[0]], 1.0)
        torch._foreach_mul_([x], 2.0)
        return []

    metadata = analyze(f, [torch.zeros(3), torch.zeros(2, 3)])
    assert [info.version_steps for info in metadata.inputs] == [2, 1]
    assert not any(info.mutation_hidden_from_autograd for info in metadata.inputs)
    with pytest.raises(Unsupported, match="made by expand"):
        analyze(lambda x: [torch._foreach_add_([x.expand(2, 3)], 1.0)], [torch.zeros(3)])


def test_tangents_begin_at_their_storage_and_the_text_of_records_is_canonical(layer):
    metadata = analyze(lambda x: [(x * 2)[1:], x.t() * 1], [torch.ones(4, 6, requires_grad=True)], layer=layer)
    assert [t.meta.storage_offset for t in metadata.tangents] == [0, 0]
    assert not any(t.meta.requires_grad for t in metadata.tangents)
    text = metadata.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_a_view_may_change_its_shape_in_place_where_no_gradient_is_wanted(layer):
    def fn(x):
        with torch.enable_grad():
            y = x * 2
        y.t_()
        return [(x * 2)[1:].t_(), x[1:].t_(), y]

    x = torch.ones(4, 6, requires_grad=True)
    with torch.no_grad():
        metadata = analyze(fn, [x], layer=layer)
    assert [o.meta.sizes for o in metadata.outputs] == [(6, 3), (6, 3), (6, 4)]


def test_views_in_the_functional_mode_have_the_storage_of_what_they_are_taken_of():
    plain = torch.ones(4, 6)
    with functional_layer(FunctionalLayer.MODE):
        x = to_functional(plain)
        views = [x[1], x.t(), x.view(-1), x.expand(2, 4, 6), x.unbind()[1]]
        assert {v.untyped_storage()._cdata for v in views} == {x.untyped_storage()._cdata}
        assert (x * 2).untyped_storage()._cdata != x.untyped_storage()._cdata
