"""Tensor subclasses through the assembled stack against eager: values, gradients, mutations, aliases, refusals."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch._subclasses import FakeTensorMode
from torch._subclasses.complex_tensor import ComplexTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import aotkit
from aotkit_aot_trace import TraceOptions, capture
from aotkit_functionalize import FunctionalLayer, GraphMetadata, Unsupported, fakes
from aotkit_functionalize._torch_compat import fakes_other_attributes
from aotkit_functionalize.subclasses import SubclassBoundary
from aotkit_partition import default_partition
from aotkit_runtime_wrappers import (
    AliasingChangedError,
    DoubleBackwardError,
    WrapperError,
    WrapperPlan,
    bind,
    build_plan,
    interpret,
)

aten = torch.ops.aten
needs_other_attributes = pytest.mark.skipif(
    not fakes_other_attributes(), reason="torch before 2.12 makes no fakes of these; the refusal is tested below"
)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def two(*sizes: int, dtype: torch.dtype = torch.float64) -> TwoTensor:
    """A TwoTensor of random numbers."""
    return TwoTensor(torch.randn(*sizes, dtype=dtype), torch.randn(*sizes, dtype=dtype))


class Wrapper(torch.Tensor):
    """Base of the wrappers here: one tensor ``data_``, and ``extra`` in the context; operations keep both."""

    data_: torch.Tensor
    extra: Any

    @staticmethod
    def __new__(cls, data_, extra=None, sizes=None, strides=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, data_.shape if sizes is None else sizes, strides=data_.stride() if strides is None else strides,
            dtype=cls.outer_dtype(data_), device=data_.device, storage_offset=data_.storage_offset(),
        )  # fmt: skip

    def __init__(self, data_, extra=None, sizes=None, strides=None):
        self.data_, self.extra = data_, extra

    @classmethod
    def outer_dtype(cls, data_):
        return data_.dtype

    def __repr__(self):
        return f"{type(self).__name__}({self.data_!r}, {self.extra!r})"

    def __tensor_flatten__(self):
        return ["data_"], self.extra

    @classmethod
    def __tensor_unflatten__(cls, inner, extra, sizes, strides):
        return cls(inner["data_"], extra, sizes, strides)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, cls))
        inner = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs))
        out = pytree.tree_map_only(torch.Tensor, lambda t: cls(t, first.extra), func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs, out)


class Tagged(Wrapper):
    """Its context is a tuple of constants."""


class Versioned(Wrapper):
    """One of an older version serves for a newer one."""

    @classmethod
    def __metadata_guard__(cls, traced, given):
        return traced <= given


class Quantized(Wrapper):
    """Holds int8 numbers and their scale; looks like float64; knows linear maps only, and is constant for them."""

    @classmethod
    def outer_dtype(cls, data_):
        return torch.float64

    def __tensor_flatten__(self):
        return ["data_", "extra"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, sizes, strides):
        return cls(inner["data_"], inner["extra"], sizes, strides)

    def dense(self):
        return self.data_.to(torch.float64) * self.extra

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.t.default, aten.clone.default, aten.alias.default, aten.view.default):
            source = args[0]
            out = cls(func(source.data_, *args[1:]), source.extra)
            return return_and_correct_aliasing(func, args, kwargs or {}, out)
        plain = pytree.tree_map_only(cls, lambda t: t.dense(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Stored(Wrapper):
    """Looks like float64, whatever it holds."""

    @classmethod
    def outer_dtype(cls, data_):
        return torch.float64


class WithoutStrides(Wrapper):
    """Knows slices, and nothing of strides."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.as_strided.default:
            raise NotImplementedError
        return super().__torch_dispatch__(func, types, args, kwargs)


