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

from ..ir import Index, LoopNest
from ..ir.walk import with_buffers
from ..kernel_ir.launches import Combo, KernelText, Launch
from ..kernel_ir.nodes import LENGTH, Kernel, Loop, Param
from ..kernel_ir.walk import map_expressions, map_instructions, memories
from ..symbolic import Symbol, sym, to_expr

__all__ = ["canonical", "combine_launches", "generalize_lengths"]

LEAST_SIZES = 3  # lengths from which one function for all is compiled
LEAST_MEMBERS = 4  # launches from which a table is shorter than calls


def canonical(kernel: Kernel) -> Kernel:
    """What the generated function depends on: equal for kernels that differ in names and memory only."""
    numbers = {param.name: f"m{number}" for number, param in enumerate(memories(kernel))}

    params = tuple(replace(p, name=numbers[p.name]) if p.kind == "memory" else p for p in kernel.params)
    body = map_instructions(kernel.body, lambda instr: with_buffers(instr, numbers))
    return replace(kernel, name="", params=params, body=body)


def generalize_lengths(kernels: Sequence[Kernel]) -> list[tuple[Kernel, int | None]]:
    """The kernels, those of several lengths with the length as a parameter, and then what it is."""
    general = [_with_length(kernel) for kernel in kernels]
    shapes = [None if made is None else canonical(made[0]) for made in general]
    lengths: dict[Kernel | None, set[int]] = {}
    for made, shape in zip(general, shapes, strict=True):
        if made is not None:
            lengths.setdefault(shape, set()).add(made[1])
    return [
        (kernel, None) if made is None or len(lengths[shape]) < LEAST_SIZES else made
        for kernel, made, shape in zip(kernels, general, shapes, strict=True)
    ]


def _with_length(kernel: Kernel) -> tuple[Kernel, int] | None:
    """An elementwise kernel over one loop, with its length as a parameter, and that length."""
    if len(kernel.grid) != 1 or kernel.ordered or kernel.scratch or any(isinstance(s, Loop) for s in kernel.body):
        return None
    (loop,) = kernel.grid
    length = loop.extent.constant
    if length is None or not 1 < length < 1 << 31 or any(isinstance(i, Index) for i in kernel.body):
        return None
    renamed = map_expressions(kernel, lambda e: e.substitute({Symbol(loop.symbol): sym("i")}))
    params = (*kernel.params, Param(LENGTH.name, "length"))
    return replace(renamed, params=params, grid=(Loop("i", to_expr(LENGTH)),)), length


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
    if any(storage.get(root(name)) == "large" for nest in nests for name in (*nest.reads, *nest.writes)):
        return "one may write over what another reads"
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
