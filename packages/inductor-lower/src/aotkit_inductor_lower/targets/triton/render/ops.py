"""The op table's rows as Triton expressions: what each scalar op is in a kernel's source text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ....ir import CONTRACTIONS, DType
from ....ops.dtypes import bits, is_float, is_half, is_int
from ....ops.reductions import store_op
from ....ops.scalar import MATH

__all__ = ["TRITON_OPS", "TYPE_NAMES", "constant_text", "number_text", "op_text", "store_text"]

TYPE_NAMES: Mapping[DType, str] = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int16",
    DType.I8: "tl.int8",
    DType.U8: "tl.uint8",
    DType.BOOL: "tl.int1",
}
Row = Callable[[Sequence[str], DType], str]


def constant_text(value: float | int | bool, dtype: DType, rank: int) -> str:
    """A literal as a tensor of ``rank`` axes of size one."""
    shape, type_ = f"[{', '.join(['1'] * rank)}]", TYPE_NAMES[dtype]
    if dtype is DType.BOOL:
        return f"tl.full({shape}, {int(bool(value))}, tl.int1)"
    if not is_float(dtype):
        wrapped = int(value) & ((1 << bits(dtype)) - 1)
        if dtype is not DType.U8 and wrapped >> (bits(dtype) - 1):
            wrapped -= 1 << bits(dtype)
        return f"tl.full({shape}, {wrapped}, {type_})"
    number = float(value)
    if number == 0 and math.copysign(1, number) < 0:  # tl.full takes every zero for the positive one
        return f"tl.full({shape}, {-(1 << (bits(dtype) - 1))}, tl.int{bits(dtype)}).to({type_}, bitcast=True)"
    if is_half(dtype):
        return cast_text(f"tl.full({shape}, {_number(number)}, tl.float32)", DType.F32, dtype)
    return f"tl.full({shape}, {_number(number)}, {type_})"


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def cast_text(x: str, source: DType, to: DType) -> str:
    """Value conversion with eager's rules, see the op table's row ``cast``."""
    if source is to:
        return x
    if is_half(source):
        return cast_text(f"{x}.to(tl.float32)", DType.F32, to)
    if is_half(to):
        name = "f32_to_f16" if to is DType.F16 else "f32_to_bf16"
        return f"{name}({cast_text(x, source, DType.F32)})"
    if to is DType.BOOL:
        return f"({x} != 0)"
    if is_float(source) and is_int(to):
        wide = DType.I64 if to is DType.I64 else DType.I32
        return cast_text(f"float_to_{wide.value}({x})", wide, to)
    return f"{x}.to({TYPE_NAMES[to]})"


def _infix(operator: str) -> Row:
    return lambda args, dtype: f"({args[0]} {operator} {args[1]})"


def _call(name: str) -> Row:
    return lambda args, dtype: f"{name}({', '.join(args)})"


def _by_type(floats: Row, signed: Row, unsigned: Row | None = None, boolean: Row | None = None) -> Row:
    def row(args: Sequence[str], dtype: DType) -> str:
        if is_float(dtype):
            return floats(args, dtype)
        if dtype is DType.BOOL:
            return (boolean or signed)(args, dtype)
        return (unsigned or signed)(args, dtype) if dtype is DType.U8 else signed(args, dtype)

    return row


def _integers(signed: Row, unsigned: Row) -> Row:
    return lambda args, dtype: (unsigned if dtype is DType.U8 else signed)(args, dtype)


def _first(args: Sequence[str], dtype: DType) -> str:
    return args[0]


def _compare(operator: str) -> Row:
    """Ordered comparisons of bools go through integers: as one bit, true is negative."""
    wide: Row = lambda args, dtype: f"({args[0]}.to(tl.int32) {operator} {args[1]}.to(tl.int32))"  # noqa: E731
    return _by_type(_infix(operator), _infix(operator), boolean=wide)


def _extreme(name: str, pick: str, logic: str) -> Row:
    chosen: Row = lambda args, dtype: f"tl.where({args[0]} {pick} {args[1]}, {args[0]}, {args[1]})"  # noqa: E731
    return _by_type(_call(name), chosen, boolean=_infix(logic))


def _with_width(name: str, reduce: int = 0) -> Row:
    return lambda args, dtype: f"{name}({args[0]}, {args[1]}, {bits(dtype) - reduce})"


# Every op that no row of the op table expands for all types.
TRITON_OPS: Mapping[str, Row] = {
    **{name: _call(f"libm.{function.name}") for name, function in MATH.items()},
    "neg": _by_type(_call("negate"), lambda a, d: f"(0 - {a[0]})"),
    "abs": _by_type(_call("tl.abs"), _call("tl.abs"), _first),
    "sign": _by_type(_call("sign"), _call("sign"), _call("sign_unsigned")),
    "floor": _call("tl.floor"),
    "ceil": _call("tl.ceil"),
    "trunc": _call("libm.trunc"),
    "round": _call("libm.nearbyint"),
    "sqrt": _call("square_root"),
    "reciprocal": _call("reciprocal"),
    "bitwise_not": lambda a, d: f"({a[0]} == 0)" if d is DType.BOOL else f"({a[0]} ^ {255 if d is DType.U8 else -1})",
    "logical_not": lambda a, d: f"({a[0]} == 0)",
    "isnan": lambda a, d: f"({a[0]} != {a[0]})",
    "signbit": _by_type(
        lambda a, d: f"(float_bits({a[0]}) < 0)", lambda a, d: f"({a[0]} < 0)", lambda a, d: f"({a[0]} != {a[0]})"
    ),
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    **dict.fromkeys(CONTRACTIONS.values(), _infix("*")),
    "div": _call("divide"),
    "floordiv": _integers(_call("floor_divide"), _call("divide_unsigned")),
    "truncdiv": _integers(_call("truncate_divide"), _call("divide_unsigned")),
    "mod": _integers(_call("remainder_of_divisor"), _call("remainder_unsigned")),
    "fmod": _by_type(_call("libm.fmod"), _call("remainder_of_dividend"), _call("remainder_unsigned")),
    "pow": _by_type(_call("libm.pow"), _with_width("power_int", 1), _with_width("power_unsigned")),
    "minimum": _extreme("minimum", "<", "&"),
    "maximum": _extreme("maximum", ">", "|"),
    "fmin": _extreme("fmin", "<", "&"),
    "fmax": _extreme("fmax", ">", "|"),
    "copysign": _call("libm.copysign"),
    "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"),
    "bitwise_xor": _infix("^"),
    "shl": _with_width("shift_left"),
    "shr": _by_type(_with_width("shift_right"), _with_width("shift_right"), _with_width("shift_right_unsigned")),
    "logical_and": _infix("&"),
    "logical_or": _infix("|"),
    "logical_xor": _infix("^"),
    "eq": _infix("=="),
    "ne": _infix("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "where": _call("tl.where"),
    "fma": _call("tl.fma"),
}


_FAST: Mapping[str, Row] = {
    "div": _call("divide_fast"),
    "sqrt": _call("square_root_fast"),
    "reciprocal": _call("reciprocal_fast"),
}


def op_text(op: str, args: Sequence[str], dtypes: Sequence[DType], result: DType, fast: bool = False) -> str:
    """``op(args)`` for operands of ``dtypes``, giving a value of type ``result``. ``fast``: not rounded to nearest."""
    if fast and op in _FAST:
        return _FAST[op](args, dtypes[-1])
    if op == "cast":
        return cast_text(args[0], dtypes[0], result)
    if op == "bitcast":
        return f"{args[0]}.to({TYPE_NAMES[result]}, bitcast=True)"
    return TRITON_OPS[op](args, dtypes[-1])


def store_text(mode: str, a: str, b: str, dtype: DType) -> str:
    """``a`` and ``b`` combined as a store of a mode does."""
    if is_half(dtype):
        to = "f32_to_f16" if dtype is DType.F16 else "f32_to_bf16"
        return f"{to}({store_text(mode, f'{a}.to(tl.float32)', f'{b}.to(tl.float32)', DType.F32)})"
    op = store_op(mode, dtype)
    return TRITON_OPS[op]([a, b], dtype)


def number_text(value: float | int | bool) -> str:
    """A literal; bools are 0 and 1."""
    return _number(value) if isinstance(value, float) else str(int(value))
