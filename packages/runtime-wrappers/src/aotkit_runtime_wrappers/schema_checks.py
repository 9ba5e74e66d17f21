"""Custom operators that return memory of their inputs though their schemas do not say so.

Note [Looking at custom operators once]
    A graph is compiled on the word of the schemas: what an operator returns is new memory unless an alias is declared.
    An operator that breaks its word makes wrong results of memory that is used again. So the first call of a graph
    runs under a dispatch mode that looks at the storages of what its custom operators are given and return. Later
    calls do not look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import SchemaError

__all__ = ["checked_at_first_call", "operators_to_check"]

_TORCHS_OWN = frozenset(
    {
        *("aten", "prims", "prim", "prim_ops", "inductor", "rngprims", "quantized", "mkldnn"),
        # wait_tensor returns its argument; lowering assumes that any call outside of aten may
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional"),
    }
)


def operators_to_check(graph: torch.fx.GraphModule) -> frozenset[Any]:
    """The custom operators of ``graph`` that say they return new memory."""
    nodes = graph.graph.nodes
    return frozenset(n.target for n in nodes if n.op == "call_function" and _promises_new_memory(n.target))


def checked_at_first_call(
    call: Callable[[list[Any]], Sequence[Any]], operators: Sequence[str]
) -> Callable[[list[Any]], Sequence[Any]]:
    """``call``, watched while it runs for the first time: :class:`SchemaError` if one of these ``operators`` (named
    as in ``"aten.sin.default"``) breaks its word."""
    watched = frozenset(map(_operator, operators))
    run: list[Callable[[list[Any]], Sequence[Any]]] = []

    def checked(args: list[Any]) -> Sequence[Any]:
        with _LookAtStorages(watched):
            results = call(args)
        run[0] = call
        return results

    run.append(checked)

    def first_checked(args: list[Any]) -> Sequence[Any]:
        return run[0](args)

    first_checked._boxed_call = True  # type: ignore[attr-defined]
    return first_checked


def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _promises_new_memory(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace not in _TORCHS_OWN
        and all(result.alias_info is None for result in target._schema.returns)
    )


class _LookAtStorages(TorchDispatchMode):
    supports_higher_order_operators = True  # which are handed on: a graph may hold them beside custom operators

    def __init__(self, operators: frozenset[Any]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in self.operators:
            given = _storages((args, kwargs))
            returned = _storages(results)
            if not set(given).isdisjoint(returned):
                raise SchemaError(_message(func, "memory of one of its inputs"))
            if len(set(returned)) < len(returned):
                raise SchemaError(_message(func, "the same memory twice"))
        return results


def _message(func: Any, what: str) -> str:
    return (
        f"the custom operator {func.name()} returns {what}, which its schema does not say; a compiled graph relies on "
        "the schema and would give wrong results. Return a clone, or declare the alias or the mutation in the schema"
    )


def _storages(tree: Any) -> list[int]:
    tensors = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    return [t.untyped_storage()._cdata for t in tensors if t.untyped_storage().nbytes()]
