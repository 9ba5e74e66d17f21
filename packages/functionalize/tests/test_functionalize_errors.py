"""Refusals say what, why, where and what to do; each refusal of a run has a program that meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import (
    DataDependent,
    FunctionalLayer,
    NeedsDispatcherLayer,
    OverlappingMutation,
    OverlappingWrite,
    Unsupported,
    analyze,
)
from aotkit_functionalize.errors import user_line

STACK = '  File "a.py", line 3, in f\n    g(x)\n  File "b.py", line 7, in g\n    h(y)\n'


def test_a_message_has_all_parts() -> None:
    error = Unsupported("it is so", "it cannot be", "Do that")
    assert str(error) == "it is so: it cannot be. Do that" and error.stack_trace is None
    assert (error.what, error.why, error.do) == ("it is so", "it cannot be", "Do that")
    located = error.at(STACK)
    assert str(located) == "it is so (at b.py:7: h(y)): it cannot be. Do that" and type(located) is Unsupported
    assert located.stack_trace == STACK and located.at("x") is located and error.at(None) is error
    assert isinstance(DataDependent("a", "b", "c").at(STACK), DataDependent)


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (None, None),
        ("", None),
        (STACK, "b.py:7: h(y)"),
        ('File "a.py", line 3, in f', "a.py:3: "),
        ("no frames\n here ", "here"),
    ],
)
def test_the_innermost_line_is_named(trace: str | None, line: str | None) -> None:
    assert user_line(trace) == line


def test_refusals_keep_what_they_know() -> None:
    overlap = OverlappingMutation(((0, 1), (2, 4)), (1, 4))
    assert overlap.groups == ((0, 1), (2, 4)) and overlap.mutated == (1, 4)
    assert "input 0, input 1; input 2, input 4; written to: 1, 4" in str(overlap)
    assert overlap.at(STACK).groups == overlap.groups  # type: ignore[attr-defined]
    assert "a view of x is written to" in str(OverlappingWrite("a view of x"))
    assert str(NeedsDispatcherLayer("it is set")).startswith("it is set: a tensor subclass")


def _no_grad(fn: Callable[..., Any]) -> Any:
    with torch.no_grad():
        return fn()


def _gaps() -> Tensor:
    return torch.rand(4, 8)[:, ::2]


def _grad() -> Tensor:
    return torch.rand(4, 6).requires_grad_() * 1


def _leaf() -> Tensor:
    return torch.rand(4, 6).requires_grad_()


def _with_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[:]


def _steps(*steps: Any) -> list[Any]:
    return [steps[-1]]


BOTH: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "expanded": (lambda x: [x.expand(2, 4, 6).add_(1)], lambda: torch.rand(4, 6), "made by expand"),
    "expanded input": (lambda x: _steps(x.add_(1), x), lambda: torch.rand(4, 1).expand(4, 6), "an expanded tensor"),
    "leaf": (lambda x: _steps(x.add_(1), 0), _leaf, "is a leaf that requires grad"),
    "out is a view": (
        lambda x: _steps(torch.add(x[:1], 1, out=x[1]), 0),
        lambda: torch.rand(4, 6),
        "out argument of add is a view",
    ),
    "addbmm_": (
        lambda x: [torch.zeros(1, 1).addbmm_(x[None], x.t()[None])],
        lambda: torch.rand(4, 6),
        "addbmm_ adds to a tensor of sizes",
    ),
    "normal_ with gaps": (lambda x: [(x * 1)[:, ::2].normal_()], lambda: torch.rand(8, 8), "normal_ draws into a view"),
    "complex normal_ with gaps": (
        lambda x: [(x * 1)[:, ::2].normal_()],
        lambda: torch.rand(2, 8, dtype=torch.complex64),  # eight elements are sixteen numbers
        "normal_ draws into a view",
    ),
    "dict": (lambda x: [{"a": x}], lambda: torch.rand(3), "output 0 is a dict"),
    "sparse output": (lambda x: [x.to_sparse()], lambda: torch.eye(3), "output 0 "),
    "sparse input": (lambda x: [x], lambda: torch.eye(3).to_sparse(), "input 0 has layout torch.sparse_coo"),
    "shape of a value under no_grad": (
        lambda x: (lambda y: _steps(_no_grad(lambda: y.t_()), y))(x * 2),
        _grad,
        "requires grad is changed in shape in place",
    ),
    "shape of a view": (lambda x: [(x * 2)[1:].t_()], _grad, "a view of sizes (3, 6) is changed in shape in place"),
    "as_strided of written gaps": (
        lambda x: _steps(x.masked_fill_(x > 0.5, 0), x.as_strided((2,), (1,))),
        _gaps,
        "viewed by as_strided",
    ),
    "written after as_strided of gaps": (
        lambda x: (lambda v: _steps(x.masked_fill_(x > 0.5, 0), v))(x.as_strided((2,), (1,))),
        _gaps,
        "viewed by as_strided",
    ),
    "written to, then requires_grad_": (
        lambda x: _steps(x.mul_(2), x.requires_grad_(), 0),
        lambda: torch.rand(4, 6),
        "input 0 has requires_grad changed",
    ),
    "detached, then requires_grad_": (
        lambda x: _steps(x.detach_(), x.requires_grad_(), 0),
        _grad,
        "input 0 has requires_grad changed",
    ),
    "written to, then detach_": (
        lambda x: _steps(x.mul_(2), x.detach_(), 0),
        _grad,
        "input 0 has requires_grad changed",
    ),
    "shape of an input under no_grad": (
        lambda x: _steps(_no_grad(lambda: x.t_()), x * 2),
        _leaf,
        "changes its sizes or strides in place where grad mode is off",
    ),
    "parts without their whole": (
        lambda x: (lambda y: [y[1:].data, y[:2].data])(x * 2),
        lambda: torch.rand(4, 6),
        "outputs 0, 1 are views of one tensor that is not returned itself",
    ),
    "strided view before a change of shape": (
        lambda x: (lambda view: _steps(x.t_(), view))(x.as_strided((2,), (1,))),
        lambda: (torch.rand(4, 8).requires_grad_() * 1)[:, ::2],
        "after a view of it was taken by as_strided()",
    ),
    "out with views grows": (
        lambda x: (lambda out, view: _steps(torch.add(x, 1, out=out), view))(*_with_view(torch.empty(0, 6))),
        lambda: torch.rand(4, 6),
        "is resized from (0, 6) to (4, 6) and has views",
    ),
    "a view of a new leaf": (lambda x: _steps(x.requires_grad_(), x[1:]), lambda: torch.rand(4, 6), "and a view is"),
    "a use of a new leaf": (lambda x: _steps(x.requires_grad_(), x * 2), lambda: torch.rand(4, 6), "function itself"),
    "a use of a result made a leaf": (
        lambda x: (lambda y: [y.requires_grad_(), y * 2])(x * 2),
        lambda: torch.rand(4, 6),
        "function itself",
    ),
    "detached and written": (
        lambda x: (lambda d: _steps(d.add_(x), d))(x.detach()),
        _grad,
        "its gradient",
    ),
    "shape of a lazy input": (
        lambda x: _steps(x.sin_(), x.unsqueeze_(-1)),
        lambda: torch._neg_view(torch.rand(4, 6).requires_grad_() * 1),
        "lazily conjugated or negated, is written to and changes its shape",
    ),
    "windows in another order": (
        lambda x: _steps(x.unfold(0, 2, 2).permute(1, 0, 2).view(-1).mul_(2), x * 1),
        lambda: torch.rand(4, 6).t(),
        "a view of sizes (24,) of a tensor that is not contiguous is written to",
    ),
    "resized to the size of a tensor": (
        lambda x: _steps(x.resize_as_(x[:2] * 2), x * 1),
        lambda: torch.rand(4, 6),
        "input 0 is resized",
    ),
    "input that overlaps itself": (lambda x: _steps(x[0].add_(1), x), lambda: _windows(), "that overlaps itself"),
}


def _windows() -> Tensor:
    return torch.rand(9).as_strided((4, 6), (1, 1))


@pytest.mark.parametrize("name", BOTH)
def test_what_cannot_be_captured_is_refused_in_words(layer: FunctionalLayer, name: str) -> None:
    fn, make, text = BOTH[name]
    with pytest.raises(Unsupported) as refusal:
        analyze(fn, [make()], layer=layer)
    assert text in str(refusal.value), str(refusal.value)
    assert refusal.value.what and refusal.value.why and refusal.value.do


def test_what_is_computed_from_numbers_alone_may_be_returned_but_not_share_memory(layer: FunctionalLayer) -> None:
    def half(x: Tensor) -> Tensor:
        return torch.div(x.shape[0], 2)

    found = analyze(lambda x: [half(x), half(x)], [torch.rand(4, 6)], layer=layer, dynamic=True)
    assert [o.graph_output for o in found.outputs] == [0, 1]
    with pytest.raises(Unsupported, match="computed from numbers alone"):
        analyze(lambda x: (lambda y: [y, y.view(1)])(half(x)), [torch.rand(4, 6)], layer=layer, dynamic=True)


def test_grad_mode_that_a_function_turns_on_is_told_where_a_view_needs_it(layer: FunctionalLayer) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            return [x[1:]]

    x = torch.rand(4, 6).requires_grad_() * 1
    assert analyze(fn, [x], layer=layer).effects == ()
    with torch.no_grad():
        assert [(e.kind, e.value) for e in analyze(fn, [x], layer=layer).effects] == [("enables_grad", True)]


DISPATCHER: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "view of what the input was": (
        lambda x, y: (lambda view: _steps(x.set_(y), view))(x[1:]),
        lambda: torch.rand(4, 6),
        "the storage that an input had before it was given another one",
    ),
    "written to under autograd": (
        lambda x, y: _steps(x.set_(y * 2), x.mul_(y), 0),
        _grad,
        "and then written to under autograd",
    ),
}


@pytest.mark.parametrize("name", DISPATCHER)
def test_what_cannot_be_said_of_other_storages_is_refused(name: str) -> None:
    fn, make, text = DISPATCHER[name]
    with pytest.raises(Unsupported, match=text):
        analyze(fn, [torch.rand(4, 6), make()], layer=FunctionalLayer.DISPATCHER)


STORAGE: dict[str, tuple[Callable[..., Any], str]] = {
    "set_": (lambda x: _steps(x.set_(torch.ones(9)), 0), "another storage"),
    "data": (lambda x: _steps(setattr(x, "data", torch.ones(9)), 0), "another storage"),
    "resize_": (lambda x: _steps(x.resize_(40), 0), "made larger in place"),
}


@pytest.mark.parametrize("name", STORAGE)
def test_changes_of_storage_need_the_dispatchers_layer(name: str) -> None:
    fn, text = STORAGE[name]
    with pytest.raises(NeedsDispatcherLayer, match=text):
        analyze(fn, [torch.rand(4, 6)])
    assert analyze(fn, [torch.rand(4, 6)], layer=FunctionalLayer.DISPATCHER).inputs[0].storage is not None
