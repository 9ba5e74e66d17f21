"""One loop nest to one Triton kernel, as readable source text.

Note [Shape of a kernel]
    Values are tensors with one axis per tile axis and, where some stage has loops, one more for those; an axis that a
    value does not vary along has size one. ``dims`` says along which it varies. A mask is made per axis and only if
    the axis' size is no multiple of its block; a load is masked along the axes its address varies along.

Note [Computed indices]
    An index that is out of range stops the kernel, as eager's do; the device cannot be used afterwards. Without that
    (``asserts`` off) what such an index reads is 0 and what it writes is dropped: nothing outside of a tensor is
    touched, and the kernel needs neither the call that stops it nor the registers and the stack for that.

Note [What one program instance reads back]
    A load of what was stored at the same place becomes the stored value. Any other load of memory that this instance
    wrote in an earlier stage comes after a barrier, and so does a store to memory that was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from keyword import iskeyword

from ....ir import Buffer, CheckIndex, Compute, Const, DType, IndexValue, Instr, Load, Origin, Store
from ....kernel_ir.nests import FlatNest
from ....ops.dtypes import ATOMIC, dtype_from_torch_name, is_float
from ....symbolic import Expr, Symbol, SymbolKind, sym, to_expr
from ..map_loops import TileLimits, TilePlan, plan_tiles, size_hint
from ..records import Config, KernelArgument, KernelSource
from .indices import expr_text, identifier
from .lines import Scope, Value
from .online import OnlineReducer, online_pair, without_rows
from .ops import TYPE_NAMES, constant_text, op_text
from .prelude import device_function_names, prelude_for
from .reductions import Reducer, accumulate_text
from .welford import WelfordReducer, welford_pair

__all__ = ["KernelArgument", "KernelEmitter", "KernelSource", "emit_kernel"]


_NO_ORIGIN = Origin()
_LIMITS = TileLimits()


def emit_kernel(
    name: str,
    nest: FlatNest,
    buffers: Mapping[str, Buffer],
    origin: Origin = _NO_ORIGIN,
    limits: TileLimits = _LIMITS,
    asserts: bool = True,
) -> KernelSource:
    """The kernel of a nest in normal form; ``limits`` of its tile; ``asserts``: see Note [Computed indices]."""
    plan = plan_tiles(nest, nest.ordered and not _atomic(nest), limits)
    if not plan.persistent:
        nest = without_rows(nest)
    return KernelEmitter(name, nest, buffers, plan, plan.config, asserts).emit(origin)


def _atomic(nest: FlatNest) -> bool:
    """Whether each store that combines is an atomic operation of the device, and nothing reads what it makes."""
    types = {i.result: i.dtype for s in nest.stages for i in s.body if not isinstance(i, CheckIndex | Store)}
    loaded = {i.buffer for s in nest.stages for i in s.body if isinstance(i, Load)}
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, Store) and instr.accumulates:
                kind = (types.get(instr.value, DType.I64), instr.mode)
                if instr.buffer in loaded or kind not in ATOMIC:
                    return False
    return True


class KernelEmitter:
    """Writes one kernel. A subclass may write the stages in another way."""

    def __init__(
        self,
        name: str,
        nest: FlatNest,
        buffers: Mapping[str, Buffer],
        plan: TilePlan,
        config: Config,
        asserts: bool = True,
    ) -> None:
        self.name, self.nest, self.buffers = function_name(name), nest, buffers
        self.plan, self.config, self.asserts = plan, config, asserts
        tile = plan.tile
        self.axes = [a.block or "1" for a in tile] or ["1"]
        self.row_axis = len(self.axes) if any(s.ranges for s in nest.stages) else None
        self.rank = len(self.axes) + (self.row_axis is not None)
        self.wide = needs_64_bit(nest, buffers)
        self.index_type = "tl.int64" if self.wide else "tl.int32"
        self.types = {i.result: i.dtype for s in nest.stages for i in s.body if not isinstance(i, CheckIndex | Store)}
        self.consts = {i.result: i.value for s in nest.stages for i in s.body if isinstance(i, Const)}
        self.scope = Scope()
        self.symbols: dict[Symbol, Value] = {}
        self.masks: dict[int, str] = {}
        self.pointers: dict[str, DType] = {}
        self.written = {i.buffer for s in nest.stages for i in s.body if isinstance(i, Store)}
        self.rows = {row.name: row for row in nest.rows}
        self.rows_read: set[str] = set()
        self.checks = False
        self.in_range: dict[Symbol, str] = {}  # of computed indices that nothing is asserted of
        self.outer_index: list[tuple[str, Expr]] = []

    # -- frame -------------------------------------------------------------------------------------------

    def emit(self, origin: Origin) -> KernelSource:
        self._grid()
        self.stages()
        lines = self.scope.finish(drop={f"row {r}" for r in self.rows if r not in self.rows_read})
        arguments = self._arguments(lines)
        parameters = [argument_name(a) for a in arguments] + [f"{n}: tl.constexpr" for n, _ in self.config.blocks]
        head = [f"# {line}" for line in _describe(origin)]
        head += ["@jit", f"def {self.name}({', '.join(parameters)}):"]
        body = "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"
        grid = () if self.plan.serial else tuple((a.loop.size, a.block) for a in self.plan.axes)
        text = prelude_for(body) + body
        return KernelSource(self.name, text, arguments, grid, self.config, self.checks, self.plan.persistent)

    def stages(self) -> None:
        """The lines after the loop variables."""
        done = set()  # together with an earlier stage
        for position, stage in enumerate(self.nest.stages):
            looped = bool(stage.ranges) and not self.plan.persistent
            below = online_pair(self.nest, position) if looped else None
            around = welford_pair(self.nest.stages, position) if looped and position not in done else None
            if below is not None:
                OnlineReducer(self, stage, position, below).emit()
                done.add(below.position)
            elif around is not None:
                WelfordReducer(self, stage, position, around).emit()
                done.add(around.position)
            elif stage.ranges and position not in done:
                Reducer(self, stage, position).emit()
            elif not stage.ranges:
                self.body(stage.body)

    def _arguments(self, lines: Sequence[str]) -> tuple[KernelArgument, ...]:
        text = "\n".join(lines)
        found = [
            KernelArgument("pointer", name, self.pointers[name], name in self.written)
            for name in self.nest.memories
            if name in self.pointers
        ]
        for name in self.rows:
            if name in self.rows_read:
                found.append(KernelArgument("scratch", name, self._row_type(name), True, self._row_extent(name)[1]))
        for symbol in self.nest.sizes:
            argument = KernelArgument("size", symbol.name, DType.I64)
            if argument_name(argument) in text:
                found.append(argument)
        return tuple(found)

    def _grid(self) -> None:
        """The value of each outer loop in this program instance."""
        if self.wide and not self.plan.persistent:
            self.scope.line("zero = tl.full([], 0, tl.int64)")
        if self.plan.serial:
            for axis in self.plan.axes:
                name = identifier(axis.loop.symbol)
                self.scope.open(f"for {name} in {self.range_of(self.expr(axis.loop.size))}:")
                self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset())
            return
        axes, rest = list(self.plan.axes), "program"
        if axes:
            wide = ".to(tl.int64)" if self.wide else ""
            self.scope.line(f"program = tl.program_id(0){wide}")
        position = len(self.plan.tile)
        for axis in reversed(axes):
            size, name = self.expr(axis.loop.size), identifier(axis.loop.symbol)
            part = rest
            if axis is not axes[0]:
                count = size if axis.block is None else f"(({size} + ({axis.block} - 1)) // {axis.block})"
                part = f"({rest} % {count})"
                following = f"rest_{name}"
                self.scope.line(f"{following} = {rest} // {count}")
                rest = following
            if axis.block is None:
                self.scope.line(f"{name} = {part}")
                self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset())
                continue
            position -= 1
            at = self.along(position)
            self.scope.line(f"{name} = {part} * {axis.block} + tl.arange(0, {axis.block}){at}")
            self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset({position}))
            constant = axis.loop.size.constant
            if constant is None or constant % self.config.block(axis.block):
                self.masks[position] = f"in_{name}"
                self.scope.line(f"in_{name} = {name} < {size}")

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
        return expr_text(expr, self._symbol_text)

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
        elif isinstance(instr, IndexValue):
            text = f"({self.index_value(instr.expr)}).to({TYPE_NAMES[instr.dtype]})"
            self.define(instr.result, text, self.dims_of(instr.expr))
        elif isinstance(instr, Compute):
            self._compute(instr)
        elif isinstance(instr, CheckIndex):
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
        exponent = self.consts.get(instr.args[-1]) if instr.op == "pow" and is_float(instr.dtype) else None
        text = _POWERS[exponent].format(args[0].text) if exponent in _POWERS else None
        if text is None:
            text = op_text(instr.op, [a.text for a in args], [self.types[a] for a in instr.args], instr.dtype)
        self.define(instr.result, text, dims)

    def _check_index(self, instr: CheckIndex) -> None:
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

    def access_masks(self, index: Expr, given: Value | None) -> list[str]:
        """What an access is masked with besides the axes: the one it was given, and that its indices are in range."""
        parts = [given.text] if given else []
        return parts + [self.in_range[s] for s in sorted(index.symbols, key=str) if s in self.in_range]

    # -- memory ------------------------------------------------------------------------------------------

    def _address(self, buffer: str, index: Expr, dtype: DType) -> tuple[str, Expr]:
        """Pointer text and offset."""
        if buffer in self.rows:
            return f"row_{identifier(buffer)}", self._row_start(buffer) + index
        owner = self.pointers.setdefault(buffer, dtype)
        name = pointer_name(buffer)
        return (name if owner is dtype else f"{name}.to(tl.pointer_type({TYPE_NAMES[dtype]}))"), index

    def _row_start(self, name: str) -> Expr:
        """Where this outer iteration's row begins."""
        position = to_expr(0)
        for axis in self.plan.axes:
            position = position * axis.loop.size + sym(axis.loop.symbol)
        return position * self._row_extent(name)[0] if not self.plan.serial else to_expr(0)

    def _row_extent(self, name: str) -> tuple[Expr, Expr]:
        row = self.rows[name]
        extent = to_expr(1)
        for size, stride in zip(row.sizes, row.strides, strict=True):
            extent = extent + (size - 1) * stride
        total = extent
        for axis in () if self.plan.serial else self.plan.axes:
            total = total * axis.loop.size
        return extent, total

    def _row_type(self, name: str) -> DType:
        dtype = dtype_from_torch_name(self.rows[name].dtype)
        assert dtype is not None
        return dtype

    def _load(self, i: Load) -> None:
        index = i.indices[0]
        given = self.value(i.mask) if i.mask else None
        place = self.expr(index)
        known = self.scope.stored(i.buffer, place, i.dtype) if given is None else None
        if known is not None:
            self.scope.values[i.result] = known
            return
        self.scope.before_load(i.buffer, place)
        if i.buffer in self.rows:
            self.rows_read.add(i.buffer)
        pointer, index = self._address(i.buffer, index, i.dtype)
        dims = self.dims_of(index) | (given.dims if given else frozenset())
        masks = self.access_masks(index, given)
        mask = self.mask(dims, *masks)
        offset = self.index_value(index, dims)
        extra = f", mask={mask}" if mask else ""
        if masks:
            extra += f", other={other_text(i.other if given else 0, i.dtype)}"
        version = self.scope.version(i.buffer)
        self.scope.define(i.result, f"tl.load({pointer} + {offset}{extra})", dims, key=version)

    def _store(self, i: Store) -> None:
        value = self.value(i.value)
        given = self.value(i.mask) if i.mask else None
        dtype = self.types[i.value]
        pointer, index = self._address(i.buffer, i.indices[0], dtype)
        dims = self.dims_of(index) | value.dims | (given.dims if given else frozenset())
        if i.accumulates:
            dims |= frozenset(range(self.rank if self.scope.in_stage else len(self.axes)))
        masks = self.access_masks(index, given)
        mask = self.mask(dims, *masks)
        offset = self.index_value(index, dims)
        extra = f", mask={mask}" if mask else ""
        text = value.text
        if i.accumulates and value.dims != dims:
            text = f"tl.broadcast_to({text}, {self.shape(dims)})"
        self.scope.before_store(i.buffer, self.expr(i.indices[0]))
        if not i.accumulates:
            tag = f"row {i.buffer}" if i.buffer in self.rows else ""
            self.scope.line(f"tl.store({pointer} + {offset}, {text}{extra})", tag)
            self.scope.remember(i.buffer, self.expr(i.indices[0]), value, dtype, not masks)
        elif self.plan.serial:
            self._combine(i, f"{pointer} + {offset}", text, extra, dtype)
        else:
            always = mask or f"tl.full({self.shape(frozenset())}, 1, tl.int1)"
            self.scope.line(f"atomic_{i.mode}({pointer} + {offset}, {text}, {always})")
            self.scope.remember(i.buffer, "", value, dtype, False)

    def _combine(self, i: Store, address: str, text: str, extra: str, dtype: DType) -> None:
        """Read, combine, write, by the only program instance; each step waits for the one before."""
        old = self.scope.fresh("old")
        self.scope.line(f"{old} = tl.load({address}{extra})")
        combined = accumulate_text(i.mode, old, text, dtype)
        self.scope.line("tl.debug_barrier()")
        self.scope.line(f"tl.store({address}, {combined}{extra})")
        self.scope.line("tl.debug_barrier()")
        self.scope.forget(i.buffer)


