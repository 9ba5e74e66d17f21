"""Every scalar op's generated code against the op table's reference, on edge values, in vectors and tails."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from aotkit_inductor_lower.ir import (
    BufferKind,
    BufferRef,
    Compute,
    Const,
    DType,
    Load,
    LoopNest,
    Program,
    Range,
    Stage,
    Store,
)
from aotkit_inductor_lower.ir.nodes import Buffer
from aotkit_inductor_lower.ops.dtypes import int_bounds, is_int, to_torch_dtype
from aotkit_inductor_lower.ops.scalar import OP_TABLE, TypeRule, result_dtype
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import sym, to_expr
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.render.ops import LLVM_OPS

FLOAT_EDGES = [
    *(0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 2.5, 3.0, -3.0, 7.25, -7.25, 0.1, 87.3, -87.3, 100.0),
    *(-100.0, 1e-6, -1e-6, 1e-40, -1e-40, 3e38, -3e38, 1e10, -1e10, math.inf, -math.inf, math.nan, math.pi, 0.999),
    *(-0.999, 10.0, 16777217.0, 127.5, 255.5, 256.5, -129.0, 2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0),
    *(9.2e18, -9.3e18, 65504.0, 65519.9, 65520.0, 3.389e38, 6e-8, 2.9e-8, 1 + 2**-8, 1 + 3 * 2**-9),
]


def edges(dtype: DType) -> torch.Tensor:
    """Values worth trying of one type."""
    if dtype is DType.BOOL:
        return torch.tensor([False, True])
    if is_int(dtype):
        low, high = int_bounds(dtype)
        values = {low, low + 1, high, high - 1, *range(-9 if low else 0, 10), 31, 32, 33, 63, 64, 65, 100, -100, 8, 15}
        return torch.tensor(sorted(v for v in values if low <= v <= high), dtype=to_torch_dtype(dtype))
    return torch.tensor(FLOAT_EDGES, dtype=torch.float64).to(to_torch_dtype(dtype))


def grid(dtypes: list[DType]) -> list[torch.Tensor]:
    """Every combination of the edge values, one operand each."""
    columns = [edges(d) for d in dtypes]
    if len(columns) == 3:
        columns = [c[:: max(1, len(c) // 12)] for c in columns]
    meshes = torch.meshgrid(*[torch.arange(len(c)) for c in columns], indexing="ij")
    return [c[m.flatten()] for c, m in zip(columns, meshes, strict=True)]


def evaluate(op: str, args: list[torch.Tensor], dtypes: list[DType], result: DType) -> torch.Tensor:
    """``op`` by a generated kernel."""
    n = args[0].numel()
    names = [f"x{k}" for k in range(len(args))]
    one = (to_expr(1),)
    buffers = [
        Buffer(name, str(a.dtype)[6:], (to_expr(n),), one, BufferKind.INPUT)
        for name, a in zip(names, args, strict=True)
    ]
    out = Buffer("o", str(to_torch_dtype(result))[6:], (to_expr(n),), one, BufferKind.OUTPUT)
    at = (sym("i"),)
    body = [Load(f"v{k}", name, at, d) for k, (name, d) in enumerate(zip(names, dtypes, strict=True))]
    body += [Compute("r", op, tuple(f"v{k}" for k in range(len(args))), result), Store("o", at, "r")]  # type: ignore[list-item]
    nest = LoopNest("kernel", (Range("i", to_expr(n)),), (Stage((), tuple(body)),))
    program = Program("one", tuple(names), (*buffers, out), (nest,), (BufferRef("o"),))
    return bind_program(generate(program))(list(args))[0]


# Values where eager's own vector and scalar loops differ, or the library function is exact to a few ulp only.
ULPS = {
    "exp2": 2,
    "pow": 4,
    "erfc": 4,
    "tan": 4,
    "sinh": 4,
    "cosh": 4,
    "sigmoid": 4,
    "expm1": 4,
    "log1p": 4,
    "lgamma": 4,
}


def check(op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    if not want.dtype.is_floating_point:
        wrong = got != want
        assert not wrong.any(), f"{op}: {wrong.nonzero().flatten()[:5]}, {got[wrong][:5]} instead of {want[wrong][:5]}"
        return
    same_nan = got.isnan() == want.isnan()
    assert same_nan.all(), f"{op}: nan at {(~same_nan).nonzero().flatten()[:8].tolist()}"
    finite = want.isfinite() & got.isfinite()
    assert torch.equal(got[~finite].nan_to_num(0), want[~finite].nan_to_num(0)), op
    eps = ULPS.get(op, 2) * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got[finite].double(), want[finite].double(), rtol=eps, atol=1e-44)


def remainder(op: str, x: float, y: float) -> float:
    """fmod and mod of Python floats, with nan where C has it."""
    if math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0:
        return math.nan
    rest = math.fmod(x, y)
    return rest + y if op == "mod" and rest and (rest < 0) != (y < 0) else rest


OPS = [
    (name, dtype)
    for name, row in OP_TABLE.items()
    if row.rule not in (TypeRule.CAST, TypeRule.BITCAST)
    for dtype in sorted(row.domain, key=lambda d: d.value)
]


@pytest.mark.parametrize(("op", "dtype"), OPS, ids=lambda v: v.value if isinstance(v, DType) else v)
@pytest.mark.covers("F5g.1", "F5g.2", "F5g.3", "F5g.4")
def test_the_op_gives_the_reference_value_on_all_edges(op: str, dtype: DType) -> None:
    row = OP_TABLE[op]
    dtypes = [dtype] * row.arity if row.rule is not TypeRule.WHERE else [DType.BOOL, dtype, dtype]
    args = grid(dtypes)
    if row.traps and is_int(dtype):
        keep = args[1] != 0
        args = [a[keep] for a in args]
    result = result_dtype(op, dtypes)
    want = row.reference(*args)
    if op in ("mod", "fmod") and dtype is DType.F32:  # eager's vector loop gives nan for large quotients
        want = torch.tensor([remainder(op, x, y) for x, y in zip(args[0].tolist(), args[1].tolist(), strict=True)])
    check(op, evaluate(op, args, dtypes, result), want)


CASTS = list(itertools.product(DType, DType))


@pytest.mark.parametrize(("source", "to"), CASTS, ids=lambda d: d.value)
@pytest.mark.covers("F5g.5")
def test_a_cast_gives_the_reference_value_on_all_edges(source: DType, to: DType) -> None:
    values = edges(source)
    got = evaluate("cast", [values], [source], to)
    want = OP_TABLE["cast"].reference(values, to)
    if want.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan())
        got, want = got.nan_to_num(0), want.nan_to_num(0)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda d: d.value)
@pytest.mark.covers("F5g.5", "F5d.4")
def test_every_half_value_converts_both_ways_without_loss(dtype: DType) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    halves = bits.view(to_torch_dtype(dtype))
    wide = evaluate("cast", [halves], [dtype], DType.F32)
    assert torch.equal(wide.isnan(), halves.isnan())
    assert torch.equal(wide.nan_to_num(0), halves.float().nan_to_num(0))
    back = evaluate("cast", [wide], [DType.F32], dtype)
    keep = ~halves.isnan()
    assert torch.equal(back.view(torch.int16)[keep], bits[keep]) and bool(back[~keep].isnan().all())


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda d: d.value)
def test_rounding_to_halves_is_to_nearest_even(dtype: DType) -> None:
    torch.manual_seed(1)
    x = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    got, want = evaluate("cast", [x], [DType.F32], dtype), x.to(to_torch_dtype(dtype))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0), want.nan_to_num(0))


def test_the_table_has_a_row_for_every_op() -> None:
    assert set(LLVM_OPS) | {"cast", "bitcast"} == {name for name, row in OP_TABLE.items() if row.written}


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.7, 0.0, -0.0])
def test_pow_by_a_constant_equals_eager_with_a_tensor_of_it(exponent: float) -> None:
    x = edges(DType.F32)
    n = (to_expr(x.numel()),)
    at, one = (sym("i"),), (to_expr(1),)
    body = (
        Load("v", "x", at, DType.F32),
        Const("e", exponent, DType.F32),
        Compute("r", "pow", ("v", "e"), DType.F32),
        Store("o", at, "r"),
    )
    buffers = (
        Buffer("x", "float32", n, one, BufferKind.INPUT),
        Buffer("o", "float32", n, one, BufferKind.OUTPUT),
    )
    nest = LoopNest("kernel", (Range("i", n[0]),), (Stage((), body),))
    (got,) = bind_program(generate(Program("one", ("x",), buffers, (nest,), (BufferRef("o"),))))([x])
    want = torch.pow(x, torch.full_like(x, exponent))
    if exponent == 1.7:  # not special: eager's tail computes with the exponent in double
        torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-44, equal_nan=True)
    else:
        check("pow", got, want)


def test_multiply_and_add_are_rounded_separately() -> None:
    a = torch.tensor([1 + 2**-12] * 9)
    n = (to_expr(9),)
    at, one = (sym("i"),), (to_expr(1),)
    body = (
        Load("a", "x", at, DType.F32),
        Compute("m", "mul", ("a", "a"), DType.F32),
        Const("c", -(1 + 2**-11), DType.F32),
        Compute("r", "add", ("m", "c"), DType.F32),
        Store("o", at, "r"),
    )
    buffers = (
        Buffer("x", "float32", n, one, BufferKind.INPUT),
        Buffer("o", "float32", n, one, BufferKind.OUTPUT),
    )
    nest = LoopNest("kernel", (Range("i", n[0]),), (Stage((), body),))
    (got,) = bind_program(generate(Program("one", ("x",), buffers, (nest,), (BufferRef("o"),))))([a])
    assert torch.equal(got, a * a - (1 + 2**-11)) and bool((got == 0).all())


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=lambda d: d.value)
@pytest.mark.parametrize("op", ["sinh", "cosh"])
def test_hyperbolic_functions_are_infinite_only_where_they_overflow(op: str, dtype: DType) -> None:
    first, last = (79.5, 89.5) if dtype is DType.F32 else (699.5, 711.0)
    x = torch.linspace(first, last, 1001, dtype=to_torch_dtype(dtype))
    x = torch.cat([x, -x])
    want = torch.tensor([_hyperbolic(op, v) for v in x.tolist()], dtype=torch.float64).to(x.dtype)
    got = evaluate(op, [x], [dtype], dtype)
    assert want.isfinite().any() and want.isinf().any() and torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, rtol=6 * torch.finfo(x.dtype).eps, atol=0)


def _hyperbolic(op: str, x: float) -> float:
    try:
        return float(getattr(math, op)(x))
    except OverflowError:
        return math.copysign(math.inf, x if op == "sinh" else 1.0)
