"""Wrapper subclasses as data: taken apart, described, put together, written down and read back."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import Unsupported, analyze, fake_arguments
from aotkit_functionalize.records import MutationKind, OutputKind
from aotkit_functionalize.subclasses import (
    SymbolicDim,
    encode_class,
    encode_context,
    is_subclass,
    rebuild,
    sizes_and_tensors,
    subclass_key,
    tensors_inside,
)
from aotkit_functionalize.subclasses.context import contains_symbols, decode_class, decode_context
from aotkit_functionalize.subclasses.meta import Opaque, SubclassMeta, describe


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Frozen:
    a: int
    b: Any


@dataclass
class Loose:
    a: int


class Row(NamedTuple):
    name: str
    size: Any


CONTEXTS = [
    None,
    True,
    3,
    2.5,
    "x",
    SymbolicDim("s0 + 1"),
    torch.float16,
    torch.strided,
    torch.channels_last,
    torch.device("cpu"),
    Color.BLUE,
    (1, (2, None)),
    [1, [2, "a"]],
    torch.Size([2, 3]),
    Row("x", torch.Size([2])),
    (Row("x", Row("y", None)),),
    {"a": 1, (2, 3): Color.RED},
    Frozen(1, (torch.int8, Frozen(2, None))),
]


@pytest.mark.parametrize("context", CONTEXTS, ids=repr)
def test_a_context_is_read_back_as_it_was(context: Any) -> None:
    raw = json.loads(json.dumps(encode_context(TwoTensor, context)))
    found = decode_context(TwoTensor, raw)
    assert found == context and type(found) is type(context)


UNKNOWN = [object(), {1, 2}, Loose(1), 1j, [object()], {"a": {1}}]


@pytest.mark.parametrize("context", UNKNOWN, ids=lambda context: type(context).__name__)
def test_a_context_that_has_no_text_is_refused(context: Any) -> None:
    with pytest.raises(Unsupported, match="the context of tensor subclass TwoTensor holds"):
        encode_context(TwoTensor, context)


@pytest.mark.parametrize(
    "raw",
    [
        {"torch": "no_such"},
        {"torch": "Tensor"},
        {"enum": f"{__name__}:Color", "name": "GREEN"},
        {"enum": f"{__name__}:Frozen", "name": "a"},
        {"record": f"{__name__}:Color", "fields": {}},
        {"named": f"{__name__}:Row", "items": ["x"]},
        {"named": f"{__name__}:Frozen", "items": [1, 2]},
        {"unknown": 1},
        {"tuple": [{"unknown": 1}]},
    ],
    ids=repr,
)
def test_text_that_no_context_has_is_not_read(raw: Any) -> None:
    with pytest.raises(ValueError, match="no stored context"):
        decode_context(TwoTensor, raw)


class Own(TwoTensor):
    @staticmethod
    def __aotkit_encode_context__(context: Any) -> Any:
        return {"mine": repr(context)}

    @staticmethod
    def __aotkit_decode_context__(raw: Any) -> Any:
        return ("read", raw["mine"])


def test_a_class_may_write_its_context_itself() -> None:
    raw = encode_context(Own, 7)
    assert raw == {"own": {"mine": "7"}} and decode_context(Own, raw) == ("read", "7")
    with pytest.raises(Unsupported, match="no __aotkit_decode_context__"):
        decode_context(TwoTensor, raw)
    assert decode_context(TwoTensor, {"dict": []}) == {}


def test_classes_are_found_by_name_among_loaded_modules() -> None:
    class Local:
        pass

    assert decode_class(encode_class(TwoTensor)) is TwoTensor
    with pytest.raises(Unsupported, match="cannot be written down"):
        encode_class(Local)
    for name in ("no_such_module:Thing", f"{__name__}:Missing", f"{__name__}:CONTEXTS"):
        with pytest.raises(Unsupported, match="a record names the class"):
            decode_class(name)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: (1, s), lambda s: {"a": [s]}, lambda s: Frozen(1, s)])
def test_symbols_are_found_inside(wrap: Callable[[Any], Any]) -> None:
    size = fake_arguments([torch.empty(3, 4)], dynamic=True)[1][0].shape[0]
    assert contains_symbols(wrap(size))
    assert not contains_symbols(wrap(3)) and not contains_symbols(Frozen)
    assert contains_symbols(size, 0) and contains_symbols((size,), 1) and not contains_symbols((size,), 0)


def _two(*sizes: int) -> TwoTensor:
    return TwoTensor(torch.randn(*sizes), torch.randn(*sizes))


def _opaque(_: Any, path: tuple[str, ...]) -> Opaque:
    return Opaque(7, path)


def test_a_wrapper_is_described_and_rebuilt() -> None:
    inner, outer = _two(3, 4), TwoTensor(_two(3, 4), _two(3, 4))
    assert is_subclass(inner) and not is_subclass(inner.a) and not is_subclass(3)
    assert not is_subclass(torch.nn.Parameter(inner.a))
    assert [id(t) for t in tensors_inside(inner)] == [id(inner.a), id(inner.b)]
    assert [id(t) for t in tensors_inside(inner.a)] == [id(inner.a)]
    assert [id(t) for t in tensors_inside(outer)] == [id(t) for w in (outer.a, outer.b) for t in (w.a, w.b)]
    subclass = describe(outer, "output 0", opaque=_opaque)
    assert [name for name, _ in subclass.attrs] == ["a", "b"] and len(subclass.leaves) == 4
    assert all(isinstance(child, SubclassMeta) and len(child.leaves) == 2 for _, child in subclass.attrs)
    assert subclass.meta.sizes == (3, 4) and subclass.type.cls is TwoTensor
    assert "TwoTensor(a: float32[3, 4], b: float32[3, 4])" in str(subclass)
    fresh = [torch.full((3, 4), float(i)) for i in range(4)]
    made = rebuild(outer, iter(fresh))
    assert [t is f for t, f in zip(tensors_inside(made), fresh, strict=True)] == [True] * 4


def test_a_class_that_puts_something_else_together_is_refused() -> None:
    class Other(TwoTensor):
        @staticmethod
        def __tensor_unflatten__(inner: Any, meta: Any, outer_size: Any, outer_stride: Any) -> Any:
            return TwoTensor(inner["a"], inner["b"])

    value = Other(torch.ones(2), torch.ones(2))
    with pytest.raises(Unsupported, match=r"Other\.__tensor_unflatten__ returned a TwoTensor"):
        rebuild(value, iter([torch.ones(2), torch.ones(2)]))


def test_keys_tell_what_a_graph_is_made_for() -> None:
    x = _two(3, 4)
    for sizes in (True, False):
        key = subclass_key(x, sizes=sizes)
        assert key == subclass_key(_two(3, 4), sizes=sizes)
        assert (key == subclass_key(_two(4, 3), sizes=sizes)) is (not sizes)
        assert key != subclass_key(_two(3, 4).to(torch.float64), sizes=sizes)
        assert key != subclass_key(_two(3, 4).requires_grad_(), sizes=sizes)
        assert key != subclass_key(x.a, sizes=sizes) and key != subclass_key(_two(3, 4, 1), sizes=sizes)
    transposed = TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t())
    assert subclass_key(transposed, sizes=True) != subclass_key(_two(3, 4), sizes=True)
    assert sizes_and_tensors(5, 5) == [5] and len(sizes_and_tensors(x, x)) == 2


def _written(x: Any) -> list[Any]:
    x.mul_(2)
    return [x]


def _under_no_grad(x: Any) -> list[Any]:
    with torch.no_grad():
        x.mul_(2)
    return [x * 1]


PROGRAMS: dict[str, tuple[Callable[..., Any], MutationKind, list[OutputKind]]] = {
    "written": (_written, MutationKind.DATA, [OutputKind.INPUT]),
    "under no_grad": (_under_no_grad, MutationKind.DATA, [OutputKind.FRESH]),
    "view": (lambda x: [x.t(), x.view(-1)], MutationKind.NONE, [OutputKind.ALIAS_OF_INPUT] * 2),
    "detached": (lambda x: [x.detach()], MutationKind.NONE, [OutputKind.ALIAS_OF_INPUT]),
    "computed and view": (
        lambda x: (lambda y: [y, y.t()])(x * 2),
        MutationKind.NONE,
        [OutputKind.FRESH, OutputKind.ALIAS_OF_OUTPUT],
    ),
    "views of one computed": (
        lambda x: (lambda y: [y.t(), y.view(-1)])(x * 2),
        MutationKind.NONE,
        [OutputKind.ALIAS_OF_INTERMEDIATE] * 2,
    ),
    "twice the same": (lambda x: (lambda y: [y, y])(x * 2), MutationKind.NONE, [OutputKind.FRESH] * 2),
    "inside": (lambda x: [x.a * 2], MutationKind.NONE, [OutputKind.FRESH]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [False, True])
def test_programs_of_wrappers(name: str, grad: bool) -> None:
    fn, mutation, kinds = PROGRAMS[name]
    x = _two(3, 4).requires_grad_(grad)
    metadata = analyze(fn, [x * 1 if grad else x])
    assert metadata.subclasses is not None
    outer = metadata.subclasses.outer
    assert outer.inputs[0].mutation is mutation and [o.kind for o in outer.outputs] == kinds
    assert [i.mutation for i in metadata.inputs] == [mutation] * 2
    info = outer.inputs[0]
    assert info.mutation_under_no_grad is (name == "under no_grad" and grad)
    assert not info.mutation_hidden_from_autograd and info.version_steps == (mutation is MutationKind.DATA)
    assert metadata.is_training is outer.is_training and len(metadata.subclasses.tangents) == len(outer.tangents)
    assert type(metadata).from_json(metadata.to_json()) == metadata and "for the caller" in str(metadata)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "changes its shape": (lambda x: [x.t_()], "changed in place"),
    "holds another": (lambda x: [setattr(x, "a", x.b * 2), x * 1][1:], "is given other tensors to hold"),
    "captured": (lambda x: [TwoTensor(x.a, torch.ones(3, 4))], "output 0 is a TwoTensor"),
    "conjugated": (lambda x: [torch.view_as_complex(x.a[:, :2] * 2).conj(), x * 1], "lazily conjugated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_says_of_a_wrapper_is_refused(name: str) -> None:
    fn, text = REFUSED[name]
    if name == "captured":
        constant = torch.ones(3, 4)

        def fn(x: Any) -> list[Any]:
            return [TwoTensor(x.a, constant)]

    with pytest.raises((Unsupported, RuntimeError, AssertionError)) as refusal:
        analyze(fn, [_two(3, 4)])
    if isinstance(refusal.value, Unsupported):
        assert text in str(refusal.value)


def test_tensors_inside_may_have_lazy_bits() -> None:
    x = TwoTensor(torch._neg_view(torch.randn(3)), torch.randn(3))
    seen: list[tuple[bool, bool]] = []

    def fn(x: Any) -> list[Any]:
        seen.extend((t.is_conj(), t.is_neg()) for t in tensors_inside(x))
        return [x * 2]

    metadata = analyze(fn, [x])
    assert seen == [(False, True), (False, False)]
    assert [i.meta.neg for i in metadata.inputs if i.meta is not None] == [True, False]


def test_two_wrappers_over_one_memory_are_told_apart_from_others() -> None:
    base = torch.randn(6)
    x, y = TwoTensor(base[:3], torch.randn(3)), TwoTensor(base[1:4], torch.randn(6)[1:4])
    with pytest.raises(Unsupported, match="tensors inside of input 0, input 1 share memory"):
        analyze(lambda x, y: [x.mul_(2), y * 1], [x, y])
    assert analyze(lambda x, y: [x * y], [x, y]).num_mutated == 0