_POWERS: Mapping[object, str] = {
    2.0: "({0} * {0})",
    3.0: "({0} * {0} * {0})",
    -2.0: "reciprocal({0} * {0})",
    -1.0: "reciprocal({0})",
    0.5: "square_root({0})",
    -0.5: "reciprocal(square_root({0}))",
}


def other_text(other: float | int | bool, dtype: DType) -> str:
    """What masked-off lanes of a load give."""
    if dtype is DType.BOOL:
        return str(int(bool(other)))
    if is_float(dtype):
        return repr(float(other)) if other == other and abs(other) != float("inf") else f'float("{float(other)}")'
    return str(int(other))


_TAKEN = frozenset({"tl", "jit", "libm", "triton", "range", "float", *device_function_names()})


def function_name(nest: str) -> str:
    """The kernel's name in the source: the nest's, unless that means something else there."""
    name = identifier(nest)
    return f"{name}_kernel" if name in _TAKEN or iskeyword(name) else name


def argument_name(argument: KernelArgument) -> str:
    """The parameter's name in the source."""
    if argument.kind == "pointer":
        return pointer_name(argument.name)
    return f"{'row' if argument.kind == 'scratch' else 'size'}_{identifier(argument.name)}"


def pointer_name(buffer: str) -> str:
    """The pointer parameter of a buffer."""
    return f"p_{identifier(buffer)}"


