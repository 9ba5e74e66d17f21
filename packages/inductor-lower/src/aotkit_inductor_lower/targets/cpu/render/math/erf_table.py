"""``erf`` in f32 by a table held in vector registers, for vectors of 512 bits, or of 256 with fused multiply-add.

Note [Polynomials by lane]
    AVX-512 picks a lane of a register by an index per lane in one instruction: a table of 16 polynomials costs one such
    instruction per coefficient and no branch. |x| up to 4 is cut into 16 pieces of equal width around multiples of
    ``_WIDTH`` (exact in few bits, so the distance from the middle is exact); adding a large constant leaves the piece's
    number in the low bits, which is all the instruction looks at. Near 0 ``erf(x) = x + x*P(t)``, further out
    ``1 + P(t)``, fitted as in Note [Where the approximations come from]: what is added last has all digits.

    AVX picks one of four numbers by the low bits of an index per lane as cheaply, so there the pieces are four, of
    width 1 and numbered by the whole part of the size, and the polynomials of degree 8: two thirds of the instructions
    of a polynomial near 0, an exponential further out and a choice, and half of those are not multiplications.
"""

from __future__ import annotations

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa
from ..types import literal
from .polynomials import ROUND, multiply_add, whole_part

__all__ = ["erf_by_table", "has_table"]

_LANES = 16
_WIDTH = 33 / 128
_PIECES_NEAR = 4  # up to there relative to x
_LIMIT = 15.49 * _WIDTH  # beyond, erf rounds to 1

# Six rows, by power of t, of sixteen coefficients by piece.
_NUMBERS = """
0.128379166 0.103869781 0.0358749777 -0.0613852553 -0.144728184 -0.0683019236 -0.0286979005 -0.0107040871
-0.00353624928 -0.00103286852 -0.000266334595 -6.05595342e-05 -1.21309695e-05 -2.13907288e-06 -3.31810298e-07
-4.52533158e-08 3.48565919e-07 -0.186386243 -0.331496447 -0.411455214 0.389576763 0.214188263 0.103101633 0.0434512869
0.0160327125 0.00517939078 0.00146493246 0.000362763734 7.86497767e-05 1.49292709e-05 2.48111701e-06 3.61015935e-07
-0.376146615 -0.332860321 -0.222045839 -0.0883993059 -0.401751846 -0.276104331 -0.159487158 -0.0784166977
-0.0330673903 -0.0120174848 -0.00377652328 -0.00102864089 -0.000243269023 -5.00191491e-05 -8.95073026e-06
-1.39514168e-06 0.00039868278 0.107480749 0.168800369 0.166803896 0.146342531 0.165878788 0.130102992 0.0798614621
0.0401239879 0.0168636106 0.00600291509 0.00182400795 0.000475585024 0.000106803811 2.07155917e-05 3.47655987e-06
0.109951958 0.0870782956 0.028522905 -0.0288219508 0.0586179607 -0.0144240092 -0.0470982082 -0.0457830578
-0.0303719714 -0.0156227173 -0.00653055031 -0.00227044523 -0.000665353204 -0.00016576171 -3.53138275e-05
-6.4564174e-06 0.00317666237 -0.0365635864 -0.049814567 -0.0355399996 -0.0676716343 -0.0420432314 -0.0097984625
0.00905191246 0.0129409023 0.0093766097 0.00489715766 0.00201204093 0.000674797106 0.000188406222 4.43194294e-05
8.92352728e-06
"""
_TABLE = tuple(zip(*[map(float, _NUMBERS.split())] * _LANES, strict=True))


# Nine rows, by power of t, of four coefficients by piece: erf(x)/x - 1 in piece 0, erf(x) - 1 in the others.
_FOURS = (
    (0.0409997553, -0.0338948518, -0.000406951731, -7.43114754e-07),
    (-0.324434131, 0.118930072, 0.00217831787, 5.39730081e-06),
    (-0.229913846, -0.178395301, -0.00544575416, -1.88953018e-05),
    (0.166888162, 0.138763562, 0.00834829081, 4.24089558e-05),
    (0.0323600955, -0.0446019247, -0.00862117857, -6.7791676e-05),
    (-0.0498971418, -0.0150338747, 0.00614333944, 8.04831216e-05),
    (3.1746029e-05, 0.0193493925, -0.00281039067, -7.70124097e-05),
    (0.00974770635, -0.00383338472, 0.00040313811, 6.68868306e-05),
    (-0.00110509805, -0.00243402738, 0.000310669362, -3.73038929e-05),
)
_MIDDLES = (0.5, 1.5, 2.5, 3.5)
_LIMIT_OF_FOURS = 3.9999998  # the largest number of the last piece; beyond, erf rounds to 1


