"""Small questions about the values of a run with tensor subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_compat as compat
from ..errors import Unsupported
from ..inputs import FunctionInput
from ..symbols import tensor_meta
from ..tangents import tangent_meta
from ..wrap import below_functional_layer, from_functional, is_functional
from .meta import is_subclass, rebuild, tensors_inside

__all__ = ["check_functional", "common_bases", "expected_tangent", "innermost", "plain_value", "root", "traced_layout"]


def innermost(values: Sequence[Any]) -> list[Any]:
    """The tensors inside of ``values`` and of what these are views of, and the values that hold none."""
    found: list[Any] = []
    for value in values:
        if not is_subclass(value):
            found.append(value)
            continue
        found += tensors_inside(value)
        if value._base is not None:
            found += tensors_inside(value._base)
    return found


def common_bases(inputs: Sequence[FunctionInput], outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Subclasses that several outputs are views of, and that are neither an argument nor an output themselves."""
    known = {id(i.value) for i in inputs} | {id(output) for output in outputs}
    count: dict[int, int] = {}
    views = {id(o): o for o in outputs if is_subclass(o) and o._base is not None and id(o._base) not in known}
    for view in views.values():
        count[id(view._base)] = count.get(id(view._base), 0) + 1
    bases = {id(view._base): view._base for view in views.values()}
    return [base for key, base in bases.items() if count[key] > 1 and is_subclass(base)]


def plain_value(value: Any) -> Any:
    """A wrapper over functional tensors as one over the plain tensors that these stand for."""
    leaves = [from_functional(tensor) for tensor in tensors_inside(value)]
    with below_functional_layer(), torch.no_grad():
        return rebuild(value, iter(leaves))


def root(value: torch.Tensor) -> torch.Tensor:
    """What autograd says that ``value`` is a view of, or ``value``."""
    return value if value._base is None else value._base


def check_functional(index: int, value: Any, inside: Sequence[Any], what: str = "output") -> None:
    """Refuse a wrapper that holds something else than functional tensors."""
    if not all(is_functional(tensor) for tensor in inside):
        raise Unsupported(
            f"{what} {index} is a {type(value).__name__} that holds a tensor which no operation of the function made",
            "functional and other tensors are mixed inside it, and the graph cannot return the others",
            "Pass that tensor as an argument",
        )


def expected_tangent(value: Any) -> Any:
    """A plain value like the gradient of ``value``; the class's ``__coerce_tangent_metadata__`` may say otherwise."""
    if not is_subclass(value):
        return from_functional(value)
    plain = plain_value(value)
    with below_functional_layer(), torch.no_grad():
        hook = getattr(plain, "__coerce_tangent_metadata__", None)
        coerced = plain if hook is None else hook()
        # What the class computed (DTensor adds up over all ranks) may lie otherwise than its wrapper says.
        plain = plain if coerced is plain else coerced.clone(memory_format=torch.contiguous_format)
        plain = plain.requires_grad_(False) if plain.requires_grad else plain
        return plain if torch._prims_common.is_non_overlapping_and_dense_or_false(plain) else plain.contiguous()


def traced_layout(plain: torch.Tensor) -> torch.Tensor:
    """A tensor like ``plain`` in the layout of :func:`tangent_meta`."""
    meta = tangent_meta(plain)
    if meta.strides == tensor_meta(plain).strides and plain.storage_offset() == 0:
        return plain
    with below_functional_layer(), torch.no_grad():
        return plain.clone(memory_format=torch.preserve_format if compat.is_dense(plain) else torch.contiguous_format)
