"""Every row of the op table: its types, and its reference against eager and against what the row says of edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from aotkit_inductor_lower.errors import IRError
from aotkit_inductor_lower.ir import DType
from aotkit_inductor_lower.ir.nodes import STORE_MODES
from aotkit_inductor_lower.ops.dtypes import (
    accumulate_dtype,
    bits,
    dtype_from_torch_name,
    from_torch_dtype,
    int_bounds,
    is_float,
    is_half,
    is_int,
    is_signed,
    to_torch_dtype,
    torch_name,
)
from aotkit_inductor_lower.ops.reductions import REDUCTIONS, combine_tensors, identity, reduce_dtype, store_op
from aotkit_inductor_lower.ops.scalar import (
    OP_TABLE,
    TypeRule,
    check_op_types,
    expansion,
    result_dtype,
)
from aotkit_inductor_lower.targets.triton.interpreted import interpreter_functions
from aotkit_inductor_lower.targets.triton.render.combining import combine_text, function_name
from aotkit_inductor_lower.targets.triton.render.ops import TRITON_OPS
from aotkit_inductor_lower.targets.triton.render.prelude import device_function_names

INF, NAN = math.inf, math.nan
FLOAT_EDGES = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.0, -7.25, 0.75, 1e-40, 1e10, -3e38, INF, -INF, NAN]
VOCABULARY = """
neg abs sign floor ceil trunc round exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan
sinh cosh tanh asinh acosh atanh erf erfc sigmoid lgamma spherical_bessel_j0 bitwise_not logical_not isnan isinf signbit
add sub mul mul_contract mul_contract_high mul_contract_medium div floordiv truncdiv mod fmod pow
minimum maximum fmin fmax atan2 hypot copysign nextafter
bitwise_and bitwise_or bitwise_xor shl shr logical_and logical_or logical_xor eq ne lt le gt ge where fma cast bitcast
"""

# What eager calls each op, where that is not torch.<name>.
EAGER = {
    "div": torch.true_divide,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mul_contract": torch.mul,
    "mul_contract_high": torch.mul,
    "mul_contract_medium": torch.mul,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.remainder,
    "spherical_bessel_j0": torch.special.spherical_bessel_j0,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}


def edges(dtype: DType) -> torch.Tensor:
    if dtype is DType.BOOL:
        return torch.tensor([False, True])
    if is_int(dtype):
        low, high = int_bounds(dtype)
        values = {low, low + 1, high, *range(-3 if low else 0, 4), 7, 8, 31, 32, 63, 64, 100}
        return torch.tensor(sorted(v for v in values if low <= v <= high), dtype=to_torch_dtype(dtype))
    return torch.tensor(FLOAT_EDGES, dtype=torch.float64).to(to_torch_dtype(dtype))


def grid(row_dtypes: list[DType]) -> list[torch.Tensor]:
    columns = [edges(d) for d in row_dtypes]
    meshes = torch.meshgrid(*[torch.arange(len(c)) for c in columns], indexing="ij")
    return [c[m.flatten()] for c, m in zip(columns, meshes, strict=True)]


def one_by_one(op: str, args: list[torch.Tensor]) -> torch.Tensor:
    """Eager on single elements, so on its scalar loops. Divisions of INT_MIN by -1 are left out: they can trap."""
    eager = EAGER.get(op) or getattr(torch, op)
    return torch.stack([eager(*(a.reshape(1) for a in point))[0] for point in zip(*args, strict=True)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    same = (a == b) | (a != a) & (b != b)
    return same & (a.signbit() == b.signbit()) | (a != a) if a.dtype.is_floating_point else same


ROWS = [
    (name, dtype)
    for name, row in OP_TABLE.items()
    if row.rule not in (TypeRule.CAST, TypeRule.BITCAST, TypeRule.WHERE) and name != "fma"
    for dtype in sorted(row.domain, key=lambda d: d.value)
]


def test_the_table_holds_the_whole_vocabulary_and_nothing_else() -> None:
    assert sorted(OP_TABLE) == sorted(VOCABULARY.split())
    assert sorted(REDUCTIONS) == sorted(["sum", "prod", "min", "max", "xor", "any", "all", "argmin", "argmax"])
    assert all(row.name == name for name, row in OP_TABLE.items())


def test_a_cuda_kernel_has_text_for_every_op_of_the_table() -> None:
    assert set(TRITON_OPS) | {"cast", "bitcast"} == {name for name, row in OP_TABLE.items() if row.written}


@pytest.mark.parametrize(("op", "dtype"), ROWS, ids=lambda v: v.value if isinstance(v, DType) else v)
@pytest.mark.covers("F5g.1", "F5g.2", "F5g.3")
def test_the_reference_of_a_row_is_eager_on_its_edge_values(op: str, dtype: DType) -> None:
    row = OP_TABLE[op]
    args = grid([dtype] * row.arity)
    if row.traps and is_int(dtype):
        low = int_bounds(dtype)[0]
        keep = (args[1] != 0) & ~((args[0] == low) & (args[1] == -1) & (low < 0))
        args = [a[keep] for a in args]
    found, wanted = row.reference(*args), one_by_one(op, args)
    assert found.dtype == to_torch_dtype(result_dtype(op, [dtype] * row.arity))
    assert wanted.dtype == found.dtype
    if op in ("minimum", "maximum", "fmin", "fmax"):  # the sign of a zero is left open by these rows
        found, wanted = found + 0, wanted + 0
    exact = same_bits(found, wanted)
    if found.dtype.is_floating_point:
        close = torch.isclose(found, wanted, rtol=4 * torch.finfo(found.dtype).eps, atol=0.0, equal_nan=True)
        exact = exact | (close & (found.signbit() == wanted.signbit()))
    bad = ~exact
    assert not bad.any(), f"{[a[bad][:4] for a in args]}: {found[bad][:4]} against eager's {wanted[bad][:4]}"


@pytest.mark.parametrize("dtype", [DType.I8, DType.I16, DType.I32, DType.I64], ids=lambda d: d.value)
@pytest.mark.covers("F5g.2")
def test_the_smallest_integer_divided_by_minus_one_wraps(dtype: DType) -> None:
    low = int_bounds(dtype)[0]
    a, b = torch.tensor([low, low], dtype=to_torch_dtype(dtype)), torch.tensor([-1, 1], dtype=to_torch_dtype(dtype))
    assert OP_TABLE["floordiv"].reference(a, b).tolist() == [low, low]
    assert OP_TABLE["truncdiv"].reference(a, b).tolist() == [low, low]
    assert OP_TABLE["mod"].reference(a, b).tolist() == [0, 0]
    assert OP_TABLE["fmod"].reference(a, b).tolist() == [0, 0]
    assert OP_TABLE["neg"].reference(a).tolist() == [low, low]
    assert OP_TABLE["abs"].reference(a).tolist() == [low, low]


@pytest.mark.parametrize("op", [name for name, row in OP_TABLE.items() if row.traps])
def test_an_integer_divided_by_zero_is_an_error(op: str) -> None:
    with pytest.raises(ZeroDivisionError):
        OP_TABLE[op].reference(torch.tensor([1, 2]), torch.tensor([1, 0]))
    assert not OP_TABLE[op].reference(torch.tensor([1.0]), torch.tensor([0.0])).isfinite().any()


@pytest.mark.covers("F5g.2")
def test_shifts_by_the_width_or_more_are_defined() -> None:
    a = torch.tensor([5, -5, -128], dtype=torch.int8)
    for amount in (8, 9, 127, -1):
        by = torch.full_like(a, amount)
        assert OP_TABLE["shl"].reference(a, by).tolist() == [0, 0, 0]
        assert OP_TABLE["shr"].reference(a, by).tolist() == [0, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("a", "b"), [(3e38, 1e-40), (1e38, 7.0), (-7.5, 2.0), (-3e38, 1e-30), (5.0, -1e-42)])
def test_fmod_and_mod_are_exact_at_huge_quotients(a: float, b: float, dtype: torch.dtype) -> None:
    x, y = torch.tensor([a] * 16, dtype=dtype), torch.tensor([b] * 16, dtype=dtype)
    rest = math.fmod(x[0].item(), y[0].item())
    assert OP_TABLE["fmod"].reference(x, y).tolist() == [rest] * 16
    moved = torch.tensor(rest, dtype=dtype) + y[0] if rest and (rest < 0) != (b < 0) else rest
    assert OP_TABLE["mod"].reference(x, y).tolist() == [float(moved)] * 16


def test_round_goes_to_the_even_neighbour_and_keeps_the_sign_of_zero() -> None:
    found = OP_TABLE["round"].reference(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]))
    assert found.tolist() == [0.0, 2.0, 2.0, -0.0, -2.0]
    assert found.signbit().tolist() == [False, False, False, True, True]


@pytest.mark.covers("F5g.3")
def test_minimum_propagates_nan_and_fmin_does_not() -> None:
    a, b = torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])
    for op in ("minimum", "maximum"):
        assert OP_TABLE[op].reference(a, b).isnan().all()
    for op in ("fmin", "fmax"):
        assert OP_TABLE[op].reference(a, b).tolist() == [1.0, 1.0]


def test_sqrt_is_correctly_rounded() -> None:
    x = torch.arange(1, 1000, dtype=torch.float32)
    found = OP_TABLE["sqrt"].reference(x)
    for value, root in zip(x.tolist(), found, strict=True):
        below, above = (torch.nextafter(root, torch.tensor(end)) for end in (0.0, math.inf))
        # half way to the neighbours, squared: exact in f64
        low, high = (root.double() + below.double()) / 2, (root.double() + above.double()) / 2
        assert low * low <= value <= high * high
    assert OP_TABLE["sqrt"].reference(torch.tensor([-0.0, INF, -1.0, NAN])).tolist()[:2] == [-0.0, INF]
    assert OP_TABLE["sqrt"].reference(torch.tensor([-0.0]))[0].signbit()


def test_fma_rounds_once() -> None:
    a = torch.tensor([1 + 2**-12, 1e30, INF, 0.1, -0.0, 2.0**-100], dtype=torch.float32)
    c = torch.tensor([-1.0, -1e38, -INF, 0.2, -0.0, 2.0**-149], dtype=torch.float32)
    found = OP_TABLE["fma"].reference(a, a, c)
    assert found[0] == 2**-11 + 2**-24, "the last bit of the product survives"
    assert found[0] != (a * a + c)[0]
    assert found[1] == INF
    assert found[2].isnan()
    assert found[3] == (a[3].double() * a[3].double() + c[3].double()).float()
    assert found[4] == 0 and not found[4].signbit()
    wide = OP_TABLE["fma"].reference(*(torch.tensor([v], dtype=torch.float64) for v in (1 + 2**-30, 1 + 2**-30, -1.0)))
    assert wide.item() == 2**-29 + 2**-60


@pytest.mark.parametrize("source", [DType.F16, DType.BF16], ids=lambda d: d.value)
@pytest.mark.parametrize("target", list(DType), ids=lambda d: d.value)
@pytest.mark.covers("F5g.5")
def test_casting_every_half_value_is_eager(source: DType, target: DType) -> None:
    half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(to_torch_dtype(source))
    found, wanted = OP_TABLE["cast"].reference(half, target), half.to(to_torch_dtype(target))
    assert found.dtype == wanted.dtype
    assert same_bits(found, wanted).all()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DType, DType)), ids=lambda d: d.value)
@pytest.mark.covers("F5g.5")
def test_casting_edge_values_is_eager(source: DType, target: DType) -> None:
    values = edges(source)
    if is_float(source):
        more = [
            2147483520.0,
            2147483648.0,
            -2147483648.0,
            -2147483904.0,
            9.3e18,
            300.0,
            -300.0,
            40000.0,
            65519.9,
            65520.0,
        ]
        values = torch.cat([values, torch.tensor(more, dtype=torch.float64).to(values.dtype)])
    found, wanted = OP_TABLE["cast"].reference(values, target), values.to(to_torch_dtype(target))
    assert same_bits(found, wanted).all(), (values, found, wanted)


def test_bitcast_keeps_every_bit() -> None:
    x = torch.tensor([-0.0, NAN, 1.0])
    again = OP_TABLE["bitcast"].reference(OP_TABLE["bitcast"].reference(x, DType.I32), DType.F32)
    assert torch.equal(again.view(torch.int32), x.view(torch.int32))
    assert OP_TABLE["bitcast"].reference(x, DType.I32)[0] == -(2**31)


@pytest.mark.covers("F5g.4")
def test_where_ignores_the_value_not_taken() -> None:
    found = OP_TABLE["where"].reference(torch.tensor([True, False]), torch.tensor([1.0, NAN]), torch.tensor([NAN, 2.0]))
    assert found.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("op", "args", "result", "problem"),
    [
        ("frobnicate", [DType.F32], DType.F32, "no op named 'frobnicate'"),
        ("add", [DType.F32], DType.F32, "takes 2 arguments, not 1"),
        ("add", [DType.F32, DType.F64], DType.F32, "have different types: f32, f64"),
        ("add", [DType.BF16, DType.BF16], DType.BF16, "add is not defined for bf16"),
        ("exp", [DType.I64], DType.I64, "exp is not defined for i64"),
        ("add", [DType.BOOL, DType.BOOL], DType.BOOL, "add is not defined for bool"),
        ("lt", [DType.F32, DType.F32], DType.F32, "lt of f32 gives bool, not f32"),
        ("where", [DType.F32, DType.F32, DType.F32], DType.F32, "condition of where must be bool, not f32"),
        ("where", [DType.BOOL, DType.F32, DType.F64], DType.F32, "different types"),
        ("bitcast", [DType.F32], DType.I64, "changes the width"),
    ],
)
def test_ill_typed_ops_are_named(op: str, args: list[DType], result: DType, problem: str) -> None:
    assert problem in (check_op_types(op, args, result) or "")


def test_well_typed_ops_have_a_result_type() -> None:
    assert result_dtype("where", [DType.BOOL, DType.BF16, DType.BF16]) is DType.BF16
    assert result_dtype("isnan", [DType.F32]) is DType.BOOL
    assert result_dtype("cast", [DType.F32], DType.U8) is DType.U8
    assert reduce_dtype("argmax", DType.F32) is DType.I64
    with pytest.raises(IRError, match="cast needs the type"):
        result_dtype("cast", [DType.F32])
    with pytest.raises(IRError, match="no op named"):
        result_dtype("nothing", [])
    with pytest.raises(IRError, match="reduce sum is not defined for bool"):
        reduce_dtype("sum", DType.BOOL)
    with pytest.raises(IRError, match="no reduction named 'median'"):
        reduce_dtype("median", DType.F32)


# -- reductions ------------------------------------------------------------------------------------------


def writer(like: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Adds no op, but computes it, by its row's reference."""

    def write(op: str, *args: torch.Tensor | float) -> torch.Tensor:
        operands = [arg if isinstance(arg, torch.Tensor) else torch.full_like(like, arg) for arg in args]
        body = expansion(op, from_torch_dtype(operands[-1].dtype) or DType.BOOL)
        return body(write, *operands) if body is not None else OP_TABLE[op].reference(*operands)

    return write


