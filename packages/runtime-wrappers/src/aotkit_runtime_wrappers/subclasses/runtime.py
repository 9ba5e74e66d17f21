"""What the adapters around a dense graph call: checks, tangents in the traced form, witnesses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .._torch_compat import dtype_from_name
from ..contract import SubclassMeta, SymbolicDim, TensorMeta, ViewSpec
from ..dims import evaluate
from ..errors import CallingConventionError, MetadataMismatchError
from ..runtime import coerce_tangent, replay_view, zero_tangent

__all__ = [
    "ArgumentCheck",
    "Layout",
    "check_gradient_classes",
    "put_together",
    "symbolic_context",
    "take_view",
    "tangent_parts",
    "witnesses",
]

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


class ArgumentCheck:
    """Whether an argument is the subclass that a graph was captured for; an object is looked at once in a row.

    ``last()`` is the argument that passed last: a parameter is checked at the first call only.
    """

    __slots__ = ("_index", "_subclass", "last")

    def __init__(self, subclass: SubclassMeta, index: int) -> None:
        self._subclass, self._index = subclass, index
        self.last: Any = _nothing

    def __call__(self, value: Any) -> None:
        """Raises :class:`CallingConventionError` if it is another class, holds other things, or another context."""
        difference = _difference(value, self._subclass)
        if difference is not None:
            raise CallingConventionError(
                f"argument {self._index} is not what this graph was compiled for: {difference}; compile the function "
                "again for it"
            )
        self.last = weakref.ref(value)


def _nothing() -> None:
    return None


def _difference(value: Any, subclass: SubclassMeta) -> str | None:
    cls = subclass.type.cls
    if type(value) is not cls:
        return f"it is a {type(value).__name__}, not a {cls.__name__}"
    names, context = value.__tensor_flatten__()
    if list(names) != [name for name, _ in subclass.attrs]:
        return f"the {cls.__name__} holds {', '.join(names)}, not {', '.join(name for name, _ in subclass.attrs)}"
    if not _accepts(cls, subclass.type.context, context):
        return f"the {cls.__name__} has the context {context!r}, not {subclass.type.context!r}"
    for name, child in subclass.attrs:
        inner = getattr(value, name)
        if isinstance(child, SubclassMeta):
            difference = _difference(inner, child)
        elif isinstance(child, TensorMeta):
            difference = _leaf_difference(inner, child, name)
        else:
            continue
        if difference is not None:
            return difference
    return None


def _accepts(cls: type, expected: Any, found: Any) -> bool:
    """Whether a graph for the context ``expected`` serves another: a class may say so itself, as it says to Dynamo."""
    guard = getattr(cls, "__metadata_guard__", None)
    if guard is None or any(isinstance(leaf, SymbolicDim) for leaf in pytree.tree_leaves(expected)):
        return same_context(expected, found)
    return bool(guard(expected, found))


def _leaf_difference(inner: Any, meta: TensorMeta, name: str) -> str | None:
    if not isinstance(inner, Tensor) or hasattr(inner, "__tensor_flatten__"):
        return f"its attribute {name} is a {type(inner).__name__}, not a plain tensor"
    if inner.dtype != dtype_from_name(meta.dtype) or inner.dim() != len(meta.sizes):
        return f"its tensor {name} is {inner.dtype} of {inner.dim()} dimensions, not {meta.dtype} of {len(meta.sizes)}"
    pairs = [*zip(inner.size(), meta.sizes, strict=True)]
    if inner.numel() > 0:  # without elements, strides mean nothing
        pairs += zip(inner.stride(), meta.strides, strict=True)
    if any(isinstance(want, int) and have != want for have, want in pairs):
        found = f"sizes {tuple(inner.size())} and strides {inner.stride()}"
        return f"its tensor {name} has {found}, not {meta.sizes} and {meta.strides}"
    return None


def same_context(expected: Any, found: Any) -> bool:
    """Whether two contexts are equal where ``expected`` holds no symbol."""
    if isinstance(expected, SymbolicDim):
        return isinstance(found, int)
    if isinstance(expected, tuple | list) and isinstance(found, tuple | list):
        return len(expected) == len(found) and all(map(same_context, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(same_context(v, found[k]) for k, v in expected.items())
    return bool(expected == found)


def symbolic_context(context: Any, symbols: Mapping[str, int]) -> Any:
    """``context`` with the values of its symbols."""
    return pytree.tree_map_only(SymbolicDim, lambda dim: evaluate(dim.text, symbols), context)


def take_view(base: Tensor, view: ViewSpec, sizes: tuple[int, ...], strides: tuple[int, ...], delta: int) -> Tensor:
    """A tensor inside of a result that is a view of another tensor; the wrapper alone takes part in autograd."""
    base = base.detach()
    if str(base.dtype).removeprefix("torch.") != view.dtype:
        return replay_view(base, view, sizes, strides, delta)
    return base.as_strided(sizes, strides, base.storage_offset() + delta)


def put_together(subclass: SubclassMeta, inner: Mapping[str, Any], context: Any, layout: Layout) -> Any:
    """The wrapper of ``inner``; refuses what its class puts together differently than at capture."""
    made: Any = subclass.type.cls.__tensor_unflatten__(inner, context, *layout)
    return made


def tangent_parts(
    tangent: Tensor | None, subclass: SubclassMeta, position: int, layouts: Sequence[Layout], symbols: Mapping[str, int]
) -> list[Tensor]:
    """The tensors inside of the gradient of forward output ``position``, each in the layout it was traced for.

    Args:
        tangent: what autograd gives; ``None`` where the loss does not depend on the output.
        subclass: what the backward was traced for.
        position: names the output in errors.
        layouts: of the wrapper, then of everything in it, in order.
        symbols: values for the context.

    Raises:
        MetadataMismatchError: another class or context, which neither a copy with the strides of the output (contexts
            may name these) nor its ``__coerce_same_metadata_as_tangent__`` turns into the expected one.
    """
    if tangent is None:
        tangent = _zero(subclass, iter(layouts), symbols)
    if not _fits(tangent, subclass, symbols):
        tangent = _coerce(tangent, subclass, position, layouts[0], symbols)
    parts: list[Tensor] = []
    _collect(tangent, subclass, position, iter(layouts), parts)
    return parts


def check_gradient_classes(conditions: Sequence[tuple[int, tuple[int, ...]]], tangents: Sequence[Any]) -> None:
    """Refuse a backward in which a gradient would be a subclass although in eager it would be none."""
    for argument, needed in conditions:
        if all(tangents[number] is None for number in needed):
            raise MetadataMismatchError(
                f"the backward of this graph gives argument {argument} a gradient of a tensor subclass, which it gets "
                "from outputs that are subclasses; the loss depends on none of these, so that in eager it would be of "
                "another class. Let the loss depend on them, or do not compute them"
            )


def _fits(value: Any, subclass: SubclassMeta, symbols: Mapping[str, int]) -> bool:
    if type(value) is not subclass.type.cls:
        return False
    names, context = value.__tensor_flatten__()
    if list(names) != [name for name, _ in subclass.attrs] or context != symbolic_context(
        subclass.type.context, symbols
    ):
        return False
    for name, child in subclass.attrs:
        inner = getattr(value, name)
        if isinstance(child, SubclassMeta):
            if not _fits(inner, child, symbols):
                return False
        elif isinstance(child, TensorMeta) and not _same_elements(inner, child):
            return False
    return True


def _same_elements(inner: Any, meta: TensorMeta) -> bool:
    """Whether a tensor inside of a gradient has the elements that kernels read; autograd looks at the wrapper alone."""
    return inner.dtype == dtype_from_name(meta.dtype) and inner.device.type == torch.device(meta.device).type


def _coerce(tangent: Any, subclass: SubclassMeta, position: int, layout: Layout, symbols: Mapping[str, int]) -> Any:
    expected = symbolic_context(subclass.type.context, symbols)
    laid_out = _with_strides(tangent, layout)
    if _fits(laid_out, subclass, symbols):
        return laid_out
    hook = getattr(laid_out, "__coerce_same_metadata_as_tangent__", None)
    result = None
    if hook is not None:
        same = type(tangent) is subclass.type.cls
        result = hook(expected) if same else hook(expected, subclass.type.cls)
    if result is None or not _fits(result, subclass, symbols):
        raise MetadataMismatchError(
            f"the gradient of forward output {position} is a {_title(tangent)} where the backward was traced for a "
            f"{subclass.type.cls.__name__} with context {expected!r}{_held(tangent, subclass)}; give "
            f"{type(tangent).__name__} a method "
            "__coerce_same_metadata_as_tangent__(context, cls=None) that converts it, or convert the gradient before "
            "it reaches the compiled graph"
        )
    return result


def _with_strides(tangent: Any, layout: Layout) -> Any:
    """``tangent`` laid out in memory as it was traced: gradients of sums are one number, expanded, of which a context
    that names strides (``DTensor``'s) says so."""
    sizes, strides = layout
    if tuple(tangent.size()) != tuple(sizes) or tangent.stride() == tuple(strides):
        return tangent
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    with torch.no_grad():
        back = [order.index(dim) for dim in range(len(sizes))]
        return tangent.permute(order).contiguous().permute(back)


def _title(value: Any) -> str:
    if not hasattr(value, "__tensor_flatten__"):
        return f"plain {type(value).__name__}"
    return f"{type(value).__name__} with context {value.__tensor_flatten__()[1]!r}"


def _held(value: Any, subclass: SubclassMeta) -> str:
    """Which tensor inside of a wrapper of the expected class has other elements, as a part of a sentence."""
    if type(value) is not subclass.type.cls:
        return ""
    for name, child in subclass.attrs:
        inner = getattr(value, name, None)
        if isinstance(child, TensorMeta) and isinstance(inner, Tensor) and not _same_elements(inner, child):
            return f" whose tensor {name} is {child.dtype} on {child.device}, not {inner.dtype} on {inner.device}"
        if isinstance(child, SubclassMeta) and (held := _held(inner, child)):
            return held
    return ""


def _collect(value: Any, subclass: SubclassMeta, position: int, layouts: Iterable[Layout], parts: list[Tensor]) -> None:
    remaining = iter(layouts)
    sizes, _ = next(remaining)
    if tuple(value.size()) != sizes:
        raise MetadataMismatchError(
            f"the gradient of forward output {position} has sizes {tuple(value.size())}, compiled for {sizes}"
        )
    for name, child in subclass.attrs:
        inner = getattr(value, name)
        if isinstance(child, SubclassMeta):
            _collect(inner, child, position, remaining, parts)
        elif isinstance(child, TensorMeta):
            parts.append(coerce_tangent(inner, position, *next(remaining)))


def _zero(subclass: SubclassMeta, layouts: Iterable[Layout], symbols: Mapping[str, int]) -> Any:
    """A wrapper of zeros, as the class understands it: all its tensors zero need not be one."""
    with torch.no_grad():
        return torch.zeros_like(_template(subclass, iter(layouts), symbols))


def _template(subclass: SubclassMeta, layouts: Iterable[Layout], symbols: Mapping[str, int]) -> Any:
    remaining = iter(layouts)
    own = next(remaining)
    inner: dict[str, Any] = {}
    for name, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            inner[name] = _template(child, remaining, symbols)
        elif isinstance(child, TensorMeta):
            inner[name] = zero_tangent(*next(remaining), dtype_from_name(child.dtype), torch.device(child.device))
        else:
            raise MetadataMismatchError(
                f"a forward output without a gradient is a {subclass.type.cls.__name__} with the attribute {name}, "
                "which is no tensor, so that no zeros can be made in its place; let the loss depend on it"
            )
    return put_together(subclass, inner, symbolic_context(subclass.type.context, symbols), own)


def witnesses(saved: Sequence[Tensor], wrappers: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> list[Tensor | None]:
    """Each wrapper if one of the tensors inside it shares memory with a saved tensor, else ``None``."""
    storages = {tensor.untyped_storage()._cdata for tensor in saved}
    return [
        wrapper if any(tensor.untyped_storage()._cdata in storages for tensor in inside) else None
        for wrapper, inside in wrappers
    ]
