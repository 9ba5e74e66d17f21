"""Loads of windows that lie side by side: a row of memory at once, and its columns are parted in registers.

Note [Windows side by side]
    A pool of two by two columns reads ``x[2*i + r]``. As a tile of places ``i`` by places ``r`` of a window neighbours
    lie along two axes of the tile, and Triton gives a thread neighbours along one: it loads two numbers at once, or
    one. But ``2*i + r`` are the numbers of a row, one after the other. So the row is loaded, with one axis of the tile
    in the place of two, as wide as a thread loads at all, and the values are seen as ``[i, r]`` afterwards, which moves
    nothing in memory or between threads. Other loops of the window keep an axis behind the row's until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Protocol

from ....ir import DType, Load
from ....kernel_ir.nodes import Loop
from ....ops.dtypes import bits
from ....symbolic import Expr, Symbol, SymbolKind, sym
from ..sectors import WIDEST
from .indices import identifier
from .lines import Scope, Value

__all__ = ["Writer", "load_of_columns"]


class Writer(Protocol):
    """What is asked of who writes the body of a kernel; see :class:`~.body.BodyEmitter`."""

    scope: Scope
    tile: list[Loop]
    axes: list[str]
    row_axis: int | None
    masks: dict[int, str]
    symbols: dict[Symbol, Value]
    tile_starts: dict[Symbol, str]
    wide: bool

    def expr(self, expr: Expr) -> str: ...

    def along(self, position: int) -> str: ...

    def shape(self, dims: frozenset[int]) -> str: ...

    def dims_of(self, expr: Expr) -> frozenset[int]: ...

    def index_value(self, expr: Expr) -> str: ...

    def mask(self, dims: frozenset[int]) -> str: ...

    def address(self, buffer: str, index: Expr, dtype: DType) -> tuple[str, Expr]: ...

    def reads_only(self, buffer: str) -> bool: ...

    def other_symbols(self) -> AbstractContextManager[None]: ...


def load_of_columns(kernel: Writer, load: Load, loops: Sequence[Loop], extra: str) -> str | None:
    """The text of a load in a nest of ``loops`` that the tile holds whole, see Note [Windows side by side]; ``None``
    where windows don't lie side by side. ``extra``: its arguments but the mask."""
    extents = [loop.extent.constant or 0 for loop in loops]
    axis, row = _axis_of_windows(kernel, load, loops[-1], extents), kernel.row_axis
    if axis is None or row is None:
        return None
    tiled, columns = kernel.tile[axis], extents[-1]
    start = kernel.tile_starts[Symbol(tiled.symbol)]
    others = prod(extents[:-1])
    with kernel.other_symbols():
        _name_others(kernel, loops[:-1], extents[:-1], others)
        rest = load.indices[0] - sym(tiled.symbol) * columns - sym(loops[-1].symbol)
        dims = kernel.dims_of(rest) | {axis}
        lanes = f"tl.arange(0, {tiled.map.block} * {columns}){kernel.along(axis)}"
        name = f"columns_{identifier(tiled.symbol)}_by_{columns}"
        along = kernel.scope.define(name, f"({start}) * {columns} + {lanes}", frozenset({axis}), index=True)
        pointer, rest = kernel.address(load.buffer, rest, load.dtype)
        address = f"{pointer} + ({kernel.index_value(rest)} + {along.text})"
    masks = [kernel.mask(dims - {axis, row})]
    if axis in kernel.masks:
        masks.append(f"({along.text} < {kernel.expr(tiled.extent * columns)})")
    mask = " & ".join(filter(None, masks))
    text = f"tl.load({address}{f', mask={mask}' if mask else ''}{extra})"
    return _parted(kernel, text, dims | {row}, axis, columns, others)


def _axis_of_windows(kernel: Writer, load: Load, column: Loop, extents: Sequence[int]) -> int | None:
    """The axis of the tile along which windows lie side by side."""
    index, row, block = load.indices[0], kernel.row_axis, prod(extents)
    columns = extents[-1]
    if row is None or row in kernel.masks or load.mask or columns < 2 or block != int(kernel.scope.row_block):
        return None
    if columns * bits(load.dtype) >= WIDEST * 8:  # a thread has enough in a window
        return None
    if not kernel.reads_only(load.buffer) or index.coefficient(Symbol(column.symbol)) != 1:
        return None
    if any(symbol.kind is SymbolKind.VALUE for symbol in index.symbols):
        return None
    for axis, loop in enumerate(kernel.tile):
        symbol = Symbol(loop.symbol)
        if index.coefficient(symbol) == columns and symbol in kernel.tile_starts:
            rest = index - sym(loop.symbol) * columns - sym(column.symbol)
            return None if axis in kernel.dims_of(rest) or Symbol(column.symbol) in rest.symbols else axis
    return None


def _name_others(kernel: Writer, loops: Sequence[Loop], extents: Sequence[int], count: int) -> None:
    """The other loops of the window, along an axis of their own."""
    assert kernel.row_axis is not None
    axis = frozenset({kernel.row_axis})
    wide = ".to(tl.int64)" if kernel.wide else ""
    rest = f"(tl.arange(0, {count}){wide}){kernel.along(kernel.row_axis)}"
    for loop, extent in reversed([*zip(loops, extents, strict=True)]):
        name = f"line_{identifier(loop.symbol)}"
        if loop is loops[0]:
            kernel.symbols[Symbol(loop.symbol)] = kernel.scope.define(name, rest, axis, index=True)
        else:
            kernel.symbols[Symbol(loop.symbol)] = kernel.scope.define(name, f"({rest}) % {extent}", axis, index=True)
            rest = f"({rest}) // {extent}"


def _parted(kernel: Writer, text: str, dims: frozenset[int], axis: int, columns: int, others: int) -> str:
    """A tile of rows, seen as windows."""
    blocks = [block if k in dims else "1" for k, block in enumerate(kernel.axes)]
    parted = [*blocks[: axis + 1], str(columns), *blocks[axis + 1 :], str(others)]
    text = f"tl.reshape({text}, [{', '.join(parted)}])"
    order = [k for k in range(len(parted)) if k != axis + 1] + [axis + 1]
    if order != [*range(len(parted))]:
        text = f"tl.permute({text}, {order})"
    return f"tl.reshape({text}, {kernel.shape(dims)})"
