"""LLVM text of every scalar op: one table row per row of the loop IR's op table.

A row is a function ``(ops, args, dtype) -> Ssa``: ``args`` are the operands (all of one lane count), ``dtype`` the
operands' element type. It must give eager's result on every operand, so nothing here may yield poison:
no ``nsw``, no fast-math flags, conversions and shifts are guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....ir import CONTRACTIONS, DType
from ....launch_plan.status import ZERO_DIVISION
from ....ops.scalar import MATH, expansion
from .arithmetic import Ops
from .casts import emit_cast
from .emitter import Ssa
from .math import exponentials, logarithms, trigonometry
from .types import FLOAT_TYPES, INT_TYPES, register_type, width

__all__ = ["LLVM_OPS", "emit_body", "emit_op"]

Row = Callable[[Ops, Sequence[Ssa], DType], Ssa]


# -- rows ------------------------------------------------------------------------------------------------


def _binary(float_op: str, int_op: str) -> Row:
    def row(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
        return ops.op(float_op if dtype in FLOAT_TYPES else int_op, args[0], args[1])

    return row


def _compare(float_op: str, signed: str, unsigned: str) -> Row:
    def row(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
        if dtype in FLOAT_TYPES:
            return ops.compare(f"fcmp {float_op}", args[0], args[1])
        return ops.compare(f"icmp {unsigned if dtype in (DType.U8, DType.BOOL) else signed}", args[0], args[1])

    return row


def _math(name: str) -> Row:
    return lambda ops, args, dtype: ops.math(name, args, dtype)


def _hyperbolic(name: str) -> Row:
    return lambda ops, args, dtype: exponentials.large_hyperbolic(ops, name, args[0], dtype)


def _exact(name: str) -> Row:
    """libm's function where the vector library's overflows early."""
    return lambda ops, args, dtype: ops.libm(name, args, dtype)


def _intrinsic(name: str) -> Row:
    return lambda ops, args, dtype: ops.intrinsic(name, *args)


def _own(name: str, function: Callable[[Ops, Ssa], Ssa]) -> Row:
    """An inline f32 approximation; other types go to the math library."""

    def row(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
        return function(ops, args[0]) if dtype is DType.F32 else ops.math(name, args, dtype)

    return row


def _neg(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    if dtype in FLOAT_TYPES:
        return ops.em.pure(args[0].type, f"fneg {args[0].typed}", args[0])
    return ops.op("sub", ops.const(0, dtype, args[0]), args[0])


def _abs(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    if dtype in FLOAT_TYPES:
        return ops.intrinsic("fabs", args[0])
    if dtype is DType.U8:
        return args[0]
    zero = ops.const(0, dtype, args[0])
    return ops.select(ops.compare("icmp slt", args[0], zero), ops.op("sub", zero, args[0]), args[0])


def _sign(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    x, zero, one = args[0], ops.const(0, dtype, args[0]), ops.const(1, dtype, args[0])
    if dtype in FLOAT_TYPES:
        below = ops.select(ops.compare("fcmp olt", x, zero), ops.const(-1, dtype, x), zero)
        return ops.select(ops.compare("fcmp ogt", x, zero), one, below)
    if dtype is DType.U8:
        return ops.select(ops.compare("icmp ne", x, zero), one, zero)
    below = ops.select(ops.compare("icmp slt", x, zero), ops.const(-1, dtype, x), zero)
    return ops.select(ops.compare("icmp sgt", x, zero), one, below)


def _reciprocal(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    return ops.op("fdiv", ops.const(1.0, dtype, args[0]), args[0])


def _not(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    return ops.op("xor", args[0], ops.const(True if dtype is DType.BOOL else -1, dtype, args[0]))


def _isnan(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    return ops.compare("fcmp uno", args[0], args[0])


def _signbit(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    x = args[0]
    if dtype is DType.U8:
        return ops.const(False, DType.BOOL, x)
    if dtype in FLOAT_TYPES:
        x = ops.convert("bitcast", x, "i32" if dtype is DType.F32 else "i64")
    return ops.compare("icmp slt", x, Ssa("0" if x.type[0] != "<" else "zeroinitializer", x.type))


def _zero_like(x: Ssa) -> Ssa:
    return Ssa("zeroinitializer" if x.type[0] == "<" else "0", x.type)


def _safe_divisor(ops: Ops, b: Ssa, dtype: DType) -> tuple[Ssa, Ssa | None]:
    """``b`` with 0 (reported) and -1 replaced by 1, and where it was -1: no divide instruction can trap."""
    one = ops.const(1, dtype, b)
    zero = ops.compare("icmp eq", b, _zero_like(b))
    ops.flag(zero, ZERO_DIVISION)
    safe = ops.select(zero, one, b)
    if dtype is DType.U8:
        return safe, None
    minus = ops.compare("icmp eq", b, ops.const(-1, dtype, b))
    return ops.select(minus, one, safe), minus


def _truncdiv(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    a, b = args
    safe, minus = _safe_divisor(ops, b, dtype)
    if minus is None:
        return ops.op("udiv", a, safe)
    return ops.select(minus, _neg(ops, [a], dtype), ops.op("sdiv", a, safe))


def _int_remainder(ops: Ops, a: Ssa, b: Ssa, dtype: DType) -> Ssa:
    safe, minus = _safe_divisor(ops, b, dtype)
    return ops.op("urem" if minus is None else "srem", a, safe)


def _fmod(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    if dtype in INT_TYPES:
        return _int_remainder(ops, args[0], args[1], dtype)
    return ops.libm("fmod", args, dtype)  # exact, also for subnormal divisors


def _mod(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    a, b = args
    rest = _int_remainder(ops, a, b, dtype)
    if dtype is DType.U8:
        return rest
    zero = _zero_like(a)
    wrong = ops.op(
        "and",
        ops.compare("icmp ne", rest, zero),
        ops.compare("icmp slt", ops.op("xor", rest, b), zero),
    )
    return ops.select(wrong, ops.op("add", rest, b), rest)


def _floordiv(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    a, b = args
    if dtype is DType.U8:
        return _truncdiv(ops, args, dtype)
    safe, minus = _safe_divisor(ops, b, dtype)
    quotient, rest, zero = ops.op("sdiv", a, safe), ops.op("srem", a, safe), _zero_like(a)
    wrong = ops.op("and", ops.compare("icmp ne", rest, zero), ops.compare("icmp slt", ops.op("xor", rest, safe), zero))
    down = ops.select(wrong, ops.op("sub", quotient, ops.const(1, dtype, a)), quotient)
    assert minus is not None
    return ops.select(minus, _neg(ops, [a], dtype), down)


def _pow(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    if dtype in INT_TYPES:
        return _int_pow(ops, args[0], args[1], dtype)
    base, exponent = args
    return logarithms.pow_f32(ops, base, exponent) if dtype is DType.F32 else ops.math("pow", args, dtype)


def _int_pow(ops: Ops, base: Ssa, exponent: Ssa, dtype: DType) -> Ssa:
    """Squaring, one step per bit of the exponent; negative exponents give 0 except for bases 1 and -1."""
    one, zero = ops.const(1, dtype, base), _zero_like(base)
    result, square = one, base
    for bit in range(width(dtype) - (0 if dtype is DType.U8 else 1)):
        odd = ops.compare("icmp ne", ops.op("and", exponent, ops.const(1 << bit, dtype, base)), zero)
        result = ops.select(odd, ops.op("mul", result, square), result)
        square = ops.op("mul", square, square)
    if dtype is DType.U8:
        return result
    minus_one = ops.const(-1, dtype, base)
    even = ops.compare("icmp eq", ops.op("and", exponent, one), zero)
    unit = ops.select(ops.compare("icmp eq", base, minus_one), ops.select(even, one, minus_one), zero)
    unit = ops.select(ops.compare("icmp eq", base, one), one, unit)
    return ops.select(ops.compare("icmp slt", exponent, zero), unit, result)


def _extreme(float_op: str, signed: str, unsigned: str, *, propagate: bool) -> Row:
    """min and max. With ``propagate`` a nan operand wins, else the other operand."""

    def row(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
        a, b = args
        if dtype not in FLOAT_TYPES:
            word = unsigned if dtype in (DType.U8, DType.BOOL) else signed
            return ops.select(ops.compare(f"icmp {word}", a, b), a, b)
        picked = ops.select(ops.compare(f"fcmp {float_op}", a, b), a, b)  # b where either is nan
        if propagate:
            return ops.select(ops.compare("fcmp uno", a, a), a, picked)
        return ops.select(ops.compare("fcmp uno", b, b), a, picked)

    return row


def _shl(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    a, amount = args
    bits = width(dtype)
    fits = ops.compare("icmp ult", amount, ops.const(bits, dtype, a))
    safe = ops.select(fits, amount, _zero_like(a))
    return ops.select(fits, ops.op("shl", a, safe), _zero_like(a))


def _shr(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    a, amount = args
    bits = width(dtype)
    fits = ops.compare("icmp ult", amount, ops.const(bits, dtype, a))
    if dtype is DType.U8:
        safe = ops.select(fits, amount, _zero_like(a))
        return ops.select(fits, ops.op("lshr", a, safe), _zero_like(a))
    return ops.op("ashr", a, ops.select(fits, amount, ops.const(bits - 1, dtype, a)))


def _where(ops: Ops, args: Sequence[Ssa], dtype: DType) -> Ssa:
    return ops.select(*args)


# Every op that no row of the op table expands for all types.
LLVM_OPS: Mapping[str, Row] = {
    **{name: _math(name) for name in MATH},  # and what is better than the library's
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "trunc": _intrinsic("trunc"),
    "round": _intrinsic("roundeven"),
    "exp": _own("exp", exponentials.exp_f32),
    "exp2": _own("exp2", logarithms.exp2_f32),
    "expm1": _own("expm1", logarithms.expm1_f32),
    "log": _own("log", logarithms.log_f32),
    "log2": _own("log2", logarithms.log2_f32),
    "log10": _own("log10", logarithms.log10_f32),
    "log1p": _own("log1p", logarithms.log1p_f32),
    "sqrt": _intrinsic("sqrt"),
    "reciprocal": _reciprocal,
    **{name: _hyperbolic(name) for name in ("sinh", "cosh")},
    "sin": _own("sin", trigonometry.sin_f32),
    "cos": _own("cos", trigonometry.cos_f32),
    "erf": _own("erf", exponentials.erf_f32),
    "tanh": _own("tanh", exponentials.tanh_f32),
    "asinh": _exact("asinh"),
    "acosh": _exact("acosh"),
    "bitwise_not": _not,
    "logical_not": _not,
    "isnan": _isnan,
    "signbit": _signbit,
    "add": _binary("fadd", "add"),
    "sub": _binary("fsub", "sub"),
    "mul": _binary("fmul", "mul"),
    **dict.fromkeys(CONTRACTIONS.values(), _binary("fmul", "mul")),
    "div": _binary("fdiv", "sdiv"),
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": _mod,
    "fmod": _fmod,
    "pow": _pow,
    "minimum": _extreme("olt", "slt", "ult", propagate=True),
    "maximum": _extreme("ogt", "sgt", "ugt", propagate=True),
    "fmin": _extreme("olt", "slt", "ult", propagate=False),
    "fmax": _extreme("ogt", "sgt", "ugt", propagate=False),
    "copysign": _intrinsic("copysign"),
    "bitwise_and": _binary("and", "and"),
    "bitwise_or": _binary("or", "or"),
    "bitwise_xor": _binary("xor", "xor"),
    "shl": _shl,
    "shr": _shr,
    "logical_and": _binary("and", "and"),
    "logical_or": _binary("or", "or"),
    "logical_xor": _binary("xor", "xor"),
    "eq": _compare("oeq", "eq", "eq"),
    "ne": _compare("une", "ne", "ne"),
    "lt": _compare("olt", "slt", "ult"),
    "le": _compare("ole", "sle", "ule"),
    "gt": _compare("ogt", "sgt", "ugt"),
    "ge": _compare("oge", "sge", "uge"),
    "where": _where,
    "fma": _intrinsic("fma"),
}


def emit_op(ops: Ops, op: str, args: Sequence[Ssa], dtypes: Sequence[DType], result: DType) -> Ssa:
    """``op(args)`` for operands of ``dtypes``, giving a value of type ``result``."""
    if op == "cast":
        return emit_cast(ops, args[0], dtypes[0], result)
    if op == "bitcast":
        return ops.convert("bitcast", args[0], register_type(result))
    return LLVM_OPS[op](ops, args, dtypes[-1])


def emit_body(ops: Ops, body: Callable[..., Ssa], args: Sequence[Ssa], dtype: DType) -> Ssa:
    """A body of several ops (:mod:`~...ops.expansions`) over operands of ``dtype``."""

    def write(op: str, *operands: Ssa | float) -> Ssa:
        values = [o if isinstance(o, Ssa) else ops.const(o, dtype, args[0]) for o in operands]
        kind = DType.BOOL if values[-1].type in ("i1", ops.typed("i1", args[0])) else dtype
        inner = expansion(op, kind)
        return inner(write, *values) if inner is not None else LLVM_OPS[op](ops, values, kind)

    return body(write, *args)
