"""Views that are written to, views that custom functions make, values that change after their gradient was set up.

torch 2.13's own stack writes zeros between the windows of ``unfold``, gives the result of overlapping writes without a
word, and fails in the backward of ``x.T.clone() * y; x.add_(1)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aotkit
from aotkit_aot_trace import TraceOptions, capture
from aotkit_functionalize import OverlappingWrite
from aotkit_functionalize.records import OutputKind
from aotkit_runtime_wrappers import WrapperPlan, build_plan

Check = Callable[..., None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does
]

TENSORS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(11),
    "matrix": lambda: torch.randn(9, 8),
    "transposed": lambda: torch.randn(8, 11).t(),
    "part": lambda: torch.randn(30)[3:14],
}
WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda x: x.unfold(0, 2, 4),
    "gaps, last block cut off": lambda x: x.unfold(0, 2, 3),
    "one element": lambda x: x.unfold(0, 1, 5),
    "last dimension": lambda x: x.unfold(-1, 3, 4),
    "a rest": lambda x: x.unfold(0, 2, 2),
    "exact": lambda x: x.unfold(0, 1, 1),
    "a single one, wider than the step": lambda x: x.unfold(0, x.shape[0], 1),
    "a single one and a rest": lambda x: x.unfold(-1, 7, 5),
    "one of them": lambda x: x.unfold(0, 2, 4)[0],
    "first of each": lambda x: x.unfold(0, 2, 4).select(-1, 0),
    "of a view": lambda x: x.unsqueeze(0).unfold(1, 2, 3),
    "by as_strided": lambda x: x.as_strided((2, 2), (4 * x.stride(0), x.stride(0)), x.storage_offset()),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda v: v.add_(1),
    "zero_": lambda v: v.zero_(),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 2.0),
}


@pytest.mark.covers("F1.67")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("windows", WINDOWS)
def test_elements_between_windows_that_are_written_to_keep_their_values(
    captured_same_as_eager: Check, windows: str, write: str
) -> None:
    def fn(x: Tensor) -> Tensor:
        WRITES[write](WINDOWS[windows](x))
        return x * 1

    for make in TENSORS.values():
        captured_same_as_eager(fn, lambda make=make: [make()])


@pytest.mark.covers("F1.67")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("windows", WINDOWS)
def test_gradients_flow_around_windows_that_are_written_to(same_as_eager: Check, windows: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        view = WINDOWS[windows](z)
        view.mul_(3).add_(1)
        return z + y

    leaf = torch.randn(9, 8)
    same_as_eager(fn, lambda: [leaf.clone().requires_grad_(), leaf.sin().requires_grad_()])


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("size", "step", "lies"), [(1, 3, (0, 0)), (2, 5, (2, 1)), (2, 3, (1, 1)), (2, 1, (2, 1))])
def test_gradients_of_windows_of_a_leaf_that_repeats_its_memory_are_those_of_its_elements(
    same_as_eager: Check, size: int, step: int, lies: tuple[int, int]
) -> None:
    """Autograd would take the mean of those of one memory, if the windows were a view by as_strided."""

    def make() -> list[Tensor]:
        length = 1 if size == 1 else 4 if step == 5 else 8
        leaf = torch.as_strided(torch.arange(40.0), (3, length), lies).detach().requires_grad_()
        return [leaf, torch.arange(3.0).view(3, 1, 1).requires_grad_()]

    same_as_eager(lambda x, y: [x.unfold(-1, size, step)], make)
    same_as_eager(lambda x, y: [x.unfold(-1, size, step) * y], make)


def test_a_view_whose_gradient_is_computed_has_eager_modes_strides_where_a_size_is_one(same_as_eager: Check) -> None:
    def make() -> list[Tensor]:
        leaf = torch.as_strided(torch.arange(40.0), (2, 3, 2), (1, 2, 1)).detach().requires_grad_()
        return [leaf]

    same_as_eager(lambda x: [x.narrow(0, 1, 1)], make)
    same_as_eager(lambda x: [x.unsqueeze(1)[1:]], make)


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda x: x.unfold(0, 3, 1),
    "unfold of a view": lambda x: x.t().unfold(1, 3, 2),
    "as_strided": lambda x: x.as_strided((3, 3), (1, 1)),
    "expand": lambda x: x[:1].expand(4, -1),
    "a view of an expanded one": lambda x: x[:1].expand(4, -1).t(),
}


@pytest.mark.covers("F1.71")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("layer", ["aot_function", "torch.compile"])
@pytest.mark.parametrize("view", OVERLAPPING)
def test_a_write_to_a_view_that_overlaps_itself_is_refused_and_the_view_named(view: str, layer: str) -> None:
    def fn(x: Tensor) -> Tensor:
        OVERLAPPING[view](x).add_(1)
        return x * 1

    name = view.split()[-1].replace("one", "expand").replace("view", "unfold").replace("expanded expand", "expand")
    if layer == "aot_function":
        with pytest.raises(OverlappingWrite, match=f"made by {name}.*several of its elements are the same memory"):
            aotkit.aot_function(fn, lambda graph, inputs: graph)(torch.randn(6, 5))
        return
    with pytest.raises(Exception, match=f"made by {name}.*several of its elements are the same memory"):
        torch.compile(fn, backend="aotkit", options={"fallback": "error"})(torch.randn(6, 5))


def test_a_write_to_an_expanded_input_is_refused_in_the_same_words() -> None:
    with pytest.raises(
        OverlappingWrite, match="input 0, an expanded tensor, is written to, and several of its elements"
    ):
        aotkit.aot_function(lambda x: x.fill_(1), lambda graph, inputs: graph)(torch.randn(1, 3).expand(2, 3))


class Flattened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * 10).view(ctx.shape)


class Itself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 10


class Returned(Itself):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


CUSTOM: dict[str, Callable[..., Any]] = {
    "of an input": lambda f, x: f(x),
    "twice": lambda f, x: f(f(x).view_as(x)),
    "and a view of it": lambda f, x: (lambda v: (v, v.view(-1)[1:], x[0]))(f(x)),
    "with its base": lambda f, x: (lambda y: (y, f(y)))(x * 2),
    "two of one value": lambda f, x: (lambda y: (f(y), y.t(), f(y)))(x * 2),
    "beside a write": lambda f, x: (lambda y: (f(y), y.sum()))(x.mul(2).add_(1)),
}


@pytest.mark.sample(ways=1)
@pytest.mark.covers("F1.35")
@pytest.mark.parametrize("function", [Flattened, Itself, Returned])
@pytest.mark.parametrize("use", CUSTOM)
def test_a_view_made_by_a_custom_function_keeps_its_backward(
    same_as_eager: Check, use: str, function: type[torch.autograd.Function]
) -> None:
    def make() -> list[Tensor]:
        x = torch.randn(3, 4, requires_grad=True)
        return [x * 1 if use == "of an input" else x]

    same_as_eager(lambda x: CUSTOM[use](function.apply, x), make, lone_view=True)


AFTERWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "transposed clone": lambda x, y: (x.T.clone() * y, x.add_(1))[0],
    "contiguous": lambda x, y: (x.T.contiguous() * y, x.mul_(2)),
    "sum": lambda x, y: ((x.T + 0) * y, x.add_(1), x.T),
    "clone transposed": lambda x, y: (x.clone().T * y, x.copy_(y.T))[0],
    "sine": lambda x, y: (x.T.clone().sin() * y, x.zero_())[0],
    "a row": lambda x, y: ((x.T.clone() * y).exp(), x[0].add_(1))[0],
    "other rows": lambda x, y: (x[:2].clone() * y[:1, :1], x[1:].mul_(y.T[1:]), x)[::2],
    "under no_grad": lambda x, y: (x.T.clone() * y, _add_one_silently(x))[0],
    "needed as it was": lambda x, y: (x.T * y, x.add_(1))[0],
}


def _add_one_silently(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


@pytest.mark.filterwarnings("ignore::aotkit.EagerFallback")
@pytest.mark.parametrize("use", AFTERWARDS)
def test_a_value_may_change_after_a_copy_of_it_was_used(use: str) -> None:
    """By default, where a refusal means eager mode: the last case fails in the backward of eager mode as well."""
    results = []
    for call in (AFTERWARDS[use], torch.compile(AFTERWARDS[use], backend="aotkit")):
        torch.manual_seed(0)
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        outputs = call(x * 1, y)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        try:
            gradients = torch.autograd.grad(sum(o.sin().sum() for o in outputs), (x, y))
        except RuntimeError as error:
            gradients = ("modified by an inplace operation" in str(error),)
        results.append((*outputs, *gradients))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.covers("F1.33")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y[1:], lambda y: y.t(), lambda y: y.detach()])
def test_a_lone_view_of_an_intermediate_needs_no_base(same_as_eager: Check, view: Callable[[Tensor], Tensor]) -> None:
    captured = capture(lambda x: [view(x * 2)], [torch.randn(3, 4, requires_grad=True)])
    (output,) = captured.metadata.outputs
    assert output.kind is OutputKind.FRESH and captured.metadata.num_forward_outputs == 1
    same_as_eager(lambda x: view(x * 2), lambda: [torch.randn(3, 4, requires_grad=True)], lone_view=True)


PARTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "unbind": lambda y: y.unbind(0),
    "unbind, some": lambda y: y.unbind(1)[::2],
    "split": lambda y: y.split(2, 1),
    "split with sizes": lambda y: y.split([1, 3], 1),
    "chunk": lambda y: y.chunk(2, 1),
}


@pytest.mark.covers("F1.34")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_one_operation_need_no_base(same_as_eager: Check, parts: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return PARTS[parts](x * 2)

    captured = capture(lambda x: list(fn(x)), [torch.randn(3, 4, requires_grad=True)])
    assert {o.kind for o in captured.metadata.outputs} == {OutputKind.FRESH}
    assert not captured.metadata.intermediate_bases
    assert "as_strided" not in captured.graph.code  # the backward puts the parts together
    same_as_eager(fn, lambda: [torch.randn(3, 4, requires_grad=True)], lone_view=True)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (lambda y: (*y.chunk(2, 1), y))(x * 2),
        lambda x: (lambda y: (y.unbind(0)[0], y.unbind(0)[1]))(x * 2),
        lambda x: (lambda y: (y.unbind(0)[0],) * 2)(x * 2),
        lambda x: x.unbind(0),
        lambda x: [p.t() for p in (x * 2).split(2, 1)],
    ],
)
def test_parts_beside_other_views_share_memory_with_them(same_as_eager: Check, fn: Callable[..., Any]) -> None:
    same_as_eager(fn, lambda: [torch.randn(3, 4, requires_grad=True)], lone_view=True)


@pytest.mark.covers("F1.37")
@pytest.mark.parametrize("view", [lambda x: x[:], lambda x: x.view_as(x), lambda x: x.view(4), lambda x: x.expand(4)])
def test_a_view_that_changes_nothing_follows_its_base_through_a_resize_between_two_regions(
    view: Callable[[Tensor], Tensor],
) -> None:
    with torch.no_grad():
        first = torch.compile(lambda x: (view(x), x * 2), backend="aotkit", options={"fallback": "error"})
        second = torch.compile(lambda v: v * 3, backend="aotkit", options={"fallback": "error"})
        base = torch.arange(4.0)
        seen, _ = first(base)
        assert seen._base is base
        base.untyped_storage().resize_(0)
        base.untyped_storage().resize_(16)
        base.copy_(torch.ones(4))
        torch.testing.assert_close(second(seen), torch.full((4,), 3.0))


REPLAYED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "view": (lambda x: x.view(2, 6), "view"),
    "permute": (lambda x: x.t(), "permute"),
    "slice": (lambda x: x[1:], "as_strided"),
    "dtype": (lambda x: torch.view_as_complex(x.view(6, 2)), "as_strided"),
}


@pytest.mark.covers("F1.41", "F1.42")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("view", "method"), REPLAYED.values(), ids=REPLAYED)
def test_a_view_is_recorded_by_what_it_is_and_taken_by_the_plainest_operation(
    view: Callable[[Tensor], Tensor], method: str, dynamic: bool
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    captured = capture(lambda x: [view(x * 1), view(x)], [x], options=TraceOptions(dynamic=dynamic))
    plan = build_plan(captured.metadata, num_saved_tensors=0)
    assert WrapperPlan.from_json(plan.to_json()) == plan
    (taken,) = (o for o in plan.epilogue if hasattr(o, "history"))
    assert taken.method == ("as_strided" if dynamic else method)
    chains = [lambda x: [view(x.view_as(x)[:])], lambda x: [view(x.t().t())]]
    same = [capture(c, [x], options=TraceOptions(dynamic=dynamic)).metadata.outputs[0].view for c in chains]
    assert same == [taken.view, taken.view]  # whatever chain of operations led to it
    leaf = torch.randn(3, 4, requires_grad=True)
    compiled = aotkit.aot_function(lambda x: [view(x) * 2, view(x)], lambda graph, inputs: graph, dynamic=dynamic)
    got = compiled(leaf)
    torch.testing.assert_close(got, [view(leaf) * 2, view(leaf)])
    assert got[1]._base is leaf
    (gradient,) = torch.autograd.grad(got[1].abs().sum(), leaf)
    torch.testing.assert_close(gradient, torch.autograd.grad(view(leaf).abs().sum(), leaf)[0])


def test_the_window_over_a_scalar_may_be_written_to(captured_same_as_eager: Check) -> None:
    captured_same_as_eager(lambda x: (x.unfold(-1, 1, 1).sin_(), x * 2)[1], lambda: [torch.randn(())])


@pytest.mark.parametrize("flat", [Tensor.flatten, lambda w: w.view(-1), lambda w: w.reshape(-1, 1)])
def test_a_flattened_window_of_a_whole_transposed_input_is_written_to(captured_same_as_eager: Check, flat: Any) -> None:
    captured_same_as_eager(lambda x: [flat(x.unfold(0, 2, 2)).add_(1)], lambda: [torch.ones(6, 2).t()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64])
def test_an_expanded_input_seen_in_another_dtype(captured_same_as_eager: Check, dtype: torch.dtype) -> None:
    def make() -> list[Tensor]:
        return [torch.randn(1, 3, 2, dtype=torch.float64).expand(2, 3, 2)]

    captured_same_as_eager(lambda x: [x.view(dtype), x[1:, 1:].view(dtype)], make)
    captured_same_as_eager(lambda x: [x.view(torch.float64)], lambda: [torch.randn(1, 3, 2).expand(2, 3, 2)])


SAME = {
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "torch.dropout": lambda x: torch.dropout(x, p=0.3, train=False),
    "dropout module": lambda x: torch.nn.Dropout(0.5).eval()(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.0, True),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "expand": lambda x: x.expand(x.shape),
    "resolve_conj": lambda x: x.resolve_conj().resolve_neg(),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "real": lambda x: torch.real(x),
    "flatten": lambda x: torch.flatten(x, 1),
    "reshape": lambda x: x.reshape(-1, x.shape[1]),
    "broadcast_to": lambda x: torch.broadcast_to(x, x.shape),
    "squeeze": lambda x: x.squeeze(),
    "chunk": lambda x: x.chunk(1)[0],
    "positive": lambda x: +x,
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_a_write_to_what_an_operation_gave_back_is_a_write_to_its_argument(name, dynamic):
    def program(x):
        SAME[name](x).add_(1)
        return x * 2

    compiled = torch.compile(program, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    x = torch.rand(3, 4)
    y = x.clone()
    assert torch.equal(compiled(x), program(y)) and torch.equal(x, y)


@pytest.mark.parametrize("reshape", [Tensor.squeeze_, Tensor.t_, lambda x: x.unsqueeze_(1)])
def test_a_view_by_strides_that_is_older_than_a_change_of_shape_in_place_may_be_written_to(
    reshape: Callable[[Tensor], Tensor],
) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        value = x.clone()
        corner = value.as_strided((2, 2), (2, 1))
        reshape(value)
        return [corner, value.view_as(value)]

    def gradient(call: Callable[..., Any]) -> Tensor:
        x = torch.arange(24.0).view(3, 8).requires_grad_()
        corner, value = call(x)
        corner.mul_(3)
        (value * torch.arange(24.0).view(value.shape)).sum().backward()
        assert x.grad is not None
        return x.grad

    compiled = aotkit.aot_function(fn, lambda module, _: module, dynamic=False)
    torch.testing.assert_close(gradient(compiled), gradient(fn), rtol=0, atol=0)


@pytest.mark.parametrize("other", [lambda x: x.data, lambda x: x.data[1:], Tensor.detach])
def test_a_write_to_the_data_of_another_argument_is_noticed(other: Callable[[Tensor], Tensor]) -> None:
    """``x.data`` has a version counter of its own, ``x.detach()`` that of ``x``."""

    def write(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        return x.sin()

    for function in (write, torch.compile(write, backend="aotkit", options={"fallback": "error"})):
        x = torch.randn(4, requires_grad=True) * 1
        y = other(x)
        z = (torch.ones_like(y, requires_grad=True) * y).sum()
        torch.testing.assert_close(function(x, y), x.sin())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
