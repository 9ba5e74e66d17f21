"""Functions of wrapper subclasses: the contract of the dense graph, and that of the caller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    OverlappingMutation,
    Unsupported,
    analyze,
    fake_arguments,
)
from aotkit_functionalize.records import MutationKind, OutputKind
from aotkit_functionalize.subclasses import SubclassBoundary, subclass_key, tensors_inside


def two(*sizes: int) -> TwoTensor:
    return TwoTensor(torch.randn(*sizes), torch.randn(*sizes))


def boundary_of(metadata: GraphMetadata) -> SubclassBoundary:
    """The caller's side of ``metadata``, which can be written and read back."""
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    assert metadata.subclasses is not None
    return metadata.subclasses


@pytest.mark.covers("F1.2", "F2.31")
@pytest.mark.parametrize("depth", [1, 2])
def test_the_innermost_tensors_are_the_inputs_and_results_of_the_dense_graph(depth: int) -> None:
    x = two(3, 4) if depth == 1 else TwoTensor(two(3, 4), two(3, 4))
    y = torch.randn(3, 4, requires_grad=True)
    metadata = analyze(lambda x, y: [x * y, y.sin()], [x, y])
    boundary = boundary_of(metadata)
    assert len(metadata.inputs) == 2**depth + 1 and metadata.num_forward_outputs == 2**depth + 1
    assert len(boundary.outer.inputs) == 2 and boundary.outer.num_forward_outputs == 2
    assert [len(made.parts) for made in boundary.forward] == [2**depth, 1]
    assert list(boundary.dense_positions(1)) == [2**depth]
    assert metadata.is_training and [t.forward_output for t in metadata.tangents] == [-1] * 2**depth + [2**depth]
    assert [subclass is not None for subclass in boundary.tangents] == [True, False]
    assert str(boundary.inputs[0]).startswith("TwoTensor(a: " + "TwoTensor(a: " * (depth - 1))


def test_without_a_subclass_there_is_no_second_contract() -> None:
    assert analyze(lambda y: [y.sin()], [torch.randn(3)]).subclasses is None


@pytest.mark.covers("F2.34")
def test_writes_and_views_are_told_of_the_wrapper_and_of_the_tensors_inside() -> None:
    def fn(x, y):
        x.a.add_(1)
        return [y.t(), y.detach(), TwoTensor(y.a, y.b * 2), y]

    metadata = analyze(fn, [two(3, 4), two(3, 4)])
    boundary = boundary_of(metadata)
    kinds = [info.mutation for info in metadata.inputs]
    assert kinds == [MutationKind.DATA, *[MutationKind.NONE] * 3]
    assert [info.mutation for info in boundary.outer.inputs] == [MutationKind.DATA, MutationKind.NONE]
    assert [(o.kind, o.base) for o in boundary.outer.outputs] == [
        (OutputKind.ALIAS_OF_INPUT, 1),
        (OutputKind.ALIAS_OF_INPUT, 1),
        (OutputKind.FRESH, None),
        (OutputKind.INPUT, 1),
    ]
    updated, mixed = boundary.forward
    assert [(p.source, p.index) for p in updated.parts] == [("forward", 0), ("input", 1)]
    assert [(p.source, p.index) for p in mixed.parts] == [("input", 2), ("forward", 1)]


@pytest.mark.covers("F2.33")
def test_symbolic_sizes_are_those_of_the_tensors_inside() -> None:
    metadata = analyze(lambda x: [x * 2], [two(3, 4)], dynamic=True)
    boundary = boundary_of(metadata)
    assert boundary.inputs[0] is not None and boundary.forward[0].subclass is not None
    assert (
        boundary.inputs[0].leaves[0].sizes == boundary.forward[0].subclass.meta.sizes == metadata.inputs[0].meta.sizes
    )
    assert all(isinstance(size, str) for size in metadata.inputs[0].meta.sizes) and not boundary.sizes


def test_the_key_of_a_subclass_tells_what_a_graph_is_specialised_to() -> None:
    x = two(3, 4)
    key = subclass_key(x, sizes=True)
    assert key == subclass_key(two(3, 4), sizes=True) and hash(key) == hash(subclass_key(two(3, 4), sizes=True))
    others = [two(4, 3), TwoTensor(x, x), two(3, 4).requires_grad_(), TwoTensor(x.a.double(), x.b.double())]
    assert all(subclass_key(other, sizes=True) != key for other in others)
    assert subclass_key(two(4, 3), sizes=False) == subclass_key(x, sizes=False)
    assert len(list(tensors_inside(TwoTensor(x, x)))) == 4


