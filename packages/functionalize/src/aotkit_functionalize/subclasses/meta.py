"""How wrapper subclasses are made of dense tensors, as data.

Note [Tensor subclasses at the boundary]
    A traceable wrapper subclass says with ``__tensor_flatten__`` which tensors it holds, and with
    ``__tensor_unflatten__`` how it is put together of them. A captured graph knows dense tensors only: its
    inputs are the tensors inside of the caller's arguments, and what the caller gets is put together of its
    outputs. So the graph's :class:`.GraphMetadata` describes the dense graph, as if the user had written that,
    and its ``subclasses`` (a :class:`SubclassBoundary`) what the caller sees, and how one becomes the other.
    Autograd works on the outside, on the wrappers; the wrappers' own ``__torch_dispatch__`` runs below it, at
    capture, so that the functional tensors are the innermost ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._records import Format
from ..errors import Unsupported
from ..records import CallContract, SymbolBinding, TensorMeta, ViewSpec
from ..symbols import dim, tensor_meta
from .context import SymbolicDim, contains_symbols, decode_class, decode_context, encode_class, encode_context

__all__ = [
    "Opaque",
    "SubclassBoundary",
    "SubclassMeta",
    "SubclassType",
    "SubclassValue",
    "TensorSource",
    "describe",
    "is_subclass",
    "rebuild",
    "tensors_inside",
]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class SubclassType:
    """A wrapper class and the context that its ``__tensor_flatten__`` gave; SymInts in it are :class:`SymbolicDim`."""

    cls: type[Any]
    context: Any

    def __str__(self) -> str:
        return self.cls.__name__ if self.context is None else f"{self.cls.__name__}[{self.context!r}]"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An attribute that is no tensor and passes by the graph: that of argument ``input_index``, found by ``path``."""

    input_index: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubclassMeta:
    """One wrapper: its class, what it holds, and its own sizes and strides as the caller sees them."""

    type: SubclassType
    attrs: tuple[tuple[str, SubclassMeta | TensorMeta | Opaque], ...]
    meta: TensorMeta

    @property
    def leaves(self) -> tuple[TensorMeta, ...]:
        """The dense tensors inside, in the order in which the graph takes or returns them."""
        found: list[TensorMeta] = []
        for _, child in self.attrs:
            if isinstance(child, SubclassMeta):
                found += child.leaves
            elif isinstance(child, TensorMeta):
                found.append(child)
        return tuple(found)

    def has_opaque(self) -> bool:
        """Whether an object that is no tensor is in this wrapper or in one that it holds."""
        return any(
            child.has_opaque() if isinstance(child, SubclassMeta) else isinstance(child, Opaque)
            for _, child in self.attrs
        )

    def __str__(self) -> str:
        inner = ", ".join(
            f"{name}: {child if isinstance(child, SubclassMeta) else _brief(child)}" for name, child in self.attrs
        )
        return f"{self.type}({inner})"


def _brief(child: TensorMeta | Opaque) -> str:
    return f"{child.dtype}{list(child.sizes)}" if isinstance(child, TensorMeta) else "opaque"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one dense tensor comes from: a dense forward output, gradient or input, or the ``view`` of one.

    ``source`` is ``"forward"``, ``"gradient"`` or ``"input"``; ``base_dtype`` is the dtype that a view is taken of.
    """

    source: str
    index: int
    view: ViewSpec | None = None
    base_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class SubclassValue:
    """A value that the caller's side sees: its parts, put together as ``subclass`` says; a lone part without it."""

    parts: tuple[TensorSource, ...]
    subclass: SubclassMeta | None = None


@dataclass(frozen=True, slots=True)
class SubclassBoundary:
    """The caller's side of a graph over dense tensors; see Note [Tensor subclasses at the boundary].

    Attributes:
        outer: the calling contract over the caller's values: one record per argument and per result, subclass or not.
        inputs: per argument how it is made, ``None`` for what is no subclass. The dense inputs are the leaves in order.
        sizes: symbols that only sizes of a wrapper know; they are dense inputs after those.
        forward: per forward output of ``outer``, what it is made of.
        tangents: per tangent of ``outer``, the form that the backward was traced for, ``None`` for a plain tensor.
        gradients: per argument, what its gradient is made of. Counts the dense graph's results after the forward's.
        num_gradients: how many those are.
        reached_by: per argument, the numbers of the tangents of subclasses that its gradient depends on; empty if there
            is one tangent only.
    """

    outer: CallContract
    inputs: tuple[SubclassMeta | None, ...]
    sizes: tuple[SymbolBinding, ...] = ()
    forward: tuple[SubclassValue, ...] = ()
    tangents: tuple[SubclassMeta | None, ...] = ()
    gradients: tuple[SubclassValue | None, ...] = ()
    num_gradients: int = 0
    reached_by: tuple[tuple[int, ...], ...] = ()

    def dense_positions(self, index: int) -> range:
        """The dense inputs that argument ``index`` becomes."""
        counts = [1 if subclass is None else len(subclass.leaves) for subclass in self.inputs[: index + 1]]
        return range(sum(counts) - counts[-1], sum(counts))

    def has_opaque(self) -> bool:
        """Whether an argument or a result holds an object that is no tensor."""
        made = (*self.forward, *(value for value in self.gradients if value is not None))
        subclasses = (*self.inputs, *self.tangents, *(value.subclass for value in made))
        return any(subclass is not None and subclass.has_opaque() for subclass in subclasses)

    def to_raw(self) -> Any:
        """JSON values; see Note [How a subclass is written down]."""
        return _FORMAT.to_raw(self)

    @staticmethod
    def from_raw(raw: Any) -> SubclassBoundary:
        """Rebuild from :meth:`to_raw`. Raises ``ValueError`` for another record, :class:`Unsupported` for a class."""
        return _FORMAT.from_raw(raw)


