"""Tensors that the function puts into autograd's graph, or takes out of it, by ``requires_grad_()`` and ``detach_()``.

Note [New leaves]
    What is computed from a leaf that the function made has a history that no compiled graph can have, since the leaf is
    there only after the call. So such a leaf may be returned, or be an argument, and nothing that comes from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .aliases import shares_storage
from .custom_backward import carries_gradient
from .errors import Unsupported
from .inputs import FunctionInput
from .mutations import has_data_mutation, has_metadata_mutation

__all__ = ["check_new_leaves", "is_new_leaf", "sets_requires_grad"]


def is_new_leaf(output: torch.Tensor) -> bool:
    """Whether a result of the function's own requires grad without a history; views taken under ``no_grad`` do."""
    return bool(output.requires_grad) and not carries_gradient(output)


def sets_requires_grad(entered: FunctionInput) -> bool | None:
    """Whether an input enters (true) or leaves (false) autograd's graph, of which nothing else changes."""
    now = bool(entered.value.requires_grad)
    if has_metadata_mutation(entered.value, entered.original):
        return None
    if now == entered.requires_grad or has_data_mutation(entered.value):
        return None
    return now


def check_new_leaves(changed: Sequence[FunctionInput], outputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Refuse what shares memory with ``changed`` inputs, or comes from a leaf that the function made.

    Args:
        changed: inputs of which :func:`sets_requires_grad` says that they change.
        outputs: of the function.
        values: that the graph returns.
    """
    for entered in changed:
        value = entered.value
        if any(isinstance(o, torch.Tensor) and o is not value and shares_storage(o, value) for o in outputs):
            raise Unsupported(
                f"input {entered.index} has requires_grad changed (detach_, requires_grad_), and a view is returned",
                "whether the view was taken before or after that, the record of a view does not tell",
                "Do it outside of the compiled region, or use detach()",
            )
    leaves = [entered.value for entered in changed]
    leaves += [o for o in outputs if isinstance(o, torch.Tensor) and is_new_leaf(o)]
    if not leaves:
        return
    ids = {id(leaf) for leaf in leaves}
    waiting = [v.grad_fn for v in (*values, *outputs) if isinstance(v, torch.Tensor) and carries_gradient(v)]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if id(getattr(function, "variable", None)) in ids:
            raise Unsupported(
                "a tensor is computed from one on which the function itself called requires_grad_()",
                "its gradient would have to reach a tensor that requires grad only after the call",
                "Call requires_grad_() outside of the compiled region",
            )
        waiting.extend(parent for parent, _ in function.next_functions)
