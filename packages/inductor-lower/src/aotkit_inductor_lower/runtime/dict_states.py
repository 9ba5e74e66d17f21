"""Whether dictionaries are as they were at some time, thousands of them in microseconds.

Python 3.11 gives each state of each dictionary a number that no other one has (see Note [What a walk reads] in
:mod:`.object_walk`, which makes sure of it). Native code compares these numbers with those of before. Other Pythons
have no such numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .argument_reader import array_of, loaded_function
from .object_walk import state_place

__all__ = ["DictStates"]

_TEXT = """
define i64 @differs(ptr %dicts, ptr %states, i64 %count) {
entry:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %next, label %done

next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %seen = phi i64 [ 0, %entry ], [ %seen.next, %next ]
  %dict.at = getelementptr ptr, ptr %dicts, i64 %i
  %dict = load ptr, ptr %dict.at
  %now.at = getelementptr i8, ptr %dict, i64 PLACE
  %now = load i64, ptr %now.at
  %then.at = getelementptr i64, ptr %states, i64 %i
  %then = load i64, ptr %then.at
  %change = xor i64 %now, %then
  %seen.next = or i64 %seen, %change
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  br i1 %more, label %next, label %done

done:
  %all = phi i64 [ 0, %entry ], [ %seen.next, %next ]
  ret i64 %all
}
"""


class DictStates:
    """The states of some dictionaries now, which are kept. Safe under threads."""

    __slots__ = ("_count", "_differs", "_held", "_place", "_places", "_states")

    def __init__(self, dicts: Sequence[dict[Any, Any]], place: int, differs: Callable[..., int]) -> None:
        self._held, self._count, self._differs, self._place = tuple(dicts), len(dicts), differs, place
        self._places, self._states = array_of([id(each) for each in dicts]), array_of(self._now())

    @staticmethod
    def of(dicts: Sequence[dict[Any, Any]]) -> DictStates | None:
        """``None`` where Python doesn't tell states of dictionaries."""
        place = state_place()
        differs = None if place is None else _compiled(place)
        return None if place is None or differs is None else DictStates(dicts, place, differs)

    def unchanged(self) -> bool:
        """Whether all of them are as they were."""
        return not self._differs(self._places, self._states, self._count)

    def changed(self) -> dict[int, int]:
        """The states that differ now, by which dictionary it is."""
        pairs = zip(self._states, self._now(), strict=False)
        return {number: now for number, (was, now) in enumerate(pairs) if was != now}

    def note(self, changed: Mapping[int, int]) -> None:
        """Let these states be what later ones are compared with."""
        for number, state in changed.items():
            self._states[number] = state

    def _now(self) -> list[int]:
        return [ctypes.c_uint64.from_address(id(each) + self._place).value for each in self._held]


@functools.cache
def _compiled(place: int) -> Callable[..., int] | None:
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    differs: Callable[..., int] | None = loaded_function(_TEXT.replace("PLACE", str(place)), (), "differs", kind)
    return differs