def needs_64_bit(nest: FlatNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether an offset or a count might pass 2^31: it does not if all sizes are known and small."""
    limit = 2**31 - 2**20  # room for the last block
    total = to_expr(1)
    for loop in nest.outer:
        total = total * loop.size
    for row in nest.rows:
        if total.constant is None or total.constant * _extent(row) >= limit:
            return True
    inner = max((size_hint(_inner_size(s.ranges)) for s in nest.stages), default=1)
    for expr in (total, *(loop.size for s in nest.stages for loop in s.ranges)):
        if expr.constant is None:
            return True
    if total.constant * inner >= limit:  # type: ignore[operator]
        return True
    largest = {Symbol(loop.symbol): loop.size for loop in (*nest.outer, *(r for s in nest.stages for r in s.ranges))}
    if any(_magnitude(expr, largest) >= limit for expr in nest.expressions()):
        return True
    return any(_extent(buffers[name]) >= limit for name in nest.memories)


def _inner_size(ranges: Sequence[object]) -> Expr:
    total = to_expr(1)
    for loop in ranges:
        total = total * loop.size  # type: ignore[attr-defined]
    return total


def _magnitude(expr: Expr, sizes: Mapping[Symbol, Expr]) -> float:
    """A bound of what computing ``expr`` goes through, its parts included; infinite if a size is not known. Values of
    the kernel are 64 bits wide, and so is what they are part of: they count as 1."""
    total = 0.0
    for monomial, factor in expr.terms:
        product = inner = float(abs(factor))
        for atom in monomial:
            if isinstance(atom, Symbol):
                size = to_expr(1) if atom.kind is SymbolKind.VALUE else sizes.get(atom)
                part = float("inf") if size is None or size.constant is None else float(max(1, size.constant))
            else:
                part = max(1.0, *(_magnitude(arg, sizes) for arg in atom.args))
            product, inner = product * part, max(inner, part)
        total += max(product, inner)
    return total


def _extent(buffer: Buffer) -> int:
    last = 1
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        last += max(0, size_hint(size) - 1) * size_hint(stride)
    return last


def _describe(origin: Origin) -> list[str]:
    lines = []
    if origin.nodes:
        lines.append(f"{' '.join(origin.nodes)}: {' '.join(dict.fromkeys(origin.ops))}"[:200])
    if origin.line:
        lines.append(origin.line.replace("\n", " ")[:200])
    return lines
