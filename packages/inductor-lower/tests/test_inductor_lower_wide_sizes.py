"""Sizes that pass 2**63 on the way: kernels would compute other ones than Python, so such calls are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aotkit_inductor_lower.symbolic import (
    Expr,
    Symbol,
    SymbolKind,
    floordiv,
    isqrt,
    largest_fitting_size,
    mod,
    smax,
    smin,
    sym,
    too_wide,
    wide_parts,
)

N, M = sym("n", SymbolKind.SIZE), sym("m", SymbolKind.SIZE)


def power(base: Expr, exponent: int) -> Expr:
    result = base
    for _ in range(exponent - 1):
        result = result * base
    return result


def values(n: int, m: int = 1) -> dict[Symbol, int]:
    return {Symbol("n", SymbolKind.SIZE): n, Symbol("m", SymbolKind.SIZE): m}


def test_ordinary_sizes_are_not_looked_at() -> None:
    i = sym("i")
    ordinary = [N, N + M, N * 4096 + i, floordiv(N + 1, 2), mod(N, 8), smin(N, 3), i * 7, i * N + i]
    assert wide_parts(ordinary) == ()
    assert largest_fitting_size(()) == 2**63 - 1


def test_integers_of_a_call_may_be_any() -> None:
    assert wide_parts([N * 4096, M * 4096, N], {Symbol("m", SymbolKind.SIZE)}) == (M * 4096,)
    assert too_wide([M * 4096], values(1, 2**50)) == ""
    assert too_wide([M * 4096], values(1, 2**51)) == str(M * 4096)


def test_loop_variables_leave_the_strides() -> None:
    assert wide_parts([sym("i") * N * N * M, sym("j") * N * N * M]) == (N * N * M,)


@pytest.mark.parametrize(
    ("expr", "fits"),
    [
        (mod(power(N, 12), 7), 38),
        (floordiv(power(N, 12), 7), 21),  # a float is exact up to there
        (mod(floordiv(power(N, 12), 7), 5) + 1, 21),
        (smin(power(N, 12), 100), 38),
        (smax(power(N, 12), M), 38),
        (isqrt(power(N, 12)), 17),
        (power(N, 3) * power(M, 3), 2**21 - 1),
        (power(N, 12) - power(N, 11) * 3, 37),
    ],
    ids=str,
)
def test_the_largest_size_is_known(expr: Expr, fits: int) -> None:
    assert wide_parts([expr]) == (expr,)
    assert largest_fitting_size([expr]) <= fits
    assert too_wide([expr], values(fits)) == ""
    assert too_wide([expr], values(fits + 1, 2**21)) == str(expr)


def test_sizes_themselves_have_to_fit() -> None:
    assert too_wide([], values(2**63 - 1)) == ""
    assert too_wide([], values(2**63)) == "$n"


def test_what_divides_by_zero_is_the_size_of_a_loop_that_never_runs() -> None:
    assert too_wide([floordiv(power(N, 3), M), mod(power(N, 3), M)], values(10**5, 0)) == ""
    assert too_wide([floordiv(power(N, 3), N - M), mod(power(N, 3), N - M)], values(10**5, 10**5)) == ""
    assert too_wide([smin(floordiv(power(N, 3), M), N), mod(power(N, 3), floordiv(N, M))], values(10**5, 0)) == ""


def parts(expr: Expr, env: dict[Symbol, int]) -> list[int]:
    """The value of an expression and of all that it is computed from."""
    found = [expr.evaluate(env)]
    for monomial, _ in expr.terms:
        for atom in monomial:
            found += [part for arg in getattr(atom, "args", ()) for part in parts(arg, env)]
    return found


def made(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return rng.choice([N, M, rng.randint(1, 9)])
    left, right = made(rng, depth - 1), made(rng, depth - 1)
    kind = rng.choice(["add", "mul", "mul", "floordiv", "mod", "min", "max", "isqrt"])
    if kind in ("floordiv", "mod"):
        return (floordiv if kind == "floordiv" else mod)(left, right + 1)
    if kind in ("min", "max"):
        return (smin if kind == "min" else smax)(left, right)
    return left + right if kind == "add" else isqrt(left) if kind == "isqrt" else left * right


def test_what_is_said_to_fit_does() -> None:
    """Random expressions: neither the quick look nor the exact one lets a number through that 64 bits do not hold."""
    rng, refused = random.Random(5), 0
    for _ in range(400):
        expr = N + made(rng, 4)
        n, m = (rng.randint(0, 2 ** rng.randint(1, 40)) for _ in range(2))
        env = values(n, m)
        most = max(map(abs, parts(expr, env)))
        if max(n, m) <= largest_fitting_size([expr]):
            assert too_wide([expr], env) == ""
        if too_wide([expr], env) == "":
            assert most < 2**63
        else:
            refused += 1
        if not wide_parts([expr]) and max(n, m) < 2**32:
            assert too_wide([expr], env) == ""
    assert 20 < refused < 380
