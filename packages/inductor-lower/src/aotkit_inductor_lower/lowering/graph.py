"""Walks the graph: placeholders to buffers, nodes through their rules, outputs to buffers of their own."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
from torch.fx import GraphModule, Node

from .._size_text import parse_size, symbols_in
from ..errors import Fallback, UnsupportedGraphError
from ..ir import BufferKind, BufferRef, Program, SymInput
from ..ops.aten import library_reason
from ..ops.refusals import refusal
from ..options import LowerOptions
from ..symbolic import Expr, SymbolKind
from ..target import HOST, Capabilities
from . import (
    batch_norms,
    casts,
    concat,
    constants,
    indexing,
    norms,
    pointwise,
    pooling,
    random,
    reductions,
    resample,
    scans,
    scatter,
    softmax,
    sorting,
    special,
    ternary,
    views,
)
from .casts import FLOAT8_TARGETS
from .context import LoweringContext
from .contractions import PRODUCTS, lower_product
from .convolutions import is_convolution, lower_convolution
from .extern import lower_extern
from .float8 import FLOAT8
from .float_items import FLOAT_OPS, is_float_item
from .grouped_products import is_grouped_product, lower_grouped_product
from .long_sorts import settle_order
from .packed_products import PACKED_PRODUCTS, lower_packed_product
from .reductions import HASHES
from .registry import join_rules
from .scaled_products import SCALED_PRODUCT, lower_scaled_product
from .sizes import halves
from .values import FloatExpr, NodeValue, View

__all__ = ["RULES", "lower_graph"]

RULES = join_rules(
    pointwise.TABLE,
    casts.TABLE,
    views.TABLE,
    reductions.TABLE,
    softmax.TABLE,
    norms.TABLE,
    batch_norms.TABLE,
    concat.TABLE,
    indexing.TABLE,
    scatter.TABLE,
    pooling.TABLE,
    resample.TABLE,
    scans.TABLE,
    sorting.TABLE,
    constants.TABLE,
    random.TABLE,
    special.TABLE,
    ternary.TABLE,
)

_NO_EFFECT = frozenset(
    op
    for op in (
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    )
)


def lower_graph(
    gm: GraphModule, options: LowerOptions | None = None, name: str = "graph", capabilities: Capabilities = HOST
) -> Program:
    """The loop IR of a graph: one step per node, views as index maps, nothing fused. ``capabilities``: of the target.

    Every tensor node needs its fake value in ``meta["val"]``. Nodes without a rule become ATen calls. Raises
    :class:`UnsupportedGraphError` for what can be neither generated nor called.
    """
    options = options or LowerOptions()
    fast = options.numerics == "fast"
    ctx = LoweringContext(capabilities, generates_random=options.rng == "fast", sorts_stably=fast)
    ctx.sizes.note_sizes(node.meta.get("val") for node in gm.graph.nodes)
    inputs: list[str] = []
    sources: dict[str, tuple[str, int, str, int]] = {}
    outputs: tuple[BufferRef | SymInput | None, ...] = ()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_placeholder(ctx, node, len(inputs), sources))
        elif node.op == "get_attr":
            ctx.values[node] = _attribute(ctx, gm, node)
        elif node.op == "call_function":
            settle_order(ctx, node)
            ctx.values[node] = lower_node(ctx, node)
        elif node.op == "output":
            outputs = _outputs(ctx, node)
        else:
            raise ctx.unsupported(node, f"graph nodes of kind {node.op} are not lowered; trace the graph with make_fx")
    computed = _computed_sizes(ctx, sources)
    _check_sources(ctx, {*sources, *dict(computed)})
    declared = tuple(ctx.buffers.values())
    return Program(name, tuple(inputs), declared, tuple(ctx.steps), outputs, tuple(sources.values()), computed)


def lower_node(ctx: LoweringContext, node: Node) -> NodeValue:
    """What a call becomes: by its rule, or as an ATen call with the reason why."""
    target = node.target
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt | int) and not isinstance(val, bool):
        return ctx.sizes.expr(val)
    if target is operator.getitem:
        source = ctx.values[node.args[0]]  # type: ignore[index]
        assert isinstance(source, tuple | list)
        return source[node.args[1]]  # type: ignore[index]
    if target in _NO_EFFECT or isinstance(val, torch.SymBool | bool):
        return None
    if isinstance(val, torch.SymFloat):
        return _dynamic_float(ctx, node, val)
    rule = RULES.get(target)
    if rule is None:
        lower = lower_product if target in PRODUCTS else lower_convolution if is_convolution(node) else lower_extern
        lower = lower_packed_product if target in PACKED_PRODUCTS else lower
        lower = lower_scaled_product if target is SCALED_PRODUCT else lower
        lower = lower_grouped_product if is_grouped_product(target) else lower
        return lower(ctx, node, library_reason(node) or "no lowering rule")
    reason = _not_generated(ctx, node) or refusal(node)
    if reason is None:
        before = len(ctx.steps), len(ctx.buffers)
        try:
            return rule(
                ctx,
                node,
                *(_value(ctx, arg) for arg in node.args),
                **{name: _value(ctx, arg) for name, arg in node.kwargs.items()},
            )
        except Fallback as declined:
            reason = str(declined)
            ctx.rollback(*before)
        except TypeError as error:  # a rule computes in Python with a number that is known when the graph runs only
            if not _takes_float(ctx, node):
                raise
            reason = f"the rule needs to know a float ({error})"
            ctx.rollback(*before)
    return lower_extern(ctx, node, reason)


def _dynamic_float(ctx: LoweringContext, node: Node, val: torch.SymFloat) -> NodeValue:
    """A Python float of the traced function that depends on dynamic sizes."""
    constant = val.node.expr
    if constant.is_number:
        return float(constant)
    args = tuple(_value(ctx, arg) for arg in node.args)
    if is_float_item(node) and isinstance(args[0], View):
        return FloatExpr("item", (args[0],))
    if not all(isinstance(arg, FloatExpr | Expr | float | int) for arg in args):
        raise ctx.unsupported(node, "a float that depends on the elements of a tensor has no form in the loop IR")
    numbers = tuple(float(arg) if isinstance(arg, int) else arg for arg in args)
    op = FLOAT_OPS.get(node.target)  # type: ignore[arg-type]
    if node.target is torch.sym_float:
        return numbers[0] if isinstance(numbers[0], FloatExpr) else FloatExpr("add", (numbers[0], 0.0))  # type: ignore[arg-type]
    if op is None:
        raise ctx.unsupported(
            node, "this function of a float that depends on a dynamic size has no form in the loop IR"
        )
    return FloatExpr(op, numbers)  # type: ignore[arg-type]


def _takes_float(ctx: LoweringContext, node: Node) -> bool:
    return any(isinstance(ctx.values.get(used), FloatExpr) for used in node.all_input_nodes)


def _not_generated(ctx: LoweringContext, node: Node) -> str | None:
    """Why no kernel can hold the node's tensors, or None."""
    for owner in (node, *node.all_input_nodes):
        val = owner.meta.get("val")
        for tensor in val if isinstance(val, list | tuple) else (val,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.dtype in FLOAT8 and node.target in FLOAT8_TARGETS:
                continue
            if owner is node and node.target in HASHES:
                continue  # written as int64
            if not ctx.generated_dtype(tensor.dtype):
                return f"generated code has no {tensor.dtype}"
            if tensor.layout is not torch.strided:
                return f"generated code has no {tensor.layout} tensors"
            if not ctx.capabilities.owns(tensor.device):
                return f"a tensor is on {tensor.device}, and this graph's kernels run on {ctx.capabilities.device}"
    return None


def _value(ctx: LoweringContext, arg: object) -> object:
    if isinstance(arg, Node):
        if isinstance(arg.meta.get("val"), torch.SymBool):
            raise ctx.unsupported(
                arg, "a condition on dynamic sizes is used as a number, which has no form in the loop IR"
            )
        return ctx.values[arg]
    if isinstance(arg, list | tuple):
        return [_value(ctx, item) for item in arg]
    if isinstance(arg, dict):
        return {key: _value(ctx, item) for key, item in arg.items()}
    return arg


def _placeholder(ctx: LoweringContext, node: Node, position: int, sources: dict[str, tuple[str, int, str, int]]) -> str:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        view = ctx.declare(node.name, val, BufferKind.INPUT)
        ctx.values[node] = view
        buffer = ctx.buffers[view.buffer]
        for kind, exprs in (("size", buffer.sizes), ("stride", buffer.strides)):
            for dim, expr in enumerate(exprs):
                _bind(expr, sources, (position, kind, dim))
        return view.buffer
    if isinstance(val, torch.SymInt | int):
        expr = ctx.sizes.expr(val)
        ctx.values[node] = expr
        if isinstance(val, torch.SymInt) and val.node.expr.is_symbol and expr.symbol is None:
            for half, kind in zip(halves(val.node.expr.name), ("above", "below"), strict=True):
                sources.setdefault(half, (half, position, kind, 0))
        name = expr.symbol.name if expr.symbol is not None else ""
        if name and sources.get(name, ("", 0, "", 0))[2] != "int":
            sources[name] = (name, position, "int", 0)  # an integer input is the cheapest source
            return f"${name}"
        # A plain number, a symbol that a former integer input gave (two sizes that a guard made equal), or a compound
        # of symbols that other inputs give; it gets a name that nothing uses.
        return _unused_integer(node, position, sources)
    raise ctx.unsupported(node, f"an input of type {type(val).__name__} is neither a tensor nor an integer")


def _unused_integer(node: Node, position: int, sources: dict[str, tuple[str, int, str, int]]) -> str:
    sources[node.name] = (node.name, position, "int", 0)
    return f"${node.name}"


def _bind(expr: Expr, sources: dict[str, tuple[str, int, str, int]], place: tuple[int, str, int]) -> None:
    symbol = expr.symbol
    if symbol is not None and symbol.name not in sources:
        sources[symbol.name] = (symbol.name, *place)


def _attribute(ctx: LoweringContext, gm: GraphModule, node: Node) -> NodeValue:
    value: object = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise ctx.unsupported(node, f"a graph attribute of type {type(value).__name__} is not a tensor")
    return ctx.declare(node.name, node.meta.get("val", value), BufferKind.CONSTANT, starts=int(value.storage_offset()))


def _outputs(ctx: LoweringContext, node: Node) -> tuple[BufferRef | SymInput | None, ...]:
    returned = node.args[0]
    items = returned if isinstance(returned, list | tuple) else (returned,)
    outputs: list[BufferRef | SymInput | None] = []
    for item in items:
        value = _value(ctx, item)
        if isinstance(value, View):
            assert isinstance(item, Node)
            outputs.append(BufferRef(_escaping(ctx, value, item)))
        elif isinstance(value, Expr):
            outputs.append(SymInput(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            outputs.append(SymInput(ctx.sizes.expr(value)))
        elif value is None:
            outputs.append(None)
        else:
            raise ctx.unsupported(node, f"an output of type {type(value).__name__} is neither a tensor nor an integer")
    return tuple(outputs)


def _escaping(ctx: LoweringContext, view: View, node: Node) -> str:
    """A buffer for an output. Its memory, also through an alias, belongs to the caller from then on."""
    name = ctx.as_buffer(view, node)
    for owned in (name, view.buffer if view.shares else name):
        if ctx.buffers[owned].kind is BufferKind.TEMPORARY:
            ctx.set_kind(owned, BufferKind.OUTPUT)
    made, promised = ctx.buffers[name].dtype, str(node.meta["val"].dtype).removeprefix("torch.")
    if made != promised:  # whoever reads it, a backward say, is compiled for what the graph promises
        raise ctx.unsupported(node, f"the graph returns it as {promised}, and it is computed as {made}")
    return name


def _computed_sizes(
    ctx: LoweringContext, sources: Mapping[str, tuple[str, int, str, int]]
) -> tuple[tuple[str, str], ...]:
    """The sizes that the host computes: those that are no input's own, and whose own symbols have values."""
    known, found = {f"${name}" for name in sources}, []
    for name, text in ctx.sizes.computed.texts.items():
        if name not in sources and symbols_in(parse_size(text)) <= known:
            known.add(f"${name}")
            found.append((name, text))
    return tuple(found)


def _check_sources(ctx: LoweringContext, sources: Collection[str]) -> None:
    for buffer in ctx.buffers.values():
        for expr in (*buffer.sizes, *buffer.strides):
            for symbol in expr.symbols:
                if symbol.kind is SymbolKind.SIZE and symbol.name not in sources:
                    raise UnsupportedGraphError(
                        f"the size {symbol.name}",
                        "no input of the graph gives its value; maybe it depends on data",
                        todo="pass it as an input, or use compile_graph, which cuts the graph where the size is made",
                    )