EXPANSIONS = [
    (name, number, dtype)
    for name, row in OP_TABLE.items()
    for number, found in enumerate(row.expand)
    for dtype in sorted(found.domain & row.domain, key=lambda d: d.value)
]


@pytest.mark.parametrize(("op", "number", "dtype"), EXPANSIONS, ids=lambda v: v.value if isinstance(v, DType) else v)
def test_an_expansion_gives_on_all_edges_what_the_op_means(op: str, number: int, dtype: DType) -> None:
    row, found = OP_TABLE[op], OP_TABLE[op].expand[number]
    args = grid([dtype] * row.arity)
    for place, value in found.where:
        args[place] = torch.full_like(args[place], value)
    constants = [dict(found.where).get(place) for place in range(row.arity)]
    assert expansion(op, dtype, constants) is found.body
    got, want = found.body(writer(args[0]), *args), row.reference(*args)
    assert got.dtype == want.dtype
    if is_float(dtype) and got.dtype.is_floating_point:
        inside = want.abs().nan_to_num(1.0) > torch.finfo(want.dtype).tiny  # a square on the way may be subnormal
        eps = 8 * torch.finfo(want.dtype).eps
        torch.testing.assert_close(got[inside], want[inside], rtol=eps, atol=0.0, equal_nan=True)
        torch.testing.assert_close(got[~inside], want[~inside], rtol=eps, atol=1e-37, equal_nan=True)
    else:
        assert torch.equal(got, want)


