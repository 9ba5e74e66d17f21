"""Kernels that differ in nothing but the memory they work on, or how many elements: one function, and one call.

Note [Combo kernels]
    An optimizer's update, or a hundred additions, is one nest per tensor. Equal nests are emitted once. Elementwise
    nests over one loop that differ in its length only share a function that takes the length from its launch's table.
    A run of launches of one function is a *combo kernel*: one loop over a table of frame entries, in place of a call
    for each; its units are those of all members, so threads share them, and many kernels too small for a second thread
    keep two busy.

    The gate on memory: temporaries in the arena take each other's memory, kernel by kernel. Members that write there
    run one after the other, with the lifetimes they have anyway; so it never needs a byte more. Only members that
    write to tensors of their own run at once. What may report an error is launched by itself, for the error's line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..ir import Index, Load, LoopNest, Range, Store
from ..kernel_ir.launches import Combo, KernelText, Launch
from ..kernel_ir.nests import LENGTH, FlatNest, map_expressions
from ..symbolic import Symbol, sym, to_expr

__all__ = ["canonical", "combine_launches", "generalize_lengths"]

LEAST_SIZES = 3  # lengths from which one function for all is compiled
LEAST_MEMBERS = 4  # launches from which a table is shorter than calls


def canonical(nest: FlatNest) -> object:
    """What the generated function depends on: equal for nests that differ in names and memory only."""
    numbers = {name: f"m{number}" for number, name in enumerate(nest.memories)}

    def rename(instr: object) -> object:
        return (
            replace(instr, buffer=numbers.get(instr.buffer, instr.buffer)) if isinstance(instr, Load | Store) else instr
        )

    stages = tuple((stage.ranges, tuple(map(rename, stage.body))) for stage in nest.stages)
    nontemporal = frozenset(numbers[name] for name in nest.nontemporal)
    positions = tuple(nest.positions.items())
    return (
        nest.outer,
        stages,
        positions,
        len(numbers),
        nest.sizes,
        nest.scratch,
        nest.ordered,
        nontemporal,
        nest.length is None,
    )


def generalize_lengths(nests: Sequence[FlatNest]) -> list[FlatNest]:
    """The nests, those of several lengths with the length as an argument."""
    counted = [_counted(nest) for nest in nests]
    lengths: dict[object, set[int]] = {}
    shapes = [None if nest is None else canonical(nest) for nest in counted]
    for nest, shape in zip(counted, shapes, strict=True):
        if nest is not None and nest.length is not None:
            lengths.setdefault(shape, set()).add(nest.length)
    return [
        nest if general is None or len(lengths[shape]) < LEAST_SIZES else general
        for nest, general, shape in zip(nests, counted, shapes, strict=True)
    ]


def _counted(nest: FlatNest) -> FlatNest | None:
    """An elementwise nest over one loop, with its length as an argument."""
    if len(nest.outer) != 1 or nest.ordered or nest.scratch or len(nest.stages) != 1 or nest.stages[0].ranges:
        return None
    length = nest.outer[0].size.constant
    if length is None or not 1 < length < 1 << 31 or any(isinstance(i, Index) for i in nest.stages[0].body):
        return None
    renamed = map_expressions(nest, lambda e: e.substitute({Symbol(nest.outer[0].symbol): sym("i")}))
    return replace(renamed, outer=(Range("i", to_expr(LENGTH)),), length=length)


def combine_launches(
    launches: Sequence[Launch], nests: Sequence[LoopNest], root: Callable[[str], str], storage: Mapping[str, str]
) -> list[Combo]:
    """The launches of a segment, runs of one function together. ``storage``: where each buffer's memory comes from."""
    groups: list[list[int]] = []
    for position, launch in enumerate(launches):
        last = launches[groups[-1][-1]] if groups else None
        if last is not None and last.function == launch.function and _plain(launch.kernel):
            groups[-1].append(position)
        else:
            groups.append([position])
    made: list[Combo] = []
    for group in groups:
        if len(group) < LEAST_MEMBERS:
            made += [Combo((launches[position],)) for position in group]
            continue
        why = _in_order([nests[position] for position in group], root, storage)
        made.append(Combo(tuple(launches[position] for position in group), why))
    return made


def _plain(kernel: KernelText) -> bool:
    return not kernel.reports and kernel.units.constant is not None and kernel.work.constant is not None


def _in_order(nests: Sequence[LoopNest], root: Callable[[str], str], storage: Mapping[str, str]) -> str:
    """Why the members run one after the other, ``""`` if they may run at once."""
    written: dict[str, int] = {}
    for number, nest in enumerate(nests):
        for name in map(root, nest.writes):
            if storage.get(name) == "arena":
                return "the arena is used again between them"
            if written.setdefault(name, number) != number:
                return "they write to the same memory"
    if any(written.get(root(name), number) != number for number, nest in enumerate(nests) for name in nest.reads):
        return "one reads what another writes"
    return ""
