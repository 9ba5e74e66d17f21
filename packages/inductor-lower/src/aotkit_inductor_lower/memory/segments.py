"""Which loop nests one native call runs."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import ExternCall, LoopNest, Program

__all__ = ["Segment", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Nests whose kernels the native function ``function`` runs one after the other."""

    function: str
    nests: tuple[LoopNest, ...]


def segments(program: Program, separate: bool = False) -> tuple[Segment, ...]:
    """The segments of a program, in order: only an ATen call ends one, or, with ``separate``, every kernel. What
    kernels do through an alias they do in its memory, so an alias is no step of native code."""
    runs: list[list[LoopNest]] = [[]]
    for step in program.steps:
        if isinstance(step, LoopNest):
            runs[-1].append(step)
            if separate:
                runs.append([])
        elif isinstance(step, ExternCall):
            runs.append([])
    return tuple(Segment(f"segment_{number}", tuple(nests)) for number, nests in enumerate(filter(None, runs)))
