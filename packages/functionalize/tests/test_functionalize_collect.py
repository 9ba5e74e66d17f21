"""Records of small programs, applied to the results of a functional run, give what eager mode gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import FunctionalLayer, GraphMetadata, OverlappingWrite, Unsupported, analyze
from aotkit_functionalize.records import MutationKind, OutputKind

Check = Callable[..., GraphMetadata]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def _no_grad(fn: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return fn(*args)


def _leaves_grad_off(x: Tensor) -> list[Tensor]:
    y = x * 2
    torch.set_grad_enabled(False)
    return [y, y * 3]


def _each(*steps: Any) -> Any:
    return steps[-1]


# What is done with x, an input of sizes (4, 6) that may require grad.
VIEWS: dict[str, Callable[[Tensor], list[Any]]] = {
    "itself": lambda x: [x],
    "itself twice": lambda x: [x, x],
    "part": lambda x: [x[1:3, ::2]],
    "parts": lambda x: [x[1], x[:, 2], x.t()],
    "flat": lambda x: [x.view(-1), x.view(2, 12)],
    "repeated": lambda x: [x[:1].expand(5, 6)],
    "unsqueezed": lambda x: [x.unsqueeze(1), x.unflatten(1, (2, 3))],
    "diagonal": lambda x: [x.diagonal(), x.diagonal(1)],
    "detached": lambda x: [x.detach(), x.detach()[1:]],
    "data": lambda x: [x.data],
    "without grad": lambda x: [_no_grad(lambda: x[1:])],
    "strided": lambda x: [x.as_strided((2, 3), (6, 2), 6)],
    "of nothing": lambda x: [x[:0], x[2:2].t()],
    "computed": lambda x: [x * 2, x.sum(), x > 0],
    "computed with keywords": lambda x: [
        torch.add(x, x, alpha=3),
        x.sum(dtype=torch.float64),
        x.amax(dim=1, keepdim=True),
    ],
    "drawn": lambda x: [torch.bernoulli(x.detach(), 0.5), x.detach().sigmoid().bernoulli(), x.bernoulli(p=0.25)],
    "computed twice": lambda x: (lambda y: [y, y])(x * 2),
    "lone view of a computed one": lambda x: [(x * 2)[1:]],
    "computed and view": lambda x: (lambda y: [y, y[1:], y.t()])(x * 2),
    "view before the computed one": lambda x: (lambda y: [y[1:], y])(x * 2),
    "views of one computed": lambda x: (lambda y: [y[1:], y.t(), y.view(-1)])(x * 2),
    "views of two computed": lambda x: (lambda y, z: [y[1], y[2], z[0], z.t()])(x * 2, x.sin()),
    "computed and detached": lambda x: (lambda y: [y, y.detach()])(x * 2),
    "computed, its data": lambda x: (lambda y: [y, y.data])(x * 2),
    "computed, a view without grad": lambda x: (lambda y: [y, _no_grad(lambda: y[1:])])(x * 2),
    "parts and the whole": lambda x: (lambda y: [y, *y.unbind(0)])(x * 2),
    "parts of an input": lambda x: list(x.split(2)),
    "constants": lambda x: [x + 1, None, 3, 2.5, True, "a"],
    "grad off behind": _leaves_grad_off,
    "detached in between": lambda x: [x.detach() * 2 + x],
    "nothing": lambda x: [],
    "complex": lambda x: (lambda z: [torch.view_as_real(z), z[1:], z.conj(), z.imag])(
        torch.view_as_complex(x.contiguous().view(4, 3, 2))
    ),
    "conjugate of a computed one": lambda x: [torch.view_as_complex((x * 2).view(4, 3, 2)).conj()],
    "negated": lambda x: (lambda y: [y, torch._neg_view(y)])(x * 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_no_output_is_a_new_leaf_unless_the_function_made_it_one(layer: FunctionalLayer, name: str) -> None:
    found = analyze(lambda x: [*VIEWS[name](x), x.sin().detach().requires_grad_()], [torch.rand(4, 6)], layer=layer)
    assert [output.is_new_leaf for output in found.outputs] == [*[False] * (len(found.outputs) - 1), True]


WRITES: dict[str, Callable[[Tensor], list[Any]]] = {
    "mul_": lambda x: [x.mul_(2)],
    "twice": lambda x: _each(x.mul_(2), x.add_(1), [x * 3]),
    "part": lambda x: _each(x[1].mul_(2), [x.sin()]),
    "transposed part": lambda x: _each(x.t()[1:3].add_(x.sum()), [x]),
    "item": lambda x: _each(x.__setitem__((0, slice(1, 3)), 7.0), [x.exp()]),
    "copy_": lambda x: _each(x.copy_(x.flip(0)), []),
    "fill and view": lambda x: _each(x.fill_(2.0), [x[1:], x.view(-1)]),
    "zero_ of a row and its view": lambda x: (lambda row: _each(row.zero_(), [row, x * 1]))(x[2]),
    "value before": lambda x: (lambda y: _each(x.add_(1), [y, x * y]))(x * 2),
    "without grad": lambda x: _each(_no_grad(lambda: x.mul_(2)), [x * 3]),
    "detached": lambda x: _each(x.detach().mul_(2), [x * 3]),
    "data": lambda x: _each(x.data.mul_(2), [x * 3]),
    "data and itself": lambda x: _each(x.data.mul_(2), x.add_(1), [x * 3]),
    "windows": lambda x: _each(x.unfold(1, 2, 3).mul_(2), [x * 1]),
    "index": lambda x: _each(x.index_add_(0, torch.tensor([1]), x[:1] * 2), [x * 1]),
    "out": lambda x: [torch.mul(x, 2, out=torch.empty(4, 6)) if not x.requires_grad else x * 2],
    "lists": lambda x: _each(torch._foreach_add_([x[0], x[1]], 1.0) if not x.requires_grad else x.add_(1), [x * 1]),
    "computed": lambda x: (lambda y: _each(y[1].mul_(3), [y, y.t()]))(x * 2),
    "computed, transposed": lambda x: (lambda y: _each(y.masked_fill_(y > 0.5, 0.0), [y, y[1:]]))((x * 2).t()),
    "unsqueeze_ of a computed one": lambda x: [(x * 2).unsqueeze_(0)],
    "strided part": lambda x: _each(x.as_strided((2, 2), (6, 1), 1).mul_(2), [x * 1]),
    "empty part": lambda x: _each(x[:0].mul_(2), [x * 1]),
    "draws": lambda x: [*(lambda y: _each(y.normal_(), y[:2, :2].normal_(), [y]))(torch.ones(4, 6)), x * 1],
    "added products": lambda x: _each(x.detach().addbmm_(torch.ones(2, 4, 3), torch.ones(2, 3, 6)), [x * 1]),
    "dropped out": lambda x: [torch.nn.functional.dropout(x.detach(), 0.0).add_(1), x * 1],
    "nothing new": lambda x: _each(x.squeeze_(), [x * 1]) if not x.requires_grad else [x * 1],
    "repeats nothing": lambda x: _each(x.expand(4, 6).mul_(2), [x * 1]),
    "negated": lambda x: _each(torch._neg_view(x).add_(1), [x * 1]),
}
CONTIGUOUS = {"flat", "strided", "complex", "without grad", "views of one computed", "conjugate of a computed one"}
CONTIGUOUS |= {"fill and view", "strided part", "lists"}  # programs that need it
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "part": lambda: torch.randn(40)[7:31].view(4, 6),
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_are_what_eager_mode_returns(same_as_eager: Check, name: str) -> None:
    fn = VIEWS[name]
    for layout, make in LAYOUTS.items():
        if layout != "contiguous" and name in CONTIGUOUS:
            continue
        same_as_eager(fn, lambda make=make: [make()])
        same_as_eager(fn, lambda make=make: [make().requires_grad_()])
        same_as_eager(fn, lambda make=make: [make().requires_grad_() * 1.5])


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_what_eager_mode_does(same_as_eager: Check, name: str) -> None:
    fn = WRITES[name]
    for layout, make in LAYOUTS.items():
        if layout != "contiguous" and name in CONTIGUOUS:
            continue
        same_as_eager(fn, lambda make=make: [make()])
        same_as_eager(fn, lambda make=make: [make().requires_grad_() * 1.5])


SHAPES: dict[str, Callable[[Tensor], list[Any]]] = {
    "t_": lambda x: _each(x.t_(), []),
    "t_ and back": lambda x: _each(x.t_(), x.t_(), [x * 1]),
    "unsqueeze_": lambda x: [x.unsqueeze_(0)],
    "squeeze_": lambda x: _each(x.unsqueeze_(1), x.squeeze_(1), [x + 1]),
    "transpose_ and a write": lambda x: _each(x.transpose_(0, 1), x.add_(1), [x * 2]),
    "a write and swapdims_": lambda x: _each(x.add_(1), x.swapdims_(0, 1), [x]),
    "as_strided_": lambda x: [x.as_strided_((2, 3), (6, 1))],
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_input_may_change_its_shape_in_place(same_as_eager: Check, name: str) -> None:
    metadata = same_as_eager(SHAPES[name], lambda: [torch.randn(4, 6)])
    wanted = {
        "t_ and back": MutationKind.NONE,
        "squeeze_": MutationKind.NONE,
        "transpose_ and a write": MutationKind.DATA_AND_METADATA,
        "a write and swapdims_": MutationKind.DATA_AND_METADATA,
    }
    assert metadata.inputs[0].mutation is wanted.get(name, MutationKind.METADATA)


TWO: dict[str, Callable[[Tensor, Tensor], list[Any]]] = {
    "one written": lambda x, y: _each(x.mul_(y), [y * 2]),
    "both written": lambda x, y: _each(y.add_(x), x.add_(y), [y]),
    "views of both": lambda x, y: [x[1], y[1], y, x * y],
    "gains a history": lambda x, y: _each(x.copy_(y * 2), [x.sin()]),
    "gains a history in a part": lambda x, y: _each(x[1].copy_(y[1] * 2), [x.sin(), x[1:]]),
    "swapped": lambda x, y: (lambda z: _each(x.copy_(y), y.detach().copy_(z), [x * 1]))(x * 1),
}


@pytest.mark.parametrize("name", TWO)
def test_two_inputs(same_as_eager: Check, name: str) -> None:
    same_as_eager(TWO[name], lambda: [torch.randn(3, 2), torch.randn(3, 2)])
    same_as_eager(TWO[name], lambda: [torch.randn(3, 2), torch.randn(3, 2).requires_grad_() * 1])


@pytest.mark.parametrize("write", [False, True])
def test_lazy_bits_of_inputs(same_as_eager: Check, write: bool) -> None:
    def fn(x: Tensor, z: Tensor) -> list[Tensor]:
        if write:
            x.add_(1)
            z.mul_(2j)
        return [x * 2, x[1:], z.imag, z.conj(), z * 1j, (z * 2).conj()]

    def make() -> list[Tensor]:
        z = torch.randn(3, dtype=torch.complex64)
        return [torch._neg_view(torch.randn(3)), torch._neg_view(z.conj())]

    metadata = same_as_eager(fn, make)
    assert [(i.meta.conj, i.meta.neg) for i in metadata.inputs if i.meta is not None] == [(False, True), (True, True)]
    assert metadata.outputs[-1].meta is not None and metadata.outputs[-1].meta.conj


def test_a_training_graph_may_be_declined(same_as_eager: Check) -> None:
    with torch.no_grad():
        metadata = same_as_eager(lambda x: [x * 2, x[1:]], lambda: [torch.randn(3, requires_grad=True)])
    assert not metadata.is_training and not metadata.tangents and metadata.differentiable_inputs == ()
    assert metadata.forward_requires_grad == (False,)
    assert metadata.outputs[1].kind is OutputKind.ALIAS_OF_INPUT


@pytest.mark.parametrize("parts", [lambda y: y.unbind(0), lambda y: y.chunk(2, 1), lambda y: y.split([1, 3])])
def test_parts_of_one_operation_come_out_of_the_graph_where_they_have_a_gradient(layer: Any, parts: Any) -> None:
    def kinds(x: Tensor) -> set[OutputKind]:
        return {o.kind for o in analyze(lambda x: [*parts(x * 2)], [x], layer=layer).outputs}

    assert kinds(torch.randn(4, 6, requires_grad=True)) == {OutputKind.FRESH}
    assert kinds(torch.randn(4, 6)) == {OutputKind.ALIAS_OF_INTERMEDIATE}


def test_a_list_operator_on_tensors_that_overlap_is_refused(layer: Any) -> None:
    with pytest.raises(Unsupported, match="_foreach_add_ writes to tensors that share memory"):
        analyze(lambda x: [torch._foreach_add_([x, x[1]], 1.0)], [torch.zeros(3, 2)], layer=layer)


@pytest.mark.parametrize("write", [torch.relu_, lambda x: torch.nn.functional.relu(x, inplace=True)])
def test_functions_that_write_when_told_to_are_watched(layer: Any, write: Any) -> None:
    with pytest.raises(OverlappingWrite, match="expand"):
        analyze(lambda x: [write((x * 2).expand(2, 3))], [torch.zeros(3)], layer=layer)
