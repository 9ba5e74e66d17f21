"""Products with weights of few bits, as ATen packs them, as contractions with ATen's call in them.

Weights of four bits lie as :mod:`..ops.packed_weights` says. In the contraction the columns are three loops (panels,
halves, columns of a half), the sum is two (groups, steps of a group), and the weight is computed in the right factor;
scales and zeros lie side by side, so a pair is read as one integer. Any other layout is left to ATen, as is a number of
columns that does not fill its panels.

``_weight_int8pack_mm`` takes a plain matrix of bytes and a scale for each of its rows.
"""

from __future__ import annotations

from torch.fx import Node

from ..ir import (
    Alias,
    Buffer,
    BufferKind,
    BufferRef,
    Compute,
    Const,
    Contraction,
    DType,
    ExternCall,
    Index,
    Instr,
    Literal,
    Load,
    Operand,
    Range,
    Store,
)
from ..ops.dtypes import dtype_from_torch_name
from ..ops.packed_weights import INT4, INT8, misfit, panel_columns
from ..symbolic import Expr, sym, to_expr
from .context import LoweringContext
from .extern import lower_extern
from .values import NodeValue

__all__ = ["PACKED_PRODUCTS", "lower_packed_product"]

PACKED_PRODUCTS = frozenset({INT4, INT8})

_PAIRS = {DType.BF16: DType.I32, DType.F16: DType.I32, DType.F32: DType.I64}  # a scale and a zero


