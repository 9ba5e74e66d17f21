"""Index expressions on whole grids of iterations at once, as int64 tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..symbolic import Call, Expr, Symbol

__all__ = ["evaluate_on_grid", "index_grid"]


def evaluate_on_grid(expr: Expr, env: Mapping[Symbol, Tensor | int]) -> Tensor:
    """The value of ``expr`` at every point: symbols are ints or int64 tensors of shapes that broadcast.

    Raises ``KeyError`` for a symbol without a value and ``ZeroDivisionError`` for a zero divisor.
    """
    total = torch.zeros((), dtype=torch.int64)
    for monomial, factor in expr.terms:
        product = torch.tensor(factor, dtype=torch.int64)
        for atom in monomial:
            value = _evaluate_call(atom, env) if isinstance(atom, Call) else torch.as_tensor(env[atom])
            product = product * value
        total = total + product
    return total


def _evaluate_call(call: Call, env: Mapping[Symbol, Tensor | int]) -> Tensor:
    values = [evaluate_on_grid(arg, env) for arg in call.args]
    if call.fn in ("floordiv", "mod"):
        if bool((values[1] == 0).any()):
            raise ZeroDivisionError(f"index expression {call} divides by zero")
        return values[0] // values[1] if call.fn == "floordiv" else values[0] % values[1]
    if call.fn == "isqrt":
        return values[0].to(torch.float64).sqrt().to(torch.int64)
    result = values[0]
    for value in values[1:]:
        result = torch.minimum(result, value) if call.fn == "min" else torch.maximum(result, value)
    return result


def index_grid(
    symbols: Sequence[Symbol], sizes: Sequence[int], *, before: int = 0, after: int = 0
) -> dict[Symbol, Tensor]:
    """One int64 tensor per loop variable, varying along its own axis. The grid has ``before`` axes of size 1 in front
    and ``after`` behind."""
    rank = before + len(sizes) + after
    result = {}
    for position, (symbol, size) in enumerate(zip(symbols, sizes, strict=True)):
        shape = [1] * rank
        shape[before + position] = size
        result[symbol] = torch.arange(size, dtype=torch.int64).reshape(shape)
    return result
