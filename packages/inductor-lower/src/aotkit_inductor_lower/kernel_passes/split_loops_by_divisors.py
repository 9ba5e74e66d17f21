"""A loop over ``n`` whose variable occurs as ``i // d`` and ``i % d`` becomes two loops, ``n/d`` by ``d``, so that
reshaped views become plain strides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..ir import CONTRACTIONS, Compute, DType, Reduce
from ..ir.walk import instructions, loads
from ..kernel_ir.nodes import Kernel, Loop, Stmt
from ..kernel_ir.panels import panels_at
from ..kernel_ir.walk import all_loops, expressions, map_expressions
from ..symbolic import Call, Expr, Symbol, SymbolKind, has_calls, sym, to_expr
from .each_kernel import kernel_pass
from .simplify_bounds import simplify_bounds

__all__ = ["PASS", "split_loops_by_divisors"]

_MOST = 16  # splits of one kernel


def split_loops_by_divisors(kernel: Kernel) -> Kernel:
    """Split loops at the constants their variables are divided by, as long as that removes divisions."""
    for _ in range(_MOST):
        candidate = next(_candidates(kernel), None)
        if candidate is None:
            return kernel
        kernel = candidate
    return kernel


def _candidates(kernel: Kernel) -> Iterator[Kernel]:
    calls = _calls(kernel)
    if not calls:
        return
    loops = {loop.symbol: loop for loop in all_loops(kernel)}
    body = instructions(kernel.body)
    multiplies = any(isinstance(instr, Compute) and instr.op in CONTRACTIONS.values() for instr in body)
    multiplies |= any(isinstance(instr, Reduce) and instr.dtype is DType.I32 for instr in body)  # products of bytes
    offsets = [load.indices[0] for load in loads(body) if has_calls(load.indices[0])] if multiplies else []
    if any(panels_at(offset, list(loops.values())) for offset in offsets):
        return  # a product that reads its matrix in panels, a loop for the columns and one for the sum
    for call in calls:
        divisor = call.args[1].constant if call.fn in ("floordiv", "mod") else None
        if not divisor:
            continue
        for symbol in call.args[0].symbols:
            loop = loops.get(symbol.name)
            size = loop.extent.constant if loop and symbol.kind is SymbolKind.INDEX else None
            factor = call.args[0].coefficient(symbol)
            step = factor.constant if factor is not None else None
            if not size or not step:
                continue
            inner = abs(divisor) // math.gcd(step, divisor)
            if 1 < inner < size and size % inner == 0:
                split = simplify_bounds(_split(kernel, symbol, size, inner))
                if len(_calls(split)) < len(calls):
                    yield split


def _split(kernel: Kernel, symbol: Symbol, size: int, inner: int) -> Kernel:
    high = f"{symbol.name}h{inner}"
    count, rest = to_expr(size // inner), to_expr(inner)

    def widen(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(split(stmt) if isinstance(stmt, Loop) else stmt for stmt in body)

    def split(loop: Loop) -> Loop:
        body = widen(loop.body)
        if loop.symbol != symbol.name:
            return replace(loop, body=body)
        return replace(loop, symbol=high, extent=count, body=(replace(loop, extent=rest, body=body),))

    grid = tuple(
        new
        for loop in kernel.grid
        for new in ((Loop(high, count), Loop(symbol.name, rest)) if loop.symbol == symbol.name else (loop,))
    )
    kernel = replace(kernel, grid=grid, body=widen(kernel.body))
    return map_expressions(kernel, lambda e: e.substitute({symbol: sym(high) * inner + sym(symbol.name)}))


def _calls(kernel: Kernel) -> list[Call]:
    found: dict[Call, None] = {}

    def visit(expr: Expr) -> None:
        for monomial, _ in expr.terms:
            for atom in monomial:
                if isinstance(atom, Call):
                    found[atom] = None
                    for arg in atom.args:
                        visit(arg)

    for expr in expressions(kernel):
        visit(expr)
    return list(found)


PASS = kernel_pass(
    "split-loops-by-divisors",
    split_loops_by_divisors,
    why="reshaped views become plain strides",
    after=("simplify-bounds",),
)
