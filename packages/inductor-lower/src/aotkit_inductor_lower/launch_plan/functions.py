"""What the outer plan of a graph that is compiled in parts may call, by name: closed tables, so that reading a plan
can't run anything else."""

from __future__ import annotations

import builtins
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["CALLERS", "LAUNCHERS", "find_function", "find_operator", "function_name"]

CALLERS = frozenset(("cond", "while_loop", "while_loop_stack_output", "invoke_subgraph", "scan", "map_impl"))
"""Higher-order operators that call the functions they are given, on tensors like the ones these were traced with.
Others (flex attention) look into them, or trace them once more."""

# These take an operator instead of a function.
_WITH_OPERATORS = frozenset(("with_effects",))

LAUNCHERS = frozenset(("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"))
"""Higher-order operators that launch a Triton kernel of the user's own, which they take by its place in a table."""

_NAMED = CALLERS | _WITH_OPERATORS | LAUNCHERS

# Python's functions that tracing leaves on sizes and numbers, and what takes a result apart.
_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor"
)
_PYTHON: Mapping[str, tuple[Any, str]] = {
    "operator": (operator, _OPERATORS),
    "math": (math, "acos asin atan ceil cos cosh exp floor log log2 pow sin sinh sqrt tan tanh trunc"),
    "builtins": (builtins, "abs bool float int max min pow round"),
}


def _python_functions() -> dict[str, Callable[..., Any]]:
    found = {
        f"{home}.{name}": getattr(module, name) for home, (module, names) in _PYTHON.items() for name in names.split()
    }
    for name in dir(torch):
        if name.startswith(("sym_", "_sym_")) and callable(getattr(torch, name)):
            found[f"torch.{name}"] = getattr(torch, name)
    return found


_BY_NAME: Mapping[str, Callable[..., Any]] = _python_functions()
# Some functions have two names; the first one is written.
_NAMES: Mapping[Callable[..., Any], str] = {function: name for name, function in reversed(list(_BY_NAME.items()))}


def function_name(function: Any) -> str | None:
    """The name by which :func:`find_function` finds ``function``, or ``None`` if it has none."""
    if isinstance(function, OpOverload):
        return str(function)
    if isinstance(function, HigherOrderOperator):
        return f"higher_order.{function.name()}" if function.name() in _NAMED else None
    try:
        return _NAMES.get(function)
    except TypeError:  # not hashable
        return None


def find_function(name: str) -> Callable[..., Any]:
    """The function of that name. Raises ``LookupError`` for a name that is in no table or not in this torch."""
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    home, _, rest = name.partition(".")
    if home != "higher_order":
        return find_operator(name)
    found = _higher_order(rest) if rest in _NAMED else None
    if not isinstance(found, HigherOrderOperator):
        raise LookupError(f"this torch has no higher-order operator {rest!r} that a plan may call")
    return found


def _higher_order(name: str) -> Any:
    if name in LAUNCHERS:
        importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")  # registers them
    return getattr(torch.ops.higher_order, name, None)


def find_operator(name: str) -> OpOverload:
    """The overload of a name like ``"aten.mm.default"``. Raises ``LookupError`` where this torch has none."""
    parts = name.split(".")
    found: Any = torch.ops
    if len(parts) == 3 and all(part.isidentifier() for part in parts):
        for part in parts:
            found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise LookupError(f"this torch has no operator {name!r}")
    return found