def has_table(ops: Ops, x: Ssa) -> bool:
    """Whether a table fits the vectors of ``x``; scalars are computed in a lane, so that results do not depend on
    where an element stands."""
    if ops.target.vector_bits == 512:
        return ops.lanes(x) in (1, _LANES)
    return _has_fours(ops) and ops.lanes(x) in (1, 4, 8)


def _has_fours(ops: Ops) -> bool:
    return ops.target.vector_bits == 256 and ops.target.has("fma")


def erf_by_table(ops: Ops, x: Ssa) -> Ssa:
    """``erf``, below 1.5 ulp."""
    fours = _has_fours(ops)
    if ops.lanes(x) == 1:
        return ops.em.lane(erf_by_table(ops, ops.em.splat(x, 4 if fours else _LANES)), 0, "float")
    return _erf_by_fours(ops, x) if fours else _erf_by_sixteens(ops, x)


def _erf_by_fours(ops: Ops, x: Ssa) -> Ssa:
    size, limit = ops.intrinsic("fabs", x), ops.const(_LIMIT_OF_FOURS, DType.F32, x)
    size = ops.select(ops.compare("fcmp ogt", size, limit), limit, size)
    piece = whole_part(ops, size)
    t = ops.op("fsub", size, _pick_of_four(ops, _MIDDLES, piece))
    result = _pick_of_four(ops, _FOURS[-1], piece)
    for row in reversed(_FOURS[:-1]):
        result = multiply_add(ops, result, t, _pick_of_four(ops, row, piece))
    one = ops.const(1.0, DType.F32, x)
    factor = ops.select(ops.compare("fcmp olt", size, one), size, one)
    result = multiply_add(ops, factor, result, factor)
    sign = ops.op("and", ops.convert("bitcast", x, "i32"), ops.const(-(1 << 31), DType.I32, x))
    return ops.convert("bitcast", ops.op("or", ops.convert("bitcast", result, "i32"), sign), "float")


def _pick_of_four(ops: Ops, row: tuple[float, ...], piece: Ssa) -> Ssa:
    lanes = ops.lanes(piece)
    table = ", ".join(f"float {literal(value, DType.F32)}" for value in row * (lanes // 4))
    symbol, vector = f"llvm.x86.avx.vpermilvar.ps{'.256' if lanes == 8 else ''}", f"<{lanes} x float>"
    ops.em.declare(symbol, vector, [vector, piece.type])
    return ops.em.pure(vector, f"call {vector} @{symbol}({vector} <{table}>, {piece.typed})", piece)


def _erf_by_sixteens(ops: Ops, x: Ssa) -> Ssa:
    size, limit = ops.intrinsic("fabs", x), ops.const(_LIMIT, DType.F32, x)
    size = ops.select(ops.compare("fcmp ogt", size, limit), limit, size)
    magic = ops.const(ROUND, DType.F32, x)
    shifted = multiply_add(ops, size, ops.const(1 / _WIDTH, DType.F32, x), magic)
    middle = ops.op("fsub", shifted, magic)
    t = multiply_add(ops, middle, ops.const(-_WIDTH, DType.F32, x), size)
    piece = ops.convert("bitcast", shifted, "i32")
    result = _pick(ops, _TABLE[-1], piece)
    for row in reversed(_TABLE[:-1]):
        result = multiply_add(ops, result, t, _pick(ops, row, piece))
    near = ops.compare("fcmp olt", middle, ops.const(_PIECES_NEAR - 0.5, DType.F32, x))
    factor = ops.select(near, size, ops.const(1.0, DType.F32, x))
    return ops.intrinsic("copysign", multiply_add(ops, factor, result, factor), x)


def _pick(ops: Ops, row: tuple[float, ...], piece: Ssa) -> Ssa:
    table = ", ".join(f"float {literal(value, DType.F32)}" for value in row)
    symbol, vector = "llvm.x86.avx512.permvar.sf.512", f"<{_LANES} x float>"
    ops.em.declare(symbol, vector, [vector, piece.type])
    return ops.em.pure(vector, f"call {vector} @{symbol}({vector} <{table}>, {piece.typed})", piece)