def test_an_op_is_expanded_for_the_types_and_constants_that_its_row_names() -> None:
    assert expansion("pow", DType.F32) is None
    assert expansion("pow", DType.F32, (None, 1.7)) is None
    assert expansion("pow", DType.I32, (None, 3)) is expansion("pow", DType.F64, (None, 3.0))
    assert expansion("pow", DType.I32, (None, -1)) is None
    assert expansion("mod", DType.I64) is None
    assert expansion("mod", DType.F64) is not None
    assert not OP_TABLE["sigmoid"].written
    assert OP_TABLE["mod"].written == {DType.I8, DType.I16, DType.I32, DType.I64, DType.U8}


@pytest.mark.parametrize("kind", sorted(REDUCTIONS))
def test_partial_results_of_a_reduction_join_to_the_whole(kind: str) -> None:
    row = REDUCTIONS[kind]
    if row.position_of:
        assert REDUCTIONS[row.position_of].domain == row.domain
        assert not row.scannable
        return
    for dtype in sorted(row.domain, key=lambda d: d.value):
        a, b = grid([dtype, dtype])
        neutral = torch.full_like(a, identity(kind, dtype))
        assert row.reference(a.new_empty(1, 0)).equal(neutral[:1])
        for joined in (combine_tensors(kind, a, neutral), combine_tensors(kind, neutral, a)):
            torch.testing.assert_close(joined, a, rtol=0, atol=0, equal_nan=True)
        whole = row.reference(torch.stack([a, b], -1))
        torch.testing.assert_close(combine_tensors(kind, a, b), whole, equal_nan=True)


