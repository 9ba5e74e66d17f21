"""Hundreds of tensors of a call looked at in one native pass: are they as compiled code takes them, and where do they
lie.

Note [What is read of an argument]
    Between two tokens of a language model each weight is asked for its type, sizes, strides, ``requires_grad`` and
    address: any of them may have been replaced, resized, moved or given other memory since the last token. From Python
    each question is a call. Here one native function asks all of them, in every call anew: nothing is concluded from an
    object being the one of the last call, so memory that another tensor got in the meantime, ``set_``, ``resize_`` and
    ``.data = `` are all seen. What is asked goes through functions that torch exports (its C interface for compiled
    code, and ``TensorImpl::requires_grad``). Two things have none: where a Python object holds its tensor, and a
    tensor's dispatch keys, which tell lazy conjugation, negation, other layouts and wrappers. Their places are looked
    up in tensors whose answers are known, and where they are not found the same way in all of them there is no reader.
    The pass holds the interpreter's lock, so it sees one state of all tensors.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ArgumentReader", "Placement", "array_of", "loaded_function", "places"]

_WORD = 8
_KEYS_WITHIN = 208  # bytes of a TensorImpl that are searched for its dispatch keys
_ROW = 6  # words: class, dispatch keys, dtype, requires_grad, dimensions, address of sizes and strides
_KINDS = (torch.Tensor, torch.nn.Parameter)

_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_IMPORTS = (
    "PyTuple_GetItem",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    _REQUIRES_GRAD,
)

Look = Callable[[tuple[Any, ...], int], int]


class Placement(NamedTuple):
    """Where the arguments of a call lie.

    Attributes:
        addresses: of their first elements, in order.
        before: addresses of an earlier call.
        moved: where the two differ.
    """

    addresses: tuple[int, ...]
    before: tuple[int, ...]
    moved: tuple[int, ...]


class ArgumentReader:
    """Asks whether tensors have the classes, element types, sizes, strides, ``requires_grad`` and dispatch keys of
    ``values``, and no two of them are one; see Note [What is read of an argument]. Safe under threads."""

    __slots__ = ("_count", "_free", "_look", "_numbers", "_rows")

    def __init__(self, values: Sequence[torch.Tensor], look: Look) -> None:
        self._look, self._count = look, len(values)
        numbers = [[*value.shape, *value.stride()] for value in values]
        self._numbers = array_of([number for row in numbers for number in row])
        rows, place = [], ctypes.addressof(self._numbers)
        for value, held in zip(values, numbers, strict=True):
            kind = _DTYPES[value.dtype]
            rows += [id(type(value)), _keys(value), kind, int(value.requires_grad), value.dim(), place]
            place += len(held) * _WORD
        self._rows = array_of(rows)
        self._free: list[_Memory] = []

    @staticmethod
    def of(values: Sequence[Any]) -> ArgumentReader | None:
        """A reader for tensors like these, which are on a device that has no number and all different; ``None`` where
        there is none."""
        plain = all(type(v) in _KINDS and v.device.index is None and v.dtype in _DTYPES for v in values)
        look = _compiled() if values and plain else None
        if look is None:
            return None
        reader = ArgumentReader(values, look)
        found = reader.read(tuple(values))
        if found is None or found.addresses != tuple(v.data_ptr() for v in values):
            return None
        nowhere = any(v.numel() and not v.data_ptr() for v in values)  # as ``meta`` tensors are
        return None if nowhere else reader

    def read(self, values: tuple[Any, ...]) -> Placement | None:
        """Where these lie, or ``None`` if one of them is not as it was, or two are one."""
        if len(values) != self._count:
            return None
        try:
            memory = self._free.pop()
        except IndexError:  # the first call, or other threads have them
            memory = _Memory(self._count, self._rows)
        count = self._look(values, memory.address)
        if count < 0:
            return None  # the memory is half written, and dropped
        placement = memory.placement
        if count or placement.moved:
            before = placement.addresses
            placement = memory.placement = Placement(memory.addresses_now(count), before, tuple(memory.moved[:count]))
        self._free.append(memory)
        return placement


class _Memory:
    """What the native function compares with and writes to; each running call has its own."""

    __slots__ = ("_changed", "_impls", "_items", "_objects", "_state", "address", "addresses", "moved", "placement")

    def __init__(self, count: int, rows: Any) -> None:
        self._items, self._impls, self._objects, self.addresses, self.moved, self._changed = (
            array_of([0] * count) for _ in range(6)
        )
        arrays = (rows, self._items, self._impls, self._objects, self.addresses, self.moved, self._changed)
        self._state = array_of([count, *map(ctypes.addressof, arrays)])
        self.address = ctypes.addressof(self._state)
        self.placement = Placement((0,) * count, (), ())

    def addresses_now(self, moved: int) -> tuple[int, ...]:
        """Those of the last call, where only so many have moved."""
        before = self.placement.addresses
        if moved > len(before) // 4:
            return tuple(self.addresses)
        if not moved:
            return before
        patched = list(before)
        for k in self.moved[:moved]:
            patched[k] = self.addresses[k]
        return tuple(patched)


def array_of(numbers: Sequence[int]) -> Any:
    """Words, of which there is at least one, as native code reads them."""
    return (ctypes.c_uint64 * max(1, len(numbers)))(*numbers)


def _keys(value: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(value).raw_repr())


@functools.cache
def _compiled() -> Look | None:
    """The native function, or ``None`` where torch or Python are not as it takes them."""
    found = places()
    kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.py_object, ctypes.c_void_p)
    return None if found is None else loaded_function(_text(*found), _IMPORTS, "look", kind)


def loaded_function(text: str, imports: Sequence[str], name: str, kind: Any) -> Any:
    """A function of LLVM text as one of ctypes; ``None`` where it calls what isn't there: another C++ ABI, or a torch
    or Python without that interface."""
    from ..native import compile_for, ensure_llvm, host_processor, load_object, machine_for  # loads LLVM

    ensure_llvm()
    try:
        loaded = load_object(compile_for(machine_for(*host_processor()), text), imports, [name])
    except (LookupError, RuntimeError):
        return None
    function = kind(loaded.addresses()[name])
    function.keep_alive = loaded
    return function


def places() -> tuple[int, int] | None:
    """Bytes from the beginning of a Python object to its tensor, and from that of a tensor to its dispatch keys."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or sys.maxsize < 2**32:
        return None
    samples = _samples()
    if any(_word(id(value), _WORD) != id(type(value)) for value in samples):
        return None
    size = torch.Tensor.__basicsize__
    ours = [k for k in range(2 * _WORD, size, _WORD) if all(_word(id(v), k) == v._cdata for v in samples)]
    if len(ours) != 1 or ours[0] != 2 * _WORD:  # further back, a flag says whether the object owns its tensor
        return None
    keys = {value._cdata: _keys(value) for value in samples}
    for place in range(_WORD, _KEYS_WITHIN, _WORD):
        if all(_word(impl, place) == found for impl, found in keys.items()):
            return ours[0], place
    return None


