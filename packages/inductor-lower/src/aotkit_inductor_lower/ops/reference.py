"""What each op of the table computes: eager torch on whole tensors, slow and obviously right.

Rows whose eager kernel depends on the vector width, or traps, are written out here; the rest are torch's ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from .dtypes import DType, is_int, to_torch_dtype

neg, sign, floor, ceil, trunc = torch.neg, torch.sign, torch.floor, torch.ceil, torch.trunc
abs_, round_, pow_ = torch.abs, torch.round, torch.pow
exp, exp2, expm1, log, log2, log10, log1p = (
    torch.exp,
    torch.exp2,
    torch.expm1,
    torch.log,
    torch.log2,
    torch.log10,
    torch.log1p,
)
rsqrt, reciprocal = torch.rsqrt, torch.reciprocal
sin, cos, tan, asin, acos, atan = torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan
sinh, cosh, tanh, asinh, acosh, atanh = torch.sinh, torch.cosh, torch.tanh, torch.asinh, torch.acosh, torch.atanh
erf, erfc, sigmoid, lgamma = torch.erf, torch.erfc, torch.sigmoid, torch.lgamma
bitwise_not, logical_not = torch.bitwise_not, torch.logical_not
isnan, isinf, signbit = torch.isnan, torch.isinf, torch.signbit
add, sub, mul, div = torch.add, torch.sub, torch.mul, torch.true_divide
minimum, maximum, fmin, fmax = torch.minimum, torch.maximum, torch.fmin, torch.fmax
atan2, hypot, copysign, nextafter = torch.atan2, torch.hypot, torch.copysign, torch.nextafter
bitwise_and, bitwise_or, bitwise_xor = torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor
shl, shr = torch.bitwise_left_shift, torch.bitwise_right_shift
logical_and, logical_or, logical_xor = torch.logical_and, torch.logical_or, torch.logical_xor
eq, ne, lt, le, gt, ge = torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge
where = torch.where


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded, element by element: eager's vector library is off by one in the last place now and then."""
    flat = [math.sqrt(v) if v >= 0 else math.nan for v in x.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).to(x.dtype).reshape(x.shape)


def _guard_integer_division(a: Tensor, b: Tensor) -> Tensor:
    """``b`` with -1 replaced by 1, so that no divide instruction can trap; a zero raises."""
    if bool((b == 0).any()):
        raise ZeroDivisionError("integer division or modulo by zero in a generated kernel")
    return torch.where(b == -1, torch.ones_like(b), b) if b.dtype.is_signed else b


def floordiv(a: Tensor, b: Tensor) -> Tensor:
    """Division rounded down."""
    if a.dtype.is_floating_point:
        return torch.div(a, b, rounding_mode="floor")
    safe = _guard_integer_division(a, b)
    quotient = torch.div(a, safe, rounding_mode="floor")
    return quotient if safe is b else torch.where(b == -1, -a, quotient)


def truncdiv(a: Tensor, b: Tensor) -> Tensor:
    """Division rounded towards zero."""
    if a.dtype.is_floating_point:
        return torch.div(a, b, rounding_mode="trunc")
    safe = _guard_integer_division(a, b)
    quotient = torch.div(a, safe, rounding_mode="trunc")
    return quotient if safe is b else torch.where(b == -1, -a, quotient)


