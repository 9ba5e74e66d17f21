"""What the call of a program holds at each step, in any order of the steps.

Held are temporaries from the first step that writes them, or a view of them, to the last that uses them, and results to
the end. Inputs belong to the caller, but for those that are released to the call (what a forward saved for its
backward): they are held from the beginning to the last step that uses them. Unknown sizes count as 64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir import Alias, BufferKind, BufferRef, ExternCall, Program
from ..ir.walk import buffer_args, step_reads, step_writes
from .collectives import Collectives
from .nests import buffer_bytes

__all__ = ["Lives"]


@dataclass(frozen=True, slots=True)
class Lives:
    """What each step uses of the memory that the call holds. ``kept``: results, which stay. ``given``: released inputs,
    which are there before the first step."""

    uses: tuple[tuple[str, ...], ...]
    nbytes: dict[str, int]
    kept: frozenset[str]
    given: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program, released: frozenset[str] = frozenset()) -> Lives:
        """Look what each step uses. ``released``: inputs whose memory goes with the last use."""
        root = {b.name: b.name for b in program.buffers}
        collectives = Collectives.of(program.steps)
        for position, step in enumerate(program.steps):
            if isinstance(step, Alias):
                root[step.result] = root[step.base]
            elif isinstance(step, ExternCall) and position in collectives.waits:  # it gives back what it waited for
                root.update((name, root[next(buffer_args(step.args))]) for name in step.results if name is not None)
        owned = (BufferKind.TEMPORARY, BufferKind.OUTPUT)
        nbytes = {}
        for buffer in program.buffers:
            held = buffer.kind in owned or (buffer.kind is BufferKind.INPUT and buffer.name in released)
            if held and root[buffer.name] == buffer.name:
                nbytes[buffer.name] = buffer_bytes(buffer)
        outputs = frozenset(root[out.name] for out in program.outputs if isinstance(out, BufferRef))
        uses = []
        for position, step in enumerate(program.steps):
            names = () if isinstance(step, Alias) else (*step_reads(step), *step_writes(step))
            if position in collectives.waits:  # Note [While a collective runs]
                names = (*names, *collectives.in_use(program.steps, position)[0])
            uses.append(tuple(dict.fromkeys(r for r in (root[name] for name in names) if r in nbytes)))
        return Lives(tuple(uses), nbytes, outputs, released & nbytes.keys())

    def peak(self, order: Iterable[int]) -> int:
        """The most bytes held at once."""
        left, born = self.counts(), set(self.given)
        held = most = self.given_bytes
        for position in order:
            for name in self.uses[position]:
                if name not in born:
                    born.add(name)
                    held += self.nbytes[name]
            most = max(most, held)
            for name in self.uses[position]:
                left[name] -= 1
                if left[name] == 0 and name not in self.kept:
                    held -= self.nbytes[name]
        return most

    @property
    def given_bytes(self) -> int:
        """What is held before the first step."""
        return sum(self.nbytes[name] for name in self.given)

    def bound(self) -> int:
        """Bytes that every order holds at some moment: those before the first step, of one step, or all results."""
        one = max((sum(self.nbytes[name] for name in names) for names in self.uses), default=0)
        return max(self.given_bytes, one, sum(self.nbytes[name] for name in self.kept if name in self.nbytes))

    def counts(self) -> dict[str, int]:
        """How many steps use each buffer."""
        counts = dict.fromkeys(self.nbytes, 0)
        for names in self.uses:
            for name in names:
                counts[name] += 1
        return counts
