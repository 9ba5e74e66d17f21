"""The rules of the kernel IR, checked: Note [The kernel IR in one page] in :mod:`.nodes`, made executable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import IRError
from ..ir import DType, Load, Reduce, Store
from ..ir.verify_instr import InstrChecker
from ..ir.walk import instructions, loads, stores
from ..ops.dtypes import bits
from ..ops.reductions import is_positional
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, mod, product
from .conflicts import find_conflict
from .nodes import LOOP_KINDS, STORAGES, TAILS, Kernel, KernelCall, KernelModule, Loop, Param, Scratch, Stmt
from .walk import perfect_nest

__all__ = ["verify_kernel", "verify_module"]


def verify_kernel(kernel: Kernel, extents: Mapping[str, Expr] | None = None, *, size_minimum: int = 0) -> None:
    """Check one kernel. Raises :class:`IRError` naming the kernel and the instruction.

    ``extents``: how many bytes each memory has, by the parameter's name; nothing is said of offsets in others.
    ``size_minimum``: the smallest value that dynamic sizes are known to have.
    """
    checker = _KernelChecker(kernel, extents or {}, size_minimum)
    checker.run()
    for condition, version in kernel.versions:
        checker.check_version(condition, version)
        verify_kernel(version, extents, size_minimum=size_minimum)


def verify_module(module: KernelModule, extents: Mapping[str, Expr] | None = None, *, size_minimum: int = 0) -> None:
    """Check all kernels and calls of a program. ``extents``: how many bytes each buffer has that is passed."""
    extents = extents or {}
    called: set[str] = set()
    for call in module.calls:
        place = f"module {module.name}, call {call.step}"
        if call.step in called:
            raise IRError(f"{place}: the step is called twice")
        called.add(call.step)
        if not 0 <= call.kernel < len(module.kernels):
            raise IRError(f"{place}: there is no kernel {call.kernel}, but {len(module.kernels)} of them")
        _check_arguments(call, module.kernels[call.kernel], place)
    for number, kernel in enumerate(module.kernels):
        arguments = next((c.arguments for c in module.calls if c.kernel == number), None)
        if arguments is None:
            raise IRError(f"module {module.name}: nothing calls kernel {kernel.name}")
        names = zip(kernel.params, arguments, strict=True)
        known = {param.name: extents[name] for param, name in names if name in extents}
        verify_kernel(kernel, known, size_minimum=size_minimum)


def _check_arguments(call: KernelCall, kernel: Kernel, place: str) -> None:
    if len(call.arguments) != len(kernel.params):
        raise IRError(f"{place}: {len(call.arguments)} arguments for kernel {kernel.name}, not {len(kernel.params)}")
    for param, argument in zip(kernel.params, call.arguments, strict=True):
        if argument.startswith("$") != (param.kind != "memory"):
            raise IRError(f"{place}: {argument} is no {param.kind} for {param.name}")
    memories = [a for a in call.arguments if not a.startswith("$")]
    if len(set(memories)) != len(memories):
        raise IRError(f"{place}: a memory is passed twice")


class _KernelChecker(InstrChecker):
    """Walks one kernel. ``around``: the loops around an instruction, without the grid's."""

    whole, part, needs_proof = "kernel", "loop", False

    def __init__(self, kernel: Kernel, extents: Mapping[str, Expr], size_minimum: int) -> None:
        super().__init__(f"kernel {kernel.name}", size_minimum)
        self.kernel = kernel
        self.extents = extents
        self.memories: dict[str, Param] = {}
        self.scratch: dict[str, Scratch] = {}
        self.given: set[Symbol] = set()
        self.around: list[Loop] = []
        self.results: dict[str, DType] = {}  # of reductions, visible after the outermost loop
        self.stored: set[str] = set()
        self.loop_names: set[str] = set()
        self.in_lanes = False

    def run(self) -> None:
        self.check_params()
        for declared in self.kernel.scratch:
            self.check_scratch(declared)
        for loop in self.kernel.grid:
            if loop.body:
                raise self.fail(f"loop {loop.symbol} of the grid has a body of its own")
            self.enter(loop)
        self.check_body(self.kernel.body)
        self.place = f"kernel {self.kernel.name}"
        self.check_uses()
        conflict = find_conflict(self.kernel)
        if conflict:
            raise self.fail(conflict)

    # -- declarations ----------------------------------------------------------------------------

    def check_params(self) -> None:
        for param in self.kernel.params:
            if param.kind != "memory":
                symbol = Symbol(param.name, SymbolKind.SIZE)
                if symbol in self.given:
                    raise self.fail(f"parameter {symbol} appears twice")
                self.given.add(symbol)
                continue
            if param.name in self.memories:
                raise self.fail(f"parameter {param.name} appears twice")
            if len({param.dtype, *param.also}) != 1 + len(param.also):
                raise self.fail(f"parameter {param.name} names a type twice")
            self.memories[param.name] = param
        if self.kernel.index_type not in (DType.I64, DType.I32):
            raise self.fail(f"offsets are computed in i64 or i32, not {self.kernel.index_type.value}")

    def check_scratch(self, declared: Scratch) -> None:
        if declared.name in self.scratch or declared.name in self.memories:
            raise self.fail(f"memory {declared.name} is declared twice")
        if declared.storage not in STORAGES:
            raise self.fail(f"scratch {declared.name} can't be in {declared.storage!r}")
        self.require_size_expr(declared.extent, f"the extent of {declared.name}")
        if declared.extent.constant is not None and declared.extent.constant < 0:
            raise self.fail(f"scratch {declared.name} has a negative extent")
        self.scratch[declared.name] = declared

    def require_size_expr(self, expr: Expr, what: str) -> None:
        super().require_size_expr(expr, what)
        self.check_given(expr)

    def check_given(self, expr: Expr) -> None:
        missing = sorted(s for s in expr.symbols if s.kind is SymbolKind.SIZE and s not in self.given)
        if missing:
            raise self.fail(f"{missing[0]} is no parameter")

    def check_uses(self) -> None:
        """That what a parameter is said to be is what the body does with it."""
        stored = stores(instructions(self.kernel.body))
        written = {i.buffer for i in stored}
        for name, param in self.memories.items():
            if param.written and name not in written:
                raise self.fail(f"parameter {name} is declared as written, but nothing stores to it")
        loaded = {i.buffer for i in loads(instructions(self.kernel.body))}
        for name, param in self.memories.items():
            if param.nontemporal and (name in loaded or not param.written):
                raise self.fail(f"stores to {name} go past the caches, so the kernel must write and not read it")
        if any(i.accumulates for i in stored) and not self.kernel.ordered:
            raise self.fail("a store accumulates, so the kernel must be ordered")

    def check_version(self, condition: Expr, version: Kernel) -> None:
        """A version takes what the kernel takes."""
        self.place = f"kernel {self.kernel.name}, version {condition}"
        self.require_size_expr(condition, "the condition")
        if (version.params, version.scratch) != (self.kernel.params, self.kernel.scratch):
            raise self.fail("a version has the parameters and the scratch memory of its kernel")

    # -- loops -----------------------------------------------------------------------------------

    def enter(self, loop: Loop) -> None:
        self.place = f"kernel {self.kernel.name}, loop {loop.symbol}"
        if loop.symbol in self.loop_names:
            raise self.fail(f"loop variable {loop.symbol} is used twice")
        self.loop_names.add(loop.symbol)
        self.add_loop(loop.symbol, loop.extent)
        self.check_map(loop)
        self.ranges = Ranges(dict(self.sizes), self.size_minimum)
        self.never_runs = self.never_runs or loop.extent == 0

    def check_map(self, loop: Loop) -> None:
        how = loop.map
        if how.kind not in LOOP_KINDS or how.tail not in TAILS:
            raise self.fail(f"there is no {how.kind!r} loop with a tail that is {how.tail!r}")
        if how.width < 1 or how.interleave < 1:
            raise self.fail("a loop takes at least one iteration at once")
        extent = loop.extent
        if how.kind in ("tile", "block") and loop.body:
            extent = product(inner.extent for inner in perfect_nest(loop)[0] if inner.map.block == how.block)
        step = how.width * how.interleave
        if how.tail == "exact" and step > 1 and mod(extent, step) != 0:
            raise self.fail(f"{extent} may be no multiple of {step}, so the loop needs a tail")
        if how.kind == "lanes":
            if self.in_lanes:
                raise self.fail("a loop in lanes stands in another")
            self.in_lanes = True

    def check_body(self, body: Iterable[Stmt]) -> None:
        for position, stmt in enumerate(body):
            if isinstance(stmt, Loop):
                self.check_loop(stmt)
                continue
            inside = "".join(f", loop {loop.symbol}" for loop in self.around[-1:])
            self.place = f"kernel {self.kernel.name}{inside}, instruction {position} `{self.shown(stmt)}`"
            self.check(stmt)

    def check_loop(self, loop: Loop) -> None:
        types, sizes = dict(self.types), dict(self.sizes)
        outside = self.ranges, self.never_runs, self.in_lanes
        self.enter(loop)
        self.around.append(loop)
        self.check_body(loop.body)
        self.around.pop()
        self.types, self.sizes = types, sizes
        self.ranges, self.never_runs, self.in_lanes = outside
        if not self.around:
            self.types.update(self.results)
            self.results = {}

    # -- memory ----------------------------------------------------------------------------------

    def check_read(self, i: Load) -> None:
        if i.buffer in self.scratch and i.buffer not in self.stored:
            raise self.fail(f"scratch {i.buffer} is loaded before it is stored")
        self.check_access(i, i.dtype)

    def check_write(self, i: Store, dtype: DType) -> None:
        if i.buffer in self.memories and not self.memories[i.buffer].written:
            raise self.fail(f"parameter {i.buffer} is not declared as written")
        self.check_access(i, dtype)
        self.stored.add(i.buffer)

    def check_access(self, i: Load | Store, dtype: DType) -> None:
        declared = self.scratch.get(i.buffer) or self.memories.get(i.buffer)
        if declared is None:
            raise self.fail(f"no memory named {i.buffer!r} is declared")
        also = declared.also if isinstance(declared, Param) else ()
        if dtype not in (declared.dtype, *also):
            raise self.fail(f"{i.buffer} holds {declared.dtype.value}, not {dtype.value}")
        if len(i.indices) != 1:
            raise self.fail(f"{len(i.indices)} indices; a kernel names an element by its offset in {i.buffer}")
        self.check_symbols(i.indices[0])
        self.check_given(i.indices[0])
        if isinstance(declared, Scratch):
            if any(Symbol(loop.symbol) in i.indices[0].symbols for loop in self.kernel.grid):
                raise self.fail(f"scratch {i.buffer} is indexed by a loop of the grid")
            extent: Expr | None = declared.extent
        else:
            size = self.extents.get(i.buffer)
            extent = None if size is None else size // (bits(dtype) // 8)
        if extent is not None and i.mask is None and not self.never_runs:
            self.check_bounds(i.indices[0].substitute(self.known), extent, f"the offset in {i.buffer}")

    # -- values ----------------------------------------------------------------------------------

    def check_symbols(self, expr: Expr) -> None:
        super().check_symbols(expr)
        self.check_given(expr)

    def check_result(self, i: Reduce) -> None:
        if not self.around:
            raise self.fail("a reduction needs a loop around it")
        if (i.position is not None) != is_positional(i.kind):
            raise self.fail("argmin and argmax name the position that they give, and no others do")
        if i.position is not None:
            self.check_symbols(i.position)
        if i.running:
            self.define(i.result, i.dtype)
            return
        self.new_name(i.result)
        self.results[i.result] = i.dtype
