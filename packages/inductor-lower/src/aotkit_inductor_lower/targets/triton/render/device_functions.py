"""Device functions that generated kernels are written with, in Triton's language.

This file is read as text: a kernel's source starts with those of these functions that it calls, so it stands alone.
Functions of ``libm`` are CUDA's libdevice. On the interpreter ``libm`` and what :mod:`.interpreted` names are replaced.
"""

# mypy: ignore-errors
# ruff: noqa: F821

# -- floats ------------------------------------------------------------------------------------------------


@jit
def float_bits(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@jit
def negate(x):  # 0 - x would lose the sign of zero
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) ^ -9223372036854775808).to(tl.float64, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)


@jit
def divide(a, b):  # rounded to nearest
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@jit
def square_root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@jit
def reciprocal(x):
    return divide(tl.full(x.shape, 1.0, x.dtype), x)


@jit
def divide_fast(a, b):  # within 2 ulp in f32
    return a / b


@jit
def square_root_fast(x):
    return tl.sqrt(x)


@jit
def reciprocal_fast(x):
    return 1.0 / x


@jit
def sign(x):  # 0 for nan
    below = tl.where(x < 0, tl.full(x.shape, -1, x.dtype), tl.full(x.shape, 0, x.dtype))
    return tl.where(x > 0, tl.full(x.shape, 1, x.dtype), below)


@jit
def sign_unsigned(x):
    return tl.where(x != 0, tl.full(x.shape, 1, x.dtype), tl.full(x.shape, 0, x.dtype))


@jit
def minimum(a, b):  # nan if either is nan
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def fmin(a, b):  # the other one if one is nan
    return tl.where(a != a, b, tl.where(b != b, a, tl.where(a < b, a, b)))


@jit
def fmax(a, b):
    return tl.where(a != a, b, tl.where(b != b, a, tl.where(a > b, a, b)))


# -- integers ----------------------------------------------------------------------------------------------


@jit
def safe_divisor(b):  # 0 and -1 become 1: no divide instruction has an undefined result
    return tl.where((b == 0) | (b == -1), tl.full(b.shape, 1, b.dtype), b)


@jit
def truncate_divide(a, b):
    return tl.where(b == -1, 0 - a, a // safe_divisor(b))


@jit
def remainder_of_dividend(a, b):
    return a % safe_divisor(b)


@jit
def remainder_of_divisor(a, b):
    rest = a % safe_divisor(b)
    wrong = (rest != 0) & ((rest ^ b) < 0)
    return tl.where(wrong, rest + b, rest)


@jit
def floor_divide(a, b):
    safe = safe_divisor(b)
    rest = a % safe
    wrong = (rest != 0) & ((rest ^ safe) < 0)
    quotient = a // safe
    return tl.where(b == -1, 0 - a, tl.where(wrong, quotient - 1, quotient))


@jit
def divide_unsigned(a, b):
    return a // tl.where(b == 0, tl.full(b.shape, 1, b.dtype), b)


@jit
def remainder_unsigned(a, b):
    return a % tl.where(b == 0, tl.full(b.shape, 1, b.dtype), b)


@jit
def power_unsigned(base, exponent, BITS: tl.constexpr):
    result, square = tl.full(base.shape, 1, base.dtype), base
    for bit in tl.static_range(BITS):
        odd = ((exponent >> bit) & 1) != 0
        result = tl.where(odd, result * square, result)
        square = square * square
    return result


@jit
def power_int(base, exponent, BITS: tl.constexpr):  # a negative exponent gives 0 except for bases 1 and -1
    one = tl.full(base.shape, 1, base.dtype)
    result = power_unsigned(base, exponent, BITS)
    unit = tl.where((exponent & 1) == 0, one, 0 - one)
    unit = tl.where(base == -1, unit, tl.where(base == 1, one, 0 - one + one))
    return tl.where(exponent < 0, unit, result)


@jit
def shift_left(a, amount, BITS: tl.constexpr):
    fits = (amount >= 0) & (amount < BITS)
    zero = tl.full(a.shape, 0, a.dtype)
    return tl.where(fits, a << tl.where(fits, amount, zero), zero)


@jit
def shift_right(a, amount, BITS: tl.constexpr):
    fits = (amount >= 0) & (amount < BITS)
    return a >> tl.where(fits, amount, tl.full(a.shape, BITS - 1, a.dtype))


@jit
def shift_right_unsigned(a, amount, BITS: tl.constexpr):
    fits = amount < BITS
    zero = tl.full(a.shape, 0, a.dtype)
    return tl.where(fits, a >> tl.where(fits, amount, zero), zero)


# -- casts -------------------------------------------------------------------------------------------------


@jit
def float_to_i32(x):  # towards zero; INT_MIN for nan and what is out of range
    if x.dtype == tl.float64:
        inside = (x > -2147483649.0) & (x < 2147483648.0)
    else:
        inside = (x >= -2147483648.0) & (x < 2147483648.0)
    whole = tl.where(inside, x, tl.full(x.shape, 0.0, x.dtype)).to(tl.int32)
    return tl.where(inside, whole, tl.full(x.shape, -2147483648, tl.int32))


@jit
def float_to_i64(x):
    inside = (x >= -9223372036854775808.0) & (x < 9223372036854775808.0)
    whole = tl.where(inside, x, tl.full(x.shape, 0.0, x.dtype)).to(tl.int64)
    return tl.where(inside, whole, tl.full(x.shape, -9223372036854775808, tl.int64))


@jit
def f32_to_bf16(x):  # nearest, ties to even: cvt.rn.bf16.f32
    return x.to(tl.bfloat16)


@jit
def f32_to_f16(x):
    return x.to(tl.float16)


# -- reductions of one axis ----------------------------------------------------------------------------------


@jit
def combine_sum(a, b):
    return a + b


@jit
def combine_prod(a, b):
    return a * b


@jit
def combine_or(a, b):
    return a | b


@jit
def combine_and(a, b):
    return a & b


@jit
def combine_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def combine_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def prefer_first_min(v, i, w, j):  # nan before everything, then the smaller one, then the first
    v_nan, w_nan = v != v, w != w
    better = (v_nan & (w_nan == 0)) | ((v < w) & (w_nan == 0))
    equal = (v == w) | (v_nan & w_nan)
    take = better | (equal & (i < j))
    return tl.where(take, v, w), tl.where(take, i, j)


@jit
def prefer_first_max(v, i, w, j):
    v_nan, w_nan = v != v, w != w
    better = (v_nan & (w_nan == 0)) | ((v > w) & (w_nan == 0))
    equal = (v == w) | (v_nan & w_nan)
    take = better | (equal & (i < j))
    return tl.where(take, v, w), tl.where(take, i, j)


@jit
def reduce_sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_sum, keep_dims=True)


