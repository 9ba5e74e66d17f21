"""What each instruction does, on all iterations at once: shared by the interpreters of loop IR and kernels.

A value is a tensor with one axis per loop around it, or of size 1 there. Loops that come first (``outer``) are those
which reductions leave alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..errors import IndexOutOfRange, IRError
from ..ops.dtypes import from_torch_dtype, to_torch_dtype
from ..ops.reductions import REDUCTIONS, store_op
from ..ops.scalar import OP_TABLE, TypeRule
from ..symbolic import Symbol, SymbolKind
from .grid import evaluate_on_grid
from .nodes import CheckedIndex, Compute, Const, Index, Instr, Load, Reduce, Store

__all__ = ["DividedByZero", "InstrRun"]


class DividedByZero(RuntimeError):
    """An integer was divided by zero, which eager raises a ``RuntimeError`` for."""


class InstrRun:
    """State of a run. ``grid``: the value of each symbol; ``shape``: how often each loop around runs."""

    def __init__(self, place: str, env: Mapping[Symbol, int]) -> None:
        self.place = place
        self.env = env
        self.outer: dict[Symbol, int] = {}
        self.values: dict[str, Tensor] = {}
        self.grid: dict[Symbol, Tensor | int] = dict(env)
        self.shape: tuple[int, ...] = ()

    # -- what the container of the instructions says ------------------------------------------------

    def memory(self, name: str, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """The memory that ``name`` is, and whether it has an axis per outer loop in front: scratch has."""
        raise NotImplementedError

    def elements_before(self, name: str, dtype: torch.dtype) -> int:
        """How many elements of the memory lie before the one that has the index 0."""
        return 0

    def finish(self, name: str, value: Tensor) -> None:
        """The result of a reduction, with outer axes only, which becomes visible later."""
        raise NotImplementedError

    # -- values --------------------------------------------------------------------------------------

    def run_all(self, body: Iterable[tuple[int, Instr]]) -> None:
        """Numbered instructions, one after the other."""
        for position, instr in body:
            try:
                _RUN[type(instr)](self, instr)
            except ZeroDivisionError as error:
                raise DividedByZero(f"{self.place}, instruction {position}: {error}") from None

    def define(self, name: str, value: Tensor) -> None:
        self.values[name] = value
        if value.dtype in (torch.int64, torch.int32):
            self.grid[Symbol(name, SymbolKind.VALUE)] = value.long()

    def keep(self, name: str, value: Tensor) -> None:
        """A new value, with an axis for each loop."""
        self.define(name, value.reshape([1] * (len(self.shape) - value.dim()) + list(value.shape)))

    def index(self, i: Load | Store, dtype: torch.dtype, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tensor, and one index tensor per dimension of it (one zero for a scalar), which broadcast on the grid."""
        tensor, private = self.memory(i.buffer, dtype)
        before = self.elements_before(i.buffer, dtype)
        whole = [evaluate_on_grid(index + before, self.grid) for index in i.indices]
        if private:
            whole = [torch.as_tensor(self.grid[symbol]) for symbol in self.outer] + whole
        if len(whole) != tensor.dim():
            raise IRError(f"{self.place}: {len(whole)} indices for {i.buffer}, of {tensor.dim()} dimensions")
        if 0 in self.shape:  # then nothing is read or written, whatever the other loops say
            whole = [index.expand(self.shape) for index in whole]
        if mask is not None:
            whole = [torch.where(mask.expand(self.shape), index, 0) for index in whole]
        for dim, index in enumerate(whole):
            reached = index if mask is None else index.expand(self.shape)[mask.expand(self.shape)]
            if reached.numel() and not (int(reached.min()) >= 0 and int(reached.max()) < tensor.shape[dim]):
                found = f"[{int(reached.min()) - before}, {int(reached.max()) - before}]"
                there = f"[{-before}, {tensor.shape[dim] - before})"
                raise IRError(f"{self.place}: index {dim} of {i.buffer} reaches {found}, outside {there}")
        if not whole:
            return tensor.unsqueeze(0), (torch.zeros(self.shape, dtype=torch.int64),)
        return tensor, tuple(whole)

    # -- instructions --------------------------------------------------------------------------------

    def load(self, i: Load) -> None:
        mask = None if i.mask is None else self.values[i.mask]
        tensor, indices = self.index(i, to_torch_dtype(i.dtype), mask)
        if mask is None:
            self.keep(i.result, tensor[indices])
            return
        other = torch.full(self.shape, i.other, dtype=tensor.dtype)
        read = tensor[indices] if tensor.numel() else other
        self.keep(i.result, torch.where(mask, read, other))

    def const(self, i: Const) -> None:
        self.keep(i.result, torch.full([1] * len(self.shape), i.value, dtype=to_torch_dtype(i.dtype)))

    def index_value(self, i: Index) -> None:
        self.keep(i.result, evaluate_on_grid(i.expr, self.grid).to(to_torch_dtype(i.dtype)))

    def compute(self, i: Compute) -> None:
        row = OP_TABLE[i.op]
        args = [self.values[a] for a in i.args]
        if row.rule in (TypeRule.CAST, TypeRule.BITCAST):
            self.keep(i.result, row.reference(args[0], i.dtype))
        else:
            self.keep(i.result, row.reference(*args))

    def check_index(self, i: CheckedIndex) -> None:
        value, size = self.values[i.value], i.size.evaluate(self.env)
        wrapped = torch.where(value < 0, value + size, value)
        bad = (wrapped < 0) | (wrapped >= size)
        if 0 not in self.shape and bool(bad.any()):
            raise IndexOutOfRange(f"index {int(value[bad][0])} is out of bounds for dimension with size {size}")
        self.keep(i.result, wrapped)

    def reduce(self, i: Reduce) -> None:
        whole = self.values[i.value].expand(self.shape)
        flat, reference = self.flattened(whole), REDUCTIONS[i.kind].reference
        if i.running:
            so_far = [reference(flat[..., : n + 1]) for n in range(flat.shape[-1])]
            self.keep(i.result, torch.stack(so_far, -1).reshape(whole.shape) if so_far else whole)
            return
        if i.position is None or not whole.numel():
            self.finish(i.result, reference(flat))
            return
        positions = self.flattened(evaluate_on_grid(i.position, self.grid).expand(self.shape))
        order = positions.argsort(-1)
        first = reference(flat.gather(-1, order)).unsqueeze(-1)
        self.finish(i.result, positions.gather(-1, order).gather(-1, first).squeeze(-1))

    def flattened(self, whole: Tensor) -> Tensor:
        """The axes of all loops that a reduction goes over made one."""
        sizes = list(self.outer.values())
        return whole.reshape(*sizes, -1) if whole.numel() else whole.new_empty((*sizes, 0))

    def store(self, i: Store) -> None:
        mask = None if i.mask is None else self.values[i.mask]
        value = self.values[i.value].expand(self.shape)
        tensor, indices = self.index(i, value.dtype, mask)
        each = torch.broadcast_shapes(*(index.shape for index in indices)) == self.shape  # iteration has its own place
        if each and mask is None and i.mode == "set":
            tensor.index_put_(indices, value)
            return
        indices = tuple(index.expand(self.shape) for index in indices)
        chosen = torch.ones(self.shape, dtype=torch.bool) if mask is None else mask.expand(self.shape)
        places, values = tuple(index[chosen] for index in indices), value[chosen]
        if i.mode in ("set", "add"):
            tensor.index_put_(places, values, accumulate=i.accumulates)
            return
        if not tensor.dim():
            places, tensor = (values.new_zeros(values.shape, dtype=torch.int64),), tensor.view(1)
        dtype = from_torch_dtype(values.dtype)
        assert dtype is not None, "values have types of the IR"
        combine = OP_TABLE[store_op(i.mode, dtype)].reference
        for *place, element in zip(*places, values, strict=True):  # slow, and in order
            at = tuple(int(p) for p in place)
            tensor[at] = combine(tensor[at], element)


_RUN: dict[type, Callable[..., None]] = {
    Load: InstrRun.load,
    Const: InstrRun.const,
    Index: InstrRun.index_value,
    Compute: InstrRun.compute,
    CheckedIndex: InstrRun.check_index,
    Reduce: InstrRun.reduce,
    Store: InstrRun.store,
}
