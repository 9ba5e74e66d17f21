"""The addresses of a program's constants, written to a frame in one native pass.

``.data = `` and ``set_`` give a tensor other memory, and its old one may be gone, so a call asks each constant where it
lies. From Python that is a call for each, and a frozen model has hundreds. What is read of a tensor is a part of what
an argument is read for, in the same way; see Note [What is read of an argument].
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from .argument_reader import array_of, loaded_function, places

__all__ = ["MANY_CONSTANTS", "unwritten_constants"]

MANY_CONSTANTS = 16  # from here on it pays to compile the pass, which a process does once


def unwritten_constants(tensors: Sequence[torch.Tensor], slots: Sequence[int]) -> Callable[[int], bool]:
    """A function that writes the addresses of these tensors into these words of a frame, of which it is given the
    address. It returns whether that is left to do, which it always is where there is no native function."""
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided for t in tensors)
    write = _compiled() if plain and len(tensors) >= MANY_CONSTANTS else None
    if write is None:
        return lambda frame: True
    held, words = tuple(tensors), array_of(slots)
    state = array_of([len(held), ctypes.addressof(words)])
    place = ctypes.addressof(state)

    def unwritten(frame: int, kept: object = (words, state)) -> bool:
        return write(held, place, frame) != 0

    return unwritten


@functools.cache
def _compiled() -> Callable[[tuple[torch.Tensor, ...], int, int], int] | None:
    found = places()
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    imports = ("PyTuple_GetItem", "aoti_torch_get_data_ptr")
    return None if found is None else loaded_function(_text(found[0]), imports, "write", kind)


def _text(tensor_at: int) -> str:
    """LLVM text of ``write(tuple, state, frame)``, which returns 1 if torch has no address for one."""
    return f"""
declare ptr @PyTuple_GetItem(ptr, i64)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)

define i64 @write(ptr %tensors, ptr %state, ptr %frame) {{
entry:
  %handle = alloca ptr
  %out = alloca i64
  %count = load i64, ptr %state
  %slots.at = getelementptr i64, ptr %state, i64 1
  %slots = load ptr, ptr %slots.at
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %known ]
  %item = call ptr @PyTuple_GetItem(ptr %tensors, i64 %i)
  %impl.at = getelementptr i8, ptr %item, i64 {tensor_at}
  %impl = load ptr, ptr %impl.at
  store ptr %impl, ptr %handle
  %failed = call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %out)
  %is.known = icmp eq i32 %failed, 0
  br i1 %is.known, label %known, label %no
known:
  %address = load i64, ptr %out
  %slot.at = getelementptr i64, ptr %slots, i64 %i
  %slot = load i64, ptr %slot.at
  %place = getelementptr i64, ptr %frame, i64 %slot
  store i64 %address, ptr %place
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  br i1 %more, label %next, label %yes
yes:
  ret i64 0
no:
  ret i64 1
}}
"""
