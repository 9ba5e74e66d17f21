"""Which steps of a program start collectives, which wait for them, and what is in use in between.

Note [While a collective runs]
    A collective reads its arguments and writes its results until somebody has waited for it, also where the program
    uses neither any more. So a wait counts as a reader of what its collective reads, and as a writer of what it writes
    in place: nothing that overwrites the one, or uses the other, comes before it. Collectives start in the order of the
    program, whatever their groups: so all ranks start those of each group in the same order, one that runs eagerly
    included. A wait is a rank's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import ExternCall, Step
from ..ir.walk import buffer_args, step_reads
from ..ops.aten import collective_role

__all__ = ["Collectives"]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Positions of ``starts``, in order, and for the position of each wait that of its start in ``waits``; a wait for
    what another program started is not among them."""

    starts: tuple[int, ...]
    waits: dict[int, int]

    @staticmethod
    def of(steps: Sequence[Step | None]) -> Collectives:
        """Look for them."""
        starts: list[int] = []
        waits: dict[int, int] = {}
        started: dict[str, int] = {}
        for position, step in enumerate(steps):
            role = collective_role(step.target) if isinstance(step, ExternCall) else None
            if role is None:
                continue
            assert isinstance(step, ExternCall)
            if role == "start":
                starts.append(position)
                started.update((name, position) for name in step.results if name is not None)
            else:
                for name in buffer_args(step.args):
                    if name in started:
                        waits[position] = started[name]
        return Collectives(tuple(starts), waits)

    def in_use(self, steps: Sequence[Step | None], wait: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the collective of this ``wait`` reads, and what it writes in place."""
        step = steps[self.waits[wait]]
        assert isinstance(step, ExternCall)
        return tuple(step_reads(step)), step.mutates
