"""One node for another, with what the views of the old one know about their memory put right."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node

from ..ops.aten import is_view
from ..ops.positions import same_sizes
from .node_facts import addresses_storage

__all__ = ["fake_result", "replace_node", "views_of"]


def replace_node(old: Node, new: Node) -> bool:
    """Let all readers of ``old`` read ``new``, a tensor of its values; whether that could be done.

    A view's fake value says where in its storage it begins, and lowering addresses memory by that. If ``new`` begins
    elsewhere than ``old``, or has other strides, the views are therefore computed again. One that counts elements from
    the start of the storage (``as_strided``) would read other ones, one in a wider type may find the new memory not
    aligned, and one of other sizes not one behind the other: then nothing is replaced.
    """
    if _begins_alike(old, new):
        old.replace_all_uses_with(new)
        return True
    views = views_of(old)
    if any(addresses_storage(user.target) for node in (old, *views) for user in node.users):
        return False
    values = {old: new.meta.get("val")}
    for view in views:
        try:
            values[view] = fake_result(view, values)
        except (RuntimeError, ValueError):  # it would begin inside an element, or join rows that do not touch
            return False
    for view in views:
        view.meta["val"] = values[view]
    old.replace_all_uses_with(new)
    return True


def fake_result(node: Node, given: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """The node's result on the fake values of its arguments, those ``given`` instead of their own."""

    def value(argument: Node) -> Any:
        return given[argument] if argument in given else argument.meta["val"]

    mode = next((v.fake_mode for v in map(value, node.all_input_nodes) if isinstance(v, FakeTensor)), None)
    env = mode.shape_env if mode is not None else None
    assert callable(node.target)
    with mode or nullcontext(), nullcontext() if env is None else env.suppress_guards(), torch.no_grad():
        return node.target(*torch.fx.map_arg(node.args, value), **torch.fx.map_arg(node.kwargs, value))


def _begins_alike(old: Node, new: Node) -> bool:
    x, y = old.meta.get("val"), new.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return True
    return same_sizes((x.storage_offset(), *x.stride()), (y.storage_offset(), *y.stride()))


def views_of(node: Node) -> list[Node]:
    """The tensors that are views of a node, of views of it, and so on, each after what it views."""
    found = [node]
    for base in found:
        found += [
            user
            for user in base.users
            if user.op == "call_function" and user.args and user.args[0] is base and is_view(user) and user not in found
        ]
    return found[1:]
