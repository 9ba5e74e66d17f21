"""What a product's right factor is computed by, computed where the product reads it.

Note [Factors that are computed on the way]
    A weight that is kept in another type (float32 under autocast, int8 with scales) is converted by kernels of their
    own, which write it to memory for ATen's product to read. A product of ours reads each number of its right factor
    once per block of rows, so computing it there costs no more than reading it, and nothing is written. This is done
    where the factor is a temporary that nothing else reads, seen through views that reorder its dimensions. The left
    factor is read once per strip of columns, and stays.

    So are matrices of a batch that are chosen by numbers in memory, as a mixture of experts has them (``w[chosen]``,
    then ``bmm``): which one it is varies along the batch only, and is loaded and checked there.

Note [Groups of a sum]
    A weight with a scale for each group of numbers of a column is computed in three dimensions, or with a row for each
    group, and then seen as a matrix: a position of the sum is a group and a step within it. So the sum is written as
    two loops, of groups and of steps, where a view puts them together; then no index divides, and the scale is one of
    the outer loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import heavy_count, identity_store, traps
from ..ir import Alias, Buffer, BufferKind, Contraction, Instr, Load, LoopNest, Operand, Program, Range, Store
from ..ir.builder import NestBuilder
from ..ir.inlining import Inlinable
from ..ir.walk import (
    buffers_of,
    index_exprs,
    load_at,
    loads,
    loops_of_places,
    map_contraction,
    places_in,
    rename,
    step_writes,
    substitute,
)
from ..symbolic import Expr, Symbol, contiguous_strides, has_calls, reshape_indices, sym, to_expr
from .inline_producers import join_origins

__all__ = ["Producers"]

MOST = 40  # instructions of an operand: widening an 8-bit float is 16 of them

#: From the place of an element in a view to its place in the view's base.
_Place = Callable[[tuple[Expr, ...]], tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class _Producer:
    """What computes a buffer, ``made``, and from where that is seen, through one view after the other. ``groups``: what
    may be the size of a group, see Note [Groups of a sum]."""

    made: Inlinable
    buffer: str
    views: tuple[_Place, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Producers:
    """What computes the factors of a program's products, see Note [Factors that are computed on the way]."""

    program: Program
    buffers: Mapping[str, Buffer]
    dependencies: Dependencies
    views: Mapping[str, Alias]

    @staticmethod
    def of(program: Program) -> Producers:
        """Analyze a program."""
        views = {step.result: step for step in program.steps if isinstance(step, Alias)}
        return Producers(program, buffers_of(program), Dependencies.of(program), views)

    def inlined(self, position: int, product: Contraction) -> tuple[Contraction, tuple[LoopNest, ...]]:
        """The product, the step at a position, with what computes its right factor, as far back as that can be, and the
        nests that is from."""
        found: list[LoopNest] = []
        while True:
            names = dict.fromkeys(load.buffer for load in loads(product.right.body))
            known = ((name, self._producer(name, position)) for name in names)
            name, producer = next(((n, p) for n, p in known if p is not None), ("", None))
            changed = None if producer is None else self._grouped_with(product, name, producer)
            if producer is None or changed is None:
                return product, tuple(found)
            product = changed
            found.append(producer.made.nest)

    def _producer(self, buffer: str, reader: int) -> _Producer | None:
        """What computes a buffer that is read once, by step ``reader``."""
        views: list[_Place] = []
        groups: list[int] = []
        while True:
            writers = self.dependencies.writers.get(buffer, [])
            once = len(writers) == 1 and len(self.dependencies.readers.get(buffer, [])) == 1
            if self.buffers[buffer].kind is not BufferKind.TEMPORARY or not once:
                return None
            view = self.views.get(buffer)
            if view is None:
                break
            base, seen = self.buffers[view.base], self.buffers[buffer]
            place = _reordered(base, view, seen)
            if place is None:
                place = _regrouped(base, view, seen)
                if place is None:
                    return None
                groups.append(base.sizes[-1].constant or 0)
            views.append(place)
            buffer = view.base
        nest = self.program.steps[writers[0]]
        symbols = identity_store(nest, self.buffers) if isinstance(nest, LoopNest) else None
        if not isinstance(nest, LoopNest) or symbols is None:
            return None
        if traps(nest) or heavy_count(nest) or self._changed(nest, writers[0], reader):
            return None
        divided = (load for load in loads(nest.stages[0].body) if _divides(load))
        groups += [self.buffers[load.buffer].sizes[-1].constant or 0 for load in divided]
        return _Producer(Inlinable(nest, symbols), buffer, tuple(views), tuple(dict.fromkeys(groups)))

    def _changed(self, nest: LoopNest, first: int, last: int) -> bool:
        """Whether what a nest reads is overwritten after it, before step ``last``."""
        root, unstable = self.dependencies.root, self.dependencies.unstable
        read = {root[name] for name in nest.reads} & unstable
        written = {root[name] for step in self.program.steps[first + 1 : last] for name in step_writes(step)}
        return not read.isdisjoint(written)

    def _grouped_with(self, product: Contraction, name: str, producer: _Producer) -> Contraction | None:
        """:meth:`_with`, with the sum in groups where it needs them."""
        forms = [product, *(_in_groups(product, size) for size in producer.groups)]
        made = (self._with(form, name, producer) for form in forms if form is not None)
        return next((form for form in made if form is not None), None)

    def _with(self, product: Contraction, name: str, producer: _Producer) -> Contraction | None:
        """The product with the producer's body for its loads of ``name``; ``None`` if it is no operand then."""
        origin = join_origins([producer.made.nest.origin, product.origin])
        inlinable = {producer.buffer: producer.made}
        builder = NestBuilder(product.name, (*product.outer, *product.reduced), origin, self.buffers, inlinable)
        names: dict[str, str] = {}
        builder.copy([_seen_from(i, name, producer) for i in product.right.body], {}, names)
        made = builder.finish().stages[0].body
        batch = {loop.symbol for loop in product.batch}
        places = places_in(made)  # once for each product of the batch
        if len(made) > MOST or any(_divides(i) for i in made if i not in places) or not batch >= loops_of_places(made):
            return None
        own = {i.result: f"right_{i.result}" for i in made if not isinstance(i, Store)}
        operand = Operand(tuple(rename(i, own) for i in made), own[names[product.right.value]])
        return replace(product, right=operand, origin=origin)


