"""Wrappers that hold more than tensors, whose sizes are their own, and whose gradients come as something else."""

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

from aotkit_functionalize import analyze
from aotkit_functionalize._torch_compat import fakes_other_attributes
from aotkit_runtime_wrappers import bind, build_plan
from aotkit_runtime_wrappers.errors import CallingConventionError, MetadataMismatchError

Check = Callable[..., int]
pytestmark = pytest.mark.covers("F6.1")
needs_other_attributes = pytest.mark.skipif(
    not fakes_other_attributes(), reason="before torch 2.12 aotkit-functionalize refuses a sheet"
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
        ((rows,),) = context["rows"]
        assert isinstance(rows, torch.SymInt) or isinstance(sizes[0], torch.SymInt) or rows == sizes[0]
        return Sheet(inner["flat"], inner["label"], context["unit"], sizes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(a for a in pytree.tree_leaves((args, kwargs or {})) if isinstance(a, Sheet))
        inner = pytree.tree_map_only(Sheet, lambda t: t.flat.view(t.shape), (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        made = pytree.tree_map_only(Tensor, lambda t: cls(t.reshape(-1), first.label, first.unit, t.shape), out)
        return return_and_correct_aliasing(func, args, kwargs or {}, made)

    def __coerce_same_metadata_as_tangent__(self, context: Any, cls: Any = None) -> Any:
        if cls is not None:
            return self.flat.view(self.shape) if cls is Tensor else None
        if context["unit"] == "none":
            return None
        return Sheet(self.flat * 2, self.label, context["unit"], self.shape)


LABEL = Label()


def sheet(rows: int, unit: Any = "m", label: Label = LABEL, start: float = 1.0) -> Sheet:
    """A sheet of ``rows`` rows of three numbers."""
    return Sheet(torch.arange(start, start + 3 * rows), label, unit, (rows, 3))


class LabelFirst(Sheet):
    """Names what is no tensor before the tensor."""

    def __tensor_flatten__(self) -> Any:
        return ["label", "flat"], self.unit

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, sizes: Any, strides: Any) -> LabelFirst:
        return LabelFirst(inner["flat"], inner["label"], context, sizes)


PROGRAMS: dict[str, Callable[[Any, Any, Any], list[Any]]] = {
    "products": lambda x, y, z: [x * y, (x * z).sin(), z * 2],
    "itself": lambda x, y, z: [x, y * 3, x],
    "sum": lambda x, y, z: [(x * y).sum(0), x + 1],
    "write": lambda x, y, z: [x.mul_(y), z * y],
    "write inside": lambda x, y, z: [(x.flat.mul_(3), z * y)[1]],
    "inside": lambda x, y, z: [x.flat * 2, y.flat[1:] if isinstance(y, Sheet) else y[1:]],
    "view": lambda x, y, z: [x.view_as(x), x * 2, x.detach()],
    "nothing": lambda x, y, z: [],
    "sizes": lambda x, y, z: [x.shape[0], x * y.shape[0]],
}


@pytest.mark.sample(ways=2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("calls", [(), (4, 6)], ids=["fixed", "varying"])
@pytest.mark.parametrize("grads", [(), (0, 2), (1,)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
@needs_other_attributes
def test_what_a_sheet_holds_comes_out_of_it(same_as_eager: Check, program: str, grads: Any, calls: Any) -> None:
    def make(n: int = 4) -> list[Any]:
        made = [sheet(n), sheet(n, start=0.5), torch.linspace(1, 2, 3)]
        return [(v.requires_grad_() if k in grads else v) * 1 if "write" in program else
                v.requires_grad_() if k in grads else v for k, v in enumerate(made)]  # fmt: skip

    compared = same_as_eager(PROGRAMS[program], make, calls=calls)
    assert compared == (len(calls) or 2)


def compiled(how: Any, function: Any, dense: Any, *args: Any) -> Any:
    """``function`` around a compiled graph that is written out."""
    return how(build_plan(analyze(function, list(args))), dense)


@needs_other_attributes
def test_labels_are_those_of_the_call_and_what_is_in_contexts_is_checked(how: Any) -> None:
    call = compiled(how, lambda x, y: [x * 2, y], lambda a, b: [a * 2], sheet(2), sheet(2, unit="s"))
    label = Label()
    x, y = sheet(2, label=label), sheet(2, unit="s")
    double, same = call([x, y])
    assert type(double) is Sheet and double.label is label and double.unit == "m" and same is y
    assert double.flat.tolist() == [2, 4, 6, 8, 10, 12]
    with pytest.raises(CallingConventionError, match=r"argument 1 .* the Sheet has the context .*'m'.*, not .*'s'"):
        call([x, sheet(2)])
    with pytest.raises(CallingConventionError, match=r"the context .*'rows': \[\(3,\)\]"):
        call([sheet(3), y])
    x.flat = x.flat.double()
    if how is bind:
        call([x, y])  # one that passed is not looked at again, but another one is
    with pytest.raises(CallingConventionError, match=r"its tensor flat is torch.float64 of 1 dimensions, not float32"):
        call([Sheet(x.flat, label, "m", (2, 3)), y])


@needs_other_attributes
def test_tensors_behind_what_is_no_tensor_are_checked(how: Any) -> None:
    def first(numbers: Tensor) -> LabelFirst:
        return LabelFirst(numbers, LABEL, "m", (2, 3))

    call = compiled(how, lambda x: [x * 2], lambda a: [a * 2], first(torch.ones(6)))
    (made,) = call([first(torch.arange(6.0))])
    assert type(made) is LabelFirst and made.flat.tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(CallingConventionError, match=r"its tensor flat is torch\.float64"):
        call([first(torch.ones(6).double())])


@pytest.mark.parametrize("context", [5, "5", (1, 2), [1], {"a": 1}, {"b": [(1, "x")]}, None], ids=repr)
@needs_other_attributes
def test_contexts_are_compared_all_through(how: Any, context: Any) -> None:
    call = compiled(how, lambda x: [x * 2], lambda a: [a * 2], sheet(2, context))
    assert call([sheet(2, context)])[0].unit == context
    for other in (6, "6", (1, 3), (1, 2, 3), [1, 1], [2], {"a": 2}, {"c": 1}, {"b": [(1, "y")]}, {}, Label()):
        with pytest.raises(CallingConventionError, match="has the context"):
            call([sheet(2, other)])


def test_what_a_class_holds_by_name_is_checked(how: Any) -> None:
    class Other(TwoTensor):
        names = ("a", "b")

        def __tensor_flatten__(self) -> Any:
            return list(self.names), None

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, sizes: Any, strides: Any) -> Any:
            return Other(inner["a"], inner["b"])

    def two() -> Any:
        return Other(torch.ones(2), torch.ones(2))

    call = compiled(how, lambda x: [x.sum()], lambda a, b: [a.sum(), b.sum()], TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(CallingConventionError, match="it is a Other, not a TwoTensor"):
        call([two()])
    plan = build_plan(analyze(lambda x: [x.a * 1], [two()]))
    call = how(plan, lambda a, b: [a * 1])
    assert call([two()])[0].tolist() == [1, 1]
    Other.names = ("b", "a")
    with pytest.raises(CallingConventionError, match="the Other holds b, a, not a, b"):
        call([two()])


Wrap = Callable[..., Callable[[list[Any]], list[Any]]]


@pytest.mark.parametrize("calls", [(2,), (4, 2)], ids=["fixed", "varying"])
@needs_other_attributes
def test_the_gradient_of_a_wrapper_converts_itself_to_what_was_traced(wrapped: Wrap, calls: Any) -> None:
    def make(n: int) -> list[Any]:
        return [sheet(n).requires_grad_(), sheet(n, start=5.0)]

    call = wrapped(lambda x, w: [x * w], make(calls[0]), varying=len(calls) > 1)
    for n in calls:
        x, w = make(n)

        def grad(given: Any, x: Any = x, w: Any = w) -> Any:
            return torch.autograd.grad(call([x, w])[0], x, given)[0]

        numbers = torch.arange(3.0 * n)
        same, doubled = grad(Sheet(numbers, LABEL, "m", (n, 3))), grad(Sheet(numbers, LABEL, "km", (n, 3)))
        assert type(same) is Sheet and same.unit == "m"
        torch.testing.assert_close(same.flat, numbers * w.flat)
        torch.testing.assert_close(doubled.flat, 2 * numbers * w.flat)
        with pytest.raises(MetadataMismatchError, match=r"output 0 is a plain Tensor where .* traced for a Sheet"):
            grad(torch.ones(n, 3))
        with pytest.raises(MetadataMismatchError, match=r"is a TwoTensor with context None where .* for a Sheet"):
            grad(TwoTensor(torch.ones(n, 3), torch.ones(n, 3)))
    if len(calls) == 1:
        other = wrapped(lambda x: [x * 2], [sheet(2, "none").requires_grad_()])([sheet(2, "none").requires_grad_()])[0]
        with pytest.raises(MetadataMismatchError, match=r"is a Sheet with context .*'m'.* give Sheet a method"):
            other.backward(sheet(2))


@needs_other_attributes
def test_the_gradient_of_a_plain_result_is_converted_to_a_plain_one(wrapped: Wrap) -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    call = wrapped(lambda x, w: [x * 3, w * 2], [x, sheet(2)])
    (grad,) = torch.autograd.grad(call([x, sheet(2)])[0], x, sheet(2))
    assert type(grad) is Tensor
    torch.testing.assert_close(grad, 3 * torch.arange(1.0, 7).view(2, 3))


def two(*sizes: int) -> TwoTensor:
    return TwoTensor(torch.arange(1.0, 7).view(sizes), torch.arange(2.0, 8).view(sizes))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_wrapper_that_the_loss_ignores_has_a_wrapper_of_zeros_as_its_gradient(
    wrapped: Wrap, which: int, nested: bool
) -> None:
    def make() -> Any:
        return (TwoTensor(two(2, 3), two(2, 3)) if nested else two(2, 3)).requires_grad_()

    def fn(x: Any) -> list[Any]:
        return [x * x, x.sin()]

    call, x = wrapped(fn, [make()]), make()
    (got,) = torch.autograd.grad(call([x])[which], x, torch.ones_like(x))
    (want,) = torch.autograd.grad(fn(x)[which], x, torch.ones_like(x))
    assert type(got) is TwoTensor and type(got.a) is type(want.a)
    assert bool((got == want).a.all()) if not nested else bool((got.a == want.a).a.all() and (got.b == want.b).b.all())


@needs_other_attributes
def test_zeros_are_not_made_of_what_is_no_tensor(wrapped: Wrap) -> None:
    x = sheet(2).requires_grad_()
    first, _ = wrapped(lambda x: [x * x, x.sin()], [x])([x])
    with pytest.raises(MetadataMismatchError, match="a Sheet with the attribute label, which is no tensor"):
        first.backward(sheet(2))


def test_a_gradient_that_would_be_of_another_class_than_in_eager_mode_is_refused(wrapped: Wrap) -> None:
    def make() -> list[Any]:
        return [two(2, 3), torch.arange(6.0).view(2, 3).requires_grad_()]

    def fn(x: Any, y: Any) -> list[Any]:
        return [x * y, y * 2]

    call, (x, y) = wrapped(fn, make()), make()
    product, plain = call([x, y])
    with pytest.raises(MetadataMismatchError, match="gives argument 1 a gradient of a tensor subclass"):
        torch.autograd.grad(plain.sum(), y, retain_graph=True)
    (grad,) = torch.autograd.grad([product, plain], y, [two(2, 3), torch.ones(2, 3)], retain_graph=True)
    (want,) = torch.autograd.grad(fn(x, y), y, [two(2, 3), torch.ones(2, 3)])
    assert type(grad) is type(want) is TwoTensor and bool((grad == want).a.all()) and bool((grad == want).b.all())
    (grad,) = torch.autograd.grad(product, y, two(2, 3))
    (want,) = torch.autograd.grad(fn(x, y)[0], y, two(2, 3))
    assert bool((grad == want).a.all()) and bool((grad == want).b.all())


class BackwardOfProducts(torch.nn.Module):
    """Of ``x * y`` and ``y * 2``, where ``x`` is a pair and so the gradient of ``y`` is one."""

    def forward(self, a: Any, b: Any, y: Any, first: Any, second: Any, plain: Any) -> list[Any]:
        return [first * y, second * y, first * a + plain * 2, second * b + plain * 2]


def test_the_gradient_of_a_plain_result_stays_out_of_what_becomes_part_of_a_wrapper(wrapped: Wrap) -> None:
    x, y = two(2, 3).requires_grad_(), torch.arange(6.0).view(2, 3).requires_grad_()
    plan = wrapped(lambda x, y: [x * y, y * 2], [x, y]).plan
    graph = torch.fx.symbolic_trace(BackwardOfProducts())
    call = bind(plan, lambda a, b, y: [a * y, b * y, y * 2, a, b, y], graph, backward_graph=graph)
    ones = torch.ones(2, 3)
    (grad,) = torch.autograd.grad(call([x, y]), y, [TwoTensor(ones, ones), ones])
    assert bool((grad.a == x.a + 2).all()) and bool((grad.b == x.b + 2).all())
    with pytest.raises(MetadataMismatchError, match="would become part of the gradient of a tensor subclass"):
        torch.autograd.grad(call([x, y]), y, [TwoTensor(ones, ones), TwoTensor(ones, ones)])


def test_a_gradient_of_other_sizes_is_refused(wrapped: Wrap) -> None:
    class Loose(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return two(3, 2)

    x = two(2, 3).requires_grad_()
    (out,) = wrapped(lambda x: [x * 2], [x])([x])
    with pytest.raises(RuntimeError, match=r"sizes|shape"):
        Loose.apply(out).backward()


def test_a_saved_wrapper_that_is_written_to_is_noticed(wrapped: Wrap) -> None:
    """Its parts have version counters of their own, which do not move."""
    for which in (0, 1, 2):
        x, w = two(2, 3).requires_grad_(), two(2, 3)
        (out,) = wrapped(lambda x, w: [(x * w).exp()], [x, w])([x, w])
        with torch.no_grad():
            (x, w, out)[which].mul_(2)
        if which == 2:
            out.backward(two(2, 3))  # the stand-in for a compiler saves its inputs
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(two(2, 3))
