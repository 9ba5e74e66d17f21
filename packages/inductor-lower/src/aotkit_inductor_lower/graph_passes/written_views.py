"""Views that a custom operator writes to, of values that nobody else wants as they were: memory written to in place.

Note [Views written to in place]
    A call that gives the new value ``g`` of a view ``v`` of ``b`` is followed by what makes the new value of ``b``: the
    views that led from ``b`` to ``v``, backwards, as ``slice_scatter`` and the like. If the operator writes to ``v``
    itself, each of these results is memory of ``b`` at a place that is computed here: ``g`` is ``v``; a view of ``g``
    is that view of ``v``; and ``slice_scatter(c, g)`` is ``c`` if that slice of ``c`` is where ``g`` is. The last one
    is ``b``. Several views of one value may be written to by one call; each is put back into what the one before gave.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ops.aten import is_view
from .node_facts import same_tensor_type
from .replace import fake_result

__all__ = ["WrittenViews", "root_of", "views_written_back"]

aten = torch.ops.aten
_VIEW_OF_SCATTER = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
# What takes memory as another type may be computed by a kernel, and the others may copy.
_MAY_COPY = (
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.view.dtype,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten._conj.default,
    aten._neg_view.default,
)


@dataclass(slots=True)
class WrittenViews:
    """What becomes of one value of whose memory a call writes to views.

    Attributes:
        root: the value.
        results: its new value after each view that is written to; the last one is what comes after the call.
        steps: nodes that put the new values of views back into it, the results among them.
    """

    root: Node
    results: list[Node] = field(default_factory=list)
    steps: list[Node] = field(default_factory=list)


def root_of(node: Node) -> Node:
    """The value whose memory ``node`` is a view of, by operators that never copy."""
    while _is_view_call(node) or _is_part(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def views_written_back(pairs: Sequence[tuple[Node, Node | None]]) -> WrittenViews | None:
    """What becomes of the root of views, each with the node of its new value (``None``: unused); ``None`` if the new
    values are used otherwise than to be put back one after the other."""
    found = WrittenViews(root_of(pairs[0][0]))
    for view, new in pairs:
        if new is None or not _follow(found, view, new):
            return None
    for result in found.results[:-1]:
        if not all(user in found.steps or _leads_to(user, found.steps) for user in result.users):
            return None
    return found


def _follow(found: WrittenViews, view: Node, new: Node) -> bool:
    """Note the steps that put ``new`` back into the root, if that is all that is done with it."""
    at, node = view.meta["val"], new
    while node is new or _geometry(at) != _geometry(found.root.meta["val"]):
        if len(node.users) != 1:
            return False
        (user,) = node.users
        place = _place_of(found, user, node, at)
        if place is None:
            return False
        found.steps.append(user)
        node, at = user, place
    if not same_tensor_type(node, found.root):
        return False
    if node.meta["val"].storage_offset() != found.root.meta["val"].storage_offset():
        return False
    found.results.append(node)
    return True


def _place_of(found: WrittenViews, user: Node, node: Node, at: torch.Tensor) -> torch.Tensor | None:
    """Where the result of ``user`` would be in memory if its argument ``node`` is at ``at``; ``None``: elsewhere."""
    if _is_view_call(user):
        return _taken(user, {node: at})
    target: Any = user.target
    viewed = _VIEW_OF_SCATTER.get(target)
    if viewed is None or user.args[1] is not node or not isinstance(user.args[0], Node):
        return None
    into = user.args[0]
    if root_of(into) is not (found.results[-1] if found.results else found.root):
        return None
    whole = into.meta["val"]
    with whole.fake_mode, torch.no_grad():
        part = viewed(whole, *user.args[2:], **user.kwargs)
    return whole if _geometry(part) == _geometry(at) else None


def _taken(view: Node, given: dict[Node, Any]) -> torch.Tensor | None:
    try:
        taken = fake_result(view, given)
    except (RuntimeError, ValueError):
        return None
    return taken if isinstance(taken, torch.Tensor) else None


def _geometry(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()


def _leads_to(node: Node, steps: Sequence[Node]) -> bool:
    """Whether ``node`` is a view of which only ``steps`` make something."""
    return _is_view_call(node) and all(user in steps or _leads_to(user, steps) for user in node.users)


def _is_view_call(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target in _MAY_COPY:
        return False
    return is_view(node) and bool(node.args) and isinstance(node.args[0], Node)


def _is_part(node: Node) -> bool:
    """Whether ``node`` is one of the views that ``split`` and the like give."""
    return node.target is operator.getitem and isinstance(node.args[0], Node) and _is_view_call(node.args[0])
