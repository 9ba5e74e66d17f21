"""Kernels that sort rows, known by the shape of Note [A sort as a nest] in :mod:`...lowering.sort_nests`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ...ir import Buffer, BufferKind, CheckedIndex, Compute, Const, DType, ExternCall, Index, Instr, Load, Store
from ...ir.walk import operands
from ...kernel_ir.nodes import Kernel
from ...kernel_ir.walk import PerfectNest, perfect_nests
from ...kernel_passes.normal_form import kernel_of
from ...lowering.sort_nests import Sort
from ...ops.dtypes import torch_name
from ...symbolic import Expr, Symbol, to_expr

__all__ = ["SortSite", "sort_site"]

#: What a key of a type has: how many bits above how many that follow from these, and its least value; of a descending
#: sort all bits are turned over.
_KEYS: Mapping[DType, tuple[int, int, int]] = MappingProxyType(
    {
        DType.F64: (64, 0, -(1 << 63)),
        DType.I64: (64, 0, -(1 << 63)),
        DType.F32: (32, 0, -(1 << 31)),
        DType.I32: (32, 0, -(1 << 31)),
        DType.BF16: (16, 16, -(1 << 31)),
        DType.F16: (19, 13, -(1 << 31)),  # as a float32, whose exponent has three bits more
        DType.I16: (16, 0, -(1 << 15)),
        DType.I8: (8, 0, -(1 << 7)),
        DType.U8: (8, 0, 0),
        DType.BOOL: (1, 0, 0),
    }
)
_COUNT = 64  # elements of the rows whose kernels say what the shapes are


@dataclass(frozen=True, slots=True)
class SortSite:
    """The sort that a kernel is. ``keys`` and ``ranks``: scratch memory of eight bytes an element. ``make``: what makes
    the value ``key`` of the element at ``element``; ``finish``: what stores the element at ``place`` as the one of rank
    ``rank``. A key of a ``dtype`` is ``bits`` bits from ``drop`` on, above ``least``."""

    count: Expr
    keys: str
    ranks: str
    make: tuple[Instr, ...]
    key: str
    element: Symbol
    finish: tuple[Instr, ...]
    place: Symbol
    rank: str
    dtype: DType
    bits: int
    drop: int
    least: int


def sort_site(kernel: Kernel) -> SortSite | None:
    """The sort that a kernel in normal form is; ``None`` for any other kernel."""
    try:
        nests = perfect_nests(kernel)
    except ValueError:
        return None
    if len(kernel.scratch) != 2 or [len(nest.loops) for nest in nests] != [1, 1, 2, 1]:
        return None
    loaded = [instr.dtype for instr in nests[0].body if isinstance(instr, Load)]
    if len(loaded) != 1:
        return None
    (dtype,), shape = loaded, _shape(nests)
    for descending in (False, True):
        if shape == _shape_of(dtype, descending):
            found = _site(nests, dtype, descending)
            return found if {found.keys, found.ranks} == {each.name for each in kernel.scratch} else None
    return None


def _site(nests: tuple[PerfectNest, ...], dtype: DType, descending: bool) -> SortSite:
    make, _, _, finish = nests
    (element,), (place,) = make.loops, finish.loops
    stored, (loaded, checked, *stores) = make.body[-1], finish.body
    assert isinstance(stored, Store) and isinstance(loaded, Load) and isinstance(checked, CheckedIndex)
    bits, drop, least = _KEYS[dtype]
    return SortSite(
        count=element.extent,
        keys=stored.buffer,
        ranks=loaded.buffer,
        make=make.body[:-1],
        key=stored.value,
        element=Symbol(element.symbol),
        finish=tuple(stores),
        place=Symbol(place.symbol),
        rank=checked.result,
        dtype=dtype,
        bits=bits,
        drop=drop,
        least=~(least + (1 << (bits + drop)) - 1) if descending else least,
    )


@lru_cache(maxsize=32)
def _shape_of(dtype: DType, descending: bool) -> tuple[object, ...]:
    """The shape of the kernel of a sort, see :func:`_shape`."""
    call = ExternCall("sort", "", (), (), ("values", "places"))
    sizes, strides = (to_expr(3), to_expr(_COUNT)), (to_expr(_COUNT), to_expr(1))
    types = {"x": dtype, "values": dtype, "places": DType.I64}
    made = [Buffer(name, torch_name(kind), sizes, strides, BufferKind.TEMPORARY) for name, kind in types.items()]
    x, values, places = made
    nest, room = Sort(call, x, values, places, 1, descending).nest()
    return _shape(perfect_nests(kernel_of(nest, {buffer.name: buffer for buffer in (*made, *room)})))


def _shape(nests: tuple[PerfectNest, ...]) -> tuple[object, ...]:
    """What nests compute, whatever names, sizes and layouts are: instructions with the positions of what they take; of
    an access which memory it is, and which of the nest's loops move it. All loops are as long, and each memory is read
    and written from one start on."""
    memories: dict[str, int] = {}
    starts: dict[str, set[tuple[Expr, Expr | None]]] = {}
    extents: set[Expr] = set()
    found: list[object] = []
    for nest in nests:
        values: dict[str, int] = {}
        symbols = [Symbol(loop.symbol) for loop in nest.loops]
        extents |= {loop.extent for loop in nest.loops}
        for position, instr in enumerate(nest.body):
            given = tuple(values.get(name, -1) for name in operands(instr))
            found.append((type(instr).__name__, given, *_details(instr, symbols)))
            if isinstance(instr, CheckedIndex):
                extents.add(instr.size)
            if isinstance(instr, Load | Store):
                found.append(memories.setdefault(instr.buffer, len(memories)))
                starts.setdefault(instr.buffer, set()).add(_line(instr.indices[0], symbols, values))
            if not isinstance(instr, Store):
                values[instr.result] = position
    side_by_side = [_steps(starts[name]) == {to_expr(1)} for name, number in memories.items() if number in (1, 2)]
    return (*found, len(extents), *(len(each) for each in starts.values()), *side_by_side)


def _details(instr: Instr, symbols: Sequence[Symbol]) -> tuple[object, ...]:
    """What an instruction says beside its operands."""
    moved_by = tuple(tuple(s in e.symbols for s in symbols) for e in _expressions(instr))
    if isinstance(instr, Store):
        return (instr.mode, instr.mask is None, moved_by)
    if isinstance(instr, CheckedIndex):
        return ()
    own: tuple[object, ...] = (instr.dtype,)
    if isinstance(instr, Load):
        return (*own, instr.mask is None, moved_by)
    if isinstance(instr, Index):
        return (*own, instr.expr.symbol is not None, moved_by)
    if isinstance(instr, Const):
        return (*own, repr(instr.value), instr.negative_zero)
    return (*own, instr.op) if isinstance(instr, Compute) else (*own, repr(instr))


def _expressions(instr: Instr) -> tuple[Expr, ...]:
    if isinstance(instr, Load | Store):
        return instr.indices
    return (instr.expr,) if isinstance(instr, Index) else ()


def _line(offset: Expr, symbols: Sequence[Symbol], values: Mapping[str, int]) -> tuple[Expr, Expr | None]:
    """Where an access begins, and its step: along a loop, or from one rank to the next."""
    moving = [s for s in offset.symbols if s in symbols or s.name in values]
    if len(moving) != 1:
        return offset, None
    return offset.substitute({moving[0]: to_expr(0)}), offset.coefficient(moving[0])


def _steps(lines: set[tuple[Expr, Expr | None]]) -> set[Expr | None]:
    return {step for _, step in lines}
