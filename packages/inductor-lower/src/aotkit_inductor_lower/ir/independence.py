"""Whether the iterations of a nest are independent: it never reads what another iteration writes.

Note [Independent iterations]
    For each buffer that a nest both loads and stores, the load's indices must be the store's (up to the names of
    the stages' own loop variables) in enough dimensions to tell the iterations apart. A dimension tells ``i`` apart
    if its index is ``c*i + rest`` with the rest proven in ``[0, c)``, or in steps of at least ``c`` times the size of
    ``i``. A load in the store's own stage must have exactly its indices, since inner iterations are independent too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..symbolic import Expr, Ranges, Symbol, SymbolKind, prove_lt, prove_nonnegative, to_expr
from .instructions import CheckedIndex, Instr
from .nodes import Buffer, BufferKind, Load, LoopNest, Range, Store
from .walk import placed

__all__ = ["check_outer_independence", "checked_sizes", "tells_apart"]


def check_outer_independence(nest: LoopNest, buffers: Mapping[str, Buffer], size_minimum: int = 0) -> str | None:
    """Why iterations of ``nest`` may depend on each other, as a sentence, or ``None`` if they do not."""
    body = placed(nest.stages)
    loads = [(number, i) for number, _, i in body if isinstance(i, Load)]
    stores = [(number, i) for number, _, i in body if isinstance(i, Store)]
    for store_stage, store in stores:
        if buffers[store.buffer].kind is BufferKind.SCRATCH:
            continue
        for load_stage, load in loads:
            if load.buffer != store.buffer:
                continue
            if not _same_iteration(nest, load_stage, load.indices, store_stage, store.indices, size_minimum):
                return (
                    f"it stores {store.buffer}[{_text(store.indices)}] and loads {load.buffer}[{_text(load.indices)}], "
                    "which another iteration may have stored"
                )
    return None


def tells_apart(
    indices: Iterable[Expr],
    ranges: Sequence[Range],
    others: Sequence[Range],
    size_minimum: int = 0,
    checked: Mapping[Symbol, Expr] = MappingProxyType({}),
) -> bool:
    """Whether iterations over ``ranges`` (and any of ``others``) with equal ``indices`` agree on ``ranges``.
    ``checked``: computed indices with the sizes that they are checked against."""
    sizes = {Symbol(r.symbol): r.size for r in (*ranges, *others)}
    bounds = Ranges({**sizes, **checked}, size_minimum)
    wanted = {Symbol(r.symbol) for r in ranges if r.size != 1}
    known: set[Symbol] = set()
    for index in indices:
        for symbol in known:  # a loop variable told apart already is a known number here
            coefficient = index.coefficient(symbol)
            if coefficient is not None and coefficient.symbols.isdisjoint(bounds.sizes):
                index = index - coefficient * to_expr(symbol)
        known |= _told_apart_by(index, set(bounds.sizes) - known, bounds)
    return known >= wanted


def _told_apart_by(index: Expr, wanted: set[Symbol], bounds: Ranges) -> set[Symbol]:
    """Symbols that one index determines, from the largest stride down: inner loops too, for ``i + 4*r`` gives ``i``
    only after ``r``."""
    found: set[Symbol] = set()
    progress = True
    while progress:
        progress = False
        for symbol in sorted((wanted - found) & index.symbols):
            stride = index.coefficient(symbol)
            if stride is None or not stride.symbols.isdisjoint(bounds.sizes):
                continue
            rest = index - stride * to_expr(symbol)
            small = prove_nonnegative(rest, bounds) and prove_lt(rest, stride, bounds)
            alone = bool(stride.constant) and rest.symbols.isdisjoint(bounds.sizes) and not _indirect(rest)
            if small or alone or _is_remainder(stride, bounds.sizes[symbol], rest):
                found.add(symbol)
                index, progress = rest, True
                break
    return found


def _is_remainder(stride: Expr, size: Expr, rest: Expr) -> bool:
    """Whether ``stride*i + rest`` gives ``i`` in ``[0, size)`` by its remainder: all of the rest comes in larger steps,
    whatever its symbols are."""
    step, count = stride.constant, size.constant
    larger = math.gcd(*(factor for monomial, factor in rest.terms if monomial))
    return step is not None and count is not None and 0 < step * count <= larger


def checked_sizes(body: Iterable[Instr]) -> dict[Symbol, Expr]:
    """The indices that a body checks, with their sizes."""
    return {Symbol(i.result, SymbolKind.VALUE): i.size for i in body if isinstance(i, CheckedIndex)}


def _indirect(expr: Expr) -> bool:
    return any(s.kind is SymbolKind.VALUE for s in expr.symbols)


def _same_iteration(
    nest: LoopNest,
    load_stage: int,
    loaded: tuple[Expr, ...],
    store_stage: int,
    stored: tuple[Expr, ...],
    size_minimum: int,
) -> bool:
    inner = nest.stages[store_stage].ranges
    if load_stage == store_stage:
        return loaded == stored and tells_apart(stored, (*nest.outer, *inner), (), size_minimum)
    others = nest.stages[load_stage].ranges
    if [r.size for r in others] == [r.size for r in inner]:
        names = {Symbol(a.symbol): to_expr(Symbol(b.symbol)) for a, b in zip(others, inner, strict=True)}
        loaded = tuple(index.substitute(names) for index in loaded)
        usable = [s for s, other in zip(stored, loaded, strict=True) if s == other]
    else:
        own = {Symbol(r.symbol) for r in (*others, *inner)}
        usable = [s for s, other in zip(stored, loaded, strict=True) if s == other and s.symbols.isdisjoint(own)]
    return tells_apart(usable, nest.outer, inner, size_minimum)


def _text(indices: Sequence[Expr]) -> str:
    return ", ".join(map(str, indices))