def test_every_kind_of_reduction_is_known_everywhere() -> None:
    functions, interpreted = set(device_function_names()), set(interpreter_functions())
    for kind, row in REDUCTIONS.items():
        names = {function_name(kind, dtype) for dtype in row.domain}
        wanted = {f"reduce_{name}" for name in names} | {f"scan_{name}" for name in names if row.scannable}
        assert wanted <= functions & interpreted, kind
        assert all(len(combine_text(kind, "a", "b", dtype)) > 2 for dtype in row.domain if not row.position_of)
    modes = {row.store for row in REDUCTIONS.values() if row.store}
    assert modes == set(STORE_MODES) - {"set"}
    for mode in modes:
        assert DType.BOOL in OP_TABLE[store_op(mode, DType.BOOL)].domain
        assert set(DType) - {DType.BOOL, DType.F16, DType.BF16} <= OP_TABLE[store_op(mode, DType.F32)].domain


def exclusive_or(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By eager's hash, which has 64 bits of any integer."""
    return torch.hash_tensor(x, dim).view(torch.int64).to(x.dtype)


@pytest.mark.parametrize("kind", sorted(REDUCTIONS))
@pytest.mark.covers("F5g.8", "F5g.9")
def test_a_reduction_is_eager_on_edge_values(kind: str) -> None:
    named = {"min": torch.amin, "max": torch.amax, "xor": exclusive_or}
    eager = named.get(kind) or getattr(torch, kind)
    for dtype in sorted(REDUCTIONS[kind].domain, key=lambda d: d.value):
        values = edges(dtype)
        rows = torch.stack([values.roll(k)[: 2 + k % 5].repeat(3)[:6] for k in range(len(values))])
        found = REDUCTIONS[kind].reference(rows)
        try:
            wanted = eager(rows, -1)
        except (RuntimeError, NotImplementedError):
            assert dtype is DType.BOOL, "eager has no argmin of bool"
            wanted = eager(rows.to(torch.uint8), -1)
        if dtype is DType.BOOL and not REDUCTIONS[kind].position_of:
            wanted = wanted.to(torch.bool)
        if is_float(dtype):
            assert torch.allclose(found.double(), wanted.to(found.dtype).double(), equal_nan=True, rtol=1e-5)
        else:
            assert torch.equal(found, wanted.to(found.dtype)), (kind, dtype)


@pytest.mark.covers("F5g.9")
def test_the_first_of_equals_and_the_first_nan_win() -> None:
    assert REDUCTIONS["argmax"].reference(torch.tensor([1.0, 3.0, 3.0])) == 1
    assert REDUCTIONS["argmin"].reference(torch.tensor([3.0, NAN, 1.0, NAN])) == 1
    assert REDUCTIONS["argmax"].reference(torch.tensor([2, 2, 2])) == 0


def test_an_empty_reduction_gives_the_identity() -> None:
    empty = {d: torch.empty((2, 0), dtype=to_torch_dtype(d)) for d in DType}
    assert REDUCTIONS["sum"].reference(empty[DType.F32]).tolist() == [0, 0]
    assert REDUCTIONS["prod"].reference(empty[DType.I64]).tolist() == [1, 1]
    assert REDUCTIONS["min"].reference(empty[DType.F32]).tolist() == [INF, INF]
    assert REDUCTIONS["max"].reference(empty[DType.I8]).tolist() == [-128, -128]
    assert REDUCTIONS["max"].reference(empty[DType.BOOL]).tolist() == [False, False]
    assert REDUCTIONS["all"].reference(empty[DType.BOOL]).tolist() == [True, True]
    assert REDUCTIONS["argmin"].reference(empty[DType.F64]).tolist() == [0, 0]


def test_integer_sums_and_products_wrap() -> None:
    assert REDUCTIONS["sum"].reference(torch.tensor([2**31 - 1, 1], dtype=torch.int32)) == -(2**31)
    assert REDUCTIONS["prod"].reference(torch.tensor([2**62, 4])) == 0


# -- types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.value)
def test_a_dtype_goes_to_torch_and_back(dtype: DType) -> None:
    torch_dtype = to_torch_dtype(dtype)
    assert from_torch_dtype(torch_dtype) is dtype
    assert dtype_from_torch_name(torch_name(dtype)) is dtype
    assert bits(dtype) == 8 * torch_dtype.itemsize
    assert is_float(dtype) == torch_dtype.is_floating_point
    assert is_signed(dtype) == torch_dtype.is_signed
    assert is_half(dtype) == (torch_dtype in (torch.float16, torch.bfloat16))
    if is_int(dtype):
        assert int_bounds(dtype) == (torch.iinfo(torch_dtype).min, torch.iinfo(torch_dtype).max)
    if dtype not in (DType.BOOL, DType.F16, DType.BF16):
        assert to_torch_dtype(accumulate_dtype(dtype)) == torch.ones(1, dtype=torch_dtype).sum().dtype


def test_types_that_generated_code_cannot_hold_are_none() -> None:
    assert from_torch_dtype(torch.complex64) is None
    assert from_torch_dtype(torch.float8_e4m3fn) is None  # no values to compute with: its bits are held
    assert dtype_from_torch_name("float8_e4m3fn") is DType.U8
    assert dtype_from_torch_name("float8_e5m2fnuz") is None
    assert accumulate_dtype(DType.BF16) is DType.F32
    with pytest.raises(IRError, match="f32 is not an integer type"):
        int_bounds(DType.F32)
