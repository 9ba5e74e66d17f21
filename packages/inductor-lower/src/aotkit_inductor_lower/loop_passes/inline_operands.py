"""What a product's right factor is computed by, computed where the product reads it.

Note [Factors that are computed on the way]
    A weight that is kept in another type (bfloat16, int8 with scales) is dequantised by a kernel of its own, which
    writes it to memory for the product to read. A product reads each number of its right factor once per block of rows,
    so computing it there costs no more than reading it, and nothing is written. This is done where the factor is a
    temporary that nothing else reads, seen through views that reorder its dimensions, and if the target still has a
    form for the product. The left factor is read once per strip of columns, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import has_division, heavy_count, identity_store
from ..ir import Alias, Buffer, BufferKind, Contraction, Load, LoopNest, Program, Stage, Step
from ..ir.inlining import Inlinable
from ..ir.walk import loads
from ..passes import NO_FUEL, Decision, PassContext
from ..symbolic import Expr
from .inline_producers import expand

__all__ = ["inline_operands"]


def inline_operands(
    product: Contraction,
    program: Program,
    steps: Sequence[Step | None],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
    ctx: PassContext,
) -> LoopNest:
    """The nest of a product, with what computes its right factor, see Note [Factors that are computed on the way].
    ``steps``: those of the program, some of which may be gone."""
    nest = product.as_nest()
    for name in dict.fromkeys(load.buffer for load in loads(product.right.body)):
        found = _producer(name, program, steps, buffers, dependencies)
        if found is None:
            continue
        producer, base, dims = found
        merged = _merged(nest, name, producer, base, dims, buffers)
        reason = "it is computed where the product reads it"
        verdict = ctx.target.renders_product(merged, buffers)
        if not verdict:
            reason = "the target has no form for the product of it"
        elif not ctx.fuel.take():
            reason, verdict = NO_FUEL, False
        ctx.decisions.append(Decision("inline", producer.name, product.name, verdict, reason))
        nest = merged if verdict else nest
    return nest


def _producer(
    name: str,
    program: Program,
    steps: Sequence[Step | None],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
) -> tuple[LoopNest, str, tuple[int, ...]] | None:
    """What computes a factor for one product alone, the buffer it writes, and which of the factor's dimensions each of
    that buffer's is."""
    views = {step.result: step for step in program.steps if isinstance(step, Alias)}
    base, dims = name, tuple(range(len(buffers[name].sizes)))
    while True:
        writers, readers = dependencies.writers.get(base, []), dependencies.readers.get(base, [])
        if buffers[base].kind is not BufferKind.TEMPORARY or len(readers) != 1 or len(writers) != 1:
            return None
        view = views.get(base)
        if view is None:
            break
        order = _order(buffers[view.base], view, buffers[base])
        if order is None:
            return None
        base, dims = view.base, tuple(dims[dim] for dim in order)
    producer = steps[writers[0]]
    if not isinstance(producer, LoopNest) or identity_store(producer, buffers) is None:
        return None
    changed = any(dependencies.root[read] in dependencies.unstable for read in producer.reads)
    if changed or has_division(producer) or heavy_count(producer):
        return None
    return producer, base, dims


def _order(base: Buffer, view: Alias, result: Buffer) -> tuple[int, ...] | None:
    """Which dimension of a view each dimension of its base is, if it reorders them and does nothing else."""
    there, here = (list(zip(b.sizes, b.strides, strict=True)) for b in (base, result))
    if view.offset.constant != 0 or base.dtype != result.dtype or view.reuses or len(set(here)) < len(here):
        return None
    if len(there) != len(here) or set(there) != set(here):
        return None
    return tuple(here.index(dim) for dim in there)


def _merged(
    nest: LoopNest,
    name: str,
    producer: LoopNest,
    base: str,
    dims: Sequence[int],
    buffers: Mapping[str, Buffer],
) -> LoopNest:
    """The nest with the producer's body in the place of loads of ``name``."""

    def seen(load: Load) -> Load:
        indices: tuple[Expr, ...] = tuple(load.indices[dim] for dim in dims)
        return replace(load, buffer=base, indices=indices)

    stages = [
        Stage(stage.ranges, tuple(seen(i) if isinstance(i, Load) and i.buffer == name else i for i in stage.body))
        for stage in nest.stages
    ]
    symbols = identity_store(producer, buffers)
    assert symbols is not None
    own = LoopNest(nest.name, nest.outer, tuple(stages), nest.origin)
    return expand(own, buffers, {base: Inlinable(producer, symbols)})
