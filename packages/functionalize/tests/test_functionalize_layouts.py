"""Shapes changed in place, writes to what has gaps, views by strides: as in eager mode, or refused."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    OverlappingMutation,
    Unsupported,
    analyze,
    collect_metadata,
    fake_arguments,
    function_inputs,
    functional_layer,
)
from aotkit_functionalize.aliases import shares_storage
from aotkit_functionalize.layouts import Layouts, view_exists
from aotkit_functionalize.overlap import covers, repeats_memory
from aotkit_functionalize.random_writes import as_eager_draws, check_normal
from aotkit_functionalize.records import InputInfo, InputKind, MutationKind, OutputInfo, OutputKind, ViewSpec
from aotkit_functionalize.subclasses.context import contains_symbols
from aotkit_functionalize.unfold import without_gaps

Check = Callable[..., GraphMetadata]


def _computed() -> Tensor:
    torch.manual_seed(3)
    return torch.rand(4, 6).requires_grad_() * 1


def _gaps() -> Tensor:
    return torch.rand(4, 12)[:, ::2]


def _steps(*steps: Any) -> list[Any]:
    return [steps[-1]]


def _reshaped(*steps: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], list[Tensor]]:
    """What the last step gives of a computed tensor and a view of it."""

    def fn(x: Tensor) -> list[Tensor]:
        y = x * 2
        view = y[1:]
        found = [step(y, view) for step in steps]
        return [found[-1], y]

    return fn


OLDER: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "shape, write, use": _reshaped(lambda y, v: y.t_(), lambda y, v: y.mul_(3), lambda y, v: v * 2),
    "write, shape, use": _reshaped(lambda y, v: y.mul_(3), lambda y, v: y.t_(), lambda y, v: v * 2),
    "write, shape, use in a list": _reshaped(
        lambda y, v: y.mul_(3), lambda y, v: y.t_(), lambda y, v: torch.cat([torch.ones(1, 6), v])
    ),
    "shape, write to the view": _reshaped(lambda y, v: y.t_(), lambda y, v: v.mul_(3), lambda y, v: y * 1),
    "write to the view, shape, use": _reshaped(lambda y, v: v.mul_(3), lambda y, v: y.t_(), lambda y, v: v * 2),
}


@pytest.mark.parametrize("name", OLDER)
def test_a_view_that_is_older_than_a_change_of_shape_and_a_write_is_refused(layer: FunctionalLayer, name: str) -> None:
    with pytest.raises(Unsupported, match="a view that is older than that is used"):
        analyze(OLDER[name], [_computed()], layer=layer)


NEWER: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "shape, write, view": _reshaped(lambda y, v: y.t_(), lambda y, v: y.mul_(3), lambda y, v: y[1:].sin()),
    "write, shape, view": _reshaped(lambda y, v: y.mul_(3), lambda y, v: y.t_(), lambda y, v: y[:, 1:].sin()),
    "shape, write to a newer view": _reshaped(
        lambda y, v: y.t_(), lambda y, v: y[2].mul_(3), lambda y, v: y.sin() * y[0]
    ),
    "shape and use of the older": _reshaped(lambda y, v: y.unsqueeze_(0), lambda y, v: v.sin()),
    "shape twice": _reshaped(lambda y, v: y.t_(), lambda y, v: y.t_(), lambda y, v: (y * v[0][:, None][:4, :]).sum()),
    "uses of what has no gradient": lambda x: (lambda d: [d.t_().mul_(2), d[1:] * x[0, 0]])(x.detach() * 1),
    "older, without gradient": lambda x: (lambda d: (lambda v: [d.t_().mul_(2), v * 1, x * 2])(d[1:]))(x.detach() * 1),
    "newer, written before": lambda x: (lambda y: [y.mul_(3), y.t_(), y[1:] * 1][1:])(x * 2),
}


@pytest.mark.parametrize("name", NEWER)
def test_what_is_newer_or_has_no_gradient_is_what_eager_mode_gives(same_as_eager: Check, name: str) -> None:
    same_as_eager(NEWER[name], lambda: [_computed()])


STRANGE: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "negated": (torch._neg_view, torch.float64),
    "conjugated": (lambda y: y.conj(), torch.complex128),
    "parts": (torch.view_as_real, torch.complex128),
    "imaginary": (lambda y: y.imag, torch.complex128),
    "a row, negated": (lambda y: torch._neg_view(y[1:]), torch.float32),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_view_that_no_strides_describe_keeps_the_shape_that_it_was_taken_of(
    layer: FunctionalLayer, same_as_eager: Check, name: str
) -> None:
    view, dtype = STRANGE[name]

    def older(x: Tensor, *, used: bool) -> list[Tensor]:
        y = x * 2
        v = view(y)
        y.t_()
        return [v * 1.5 if used else v]

    def newer(x: Tensor) -> list[Tensor]:
        y = x * 2
        y.t_()
        return [view(y) * 1.5]

    argument = torch.rand(4, 6, dtype=dtype)
    for used in (False, True):
        with pytest.raises(Unsupported, match="a view that is older than that"):
            analyze(partial(older, used=used), [argument.clone().requires_grad_()], layer=layer)
        assert analyze(partial(older, used=used), [argument], layer=layer).outputs
    same_as_eager(newer, lambda: [argument.clone().requires_grad_()])


def test_what_the_gradient_needs_keeps_its_shape(layer: FunctionalLayer, same_as_eager: Check) -> None:
    def before(x: Tensor) -> list[Tensor]:
        y = x * 2
        z = y.sin()
        y.t_()
        return [z]

    def after(x: Tensor) -> list[Tensor]:
        y = x * 2
        y.t_()
        return [y.sin()]

    _, plain = fake_arguments([torch.rand(4, 6)])
    for fn in (before, after):
        with plain[0].fake_mode, functional_layer(layer) as events:
            (entered,) = function_inputs(plain, [_computed()])
            (found,) = fn(entered.value)
            context = pytest.raises(Unsupported, match="a value that the gradient needs is changed in shape")
            with context if fn is before else contextlib.nullcontext():
                events.layouts.check_saved([found.grad_fn])
    same_as_eager(after, lambda: [_computed()])


def test_shapes_change_in_inference_mode_and_where_grad_mode_was_off_before(layer: FunctionalLayer) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            y = x * 2
            y.t_()
            return [y * 1]

    assert analyze(fn, [torch.rand(4, 6)], layer=layer).outputs[0].meta.sizes == (6, 4)  # type: ignore[union-attr]

    def off(x: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            y = x * 2
        return [y.t_() * 1]

    with torch.no_grad():
        assert analyze(off, [_computed()], layer=layer).outputs[0].meta.sizes == (6, 4)  # type: ignore[union-attr]
    with pytest.raises(Unsupported, match="requires grad is changed in shape in place"):
        analyze(lambda x: [torch.no_grad()(lambda y: y.t_())(x * 2)], [_computed()], layer=layer)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "overlap": (
        lambda x: (lambda v: _steps(v.mul_(torch.tensor(2.0)), v.reshape(4, 30)))(x.squeeze([])),
        lambda: torch.rand(99).as_strided((4, 5, 6), (2, 6, 1), 4),
        "several of its elements are the same memory",
    ),
    "detached gaps": (
        lambda x: (lambda d: _steps(d.masked_fill_(d > 0.5, 0), d.reshape(-1)))(x.detach()),
        _gaps,
        "reshape() taken of it",
    ),
    "beyond a view": (
        lambda x: (lambda y: (lambda v: _steps(v.as_strided((2,), (1,), 0), y.mul_(2)))(y[1:]))(x * 2),
        _computed,
        "took a view beyond the elements of another view",
    ),
    "offset": (
        lambda x: _steps(x.as_strided((2,), (1,), 9).mul_(2), x * 1),
        lambda: (torch.rand(40).requires_grad_() * 1)[7:31].view(4, 6),
        "a tensor that does not begin where its storage does is written to",
    ),
    "view of gaps that eager mode refuses": (
        lambda x: _steps(x.masked_fill_(x > 0.5, 0), x.view(-1)),
        lambda: torch.rand(4, 12)[:, 2:8],
        "and then view() taken of it",
    ),
}


def test_a_view_that_the_shape_of_its_base_has_no_place_for_is_refused(layer: FunctionalLayer) -> None:
    def older_diagonal(x: Tensor) -> list[Tensor]:
        y = x * 2
        view = y.diagonal(1)
        y.detach()[0] = 2
        y.squeeze_()
        return [view]

    with pytest.raises(Unsupported, match="whose base was written to and changed its shape in place"):
        analyze(older_diagonal, [torch.rand(1, 4).requires_grad_()], layer=layer)


@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_new_values_do_not_have_are_refused(layer: FunctionalLayer, name: str) -> None:
    fn, make, text = REFUSED[name]
    with pytest.raises((Unsupported, RuntimeError)) as refusal:
        analyze(fn, [make()], layer=layer)
    assert text in str(refusal.value) or (name.endswith("refuses") and "view" in str(refusal.value))


BESIDE: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "used": lambda x: (lambda v: _steps(x.add_(1), v * 2))(x.as_strided((3,), (1,), 3)),
    "used, a part written": lambda x: (lambda v: _steps(x[1:].add_(1), v * 2))(x.as_strided((2,), (4,))),
    "used, detached": lambda x: (lambda v: _steps(x.detach().add_(1), v * 2))(x.as_strided((5,), (1,))),
    "taken later": lambda x: _steps(x.add_(1), x.as_strided((3,), (1,), 3)),
    "its gradient": lambda x: (lambda v: _steps(x.detach().add_(1), v))(x.as_strided((3,), (1,), 3)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_memory_beside_a_tensor_is_not_read_after_a_write(layer: FunctionalLayer, name: str, grad: bool) -> None:
    argument = (torch.rand(10).requires_grad_(grad) * 1)[:4]
    if name == "its gradient" and not grad:
        assert analyze(BESIDE[name], [argument], layer=layer).outputs  # taken of the caller's memory, after the call
        return
    with pytest.raises(Unsupported, match="a view beyond its elements"):
        analyze(BESIDE[name], [argument], layer=layer)


STRIDED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "within": lambda x: (lambda y: [y[1:].as_strided((2, 3), (6, 1), 6), y])(x * 2),
    "beyond": lambda x: (lambda y: [y[1:].as_strided((2, 3), (6, 1), 0), y])(x * 2),
    "beyond, of a view": lambda x: (lambda y: [y[1:], y[1:].as_strided((2, 3), (6, 1), 0)])(x * 2),
    "beyond, then a view": lambda x: (lambda y: [y[2:].as_strided((4, 3), (6, 1), 0)[1:], y])(x * 2),
    "of the whole": lambda x: (lambda y: [y.as_strided((2, 3), (6, 1), 3), y.view(-1)])(x * 2),
    "twice": lambda x: (lambda y: [y.as_strided((4, 6), (6, 1)).as_strided((3,), (2,), 1), y])(x * 2),
    "of gaps": lambda x: (lambda y: [y[:, ::2].as_strided((2, 3), (6, 1), 1), y])(x * 2),
    "beyond, and back": lambda x: (lambda y: [y[1:].as_strided((4, 6), (6, 1), 0).as_strided((2,), (1,), 9), y])(x * 2),
    "back, and beyond": lambda x: (lambda y: [y[1:].as_strided((1, 6), (6, 1), 6).as_strided((2,), (1,), 1), y])(x * 2),
    "of columns": lambda x: (lambda y: [y[:, 1:4].as_strided((2, 3), (6, 1), 2), y])(x * 2),
    "of the input": lambda x: [x.as_strided((2, 3), (6, 1), 3), x[1:].as_strided((3,), (1,), 0), x[1:]],
    "further": lambda x: (lambda y: [y[1:].as_strided((4, 6), (6, 1), 0).as_strided((2,), (1,), 1), y])(x * 2),
    "written": lambda x: (lambda y: [y.as_strided((2, 3), (6, 1), 3).mul_(3), y.sin()])(x * 2),
    "within, then written": lambda x: (lambda v: [x.mul_(3), v.sin()])(x.as_strided((2, 3), (6, 1), 3)),
    "written, then within": lambda x: [x.mul_(3), x.as_strided((2, 3), (6, 1), 3).sin()],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_views_by_strides_are_what_eager_mode_gives(same_as_eager: Check, name: str, grad: bool) -> None:
    same_as_eager(STRIDED[name], lambda: [_computed() if grad else _computed().detach()], memory=not grad)


def test_a_view_by_strides_of_the_whole_does_not_come_out_of_the_graph(layer: FunctionalLayer) -> None:
    found = analyze(STRIDED["of the whole"], [_computed()], layer=layer).outputs
    assert [output.graph_output for output in found] == [None, None]


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda y: y.t_(),
    "and back": lambda y: y.t_().t_(),
    "one dimension more": lambda y: y.unsqueeze_(1),
    "flat": lambda y: y.as_strided_((24,), (1,)),
    "transposed, then flat": lambda y: y.t_().as_strided_((24,), (1,)),
    "a part": lambda y: y.as_strided_((2, 6), (6, 1)),
}
BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "within": lambda y: y[1:].as_strided((2, 3), (6, 1), 6),
    "beyond": lambda y: y[1:].as_strided((2, 3), (6, 1), 0),
    "of the whole": lambda y: y.as_strided((2, 3), (6, 1), 3),
    "beyond, and further": lambda y: y[1:].as_strided((4, 6), (6, 1), 0).as_strided((2,), (1,), 1),
    "repeated": lambda y: y[1:].as_strided((2, 3), (0, 1), 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BEFORE)
def test_views_by_strides_have_all_their_gradient_after_a_change_of_shape(
    same_as_eager: Check, name: str, change: str
) -> None:
    def of_the_input(x: Tensor) -> list[Tensor]:
        view = BEFORE[name](x)
        CHANGES[change](x)
        return [view, x]

    def computed(x: Tensor) -> list[Tensor]:
        y = x * 2
        view = BEFORE[name](y)
        CHANGES[change](y)
        return [view, y]

    same_as_eager(of_the_input, lambda: [_computed()])
    if change != "a part":  # else no result holds all elements of the other
        same_as_eager(computed, lambda: [_computed()])


USES_OF_STRIDES: dict[str, Callable[[Tensor], Any]] = {
    "flattened": lambda v: v.flatten().add_(1),
    "reshaped": lambda v: v.reshape(-1).add_(1),
    "contiguous": lambda v: v.contiguous().add_(1),
}


@pytest.mark.parametrize("use", USES_OF_STRIDES)
@pytest.mark.parametrize("view", [torch.t, lambda y: y[:, ::2]], ids=["transposed", "with gaps"])
def test_a_view_that_was_written_to_keeps_its_strides(
    same_as_eager: Check, view: Callable[[Tensor], Tensor], use: str
) -> None:
    """The functional form of the write is contiguous; what is a copy of the view in eager mode is one here."""

    def fn(x: Tensor) -> list[Tensor]:
        y = x * 1
        v = view(y)
        v.masked_fill_(v > 0.5, 0.25)
        USES_OF_STRIDES[use](v)
        return [y]

    same_as_eager(fn, lambda: [torch.rand(4, 6)])


OTHERS: dict[str, tuple[Callable[..., list[Tensor]], Callable[[], list[Tensor]]]] = {
    "keywords": (lambda x: [x.sum(0, dtype=torch.float64), torch.add(x, x, alpha=3), x.std(0, correction=0)],
                 lambda: [torch.rand(4, 6)]),
    "addbmm_": (lambda x, a, b: [x.addbmm_(a, b)],
                lambda: [torch.rand(4, 6), torch.rand(2, 4, 3), torch.rand(2, 3, 6)]),
    "addbmm_ with keywords": (lambda x, a, b: [x.addbmm_(a, b, beta=0.5, alpha=2.0)],
                              lambda: [torch.rand(3, 5), torch.rand(2, 3, 4), torch.rand(2, 4, 5)]),
    "bernoulli_ of gaps": (lambda x: [x.bernoulli_(p=0.25)], lambda: [_gaps()]),
    "bernoulli": (lambda x: [torch.bernoulli(x), torch.bernoulli(x, 0.5)], lambda: [torch.rand(6, 4).t()]),
    "bernoulli of nothing, expanded": (
        lambda x: [torch.bernoulli(x, 0.5).view(torch.int16)],
        lambda: [torch.rand(1, 1, 31, 0).as_strided((1, 8, 31, 0), (0, 0, 1, 1))],
    ),
    "views of a negated value": (lambda x: (lambda y: [y[1:], y[:2]])(torch._neg_view(x * 2)),
                                 lambda: [torch.rand(4, 6)]),
    "views of a conjugated value": (lambda x: (lambda y: [y[1:], y[:2], y])(torch.complex(x, x * 2).conj()),
                                    lambda: [torch.rand(4, 6)]),
    "views of a detached negated value": (lambda x: (lambda y: [y[1:], y[:2]])(torch._neg_view(x * 2).detach()),
                                          lambda: [_computed()]),
    "views of a detached conjugated value": (
        lambda x: (lambda y: [y[1:], y[:2]])(torch.complex(x, x * 2).conj().detach()), lambda: [torch.rand(4, 6)]
    ),
    "view of a value written to": (lambda x: (lambda y: (lambda v: [y.mul_(2), v][1:])(y[1:]))(x * 2),
                                   lambda: [_computed()]),
    "written list": (lambda x: (lambda y: (torch._foreach_add_([y, x], 1), [torch.cat([y, x]), x])[1])(x * 2),
                     lambda: [torch.rand(4, 6)]),
    "several results": (lambda x: [*torch.var_mean(x, 0), *x.topk(2), *torch.sort(x)], lambda: [torch.rand(4, 6)]),
    "several results of what was written": (lambda x: [x.mul_(2), *torch.var_mean(x[1:], 0), *torch.unbind(x * 1)][1:],
                                            lambda: [torch.rand(4, 6)]),
    "list of what was written": (lambda x: (lambda v: [x.mul_(3), torch.cat([v, v]), torch.stack([x, x])])(x[1:]),
                                 lambda: [torch.rand(4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_programs_are_what_eager_mode_gives(same_as_eager: Check, name: str) -> None:
    fn, make = OTHERS[name]
    same_as_eager(fn, make)


def test_a_view_of_what_is_not_returned_is_returned_alone(layer: FunctionalLayer) -> None:
    """Its base would keep all its memory alive."""
    for grad in (False, True):
        found = analyze(lambda x: [(x * 2)[0], (x * 3).t()], [_computed() if grad else torch.rand(4, 6)], layer=layer)
        assert [o.kind for o in found.outputs] == [OutputKind.FRESH] * 2 and not found.intermediate_bases


WINDOWS: list[tuple[tuple[int, ...], tuple[int, int, int]]] = [
    ((4, 6), (0, 2, 3)), ((4, 6), (1, 2, 3)), ((4, 6), (1, 3, 2)), ((4, 6), (1, 2, 4)), ((4, 6), (1, 6, 6)),
    ((4, 6), (1, 4, 3)), ((4, 6), (1, 5, 4)), ((4, 6), (-1, 2, 2)), ((7,), (0, 2, 3)), ((4, 6), (1, 1, 5)),
    ((4, 6), (0, 4, 1)), ((4, 6), (0, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "numbers"), WINDOWS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_windows_may_be_written_to(same_as_eager: Check, sizes: Any, numbers: Any, transposed: bool) -> None:
    """Where they do not overlap."""
    dim, size, step = numbers

    def fn(x: Tensor) -> list[Tensor]:
        y = x.t() if transposed else x
        windows = y.unfold(dim, size, step)
        if size <= step or y.shape[dim] - size < step:
            windows.mul_(3)
        one = y.shape[dim] - size < step < size  # the stride of its dimension is that of no element
        return [windows.reshape(-1) if one else windows, x * 1]

    if transposed and y_too_small(sizes, dim, size):
        return
    same_as_eager(fn, lambda: [torch.rand(sizes)])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_window_of_everything_is_detached_and_written_to(same_as_eager: Check, order: Any, dim: int) -> None:
    """In memory that is in another order: the strides stay, of the tensor and of the window."""
    sizes = (2, 3, 4)

    def fn(x: Tensor) -> list[Tensor]:
        y = x.permute(order).contiguous().permute([order.index(i) for i in range(3)]).sin()
        window = y.unfold(dim, sizes[dim], sizes[dim])
        window.detach().mul_(2)
        return [y, window]

    same_as_eager(fn, lambda: [torch.rand(sizes)])


def y_too_small(sizes: tuple[int, ...], dim: int, size: int) -> bool:
    return tuple(reversed(sizes))[dim] < size


def test_windows_of_a_number_and_by_keywords(same_as_eager: Check) -> None:
    same_as_eager(lambda x: [x.unfold(0, 1, 1), x * 1], lambda: [torch.tensor(3.0)])
    same_as_eager(lambda x: [torch.ops.aten.unfold.default(x, 0, True, 2), x * 1], lambda: [torch.rand(5)])
    same_as_eager(lambda x: [x.unfold(dimension=0, size=2, step=3), x * 1], lambda: [torch.rand(8)])
    number = torch.tensor(3.0)
    assert without_gaps(torch.Tensor.unfold, (number, 0, 0, 1), {}).shape == number.unfold(0, 0, 1).shape
    plain = torch.rand(6)
    assert without_gaps(torch.Tensor.unfold, (plain, 0, 0, 2), {}).shape == (4, 0)
    with pytest.raises(RuntimeError, match="step is 0"):
        without_gaps(torch.Tensor.unfold, (plain, 0, 2, 0), {})


def test_what_lies_within_a_dense_tensor_is_covered() -> None:
    base = torch.rand(4, 6)
    part = base[1:3]
    assert covers(base, part) and covers(part, part) and not covers(part, base)
    assert not covers(base[:2], base) and not covers(base[:2], base.view(torch.int16))
    assert covers(base[:2], base[:2].view(torch.int16)) and not covers(base[:1].view(torch.int16), base[:2])
    for inside in (base[1, :1], base[2, 5:], part[:, 2:4], part.t(), base[1:1]):
        assert covers(part, inside)
    for outside in (base[0, 5:], base[3, :1], base[0, :1], base[3, 5:], base[0:2], base[2:]):
        assert not covers(part, outside)
    assert covers(base, base.view(torch.int16)[:, 2:]) and not covers(part, base.view(torch.int16)[3, :1])
    assert covers(base[0, 0], base[:0]) and covers(base[:0], base[:0]) and not covers(base[:0], base[0, :1])


@pytest.mark.parametrize(
    ("sizes", "strides", "repeats"),
    [((4, 6), (6, 1), False), ((4, 6), (5, 1), True), ((4, 1), (0, 1), True), ((1, 6), (0, 1), False),
     ((0, 6), (0, 0), False), ((2, 3), (3, 1), False), ((2, 3), (2, 1), True), ((3, 2), (1, 3), False),
     ((3, 2), (1, 2), True), ((), (), False), ((5,), (2,), False), ((2, 2, 2), (1, 2, 4), False),
     ((2, 2, 2), (1, 2, 3), True)],
)  # fmt: skip
def test_repeated_memory_is_told_by_sizes_and_strides(sizes: Any, strides: Any, repeats: bool) -> None:
    assert repeats_memory(torch.rand(64).as_strided(sizes, strides)) is repeats


def _placed(rng: random.Random, sizes: list[int]) -> list[int]:
    """Strides with gaps, of an order, or of a dimension that repeats; any for dimensions of size one."""
    strides, step = [0] * len(sizes), 1
    for dim in rng.sample(range(len(sizes)), len(sizes)) if rng.random() < 0.3 else reversed(range(len(sizes))):
        strides[dim], step = step, step * (sizes[dim] + rng.choice((0, 0, 0, 1)))
        if sizes[dim] == 1 or rng.random() < 0.1:
            strides[dim] = rng.choice((0, 1, 7))
    return strides


def _factors(rng: random.Random, number: int) -> list[int]:
    found = []
    while number > 1:
        found.append(rng.choice([k for k in range(2, number + 1) if number % k == 0]))
        number //= found[-1]
        found += [1] * (rng.random() < 0.2)
    return rng.sample(found, len(found))


def test_a_view_exists_where_eager_mode_gives_one() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        sizes = [rng.choice((1, 1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
        tensor = torch.empty(4000).as_strided(sizes, _placed(rng, sizes))
        wanted = _factors(rng, tensor.numel())
        try:
            tensor.view(wanted)
            exists = True
        except RuntimeError:
            exists = False
        assert view_exists(tensor, wanted) is exists, (sizes, tensor.stride(), wanted)
        seen.add(exists)
    assert seen == {True, False} and view_exists(torch.empty(0, 3)[:, ::2], [0, 5])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_that_only_the_tracing_has_is_refused(layer: FunctionalLayer, dynamic: bool) -> None:
    x = torch.rand(4000).as_strided((17, 1, 2, 16), (192, 1, 16, 1), 2)
    for fn in (lambda x: [x.view(136, 2, 2)], lambda x: [x.view_as(torch.empty(136, 2, 2))]):
        with pytest.raises(RuntimeError, match="not compatible"):
            fn(x)
        with pytest.raises((Unsupported, RuntimeError), match=r"no strides reach its elements|not compatible"):
            analyze(fn, [x], layer=layer, dynamic=dynamic)
    analyze(lambda x: [x.view(17, 4, 8), x.view(torch.int32), x.view(17, 32)], [x], layer=layer, dynamic=dynamic)


def test_fake_arguments_are_outside_of_autograd_and_of_inference_mode() -> None:
    mode, (lazy, plain) = fake_arguments([torch._neg_view(torch.rand(3)), torch.rand(3)])
    assert not lazy.is_neg() and not lazy.is_inference() and not plain.is_inference()
    with mode:
        given = torch.rand(3).requires_grad_()
    _, (again,) = fake_arguments([given])
    assert again is not given and not again.requires_grad and given.requires_grad
    with torch.inference_mode():
        _, (lazy,) = fake_arguments([torch._neg_view(torch.rand(3))])
    assert not lazy.is_inference()


def test_contexts_that_hold_themselves_are_looked_at_to_some_depth() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert not contains_symbols(endless)
    assert not contains_symbols({"a": [{"b": (1, "x")}]})


def test_a_run_begins_with_nothing_known_of_layouts() -> None:
    with torch.no_grad():
        assert not Layouts().grad_mode
    assert Layouts().grad_mode and not Layouts().finished


def test_what_draws_elsewhere_than_on_a_processor_is_left_alone() -> None:
    gaps = torch.rand(8, 8)[:, ::2]
    with pytest.raises(Unsupported, match="normal_ draws into a view of sizes"):
        check_normal(gaps)
    for target in (gaps.to("meta").as_strided((8, 4), (8, 2)), gaps[:3], torch.rand(8, 8), torch.rand(8, 8).t()):
        check_normal(target)
    transposed = torch.rand(6, 4).t()
    assert as_eager_draws((transposed, 0.5), {})[0].is_contiguous()
    assert as_eager_draws((transposed,), {"p": 0.5})[0].is_contiguous()
    for args in [(transposed,), (transposed, transposed), (transposed.to("meta").t().t(), 0.5)]:
        assert as_eager_draws(args, {}) is args


def test_the_shape_of_a_leaf_may_change_under_no_grad_if_no_view_of_it_is_returned(layer: FunctionalLayer) -> None:
    def fn(x: Tensor, view: bool) -> list[Tensor]:
        with torch.no_grad():
            x.t_()
        return [x[1:]] if view else [x]

    leaf = torch.rand(4, 6).requires_grad_()
    assert not analyze(lambda x: fn(x, False), [leaf], layer=layer).is_training
    with pytest.raises(Unsupported, match="input 0 requires grad and changes its sizes or strides in place where grad"):
        analyze(lambda x: fn(x, True), [leaf], layer=layer)


def test_views_share_the_storage_of_what_they_are_taken_of(layer: FunctionalLayer) -> None:
    _, plain = fake_arguments([torch.rand(4, 6), torch.rand(4, 6)])
    with plain[0].fake_mode, functional_layer(layer):
        x, y = (entered.value for entered in function_inputs(plain, [torch.rand(4, 6)] * 2))
        assert shares_storage(x, x[1:].t()) is True and shares_storage(x[0], x[1]) is True
        assert shares_storage(x, y) is False and shares_storage(x, x * 1) is False


resize_storage = torch.ops.inductor.resize_storage_bytes_
WRITTEN: dict[str, tuple[Callable[[Tensor], Any], bool, bool]] = {
    "written": (lambda x: x.mul_(3), True, False),
    "hidden": (lambda x: x.data.mul_(3), True, True),
    "not written": (lambda x: x.sum(), False, False),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_storage_may_grow_and_its_tensor_be_written_to(name: str) -> None:
    write, written, hidden = WRITTEN[name]

    def fn(x: Tensor) -> list[Any]:
        write(x)
        resize_storage(x, 400)
        return []

    metadata = analyze(fn, [torch.rand(4, 6)], layer=FunctionalLayer.DISPATCHER)
    info = metadata.inputs[0]
    assert info.storage is not None and info.storage.num_bytes == 400 and info.storage.output is None
    assert (info.updated_output, info.mutation_hidden_from_autograd) == (0 if written else None, hidden)
    assert metadata.num_mutated == written and not (written and info.mutation_under_no_grad)
    assert info.version_steps == (written and not hidden)


def test_records_say_nothing_unless_they_are_told() -> None:
    output, entered = OutputInfo(0, OutputKind.FRESH), InputInfo(0, InputKind.TENSOR)
    assert (output.same_as, output.is_new_leaf, output.dynamic_dims, output.graph_output) == (None, False, (), None)
    assert (entered.mutation, entered.mutation_hidden_from_autograd) == (MutationKind.NONE, False)
    assert (entered.mutation_under_no_grad, entered.is_static, entered.version_steps) == (False, False, 0)
    assert entered.is_leaf and entered.storage is entered.new_view is entered.sets_requires_grad is None
    view = ViewSpec("float32", (2,), (1,), 0, True)
    assert (view.under_no_grad, view.detached, view.own_version, view.conj, view.neg) == (False,) * 5
    told = GraphMetadata((), (OutputInfo(0, OutputKind.CONSTANT, constant=object()),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"can't be written: .*OutputInfo.constant: <object object"):
        told.to_json()
    overlap = OverlappingMutation(((0, 1),), (1,))
    assert overlap.do.startswith("Pass tensors that do not overlap") and "a tensor of its own" in overlap.why


def test_forward_values_have_no_lazy_bits(layer: FunctionalLayer) -> None:
    """What is compiled reads memory as it is."""

    def fn(x: Tensor) -> list[Tensor]:
        y, z = torch._neg_view(x * 2), torch.complex(x, x * 3).conj()
        return [y[1:], y[:2], z, torch._neg_view(x * 5)]

    _, plain = fake_arguments([torch.rand(4, 6)])
    with plain[0].fake_mode, functional_layer(layer) as events:
        entered = function_inputs(plain, [torch.rand(4, 6)])
        record = collect_metadata(entered, fn(entered[0].value), grad_mode=(True, True), storages=events)
    assert len(record.forward_values) == 3 and len(record.metadata.intermediate_bases) == 1
    assert not any(v.is_neg() or v.is_conj() for v in record.forward_values)
    assert record.metadata.intermediate_bases[0].neg or all(o.view.neg for o in record.metadata.outputs[:2])  # type: ignore[union-attr]
    assert [o.meta.conj for o in record.metadata.outputs[2:]] == [True, False]  # type: ignore[union-attr]
    assert [o.meta.neg for o in record.metadata.outputs[2:]] == [False, True]  # type: ignore[union-attr]


@torch.library.custom_op("aotkit_functionalize_tests::triple_", mutates_args=("x",))
def _triple(x: Tensor, times: float) -> None:
    x.mul_(3 * times)


@torch.library.custom_op("aotkit_functionalize_tests::tripled", mutates_args=())
def _tripled(x: Tensor) -> Tensor:
    return x * 3


@_tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operators_of_others_may_write() -> None:
    found = analyze(lambda x: [_triple(x, 2.0), _tripled(x), x[1:]][1:], [torch.rand(4, 6)])
    assert found.inputs[0].mutation is MutationKind.DATA and found.inputs[0].version_steps == 1
    assert [o.kind for o in found.outputs] == [OutputKind.FRESH, OutputKind.ALIAS_OF_INPUT]
    found = analyze(lambda x: [_tripled(x[1:])], [torch.rand(4, 6)])
    assert found.inputs[0].mutation is MutationKind.NONE


def test_what_requires_grad_keeps_the_sizes_of_its_storage() -> None:
    def fn(x: Tensor, y: Tensor, part: bool) -> list[Any]:
        x.data = y[1:] if part else y
        return []

    args = [torch.rand(4, 6).requires_grad_(), torch.rand(4, 6)]
    layer = FunctionalLayer.DISPATCHER
    assert analyze(lambda x, y: fn(x, y, False), args, layer=layer).inputs[0].storage is not None
    with pytest.raises(Unsupported, match="input 0 requires grad and is given a storage with other sizes"):
        analyze(lambda x, y: fn(x, y, True), args, layer=layer)


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_told_whether_autograd_saw_a_change_of_shape(layer: FunctionalLayer, enabled: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        x.t_()
        y.t_()
        return []

    args = [_computed(), torch.rand(2, 3)]
    with torch.set_grad_enabled(enabled):
        found = analyze(fn, args, layer=layer)
    views = [info.new_view for info in found.inputs]
    assert [view is not None and view.under_no_grad for view in views] == [not enabled, False]
