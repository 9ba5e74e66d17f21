"""``erf`` in f32 by a table held in vector registers, for vectors of 512 bits, or of 256 with fused multiply-add.

Note [Polynomials by lane]
    AVX-512 picks a lane of a register by an index per lane in one instruction: a table of 16 polynomials costs one such
    instruction per coefficient and no branch. |x| up to 4 is cut into 16 pieces of equal width around multiples of
    ``_WIDTH`` (exact in few bits, so the distance from the middle is exact); adding a large constant leaves the piece's
    number in the low bits, which is all the instruction looks at. Near 0 ``erf(x) = x + x*P(t)``, further out ``P(t)``,
    fitted as in Note [Where the approximations come from].

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
0.128379166 0.103869781 0.0358749777 -0.0613852553 0.855271816 0.931698084 0.971302092 0.9892959 0.996463776
0.998967111 0.999733686 0.999939442 0.999987841 0.999997854 0.999999642 0.99999994
3.48565919e-07 -0.186386243 -0.331496447 -0.411455214 0.389576763 0.214188278 0.103101633 0.0434512906 0.0160327144
0.00517939078 0.00146493234 0.00036276356 7.86496894e-05 1.49292382e-05 2.481107e-06 3.61011161e-07
-0.376146615 -0.332860321 -0.222045839 -0.0883993059 -0.401754737 -0.276109427 -0.15948683 -0.0784118325
-0.0330790095 -0.0120074069 -0.00378602743 -0.00102898339 -0.000229829413 -4.68414728e-05 3.20655477e-06
5.36033622e-06
0.00039868278 0.107480749 0.168800369 0.166803896 0.146344811 0.165876195 0.130103499 0.0798614174 0.0401237309
0.016863618 0.00600291137 0.00182401238 0.000475596578 0.000106807784 2.07168086e-05 3.47780338e-06
0.109951958 0.0870782956 0.028522905 -0.0288219508 0.0588070676 -0.0140738897 -0.0470879152 -0.0460603274
-0.0296776239 -0.0162327811 -0.00596641609 -0.00225264113 -0.00147144031 -0.000356445176 -0.000763603894
-0.000411118701
0.00317666237 -0.0365635864 -0.049814567 -0.0355399996 -0.0677320361 -0.0419080667 -0.00983554218 0.00903944857
0.0129512614 0.00937496219 0.00489853229 0.00201298529 0.000674722949 0.000188403748 4.43181852e-05 8.85355439e-06
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
    result = ops.select(near, multiply_add(ops, size, result, size), result)
    return ops.intrinsic("copysign", result, x)


def _pick(ops: Ops, row: tuple[float, ...], piece: Ssa) -> Ssa:
    table = ", ".join(f"float {literal(value, DType.F32)}" for value in row)
    symbol, vector = "llvm.x86.avx512.permvar.sf.512", f"<{_LANES} x float>"
    ops.em.declare(symbol, vector, [vector, piece.type])
    return ops.em.pure(vector, f"call {vector} @{symbol}({vector} <{table}>, {piece.typed})", piece)
