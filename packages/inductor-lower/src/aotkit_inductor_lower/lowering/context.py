"""The state of lowering one graph: its buffers and steps so far, and what each node has become."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ..errors import Fallback, UnsupportedGraphError
from ..ir import Alias, Buffer, BufferKind, DType, LoopNest, Origin, Step
from ..ir.walk import instructions, stores
from ..ops.dtypes import dtype_from_torch_name, from_torch_dtype
from ..symbolic import Expr, SymbolKind, to_expr
from ..target import HOST, Capabilities
from .access import Value, ViewBuilder
from .promotion import compute_dtype, promote
from .sizes import SizeConverter
from .values import NodeValue, View, dim_exprs

__all__ = ["LoweringContext", "source_line"]

_FRAME = re.compile(r'File "([^"]*)", line (\d+)[^\n]*\n\s*([^\n]*)')


def source_line(node: Node) -> str:
    """The user's line of a node, as ``"model.py:12: y = f(x)"``, or ``""``."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    path, number, code = frames[-1]
    return f"{path}:{number}: {code.strip()}"


class LoweringContext:
    """Handed to every rule. Rules declare buffers, write nests and return values; they keep no state themselves.

    ``capabilities``: of the target that kernels are generated for; ``generates_random``: whether they may make random
    numbers; ``sorts_stably``: whether equal elements may keep their order where eager's sort has another one.
    """

    def __init__(
        self, capabilities: Capabilities = HOST, *, generates_random: bool = False, sorts_stably: bool = False
    ) -> None:
        self.capabilities = capabilities
        self.sorts_stably = sorts_stably
        self.generates_random = generates_random
        self.random_seeds: View | None = None
        self.random_nodes = 0  # that use these seeds
        self.sizes = SizeConverter()
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.values: dict[Node, NodeValue] = {}
        self._storage_offsets: dict[str, Expr] = {}
        self._aliases: dict[object, str] = {}
        self._copies: dict[object, str] = {}

    # -- buffers -----------------------------------------------------------------------------------

    def declare(
        self,
        name: str,
        val: torch.Tensor,
        kind: BufferKind = BufferKind.TEMPORARY,
        dtype: torch.dtype | None = None,
        starts: int = 0,
    ) -> View:
        """A new buffer with the sizes and strides of a fake tensor, as a view of itself. ``starts``: where in its
        storage, if the fake value does not say: make_fx leaves that out for constants, though their views have it."""
        name = self.unique(name)
        sizes, strides = self.sizes.exprs(val.shape), self.sizes.exprs(val.stride())
        dtype = dtype or val.dtype
        self.buffers[name] = Buffer(name, str(dtype).removeprefix("torch."), sizes, strides, kind, str(val.device))
        said = val.storage_offset()  # may be a size that depends on data, which is not to be compared
        self._storage_offsets[name] = self.sizes.expr(starts if type(said) is int and said == 0 else said)
        return View(name, dtype, sizes, dim_exprs(len(sizes)), strides, to_expr(0))

    def declare_dense(self, name: str, sizes: Sequence[Expr], dtype: torch.dtype) -> View:
        """A new contiguous temporary of the kernels' device."""
        name = self.unique(name)
        strides: list[Expr] = []
        step = to_expr(1)
        for size in reversed(sizes):
            strides.insert(0, step)
            step = step * size
        kind, device = str(dtype).removeprefix("torch."), self.capabilities.device
        self.buffers[name] = Buffer(name, kind, tuple(sizes), tuple(strides), BufferKind.TEMPORARY, device)
        self._storage_offsets[name] = to_expr(0)
        return View(name, dtype, tuple(sizes), dim_exprs(len(sizes)), tuple(strides), to_expr(0))

    def declare_alias(self, buffer: Buffer) -> None:
        """A buffer that an alias of a whole one will be."""
        self.buffers[buffer.name] = buffer
        self._storage_offsets[buffer.name] = to_expr(0)

    def unique(self, name: str) -> str:
        """``name``, or with a number appended if there is such a buffer."""
        candidate, number = name, 0
        while candidate in self.buffers:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def shared_view(self, base: View, val: torch.Tensor, indices: tuple[Expr, ...]) -> View:
        """A view op's result on ``base``: index map as given (in the result's own dimensions), strides and offset as
        in the fake tensor."""
        strides = self.sizes.exprs(val.stride())
        offset = self.sizes.expr(val.storage_offset()) - self._storage_offsets[base.buffer]
        sizes = self.sizes.exprs(val.shape)
        return View(base.buffer, val.dtype, sizes, indices, strides, offset, base.shares)

    def buffer_view(self, name: str, val: torch.Tensor) -> View:
        """A declared buffer as a view of itself."""
        buffer = self.buffers[name]
        return View(name, val.dtype, buffer.sizes, dim_exprs(len(buffer.sizes)), buffer.strides, to_expr(0))

    def as_buffer(self, view: View, node: Node) -> str:
        """The name of a buffer that is this tensor: the buffer itself, an alias, or a copy with eager's strides."""
        buffer = self.buffers[view.buffer]
        if view.shares:
            same = buffer.sizes == view.sizes and buffer.strides == view.strides and view.offset == 0
            if same and buffer.dtype == str(view.dtype).removeprefix("torch."):
                return view.buffer
            return self._alias(view, node)
        key = (view.buffer, view.sizes, view.strides, view.indices)
        if key not in self._copies:
            name = self.unique(f"{node.name}_copy")
            dtype_name = str(view.dtype).removeprefix("torch.")
            self.buffers[name] = Buffer(name, dtype_name, view.sizes, view.strides, BufferKind.TEMPORARY, buffer.device)
            self._storage_offsets[name] = to_expr(0)
            target = View(name, view.dtype, view.sizes, dim_exprs(len(view.sizes)), view.strides, to_expr(0))
            nest = self.nest(name, node, view.sizes)
            nest.store(target, nest.index, nest.load(view, nest.index))
            self.add(nest)
            self._copies[key] = name
        return self._copies[key]

    def copied(self, view: View, node: Node) -> View:
        """A tensor's values now, in a temporary of its own."""
        result = self.declare_dense(f"{node.name}_copy", view.sizes, view.dtype)
        nest = self.nest(result.buffer, node, view.sizes)
        nest.store(result, nest.index, nest.load(view, nest.index))
        self.add(nest)
        return result

    def _alias(self, view: View, node: Node) -> str:
        key = (view.buffer, view.dtype, view.sizes, view.strides, view.offset)
        if key not in self._aliases:
            base = self.buffers[view.buffer]
            name = self.unique(node.name)
            dtype_name = str(view.dtype).removeprefix("torch.")
            self.buffers[name] = Buffer(name, dtype_name, view.sizes, view.strides, BufferKind.TEMPORARY, base.device)
            self._storage_offsets[name] = view.offset + self._storage_offsets[view.buffer]
            self.steps.append(Alias(name, name, view.buffer, view.offset, self.origin(node)))
            self._aliases[key] = name
        return self._aliases[key]

    def set_kind(self, name: str, kind: BufferKind) -> None:
        """Change who owns a buffer."""
        self.buffers[name] = replace(self.buffers[name], kind=kind)

    # -- nests -------------------------------------------------------------------------------------

    def origin(self, node: Node) -> Origin:
        """Where a node came from."""
        return Origin((node.name,), (str(node.target),), source_line(node))

    def nest(self, name: str, node: Node, sizes: Sequence[Expr]) -> ViewBuilder:
        """Begin a nest with one outer loop per size."""
        return ViewBuilder(name, sizes, self.origin(node))

    def add(self, nest: ViewBuilder) -> None:
        """Append a finished nest to the program. Raises :class:`~..errors.Fallback` for one whose elements meet in
        memory, where the device's threads cannot write them in any order."""
        finished = nest.finish()
        if self.capabilities.unordered:
            self._check_order(finished)
        self.steps.append(finished)

    def _check_order(self, nest: LoopNest) -> None:
        ordered = torch.are_deterministic_algorithms_enabled()
        for store in stores(instructions(nest.stages)):
            dtype = dtype_from_torch_name(self.buffers[store.buffer].dtype)
            if store.accumulates and (dtype, store.mode) not in self.capabilities.atomics:
                raise Fallback("elements meet in one place, and devices have no atomic operation for them")
            computed = any(s.kind is SymbolKind.VALUE for index in store.indices for s in index.symbols)
            if ordered and (store.accumulates or computed):
                raise Fallback("threads of a device meet in no order, and deterministic algorithms are asked for")

    def rollback(self, steps: int, buffers: int) -> None:
        """Forget all but the first so many steps and buffers."""
        del self.steps[steps:]
        for name in list(self.buffers)[buffers:]:
            del self.buffers[name]
        self._aliases = {key: name for key, name in self._aliases.items() if name in self.buffers}
        self._copies = {key: name for key, name in self._copies.items() if name in self.buffers}

    def pointwise(
        self,
        node: Node,
        operands: Sequence[object],
        compute: Callable[..., Value],
        dtype: DType | None = None,
    ) -> View:
        """One nest over the node's result: loads the operands (broadcast) as ``dtype`` (by default what eager computes
        their common type in), applies ``compute(nest, *values)``, converts to the result's type and stores."""
        val = node.meta["val"]
        result = self.declare(node.name, val)
        nest = self.nest(result.buffer, node, result.sizes)
        if dtype is None:
            dtype = compute_dtype(promote(operands))
        values = [self.operand(nest, operand, dtype) for operand in operands]
        nest.store(result, nest.index, compute(nest, *values))
        self.add(nest)
        return result

    @staticmethod
    def operand(nest: ViewBuilder, operand: object, dtype: DType | None) -> Value:
        """A view's element at the nest's index, or a number, converted to ``dtype`` (None: a view's own type)."""
        if isinstance(operand, View):
            value = nest.load_broadcast(operand, nest.index)
            return value if dtype is None else nest.cast(value, dtype)
        if dtype is None:
            raise TypeError("a number needs a type")
        return nest.scalar(operand, dtype)

    # -- refusals ----------------------------------------------------------------------------------

    def unsupported(self, node: Node, why: str, todo: str = "") -> UnsupportedGraphError:
        """The error for a node that cannot be compiled."""
        return UnsupportedGraphError(f"{node.name} = {node.target}", why, line=source_line(node), todo=todo)

    @staticmethod
    def generated_dtype(dtype: torch.dtype) -> bool:
        """Whether generated code can hold values of this type."""
        return from_torch_dtype(dtype) is not None