def mod(a: Tensor, b: Tensor) -> Tensor:
    """Remainder with the sign of the divisor."""
    if not a.dtype.is_floating_point:
        return torch.remainder(a, _guard_integer_division(a, b))
    rest = fmod(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def fmod(a: Tensor, b: Tensor) -> Tensor:
    """Remainder with the sign of the dividend. Exact, also where eager's vector loop gives nan: at huge quotients."""
    if not a.dtype.is_floating_point:
        return torch.fmod(a, _guard_integer_division(a, b))
    x, y = torch.broadcast_tensors(a.double(), b.double())
    rest = torch.fmod(x, y)
    lost = rest.isnan() & x.isfinite() & ~y.isnan() & (y != 0)
    if bool(lost.any()):
        rest = rest.masked_scatter(lost, _fmod_one_by_one(x[lost], y[lost]))
    return rest.to(a.dtype)


def _fmod_one_by_one(x: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([math.fmod(p, q) for p, q in zip(x.tolist(), y.tolist(), strict=True)], dtype=torch.float64)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a*b + c`` with one rounding, element by element in exact rational arithmetic."""
    a, b, c = torch.broadcast_tensors(a, b, c)
    single = a.dtype == torch.float32
    values = [
        _fma_exact(x, y, z, single)
        for x, y, z in zip(a.flatten().tolist(), b.flatten().tolist(), c.flatten().tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).to(a.dtype).reshape(a.shape)


def _fma_exact(x: float, y: float, z: float, single: bool) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y + z
    if not math.isfinite(z):
        return z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return x * y + z if z == 0.0 else 0.0
    try:
        rounded = float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
    if not single or Fraction(rounded) == exact:
        return rounded
    # Round to odd in f64, so that the later rounding to f32 is the only one that counts.
    if _mantissa_is_even(rounded):
        rounded = math.nextafter(rounded, math.inf if Fraction(rounded) < exact else -math.inf)
    return rounded


def _mantissa_is_even(value: float) -> bool:
    mantissa, _ = math.frexp(value)
    return int(mantissa * 2.0**53) % 2 == 0


def cast(x: Tensor, to: DType) -> Tensor:
    """Value conversion. Narrow integers go through i32, which is what eager's kernels do on x86."""
    target = to_torch_dtype(to)
    if x.dtype.is_floating_point and is_int(to):
        wide = torch.int64 if to is DType.I64 else torch.int32
        limit = 2.0**63 if to is DType.I64 else 2.0**31
        value = x.double()
        inside = (value > -limit - 1) & (value < limit)
        # Outside the range a conversion is undefined in C++; x86 gives the smallest integer.
        whole = torch.where(inside, value, torch.zeros_like(value)).to(wide)
        return torch.where(inside, whole, torch.full_like(whole, torch.iinfo(wide).min)).to(target)
    if x.dtype == torch.float64 and target in (torch.float16, torch.bfloat16):
        return x.float().to(target)
    return x.to(target)


def bitcast(x: Tensor, to: DType) -> Tensor:
    """The same bits as another type of the same width."""
    return x.contiguous().view(to_torch_dtype(to))


# -- reductions of the last dimension ---------------------------------------------------------------------


def reduce_sum(x: Tensor) -> Tensor:
    """Sum; floats are accumulated in f64 here, so that this is the more exact side of a comparison."""
    return x.double().sum(-1).to(x.dtype) if x.dtype.is_floating_point else x.long().sum(-1).to(x.dtype)


def reduce_prod(x: Tensor) -> Tensor:
    """Product, with f64 or wrapping i64 inside."""
    return x.double().prod(-1).to(x.dtype) if x.dtype.is_floating_point else x.long().prod(-1).to(x.dtype)


def reduce_min(x: Tensor) -> Tensor:
    """Smallest; nan wins."""
    return _reduce_extreme(x, torch.amin, lowest=False)


def reduce_max(x: Tensor) -> Tensor:
    """Largest; nan wins."""
    return _reduce_extreme(x, torch.amax, lowest=True)


def _reduce_extreme(x: Tensor, reduce: Callable[..., Tensor], *, lowest: bool) -> Tensor:
    if x.shape[-1]:
        return reduce(x, -1)
    if x.dtype == torch.bool:
        identity: float = 0 if lowest else 1
    elif x.dtype.is_floating_point:
        identity = -math.inf if lowest else math.inf
    else:
        identity = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    return torch.full(x.shape[:-1], identity, dtype=x.dtype)


def reduce_any(x: Tensor) -> Tensor:
    """Whether any is true."""
    return x.any(-1)


def reduce_all(x: Tensor) -> Tensor:
    """Whether all are true."""
    return x.all(-1)


def reduce_argmin(x: Tensor) -> Tensor:
    """Position of the first smallest, or of the first nan."""
    return _first_position(x, reduce_min)


def reduce_argmax(x: Tensor) -> Tensor:
    """Position of the first largest, or of the first nan."""
    return _first_position(x, reduce_max)


def _first_position(x: Tensor, extreme: Callable[[Tensor], Tensor]) -> Tensor:
    if not x.shape[-1]:
        return torch.zeros(x.shape[:-1], dtype=torch.int64)
    best = extreme(x).unsqueeze(-1)
    found = x == best
    if x.dtype.is_floating_point:
        found = found | (x.isnan() & best.isnan())
    positions = torch.arange(x.shape[-1]).expand_as(x)
    return torch.where(found, positions, torch.full_like(positions, x.shape[-1])).amin(-1)