class Pending(Wrapper):
    """Its context says whether a result has arrived; any operation waits for it. Gradients arrive before use."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        state = "pending" if func is aten.mul.Tensor else "done"
        return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, state), func(*inner[0], **inner[1]))

    def __coerce_tangent_metadata__(self):
        return Pending(self.data_, "done")

    def __coerce_same_metadata_as_tangent__(self, context, cls=None):
        if cls is torch.Tensor:
            return self.data_
        return Pending(self.data_, context) if cls in (None, Pending) else None


class Packed(Wrapper):
    """A matrix held as a flat tensor, so that the sizes of the wrapper are no sizes of what it holds."""

    def __tensor_flatten__(self):
        return ["data_"], self.extra

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(cls, lambda t: t.data_.view(t.shape), (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, pack, func(*plain[0], **plain[1]))


def pack(t):
    return Packed(t.reshape(-1), None, t.shape, torch._prims_common.make_contiguous_strides_for(t.shape))


class Group(OpaqueBase):
    """Something that a wrapper refers to and that is no tensor."""


register_opaque_type(Group, typ="reference")


class Grouped(Wrapper):
    """Has an opaque object among its attributes."""

    def __tensor_flatten__(self):
        return ["data_", "extra"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, sizes, strides):
        return cls(inner["data_"], inner["extra"], sizes, strides)


class Pair(torch.Tensor):
    """Data and a scale that every result shares."""

    @staticmethod
    def __new__(cls, data_, scale, sizes=None, strides=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, data_.shape if sizes is None else sizes, strides=data_.stride(), dtype=data_.dtype
        )

    def __init__(self, data_, scale, sizes=None, strides=None):
        self.data_, self.scale = data_, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, sizes, strides):
        return cls(inner["data_"], inner["scale"], sizes, strides)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(a for a in pytree.tree_leaves((args, kwargs or {})) if isinstance(a, cls))
        inner = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        out = pytree.tree_map_only(torch.Tensor, lambda t: cls(t, first.scale), func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def same(found: Any, expected: Any) -> None:
    """Equal values of equal classes, sizes, strides and contexts, also inside."""
    assert type(found) is type(expected), (type(found), type(expected))
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        return
    if not isinstance(expected, torch.Tensor):
        assert found == expected
        return
    assert found.shape == expected.shape and found.stride() == expected.stride()
    if not hasattr(expected, "__tensor_flatten__"):
        torch.testing.assert_close(found, expected)
        return
    (names, context), (others, expected_context) = found.__tensor_flatten__(), expected.__tensor_flatten__()
    assert names == others and context == expected_context
    for name in names:
        same(getattr(found, name), getattr(expected, name))


def nop(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph


def copy_of(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def against_eager(fn: Callable[..., Sequence[Any]], *args: Any, **how: Any) -> Callable[..., Any]:
    """Run eager and compiled, then backward, twice; returns the compiled function."""
    compiled = aotkit.aot_function(fn, nop, **how)
    for _ in range(2):
        runs = []
        for run in (compiled, fn):
            own = [copy_of(arg) for arg in args]
            outputs = run(*own)
            losses = [o.sin().sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
            if losses:
                torch.autograd.backward(losses)
            runs.append((own, outputs))
        (inputs, found), (eager_inputs, expected) = runs
        same(list(found), list(expected))
        same([i.detach() for i in inputs], [i.detach() for i in eager_inputs])
        same([i.grad for i in inputs if i.is_leaf], [i.grad for i in eager_inputs if i.is_leaf])
    return compiled


def bound(fn: Callable[..., Any], *args: Any) -> Callable[[list[Any]], list[Any]]:
    """The emitted call of an inference graph, without what compiles again for other arguments."""
    captured = capture(fn, args)
    return bind(build_plan(captured.metadata), captured.graph)


def plain(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.requires_grad_()


def nested() -> TwoTensor:
    return TwoTensor(two(3, 4), two(3, 4))


# -- values and gradients ----------------------------------------------------------------------------------


@pytest.mark.covers("F1.2", "F2.31", "F2.32", "F4.15")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [lambda: two(3, 4), nested], ids=["flat", "nested"])
def test_subclass_arguments_mixed_with_plain_ones_give_eagers_results_and_gradients(
    make: Callable[[], TwoTensor], dynamic: bool
) -> None:
    def fn(x, y, w):
        z = x * y
        return [z.sin(), z @ w, y.cos()]

    against_eager(fn, leaf(make()), leaf(plain(3, 4)), plain(4, 2), dynamic=dynamic)


@pytest.mark.covers("F2.31")
@pytest.mark.parametrize("differentiable", [False, True])
def test_subclasses_that_only_come_out_are_put_together(differentiable: bool) -> None:
    def fn(x):
        return [TwoTensor(x.detach() * 2, x.detach() + 1), x.exp()]

    x = plain(3, 4)
    against_eager(fn, leaf(x) if differentiable else x)


def test_inference_with_subclasses_makes_no_graph_of_autograd() -> None:
    against_eager(lambda x, y: [x * y, x + 1], two(3, 4), plain(3, 4))
    with torch.no_grad():
        against_eager(lambda x: [x * 2], leaf(two(3, 4)))


@pytest.mark.covers("F2.31")
def test_a_context_of_constants_goes_in_and_comes_out() -> None:
    x = Tagged(plain(3, 4), (1, "a", torch.float32, {"k": [True, None]}))
    against_eager(lambda x, y: [x * y, x.sum()], leaf(x), leaf(plain(3, 4)))


@pytest.mark.covers("F2.32", "F4.31")
def test_the_gradient_of_a_subclass_may_be_a_plain_tensor() -> None:
    weight = Quantized(torch.randint(-9, 9, (5, 4), dtype=torch.int8), torch.tensor(0.1, dtype=torch.float64))
    against_eager(lambda q, x: [x @ q.t()], leaf(weight), leaf(plain(3, 4)))


@needs_other_attributes
@pytest.mark.covers("F1.4")
def test_an_attribute_that_is_no_tensor_passes_by_the_graph() -> None:
    group = Group()
    compiled = against_eager(lambda x, y: [x * y, x.t()], leaf(Grouped(plain(3, 4), group)), plain(3, 4))
    assert compiled(leaf(Grouped(plain(3, 4), group)), plain(3, 4))[0].extra is group


@pytest.mark.covers("F1.4")
def test_an_attribute_that_is_no_tensor_is_refused_before_torch_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "fakes_other_attributes", lambda: False)
    compiled = aotkit.aot_function(lambda x: x * 2, lambda graph, _: graph)
    with pytest.raises(Unsupported, match="a Grouped, holds in extra a Group that is no tensor"):
        compiled(Grouped(plain(3, 4), Group()))


@pytest.mark.covers("F1.66")
def test_a_complex_wrapper_is_captured_as_real_operations() -> None:
    def fn(x, y):
        return [x * y, x @ y.t(), x.exp() + y]

    def as_complex(value: Any) -> Any:
        value = value.detach()
        return torch.complex(value.re, value.im) if isinstance(value, ComplexTensor) else value

    graphs: list[torch.fx.GraphModule] = []
    compiled = aotkit.aot_function(fn, lambda graph, inputs: graphs.append(graph) or graph)
    x, y = leaf(ComplexTensor(plain(3, 4), plain(3, 4))), ComplexTensor(plain(3, 4), plain(3, 4))
    z = leaf(as_complex(x))
    found, expected = compiled(x, y), fn(z, as_complex(y))
    torch.autograd.backward([o.abs().sum() for o in found])
    torch.autograd.backward([o.abs().sum() for o in expected])
    same([as_complex(o) for o in found], [o.detach() for o in expected])
    same(as_complex(x.grad), z.grad)
    values = [node.meta["val"] for graph in graphs for node in graph.graph.nodes if node.op != "output"]
    assert len(graphs) == 2 and not any(value.is_complex() for value in values)


@pytest.mark.covers("F2.33")
def test_sizes_that_only_the_wrapper_knows_become_inputs_of_the_graph() -> None:
    def fn(x):
        return [x.sin().sum(1), x * 2]

    def packed(rows, columns):
        return leaf(Packed(plain(rows * columns), None, (rows, columns), (columns, 1)))

    graphs = []
    compiled = aotkit.aot_function(fn, lambda graph, inputs: graphs.append(graph) or graph, dynamic=True)
    for rows, columns in ((3, 4), (5, 7), (2, 3)):
        x, y = packed(rows, columns), None
        y = copy_of(x)
        found, expected = compiled(x), fn(y)
        same(found, expected)
        torch.autograd.backward([o.sum() for o in found])
        torch.autograd.backward([o.sum() for o in expected])
        same(x.grad, y.grad)
    assert len(graphs) == 2  # one forward, one backward, for all sizes
    names = [n.meta["val"] for n in graphs[0].graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in names)


# -- tangents ----------------------------------------------------------------------------------------------


@pytest.mark.covers("F1.53")
def test_tangents_are_expected_and_brought_into_the_form_that_the_class_says() -> None:
    """Outputs of a product are pending, their gradients have arrived."""
    against_eager(lambda p, y: [p * y], leaf(Pending(plain(3, 4), "done")), leaf(plain(3, 4)))
    x, y = leaf(Pending(plain(3, 4), "done")), leaf(plain(3, 4))
    (found,) = aotkit.aot_function(lambda p, y: [p * y], nop)(x, y)
    found.backward(Pending(torch.ones(3, 4, dtype=torch.float64), "pending"))  # coerced: one argument
    same(y.grad, Pending(x.data_, "done"))


@pytest.mark.covers("F1.53", "F4.30")
def test_a_gradient_of_another_class_is_converted_by_its_class_or_refused() -> None:
    x, y = leaf(plain(3, 4)), leaf(plain(3, 4))
    (found,) = aotkit.aot_function(lambda x, y: [x * y], nop)(x, y)
    found.backward(Pending(torch.ones(3, 4, dtype=torch.float64), "done"), retain_graph=True)  # two arguments
    same(y.grad, x.detach())
    y.grad, given = None, two(3, 4)
    found.backward(given)  # not converted: the backward graph is run on it
    same(y.grad, given * x.detach())
    (found,) = aotkit.aot_function(lambda x, y: [x * y], nop)(leaf(two(3, 4)), y)
    with pytest.raises(WrapperError, match="is a plain Tensor where the backward was traced for a TwoTensor"):
        found.backward(plain(3, 4))


@pytest.mark.covers("F1.53")
def test_a_gradient_that_holds_other_elements_than_the_graph_reads_is_refused() -> None:
    """Autograd looks at the wrapper's dtype, which is float64 whatever is inside; kernels would read other memory."""
    x = leaf(Stored(plain(3, 4)))
    (found,) = aotkit.aot_function(lambda x: [x.sin()], nop)(x)
    with pytest.raises(WrapperError, match=r"whose tensor data_ is float64 on cpu, not torch\.float32"):
        found.backward(Stored(torch.ones(3, 4)), retain_graph=True)
    assert x.grad is None
    found.backward(Stored(torch.ones(3, 4, dtype=torch.float64)))
    same(x.grad, Stored(x.data_.cos()))


