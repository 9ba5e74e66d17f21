"""Index expressions against plain integer arithmetic, and what the range analysis proves against enumeration."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotkit_inductor_lower.symbolic import (
    Bounds,
    Call,
    Expr,
    Ranges,
    Symbol,
    SymbolKind,
    UnsupportedExpression,
    bounds,
    contiguous_strides,
    floordiv,
    from_symint,
    isqrt,
    mod,
    product,
    prove_le,
    prove_lt,
    prove_nonnegative,
    reshape_indices,
    simplify,
    smax,
    smin,
    strides_of,
    sym,
    to_expr,
)
from aotkit_inductor_lower.symbolic import ranges as _ranges

I0, I1, I2 = sym("i0"), sym("i1"), sym("i2")
S0, S1 = sym("s0", SymbolKind.SIZE), sym("s1", SymbolKind.SIZE)
SYMBOLS = [Symbol("i0"), Symbol("i1"), Symbol("i2"), Symbol("s0", SymbolKind.SIZE), Symbol("s1", SymbolKind.SIZE)]

Evaluate = Callable[[dict[Symbol, int]], int]
Pair = tuple[Expr, Evaluate]


def _leaf() -> st.SearchStrategy[Pair]:
    constants = st.integers(-9, 9).map(lambda c: (to_expr(c), lambda env: c))
    symbols = st.sampled_from(SYMBOLS).map(lambda s: (to_expr(s), lambda env: env[s]))
    return constants | symbols


def _combine(children: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    def binary(fn: Callable[[Expr, Expr], Expr], on_ints: Callable[[int, int], int]) -> st.SearchStrategy[Pair]:
        return st.tuples(children, children).map(
            lambda ab: (fn(ab[0][0], ab[1][0]), lambda env: on_ints(ab[0][1](env), ab[1][1](env)))
        )

    def by_divisor(fn: Callable[[Expr, Expr], Expr], on_ints: Callable[[int, int], int]) -> st.SearchStrategy[Pair]:
        positive = st.integers(1, 12).map(lambda c: (to_expr(c), lambda env: c))
        negative = st.integers(-5, -1).map(lambda c: (to_expr(c), lambda env: c))
        sizes = st.sampled_from([S0, S1, S0 * S1, 2 * S0, S0 + 1]).map(lambda e: (e, e.evaluate))
        return st.tuples(children, positive | negative | sizes).map(
            lambda ab: (fn(ab[0][0], ab[1][0]), lambda env: on_ints(ab[0][1](env), ab[1][1](env)))
        )

    return (
        binary(operator.add, operator.add)
        | binary(operator.sub, operator.sub)
        | binary(operator.mul, operator.mul)
        | binary(smin, min)
        | binary(smax, max)
        | children.map(lambda a: (isqrt(a[0] * a[0] + 2), lambda env: math.isqrt(a[1](env) ** 2 + 2)))
        | by_divisor(floordiv, operator.floordiv)
        | by_divisor(mod, operator.mod)
    )


EXPRESSIONS = st.recursive(_leaf(), _combine, max_leaves=8)
ENVIRONMENTS = st.fixed_dictionaries(
    {s: st.integers(1, 7) if s.kind is SymbolKind.SIZE else st.integers(-6, 20) for s in SYMBOLS}
)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS, ENVIRONMENTS)
def test_canonical_form_keeps_the_value(pair: Pair, env: dict[Symbol, int]) -> None:
    expr, evaluate = pair
    assert expr.evaluate(env) == evaluate(env)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, ENVIRONMENTS)
def test_substitution_commutes_with_evaluation(pair: Pair, other: Pair, env: dict[Symbol, int]) -> None:
    replaced = pair[0].substitute({SYMBOLS[0]: other[0], SYMBOLS[1]: to_expr(SYMBOLS[0])})
    inner = {**env, SYMBOLS[0]: other[0].evaluate(env), SYMBOLS[1]: env[SYMBOLS[0]]}
    assert replaced.evaluate(env) == pair[0].evaluate(inner)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.tuples(*[st.integers(1, 5)] * 2), st.integers(1, 4), st.integers(1, 4))
def test_bounds_and_simplify_hold_at_every_point_of_the_ranges(
    pair: Pair, sizes: tuple[int, int], s0: int, s1: int
) -> None:
    ranges = Ranges.of({"i0": sizes[0], "i1": S0, "i2": S0 * S1}, size_minimum=1)
    low_high = bounds(pair[0], ranges)
    simple = simplify(pair[0], ranges)
    nonnegative = prove_nonnegative(pair[0], ranges)
    for i0, i1, i2 in itertools.product(range(sizes[0]), range(s0), range(s0 * s1)):
        env = dict(zip(SYMBOLS, (i0, i1, i2, s0, s1), strict=True))
        value = pair[1](env)
        assert simple.evaluate(env) == value
        assert low_high.low is None or low_high.low <= value
        assert low_high.high is None or value <= low_high.high
        assert value >= 0 or not nonnegative


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
def test_equal_text_means_equal_expression(a: Pair, b: Pair) -> None:
    assert (str(a[0]) == str(b[0])) == (a[0] == b[0])
    if a[0] == b[0]:
        assert hash(a[0]) == hash(b[0])


def test_ring_laws_give_the_same_object_value_whatever_the_order() -> None:
    assert (I0 + I1) * (I0 - I1) == I0 * I0 - I1 * I1
    assert reduce(operator.add, [I2, I0, I1]) == I0 + I1 + I2
    assert hash(I0 * 2 - I0 * 2) == hash(to_expr(0)) == hash(0)
    assert to_expr(5) == 5
    assert to_expr(3) + -1 * I0 == 3 - I0


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (I0 * 64 + I1 + 3, "64*i0 + i1 + 3"),
        (I0 // 4, "i0 // 4"),
        (I0 % 4 + 3 * (I0 // 8), "(i0 % 4) + 3*(i0 // 8)"),
        ((I0 + 3) // S0, "(i0 + 3) // $s0"),
        (((I0 + 1) // 4) % 3, "((i0 + 1) // 4) % 3"),
        (sym("v3", SymbolKind.VALUE) * S0 - 1, "$s0*%v3 - 1"),
        (smin(I0, 7), "min(i0, 7)"),
        (-I0 + S0 - 1, "$s0 - i0 - 1"),
        (to_expr(0), "0"),
    ],
)
def test_an_expression_prints_without_superfluous_parentheses(expr: Expr, text: str) -> None:
    assert str(expr) == text


def test_division_and_remainder_of_the_same_things_join_again() -> None:
    assert 4 * (I0 // 4) + I0 % 4 == I0
    assert S0 * (I0 // S0) + I0 % S0 == I0
    assert 12 * (I0 // 12) + 4 * ((I0 // 4) % 3) + I0 % 4 == I0
    assert (I0 // 4) // 3 == I0 // 12
    assert (I0 % 12) % 4 == I0 % 4
    assert (S0 * I0) // (S0 * S1) == I0 // S1
    assert (6 * I0 + 4) % 8 == 2 * ((3 * I0 + 2) % 4)


def test_a_quotient_by_the_size_of_an_empty_loop_is_any_place() -> None:
    assert I0 // 0 == to_expr(0) == I0 % 0


def test_a_sum_divides_what_it_is_a_factor_of() -> None:
    for a, b in itertools.permutations([S0 + 1, S1 + 2, S0 - S1, S0 * S1 + S0 + 3, to_expr(4), S1], 2):
        assert (a * b) // b == a and (a * b) % b == 0
        assert (a * b * b) // (a * b) == b
    assert ((S0 + 1) * I0) // (S0 + 1) == I0
    for whole, part in ((S0 + 2, S0 + 1), (3 * S0 + 3, 2 * S0 + 2), (S0 * S1 + S0, S1 + 2), (S0 * S0 + 1, S0 + 1)):
        assert str(whole // part) == f"({whole}) // ({part})"


def test_an_expression_has_no_truth_value_and_takes_no_floats() -> None:
    with pytest.raises(TypeError, match="no truth value"):
        bool(I0)
    with pytest.raises(TypeError, match="not float"):
        to_expr(1.5)  # type: ignore[arg-type]


@pytest.mark.covers("F5c.9")
def test_divisions_by_symbolic_sizes_vanish_where_the_ranges_allow() -> None:
    ranges = Ranges.of({"i0": S0, "i1": S0, "i2": 64})
    assert simplify(I0 // S0, ranges) == 0
    assert simplify((I0 * S0 + I1) % S0, ranges) == I1
    assert simplify((I0 * S0 + I1) // S0, ranges) == I0
    assert simplify((64 * I0 + I2) // 128, ranges) == I0 // 2
    assert simplify((64 * I0 + I2) % 128, ranges) == 64 * (I0 % 2) + I2
    assert simplify((S0 - 1 - I0) % S0, ranges) == S0 - 1 - I0
    assert simplify(smin(I0, S0), ranges) == I0
    assert simplify(smax(I0 - S0, 0), ranges) == 0
    assert simplify(I0 // S1, ranges) == I0 // S1


def test_divisions_by_sums_of_sizes_vanish_where_the_ranges_allow() -> None:
    ranges, long = Ranges.of({"i0": S0, "i1": S1 + 1, "i2": S0 + S1}), S1 + 1
    assert simplify((I0 * long + I1) // long, ranges) == I0
    assert simplify((I0 * long + I1) % long, ranges) == I1
    assert simplify((I0 * (S0 + S1) * long + I2 * long + I1) // ((S0 + S1) * long), ranges) == I0
    assert simplify((I0 * (S0 + S1) * long + I2 * long + I1) // long % (S0 + S1), ranges) == I2
    assert simplify((I0 * long + I2) // long, ranges) == (I0 * long + I2) // long


@pytest.mark.covers("F5c.9")
def test_an_index_is_proven_inside_a_symbolic_size() -> None:
    ranges = Ranges.of({"i0": S0, "i1": S1})
    assert prove_lt(I0 * S1 + I1, S0 * S1, ranges)
    assert not prove_lt(I0 * S1 + I1, S0 * S1 - 1, ranges)
    assert prove_le(I0 + 1, S0, ranges)
    assert prove_nonnegative(S0 * S1 - S0, ranges), "both sizes are at least 1 inside their loops"
    assert not prove_nonnegative(S0 * S1 - S0, Ranges())
    assert prove_nonnegative(S0 - 2, Ranges(size_minimum=2))


def test_given_bounds_of_a_symbol_are_used() -> None:
    ranges = Ranges.of(
        {}, bounds={Symbol("s0", SymbolKind.SIZE): Bounds(2, 64), Symbol("v", SymbolKind.VALUE): Bounds(0, 9)}
    )
    assert bounds(3 * S0 + 1, ranges) == Bounds(7, 193)
    assert bounds(sym("v", SymbolKind.VALUE) % 4, ranges) == Bounds(0, 3)
    assert bounds(I0, ranges) == Bounds(None, None)


def test_of_two_numbers_with_a_known_sum_one_is_half_as_large() -> None:
    ranges = Ranges.of({"i0": 60})
    mirrored = smax(I0 - 2, 2 - I0)
    assert bounds(mirrored, ranges) == Bounds(0, 57)
    assert bounds(smin(mirrored, 110 - mirrored), ranges) == Bounds(0, 55)
    assert bounds(smax(I0, 7 - I0), ranges).low == 4
    assert bounds(smin(I0, 7 - I0), ranges).high == 3


def test_strides_are_read_off_linear_expressions_only() -> None:
    found = strides_of(I0 * S0 + 3 * I1 + S1 + 2, [Symbol("i0"), Symbol("i1")])
    assert found == ((S0, to_expr(3)), S1 + 2)
    assert strides_of(I0 * I1, [Symbol("i0"), Symbol("i1")]) is None
    assert strides_of(I0 // 2, [Symbol("i0")]) is None
    assert strides_of(I0 * I0, [Symbol("i0")]) is None


def _shapes(total: int) -> list[tuple[int, ...]]:
    return [
        shape
        for rank in range(4)
        for shape in itertools.product([d for d in range(1, total + 1) if total % d == 0], repeat=rank)
        if product(shape) == total
    ]


@pytest.mark.parametrize("total", [1, 6, 12])
def test_reshaped_indices_address_the_same_element(total: int) -> None:
    shapes = _shapes(total)
    for source, target in itertools.product(shapes, shapes):
        names = [Symbol(f"i{n}") for n in range(len(source))]
        indices = reshape_indices([to_expr(n) for n in names], source, target)
        assert len(indices) == len(target)
        for position, point in enumerate(itertools.product(*map(range, source))):
            env = dict(zip(names, point, strict=True))
            linear = sum(
                i.evaluate(env) * (s.constant or 0) for i, s in zip(indices, contiguous_strides(target), strict=True)
            )
            assert linear == position, (source, target, [str(i) for i in indices])


def test_reshape_divides_only_where_dimensions_split() -> None:
    assert reshape_indices([I0, I1, I2], [S0, S1, 64], [S0, S1, 4, 16]) == (I0, I1, I2 // 16, I2 % 16)
    assert reshape_indices([I0, I1], [S0 * S1, 64], [S0, S1, 64]) == (I0 // S1, I0 % S1, I1)
    assert reshape_indices([I0, I1, I2], [S0, S1, 4], [S0 * S1 * 4]) == (4 * S1 * I0 + 4 * I1 + I2,)
    assert reshape_indices([I0 + 5, I1], [S0, 8], [S0, 1, 8]) == (I0 + 5, to_expr(0), I1)
    assert reshape_indices([I0, I1], [0, 8], [8, 0]) == (to_expr(0), to_expr(0))
    with pytest.raises(ValueError, match="1 indices for 2 dimensions"):
        reshape_indices([I0], [2, 3], [6])


def test_sympy_expressions_of_a_shape_environment_convert() -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Max, Min, ModularIndexing, PythonMod

    a, b = sympy.Symbol("s77", integer=True, positive=True), sympy.Symbol("s27", integer=True, positive=True)
    names = {"s77": "s0", "s27": "s1"}
    assert from_symint(a * b + 3 * a - 2, names) == S0 * S1 + 3 * S0 - 2
    assert from_symint(a**2, names) == S0 * S0
    assert from_symint(FloorDiv(a, 2) + PythonMod(a, b), names) == S0 // 2 + S0 % S1
    assert from_symint(ModularIndexing(a, 4, b), names) == (S0 // 4) % S1
    assert from_symint(Min(a, b), names) == smin(S0, S1)
    assert from_symint(Max(a, 4), names) == smax(S0, 4)
    assert from_symint(sympy.floor(a / 2), names) == S0 // 2
    assert from_symint(sympy.ceiling(a / 2), names) == -((-S0) // 2)
    assert from_symint(7) == 7
    with pytest.raises(UnsupportedExpression, match="no integer index form"):
        from_symint(sympy.log(a), names)
    with pytest.raises(UnsupportedExpression, match="natural number"):
        from_symint(1 / a, names)


def test_floats_between_sizes_convert_where_they_are_exact() -> None:
    import sympy
    from torch.utils._sympy.functions import (
        CeilToInt,
        FloatPow,
        FloatTrueDiv,
        FloorToInt,
        IntTrueDiv,
        OpaqueUnaryFn_sqrt,  # type: ignore[attr-defined]
        ToFloat,
        TruncToInt,
    )

    a, b = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("s1", integer=True, positive=True)
    assert from_symint(TruncToInt(0.75 * ToFloat(a))) == (S0 * 3) // 4
    assert from_symint(TruncToInt(0.5 * ToFloat(a) + 1.5)) == (S0 + 3) // 2
    assert from_symint(FloorToInt(IntTrueDiv(a - b, 3))) == (S0 - S1) // 3
    assert from_symint(CeilToInt(IntTrueDiv(a, b))) == -((-S0) // S1)
    assert from_symint(CeilToInt(FloatTrueDiv(ToFloat(a), sympy.Float(2.5)))) == -((S0 * -2) // 5)
    towards_zero = smax(S0 - S1, to_expr(0)) // 2 - smax(S1 - S0, to_expr(0)) // 2
    assert from_symint(TruncToInt(0.5 * ToFloat(a - b))) == towards_zero
    assert from_symint(sympy.Abs(a - b)) == smax(S0 - S1, S1 - S0)
    assert from_symint(TruncToInt(FloatPow(ToFloat(a * b), sympy.Float(0.5))) + 1) == isqrt(S0 * S1) + 1
    assert from_symint(FloorToInt(OpaqueUnaryFn_sqrt(ToFloat(a)))) == isqrt(S0)
    rounded = (
        TruncToInt(0.7 * ToFloat(a)),  # 0.7 * 10 is 7.0 in floats, and less than 7 in truth
        TruncToInt(0.5 * ToFloat(a) * ToFloat(b)),  # the product of two sizes may need more bits than a float has
        FloorToInt(0.5 * IntTrueDiv(a, 3)),  # rounded before
        TruncToInt(FloatPow(ToFloat(a), sympy.Float(0.25))),  # a root of 16 need not be exactly 2.0
    )
    for expression in rounded:
        with pytest.raises(UnsupportedExpression, match="may be rounded before"):
            from_symint(expression)


def test_divisions_by_numbers_of_either_sign_round_down_as_in_python() -> None:
    import sympy
    from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, PythonMod, TruncToInt

    a, n = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("n", integer=True)
    above, below = sym("n_above", SymbolKind.SIZE), sym("n_below", SymbolKind.SIZE)
    names = {"s0": "s0", "n": above - below}
    expressions: list[tuple[sympy.Expr, Callable[[int, int], int]]] = [
        (FloorDiv(a - 9, n), lambda s, d: (s - 9) // d),
        (FloorDiv(FloorDiv(a, n), 3), lambda s, d: s // d // 3),
        (FloorDiv(a, -3), lambda s, d: s // -3),
        (PythonMod(a - 9, n), lambda s, d: (s - 9) % d),
        (CeilToInt(IntTrueDiv(a, n)), lambda s, d: -(-s // d)),
        (TruncToInt(IntTrueDiv(a, n)), lambda s, d: int(s / d)),
    ]
    for expression, want in expressions:
        converted = from_symint(expression, lambda name: names[name])
        divisors = [a.args[1] for m, _ in converted.terms for a in m if isinstance(a, Call) and a.fn == "floordiv"]
        assert divisors and all((bounds(d, Ranges()).low or 0) >= 0 for d in divisors)
        for s, d in itertools.product(range(20), (-7, -3, -2, -1, 1, 2, 5)):
            env = {S0.symbol: s, above.symbol: max(d, 0), below.symbol: max(-d, 0)}
            assert converted.evaluate(env) == want(s, d), (expression, s, d)


def test_a_symint_of_a_traced_graph_converts() -> None:
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.ones(6, 4), symbolic_context=context, source=ConstantSource("x"))
    size = fake.view(-1).shape[0]
    name = str(fake.shape[0])
    assert from_symint(size, {name: "s0"}) == 4 * S0
    assert from_symint(fake.shape[1]) == 4


def test_the_prover_gives_up_soon_on_quotients_of_quotients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a padded image of unknown size, and windows of these: each quotient branches, and they nest."""
    asked: list[Expr] = []
    prove = _ranges._prove
    monkeypatch.setattr(_ranges, "_prove", lambda expr, *rest: asked.append(expr) or prove(expr, *rest))
    height, width = S0 // 4, S1 // 4
    for _ in range(2):
        height, width = height + (-height % 4), width + (-width % 4)
        parts = (height // 4) * (width // 4)
        height, width = S0 * parts // (S0 * (parts // (height // 4) // (width // 4))), parts // (height // 4) * 4
    assert not prove_lt(I1 // (height // 4), width - 3 + I0 // width, Ranges.of({"i0": height * S0, "i1": width}))
    assert 100 < len(asked) < 2000
