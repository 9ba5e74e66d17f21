"""Programs as JSON text and back, whether in one piece or in parts.

What programs in parts need is imported for these only: most processes that load a program load one in a single piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .codec import compiled_from_raw, compiled_to_raw
from .records import CompiledProgram

if TYPE_CHECKING:
    from .parts import Program

__all__ = ["program_from_json", "program_to_json", "programs_in"]


def programs_in(program: Program) -> Iterator[CompiledProgram]:
    """The compiled programs of all parts, in order; of a program that is in one piece, itself."""
    if isinstance(program, CompiledProgram):
        yield program
    else:
        for part in program.parts:
            yield from programs_in(part.program)


def program_to_json(program: Program) -> str:
    """A program, in parts or not, as JSON text."""
    if isinstance(program, CompiledProgram):
        raw = compiled_to_raw(program)
    else:
        from .parts import parts_to_raw

        raw = parts_to_raw(program)
    return json.dumps(raw, separators=(",", ":"))


def program_from_json(text: str) -> Program:
    """The inverse of :func:`program_to_json`. Raises ``ValueError`` for another format, and for a program in parts that
    does not hold together."""
    try:
        raw = json.loads(text)
        if isinstance(raw, dict) and isinstance(raw.get("format"), str):
            from .parts import parts_from_raw

            return parts_from_raw(raw)
        return compiled_from_raw(raw)
    except RecursionError as error:
        raise ValueError("the compiled program is nested too deep to be one of ours") from error
