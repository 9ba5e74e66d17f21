"""Conditions on sizes that operators are given as numbers: they are known, under a guard.

Note [Conditions as numbers]
    ``x * (x.shape[0] > 4)`` multiplies by a bool that depends on a size. A bool has other rules of promotion than an
    integer, so no size could stand for it; what the graph is captured with is put in its place, and the function is
    captured again where the condition does not hold. A condition on the elements of a tensor, or on a size of which
    nothing is known, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ._torch_compat import with_known_condition
from .checkpointed_writes import all_nodes

__all__ = ["know_conditions"]


def know_conditions(module: torch.fx.GraphModule) -> None:
    """Put bools in the place of conditions that are numbers to an operator, also in graphs within the graph."""
    conditions = [node for node in all_nodes(module) if isinstance(node.meta.get("val"), torch.SymBool)]
    for condition in conditions:
        users = [user for user in condition.users if _takes_numbers(user)]
        value = with_known_condition(condition.meta["val"]) if users else None
        for user in users if isinstance(value, bool) else ():
            user.args, user.kwargs = torch.fx.map_arg(
                (user.args, user.kwargs),
                lambda used, old=condition, new=value: new if used is old else used,  # type: ignore[misc]
            )


def _takes_numbers(node: torch.fx.Node) -> bool:
    """Whether the node computes with a number. Others combine conditions, check them, or branch by them."""
    if node.target is torch.sym_float:
        return True
    value: Any = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, torch.Tensor) and isinstance(node.target, torch._ops.OpOverload)