def _seen_from(instr: Instr, name: str, producer: _Producer) -> Instr:
    """A load of ``name`` as one of the buffer that the producer writes."""
    if not isinstance(instr, Load) or instr.buffer != name:
        return instr
    indices = instr.indices
    for place in producer.views:
        indices = place(indices)
    return load_at(instr, producer.buffer, indices)


def _divides(instr: Instr) -> bool:
    return any(has_calls(expr) for expr in index_exprs(instr))


def _in_groups(product: Contraction, size: int) -> Contraction | None:
    """The product with its sum in groups of so many steps, if it is one loop of whole groups."""
    if len(product.reduced) != 1 or size <= 1:
        return None
    (whole,) = product.reduced
    steps, symbol = whole.size.constant or 0, f"{whole.symbol}_group"
    if steps % size or steps <= size or any(loop.symbol == symbol for loop in product.outer):
        return None
    env = {Symbol(whole.symbol): sym(symbol) * size + sym(whole.symbol)}
    loops = (Range(symbol, to_expr(steps // size)), Range(whole.symbol, to_expr(size)))
    return map_contraction(replace(product, reduced=loops), lambda instr: substitute(instr, env))


def _reordered(base: Buffer, view: Alias, result: Buffer) -> _Place | None:
    """Of a view that reorders dimensions and does nothing else."""
    order = _order(base, view, result)
    if order is None:
        return None
    return lambda indices: tuple(to_expr(0) if dim is None else indices[dim] for dim in order)


def _regrouped(base: Buffer, view: Alias, result: Buffer) -> _Place | None:
    """Of a view of the numbers of a matrix, in groups, as that matrix or as its transpose."""
    if len(result.sizes) != 2 or len(base.sizes) not in (2, 3) or base.strides != contiguous_strides(base.sizes):
        return None
    if view.offset.constant != 0 or base.dtype != result.dtype or view.reuses:
        return None
    for order in ((0, 1), (1, 0)):
        sizes = tuple(result.sizes[dim] for dim in order)
        if tuple(result.strides[dim] for dim in order) == contiguous_strides(sizes):
            return lambda indices: reshape_indices([indices[dim] for dim in order], sizes, base.sizes)
    return None


def _order(base: Buffer, view: Alias, result: Buffer) -> tuple[int | None, ...] | None:
    """Which dimension of a view each dimension of its base is, ``None`` for those of one element, if the view reorders
    dimensions and does nothing else."""
    there, here = (list(zip(b.sizes, b.strides, strict=True)) for b in (base, result))
    wanted, given = ({dim for dim in dims if dim[0] != 1} for dims in (there, here))
    counts = (sum(size != 1 for size, _ in dims) for dims in (there, here))
    if view.offset.constant != 0 or base.dtype != result.dtype or view.reuses or set(counts) != {len(wanted)}:
        return None
    return tuple(None if dim[0] == 1 else here.index(dim) for dim in there) if wanted == given else None
