"""Symbols of a package's sizes that no argument shows by itself.

Note [Multiples]
    ``dynamic_shapes={0: 8 * Dim("b")}`` gives sizes ``8*b`` alone, and kernels read symbols from sizes as they are. So
    the program is compiled for arguments with a new symbol ``t`` for the size itself, of which is noted that it is a
    multiple of 8, and ``t//8`` for ``b``, also in what the export has relied on. Calls with other sizes break a guard.
    ``2*b + 1`` is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Multiple", "in_sizes", "shown_sizes", "with_sizes"]


@dataclass(frozen=True, slots=True)
class Multiple:
    """A symbol of the program that sizes ``factor * symbol + offset`` stand for, and the symbol of such a size."""

    symbol: Any
    factor: int
    offset: int
    size: Any

    def size_for(self, number: int) -> int:
        """The size for a number of the program's symbol."""
        return self.factor * number + self.offset

    def in_sizes(self, expr: Any) -> Any:
        """``expr`` over the symbol of the size."""
        import sympy
        from torch.utils._sympy.functions import FloorDiv

        exact = sympy.expand(expr.xreplace({self.symbol: (self.size - self.offset) / self.factor}))
        if all(number.is_Integer for number in exact.atoms(sympy.Number)):
            return exact
        return expr.xreplace({self.symbol: FloorDiv(self.size - self.offset, self.factor)})


def shown_sizes(fakes: Iterable[Any]) -> list[Multiple]:
    """See Note [Multiples]: the symbols without a size of their own, with the new symbols of sizes that show them."""
    given: list[Any] = [size for fake in fakes if isinstance(fake, torch.Tensor) for size in fake.shape]
    sizes = [size for size in given if isinstance(size, torch.SymInt)]
    alone = {size.node.expr for size in sizes if size.node.expr.is_Symbol}
    found: dict[Any, Multiple] = {}
    for size in sizes:
        expr = size.node.expr
        symbols = expr.free_symbols
        if len(symbols) == 1 and not symbols & (alone | found.keys()):
            (symbol,) = symbols
            factor, offset = expr.coeff(symbol, 1), expr.coeff(symbol, 0)
            if expr == factor * symbol + offset and factor.is_Integer and factor > 0 and offset.is_Integer:
                found[symbol] = _noted(size, symbol, int(factor), int(offset))
    return [*found.values()]


def _noted(shown: torch.SymInt, symbol: Any, factor: int, offset: int) -> Multiple:
    """A new symbol for the size ``shown``, in its shape environment."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.value_ranges import ValueRanges

    env = shown.node.shape_env
    source = ConstantSource(f"size_of_{symbol}")
    size = env.create_symbol(
        shown.node.hint, source, DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
    )
    made = Multiple(symbol, factor, offset, size)
    known = env.var_to_range[symbol]
    env.var_to_range[size] = ValueRanges(factor * known.lower + offset, factor * known.upper + offset)
    whole = env.create_symintnode(size, hint=shown.node.hint, source=source)
    assert (whole - offset) % factor == 0  # which the environment notes
    return made


def in_sizes(expr: Any, multiples: Sequence[Multiple]) -> Any:
    """``expr`` over the symbols of the sizes."""
    for multiple in multiples:
        expr = multiple.in_sizes(expr)
    return expr


def with_sizes(fake: Any, multiples: Sequence[Multiple]) -> Any:
    """A fake argument with the new symbols."""
    told = {multiple.symbol for multiple in multiples}

    def size_of(size: Any) -> Any:
        if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols & told:
            return size
        return size.node.shape_env.create_symintnode(in_sizes(size.node.expr, multiples), hint=size.node.hint)

    if isinstance(fake, torch.SymInt):
        return size_of(fake)
    if not isinstance(fake, FakeTensor):
        return fake
    shape, strides = [*map(size_of, fake.shape)], [*map(size_of, fake.stride())]
    if all(new is old for new, old in zip((*shape, *strides), (*fake.shape, *fake.stride()), strict=True)):
        return fake
    with fake.fake_mode:
        return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
