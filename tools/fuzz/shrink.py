"""Smaller programs with the same outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from .compare import observe
from .program import Program

__all__ = ["shrink", "smallest"]

Found = TypeVar("Found")


def shrink(program: Program, failing: Callable[[Program], bool], tries: int = 150) -> Program:
    """A smaller program for which ``failing`` still holds, by leaving out one thing after another."""
    return smallest(program, _smaller, lambda smaller: _runs(smaller) and failing(smaller), tries)


def smallest(
    found: Found, smaller: Callable[[Found], Iterable[Found]], holds: Callable[[Found], bool], tries: int
) -> Found:
    """``found``, replaced by the first ``smaller`` one that ``holds`` until none does or ``tries`` are used up."""
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in smaller(found):
            tries -= 1
            if tries <= 0:
                break
            if holds(candidate):
                found, progress = candidate, True
                break
    return found


def _runs(program: Program) -> bool:
    """Whether names resolve: a statement may have been left out that another one needs."""
    try:
        observe(program, program.function())
        program.graph()
    except (NameError, KeyError, IndexError, SyntaxError, RuntimeError, TypeError):
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.outputs)):
        yield replace(
            program, outputs=_without(program.outputs, index), ignored=tuple(i for i in program.ignored if i != index)
        )
    if program.afterwards is not None:
        yield replace(program, afterwards=None)
    if program.ignored:
        yield replace(program, ignored=())
    for index in reversed(range(len(program.body))):
        yield replace(program, body=_without(program.body, index))
        name, assigned, expression = program.body[index].partition(" = ")
        if assigned and name.isidentifier():  # leave the operation out, use one of its operands instead
            for operand in dict.fromkeys(re.findall(r"\b[av]\d+\b", expression)):
                body = tuple(re.sub(rf"\b{name}\b", operand, s) for s in _without(program.body, index))
                yield replace(
                    program, body=body, outputs=tuple(re.sub(rf"\b{name}\b", operand, o) for o in program.outputs)
                )
        if program.body[index].startswith("with "):
            inner = program.body[index].splitlines()[1:]
            plain = tuple(line.strip() for line in inner)
            yield replace(program, body=(*program.body[:index], *plain, *program.body[index + 1 :]))
            for number in range(len(inner) if len(inner) > 1 else 0):
                block = "\n".join(["with torch.no_grad():", *_without(tuple(inner), number)])
                yield replace(program, body=(*program.body[:index], block, *program.body[index + 1 :]))
    if program.dynamic:
        yield replace(program, dynamic=False)
    if not program.training:
        yield replace(program, training=True)
    if program.entry != "graph":
        yield replace(program, entry="graph")
    for index in range(len(program.inputs)):
        yield replace(program, inputs=_without(program.inputs, index))
    for index in range(len(program.setup)):
        yield replace(program, setup=_without(program.setup, index))
        for dropped in (".detach().requires_grad_()", ".requires_grad_()", ".clone()", "[..., ::2]", ".t()", "[1:]"):
            if dropped in program.setup[index]:
                line = program.setup[index].replace(dropped, "")
                yield replace(program, setup=(*program.setup[:index], line, *program.setup[index + 1 :]))


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]
