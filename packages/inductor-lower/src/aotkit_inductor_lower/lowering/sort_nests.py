"""Sorts of long rows as loop nests: what ATen's stable sort computes.

Note [A sort as a nest]
    Each element becomes a key, an integer in eager's order (nan is the largest, zeros are equal). The rank of an
    element is how many keys are smaller, or equal and before it: there its value and its place are stored. So the nest
    of a row of ``n`` elements says ``n * n`` comparisons. No target runs it so: the CPU knows it by its shape
    (``targets/cpu/sort_site.py``) and sorts digit by digit, in the scratch memory that the nest has for keys and ranks.
    As it stands, any backend can run it, which is what the interpreters do.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ..ir import Arg, Buffer, BufferKind, BufferRef, DType, ExternCall, Literal, LoopNest
from ..ir.builder import BodyBuilder, NestBuilder, Value, loops
from ..ops.dtypes import dtype_from_torch_name, is_float, torch_name
from ..symbolic import Expr, to_expr

__all__ = ["STABLE_SORT", "Sort", "ordered", "sort_of"]

STABLE_SORT = "aten.sort.stable"


@dataclass(frozen=True, slots=True)
class Sort:
    """A stable sort of the rows of ``x`` along ``dim``: sorted ``values``, and the ``places`` that they had."""

    call: ExternCall
    x: Buffer
    values: Buffer
    places: Buffer
    dim: int
    descending: bool

    @property
    def count(self) -> Expr:
        """How many elements a row has."""
        return self.x.sizes[self.dim]

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        dtype = dtype_from_torch_name(self.x.dtype)
        assert dtype is not None
        return dtype

    @property
    def kept(self) -> tuple[Expr, ...]:
        """The sizes of the other dimensions."""
        return tuple(size for dim, size in enumerate(self.x.sizes) if dim != self.dim)

    def nest(self, taken: Container[str] = ()) -> tuple[LoopNest, tuple[Buffer, ...]]:
        """What it means, with the scratch memory for keys and ranks that it needs. ``taken``: names of buffers."""
        keys, ranks = (self._room(name, taken) for name in ("keys", "ranks"))
        names = [f"i{dim}" for dim in range(len(self.kept))]
        outer = {name: size for name, size in zip(names, self.kept, strict=True) if size != 1}
        nest = NestBuilder(self.call.name, loops(outer), self.call.origin, share=False)
        row = [nest[name] if name in outer else to_expr(0) for name in names]

        def begin(*symbols: str) -> list[Expr]:
            nest.begin_stage(loops(dict.fromkeys(symbols, self.count)))
            return [nest[symbol] for symbol in symbols]

        def at(place: Expr) -> list[Expr]:
            return [*row[: self.dim], place, *row[self.dim :]]

        (place,) = begin("r0")
        key = ordered(nest, nest.load_from(self.x, at(place)))
        nest.store_to(keys, [place], nest.op("bitwise_not", key) if self.descending else key)
        (place,) = begin("r1")
        nest.store_to(ranks, [place], nest.const(0, DType.I64))
        place, other = begin("r2", "r3")
        own, others = (nest.load_from(keys, [each]) for each in (place, other))
        before = nest.op("lt", nest.index_value(other), nest.index_value(place))
        equal = nest.op("logical_and", nest.op("eq", others, own), before)
        smaller = nest.op("logical_or", nest.op("lt", others, own), equal)
        nest.store_to(ranks, [place], nest.cast(smaller, DType.I64), "add")
        (place,) = begin("r4")
        rank = nest.check_index(nest.load_from(ranks, [place]), self.count)
        nest.store_to(self.values, at(rank), nest.load_from(self.x, at(place)))
        nest.store_to(self.places, at(rank), nest.index_value(place))
        return nest.finish(), (keys, ranks)

    def _room(self, name: str, taken: Container[str]) -> Buffer:
        """Eight bytes for each element of a row."""
        name = f"{self.call.name}_{name}"
        while name in taken:
            name += "_"
        kind = BufferKind.SCRATCH
        return Buffer(name, torch_name(DType.I64), (self.count,), (to_expr(1),), kind, self.x.device)


def sort_of(call: ExternCall, buffers: Mapping[str, Buffer], device: str) -> Sort | None:
    """The stable sort that a call is, of elements that kernels hold."""
    if call.target != STABLE_SORT or len(call.results) != 2 or None in call.results:
        return None
    given = dict(zip(("x", "dim", "descending"), (call.args[0], *call.args[1:]), strict=False)) | dict(call.kwargs)
    x, stable = given["x"], _plain(given.get("stable"), default=None)
    dim, descending = _plain(given.get("dim"), default=-1), _plain(given.get("descending"), default=False)
    if not isinstance(x, BufferRef) or x.number or stable is not True:
        return None
    if type(dim) is not int or type(descending) is not bool:
        return None
    tensor, values, places = (buffers[name] for name in (x.name, *call.results) if name is not None)
    if tensor.device != device or not tensor.sizes or dtype_from_torch_name(tensor.dtype) is None:
        return None
    return Sort(call, tensor, values, places, dim % len(tensor.sizes), descending)


def _plain(arg: Arg | None, default: object) -> object:
    if arg is None:
        return default
    return arg.value if isinstance(arg, Literal) else arg


def ordered(nest: BodyBuilder, element: Value) -> Value:
    """An element as an i64 in eager's order; of 32 bits where the element has no more."""
    dtype = DType.F32 if element.dtype in (DType.F16, DType.BF16) else element.dtype
    value = nest.cast(element, dtype)
    if not is_float(dtype):
        return nest.cast(value, DType.I64)
    value = nest.op("add", value, nest.const(0.0, dtype))  # -0.0 becomes 0.0
    value = nest.where(nest.op("isnan", value), nest.const(float("nan"), dtype), value)
    integer, width = (DType.I32, 32) if dtype is DType.F32 else (DType.I64, 64)
    bits = nest.op("bitcast", value, to=integer)
    sign = nest.op("shr", bits, nest.const(width - 1, integer))
    flipped = nest.op("bitwise_and", sign, nest.const((1 << (width - 1)) - 1, integer))
    return nest.cast(nest.op("bitwise_xor", bits, flipped), DType.I64)
