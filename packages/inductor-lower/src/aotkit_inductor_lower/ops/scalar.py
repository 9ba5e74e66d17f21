"""Every scalar op of the loop IR: one row each, with its types, its edge values and eager's version of it.

The printer, the verifier, the interpreter and each code generator go by the same rows; a code generator's
own table has exactly these keys. ``reference`` is what the op means: eager torch on whole tensors. Where
eager's own kernel kills the process (``INT_MIN / -1`` traps on x86) or depends on the vector width, the
reference gives the value that the row's ``edges`` text states.

Note [Types of ops]
    ``domain`` is the set of types the compared or computed operands may have; all of them have the same type.
    The rule says the rest: SAME gives that type, PREDICATE gives bool, WHERE takes a bool first and gives the
    type of the others, CAST and BITCAST go from any type to any (of the same width for BITCAST). float16 and
    bfloat16 are in the domain of WHERE and casts only; so lowering casts to f32, computes, and casts back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..errors import IRError
from . import expansions as body
from . import reference as ref
from .dtypes import ARITHMETIC_INTS, FLOATS, HALVES, DType, bits
from .expansions import Expansion

__all__ = [
    "DEAR",
    "EXPANDED",
    "LONG",
    "MATH",
    "OP_TABLE",
    "TRAPPING",
    "WORK",
    "MathSymbol",
    "OpRow",
    "TypeRule",
    "check_op_types",
    "expansion",
    "result_dtype",
]


class TypeRule(Enum):
    """How the result's type follows from the operands', see Note [Types of ops]."""

    SAME = "same"
    PREDICATE = "predicate"
    WHERE = "where"
    CAST = "cast"
    BITCAST = "bitcast"


@dataclass(frozen=True, slots=True)
class MathSymbol:
    """What the C library calls a function. ``accuracy``: the suffix of the version that kernels use of the vector math
    library, which tells its error (``u10``: 1.0 units in the last place); empty for exact functions."""

    name: str
    accuracy: str = ""


FREE, CHEAP, ROOT, HEAVY, DIVISION = 0, 1, 4, 8, 20  # costs, see OpRow

_F = FLOATS - HALVES
_I = ARITHMETIC_INTS
_B = frozenset({DType.BOOL})
_ALL = frozenset(DType)


@dataclass(frozen=True, slots=True)
class OpRow:
    """One scalar op.

    ``reference`` takes ``arity`` tensors of equal shape (``cast`` and ``bitcast``: a tensor and a
    :class:`DType`) and gives a tensor. ``traps``: integer operands may raise ``ZeroDivisionError``, as the
    kernel's error status does. ``commutative``: the operands may be swapped (NaN payloads aside).
    ``cost``: 0 for what comes along with other work, 1 for an instruction or two, 4 for a root, 8 for many
    instructions or a call, 20 for a division that is guarded. ``symbol``: the library's function that computes it.
    ``expand``: what the op is in other ops, see :mod:`.expansions`; the first that fits is taken, for every target.
    """

    name: str
    arity: int
    rule: TypeRule
    domain: frozenset[DType]
    reference: Callable[..., Tensor]
    edges: str
    commutative: bool = False
    traps: bool = False
    cost: int = CHEAP
    symbol: MathSymbol | None = None
    expand: tuple[Expansion, ...] = ()

    @property
    def written(self) -> frozenset[DType]:
        """The operand types for which a target must know how the op is written."""
        return self.domain.difference(*(e.domain for e in self.expand if not e.where))


def _unary(
    name: str,
    domain: frozenset[DType],
    reference: Callable[..., Tensor],
    edges: str,
    cost: int = CHEAP,
    expand: Callable[..., object] | None = None,
) -> OpRow:
    expansions = (Expansion(expand),) if expand is not None else ()
    return OpRow(name, 1, TypeRule.SAME, domain, reference, edges, cost=cost, expand=expansions)


def _math(name: str, reference: Callable[..., Tensor], edges: str, *, arity: int = 1, accuracy: str = "u10") -> OpRow:
    """A function of floats that the math library has."""
    symbol = MathSymbol(name, accuracy)
    commutative = name == "hypot"
    return OpRow(name, arity, TypeRule.SAME, _F, reference, edges, commutative, cost=HEAVY, symbol=symbol)


def _test(name: str, domain: frozenset[DType], reference: Callable[..., Tensor], edges: str) -> OpRow:
    return OpRow(name, 1, TypeRule.PREDICATE, domain, reference, edges)


def _binary(
    name: str,
    domain: frozenset[DType],
    reference: Callable[..., Tensor],
    edges: str,
    *,
    commutative: bool = False,
    cost: int = CHEAP,
    symbol: MathSymbol | None = None,
    expand: tuple[Expansion, ...] = (),
) -> OpRow:
    rule = TypeRule.SAME
    return OpRow(name, 2, rule, domain, reference, edges, commutative, cost=cost, symbol=symbol, expand=expand)


def _division(
    name: str,
    reference: Callable[..., Tensor],
    edges: str,
    symbol: MathSymbol | None = None,
    expand: tuple[Expansion, ...] = (),
) -> OpRow:
    """Of floats, and of integers, where a zero divisor is an error."""
    rule = TypeRule.SAME
    return OpRow(name, 2, rule, _F | _I, reference, edges, traps=True, cost=DIVISION, symbol=symbol, expand=expand)


def _compare(name: str, reference: Callable[..., Tensor], edges: str) -> OpRow:
    return OpRow(name, 2, TypeRule.PREDICATE, _F | _I | _B, reference, edges, name in ("eq", "ne"))


_NAN_FALSE = "false if either is nan; -0.0 equals 0.0"
_DIVIDE_INT = "integers: a zero divisor is an error"
_ZERO_SIGN = "of zeros of both signs either may come out"

_ROWS = (
    # -- unary: sign and rounding
    _unary("neg", _F | _I, ref.neg, "flips the sign bit of 0.0 and nan; integers wrap (neg INT_MIN is INT_MIN)", FREE),
    _unary("abs", _F | _I, ref.abs_, "clears the sign bit; integers wrap (abs INT_MIN is INT_MIN)"),
    _unary("sign", _F | _I, ref.sign, "0 for zeros of both signs and for nan"),
    _unary("floor", _F, ref.floor, "keeps -0.0, inf and nan"),
    _unary("ceil", _F, ref.ceil, "ceil(-0.5) is -0.0; keeps -0.0, inf and nan"),
    _unary("trunc", _F, ref.trunc, "trunc(-0.5) is -0.0; keeps -0.0, inf and nan"),
    _unary("round", _F, ref.round_, "ties go to the even neighbour: 0.5 to 0, 1.5 to 2, -0.5 to -0.0"),
    # -- unary: transcendental
    _math("exp", ref.exp, "exp(-inf) is 0, exp(inf) is inf; nan stays"),
    _math("exp2", ref.exp2, "exact at integers; exp2(-inf) is 0"),
    _math("expm1", ref.expm1, "expm1(-inf) is -1; keeps -0.0"),
    _math("log", ref.log, "log of +-0 is -inf, of a negative nan, of inf inf"),
    _math("log2", ref.log2, "as log; exact at powers of two"),
    _math("log10", ref.log10, "as log"),
    _math("log1p", ref.log1p, "log1p(-1) is -inf, below nan; keeps -0.0"),
    _unary("sqrt", _F, ref.sqrt, "correctly rounded (eager: within 1 ulp); of -0.0 -0.0, of a negative nan", ROOT),
    _unary("rsqrt", _F, ref.rsqrt, "in two roundings; of +-0 +-inf, of inf 0, of a negative nan", ROOT, body.rsqrt),
    _unary("reciprocal", _F, ref.reciprocal, "1/x correctly rounded; of +-0 +-inf, of +-inf +-0"),
    _math("sin", ref.sin, "sin(+-inf) is nan; keeps -0.0"),
    _math("cos", ref.cos, "cos(+-inf) is nan"),
    _math("tan", ref.tan, "tan(+-inf) is nan; keeps -0.0"),
    _math("asin", ref.asin, "nan outside [-1, 1]"),
    _math("acos", ref.acos, "nan outside [-1, 1]; acos(1) is 0"),
    _math("atan", ref.atan, "atan(+-inf) is +-pi/2"),
    _math("sinh", ref.sinh, "overflows to +-inf"),
    _math("cosh", ref.cosh, "overflows to inf"),
    _math("tanh", ref.tanh, "tanh(+-inf) is +-1; keeps -0.0"),
    _math("asinh", ref.asinh, "keeps -0.0 and inf"),
    _math("acosh", ref.acosh, "nan below 1; acosh(1) is 0"),
    _math("atanh", ref.atanh, "atanh(+-1) is +-inf, nan outside"),
    _math("erf", ref.erf, "erf(+-inf) is +-1"),
    _math("erfc", ref.erfc, "erfc(inf) is 0, erfc(-inf) is 2", accuracy="u15"),
    _math("lgamma", ref.lgamma, "log of |gamma|: inf at 0, -1, -2 .. and at both infinities"),
    _unary("sigmoid", _F, ref.sigmoid, "0 at -inf, 1 at inf, never overflows to nan", HEAVY, body.sigmoid),
    _unary(
        "spherical_bessel_j0",
        _F,
        torch.special.spherical_bessel_j0,
        "sin(x)/x: 1 at 0, 0 at both infinities",
        HEAVY,
        body.spherical_bessel_j0,
    ),
    # -- unary: bits and tests
    _unary("bitwise_not", _I | _B, ref.bitwise_not, "of bool: logical not"),
    _unary("logical_not", _B, ref.logical_not, ""),
    _test("isnan", _F, ref.isnan, ""),
    OpRow(
        "isinf",
        1,
        TypeRule.PREDICATE,
        _F,
        ref.isinf,
        "true for both infinities, false for nan",
        expand=(Expansion(body.isinf),),
    ),
    _test("signbit", _F | _I, ref.signbit, "true for -0.0 and for a nan with its sign bit set; u8 is never negative"),
    # -- binary: arithmetic
    _binary("add", _F | _I, ref.add, "integers wrap; inf + -inf is nan", commutative=True),
    _binary("sub", _F | _I, ref.sub, "integers wrap; inf - inf is nan"),
    _binary("mul", _F | _I, ref.mul, "integers wrap; 0 * inf is nan", commutative=True),
    _binary(
        "mul_contract",
        _F,
        ref.mul,
        "as mul; its sum may take it unrounded, as in products of matrices",
        commutative=True,
    ),
    _binary(
        "mul_contract_high",
        _F,
        ref.mul,
        "as mul_contract; of f32 the last 8 bits of the factors may be lost",
        commutative=True,
    ),
    _binary(
        "mul_contract_medium", _F, ref.mul, "as mul_contract; f32 factors may be rounded to bf16", commutative=True
    ),
    _binary("div", _F, ref.div, "true division: x/0 is +-inf or, at 0/0, nan"),
    _division(
        "floordiv",
        ref.floordiv,
        f"rounds down; {_DIVIDE_INT}; INT_MIN // -1 is INT_MIN; floats: x//0 is x/0, else (a - mod)/b made whole",
        expand=(Expansion(body.floordiv),),
    ),
    _division(
        "truncdiv",
        ref.truncdiv,
        f"rounds towards zero; {_DIVIDE_INT}; INT_MIN / -1 is INT_MIN; floats: trunc(a/b)",
        expand=(Expansion(body.truncdiv),),
    ),
    _division(
        "mod",
        ref.mod,
        f"sign of the divisor; {_DIVIDE_INT}; INT_MIN % -1 is 0; floats: mod 0 is nan",
        expand=(Expansion(body.mod),),
    ),
    _division(
        "fmod",
        ref.fmod,
        f"sign of the dividend; {_DIVIDE_INT}; floats: exact, fmod 0 is nan",
        symbol=MathSymbol("fmod"),
    ),
    _binary(
        "pow",
        _F | _I,
        ref.pow_,
        "floats: as C's pow (pow(x, 0) and pow(1, x) are 1, also for nan); integers wrap, a negative exponent gives 0 "
        "except for bases 1 and -1",
        cost=HEAVY,
        symbol=MathSymbol("pow", "u10"),
        expand=body.POWERS,
    ),
    _binary("minimum", _F | _I | _B, ref.minimum, f"nan if either is nan; {_ZERO_SIGN}", commutative=True),
    _binary("maximum", _F | _I | _B, ref.maximum, f"nan if either is nan; {_ZERO_SIGN}", commutative=True),
    _binary("fmin", _F | _I | _B, ref.fmin, f"the other one if one is nan; {_ZERO_SIGN}", commutative=True),
    _binary("fmax", _F | _I | _B, ref.fmax, f"the other one if one is nan; {_ZERO_SIGN}", commutative=True),
    _math("atan2", ref.atan2, "C's atan2 of (y, x), quadrant from the signs of zeros too", arity=2),
    _math("hypot", ref.hypot, "inf if either is inf, also with nan; does not overflow early", arity=2, accuracy="u05"),
    _binary("copysign", _F, ref.copysign, "takes the sign bit, also of -0.0 and nan"),
    _math("nextafter", ref.nextafter, "b if equal (also zeros); from 0 to the least subnormal", arity=2, accuracy=""),
    # -- binary: bits and logic
    _binary("bitwise_and", _I | _B, ref.bitwise_and, "", commutative=True),
    _binary("bitwise_or", _I | _B, ref.bitwise_or, "", commutative=True),
    _binary("bitwise_xor", _I | _B, ref.bitwise_xor, "", commutative=True),
    _binary("shl", _I, ref.shl, "wraps; an amount that is negative or at least the width gives 0"),
    _binary(
        "shr", _I, ref.shr, "arithmetic (u8: logical); an amount below 0 or at least the width leaves the sign, 0 or -1"
    ),
    _binary("logical_and", _B, ref.logical_and, "", commutative=True, cost=FREE),
    _binary("logical_or", _B, ref.logical_or, "", commutative=True, cost=FREE),
    _binary("logical_xor", _B, ref.logical_xor, "", commutative=True),
    # -- binary: comparisons
    _compare("eq", ref.eq, _NAN_FALSE),
    _compare("ne", ref.ne, "true if either is nan; -0.0 equals 0.0"),
    _compare("lt", ref.lt, _NAN_FALSE),
    _compare("le", ref.le, _NAN_FALSE),
    _compare("gt", ref.gt, _NAN_FALSE),
    _compare("ge", ref.ge, _NAN_FALSE),
    # -- ternary
    OpRow("where", 3, TypeRule.WHERE, _ALL, ref.where, "the value not taken has no effect, nan included", cost=FREE),
    OpRow("fma", 3, TypeRule.SAME, _F, ref.fma, "a*b + c rounded once; use only where eager rounds once"),
    # -- casts
    OpRow(
        "cast",
        1,
        TypeRule.CAST,
        _ALL,
        ref.cast,
        "float to i64 or i32: towards zero, INT_MIN for nan and out of range; float to i16, i8, u8: through i32, low "
        "bits kept; to bool: x != 0 (nan is true); integer to integer: low bits; to f16 and bf16: through f32, nearest "
        "even, overflow to inf; bool to number: 0 or 1",
        cost=FREE,
    ),
    OpRow("bitcast", 1, TypeRule.BITCAST, _ALL - _B, ref.bitcast, "same bits"),
)

OP_TABLE: Mapping[str, OpRow] = MappingProxyType({row.name: row for row in _ROWS})
WORK = frozenset(row.name for row in _ROWS if row.cost > FREE)  #: operations that count as work
DEAR = frozenset(row.name for row in _ROWS if row.cost >= ROOT)  #: better stored than computed again
LONG = frozenset(row.name for row in _ROWS if row.cost >= HEAVY)  #: keep a processor busy by themselves
MATH: Mapping[str, MathSymbol] = MappingProxyType({row.name: row.symbol for row in _ROWS if row.symbol is not None})
EXPANDED = frozenset(row.name for row in _ROWS if row.expand)  #: may be other ops
TRAPPING = frozenset(row.name for row in _ROWS if row.traps)  #: may report an error


def expansion(op: str, dtype: DType, constants: Sequence[float | int | bool | None] = ()) -> Callable[..., Any] | None:
    """The body that an op on operands of ``dtype`` is, if it is one. ``constants``: which operands are numbers."""
    for found in OP_TABLE[op].expand:
        if dtype in found.domain and all(
            place < len(constants) and constants[place] == number for place, number in found.where
        ):
            return found.body
    return None


def check_op_types(op: str, args: Sequence[DType], result: DType) -> str | None:
    """Why ``result = op(args)`` is ill-typed, as a sentence, or ``None`` if it is fine."""
    row = OP_TABLE.get(op)
    if row is None:
        return f"there is no op named {op!r}"
    if len(args) != row.arity:
        return f"{op} takes {row.arity} arguments, not {len(args)}"
    operands = args
    if row.rule is TypeRule.WHERE:
        if args[0] is not DType.BOOL:
            return f"the condition of where must be bool, not {args[0].value}"
        operands = args[1:]
    if any(dtype is not operands[0] for dtype in operands):
        return f"the operands of {op} have different types: {', '.join(d.value for d in operands)}"
    if operands[0] not in row.domain:
        return f"{op} is not defined for {operands[0].value}"
    if row.rule is TypeRule.CAST:
        return None
    if row.rule is TypeRule.BITCAST:
        if result is DType.BOOL or bits(result) != bits(operands[0]):
            return f"bitcast from {operands[0].value} to {result.value} changes the width or makes a bool"
        return None
    expected = DType.BOOL if row.rule is TypeRule.PREDICATE else operands[0]
    return None if result is expected else f"{op} of {operands[0].value} gives {expected.value}, not {result.value}"


def result_dtype(op: str, args: Sequence[DType], to: DType | None = None) -> DType:
    """The type of ``op(args)``; ``to`` is the target of ``cast`` and ``bitcast``. Raises :class:`IRError`."""
    row = OP_TABLE.get(op)
    if row is None:
        raise IRError(f"there is no op named {op!r}")
    if row.rule in (TypeRule.CAST, TypeRule.BITCAST):
        if to is None:
            raise IRError(f"{op} needs the type to convert to")
        result = to
    else:
        result = DType.BOOL if row.rule is TypeRule.PREDICATE else args[-1] if args else DType.BOOL
    problem = check_op_types(op, args, result)
    if problem:
        raise IRError(problem)
    return result