def _samples() -> list[torch.Tensor]:
    """Tensors of different kinds, so that a word that is right for all of them is the right one."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(2, device="cpu", requires_grad=True)
        lazy = torch.ones(2, dtype=torch.complex64, device="cpu").conj()
        parameter = torch.nn.Parameter(torch.ones(2, 3, device="cpu"))
        return [leaf, leaf * 2, lazy, lazy.imag, parameter, torch.ones(2, dtype=torch.int8, device="cpu")]


def _word(address: int, offset: int) -> int:
    return ctypes.c_uint64.from_address(address + offset).value


#: Numbers of element types as torch's C interface has them.
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}


def _text(tensor_at: int, keys_at: int) -> str:
    """LLVM text of ``look(tuple, state)``, which returns the number of tensors that moved, or -1. That is five loops:
    the tuple's items, what is at the front of each object (loads that the processor can overlap, and prefetches of the
    tensors), what torch says of each, whether sizes and strides are the same, and whether an object that changed is
    there twice."""
    asked = "\n".join(
        f"""  %e.{name} = call i32 @aoti_torch_get_{name}(ptr %handle, ptr %out.{name})
  %f.{name} = icmp ne i32 %e.{name}, 0
  br i1 %f.{name}, label %no, label %after.{name}
after.{name}:"""
        for name in ("dtype", "dim", "data_ptr", "sizes", "strides")
    )
    words = ("count", "rows", "items", "impls", "objects", "addresses", "moved", "changed")
    state = "\n".join(
        f"  %at.{name} = getelementptr i64, ptr %state, i64 {k}\n  %{name} = load "
        f"{'i64' if name == 'count' else 'ptr'}, ptr %at.{name}"
        for k, name in enumerate(words)
    )
    fetched = "\n".join(
        f"  %line{k} = getelementptr i8, ptr %impl, i64 {64 * k}\n"
        f"  call void @llvm.prefetch.p0(ptr %line{k}, i32 0, i32 3, i32 1)"
        for k in range(4)
    )
    return f"""