@jit
def fold_sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_sum)


@jit
def fold_max(x, axis: tl.constexpr):  # of numbers; what is none is left out
    return tl.max(x, axis)


@jit
def reduce_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_prod, keep_dims=True)


@jit
def reduce_or(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_or, keep_dims=True)


@jit
def reduce_and(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_and, keep_dims=True)


@jit
def reduce_min(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_min, keep_dims=True)


@jit
def reduce_max(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_max, keep_dims=True)


@jit
def reduce_argmin(x, position, axis: tl.constexpr):
    _, found = tl.reduce((x, position), axis, prefer_first_min, keep_dims=True)
    return found


@jit
def reduce_argmax(x, position, axis: tl.constexpr):
    _, found = tl.reduce((x, position), axis, prefer_first_max, keep_dims=True)
    return found


@jit
def combine_squares(mean, squares, n, other_mean, other_squares, m):  # of Chan, Golub and LeVeque; n or m may be 0
    share = tl.where(m == 0.0, 0.0, m / tl.where(m == 0.0, 1.0, n + m))
    distance = other_mean - mean
    between = tl.where((n == 0.0) | (m == 0.0), 0.0, distance * distance * n * share)
    return mean + distance * share, squares + other_squares + between, n + m


@jit
def reduce_squares(mean, squares, n, axis: tl.constexpr):  # squared distances from the common mean
    _, found, _ = tl.reduce((mean, squares, n), axis, combine_squares, keep_dims=True)
    return found


@jit
def scan_sum(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_sum)


@jit
def scan_prod(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_prod)


@jit
def scan_or(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_or)


@jit
def scan_and(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_and)


@jit
def scan_min(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_min)


@jit
def scan_max(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_max)


# -- matrix products -----------------------------------------------------------------------------------------


@jit
def dot(a, b, acc):  # of halves, whose products are exact in acc's type
    return tl.dot(a, b, acc)


@jit
def dot_ieee(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def dot_tf32(a, b, acc):
    return tl.dot(a, b, acc, input_precision="tf32")


@jit
def dot_float8(a, b, acc, A: tl.constexpr, B: tl.constexpr):  # of bytes; acc is in float32, step by step
    left, right = a.to(A, bitcast=True), b.to(B, bitcast=True)
    return tl.dot(left, right, acc, max_num_imprecise_acc=a.shape[1])


# -- memory --------------------------------------------------------------------------------------------------


@jit
def atomic_add(pointer, value, mask):
    tl.atomic_add(pointer, value, mask=mask, sem="relaxed")


@jit
def atomic_min(pointer, value, mask):
    tl.atomic_min(pointer, value, mask=mask, sem="relaxed")


@jit
def atomic_max(pointer, value, mask):
    tl.atomic_max(pointer, value, mask=mask, sem="relaxed")


@jit
def wrap_index(value, size):
    return tl.where(value < 0, value + size, value)


@jit
def check_index(value, size, mask):  # wraps negatives; what is out of range stops the kernel, as in eager
    wrapped = tl.where(value < 0, value + size, value)
    good = (wrapped >= 0) & (wrapped < size)
    tl.device_assert(good | (mask == 0), "index out of bounds")
    return tl.where(good, wrapped, tl.full(wrapped.shape, 0, wrapped.dtype))


# -- indices -------------------------------------------------------------------------------------------------


@jit
def index_floor_divide(x, d):  # of a positive divisor
    return tl.where(x % d < 0, x // d - 1, x // d)


@jit
def index_modulo(x, d):
    rest = x % d
    return tl.where(rest < 0, rest + d, rest)


@jit
def index_square_root(n):  # rounded down; exact as long as n is below 2**52
    return tl.sqrt(tl.cast(n, tl.float64)).to(tl.int64)