@pytest.mark.covers("F1.54")
def test_a_mutated_subclass_that_the_loss_ignores_gets_a_gradient_of_zeros() -> None:
    def fn(x, w, y):
        x.mul_(y)
        return [w * y]

    against_eager(fn, two(3, 4), leaf(two(3, 4)), leaf(plain(3, 4)))
    against_eager(lambda x, y: [x.mul_(y).sin()], two(3, 4), leaf(plain(3, 4)))


def test_a_gradient_whose_class_depends_on_a_missing_tangent_is_refused() -> None:
    """In eager, ``y`` gets a plain gradient here; the compiled backward adds zeros of the subclass to it."""
    y = leaf(plain(3, 4))
    _, found = aotkit.aot_function(lambda x, y: [x * y, y.sin()], nop)(leaf(two(3, 4)), y)
    with pytest.raises(WrapperError, match="argument 1 a gradient of a tensor subclass"):
        found.sum().backward()
    assert y.grad is None


@pytest.mark.covers("F1.51")
def test_tangents_are_inputs_of_their_own_though_what_they_hold_is_shared_with_primals() -> None:
    """Both hold the same scale; the graph reads that of the gradient from the gradient."""
    graphs = []
    x = leaf(Pair(plain(3, 4), plain(1)))
    compiled = aotkit.aot_function(lambda x: [x.sin()], nop, lambda graph, inputs: graphs.append(graph) or graph)
    (found,) = compiled(x)
    found.backward(Pair(plain(3, 4), x.scale))
    (output,) = graphs[0].graph.find_nodes(op="output")
    names = [str(node) for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert [n for n in names if n.startswith("tangents")] == ["tangents_1", "tangents_2"]
    assert str(output.args[0][1]) == "tangents_2"
    assert x.grad.scale is x.scale


# -- mutations and aliases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: two(3, 4), nested], ids=["flat", "nested"])
def test_a_subclass_that_is_written_to_has_the_new_values_afterwards(make: Callable[[], TwoTensor]) -> None:
    def through_a_view(b, x):
        b.t().add_(1)
        return [b * x]

    def under_no_grad(b, x):
        with torch.no_grad():
            b.copy_(x * 2)
        return [b + x]

    against_eager(through_a_view, make(), leaf(make()))
    against_eager(under_no_grad, make(), leaf(make()))
    against_eager(lambda b: [b.mul_(2), b.sum()], make())
    versions = []
    for run in (under_no_grad, aotkit.aot_function(under_no_grad, nop)):
        b, x = make(), leaf(make())
        run(b, x)
        versions.append(b._version)
    assert versions[0] == versions[1]


@pytest.mark.parametrize("make", [lambda: two(3, 4), nested], ids=["flat", "nested"])
def test_results_that_are_views_of_subclasses_share_their_memory_and_history(make: Callable[[], TwoTensor]) -> None:
    def of_input(x):
        return [x.t(), x.view(-1), x.detach(), x, x[1:]]

    def of_output(x):
        y = x * 2
        return [y, y.t(), y.detach()]

    against_eager(of_input, leaf(make()))
    against_eager(of_output, leaf(make()))
    x = make()
    x.requires_grad_()
    t, flat, detached, itself, rows = aotkit.aot_function(of_input, nop)(x)
    assert itself is x and t._base is x and rows._base is x and detached.grad_fn is None
    with torch.no_grad():
        t.zero_()
        flat[4:].add_(1)
    same(list(x.detach().sum(1)), list(torch.stack([x.detach()[0] * 0, *(x.detach()[1:] * 0 + 1)]).sum(1)))
    y, t, detached = aotkit.aot_function(of_output, nop)(make())
    t.zero_()
    same(detached, y * 0)


def test_a_result_may_hold_tensors_of_an_argument() -> None:
    """Wrapped anew, and a tensor taken out: the memory is the argument's."""

    def fn(x):
        return [TwoTensor(x.a, x.b * 2), x.a, x.b[1:]]

    against_eager(fn, two(3, 4))
    x = two(3, 4)
    wrapped, a, tail = aotkit.aot_function(fn, nop)(x)
    assert wrapped.a is x.a and a is x.a
    tail.zero_()
    assert x.b[1:].abs().sum() == 0


@pytest.mark.covers("F4.18")
def test_a_subclass_that_is_passed_twice_is_one_input() -> None:
    def fn(x, y, w):
        return [x * y + w]

    def mutating(x, y):
        x.add_(1)
        return [y * 2]

    for training in (False, True):
        runs = []
        for run in (aotkit.aot_function(fn, nop), fn):
            torch.manual_seed(1)
            x, w = two(3, 4).requires_grad_(training), plain(3, 4)
            (out,) = run(x, x, w)
            if training:
                out.sum().backward()
            runs.append([out, x.grad])
        same(*runs)
    x = two(3, 4)
    y = copy_of(x)
    same(aotkit.aot_function(mutating, nop)(x, x), mutating(y, y))
    same(x, y)


@pytest.mark.covers("F4.18")
def test_tensors_inside_of_subclasses_that_share_memory_with_a_written_one_are_refused() -> None:
    def fn(x, y):
        x.mul_(2)
        return [y + 1]

    shared = plain(3, 4)
    with pytest.raises(Unsupported, match="tensors inside of input 0, input 1 share memory"):
        aotkit.aot_function(fn, nop)(TwoTensor(shared, plain(3, 4)), shared)
    with pytest.raises(Unsupported, match="tensors inside of input 0 share memory"):
        aotkit.aot_function(lambda x: [x.mul_(2)], nop)(TwoTensor(shared, shared))
    call = bound(fn, two(3, 4), plain(3, 4))
    call([two(3, 4), plain(3, 4)])
    with pytest.raises(AliasingChangedError, match="d0 is mutated by this graph and now shares memory with input d2"):
        call([TwoTensor(shared, plain(3, 4)), shared])


def test_plain_arguments_that_overlap_still_get_a_common_base_beside_a_subclass() -> None:
    def fn(x, y, w):
        x.add_(1)
        return [w * 2, y.clone()]

    runs = []
    for run in (aotkit.aot_function(fn, nop), fn):
        torch.manual_seed(1)
        memory, w = plain(6), two(3, 4)
        runs.append([*run(memory[:4], memory[2:], w), memory])
    same(*runs)


# -- refusals ----------------------------------------------------------------------------------------------


def transposing(x):
    x.t_()
    return [x * 2]


def replacing(x):
    x.a = x.a * 2
    return [x * 2]


def leafing(x):
    return [TwoTensor(x.detach() * 2, x.detach()).requires_grad_()]


def test_a_size_that_depends_on_data_beside_a_subclass_is_refused() -> None:
    with pytest.raises(Unsupported, match="and a tensor subclass goes in or comes out"):
        aotkit.aot_function(lambda x, y: [x * 2, y[y > 0]], nop, dynamic=True)(two(3, 4), plain(3, 4))


@pytest.mark.covers("F1.49")
@pytest.mark.parametrize(
    "fn, args, text",
    [
        (transposing, lambda: [two(3, 3)], "has its sizes or strides changed in place"),
        (replacing, lambda: [two(3, 4)], "is given other tensors to hold"),
        (lambda x: [x.mul_(2)], lambda: [two(3, 4).requires_grad_()], "a leaf that requires grad"),
        (lambda x: [x.detach_()], lambda: [two(3, 4).requires_grad_()], "requires_grad changed"),
        (leafing, lambda: [plain(3, 4)], "requires grad and has no history"),
    ],
)
def test_what_cannot_be_done_to_a_subclass_is_refused(
    fn: Callable[..., Any], args: Callable[[], list[Any]], text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        aotkit.aot_function(fn, nop)(*args())


@pytest.mark.covers("F1.48")
def test_views_of_a_subclass_that_is_not_returned_share_memory_or_are_refused() -> None:
    """The subclass becomes an output that nobody sees. A class that has no view operations is refused."""

    def fn(x):
        y = x * 2
        return [y.t(), y[1:], y[:1]]

    against_eager(fn, leaf(two(3, 4)))
    t, tail, head = aotkit.aot_function(fn, nop)(leaf(nested()))
    assert t._base is tail._base is head._base
    with torch.no_grad():
        t.zero_()
    same(tail.detach(), tail.detach() * 0)
    with pytest.raises(Unsupported, match="WithoutStrides, is a view of input 0"):
        aotkit.aot_function(lambda x: [x[1:]], nop)(leaf(WithoutStrides(plain(3, 4))))


@pytest.mark.covers("F1.3")
def test_a_wrapper_that_mixes_functional_and_other_tensors_is_refused() -> None:
    with pytest.raises(Unsupported, match="functional and other tensors are mixed"):
        aotkit.aot_function(lambda x: [TwoTensor(x.detach() * 2, CONSTANT)], nop)(plain(3, 4))


CONSTANT = plain(3, 4)


def test_another_subclass_or_context_than_at_capture_compiles_again_or_is_refused() -> None:
    compiled, call = aotkit.aot_function(lambda x: [x * 2], nop), bound(lambda x: [x * 2], Tagged(CONSTANT, [1]))
    same(call([Tagged(CONSTANT, [1])]), [Tagged(CONSTANT * 2, [1])])
    for other in (
        Tagged(CONSTANT, [2]),
        CONSTANT,
        two(3, 4),
        TwoTensor(two(3, 4), two(3, 4)),
        Tagged(plain(1, 4), [1]),
    ):
        same(list(compiled(other)), [other * 2])
        with pytest.raises(WrapperError, match="is not what this graph was compiled for"):
            call([other])


def test_a_class_says_which_contexts_a_graph_serves() -> None:
    frames = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(gm)
        return aotkit.make_backend(aotkit.Options(fallback="error", cache=False))(gm, inputs)

    compiled = torch.compile(lambda x: x * x, backend=backend)
    for version, count in ((2, 1), (3, 1), (2, 1), (1, 2)):
        same(compiled(Versioned(CONSTANT, version)).data_, CONSTANT * CONSTANT)
        assert len(frames) == count


def test_writing_to_a_wrapper_between_forward_and_backward_is_noticed_as_in_eager() -> None:
    """The version counters of the tensors inside do not move."""

    def fn(x, y):
        return [(x * y).exp()]

    for changed in ("input", "output"):
        for run in (fn, aotkit.aot_function(fn, nop)):
            x, y = leaf(two(3, 4)), leaf(two(3, 4))
            (out,) = run(x, y)
            with torch.no_grad():
                (x if changed == "input" else out).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward(two(3, 4))


def test_results_and_arguments_are_freed_without_the_garbage_collector() -> None:
    """What is saved of a wrapper for its version counter makes no cycle."""
    compiled = aotkit.aot_function(lambda x, y: [(x * y).exp()], nop)
    x, y = leaf(two(3, 4)), leaf(plain(3, 4))
    for backward in (False, True):
        (out,) = compiled(x, y)
        seen = [weakref.ref(out), weakref.ref(out.a)]
        if backward:
            out.backward(two(3, 4))
        gc.disable()
        try:
            del out
            assert [reference() for reference in seen] == [None, None]
        finally:
            gc.enable()


# -- Dynamo ------------------------------------------------------------------------------------------


def wrap_parameters(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(make(parameter.detach())))
    return module


def flat_parameter(p: torch.Tensor) -> TwoTensor:
    return TwoTensor(p.clone(), p * 2)


def nested_parameter(p: torch.Tensor) -> TwoTensor:
    return TwoTensor(flat_parameter(p), TwoTensor(p * 0.5, p - 1))


@pytest.mark.covers("F2.31", "F2.32", "F2.34", "F4.15")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [flat_parameter, nested_parameter])
def test_a_module_with_subclass_parameters_trains_as_in_eager(
    make: Callable[[torch.Tensor], TwoTensor], dynamic: bool | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    reference = copy.deepcopy(wrap_parameters(model, make))
    compiled = torch.compile(model, backend="aotkit", fullgraph=True, dynamic=dynamic, options={"fallback": "error"})
    optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in (model, reference)]
    for step in range(4):
        x = plain(5 + (step if dynamic else 0), 4)
        for run, optimizer in zip((compiled, reference), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).pow(2).sum().backward()
            optimizer.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert type(p) is TwoTensor
            same(p.detach(), q.detach())
            same(p.grad, q.grad)
    with torch.no_grad():
        same(compiled(x), reference(x))


def test_subclasses_that_dynamos_graph_makes_are_returned() -> None:
    def fn(x, y):
        z = x * y
        return z.sin(), TwoTensor(y.detach(), y.detach() + 1), z.sum()

    compiled = torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error"})
    for x, y in ((two(3, 4), plain(3, 4)), (leaf(two(3, 4)), leaf(plain(3, 4)))):
        same(list(compiled(x, y)), list(fn(x, y)))
    only_out = torch.compile(lambda y: TwoTensor(y * 2, y + 1), backend="aotkit", fullgraph=True)
    same(only_out(CONSTANT), TwoTensor(CONSTANT * 2, CONSTANT + 1))


@pytest.mark.covers("F2.33")
def test_another_size_of_a_subclass_does_not_compile_again_under_dynamic_shapes() -> None:
    recorder = aotkit.Recorder()
    compiled = torch.compile(
        lambda x, y: (x * y).sum(0),
        backend="aotkit",
        fullgraph=True,
        dynamic=True,
        options={"fallback": "error", "observer": recorder},
    )
    for rows in (3, 5, 8):
        x, y = leaf(two(rows, 4)), leaf(plain(rows, 4))
        expected = (x * y).sum(0)
        found = compiled(x, y)
        same(found, expected)
    assert sum(graph.name.endswith("forward") for graph in recorder.graphs) == 1


@pytest.mark.covers("F2.35", "F4.15")
def test_arguments_are_taken_apart_without_calling_flatten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = plain(3, 4), two(4, 2)
    call = bound(lambda x, w: [x @ w], x, weight)
    call([x, weight])
    flattened, flatten = [], TwoTensor.__tensor_flatten__
    monkeypatch.setattr(TwoTensor, "__tensor_flatten__", lambda self: flattened.append(self) or flatten(self))
    for _ in range(3):
        call([x, weight])
    assert not flattened
    call([x, two(4, 2)])
    assert len(flattened) == 1  # another object is looked at once


@pytest.mark.covers("F2.34", "F1.57")
def test_a_static_argument_that_is_a_subclass_stands_for_the_tensors_inside_it() -> None:
    model = wrap_parameters(nn.Linear(4, 2).double(), nested_parameter)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def fn(*args):
        return [torch.func.functional_call(model, dict(zip(names, args[:2], strict=True)), args[2:])]

    mode = FakeTensorMode()
    with torch._guards.tracing(torch._guards.TracingContext(mode)) as context:
        aotkit.aot_function(fn, nop, num_params_buffers=2)(*parameters, plain(3, 4))
        assert context.fw_metadata.static_input_indices == list(range(8))
        assert len(context.fw_metadata.contract.inputs) == 9


@pytest.mark.covers("F4.15")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda: two(3, 4), nested, pytest.param(lambda: Grouped(plain(3, 4), Group()), marks=needs_other_attributes)],
)
def test_emitted_adapters_do_what_the_interpreter_of_the_plan_does(make: Callable[[], Any], dynamic: bool) -> None:
    def fn(x, y, b):
        b.mul_(y)
        z = (x * y).exp()
        return [z, z.t(), x.t(), y.sin().detach(), b.t()]

    x, y, b = leaf(make()), leaf(plain(3, 4)), plain(3, 4)
    captured = capture(fn, [x, y, b], options=TraceOptions(dynamic=dynamic))
    metadata = GraphMetadata.from_json(captured.metadata.to_json()) if type(x) is TwoTensor else captured.metadata
    tangents = len(metadata.tangents)
    placeholders = [n.meta["val"] for n in captured.graph.graph.find_nodes(op="placeholder")]
    count = metadata.num_forward_outputs
    forward, backward = default_partition(
        captured.graph, (placeholders[:-tangents], placeholders[-tangents:]), num_fwd_outputs=count
    )
    (output,) = forward.graph.find_nodes(op="output")
    saved = [isinstance(node.meta["val"], torch.Tensor) for node in output.args[0][count:]]
    plan = build_plan(metadata, num_saved_tensors=sum(saved), num_saved_symints=len(saved) - sum(saved))
    runs = []
    for run in (bind, interpret):
        call = run(plan, forward, backward)
        own = [copy_of(v) for v in (x, y, b)]
        outputs = call(list(own))
        torch.autograd.backward([o.sum() for o in outputs[:2]])
        runs.append([*outputs, own[0].grad, own[1].grad, own[2]])
        with pytest.raises(WrapperError, match="is not what this graph was compiled for"):
            call([Tagged(plain(3, 4), 5), *own[1:]])
    same(*runs)


