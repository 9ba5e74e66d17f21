"""Wrappers that hold more than tensors, and whose sizes are those of no tensor inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    Unsupported,
    analyze,
    fake_arguments,
    fakes,
    function_inputs,
    functional_layer,
)
from aotkit_functionalize._torch_compat import fakes_other_attributes
from aotkit_functionalize.effects import ordered_effects
from aotkit_functionalize.records import OutputKind
from aotkit_functionalize.subclasses import SymbolicDim
from aotkit_functionalize.subclasses.meta import Opaque, SubclassBoundary
from aotkit_functionalize.tracing import finish_tokens

pytestmark = pytest.mark.covers("F1.2", "F2.31")
needs_other_attributes = pytest.mark.skipif(
    not fakes_other_attributes(), reason="refused before torch 2.12, see the last test"
)


class Label(OpaqueBase):
    """What a sheet refers to, no tensor."""


register_opaque_type(Label, typ="reference")


class Sheet(Tensor):
    """A matrix in a flat tensor, with a label, a unit and (in its context) the number of its rows."""

    flat: Tensor
    label: Label
    unit: Any

    @staticmethod
    def __new__(cls, flat: Tensor, label: Label, unit: Any, sizes: Any) -> Sheet:
        strides = torch._prims_common.make_contiguous_strides_for(tuple(sizes))
        return torch.Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=flat.dtype)

    def __init__(self, flat: Tensor, label: Label, unit: Any, sizes: Any) -> None:
        self.flat, self.label, self.unit = flat, label, unit

    def __tensor_flatten__(self) -> Any:
        return ["flat", "label"], {"unit": self.unit, "rows": [tuple(self.shape[:1])]}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, sizes: Any, strides: Any) -> Sheet:
        return Sheet(inner["flat"], inner["label"], context["unit"], sizes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(a for a in pytree.tree_leaves((args, kwargs or {})) if isinstance(a, Sheet))
        inner = pytree.tree_map_only(Sheet, lambda t: t.flat.view(t.shape), (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        made = pytree.tree_map_only(Tensor, lambda t: Sheet(t.reshape(-1), first.label, first.unit, t.shape), out)
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


LABEL = Label()


def sheet(rows: int = 4, unit: Any = "m", label: Label = LABEL) -> Sheet:
    """A sheet of ``rows`` rows of three numbers."""
    return Sheet(torch.rand(3 * rows), label, unit, (rows, 3))


def two(*sizes: int) -> TwoTensor:
    return TwoTensor(torch.rand(*sizes), torch.rand(*sizes))


def boundary_of(metadata: GraphMetadata) -> SubclassBoundary:
    """The caller's side of ``metadata``, which can be written and read back."""
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    assert metadata.subclasses is not None
    return metadata.subclasses


@pytest.mark.parametrize("grad", [False, True])
@needs_other_attributes
def test_sizes_that_no_tensor_inside_has_are_inputs_of_the_dense_graph(grad: bool) -> None:
    metadata = analyze(lambda x, y: [x * 2, y], [sheet().requires_grad_(grad), torch.rand(2)], dynamic=True)
    boundary = boundary_of(metadata)
    assert [(s.input_index, s.source, s.dim) for s in boundary.sizes] == [(0, "size", 0), (0, "size", 1)]
    assert [i.kind.value for i in metadata.inputs] == ["tensor", "tensor", "symint", "symint"]
    made = boundary.forward[0]
    assert made.subclass is not None and made.subclass.meta.sizes == tuple(s.name for s in boundary.sizes)
    assert made.subclass.type.context == {"unit": "m", "rows": [(SymbolicDim(boundary.sizes[0].name),)]}
    assert metadata.is_training is grad and metadata.differentiable_inputs == ((0,) if grad else ())
    assert boundary.outer.differentiable_inputs == ((0,) if grad else ())
    assert [t.forward_output for t in metadata.tangents] == ([-1] if grad else [])
    assert metadata.forward_requires_grad == ((grad,) if metadata.num_forward_outputs == 1 else ())


def test_gradients_are_wanted_of_the_tensors_inside_of_what_requires_grad() -> None:
    args = [torch.rand(2), two(2), two(2).requires_grad_(), torch.rand(2).requires_grad_()]
    metadata = analyze(lambda w, x, y, z: [w * x, y * z, w * 2], args)
    assert metadata.differentiable_inputs == (3, 4, 5) and metadata.subclasses is not None
    assert metadata.subclasses.outer.differentiable_inputs == (2, 3)
    assert metadata.forward_requires_grad == (False, False, True, True, False)
    declined = analyze(lambda w, x, y, z: [w * x, y * z, w * 2], args, training=False)
    assert not declined.is_training and not declined.tangents and not any(declined.forward_requires_grad)
    assert declined.subclasses is not None and not declined.subclasses.outer.is_training