def test_records_of_another_form_are_not_read() -> None:
    raw = boundary_of(analyze(lambda x: [x * 2], [two(3)])).to_raw()
    with pytest.raises(ValueError, match="this is no aotkit subclass boundary"):
        SubclassBoundary.from_raw({**raw, "format": "Other"})
    absent = replace(boundary_of(analyze(lambda x: [x * 2], [two(3)])), inputs=()).to_raw()
    assert SubclassBoundary.from_raw(absent).inputs == ()


class NoProtocol(torch.Tensor):
    """Cannot be taken apart."""


def test_a_subclass_that_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"input 0 is a tensor subclass \(NoProtocol\)"):
        analyze(lambda x: [x * 2], [torch.randn(3).as_subclass(NoProtocol)])


class Trained(TwoTensor):
    """Requires gradients whenever it is put together."""

    @staticmethod
    def __tensor_unflatten__(inner, context, sizes, strides):
        return Trained(inner["a"], inner["b"]).requires_grad_()


@pytest.mark.parametrize("grad", [False, True])
def test_an_argument_requires_gradients_if_the_callers_does_whatever_its_class_says(grad: bool) -> None:
    _, parts = fake_arguments([torch.randn(3), torch.randn(3)])
    metadata = analyze(lambda x: [x * 2], [Trained(*parts).requires_grad_(grad)])
    assert metadata.is_training is grad and metadata.differentiable_inputs == ((0, 1) if grad else ())


def _each(*steps):
    return [steps[-1]]


def _grad() -> TwoTensor:
    return two(4, 6).requires_grad_() * 1


resize_storage = torch.ops.inductor.resize_storage_bytes_
REFUSED = {
    "storage": (lambda x, y: _each(resize_storage(x.a, 0), 0), two(4, 6), "replaced or resized"),
    "leaf": (lambda x, y: _each(x.mul_(2), 0), two(4, 6).requires_grad_(), "is a leaf that requires grad"),
    "enters": (lambda x, y: _each(x.requires_grad_(), 0), two(4, 6), r"requires_grad changed \(requires_grad_\)"),
    "leaves": (lambda x, y: _each(x.detach_(), 0), _grad(), r"requires_grad changed \(detach_"),
    "shape": (lambda x, y: _each(x.t_(), 0), two(4, 6), "has its sizes or strides changed in place"),
    "data": (lambda x, y: [x * 2, y.nonzero()], two(4, 6), "a size depends on the elements of a tensor"),
    "leaf result": (lambda x, y: [(x * 2).requires_grad_()], two(4, 6), "requires grad and has no history"),
    "other tensors": (lambda x, y: _each(setattr(x, "a", y * 2), 0), two(4, 6), "is given other tensors to hold"),
    "bits": (lambda x, y: [torch._neg_view(y * 2), x * 1], two(4, 6), "lazily conjugated or negated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_says_is_refused(name: str) -> None:
    fn, x, text = REFUSED[name]
    with pytest.raises(Unsupported, match=text):
        analyze(fn, [x, torch.randn(4, 6)])


@pytest.mark.parametrize("fn", [lambda x, y: [x * 2], lambda x, y: [TwoTensor(y * 2, y + 1)]])
def test_subclasses_need_the_functional_mode(fn) -> None:
    """What they do to the tensors inside was computed with the functional tensors themselves: the process died."""
    for x in (two(4, 6), torch.randn(4, 6)):
        if fn(x, x)[0].__class__ is TwoTensor:
            with pytest.raises(Unsupported, match="the dispatcher's functional layer"):
                analyze(fn, [x, torch.randn(4, 6)], layer=FunctionalLayer.DISPATCHER)


def test_plain_results_beside_wrappers_keep_their_records() -> None:
    def fn(x, y):
        z = y * 2
        return [x * 2, z[1:], z.t(), 3, None, y, y[1:], x.shape[0]]

    metadata = analyze(fn, [two(4, 6), torch.randn(4, 6)], dynamic=True)
    outer = boundary_of(metadata).outer
    assert [o.kind for o in outer.outputs] == [
        OutputKind.FRESH,
        *[OutputKind.ALIAS_OF_INTERMEDIATE] * 2,
        *[OutputKind.CONSTANT] * 2,
        OutputKind.INPUT,
        OutputKind.ALIAS_OF_INPUT,
        OutputKind.SYMINT,
    ]
    assert [o.base for o in outer.outputs[1:3]] == [0, 0] and [o.base for o in outer.outputs[5:7]] == [1, 1]
    assert [o.constant for o in outer.outputs[3:5]] == [3, None] and len(outer.intermediate_bases) == 1


def test_plain_arguments_that_share_memory_are_named_by_the_callers_numbers() -> None:
    base = torch.rand(9)
    with pytest.raises(OverlappingMutation) as refusal:
        analyze(lambda x, y, z: [y.mul_(2), x * 1], [two(4, 6), base[:5], base[4:]])
    assert refusal.value.groups == ((1, 2),) and refusal.value.mutated == (1,)
