"""Launches a whole segment from one native call.

Note [One call per segment]
    Launching a kernel from Python costs microseconds: arguments are packed and looked at, each time. Here everything
    about a launch but addresses and sizes is known when the graph is bound. So a table says, per launch, which entries
    of the call's frame are its arguments, and a small native function, the same for all graphs, walks the table and
    calls the driver's launch function. Python is entered once per stretch between two ATen calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...native import LoadedObject, compile_for, host_processor, load_object, machine_for
from .errors import TritonError

__all__ = ["MOST_ARGUMENTS", "LaunchRow", "LaunchTable", "segment_runner"]

MOST_ARGUMENTS = 512  # 4 KiB of parameters
_HEADER = 5  # entries of a row before its argument slots

_TEXT = """\
define i64 @launch_kernels(ptr %launch, ptr %table, i64 %count, ptr %frame, ptr %stream) {
entry:
  %params = alloca [MOST x ptr]
  br label %next

next:
  %k = phi i64 [ 0, %entry ], [ %k1, %done ]
  %row = phi ptr [ %table, %entry ], [ %following, %done ]
  %finished = icmp eq i64 %k, %count
  br i1 %finished, label %success, label %launch_one

launch_one:
  %function_number = load i64, ptr %row
  %function = inttoptr i64 %function_number to ptr
  %grid_entry = getelementptr i64, ptr %row, i64 1
  %grid_slot = load i64, ptr %grid_entry
  %grid_place = getelementptr i64, ptr %frame, i64 %grid_slot
  %grid = load i64, ptr %grid_place
  %threads_entry = getelementptr i64, ptr %row, i64 2
  %threads64 = load i64, ptr %threads_entry
  %shared_entry = getelementptr i64, ptr %row, i64 3
  %shared64 = load i64, ptr %shared_entry
  %arguments_entry = getelementptr i64, ptr %row, i64 4
  %arguments = load i64, ptr %arguments_entry
  %slots = getelementptr i64, ptr %row, i64 5
  br label %argument

argument:
  %j = phi i64 [ 0, %launch_one ], [ %j1, %fill ]
  %all = icmp eq i64 %j, %arguments
  br i1 %all, label %go, label %fill

fill:
  %slot_entry = getelementptr i64, ptr %slots, i64 %j
  %slot = load i64, ptr %slot_entry
  %place = getelementptr i64, ptr %frame, i64 %slot
  %param = getelementptr ptr, ptr %params, i64 %j
  store ptr %place, ptr %param
  %j1 = add i64 %j, 1
  br label %argument

go:
  %following = getelementptr i64, ptr %slots, i64 %arguments
  %k1 = add i64 %k, 1
  %empty = icmp eq i64 %grid, 0
  br i1 %empty, label %done, label %call

call:
  %grid32 = trunc i64 %grid to i32
  %threads = trunc i64 %threads64 to i32
  %shared = trunc i64 %shared64 to i32
  %status = call i32 %launch(ptr %function, i32 %grid32, i32 1, i32 1, i32 %threads, i32 1, i32 1, i32 %shared,
                             ptr %stream, ptr %params, ptr null)
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %failed, label %done

done:
  br label %next

failed:
  %shifted = shl i64 %k1, 32
  %wide = zext i32 %status to i64
  %both = or i64 %shifted, %wide
  ret i64 %both

success:
  ret i64 0
}
"""


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One launch. ``function``: the driver's handle; ``grid`` and ``arguments``: positions in the frame."""

    function: int
    grid: int
    threads: int
    shared: int
    arguments: tuple[int, ...]


class LaunchTable:
    """The rows of one segment in memory."""

    def __init__(self, rows: Sequence[LaunchRow]) -> None:
        entries: list[int] = []
        for row in rows:
            if len(row.arguments) > MOST_ARGUMENTS:
                raise TritonError(
                    f"a kernel takes {len(row.arguments)} arguments, and a launch passes {MOST_ARGUMENTS} at most; "
                    "lower the option max_fusion_instructions"
                )
            entries += [row.function, row.grid, row.threads, row.shared, len(row.arguments), *row.arguments]
        self._memory = (ctypes.c_int64 * max(1, len(entries)))(*entries)
        self.count = len(rows)
        self.address = ctypes.addressof(self._memory)


@cache
def _launch_function() -> tuple[Any, LoadedObject]:
    code = compile_for(machine_for(*host_processor()), _TEXT.replace("MOST", str(MOST_ARGUMENTS)))
    loaded = load_object(code, (), ("launch_kernels",))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(number, pointer, pointer, number, pointer, pointer)
    return kind(loaded.addresses()["launch_kernels"]), loaded


def segment_runner(
    launch: int, table: LaunchTable, mend: Callable[[int], bool] = lambda status: False
) -> Callable[[int, int], int]:
    """A function of (frame address, stream) that launches the table through ``launch``, the address of a function with
    the signature of ``cuLaunchKernel``. It gives 0, or ``(position + 1) << 32 | status`` of the first that failed.
    ``mend(status)``: whether nothing was launched and it may be tried again."""
    run, _ = _launch_function()
    address, count = table.address, table.count

    def segment(frame: int, stream: int) -> int:
        status: int = run(launch, address, count, frame, stream)
        if status and mend(status & 0xFFFFFFFF):
            status = run(launch, address, count, frame, stream)
        return status

    segment.keep_alive = table  # type: ignore[attr-defined]
    return segment
