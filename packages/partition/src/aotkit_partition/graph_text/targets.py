"""Call targets as names: a target is written by its qualified op name and found again without `import by string`.

Only names from closed tables are resolved, so that reading a graph text can't run arbitrary code: operators of the
dispatcher registry, higher-order operators, `operator`'s arithmetic, `math`, torch's `sym_*` functions, and what the
caller passes as ``extra_targets``.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ..errors import GraphFormatError, UnserializableGraphError

# What make_fx emits on SymInts, SymFloats and SymBools, and getitem on tuples.
OPERATOR_NAMES = (
    "abs add and_ eq floordiv ge getitem gt index inv invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub "
    "truediv truth xor iadd imul isub"
)
BUILTIN_NAMES = "max min round pow abs bool int float"
MATH_NAMES = "ceil floor trunc sqrt log log2 exp cos sin tan cosh sinh tanh acos asin atan pow"


def _closed_table() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    for prefix, module, names in (
        ("operator", operator, OPERATOR_NAMES),
        ("builtins", builtins, BUILTIN_NAMES),
        ("math", math, MATH_NAMES),
    ):
        table.update({f"{prefix}.{name}": getattr(module, name) for name in names.split()})
    for name in dir(torch):
        if name.startswith(("sym_", "_sym_")) and callable(getattr(torch, name)):
            table[f"torch.{name}"] = getattr(torch, name)
    table["torch._check"] = torch._check
    return table


_BY_NAME: Mapping[str, Callable[..., Any]] = _closed_table()
# floordiv and others occur under two names; the first one written wins.
_NAME_OF: Mapping[Callable[..., Any], str] = {fn: name for name, fn in reversed(list(_BY_NAME.items()))}

# Plain records that Dynamo builds inside a graph; imported when they occur.
_CLASSES = frozenset({"torch._higher_order_ops._invoke_quant.InvokeQuant"})

# These refer to a table that lives in this process only.
PROCESS_LOCAL_TARGETS = frozenset(
    {"higher_order.triton_kernel_wrapper_functional", "higher_order.triton_kernel_wrapper_mutation"}
)


def target_name(target: object, extra_targets: Mapping[str, Callable[..., Any]] | None = None, node: str = "") -> str:
    """The name under which ``target`` is written.

    Raises:
        UnserializableGraphError: the target is a plain Python function that no table lists.
    """
    if isinstance(target, OpOverload):
        return f"{target._schema.name.replace('::', '.')}.{target._overloadname}"
    if isinstance(target, OpOverloadPacket):
        return f"packet:{target._qualified_op_name.replace('::', '.')}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, type) and f"{target.__module__}.{target.__qualname__}" in _CLASSES:
        return f"{target.__module__}.{target.__qualname__}"
    try:
        known = _NAME_OF.get(target)  # type: ignore[call-overload]
    except TypeError:
        known = None
    if known is not None:
        return str(known)
    for name, function in (extra_targets or {}).items():
        if function is target:
            return f"extra:{name}"
    described = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"
    raise UnserializableGraphError(
        f"can't write the call target {described} of node '{node}' as text: it is neither a registered operator nor "
        "one of the listed Python functions, so another process could not find it by name. Register it as a "
        "torch.library custom op, or pass it as extra_targets={'some_name': function} to dump_graph and load_graph.",
        node,
    )


def find_target(name: str, extra_targets: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., Any]:
    """The callable that :func:`target_name` wrote as ``name``.

    Raises:
        GraphFormatError: this process has no such operator or function.
    """
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    if name.startswith("extra:"):
        if extra_targets is None or name[6:] not in extra_targets:
            raise GraphFormatError(
                f"the graph calls '{name[6:]}', given as an extra target when it was written; pass "
                "the same function in extra_targets to load_graph."
            )
        return extra_targets[name[6:]]
    if name.startswith("higher_order."):
        return _find_higher_order(name[13:])
    if name in _CLASSES:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)  # type: ignore[no-any-return]
    is_packet = name.startswith("packet:")
    parts = name.removeprefix("packet:").split(".")
    if len(parts) < (2 if is_packet else 3):
        raise GraphFormatError(f"'{name}' is no operator name of the form namespace.name.overload.")
    found: Any = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError as error:
        raise GraphFormatError(
            f"no operator '{name}' is registered in this process. Import the library that defines it before loading "
            "the graph."
        ) from error
    if not isinstance(found, (OpOverload, OpOverloadPacket)):
        raise GraphFormatError(f"'{name}' names a {type(found).__name__}, not an operator.")
    return found


def _find_higher_order(name: str) -> Callable[..., Any]:
    found = getattr(torch.ops.higher_order, name, None)
    if found is None:
        importlib.import_module("torch._higher_order_ops")  # they register on import
        importlib.import_module("torch._prims.rng_prims")
        found = getattr(torch.ops.higher_order, name, None)
    if not isinstance(found, HigherOrderOperator):
        raise GraphFormatError(f"torch {torch.__version__} has no higher-order operator '{name}'.")
    return found
