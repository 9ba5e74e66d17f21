"""Pass: what a product of few rows reads is computed in its kernel, a norm too, if that is little.

Note [Norms before products of few rows]
    A norm of a few rows takes a device as long as a launch takes, which is as long as a small product. Each program
    instance of a product of few rows reads whole rows, so it can as well compute what they are made of: the sum of a
    norm first, then each element where it is multiplied. So the stages of the norm come before the product's, and its
    last one is computed where the product loads::

        loop norm():                                    loop product(j < 1024):
          stage(k < 1024): sum of x[k]^2                  stage(k < 1024): sum of x[k]^2
          stage(): factor                        ->       stage(): factor
          stage(k < 1024): store y[k]                     stage(k < 1024): sum of (x[k] * factor * g[k]) * w[j, k]

    What is summed in the first stages does not depend on the column, so a program instance computes it once for all of
    its columns. This is done where every reader of the rows is such a product, so that nothing needs them in memory,
    and what all columns together read anew lies in a cache and is not much (``MOST``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.few_rows import few_rows
from ..analysis.nests import buffer_bytes, iteration_count
from ..ir import Buffer, BufferKind, CheckedIndex, Load, LoopNest, Program, Reduce, Step
from ..ir.builder import NestBuilder
from ..ir.walk import buffers_of, contains, instructions, loads, stores
from ..passes import Decision, Pass, PassContext, fuses
from ..symbolic import Expr, Symbol, sym
from .inline_producers import join_origins

__all__ = ["PASS", "inline_norms"]

MOST = 1 << 25  # bytes that all columns of a product read anew, if each did
_READERS = 4


def inline_norms(program: Program, ctx: PassContext) -> Program:
    """The program with norms in the kernels of the products of few rows that read them."""
    buffers, dependencies = buffers_of(program), Dependencies.of(program)
    steps: list[Step | None] = list(program.steps)
    for position, step in enumerate(program.steps):
        norm = steps[position]
        if not isinstance(step, LoopNest) or not isinstance(norm, LoopNest):
            continue
        places = _readers(norm, steps, dependencies, buffers)
        made = [_inlined(norm, nest, buffers) for nest in places.values()]
        whole = [nest for nest in made if nest is not None]
        if not whole or len(whole) < len(made) or not ctx.fuel.take():
            continue
        for (place, reader), nest in zip(places.items(), whole, strict=True):
            steps[place] = nest
            ctx.decisions.append(
                Decision("inline", norm.name, reader.name, True, "each product of few rows computes it")
            )
        steps[position] = None
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _readers(
    norm: LoopNest, steps: Sequence[Step | None], dependencies: Dependencies, buffers: Mapping[str, Buffer]
) -> dict[int, LoopNest]:
    """The products that read what a nest of rows stores, by position, if nothing else does and they may compute it."""
    plain = len(norm.writes) == 1 and not norm.combines and any(stage.ranges for stage in norm.stages)
    if not plain or buffers[norm.writes[0]].kind is not BufferKind.TEMPORARY:
        return {}
    (name,) = norm.writes
    changed = any(dependencies.root[each] in dependencies.unstable for each in (name, *norm.reads))
    if changed or name in dependencies.escapes or len(dependencies.writers[name]) > 1:
        return {}
    found: dict[int, LoopNest] = {}
    columns = 0
    for place in dependencies.readers.get(name, ()):
        reader = steps[place]
        site = few_rows(reader.outer, reader.stages) if isinstance(reader, LoopNest) else None
        if not isinstance(reader, LoopNest) or site is None:
            return {}
        found[place] = reader
        columns += iteration_count([r for r in reader.outer if r.symbol in site.columns])
    read = sum(buffer_bytes(buffers[each]) for each in norm.reads)
    return found if len(found) <= _READERS and columns * read <= MOST else {}


def _inlined(norm: LoopNest, product: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest | None:
    """The product with the norm before it; ``None`` where it is no product of few rows then."""
    site = few_rows(product.outer, product.stages)
    (store,) = stores(instructions(norm.stages))
    last = norm.stages[-1]
    summed = product.stages[site.position] if site is not None else None
    if summed is None or store not in last.body or contains(instructions(norm.stages), CheckedIndex):
        return None
    if len(last.ranges) > 1 or any(isinstance(i, Reduce) for i in last.body):
        return None
    found = [(stage, load) for stage in product.stages for load in loads(stage.body, store.buffer)]
    places = {load.indices for _, load in found}
    if len(places) != 1 or any(stage is not summed or load.mask is not None for stage, load in found):
        return None
    env = _places(store.indices, next(iter(places)))
    if env is None or not {Symbol(r.symbol) for r in (*norm.outer, *last.ranges)} <= env.keys():
        return None
    taken = {r.symbol for r in (*product.outer, *(r for s in product.stages for r in s.ranges))}
    fresh = (name for name in (f"n{k}" for k in range(len(taken) + 64)) if name not in taken)
    builder = NestBuilder(product.name, product.outer, join_origins([norm.origin, product.origin]), buffers)
    names: dict[str, str] = {}
    for stage in norm.stages[:-1]:
        new = {r.symbol: next(fresh) for r in stage.ranges}
        builder.begin_stage([replace(r, symbol=new[r.symbol]) for r in stage.ranges])
        builder.copy(stage.body, env | {Symbol(old): sym(name) for old, name in new.items()}, names)
    own: dict[str, str] = {}
    for stage in product.stages:
        builder.begin_stage(stage.ranges)
        for instr in stage.body:
            if isinstance(instr, Load) and instr.buffer == store.buffer:
                builder.copy([i for i in last.body if i is not store], dict(env), names)
                own[instr.result] = names[store.value]
            else:
                builder.copy([instr], {}, own)
    made = builder.finish()
    return made if few_rows(made.outer, made.stages) is not None else None


def _places(stored: Sequence[Expr], loaded: Sequence[Expr]) -> dict[Symbol, Expr] | None:
    """What the loops of a store are at an element that is loaded; ``None`` where that is not plain."""
    env: dict[Symbol, Expr] = {}
    for index, at in zip(stored, loaded, strict=True):
        if index.constant is not None:
            if index != at:
                return None
            continue
        symbols = list(index.symbols)
        if len(symbols) != 1 or index != sym(symbols[0].name) or symbols[0] in env:
            return None
        env[symbols[0]] = at
    return env


def _pays(ctx: PassContext) -> bool:
    return fuses(ctx) and "rows" in ctx.target.capabilities.contraction_forms


PASS = Pass(
    "inline-norms",
    inline_norms,
    why="a norm of few rows takes as long as the product that reads it, and each program instance can compute it",
    after=("choose-contractions", "fuse-kernels", "localize-temporaries"),
    when=_pays,
)
