"""Kernels that compute attention, forward or backward, known by the shape of Note [Attention as a nest]."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..ir import CONTRACTIONS, Compute, Const, DType, Index, Instr, Load, Precision, Store
from ..symbolic import Expr, Symbol, sym, to_expr
from .attention_forms import (
    CLEAR,
    DIVISOR,
    NO_KEY,
    SCORES,
    SUMS,
    Score,
    cast_line,
    changes_form,
    form_of,
    weights_form,
    written,
)
from .attention_places import HEAD, KEY, QUERY, Places, with_places
from .nodes import Kernel, Loop
from .walk import PerfectNest, perfect_nests

__all__ = ["AttentionSite", "Lines", "Mask", "Places", "attention_site"]


_NONE = to_expr(0)
_ONE_QUERY = Loop("the query", to_expr(1))


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of numbers in memory: number ``d`` of line ``i`` is at ``start + i*step + d``. The lines of a queries' loop
    that is of the grid begin at query 0. ``head``: the step to the next of the heads that share keys and values."""

    buffer: str
    dtype: DType
    start: Expr
    step: Expr
    head: Expr = _NONE


@dataclass(frozen=True, slots=True)
class Mask:
    """The masks of the scores. ``added``: numbers, where ``seen`` holds (everywhere, and 0, where one is left out), and
    ``hidden`` elsewhere, or in the place of the scores (``replaces``). Lines of each are those of queries."""

    added: Lines | Places | None
    seen: Lines | Places | None
    hidden: float
    replaces: bool = False

    @property
    def read(self) -> tuple[Lines | None, Lines | None]:
        """``added`` and ``seen``, for a target that computes none of them. Raises ``TypeError`` where one is."""
        added, seen = self.added, self.seen
        if isinstance(added, Places) or isinstance(seen, Places):
            raise TypeError("a mask of this attention is computed, not read")
        return added, seen


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The attention that a kernel computes. ``batch``: loops of the grid, one iteration is a head (of keys);
    ``queries``: the loop of the grid that the forward has for them, or one that is in no grid where there is one query;
    ``shared``: how many heads of queries share one of keys, in the backward. ``inputs``: query, key, value; in the
    backward behind these the gradient of the result and the result. ``outputs``: the result, or the gradients of query,
    key and value, and of the scores where these are asked for. ``saved``: a number for each query, the logarithm of the
    sum of weights, or the largest score and the sum. ``kept``: weights that dropout leaves, times ``kept_scale``.
    ``slope``: the factor of gradients of scores. ``window``: beside ``causal``, how many keys are seen; 0: all.
    ``cap``: scores are it times the tangent of what they are over it; 0: they are what they are."""

    backward: bool
    precision: Precision
    dtype: DType
    batch: tuple[Loop, ...]
    queries: Loop | None
    counts: tuple[Expr, Expr]
    head: int
    inputs: tuple[Lines, ...]
    outputs: tuple[Lines, ...]
    saved: tuple[Lines, ...]
    scale: float
    mask: Mask | None
    causal: bool
    shared: int = 1
    slope: float = 0.0
    kept: Lines | None = None
    kept_scale: float = 1.0
    zero_empty: bool = True
    window: int = 0
    cap: float = 0.0


def attention_site(kernel: Kernel) -> AttentionSite | None:
    """The attention that a kernel in normal form is; ``None`` for any other kernel, and where numbers of a head don't
    lie side by side."""
    scratch = {declared.name for declared in kernel.scratch}
    if len(scratch) not in (3, 8):
        return None
    try:
        return _backward(kernel) if len(scratch) == 8 else _forward(kernel)
    except _Other:
        return None


class _Other(Exception):
    """The kernel is something else."""


class _Reader:
    """Reads the nests of a kernel one after the other. Raises :class:`_Other` where one is not as expected."""

    def __init__(self, kernel: Kernel) -> None:
        self.scratch = {declared.name for declared in kernel.scratch}
        self.types = {param.name: param.dtype for param in kernel.params if not param.also}
        self.grid = kernel.grid
        self.nests = list(perfect_nests(kernel))
        self.precisions: set[Precision] = set()
        self.scale, self.causal, self.window, self.cap = 0.0, False, 0, 0.0
        self.mask: Mask | None = None
        self.kept: Lines | None = None
        self.kept_scale = 1.0
        self.shared, self.queries = 1, to_expr(0)
        self.places: dict[str, Places] = {}

    def take(self, form: str, *loops: int) -> PerfectNest:
        """The next nest, which must have this form, and so many loops."""
        nest = self.nests.pop(0) if self.nests else None
        if nest is None or form_of(nest) != form or len(nest.loops) not in loops:
            raise _Other
        return nest

    def clear(self, *loops: int) -> None:
        """Zeros."""
        (zero, _) = self.take(CLEAR, *loops).body
        if not isinstance(zero, Const) or zero.value != 0:
            raise _Other

    def sum(self, *loops: int) -> tuple[PerfectNest, Load, Load]:
        """A sum of products that is added to scratch memory, with its factors."""
        nest = self.take(SUMS[len(self.nests[0].body) == 6 if self.nests else 0], *loops)
        ops = [i.op for i in nest.body if isinstance(i, Compute) and i.op != "cast"]
        self.precisions |= {name for name, known in CONTRACTIONS.items() if known in ops} or {"highest", "high"}
        first, second = nest.body[:2]
        assert isinstance(first, Load) and isinstance(second, Load)
        return nest, first, second

    # -- places in memory ----------------------------------------------------------------------------------

    def lines(self, access: Load | Store, loops: Sequence[Loop], head: Expr) -> Lines:
        """The lines that an access goes to along the loops of its nest: of heads that share keys, where there are
        such, of lines, and of the numbers of a line. Loops that touch may be one."""
        if access.buffer in self.scratch or access.buffer not in self.types:
            raise _Other
        *outer, last = loops
        if last.extent != head:  # lines that touch
            if self._step(access, last) != 1:
                raise _Other
            return self._rows(access, outer, (head, last))
        if self._step(access, last) != 1:
            raise _Other
        return self._rows(access, outer, (None, last))

    def _rows(self, access: Load | Store, outer: Sequence[Loop], inner: tuple[Expr | None, Loop]) -> Lines:
        """Lines of a nest whose innermost loop runs along numbers, or along all lines with such a step."""
        touching, last = inner
        loops = [*outer, last]
        start = access.indices[0].substitute({Symbol(loop.symbol): to_expr(0) for loop in loops})
        steps = [self._step(access, loop) for loop in outer]
        if touching is not None:
            step, head = touching, (steps[0] if steps else self.queries * touching)
        elif len(steps) == 2:
            head, step = steps
        else:
            step, head = steps[0], self.queries * steps[0]
        return Lines(access.buffer, self.types[access.buffer], start, step, head if self.shared > 1 else to_expr(0))

    def in_order(self, nest: PerfectNest) -> tuple[Loop, ...]:
        """The loops of a nest in the order in which its scratch memory has them: others may be sorted otherwise, by the
        strides of tensors."""
        access = next(i for i in nest.body if isinstance(i, Load | Store) and i.buffer in self.scratch)
        left, found, width = list(nest.loops), list[Loop](), to_expr(1)
        while left:
            loop = next((loop for loop in left if self._step(access, loop) == width), None)
            if loop is None:
                raise _Other
            left.remove(loop)
            found.insert(0, loop)
            width = width * loop.extent
        return tuple(found)

    def row(self, access: Load | Store, rows: Sequence[Loop]) -> Lines:
        """Numbers of which each line has one, in memory or along the columns of a mask."""
        steps = [self._step(access, loop) for loop in rows]
        if access.buffer not in self.types:
            raise _Other
        start = access.indices[0].substitute({Symbol(loop.symbol): to_expr(0) for loop in rows})
        head = steps[0] if len(steps) == 2 else self.queries * steps[0] if self.shared > 1 else to_expr(0)
        return Lines(access.buffer, self.types[access.buffer], start, steps[-1], head)

    def numbers(self, access: Load | Store, rows: Sequence[Loop]) -> Lines:
        """A float32 of each line."""
        found = self.row(access, rows)
        if found.dtype is not DType.F32:
            raise _Other
        return found

    def table(self, access: Load | Store, rows: Sequence[Loop], column: Loop) -> Lines:
        """Lines with an element of each key."""
        if self._step(access, column) != 1 or access.buffer in self.scratch:
            raise _Other
        found = self.row(access, rows)
        return replace(found, start=found.start.substitute({Symbol(column.symbol): to_expr(0)}))

    def of_scores(self, load: Load, rows: Sequence[Loop], column: Loop) -> Lines | Places:
        """A mask, which is read, line by line, or computed."""
        places = self.places.get(load.result)
        if places is None:
            try:
                return self.table(load, rows, column)
            except _Other:
                places = Places((load,), load.result, load.dtype)
        if any(name not in self.types or name in self.scratch for name in places.reads):
            raise _Other
        *heads, row = (loop.symbol for loop in rows)
        merged = self.shared > 1 and not heads  # heads and their queries are one loop
        query = sym(HEAD) * self.queries + sym(QUERY) if merged else sym(QUERY)
        names = {column.symbol: sym(KEY), row: query} | {head: sym(HEAD) for head in heads}
        return places.at({Symbol(name): expr for name, expr in names.items()})

    def _step(self, access: Load | Store, loop: Loop) -> Expr:
        step = access.indices[0].coefficient(Symbol(loop.symbol))
        if step is None:
            raise _Other
        return step

    # -- what is computed ----------------------------------------------------------------------------------

    def score(self, nest: PerfectNest, known: Score, rows: Sequence[Loop], column: Loop) -> Iterator[Instr]:
        """Note the scale and the masks of a nest that makes scores of products. Gives the rest of its body."""
        body = iter(nest.body)
        score, scale, _ = (next(body) for _ in range(3))
        assert isinstance(score, Load) and isinstance(scale, Const)
        if score.buffer not in self.scratch:
            raise _Other
        self.scale, self.causal = float(scale.value), known.causal
        if known.capped:
            share = _next(body, Const).value
            next(body), next(body)
            self.cap = float(_next(body, Const).value)
            next(body)
            if self.cap <= 0 or float(share) != 1 / self.cap:
                raise _Other
        added = seen = None
        hidden = 0.0
        if known.added:
            load = _next(body, Load)
            added = self.of_scores(load, rows, column)
            if known.added == "cast":
                next(body)
        if known.seen:
            seen = self.of_scores(_next(body, Load), rows, column)
            if known.seen == "replaces":
                if known.added:
                    next(body)
            elif not known.added and _next(body, Const).value != 0:
                raise _Other
            hidden = float(_next(body, Const).value)
            next(body)
        if added is not None or seen is not None:
            if known.seen != "replaces":
                next(body)
            self.mask = Mask(added, seen, hidden, known.seen == "replaces")
        query = sym(rows[-1].symbol) if rows[-1] is not _ONE_QUERY else _NONE
        if known.causal:
            indices = [_next(body, Index).expr for _ in range(2)]
            next(body)
            if indices != [sym(column.symbol), query] or _next(body, Const).value != -math.inf:
                raise _Other
            next(body)
        if known.window:
            first, key = (_next(body, Index).expr for _ in range(2))
            next(body)
            self.window = ((query - first).constant or 0) + 1
            if key != sym(column.symbol) or self.window < 1 or _next(body, Const).value != -math.inf:
                raise _Other
            next(body)
        return body

    def dropout(self, body: Iterator[Instr], rows: Sequence[Loop], column: Loop) -> None:
        """Note which weights are kept."""
        self.kept = self.table(_next(body, Load), rows, column)
        self.kept_scale = float(_next(body, Const).value)
        if _next(body, Const).value != 0:
            raise _Other

    def site(
        self,
        queries: Loop | None,
        counts: tuple[Expr, Expr],
        head: Expr,
        moved: Sequence[Sequence[Lines]],
        saved: Sequence[Lines],
    ) -> AttentionSite:
        """The site, if nothing is left and all types fit. ``moved``: lines that are read, and that are written."""
        inputs, outputs = moved
        dtype, size = inputs[0].dtype, head.constant
        same = all(lines.dtype is dtype for lines in (*inputs, *outputs[:3]))
        if self.nests or len(self.precisions) != 1 or size is None or not same:
            raise _Other
        (precision,) = self.precisions
        batch = tuple(loop for loop in self.grid if loop is not queries)
        read, written = tuple(inputs), tuple(outputs)
        backward = queries is None
        kept = (tuple(saved), self.scale, self.mask, self.causal)
        site = AttentionSite(backward, precision, dtype, batch, queries, counts, size, read, written, *kept)
        site = replace(site, window=self.window, cap=self.cap)
        return replace(site, shared=self.shared, kept=self.kept, kept_scale=self.kept_scale)


_T = TypeVar("_T", Load, Store, Const, Index)
_K = TypeVar("_K")


def _next(body: Iterator[Instr], kind: type[_T]) -> _T:
    found = next(body)
    assert isinstance(found, kind)
    return found


def _stored(dtype: DType) -> str:
    return written(f"sum = load; {cast_line('sum', dtype)} store sum")


def _forward(kernel: Kernel) -> AttentionSite:
    """Raises :class:`_Other`."""
    reader = _Reader(kernel)
    reader.clear(1)
    nest, left, right = reader.sum(2)
    keys, numbers = nest.loops
    head = numbers.extent
    queries = _varies(kernel.grid, left, right)
    query, key = reader.lines(left, (queries, numbers), head), reader.lines(right, (keys, numbers), head)
    dtype = query.dtype
    forms = {written(score.text + "store score; max score"): score for score in _scores(reader)}
    scores, known = _found(reader, forms)
    reader.score(scores, known, [queries], scores.loops[-1])
    zero_empty = bool(reader.nests) and not reader.nests[0].loops
    if zero_empty:
        reader.take(NO_KEY, 0)
    weights, kept = _found(reader, {weights_form(dtype, kept): kept for kept in (False, True)})
    if kept:
        body = iter(weights.body)
        for _ in range(3):
            next(body)
        reader.dropout(body, [queries], weights.loops[-1])
    reader.clear(1)
    nest, _, right = reader.sum(2)
    value = reader.lines(right, nest.loops, head)
    saved = _saved(reader, queries, zero_empty)
    nest = reader.take(written(f"sum = load; sum = div sum total; {cast_line('sum', dtype)} store sum"), 1)
    store = nest.body[-1]
    assert isinstance(store, Store)
    out = reader.lines(store, (queries, nest.loops[0]), head)
    site = reader.site(queries, (queries.extent, keys.extent), head, ([query, key, value], [out]), saved)
    return replace(site, zero_empty=zero_empty)


def _found(reader: _Reader, forms: dict[str, _K]) -> tuple[PerfectNest, _K]:
    """The next nest, and which of the forms it has, if need be with loads in the place of masks that it computes."""
    nest = reader.nests.pop(0) if reader.nests else None
    known = forms.get(form_of(nest)) if nest is not None and nest.loops else None
    if nest is not None and nest.loops and known is None:
        nest, reader.places = with_places(nest, reader.scratch)
        known = forms.get(form_of(nest))
    if nest is None or known is None:
        raise _Other
    return nest, known


def _scores(reader: _Reader) -> list[Score]:
    """The forms that the next nest may have."""
    body = reader.nests[0].body if reader.nests else ()
    return SCORES[any(isinstance(instr, Compute) and instr.op == "tanh" for instr in body)]


def _saved(reader: _Reader, queries: Loop, zero_empty: bool) -> list[Lines]:
    """What is kept of a query: nothing, a logarithm, or two numbers."""
    if not reader.nests or reader.nests[0].loops:
        if zero_empty:
            raise _Other
        return []
    begin = DIVISOR if zero_empty else ""
    forms = {
        written(begin): 0,
        written(begin + "log = log divisor; log = add top log; store log"): 1,
        written(begin + ("store top; store divisor" if zero_empty else "store top; store total")): 2,
    }
    nest = reader.nests.pop(0)
    if form_of(nest) not in forms:
        raise _Other
    return [reader.numbers(store, [queries]) for store in nest.body if isinstance(store, Store)]


def _varies(grid: Sequence[Loop], left: Load, right: Load) -> Loop:
    """The innermost loop of the grid that a query varies along and a key does not; a loop of one query, where there is
    none."""
    symbols = {symbol.name for symbol in left.indices[0].symbols} - {symbol.name for symbol in right.indices[0].symbols}
    found = [loop for loop in grid if loop.symbol in symbols]
    return found[-1] if found else _ONE_QUERY


def _backward(kernel: Kernel) -> AttentionSite:
    """Raises :class:`_Other`."""
    reader = _Reader(kernel)
    for _ in range(3):
        reader.clear(1, 2, 3)
    dtype = DType.BF16 if reader.nests and len(reader.nests[0].body) == 6 else DType.F32
    _look_for_heads(reader)
    dots = f"a = load; {cast_line('a', dtype)} b = load; {cast_line('b', dtype)} c = mul a b; store+ c"
    nest = reader.take(written(dots), 2, 3)
    head = nest.loops[-1].extent
    result, gradient = (reader.lines(i, nest.loops, head) for i in nest.body if isinstance(i, Load))
    nest, left, right = reader.sum(3, 4)
    *rows, keys, numbers = nest.loops
    query, key = reader.lines(left, (*rows, numbers), head), _of_keys(reader.lines(right, (keys, numbers), head))
    nest, left, right = reader.sum(3, 4)
    value = _of_keys(reader.lines(right, nest.loops[-2:], head))
    if left.buffer != gradient.buffer:
        raise _Other
    saved, slope, of_scores = _read_changes(reader, dtype)
    for _ in range(3):
        reader.clear(1, 2, 3)
        reader.sum(3, 4)
    outputs = []
    for which in range(3):
        nest = reader.take(_stored(dtype), 1, 2, *([3] if which == 0 else []))
        store = nest.body[-1]
        assert isinstance(store, Store)
        lines = reader.lines(store, reader.in_order(nest), head)
        outputs.append(_of_keys(lines) if which else lines)
    moved = ([query, key, value, gradient, result], [*outputs, *of_scores])
    site = reader.site(None, (reader.queries, keys.extent), head, moved, saved)
    return replace(site, slope=slope)


def _of_keys(lines: Lines) -> Lines:
    """All heads that share them read the same."""
    return replace(lines, head=to_expr(0))


def _look_for_heads(reader: _Reader) -> None:
    """How many heads share keys, and how many queries each has, from the first nest that has a loop for these."""
    for nest, loops in zip(reader.nests, (2, 3, 3, 2), strict=False):
        heads = len(nest.loops) - loops
        reader.queries = nest.loops[heads].extent if heads in (0, 1) else to_expr(0)
        if heads == 1:
            shared = nest.loops[0].extent.constant
            if shared is None:
                raise _Other
            reader.shared = shared
            return


def _read_changes(reader: _Reader, dtype: DType) -> tuple[list[Lines], float, list[Lines]]:
    """What the nest of the weights reads of each query, the slope, and where it stores gradients of scores."""
    ways = [(own, kept, stored) for own in (False, True) for kept in (False, True) for stored in (False, True)]
    nest, (known, (own, kept, _)) = _found(
        reader, {changes_form(score, dtype, *way): (score, way) for score in _scores(reader) for way in ways}
    )
    if len(nest.loops) not in (2, 3):
        raise _Other
    *rows, column = reader.in_order(nest)
    body = reader.score(nest, known, rows, column)
    loads = [_next(body, Load)]
    next(body), next(body)
    if own:
        loads.append(_next(body, Load))
        next(body)
    if kept:
        reader.dropout(body, rows, column)
    saved = [reader.numbers(load, rows) for load in loads]
    if any(Symbol(column.symbol) in load.indices[0].symbols for load in loads):
        raise _Other
    stores = [i for i in nest.body if isinstance(i, Store) and i.buffer not in reader.scratch]
    of_scores = [reader.table(store, rows, column) for store in stores]
    if any(lines.dtype is not DType.F32 for lines in of_scores):
        raise _Other
    scales = [i.value for i in nest.body if isinstance(i, Const)]
    if known.capped and scales[-2] != 1:
        raise _Other
    if known.seen == "replaces" and scales[-3 if known.capped else -2] != 0:
        raise _Other
    return saved, float(scales[-1]), of_scores
