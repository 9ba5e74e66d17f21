"""Writes through views, shapes changed in place, windows and storages: what is recorded, and what the values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import FunctionalLayer, GraphMetadata, Unsupported, analyze, functional_layer
from aotkit_functionalize.records import MutationKind
from aotkit_functionalize.tracing import to_functional
from aotkit_functionalize.unfold import without_gaps
from aotkit_functionalize.wrap import from_functional

Check = Callable[..., GraphMetadata]
resize_storage = torch.ops.inductor.resize_storage_bytes_


@pytest.mark.parametrize("length", [7, 8, 9, 12])
@pytest.mark.parametrize(("size", "step"), [(1, 1), (2, 2), (2, 3), (1, 4), (3, 5), (4, 4), (6, 3)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_windows_are_those_of_unfold(length: int, size: int, step: int, dim: int) -> None:
    x = torch.arange(float(length * length)).view(length, length)
    with functional_layer(FunctionalLayer.DISPATCHER):
        windows = from_functional(without_gaps(Tensor.unfold, (to_functional(x), dim, size, step), {}))
    expected = x.unfold(dim, size, step)
    assert windows.shape == expected.shape and torch.equal(windows, expected)
    assert windows.data_ptr() == expected.data_ptr()


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda x: x.unfold(0, 2, 4),
    "last block cut off": lambda x: x.unfold(0, 2, 3),
    "one, wider than the step": lambda x: x.unfold(0, x.shape[0], 1),
    "one and a rest": lambda x: x.unfold(0, 10, 5),
    "exact": lambda x: x.unfold(0, 1, 1),
    "of a view": lambda x: x.unsqueeze(0).unfold(1, 2, 3),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_elements_between_windows_keep_their_values(same_as_eager: Check, name: str) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        WINDOWS[name](x).mul_(2)
        return [x * 1]

    same_as_eager(fn, lambda: [torch.randn(11)])


def test_overlapping_windows_are_refused_in_a_write_by_whoever_records_it() -> None:
    assert analyze(lambda x: [x.unfold(0, 3, 1) * 2], [torch.randn(6)]).num_mutated == 0


STEPS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "one write": (lambda x: x.add_(1), 1),
    "two writes": (lambda x: x.add_(1).mul_(2), 2),
    "a view's": (lambda x: x[1].add_(1), 1),
    "data": (lambda x: x.data.add_(1), 0),
    "shape and back": (lambda x: x.t_().t_(), 2),
    "shape and a write": (lambda x: x.t_().add_(1), 2),
    "list": (lambda x: torch._foreach_add_([x], 1.0), 1),
    "list by name": (lambda x: torch._foreach_add_(self=[x], scalar=1.0), 1),
    "nothing": (lambda x: x + 1, 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_version_counters_move_as_in_eager_mode(layer: FunctionalLayer, name: str) -> None:
    fn, steps = STEPS[name]
    x = torch.randn(3, 3)
    fn(x)
    assert x._version == steps
    info = analyze(lambda x: [fn(x)][:0], [torch.randn(3, 3)], layer=layer).inputs[0]
    assert info.version_steps == steps
    assert info.mutation_hidden_from_autograd is (name == "data")
    wanted = MutationKind.NONE if name in ("nothing", "shape and back") else MutationKind.DATA
    assert info.mutation is (MutationKind.DATA_AND_METADATA if name == "shape and a write" else wanted)


GRAD: dict[str, tuple[Callable[[Tensor], Any], bool, bool]] = {
    "autograd": (lambda x: x.mul_(2), False, False),
    "no_grad": (lambda x: _no_grad(lambda: x.mul_(2)), True, False),
    "detached": (lambda x: x.detach().mul_(2), True, False),
    "data": (lambda x: x.data.mul_(2), False, True),
    "no_grad, then autograd": (lambda x: (_no_grad(lambda: x.mul_(2)), x.mul_(2)), False, False),
    "no_grad data": (lambda x: _no_grad(lambda: x.data.mul_(2)), False, True),
}


def _no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


@pytest.mark.parametrize("name", GRAD)
def test_it_is_told_who_saw_a_write(layer: FunctionalLayer, name: str) -> None:
    fn, under_no_grad, hidden = GRAD[name]
    info = analyze(lambda x: [*[fn(x)][:0], x * 1], [torch.randn(3).requires_grad_() * 1], layer=layer).inputs[0]
    assert (info.mutation_under_no_grad, info.mutation_hidden_from_autograd) == (under_no_grad, hidden)
    assert info.meta is not None and info.meta.requires_grad and not info.is_leaf


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


def test_a_dirty_input_is_seen_by_autograd(layer: FunctionalLayer) -> None:
    metadata = analyze(lambda x: [_Dirty.apply(x) + 1], [torch.randn(3).requires_grad_() * 1], layer=layer)
    assert not metadata.inputs[0].mutation_under_no_grad
    assert [t.forward_output for t in metadata.tangents] == [0, 1]


ENLARGED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "set_ another's": lambda x, y: x.set_(y),
    "set_ a part": lambda x, y: x.set_(y[1:]),
    "set_ and back": lambda x, y: (lambda z: (x.set_(y), x.set_(z)))(x.detach()),
    "set_ a computed one": lambda x, y: x.set_(y * 2),
    "resize_": lambda x, y: x.resize_(5, 6),
    "resize_ to less": lambda x, y: x.resize_(2, 2),
    "storage": lambda x, y: resize_storage(x, 0),
}


@pytest.mark.parametrize("name", ENLARGED)
def test_storages_that_change_are_recorded(name: str) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Any]:
        ENLARGED[name](x, y)
        return []

    metadata = analyze(fn, [torch.randn(3, 4), torch.randn(3, 4)], layer=FunctionalLayer.DISPATCHER)
    info = metadata.inputs[0]
    change = info.storage
    if name in ("set_ and back", "resize_ to less"):
        assert change is None
        return
    assert change is not None and info.mutation is MutationKind.STORAGE
    assert change.input == (1 if name in ("set_ another's", "set_ a part") else None)
    assert change.output == (0 if name == "set_ a computed one" else None)
    assert change.resized is (name == "resize_") and change.num_bytes == (0 if name == "storage" else None)
    if name == "set_ a part":
        assert change.view is not None and (change.view.sizes, change.view.offset_delta) == ((2, 4), 4)
    if name == "resize_":
        assert change.view is not None and change.view.sizes == (5, 6)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x, y: (x.set_(y), y.set_(x * 1)), "both given other storages"),
        (lambda x, y: (resize_storage(x, 0), x.set_(y)), "then the input is given another"),
        (lambda x, y: x.set_((y * 2)[1:]), "is given a part of the storage of a value"),
        (lambda x, y: (x[1], x.resize_(9, 9))[0], "has views"),
        (lambda x, y: (x.t_(), resize_storage(x, 0)), "sizes or strides are changed in place"),
    ],
)
def test_changes_of_storage_that_nobody_could_carry_out_are_refused(fn: Callable[..., Any], text: str) -> None:
    kept: list[Any] = []

    def call(x: Tensor, y: Tensor) -> list[Any]:
        kept.append(x[1])
        fn(x, y)
        return []

    needs_view = text == "has views"
    with pytest.raises(Unsupported, match=text):
        analyze(
            call if needs_view else lambda x, y: [fn(x, y)][:0],
            [torch.randn(3, 4), torch.randn(3, 4)],
            layer=FunctionalLayer.DISPATCHER,
        )


LAID_OUT: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "reshape of gaps": lambda x: [x.mul_(2).reshape(-1)],
    "contiguous of gaps": lambda x: [x.mul_(2).contiguous()],
    "flatten of gaps": lambda x: [x.mul_(2).flatten()],
    "view of gaps": lambda x: [x.masked_fill_(x > 0, 0.0).view(2, 2, -1)],
    "ravel": lambda x: [x.masked_fill_(x > 0, 0.0).ravel()],
    "unflatten": lambda x: [x.masked_fill_(x > 0, 0.0).unflatten(0, (2, 2))],
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_becomes_a_copy_in_eager_mode_becomes_one(same_as_eager: Check, name: str) -> None:
    same_as_eager(LAID_OUT[name], lambda: [torch.randn(4, 12)[:, ::2]])
    same_as_eager(LAID_OUT[name], lambda: [torch.randn(4, 12)[:, 2:6]])
    same_as_eager(LAID_OUT[name], lambda: [torch.randn(4, 6)])


@pytest.mark.parametrize("view", [((2, 2), (24, 4)), ((3,), (2,)), ((0,), (1,)), ((4,), (12,))])
def test_as_strided_of_a_tensor_with_gaps_may_be_written_to_where_its_elements_are(
    same_as_eager: Check, view: Any
) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        part = x.as_strided(*view)
        part.mul_(3)
        return [part, x * 1]

    same_as_eager(fn, lambda: [torch.randn(4, 12)[:, ::2]])


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 5)
    return x


HOOKED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "the view": lambda x: [_hooked(x.view_as(x)), x],
    "a view on the way": lambda x: [_hooked(x.view(-1))[1:], x],
    "of a computed one": lambda x: (lambda y: [y, _hooked(y.t())[:1]])(x * 2),
    "base written later": lambda x: (lambda y, v: (y.mul_(3), [v, y])[1])(*(lambda y: (y, _hooked(y[1:])))(x * 2)),
    "nothing": lambda x: [x.view(-1), x.t()[1:]],
}


# Autograd makes the function of a view anew once its base was written to, without the hook.
VIEWS_OF_BASES = {"base written later": 1, "nothing": 2}


@pytest.mark.parametrize("name", HOOKED)
def test_a_view_behind_a_hook_has_the_gradient_of_the_hook(same_as_eager: Check, name: str) -> None:
    metadata = same_as_eager(HOOKED[name], lambda: [torch.randn(4, 6).requires_grad_() * 1], memory=name == "nothing")
    assert len([o for o in metadata.outputs if o.view is not None]) == VIEWS_OF_BASES.get(name, 0)


@pytest.mark.parametrize(
    "write",
    [
        lambda a, b: torch._foreach_add_([a, b], [b, a]),
        lambda a, b: torch._foreach_add_([a, b], other=[b, a]),
        lambda a, b: torch._foreach_mul_(self=[a, b], other=[b, a]),
        lambda a, b: torch._foreach_copy_([a[1:], b], [b[1:], a]),
        lambda a, b: torch._foreach_mul_([a, b], a[0]),
        lambda a, b: torch._foreach_addcmul_([a, b], [b, b], [b, a[2]]),
    ],
)
def test_lists_are_not_written_to_where_a_later_member_reads_what_was_written(
    layer: FunctionalLayer, write: Callable[[Tensor, Tensor], Any]
) -> None:
    with pytest.raises(Unsupported, match="reads memory that it writes to before"):
        analyze(lambda a, b: [write(a, b)][:0], [torch.randn(3), torch.randn(3)], layer=layer)


@pytest.mark.parametrize("others", [lambda a, b: [a, b], lambda a, b: [b, b], lambda a, b: b[0]])
def test_lists_are_written_to_where_what_is_read_is_as_it_was(
    layer: FunctionalLayer, others: Callable[[Tensor, Tensor], Any]
) -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        torch._foreach_add_([a, a.new_ones(3)], others(a, b * 1))
        return []

    inputs = analyze(fn, [torch.randn(3), torch.randn(3)], layer=layer).inputs
    assert [i.mutation for i in inputs] == [MutationKind.DATA, MutationKind.NONE]


def test_an_operator_that_writes_to_a_list_and_to_a_tensor_counts_no_write(layer: FunctionalLayer) -> None:
    def fn(x: Tensor, found: Tensor, scale: Tensor) -> list[Tensor]:
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, scale)
        return []

    def make() -> list[Tensor]:
        return [torch.randn(3), torch.zeros(1), torch.tensor(0.5)]

    given = make()
    fn(*given)
    inputs = analyze(fn, make(), layer=layer).inputs
    assert [i.mutation for i in inputs] == [MutationKind.DATA, MutationKind.DATA, MutationKind.NONE]
    assert [i.version_steps for i in inputs] == [x._version for x in given]


PARTS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: torch.unsafe_split(x, 2),
    "chunk": lambda x: x.unsafe_chunk(2),
    "sizes": lambda x: x.unsafe_split_with_sizes([1, 3]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_autograd_does_not_watch_are_memory_of_the_whole(layer: FunctionalLayer, name: str) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        first, last = PARTS[name](x)
        first.add_(1)
        return [last]

    metadata = analyze(fn, [torch.randn(4, 4)], layer=layer)
    assert metadata.inputs[0].mutation is MutationKind.DATA
    assert metadata.outputs[0].base == 0


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_tensor_that_requires_grad_are_written_to_where_none_is_wanted(
    layer: FunctionalLayer, name: str
) -> None:
    def without(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            PARTS[name](x)[0].add_(1)
        return [x * 2]

    def within(x: Tensor) -> list[Tensor]:
        whole = x * 1
        PARTS[name](whole)[0].view(-1).add_(1)
        return [whole * 2]

    given = torch.randn(4, 4, requires_grad=True)
    assert analyze(without, [given], layer=layer).inputs[0].mutation is MutationKind.DATA
    with pytest.raises(Unsupported, match="a part that unsafe_"):
        analyze(within, [given], layer=layer)


def _list_of(name: str, *args: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        targets = [x.clone()]
        getattr(torch, name)(targets, *(a(y) if callable(a) else a for a in args))
        return targets[0]

    return fn


OTHER_TYPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: x.clone().add_(y),
    "mul_": lambda x, y: x.clone().mul_(other=y),
    "addcmul_": lambda x, y: x.clone().addcmul_(y, y),
    "list": _list_of("_foreach_add_", lambda y: [y]),
    "numbers": _list_of("_foreach_mul_", [1.5j]),
    "number": lambda x, y: x.clone().mul_(1.5j),
    "one for all": _list_of("_foreach_mul_", lambda y: y[0]),
    "lists": _list_of("_foreach_addcmul_", lambda y: [y], lambda y: [y]),
}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.complex64), (torch.int64, torch.complex64)], ids=str)
@pytest.mark.parametrize("name", OTHER_TYPES)
def test_writes_of_a_type_that_the_tensor_does_not_hold_are_refused(name: str, dtypes: tuple[Any, Any]) -> None:
    """Eager mode raises; captured, a part of each number was lost."""
    args = [torch.ones(3, dtype=dtype) for dtype in dtypes]
    with pytest.raises(RuntimeError, match="can't be cast"):
        OTHER_TYPES[name](*args)
    with pytest.raises(Unsupported, match="eager mode refuses it"):
        analyze(lambda x, y: [OTHER_TYPES[name](x, y)], args)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.complex64, torch.int64)], ids=str)
@pytest.mark.parametrize("name", [name for name in OTHER_TYPES if not name.startswith("number")])
def test_writes_of_a_type_that_the_tensor_holds_are_not(
    same_as_eager: Check, name: str, dtypes: tuple[Any, Any]
) -> None:
    same_as_eager(lambda x, y: [OTHER_TYPES[name](x, y)], lambda: [torch.ones(3, dtype=dtype) for dtype in dtypes])


@pytest.mark.parametrize("name", ["_foreach_addcmul_", "_foreach_addcdiv_"])
@pytest.mark.parametrize("factor", [0.5, [0.5]], ids=str)
def test_a_factor_of_products_and_quotients_may_be_of_another_type(
    same_as_eager: Check, name: str, factor: Any
) -> None:
    """Eager mode converts it."""
    numbers = torch.int64 if name == "_foreach_addcmul_" else torch.float32  # it divides no integers
    run = _list_of(name, lambda y: [y], lambda y: [y], factor)
    same_as_eager(lambda x, y: [run(x, y)], lambda: [torch.full((3,), 2, dtype=numbers) for _ in range(2)])


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.float32, torch.complex64)], ids=str)
def test_ldexp_is_a_product_with_floats(dtypes: tuple[Any, Any]) -> None:
    args = [torch.ones(3, dtype=dtype) for dtype in dtypes]
    with pytest.raises(RuntimeError, match="can't be cast"):
        args[0].ldexp_(args[1])
    with pytest.raises(Unsupported, match="eager mode refuses it"):
        analyze(lambda x, y: [x.clone().ldexp_(y)], args)


def test_values_of_another_type_are_not_put_into_a_tensor() -> None:
    places, values = torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64)
    with pytest.raises(Unsupported, match="eager mode refuses it"):
        analyze(lambda x, i, y: [x.index_put_((i,), y)], [torch.ones(3), places, values])
