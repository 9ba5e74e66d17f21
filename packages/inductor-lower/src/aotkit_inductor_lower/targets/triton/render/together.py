"""Several small kernels as one: each has program instances of its own in a launch.

Note [A kernel of kernels]
    Each kernel becomes a function that is told which of its instances it is. What several launches would compute of
    other memory is called in one place, with the pointers that belong to the member::

        if (program >= 576) & (program < 1152):
            member1, instance1 = ...
            a1_0 = p_x
            a1_0 = tl.where(member1 == 1, p_y, a1_0)
            cast(instance1, a1_0, b1_0, 1024)

    Which branch is taken is the same for a whole program instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....symbolic import to_expr
from ..records import Config, KernelArgument, KernelSource
from .names import argument_name
from .prelude import prelude_for

__all__ = ["MOST_POINTERS", "SHARED_WARPS", "Member", "emit_together", "may_join"]

MOST_POINTERS = 160  # of one kernel
SHARED_WARPS = 4

Member = tuple[KernelSource, tuple[str, ...], int]
"""A kernel, the frame entries of its arguments, and how many program instances it has."""


def may_join(source: KernelSource) -> bool:
    """Whether a kernel can be a member: nothing but pointers is passed to it."""
    return not source.checks and all(a.kind == "pointer" for a in source.arguments)


def emit_together(
    name: str, members: Sequence[Member], warps: int = SHARED_WARPS
) -> tuple[KernelSource, tuple[str, ...]] | None:
    """The kernel that computes all ``members``, and the frame entries of its arguments. ``None`` where they take the
    same memory for different types, or more than :data:`MOST_POINTERS`."""
    arguments: dict[str, KernelArgument] = {}
    for source, slots, _ in members:
        for argument, slot in zip(source.arguments, slots, strict=True):
            known = arguments.setdefault(slot, replace(argument, name=slot))
            if known.dtype is not argument.dtype:
                return None
            aligned = known.aligned and argument.aligned
            arguments[slot] = replace(known, written=known.written or argument.written, aligned=aligned)
    if len(arguments) > MOST_POINTERS:
        return None
    alike: dict[str, list[Member]] = {}
    for member in members:
        alike.setdefault(member[0].name, []).append(member)
    parameters = {slot: argument_name(argument) for slot, argument in arguments.items()}
    lines, functions, start = ["program = tl.program_id(0)"], [], 0
    for number, group in enumerate(alike.values()):
        functions.append(_function(group[0][0]))
        lines += _calls(number, group, start, parameters)
        start += sum(count for *_, count in group)
    head = ["# " + ", ".join(alike), "@jit", f"def {name}({', '.join(parameters.values())}):"]
    body = "\n\n\n".join([*functions, "\n".join([*head, *(f"    {line}" for line in lines)])]) + "\n"
    grid, config = ((to_expr(start), None),), Config((), num_warps=warps)
    fast = any(source.fast for source, *_ in members)
    text = prelude_for(body) + body
    return KernelSource(name, text, tuple(arguments.values()), grid, config, False, False, fast), tuple(arguments)


def _function(source: KernelSource) -> str:
    """The kernel as a function of its instance."""
    body = source.text[source.text.index(f"@jit\ndef {source.name}(") :].rstrip("\n")
    body = body.replace(f"def {source.name}(", f"def {_called(source)}(instance, ", 1)
    return body.replace("tl.program_id(0)", "instance").replace("(instance, )", "(instance)")


def _called(source: KernelSource) -> str:
    return f"instance_of_{source.name}"


def _calls(number: int, group: Sequence[Member], start: int, parameters: dict[str, str]) -> list[str]:
    """The branch of members that differ in their pointers alone."""
    source, _, count = group[0]
    end = start + count * len(group)
    member, instance = f"member{number}", f"instance{number}"
    lines = [f"{member} = (program - {start}) // {count}", f"{instance} = (program - {start}) % {count}"]
    chosen = []
    for k in range(len(source.arguments)):
        own = [parameters[slots[k]] for _, slots, _ in group]
        if len(set(own)) == 1:
            chosen.append(own[0])
            continue
        chosen.append(f"a{number}_{k}")
        lines.append(f"{chosen[-1]} = {own[0]}")
        lines += [f"{chosen[-1]} = tl.where({member} == {j}, {p}, {chosen[-1]})" for j, p in enumerate(own) if j]
    blocks = [str(size) for _, size in source.config.blocks]
    lines.append(f"{_called(source)}({', '.join([instance, *chosen, *blocks])})")
    return [f"if (program >= {start}) & (program < {end}):", *(f"    {line}" for line in lines)]