@needs_other_attributes
def test_what_is_no_tensor_is_known_by_the_argument_that_holds_it() -> None:
    other = Label()
    args = [sheet(), TwoTensor(sheet(label=other), sheet(label=other))]
    boundary = boundary_of(analyze(lambda x, y: [x * 2, y.b * 3, y * 2], args))
    attributes = [dict(made.subclass.attrs) for made in boundary.forward if made.subclass is not None]
    assert attributes[0]["label"] == Opaque(0, ("label",))
    assert attributes[1]["label"] == Opaque(1, ("a", "label"))
    assert "opaque" in str(boundary.inputs[0])
    with pytest.raises(Unsupported, match="holds in label a Label that is neither a tensor nor an argument"):
        analyze(lambda x: [Sheet(x.flat * 2, Label(), "m", x.shape)], [sheet()])


@needs_other_attributes
def test_what_is_no_tensor_may_be_an_argument_by_itself() -> None:
    label = Label()
    metadata = analyze(lambda x, _, other: [Sheet(x.flat * 2, other, "m", x.shape)], [sheet(), 3, label])
    (made,) = boundary_of(metadata).forward
    assert made.subclass is not None and dict(made.subclass.attrs)["label"] == Opaque(2, ())


def _unit(x: Any, unit: str) -> list[Any]:
    x.mul_(2)
    x.unit = unit
    return []


@needs_other_attributes
def test_a_context_may_not_change_with_a_write() -> None:
    assert boundary_of(analyze(lambda x: _unit(x, "m"), [sheet()])).outer.num_mutated == 1
    with pytest.raises(Unsupported, match="input 0 has another context after it is written to"):
        analyze(lambda x: _unit(x, "s"), [sheet()])


