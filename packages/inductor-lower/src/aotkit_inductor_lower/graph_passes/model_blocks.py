"""Which block of a model a node is of: its layers, by the module stack."""

from __future__ import annotations

import re

from torch.fx import Node

__all__ = ["block_of"]

_INDEX = re.compile(r"^(.*?(?:\.\d+|\[\d+\]))(?=[.\[]|$)")


def block_of(node: Node) -> str:
    """The part of the model that the node belongs to, or ``""``: collectives of different parts are not joined."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0]).partition(".parametrizations.")[0]
    found = _INDEX.match(path)
    return found[1] if found else ".".join(path.split(".")[:2])
