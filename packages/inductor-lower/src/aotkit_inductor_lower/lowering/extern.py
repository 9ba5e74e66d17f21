"""ATen calls: what has no rule, or is better left to ATen."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..analysis.default_types import floats_of_integers
from ..ir import Arg, BufferRef, DType, ExternCall, Literal, SymInput
from ..ops.aten import is_random
from ..symbolic import Expr
from .context import LoweringContext
from .values import FloatExpr, NodeValue, View

__all__ = ["lower_extern"]


_QUANTIZING = frozenset(
    f"aten::{name}"
    for name in (
        *("quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel"),
        *("_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor"),
    )
)


def lower_extern(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """Emit an ATen call for the node. Every tensor argument gets exactly the strides of its fake value. Raises
    :class:`UnsupportedGraphError` for results that depend on data and arguments that have no IR form."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise ctx.unsupported(
            node, "only ATen and custom ops can be called", "run this part outside the compiled region"
        )
    if target._schema.name in _QUANTIZING:
        raise ctx.unsupported(
            node,
            "it gives a quantized tensor, and its fake value is that of an ordinary one",
            "use the operators of torch.ops.quantized_decomposed",
        )
    dtype = floats_of_integers(node)
    args = tuple(_argument(ctx, node, arg) if dtype is None else _converted(ctx, node, arg, dtype) for arg in node.args)
    kwargs = tuple((name, _argument(ctx, node, value)) for name, value in node.kwargs.items())
    mutated = _mutated(ctx, node, target, args, dict(kwargs))
    results, value = _results(ctx, node, target)
    mutates = tuple(dict.fromkeys(name for name, _ in mutated))
    ctx.steps.append(ExternCall(node.name, str(target), args, kwargs, results, mutates, reason, ctx.origin(node)))
    return value


def _converted(ctx: LoweringContext, node: Node, arg: object, dtype: torch.dtype) -> Arg:
    """An argument, of tensors in ``dtype``."""
    given = _argument(ctx, node, arg)
    if not isinstance(arg, Node) or not isinstance(given, BufferRef) or given.number:
        return given
    converted = ctx.declare(f"{node.name}_{arg.name}", torch.empty_like(arg.meta["val"], dtype=dtype))
    kwargs = (("dtype", Literal("dtype", str(dtype))),)
    copy = ExternCall(
        converted.buffer,
        str(torch.ops.aten._to_copy.default),
        (given,),
        kwargs,
        (converted.buffer,),
        reason="a call would convert it to torch's default type",
        origin=ctx.origin(node),
    )
    ctx.steps.append(copy)
    return BufferRef(converted.buffer)


def _argument(ctx: LoweringContext, node: Node, arg: object) -> Arg:
    if isinstance(arg, Node):
        value = ctx.values[arg]
        if isinstance(value, View):
            return BufferRef(ctx.as_buffer(value, arg))
        return _plain(ctx, node, value)
    if isinstance(arg, list | tuple):
        return tuple(_argument(ctx, node, item) for item in arg)
    return _plain(ctx, node, arg)


def _plain(ctx: LoweringContext, node: Node, value: object) -> Arg:
    if isinstance(value, FloatExpr):
        return BufferRef(_float_buffer(ctx, node, value), number=True)
    if isinstance(value, Expr):
        return SymInput(value)
    if isinstance(value, torch.SymInt):
        return SymInput(ctx.sizes.expr(value))
    if value is None:
        return Literal("none", None)
    if isinstance(value, complex):
        return Literal("complex", str(value))
    if isinstance(value, bool | int | float | str):
        return Literal(next(kind for kind, cls in _PLAIN if isinstance(value, cls)), value)
    for kind, cls in _NAMED:
        if isinstance(value, cls):
            return Literal(kind, str(value))
    if isinstance(value, list | tuple):
        return tuple(_plain(ctx, node, item) for item in value)
    raise ctx.unsupported(node, f"an argument of type {type(value).__name__} has no form in the loop IR")


def _float_buffer(ctx: LoweringContext, node: Node, value: FloatExpr) -> str:
    """A tensor of one element that holds ``value``: the argument it was read from, or the result of a nest."""
    if value.op == "item" and isinstance(value.args[0], View):
        return ctx.as_buffer(value.args[0], node)
    if not ctx.capabilities.host_memory:
        raise ctx.unsupported(node, "a float computed on a device is an argument of an ATen call")
    view = ctx.declare_dense(f"{node.name}_number", (), torch.float64)
    nest = ctx.nest(view.buffer, node, ())
    nest.store(view, (), nest.scalar(value, DType.F64))
    ctx.add(nest)
    return view.buffer