PARTS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "an argument": (lambda x, y: TwoTensor(y, y), [("input", 2, False), ("input", 2, False)]),
    "detached": (lambda x, y: TwoTensor(x.b, x.a), [("input", 1, False), ("input", 0, False)]),
    "views of an argument": (lambda x, y: TwoTensor(x.b[1:], x.a[1:]), [("input", 1, True), ("input", 0, True)]),
    "view and value": (lambda x, y: TwoTensor(x.a[:3], x.b[:3] * 2), [("input", 0, True), ("forward", 0, False)]),
    "views of one value": (lambda x, y: (lambda z: TwoTensor(z[:3], z[:3].view_as(z[:3])))(x.a * 2),
                           [("forward", 0, True), ("forward", 0, True)]),
    "a value and its view": (lambda x, y: (lambda z: TwoTensor(z, z.view_as(z)))(x.a * 2),
                             [("forward", 0, False), ("forward", 0, True)]),
    "twice the same": (lambda x, y: (lambda z: TwoTensor(z, z))(x.a * 2),
                       [("forward", 0, False), ("forward", 0, False)]),
    "written": (lambda x, y: (x.a.mul_(2), TwoTensor(x.a, x.b * 1))[1],
                [("input", 0, False), ("forward", 1, False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_inputs_or_results_of_the_dense_graph_or_views_of_these(name: str) -> None:
    fn, expected = PARTS[name]
    boundary = boundary_of(analyze(lambda x, y: [fn(x, y)], [two(4, 2), torch.rand(4, 2)]))
    made = boundary.forward[boundary.outer.num_mutated]
    assert [(p.source, p.index, p.view is not None) for p in made.parts] == expected
    for part in made.parts:
        assert (part.base_dtype is None) is (part.view is None)
        if part.view is not None:
            assert part.view.dtype == "float32" and not part.view.requires_grad
            assert part.view.strides == (2, 1) and part.view.sizes in ((4, 2), (3, 2))
            assert part.view.offset_delta == (2 if name == "views of an argument" else 0)


@needs_other_attributes
def test_a_wrapper_of_an_argument_that_requires_grad_holds_it_detached() -> None:
    y = torch.rand(12).requires_grad_()
    boundary = boundary_of(analyze(lambda x, y: [Sheet(y, x.label, "m", (4, 3)), y * 2], [sheet(), y]))
    (part,) = boundary.forward[0].parts
    assert (part.source, part.index, part.base_dtype) == ("input", 1, "float32") and part.view is not None
    assert (part.view.sizes, part.view.strides, part.view.offset_delta) == ((12,), (1,), 0)
    assert not part.view.requires_grad


class Keeps(TwoTensor):
    """Has requires_grad in its context, and what it puts together is a leaf."""

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], self.requires_grad

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, sizes: Any, strides: Any) -> Any:
        return Keeps(inner["a"], inner["b"]).requires_grad_(context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        out = []
        for name in ("a", "b"):
            inner = pytree.tree_map_only(Keeps, lambda t, name=name: getattr(t, name), (args, kwargs or {}))
            out.append(func(*inner[0], **inner[1]))
        made = cls(*out) if isinstance(out[0], Tensor) else out[0]
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


def test_a_class_that_keeps_requires_grad_enters_like_others() -> None:
    x = Keeps(torch.rand(3), torch.rand(3)).requires_grad_()
    metadata = analyze(lambda x: [x * 2, x.view(3, 1)], [x])
    outer = boundary_of(metadata).outer
    assert metadata.is_training and outer.inputs[0].is_leaf and outer.differentiable_inputs == (0,)
    assert [o.kind for o in outer.outputs] == [OutputKind.FRESH, OutputKind.ALIAS_OF_INPUT]
    assert outer.outputs[1].view is not None and outer.outputs[1].view.requires_grad


def test_views_of_wrappers_are_views_and_detached_ones_are_none() -> None:
    def detached(fn: Callable[[Any], list[Any]], x: Any) -> list[Any]:
        outputs = boundary_of(analyze(fn, [x])).outer.outputs
        return [(o.kind, o.view is not None and o.view.detached, o.view is not None and o.view.under_no_grad)
                for o in outputs]  # fmt: skip

    alias, of_output = OutputKind.ALIAS_OF_INPUT, OutputKind.ALIAS_OF_OUTPUT
    assert detached(lambda x: [x.t(), x.detach()], two(4, 2)) == [(alias, False, False), (alias, True, False)]
    grad = two(4, 2).requires_grad_()
    assert detached(lambda x: [x.t(), x.detach()], grad) == [(alias, False, False), (alias, True, False)]
    found = detached(lambda x: (lambda y: [y, y.t(), y.detach()])(x * 2), grad)
    assert found[1:] == [(of_output, False, False), (of_output, True, False)]


@pytest.mark.parametrize("grad", [False, True])
def test_only_what_is_neither_passed_nor_returned_becomes_an_extra_base(grad: bool) -> None:
    def bases(fn: Callable[[Any], list[Any]]) -> list[int]:
        outer = boundary_of(analyze(fn, [two(4, 2).requires_grad_(grad)])).outer
        return [len(outer.intermediate_bases), outer.num_forward_outputs]

    assert bases(lambda x: [x.t(), x.view(8)]) == [0, 0]
    assert bases(lambda x: (lambda y: [y, y.t(), y.view(8)])(x * 2)) == [0, 1]
    assert bases(lambda x: (lambda y: [y.t(), y.view(8)])(x * 2)) == [1, 1]


def test_what_was_detached_and_given_another_history_is_refused() -> None:
    def fn(x: Any) -> list[Any]:
        y = x * 2
        d = y.detach()
        d.mul_(x)
        return [y, d]

    with pytest.raises(Unsupported, match="from which it was detached before it was written to"):
        analyze(fn, [two(4, 2).requires_grad_() * 1])


def test_operations_with_effects_are_chained_by_tokens_and_named() -> None:
    printed = torch.ops.aten._print.default

    def fn(x: Tensor) -> list[Tensor]:
        printed("first")
        printed("second")
        return [x * 2]

    assert [(e.kind, e.value) for e in analyze(fn, [torch.rand(3)]).effects] == [("token", "Ordered")]
    mode, plain = fake_arguments([torch.rand(3)])
    with mode, functional_layer(FunctionalLayer.MODE):
        finish_tokens()
        assert ordered_effects() == ()
        (entered,) = function_inputs(plain, [torch.rand(3)])
        fn(entered.value)
        assert ordered_effects() == ("Ordered",)
        finish_tokens()
        assert ordered_effects() == ()
    with functional_layer(FunctionalLayer.DISPATCHER):
        assert ordered_effects() == ()


def test_before_torch_2_12_an_attribute_that_is_no_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fakes_other_attributes() == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12))
    monkeypatch.setattr(fakes, "fakes_other_attributes", lambda: False)
    with pytest.raises(Unsupported, match=r"input 1, a Sheet, holds in label a Label that is no tensor.*2\.12"):
        analyze(lambda x, y: [x * 2], [torch.ones(2), sheet()])