@pytest.mark.covers("F4.15")
def test_tensors_inside_of_arguments_can_be_freed_while_the_graph_runs() -> None:
    captured, freed = capture(lambda x, y: [x * y], [nested(), plain(3, 4)]), []

    def run(args: list[Any]) -> Any:
        references, values = [weakref.ref(arg) for arg in args], list(args)
        args.clear()
        results = captured.graph(*values)
        del values
        freed.append([reference() is None for reference in references])
        return results

    run._boxed_call = True
    for make in (bind, interpret):
        make(build_plan(captured.metadata), run)([nested(), plain(3, 4)])
    assert freed[0] == [True] * 5


@pytest.mark.covers("F4.31")
@pytest.mark.parametrize("make", [bind, interpret])
def test_wrong_numbers_of_dense_values_are_named(make: Callable[..., Any]) -> None:
    metadata = capture(lambda x: [x * 2], [leaf(two(3, 4))]).metadata
    call = make(build_plan(metadata), lambda a, b: [a], lambda *tangents: [])
    with pytest.raises(WrapperError, match="2 forward results, but there are 1"):
        call([leaf(two(3, 4))])
    call = make(build_plan(metadata), lambda a, b: [a * 2, b * 2], lambda *tangents: tangents[:1])
    (out,) = call([leaf(two(3, 4))])
    with pytest.raises(WrapperError, match="2 dense gradients, but there are 1"):
        out.backward(two(3, 4))


