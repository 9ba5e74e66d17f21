"""Which calls of a graph read torch's default type when they run, which may be another one than at the capture."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["floats_of_integers", "reads_default_type"]

_COMPARISONS = frozenset(getattr(torch.ops.aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def floats_of_integers(node: Node) -> torch.dtype | None:
    """The type that an elementwise operator of ATen's makes floats of its arguments in, all integers or bools: torch's
    default when the graph was captured. The call would take the one of the moment, which a backward may find changed.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in target.tags or not reads_default_type(node):
        return None
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor) or not _given(node):
        return None
    return val.dtype if _holds_floats(val) else torch.get_default_dtype()


def reads_default_type(node: Node) -> bool:
    """Whether floats come out of a call that is given none, nor told which, or integers are compared with a float."""
    if node.op != "call_function" or any(map(_holds_floats, _given(node))):
        return False
    if any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values())):
        return False
    compares = node.target in _COMPARISONS and any(isinstance(arg, float) for arg in node.args)
    return compares or _holds_floats(node.meta.get("val"))


def _given(node: Node) -> list[object]:
    """What is known of the tensors, alone or several, that a call is given."""
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    return [val for val in values if isinstance(val, torch.Tensor | tuple | list)]


def _holds_floats(val: object) -> bool:
    if isinstance(val, tuple | list):
        return any(map(_holds_floats, val))
    return isinstance(val, torch.Tensor) and (val.dtype.is_floating_point or val.dtype.is_complex)