class TypeForm:
    """How a class and its context are written; see Note [How a subclass is written down]."""

    def to_raw(self, record: SubclassType, /) -> Any:
        """JSON values. Raises :class:`Unsupported` for what has none."""
        return {"cls": encode_class(record.cls), "context": encode_context(record.cls, record.context)}

    def from_raw(self, raw: Any, /) -> SubclassType:
        """The inverse. Raises :class:`Unsupported` for a class that is not there, ``ValueError`` for another record."""
        if not isinstance(raw, dict) or raw.keys() != {"cls", "context"} or not isinstance(raw["cls"], str):
            raise ValueError(f"{raw!r} is no stored tensor subclass")
        cls = decode_class(raw["cls"])
        return SubclassType(cls, decode_context(cls, raw["context"]))


_FORMAT = Format(SubclassBoundary, "aotkit subclass boundary", 2, own={SubclassType: TypeForm()})


def is_subclass(value: object) -> bool:
    """Whether ``value`` is a traceable wrapper subclass. (Functional and fake tensors are none.)"""
    return isinstance(value, torch.Tensor) and type(value) not in _PLAIN and is_traceable_wrapper_subclass(value)


def attributes(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """What a wrapper holds, by name, and its context."""
    names, context = value.__tensor_flatten__()
    return [(name, getattr(value, name)) for name in names], context


def attributes_at_capture(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The same while a function is captured.

    Dynamo traces with stand-ins for objects (the mesh of a ``DTensor``, say), and what a class keeps from one call for
    the next may hold these: each is the object that it stands for.
    """
    from .. import _torch_compat as compat  # imports sympy, which a process that loads a record does not need

    held, context = attributes(value)
    context = pytree.tree_map_only(compat.FakeScriptObject, compat.real_object, context)
    return [(name, compat.real_object(inner)) for name, inner in held], context


def tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """The innermost tensors of ``value``, which may be a plain tensor, in order."""
    if not is_subclass(value):
        yield value
        return
    for _, inner in attributes(value)[0]:
        if isinstance(inner, torch.Tensor):
            yield from tensors_inside(inner)


def rebuild(template: Any, leaves: Iterator[Any]) -> Any:
    """A value made like ``template``, its innermost tensors replaced by the next ones of ``leaves``."""
    if not is_subclass(template):
        return next(leaves)
    held, context = attributes_at_capture(template)
    inner = {name: rebuild(v, leaves) if isinstance(v, torch.Tensor) else v for name, v in held}
    made = type(template).__tensor_unflatten__(inner, context, template.size(), template.stride())
    if type(made) is not type(template) or made.size() != template.size() or made.stride() != template.stride():
        raise Unsupported(
            f"{type(template).__name__}.__tensor_unflatten__ returned a {type(made).__name__} of sizes "
            f"{tuple(made.size())} and strides {made.stride()}",
            f"it was given those of a {type(template).__name__} of sizes {tuple(template.size())} and strides "
            f"{template.stride()}",
            "Let it return what __tensor_flatten__ took apart",
        )
    return made


def describe(
    value: Any,
    what: str,
    *,
    plain: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    opaque: Callable[[Any, tuple[str, ...]], Opaque],
    path: tuple[str, ...] = (),
) -> SubclassMeta:
    """The :class:`SubclassMeta` of a wrapper.

    Args:
        value: the wrapper.
        what: names it in refusals ("output 2").
        plain: gives the plain tensor of one of the innermost tensors; raises what refuses it.
        opaque: gives the record of an attribute that is no tensor, from the attribute and its path.
        path: where in the value the caller knows the wrapper sits.
    """
    held, context = attributes_at_capture(value)
    children: list[tuple[str, SubclassMeta | TensorMeta | Opaque]] = []
    for name, inner in held:
        here = (*path, name)
        if is_subclass(inner):
            children.append((name, describe(inner, what, plain=plain, opaque=opaque, path=here)))
        elif isinstance(inner, torch.Tensor):
            children.append((name, _leaf_meta(plain(inner), f"{what}.{'.'.join(here)}")))
        else:
            children.append((name, opaque(inner, here)))
    _check_sizes(value, what)
    meta = tensor_meta(value, requires_grad=False)
    return SubclassMeta(SubclassType(type(value), _context(context, what)), tuple(children), meta)


def _leaf_meta(inner: torch.Tensor, what: str) -> TensorMeta:
    if inner.layout is not torch.strided:
        raise Unsupported(
            f"{what} has layout {inner.layout}", "only strided tensors can be captured", "Hold it as a strided tensor"
        )
    return tensor_meta(inner, requires_grad=False)


def _check_sizes(value: torch.Tensor, what: str) -> None:
    if any(isinstance(s, torch.SymInt) and s.node.is_nested_int() for s in (*value.shape, *value.stride())):
        raise Unsupported(
            f"{what} is a {type(value).__name__} with a jagged dimension",
            "its size stands for a tensor of offsets, which the records have no form for",
            "Leave jagged tensors out of the compiled region",
        )


def _context(context: Any, what: str) -> Any:
    converted = pytree.tree_map_only(torch.SymInt, lambda s: SymbolicDim(str(dim(s))), context)
    if contains_symbols(converted):
        raise Unsupported(
            f"the context that __tensor_flatten__ of {what} gives holds a symbolic size inside an object",
            "it would be fixed to the value it has now",
            "Keep sizes in tuples, lists and dicts of the context, or compile with static shapes",
        )
    return converted
