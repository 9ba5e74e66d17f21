"""Which nodes stay calls of the outer graph, and why."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..lowering.float_items import floats_in_kernels, is_foreign_float

__all__ = ["known_symbols", "needs_partition", "split_ops", "symbols_in"]

_TOKENS = frozenset((torch.ops.prims._make_token.default, torch.ops.prims._sink_tokens.default))
_PLAIN_ARGUMENTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


def needs_partition(gm: GraphModule) -> bool:
    """Whether some node has to stay a call. Looks at sizes only where an operator's tags ask for it, or where it is a
    custom one, whose tags need not say so."""
    depends = False
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if _is_special(node) or not all(map(_is_plain, node.args)) or not all(map(_is_plain, node.kwargs.values())):
                return True
            depends = depends or _may_depend_on_data(node) or is_foreign_float(node)
        elif node.op == "get_attr":
            if not isinstance(_attribute(gm, node), torch.Tensor):
                return True
        elif node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt | int):
            return True
    return bool(_conditions_taken(gm.graph.output_node())) or (depends and bool(split_ops(gm)))


def split_ops(gm: GraphModule) -> dict[Node, str]:
    """The nodes that stay, in order, each with its reason."""
    floats = floats_in_kernels(gm)
    staying = _staying(gm, floats)
    # Pieces hand each other tensors and integers: a float stays outside of kernels if anything does.
    return _staying(gm, set()) if staying and floats else staying


def _staying(gm: GraphModule, floats: set[Node]) -> dict[Node, str]:
    symbols = _Symbols(known_symbols(gm), floats)
    asked = _conditions_that_are_asked(gm) | _settled_by_checks(gm)
    staying: dict[Node, str] = {}
    for node in gm.graph.nodes:
        reason = "has to be looked at" if node in asked else _reason(gm, node, symbols, staying)
        if reason is not None:
            staying[node] = reason
            symbols.known |= symbols_in(node.meta.get("val"))  # from here on as good as a size of an input
    return staying


def _conditions_that_are_asked(gm: GraphModule) -> set[Node]:
    """The conditions on sizes that are returned or given to a higher-order operator, and what they are made of."""
    found: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in found or node.op == "output" or isinstance(node.target, torch._ops.HigherOrderOperator):
            found |= _conditions_taken(node)
    return found


def _settled_by_checks(gm: GraphModule) -> set[Node]:
    """Calls that give numbers or sizes of data which a check has settled, the numbers made of these, and the checks.

    ``torch._check(n == 3)`` makes 3 of ``n`` everywhere, also in the check itself, which would hold for any data.
    """
    found: set[Node] = set()
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.target is torch.ops.aten._assert_scalar.default:
            settled = node.args[0] in found
        elif node.meta.get("unbacked_bindings"):
            settled = True
        else:
            number = isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
            settled = number and bool(found & set(node.all_input_nodes))
        if settled and node.op == "call_function" and not free_unbacked_symbols(val):
            found.add(node)
    return found


def _conditions_taken(node: Node) -> set[Node]:
    return {used for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.SymBool)}


class _Symbols:
    """``given`` by the graph's inputs; ``known`` are those and what has been computed so far. ``floats``: nodes that
    give floats which kernels can take."""

    def __init__(self, given: set[Any], floats: set[Node]) -> None:
        self.given = given
        self.floats = floats
        self.known = set(given)


def _reason(gm: GraphModule, node: Node, symbols: _Symbols, staying: dict[Node, str]) -> str | None:
    if node.op == "get_attr":
        return None if isinstance(_attribute(gm, node), torch.Tensor) else "is a graph"
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "a higher-order operator"
    if isinstance(node.target, type):
        return "makes an object"
    if node.target in _TOKENS:
        return "orders effects"
    if node.target is operator.getitem and node.args[0] in staying:
        return "belongs to a call outside of kernels"
    if node in symbols.floats:
        return None
    val = node.meta.get("val")
    if not _has_form(val, symbols):
        return "gives a number that depends on data"
    if not all(used in symbols.floats or _has_form(used.meta.get("val"), symbols) for used in _values_used(node)):
        return "takes a number that depends on data"
    if not all(_is_plain(arg) for arg in (*node.args, *node.kwargs.values())):
        return "takes an object"
    return "has a result whose size depends on data" if symbols_in(val) - symbols.known else None


def _values_used(node: Node) -> list[Node]:
    return [used for used in node.all_input_nodes if used.op != "get_attr" and not isinstance(used.target, type)]


def _is_special(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator | type) or node.target in _TOKENS


def _may_depend_on_data(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _is_plain(arg: object) -> bool:
    if isinstance(arg, (Node, *_PLAIN_ARGUMENTS)):
        return True
    if isinstance(arg, list | tuple):
        return all(map(_is_plain, arg))
    return False


def _has_form(val: object, symbols: _Symbols) -> bool:
    """Whether the loop IR has values of this kind: tensors, integers, constants, sizes.

    Of conditions on sizes it has none: those on sizes of inputs are guards and hold; others have to be looked at.
    """
    if isinstance(val, list | tuple):
        return all(_has_form(v, symbols) for v in val)
    if isinstance(val, torch.SymInt):
        return not symbols_in(val) - symbols.known
    if isinstance(val, torch.SymFloat):
        return bool(val.node.expr.is_number)
    if isinstance(val, torch.SymBool):
        return not set(val.node.expr.free_symbols) - symbols.given
    return val is None or isinstance(val, torch.Tensor | bool | int | float)


def known_symbols(gm: GraphModule) -> set[Any]:
    """Symbols that the graph's inputs give: integers, sizes, strides and offsets that are a symbol themselves."""
    found: set[Any] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found |= {s for s, _, _ in carried_symbols(node)}
    return found


def carried_symbols(node: Node) -> list[tuple[Any, str, int]]:
    """``(symbol, "int" | "size" | "stride", dimension)`` for each symbol that the value of ``node`` tells."""
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        return [(val.node.expr, "int", 0)] if val.node.expr.is_symbol else []
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return []
    found: list[tuple[Any, str, int]] = []
    for kind, numbers in (("size", val.shape), ("stride", val.stride())):
        for dim, number in enumerate(numbers):
            if isinstance(number, torch.SymInt) and number.node.expr.is_symbol:
                found.append((number.node.expr, kind, dim))
    return found


def symbols_in(val: object) -> set[Any]:
    """Free symbols of a SymInt, of a tensor's sizes and strides, or of several of these."""
    if isinstance(val, torch.SymInt):
        return set(val.node.expr.free_symbols)
    if isinstance(val, list | tuple):
        return set().union(*map(symbols_in, val))
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return set()
    numbers: Iterable[Any] = (*val.shape, *val.stride(), val.storage_offset())
    return set().union(*(symbols_in(n) for n in numbers if isinstance(n, torch.SymInt)))


def _attribute(gm: GraphModule, node: Node) -> object:
    value: object = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value