_PLAIN: tuple[tuple[str, type], ...] = (("bool", bool), ("int", int), ("float", float), ("str", str))
_NAMED: tuple[tuple[str, type], ...] = (
    ("dtype", torch.dtype),
    ("device", torch.device),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)


def _mutated(
    ctx: LoweringContext, node: Node, target: torch._ops.OpOverload, args: tuple[Arg, ...], kwargs: dict[str, Arg]
) -> list[tuple[str, str]]:
    """(buffer, argument name) of what the op writes. An alias also writes its base, so both are named."""
    if not target._schema.is_mutable:
        return []
    found: list[tuple[str, str]] = []
    for position, schema_arg in enumerate(target._schema.arguments):
        if schema_arg.alias_info is None or not schema_arg.alias_info.is_write:
            continue
        arg = args[position] if position < len(args) else kwargs.get(schema_arg.name)
        for ref in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(ref, BufferRef):
                found.append((ref.name, schema_arg.name))
    for given in (*node.args, *node.kwargs.values()):
        value = ctx.values.get(given) if isinstance(given, Node) else None
        if isinstance(value, View) and not value.shares and ctx.as_buffer(value, node) in {name for name, _ in found}:
            raise ctx.unsupported(node, "it writes to a tensor whose memory this graph does not have")
    return found


def _results(
    ctx: LoweringContext, node: Node, target: torch._ops.OpOverload
) -> tuple[tuple[str | None, ...], NodeValue]:
    val = node.meta.get("val")
    if val is None:
        return (), None
    returns = target._schema.returns
    writes = [r.alias_info is not None and r.alias_info.is_write for r in returns]
    if isinstance(val, torch.Tensor):
        if writes and writes[0]:
            return (None,), _written_argument(ctx, node, target, 0)
        view = _declare(ctx, node.name, target, val)
        return (view.buffer,), view
    if isinstance(val, list | tuple):
        names: list[str | None] = []
        values: list[NodeValue] = []
        for position, item in enumerate(val):
            written = position < len(writes) and writes[position] and len(returns) == len(val)
            if written and isinstance(item, torch.Tensor):
                names.append(None)
                values.append(_written_argument(ctx, node, target, position))
            elif isinstance(item, list | tuple):  # the call's results are a row, in which the list's elements stand
                parts = [_result(ctx, node, f"{position}_{number}", part) for number, part in enumerate(item)]
                names += [name for name, _ in parts]
                values.append([value for _, value in parts])
            else:
                name, value = _result(ctx, node, str(position), item)
                names.append(name)
                values.append(value)
        return tuple(names), values
    raise ctx.unsupported(
        node, f"its result is a {type(val).__name__} that depends on data", "keep it outside the compiled region"
    )


def _result(ctx: LoweringContext, node: Node, position: str, item: object) -> tuple[str | None, NodeValue]:
    """The name of a result that a call gives beside others, if it is a tensor, and the value."""
    if item is None:
        return None, None
    if isinstance(item, torch.Tensor):
        view = _declare(ctx, f"{node.name}_{position}", node.target, item)
        return view.buffer, view
    if isinstance(item, int | torch.SymInt):
        # Philox seeds and the like: integers known from the fake run only if they are plain
        return None, ctx.sizes.expr(item)
    raise ctx.unsupported(node, f"its result {position} is a {type(item).__name__}")


def _declare(ctx: LoweringContext, name: str, target: torch._ops.OpOverload, val: torch.Tensor) -> View:
    """A call's result. Of random numbers a fake kernel may say that they share memory, as an argument's elements do:
    nothing can be copied into such a place, and eager fills none. (It does give a ``select_scatter`` that is so.)"""
    steps = [t for n, t in zip(val.shape, val.stride(), strict=True) if not (isinstance(n, int) and n == 1)]
    known = [step for step in steps if isinstance(step, int)]
    new = is_random(str(target)) and (0 in known or len(set(known)) < len(known))
    return ctx.declare(name, torch.empty_like(val) if new else val)


def _written_argument(ctx: LoweringContext, node: Node, target: torch._ops.OpOverload, position: int) -> NodeValue:
    """The argument that an in-place op returns as its result ``position``."""
    wanted = target._schema.returns[position].alias_info
    for place, schema_arg in enumerate(target._schema.arguments):
        info = schema_arg.alias_info
        if info is not None and wanted is not None and info.before_set == wanted.before_set:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(schema_arg.name)
            if isinstance(given, Node):
                return ctx.values[given]
    raise ctx.unsupported(node, "it returns an argument it writes to that was not given")