@pytest.mark.covers("F4.39")
def test_records_of_subclasses_hold_no_tensors_and_are_written_as_text() -> None:
    context = (1, "a", torch.float32, torch.device("cpu"), {"k": [True, None]}, torch.Size([2]), torch.strided)
    captured = capture(lambda x, y: [x * y, x.t()], [leaf(Tagged(plain(3, 4), context)), leaf(plain(3, 4))])
    metadata = captured.metadata
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    plan = build_plan(metadata, num_saved_tensors=1)
    assert WrapperPlan.from_json(plan.to_json()) == plan
    holders = (metadata, plan)
    seen: list[Any] = []

    def look(value: Any) -> None:
        assert not isinstance(value, torch.Tensor | torch.SymInt)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            seen.append(value)
            for field in dataclasses.fields(value):
                look(getattr(value, field.name))
        elif isinstance(value, tuple | list):
            for item in value:
                look(item)

    look(holders)
    assert any(isinstance(value, SubclassBoundary) for value in seen)


class Marker:
    """Has no JSON form."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marker)

    __hash__ = None


class Marked(Tagged):
    """Writes its context itself."""

    @staticmethod
    def __aotkit_encode_context__(context):
        return "marker"

    @staticmethod
    def __aotkit_decode_context__(raw):
        assert raw == "marker"
        return Marker()


def test_a_context_without_a_form_as_text_is_refused_when_it_is_written_unless_its_class_writes_it() -> None:
    def metadata_of(value: torch.Tensor) -> GraphMetadata:
        return capture(lambda x: [x * 2], [value]).metadata

    with pytest.raises(Unsupported, match="the context of tensor subclass Tagged holds a Marker"):
        metadata_of(Tagged(plain(3), Marker())).to_json()
    marked = metadata_of(Marked(plain(3), Marker()))
    assert GraphMetadata.from_json(marked.to_json()) == marked

    class Local(Tagged):
        pass

    with pytest.raises(Unsupported, match="Local cannot be written down"):
        metadata_of(Local(plain(3), 1)).to_json()
    text = metadata_of(Tagged(plain(3), 1)).to_json()
    with pytest.raises(Unsupported, match="no module that is loaded defines it"):
        GraphMetadata.from_json(text.replace(":Tagged", ":Absent"))


def test_subclasses_are_captured_by_the_mode_or_refused() -> None:
    """The dispatcher functionalizes nothing inside of ``__torch_dispatch__``."""

    def fn(x):
        return [TwoTensor(x * 2, x + 1)]

    for layer in FunctionalLayer:
        options = TraceOptions(layer=layer)
        same(capture(lambda x: [x * 2], [two(3)], options=options).metadata.num_forward_outputs, 2)
    with pytest.raises(Unsupported, match="captured in the dispatcher's functional layer"):
        capture(fn, [plain(3)], options=TraceOptions(layer=FunctionalLayer.DISPATCHER))
    with pytest.raises(Unsupported, match="set_"):
        aotkit.aot_function(lambda x, y: [x * 2, y.set_(y * 2)], nop)(two(3, 4), plain(3, 4))


@pytest.mark.covers("F1.11")
def test_a_storage_inside_of_a_subclass_is_not_resized() -> None:
    def fn(x):
        torch.ops.inductor.resize_storage_bytes_(x.a, 0)
        return [x.b * 2]

    with pytest.raises(Unsupported, match="TwoTensor, has the storage of a tensor that it holds replaced or resized"):
        aotkit.aot_function(fn, nop)(two(3, 4))


def test_second_derivatives_through_subclasses_are_refused() -> None:
    x, y = leaf(two(3, 4)), leaf(plain(3, 4))
    (out,) = aotkit.aot_function(lambda x, y: [x * y * y], nop)(x, y)
    (gradient,) = torch.autograd.grad(out, x, two(3, 4), create_graph=True)
    assert gradient.shape == x.shape
    with pytest.raises(DoubleBackwardError, match="differentiated again"):
        gradient.backward(two(3, 4))


def test_what_is_refused_runs_eagerly_under_dynamo() -> None:
    def fn(x):
        return x.mul_(2) + 1

    memory, twin = CONSTANT.clone(), CONSTANT.clone()
    compiled = torch.compile(fn, backend="aotkit")
    with pytest.warns(aotkit.EagerFallback, match="tensors inside of input 0 share memory"):
        found = compiled(TwoTensor(memory, memory))
    same(found, fn(TwoTensor(twin, twin)))
    same(memory, twin)


@pytest.mark.covers("F2.33", "F1.53")
@pytest.mark.parametrize("dynamic", [None, True])
def test_distributed_tensors_go_through_the_stack(dynamic: bool | None) -> None:
    """Their mesh is opaque, their sizes are in their context, and gradients of partial sums arrive replicated."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
        options = {"fallback": "error", "verify": False}
        compiled = torch.compile(distributed, backend="aotkit", fullgraph=True, dynamic=dynamic, options=options)
        if dynamic and RELEASE < (2, 12):  # whose shards tell their sizes inside an object
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="holds a symbolic size inside an object"):
                compiled(distribute_tensor(torch.randn(2, 8), mesh, [Shard(1)]), w)
            return
        for rows in (2, 6) if dynamic else (2,):
            x, runs = distribute_tensor(torch.randn(rows, 8), mesh, [Shard(1)]), []
            for run in (compiled, distributed):
                own = copy_of(w).requires_grad_()
                out = run(x, own)
                out.backward(distribute_tensor(torch.ones(rows, 4), mesh, [Replicate()]))
                runs.append([out, own.grad])
            for found, expected in zip(*runs, strict=True):
                assert found.placements == expected.placements and found.shape == expected.shape
                same(found.to_local(), expected.to_local())
    finally:
        torch.distributed.destroy_process_group()


def distributed(x, w):
    return x @ w.t()