declare ptr @PyTuple_GetItem(ptr, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare zeroext i1 @{_REQUIRES_GRAD}(ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)

define i64 @look(ptr %values, ptr %state) {{
entry:
  %out.dtype = alloca i32
  %out.dim = alloca i64
  %out.data_ptr = alloca i64
  %out.sizes = alloca ptr
  %out.strides = alloca ptr
{state}
  br label %take
take:
  %a = phi i64 [ 0, %entry ], [ %a.next, %take ]
  %taken = call ptr @PyTuple_GetItem(ptr %values, i64 %a)
  call void @llvm.prefetch.p0(ptr %taken, i32 0, i32 3, i32 1)
  %item.to = getelementptr ptr, ptr %items, i64 %a
  store ptr %taken, ptr %item.to
  %a.next = add i64 %a, 1
  %a.more = icmp slt i64 %a.next, %count
  br i1 %a.more, label %take, label %front
front:
  %b = phi i64 [ 0, %take ], [ %b.next, %front.next ]
  %changes = phi i64 [ 0, %take ], [ %changes.next, %front.next ]
  %item.at = getelementptr ptr, ptr %items, i64 %b
  %item = load ptr, ptr %item.at
  %class.at = getelementptr i8, ptr %item, i64 {_WORD}
  %class = load i64, ptr %class.at
  %b.row.word = mul i64 %b, {_ROW}
  %b.row = getelementptr i64, ptr %rows, i64 %b.row.word
  %class.wanted = load i64, ptr %b.row
  %class.same = icmp eq i64 %class, %class.wanted
  br i1 %class.same, label %held, label %no
held:
  %impl.at = getelementptr i8, ptr %item, i64 {tensor_at}
  %impl = load ptr, ptr %impl.at
{fetched}
  %impl.to = getelementptr ptr, ptr %impls, i64 %b
  store ptr %impl, ptr %impl.to
  %object.at = getelementptr ptr, ptr %objects, i64 %b
  %object = load ptr, ptr %object.at
  %object.same = icmp eq ptr %object, %item
  br i1 %object.same, label %front.next, label %other
other:
  store ptr %item, ptr %object.at
  %change.to = getelementptr i64, ptr %changed, i64 %changes
  store i64 %b, ptr %change.to
  br label %front.next
front.next:
  %more.changes = xor i1 %object.same, true
  %step = zext i1 %more.changes to i64
  %changes.next = add i64 %changes, %step
  %b.next = add i64 %b, 1
  %b.more = icmp slt i64 %b.next, %count
  br i1 %b.more, label %front, label %ask
ask:
  %i = phi i64 [ 0, %front.next ], [ %i.next, %asked ]
  %moves = phi i64 [ 0, %front.next ], [ %moves.next, %asked ]
  %i.row.word = mul i64 %i, {_ROW}
  %row = getelementptr i64, ptr %rows, i64 %i.row.word
  %i.impl.at = getelementptr ptr, ptr %impls, i64 %i
  %i.impl = load ptr, ptr %i.impl.at
  %keys.at = getelementptr i8, ptr %i.impl, i64 {keys_at}
  %keys = load i64, ptr %keys.at
  %keys.row = getelementptr i64, ptr %row, i64 1
  %keys.wanted = load i64, ptr %keys.row
  %keys.same = icmp eq i64 %keys, %keys.wanted
  br i1 %keys.same, label %known, label %no
known:
  %handle = getelementptr ptr, ptr %impls, i64 %i
{asked}
  %dtype = load i32, ptr %out.dtype
  %dtype.wide = sext i32 %dtype to i64
  %dtype.row = getelementptr i64, ptr %row, i64 2
  %dtype.wanted = load i64, ptr %dtype.row
  %dtype.same = icmp eq i64 %dtype.wide, %dtype.wanted
  %grad = call zeroext i1 @{_REQUIRES_GRAD}(ptr %i.impl)
  %grad.wide = zext i1 %grad to i64
  %grad.row = getelementptr i64, ptr %row, i64 3
  %grad.wanted = load i64, ptr %grad.row
  %grad.same = icmp eq i64 %grad.wide, %grad.wanted
  %dim = load i64, ptr %out.dim
  %dim.row = getelementptr i64, ptr %row, i64 4
  %dim.wanted = load i64, ptr %dim.row
  %dim.same = icmp eq i64 %dim, %dim.wanted
  %same.0 = and i1 %dtype.same, %grad.same
  %same.1 = and i1 %same.0, %dim.same
  br i1 %same.1, label %numbers, label %no
numbers:
  %numbers.row = getelementptr i64, ptr %row, i64 5
  %wanted.sizes = load ptr, ptr %numbers.row
  %wanted.strides = getelementptr i64, ptr %wanted.sizes, i64 %dim
  %sizes = load ptr, ptr %out.sizes
  %strides = load ptr, ptr %out.strides
  %some = icmp sgt i64 %dim, 0
  br i1 %some, label %number, label %place
number:
  %d = phi i64 [ 0, %numbers ], [ %d.next, %number.next ]
  %size.at = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size.at
  %size.wanted.at = getelementptr i64, ptr %wanted.sizes, i64 %d
  %size.wanted = load i64, ptr %size.wanted.at
  %stride.at = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride.at
  %stride.wanted.at = getelementptr i64, ptr %wanted.strides, i64 %d
  %stride.wanted = load i64, ptr %stride.wanted.at
  %size.same = icmp eq i64 %size, %size.wanted
  %stride.same = icmp eq i64 %stride, %stride.wanted
  %number.same = and i1 %size.same, %stride.same
  br i1 %number.same, label %number.next, label %no
number.next:
  %d.next = add i64 %d, 1
  %d.more = icmp slt i64 %d.next, %dim
  br i1 %d.more, label %number, label %place
place:
  %address = load i64, ptr %out.data_ptr
  %address.at = getelementptr i64, ptr %addresses, i64 %i
  %address.before = load i64, ptr %address.at
  store i64 %address, ptr %address.at
  %moved.to = getelementptr i64, ptr %moved, i64 %moves
  store i64 %i, ptr %moved.to
  %is.moved = icmp ne i64 %address, %address.before
  %move = zext i1 %is.moved to i64
  br label %asked
asked:
  %moves.next = add i64 %moves, %move
  %i.next = add i64 %i, 1
  %i.more = icmp slt i64 %i.next, %count
  br i1 %i.more, label %ask, label %apart
apart:
  %any.changes = icmp sgt i64 %changes.next, 0
  br i1 %any.changes, label %change, label %yes
change:
  %c = phi i64 [ 0, %apart ], [ %c.next, %change.next ]
  %c.at = getelementptr i64, ptr %changed, i64 %c
  %c.place = load i64, ptr %c.at
  %c.item.at = getelementptr ptr, ptr %items, i64 %c.place
  %c.item = load ptr, ptr %c.item.at
  br label %twice
twice:
  %t = phi i64 [ 0, %change ], [ %t.next, %twice ]
  %times = phi i64 [ 0, %change ], [ %times.next, %twice ]
  %t.at = getelementptr ptr, ptr %items, i64 %t
  %t.item = load ptr, ptr %t.at
  %t.same = icmp eq ptr %t.item, %c.item
  %t.one = zext i1 %t.same to i64
  %times.next = add i64 %times, %t.one
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %count
  br i1 %t.more, label %twice, label %counted
counted:
  %once = icmp eq i64 %times.next, 1
  br i1 %once, label %change.next, label %no
change.next:
  %c.next = add i64 %c, 1
  %c.more = icmp slt i64 %c.next, %changes.next
  br i1 %c.more, label %change, label %yes
yes:
  ret i64 %moves.next
no:
  ret i64 -1
}}
"""
