"""The instructions of a kernel as lines of source: values, indices, masks, loads and stores.

Note [Shape of a kernel]
    Values are tensors with one axis per tile axis and, where the body has loops, one more for those; an axis that a
    value does not vary along has size one. ``dims`` says along which it varies. A mask is made per axis and only if
    the axis' size is no multiple of its block; a load is masked along the axes its address varies along.

Note [Computed indices]
    An index that is out of range stops the kernel, as eager's do; the device cannot be used afterwards. Without that
    (``asserts`` off) what such an index reads is 0 and what it writes is dropped: nothing outside of a tensor is
    touched, and the kernel needs neither the call that stops it nor the registers and the stack for that.

Note [Loads past the end]
    A thread loads 16 bytes at once only if a mask is alike for these. An axis that ends in between is therefore masked
    a little later in loads along it, if that is memory of the same tensor: the first numbers of the next row, or what a
    row is padded with. What is loaded there goes nowhere: reductions and stores have the mask of the axis.

Note [What one program instance reads back]
    A load of what was stored at the same place, with the same mask, becomes the stored value. Any other load of memory
    that this instance wrote before comes after a barrier, and so does a store to memory that was read: the thread that
    stores may be ahead of another one that is to load there. There is none before a store of a large tile at the place
    of the load whose numbers are computed from the loaded ones, see Note [What a thread overwrites].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

from ....ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Store
from ....ir.walk import instructions, value_types
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import all_loops, perfect_nests
from ....ops.dtypes import bits, is_float
from ....symbolic import Expr, Symbol, SymbolKind, sym, to_expr
from ..map_loops import config_of, is_persistent, is_serial
from ..records import KnownMemory
from ..sectors import WIDEST, loads_odd_rows, neighbours_at_once
from .columns import load_of_columns
from .evictions import evictions
from .indices import expr_text, identifier
from .lines import Scope, Value
from .names import function_name, pointer_name
from .ops import TYPE_NAMES, constant_text, op_text, store_text
from .own_elements import loads_of_elements, one_place_each

__all__ = ["BodyEmitter", "End"]

_NOTHING_KNOWN = KnownMemory()
_MOST_THREADS = 512  # of a program instance, whatever is chosen for it in the end
_JOINT = sym("the position along several loops")


@dataclass(frozen=True, slots=True)
class End:
    """Where an axis that is masked ends: ``name`` is the variable of its ``loop``."""

    name: str
    loop: Loop


class BodyEmitter:
    """Writes the instructions of a kernel, one by one; who is between them is a subclass's business."""

    def __init__(
        self, kernel: Kernel, asserts: bool = True, fast: bool = False, memory: KnownMemory = _NOTHING_KNOWN
    ) -> None:
        self.fast, self.memory = fast, memory
        self.name, self.kernel, self.asserts = function_name(kernel.name), kernel, asserts
        self.nests, self.config = perfect_nests(kernel), config_of(kernel)
        self.serial, self.persistent = is_serial(kernel), is_persistent(kernel)
        self.tile = [loop for loop in kernel.grid if loop.map.block]
        self.axes = [loop.map.block for loop in self.tile] or ["1"]
        self.walked = next((loop for loop in self.tile if loop.map.kind == "serial"), None)
        self.sums: dict[str, str] = {}  # of walked rows: the names of the lines of sums, by memory
        self.row_axis = len(self.axes) if any(isinstance(s, Loop) for s in kernel.body) else None
        self.rank = len(self.axes) + (self.row_axis is not None)
        self.wide = kernel.index_type is DType.I64
        self.index_type = "tl.int64" if self.wide else "tl.int32"
        body = instructions(kernel.body)
        self.types = value_types(body)
        self.loads_of = loads_of_elements(body)
        self.scope = Scope()
        self.symbols: dict[Symbol, Value] = {}
        self.masks: dict[int, str] = {}
        self.ends: dict[int, End] = {}
        self.together: tuple[tuple[tuple[Loop, ...], str], ...] = ()  # loops of a nest, and their joint position
        self.starts: dict[Symbol, str] = {}  # of loops whose tile begins at a named place
        self.tile_starts: dict[Symbol, str] = {}  # where the tile begins along each loop of it
        self.window: tuple[Loop, ...] = ()  # loops of the nest that a tile holds whole
        self.pointers: dict[str, DType] = {}
        self.written = {i.buffer for i in body if isinstance(i, Store)}
        self.scratch = {row.name: row for row in kernel.scratch}
        self.scratch_read: set[str] = set()
        self.evictions = evictions(kernel, self.nests)
        self.zero_fills = False  # lanes that the mask of an axis turns off load 0, not anything
        self.checks = False
        self.in_range: dict[Symbol, str] = {}  # of computed indices that nothing is asserted of
        self.outer_index: list[tuple[str, Expr]] = []

    # -- axes --------------------------------------------------------------------------------------------

    def range_of(self, size: str, step: str = "1") -> str:
        """What a loop goes through. Triton gives 3000000000 32 bits without a sign, and extends that with one."""
        return f"range(zero, zero + {size}, {step})" if self.wide else f"range(0, {size}, {step})"

    def along(self, position: int) -> str:
        """The index that makes a vector vary along one axis."""
        if self.rank == 1:
            return ""
        return "[" + ", ".join(":" if k == position else "None" for k in range(self.rank)) + "]"

    def shape(self, dims: frozenset[int]) -> str:
        """The shape of a value that varies along ``dims``."""
        blocks = [*self.axes, self.scope.row_block] if self.row_axis is not None else self.axes
        return "[" + ", ".join(b if k in dims else "1" for k, b in enumerate(blocks)) + "]"

    # -- indices -----------------------------------------------------------------------------------------

    def expr(self, expr: Expr) -> str:
        for loops, position in self.together:
            step = _common_step(expr, loops)
            if step is not None:
                rest = expr.substitute(dict.fromkeys((Symbol(loop.symbol) for loop in loops), to_expr(0)))
                return expr_text(rest + _JOINT * step, partial(self._joint_text, position))
        return expr_text(expr, self._symbol_text)

    def _joint_text(self, position: str, symbol: Symbol) -> str:
        return position if symbol == _JOINT.symbol else self._symbol_text(symbol)

    def _symbol_text(self, symbol: Symbol) -> str:
        if symbol.kind is SymbolKind.SIZE:
            return f"size_{identifier(symbol.name)}"
        if symbol.kind is SymbolKind.VALUE:
            return self.scope.values[symbol.name].text
        return self.symbols[symbol].text

    def dims_of(self, expr: Expr) -> frozenset[int]:
        dims: frozenset[int] = frozenset()
        for symbol in expr.symbols:
            if symbol.kind is SymbolKind.VALUE:
                dims |= self.scope.values[symbol.name].dims
            elif symbol.kind is not SymbolKind.SIZE:
                dims |= self.symbols[symbol].dims
        return dims

    def index_value(self, expr: Expr, dims: frozenset[int] | None = None) -> str:
        """An index expression as a tensor, varying along ``dims`` at least."""
        own = self.dims_of(expr)
        wanted = own | (dims or frozenset())
        text = self.expr(expr)
        if not own and not any(s.kind is SymbolKind.VALUE for s in expr.symbols):
            return f"tl.full({self.shape(wanted)}, {text}, {self.index_type})"
        return text if wanted == own else f"tl.broadcast_to({text}, {self.shape(wanted)})"

    # -- instructions ------------------------------------------------------------------------------------

    def body(self, body: Sequence[Instr]) -> None:
        """Instructions in order."""
        for instr in body:
            self.instruction(instr)

    def instruction(self, instr: Instr) -> None:
        """Anything but a reduce."""
        if isinstance(instr, Load):
            self._load(instr)
        elif isinstance(instr, Store):
            self._store(instr)
        elif isinstance(instr, Const):
            self.define(instr.result, constant_text(instr.value, instr.dtype, self.rank), frozenset())
        elif isinstance(instr, Index):
            text = f"({self.index_value(instr.expr)}).to({TYPE_NAMES[instr.dtype]})"
            self.define(instr.result, text, self.dims_of(instr.expr))
        elif isinstance(instr, Compute):
            self._compute(instr)
        elif isinstance(instr, CheckedIndex):
            self._check_index(instr)
        else:
            raise TypeError(f"{type(instr).__name__} is no instruction of a body")

    def define(self, result: str, text: str, dims: frozenset[int]) -> None:
        self.scope.define(result, text, dims)

    def value(self, name: str) -> Value:
        return self.scope.values[name]

    def _compute(self, instr: Compute) -> None:
        args = [self.value(a) for a in instr.args]
        dims = frozenset().union(*(a.dims for a in args))
        text = op_text(instr.op, [a.text for a in args], [self.types[a] for a in instr.args], instr.dtype, self.fast)
        self.define(instr.result, text, dims)

    def _check_index(self, instr: CheckedIndex) -> None:
        value = self.value(instr.value)
        self.types[instr.result] = DType.I64
        size = self.expr(instr.size)
        if not self.asserts:
            wrapped = self.scope.define(instr.result, f"wrap_index({value.text}, {size})", value.dims).text
            good = f"({wrapped} >= 0) & ({wrapped} < {size})"
            symbol = Symbol(instr.result, SymbolKind.VALUE)
            self.in_range[symbol] = self.scope.define(f"in_{wrapped}", good, value.dims, index=True).text
            return
        self.checks = True
        mask = self.mask(value.dims) or f"tl.full({self.shape(frozenset())}, 1, tl.int1)"
        self.define(instr.result, f"check_index({value.text}, {size}, {mask})", value.dims)

    def mask(self, dims: frozenset[int], *extra: str) -> str:
        """The conjunction of the axes' masks, and further ones."""
        return " & ".join(dict.fromkeys([*(self.masks[d] for d in sorted(dims) if d in self.masks), *extra]))

    def drop_mask(self, axis: int) -> None:
        """There is nothing to mask along an axis any more."""
        self.masks.pop(axis, None)
        self.ends.pop(axis, None)

    def access_masks(self, index: Expr, given: Value | None) -> list[str]:
        """What an access is masked with besides the axes: the one it was given, and that its indices are in range."""
        parts = [given.text] if given else []
        return parts + [self.in_range[s] for s in sorted(index.symbols, key=str) if s in self.in_range]

    # -- memory ------------------------------------------------------------------------------------------

    def address(self, buffer: str, index: Expr, dtype: DType) -> tuple[str, Expr]:
        """Pointer text and offset."""
        if buffer in self.scratch:
            return f"scratch_{identifier(buffer)}", self._scratch_start(buffer) + index
        owner = self.pointers.setdefault(buffer, dtype)
        name = pointer_name(buffer)
        return (name if owner is dtype else f"{name}.to(tl.pointer_type({TYPE_NAMES[dtype]}))"), index

    def _scratch_start(self, name: str) -> Expr:
        """Where this outer iteration's row begins."""
        if self.serial:
            return to_expr(0)
        position = to_expr(0)
        for loop in self.kernel.grid:
            position = position * loop.extent + sym(loop.symbol)
        return position * self.scratch[name].extent

    def _scratch_extent(self, name: str) -> Expr:
        """Elements of all rows."""
        total = self.scratch[name].extent
        for loop in () if self.serial else self.kernel.grid:
            total = total * loop.extent
        return total

    def loads_odd_rows(self, symbol: Symbol) -> bool:
        """Whether rows along a loop are loaded that begin anywhere."""
        return loads_odd_rows(instructions(self.kernel.body), symbol)

    def place(self, pointer: str, index: Expr, dims: frozenset[int]) -> str:
        """The text of an address, varying along ``dims`` at least: with rows that begin anywhere, that of the tile's
        first element and the number of the lane, see Note [Odd rows]."""
        for symbol, start in self.starts.items():
            own = self.symbols[symbol].dims
            if index.coefficient(symbol) == 1 and dims == own and not self.dims_of(index - sym(symbol.name)):
                (axis,) = own
                first = expr_text(index, partial(self._start_text, symbol, start))
                block = self.scope.row_block if axis == self.row_axis else self.axes[axis]
                lanes = f"tl.arange(0, {block}){self.along(axis)}"
                width = next(loop.map.width for loop in all_loops(self.kernel) if loop.symbol == symbol.name)
                count = min(width, neighbours_at_once(instructions(self.kernel.body), symbol))
                together = [count if k == axis else 1 for k in range(self.rank)]
                return f"{pointer} + {first} + tl.max_contiguous({lanes}, {together})"
        return f"{pointer} + {self.index_value(index, dims)}"

    def reads_only(self, buffer: str) -> bool:
        """Whether nothing here writes to a buffer, which is no scratch memory."""
        return buffer not in self.written and buffer not in self.scratch

    @contextmanager
    def other_symbols(self) -> Iterator[None]:
        """Context in which loops may have other values."""
        saved = dict(self.symbols), self.together
        self.together = ()
        try:
            yield
        finally:
            self.symbols, self.together = saved

    def _start_text(self, symbol: Symbol, start: str, at: Symbol) -> str:
        return start if at == symbol else self._symbol_text(at)

    def _load(self, i: Load) -> None:
        index = i.indices[0]
        given = self.value(i.mask) if i.mask else None
        place = self.expr(index)
        within = self.mask(self.dims_of(index))
        known = self.scope.stored(i.buffer, f"{place} {within}", i.dtype) if given is None else None
        if known is not None:
            self.scope.values[i.result] = known
            return
        self.scope.before_load(i.buffer)
        if i.buffer in self.scratch:
            self.scratch_read.add(i.buffer)
        pointer, index = self.address(i.buffer, index, i.dtype)
        dims = self.dims_of(index) | (given.dims if given else frozenset())
        masks = self.access_masks(index, given)
        mask = self.mask(dims, *masks) if masks else self._loose_mask(i, dims)
        address = self.place(pointer, index, dims)
        extra = f", mask={mask}" if mask else ""
        if masks or (mask and self.zero_fills):
            extra += f", other={_other_text(i.other if given else 0, i.dtype)}"
        eviction = f', eviction_policy="{self.evictions[i.result]}"' if i.result in self.evictions else ""
        extra += eviction
        version = self.scope.version(i.buffer)
        text = load_of_columns(self, i, self.window, eviction) if self.window else None
        loaded = self.scope.define(i.result, text or f"tl.load({address}{extra})", dims, key=version)
        self.scope.was_read(i.buffer, place, loaded)

    def _loose_mask(self, i: Load, dims: frozenset[int]) -> str:
        """The mask of a load, see Note [Loads past the end]."""
        index, parts, wider = i.indices[0], list[str](), dict[str, int]()
        unit = max(1, WIDEST // (max(8, bits(i.dtype)) // 8))
        for axis in sorted(dims & self.masks.keys()):
            parts.append(self.masks[axis])
            end = self.ends.get(axis)
            size = end.loop.extent.constant if end is not None else None
            if end is None or size is None or size % unit == 0 or index.coefficient(Symbol(end.loop.symbol)) != 1:
                continue
            whole = -(-size // unit) * unit
            longer = {**wider, end.loop.symbol: whole}
            reach = self._reach(index, longer)
            if reach is not None and (reach + 1) * bits(i.dtype) // 8 <= self.memory.bytes.get(i.buffer, 0):
                name, text = f"near_{end.name}_{whole}", f"{end.name} < {whole}"
                parts[-1], wider = self.scope.define(name, text, frozenset({axis}), index=True).text, longer
        return " & ".join(dict.fromkeys(parts))

    def _reach(self, index: Expr, longer: Mapping[str, int]) -> int | None:
        """The largest value of an index if some loops were ``longer``."""
        total = 0
        extents = {each.symbol: each.extent.constant for each in all_loops(self.kernel)} | dict(longer)
        for monomial, factor in index.terms:
            if not monomial:
                total += factor
                continue
            (atom, *others) = monomial
            extent = extents.get(atom.name) if isinstance(atom, Symbol) else None
            if others or extent is None or factor < 0:
                return None
            total += factor * (extent - 1)
        return total

    def _store(self, i: Store) -> None:
        value = self.value(i.value)
        if i.buffer in self.sums:
            self._add_to_line(self.sums[i.buffer], value, self.types[i.value])
            return
        given = self.value(i.mask) if i.mask else None
        dtype = self.types[i.value]
        pointer, index = self.address(i.buffer, i.indices[0], dtype)
        dims = self.dims_of(index) | value.dims | (given.dims if given else frozenset())
        if i.accumulates:
            dims |= frozenset(range(self.rank if self.scope.in_stage else len(self.axes)))
        masks = self.access_masks(index, given)
        mask = self.mask(dims, *masks)
        address = self.place(pointer, index, dims)
        extra = f", mask={mask}" if mask else ""
        text = value.text
        if i.accumulates and value.dims != dims:
            text = f"tl.broadcast_to({text}, {self.shape(dims)})"
        self.scope.before_store(i.buffer, self.expr(i.indices[0]), self._own_loads(i))
        if not i.accumulates:
            tag = f"scratch {i.buffer}" if i.buffer in self.scratch else ""
            self.scope.line(f"tl.store({address}, {text}{extra})", tag)
            place = f"{self.expr(i.indices[0])} {self.mask(self.dims_of(i.indices[0]))}"
            self.scope.remember(i.buffer, place, value, dtype, not masks)
        elif self.serial:
            self._combine(i, address, text, extra, dtype)
        else:
            always = mask or f"tl.full({self.shape(frozenset())}, 1, tl.int1)"
            self.scope.line(f"atomic_{i.mode}({address}, {text}, {always})")
            self.scope.remember(i.buffer, "", value, dtype, False)

    def _own_loads(self, i: Store) -> frozenset[str]:
        """The names of loaded values that each thread has before it stores, as far as they are of the same place."""
        index = i.indices[0]
        if not self._is_spread(self.dims_of(index)) or not one_place_each(index):
            return frozenset()
        return frozenset(self.value(load).text for load in self.loads_of.get(i.value, ()))

    def _is_spread(self, dims: frozenset[int]) -> bool:
        """Whether each element of what varies along ``dims`` is loaded by one thread, and not by several."""
        known = dict(self.config.blocks)
        blocks = [*self.axes, self.scope.row_block] if self.row_axis is not None else self.axes
        whole = dims >= {k for k in range(self.rank) if blocks[k] != "1" or k == self.row_axis}
        return whole and prod(known.get(blocks[k]) or int(blocks[k]) for k in dims) >= _MOST_THREADS

    def _add_to_line(self, line: str, value: Value, dtype: DType) -> None:
        mask, text = self.mask(frozenset(range(self.rank))), value.text
        if mask:
            text = f"tl.where({mask}, {text}, tl.full([1, 1], 0.0, {TYPE_NAMES[dtype]}))"
        self.scope.line(f"{line} = {line} + {text}")

    def _combine(self, i: Store, address: str, text: str, extra: str, dtype: DType) -> None:
        """Read, combine, write, by the only program instance; each step waits for the one before."""
        old = self.scope.fresh("old")
        self.scope.line(f"{old} = tl.load({address}{extra})")
        combined = store_text(i.mode, old, text, dtype)
        self.scope.line("tl.debug_barrier()")
        self.scope.line(f"tl.store({address}, {combined}{extra})")
        self.scope.line("tl.debug_barrier()")
        self.scope.forget(i.buffer)


def _other_text(other: float | int | bool, dtype: DType) -> str:
    """What masked-off lanes of a load give."""
    if dtype is DType.BOOL:
        return str(int(bool(other)))
    if is_float(dtype):
        return repr(float(other)) if other == other and abs(other) != float("inf") else f'float("{float(other)}")'
    return str(int(other))


def _common_step(expr: Expr, loops: Sequence[Loop]) -> int | None:
    """What an expression grows by with each iteration of all ``loops``, the last of which is the fastest, if that is
    always the same."""
    steps = [expr.coefficient(Symbol(loop.symbol)) for loop in loops]
    last = steps[-1].constant if steps[-1] is not None else None
    if not last:
        return None
    for step, following, loop in zip(steps, steps[1:], loops[1:], strict=False):
        if step is None or following is None or step != following * loop.extent:
            return None
    return last