def lower_packed_product(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """ATen's call of one of :data:`PACKED_PRODUCTS`, in a contraction where there is one for it.

    Raises :class:`~..errors.UnsupportedGraphError` for scales that do not fit the weight.
    """
    _check_scales(ctx, node)
    value = lower_extern(ctx, node, reason)
    call = ctx.steps.pop()
    assert isinstance(call, ExternCall)
    write = _four_bits if node.target is INT4 else _bytes
    made = write(ctx, node, call) if all(b.device == ctx.capabilities.device for b in _operands(ctx, call)) else None
    ctx.steps.append(made or call)
    return value


def _check_scales(ctx: LoweringContext, node: Node) -> None:
    """What ATen does not check of a weight of four bits."""
    why = misfit(node) if node.target is INT4 else ""
    if why:
        raise ctx.unsupported(node, why)


# -- four bits -------------------------------------------------------------------------------------------


def _four_bits(ctx: LoweringContext, node: Node, call: ExternCall) -> Contraction | None:
    panel = panel_columns()
    x, weight, scales, out = _operands(ctx, call)
    group, dtype = call.args[2], dtype_from_torch_name(x.dtype)
    if not panel or dtype not in _PAIRS or scales.dtype != x.dtype or not isinstance(group, Literal):
        return None
    columns, summed, each = weight.sizes[0].constant, x.sizes[1].constant, int(group.value or 0)
    if columns is None or summed is None or columns % panel or summed % each or not summed:
        return None
    if not (_dense(weight) and _dense(scales)) or weight.sizes[1] != summed // 2:
        return None
    half, groups = panel // 2, summed // each
    bytes_ = _seen_as(ctx, node, weight, "uint8", (columns // panel, summed, half))
    pair = _PAIRS[dtype]
    pairs = _seen_as(ctx, node, scales, f"int{64 if pair is DType.I64 else 32}", (groups, columns))
    names = ("i", "panel", "upper", "j", "group", "k")
    i, at, upper, j, g, k = map(sym, names)
    rows, *inner = map(Range, names, (x.sizes[0], *map(to_expr, (columns // panel, 2, half, groups, each))))
    column, step = at * panel + upper * half + j, g * each + k
    right = _weight_of_four_bits(Load("byte", bytes_, (at, step, j), DType.U8), upper)
    right += _scale_and_zero(Load("pair", pairs, (g, column), pair), dtype)
    right.append(Compute("weight", "fma", ("number", "scale", "zero"), DType.F32))
    left, epilogue = _left(x, (i, step), dtype), _stored(out, (i, column), "total", dtype)
    return Contraction(
        call.name,
        (),
        (rows,),
        tuple(inner[:3]),
        tuple(inner[3:]),
        left,
        Operand(tuple(right), "weight"),
        DType.F32,
        "highest",
        "total",
        epilogue,
        call,
        call.origin,
    )


def _weight_of_four_bits(byte: Load, upper: Expr) -> list[Instr]:
    """``number``: what 4 bits mean, -8 to 7."""
    i32 = DType.I32
    return [
        byte,
        Compute("wide", "cast", ("byte",), i32),
        Index("bit", upper * 4, i32),
        Compute("moved", "shr", ("wide", "bit"), i32),
        Const("fifteen", 15, i32),
        Compute("four_bits", "bitwise_and", ("moved", "fifteen"), i32),
        Const("eight", 8, i32),
        Compute("whole", "sub", ("four_bits", "eight"), i32),
        Compute("number", "cast", ("whole",), DType.F32),
    ]


def _scale_and_zero(pair: Load, dtype: DType) -> list[Instr]:
    """Both halves of a pair, in f32. The first lies in the lower bits."""
    if dtype is DType.BF16:  # the upper half of a float
        return [
            pair,
            Const("sixteen", 16, DType.I32),
            Compute("scale_bits", "shl", ("pair", "sixteen"), DType.I32),
            Compute("scale", "bitcast", ("scale_bits",), DType.F32),
            Const("upper_bits", -(1 << 16), DType.I32),
            Compute("zero_bits", "bitwise_and", ("pair", "upper_bits"), DType.I32),
            Compute("zero", "bitcast", ("zero_bits",), DType.F32),
        ]
    bits = DType.I32 if dtype is DType.F32 else DType.I16
    found: list[Instr] = [pair, Const("width", 32 if dtype is DType.F32 else 16, pair.dtype)]
    found.append(Compute("behind", "shr", ("pair", "width"), pair.dtype))
    for name, source in (("scale", "pair"), ("zero", "behind")):
        found.append(Compute(f"{name}_bits", "cast", (source,), bits))
        found.append(Compute(name if dtype is DType.F32 else f"{name}_half", "bitcast", (f"{name}_bits",), dtype))
        if dtype is not DType.F32:
            found.append(Compute(name, "cast", (f"{name}_half",), DType.F32))
    return found


# -- bytes -----------------------------------------------------------------------------------------------


def _bytes(ctx: LoweringContext, node: Node, call: ExternCall) -> Contraction | None:
    x, weight, scales, out = _operands(ctx, call)
    dtype = dtype_from_torch_name(x.dtype)
    if dtype not in _PAIRS or scales.dtype != x.dtype or weight.dtype != "int8" or weight.sizes[1] != x.sizes[1]:
        return None
    assert dtype is not None
    i, j, k = map(sym, "ijk")
    rows, columns, summed = map(Range, "ijk", (x.sizes[0], weight.sizes[0], x.sizes[1]))
    right = (Load("byte", weight.name, (j, k), DType.I8), Compute("weight", "cast", ("byte",), DType.F32))
    scaled: list[Instr] = [Load("scale", scales.name, (j,), dtype)]
    factor = "scale"
    if dtype is not DType.F32:
        scaled.append(Compute("scale_wide", "cast", ("scale",), DType.F32))
        factor = "scale_wide"
    # eager scales each weight, so that infinities of both signs, or of no weight, are added up to a nan
    scaled.append(Const("nothing", 0.0, DType.F32))
    scaled.append(Compute("unless_infinite", "mul", (factor, "nothing"), DType.F32))
    scaled.append(Compute("scaled", "fma", ("total", factor, "unless_infinite"), DType.F32))
    epilogue = (*scaled, *_stored(out, (i, j), "scaled", dtype))
    left = _left(x, (i, k), dtype)
    right_ = Operand(right, "weight")
    loops = ((), (rows,), (columns,), (summed,))
    return Contraction(call.name, *loops, left, right_, DType.F32, "highest", "total", epilogue, call, call.origin)


# -- both ------------------------------------------------------------------------------------------------


def _operands(ctx: LoweringContext, call: ExternCall) -> list[Buffer]:
    """Activations, weight, scales, result."""
    names = [arg.name for arg in call.args if isinstance(arg, BufferRef)]
    assert len(names) == 3 and call.results[0] is not None
    return [ctx.buffers[name] for name in (*names, call.results[0])]


def _dense(buffer: Buffer) -> bool:
    """Whether its elements follow each other."""
    step = to_expr(1)
    for size, stride in zip(reversed(buffer.sizes), reversed(buffer.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step = step * size
    return True


def _seen_as(ctx: LoweringContext, node: Node, base: Buffer, dtype: str, sizes: tuple[int, ...]) -> str:
    """The memory of a dense buffer as elements of another type and shape."""
    name, device = ctx.unique(f"{base.name}_seen"), base.device
    strides, step = [to_expr(1)], 1
    for size in reversed(sizes[1:]):
        step *= size
        strides.insert(0, to_expr(step))
    ctx.declare_alias(Buffer(name, dtype, tuple(map(to_expr, sizes)), tuple(strides), BufferKind.TEMPORARY, device))
    ctx.steps.append(Alias(name, name, base.name, to_expr(0), ctx.origin(node)))
    return name


def _left(x: Buffer, indices: tuple[Expr, ...], dtype: DType) -> Operand:
    load = Load("x", x.name, indices, dtype)
    if dtype is DType.F32:
        return Operand((load,), "x")
    return Operand((load, Compute("x_wide", "cast", ("x",), DType.F32)), "x_wide")


def _stored(out: Buffer, indices: tuple[Expr, ...], value: str, dtype: DType) -> tuple[Instr, ...]:
    if dtype is DType.F32:
        return (Store(out.name, indices, value),)
    return (Compute("narrow", "cast", (value,), dtype), Store(out.name, indices, "narrow"))
