"""Nests that compute matrix products, as kernels around ``tl.dot``.

What :func:`~...kernel_ir.matmul_site.matmul_site` recognises: a tile is computed by ``tl.dot``. How tiles are cut and
in which order they are computed is in :mod:`..products`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ....ir import DType, Instr, Load, Store
from ....ir.walk import instructions, value_types
from ....kernel_ir.matmul_site import MatmulSite, matmul_site
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_passes.choose_index_width import choose_index_width
from ....ops.dtypes import bits, is_half
from ....symbolic import Expr, Symbol, SymbolKind, floordiv, product, to_expr
from ..map_loops import map_to, size_hint
from ..products import STEP, ProductTile, Sizes, ranked
from ..records import DESCRIPTOR_BYTES, Gpu, KernelArgument, KernelSource
from .body import End
from .factors import Factor, factors_of
from .indices import identifier
from .kernel import KernelEmitter
from .lines import Value

__all__ = ["dot_site", "emit_matmul", "product_sources"]

_HOPPER = Gpu()
_NOTHING: frozenset[str] = frozenset()


def dot_site(kernel: Kernel) -> MatmulSite | None:
    """The product that a kernel computes, if ``tl.dot`` can: it sums in f32."""
    site = matmul_site(kernel)
    return site if site is not None and site.reduce.dtype is DType.F32 else None


def product_sources(
    kernel: Kernel,
    gpu: Gpu = _HOPPER,
    *,
    most: int = 1,
    unaligned: Set[str] = _NOTHING,
    tf32: bool = False,
    asserts: bool = True,
    fast: bool = False,
) -> tuple[KernelSource, ...]:
    """The ``most`` ways to compute a product that are expected to be the fastest, the best first. All take the same
    arguments. ``unaligned``: memory that may begin anywhere; for the others see :func:`emit_matmul`."""
    site = _site(kernel)
    both = factors_of(kernel, site, unaligned, gpu.arch)
    described = all(factor.described(site.inner, STEP) for factor in both)
    found: dict[tuple[str, object], KernelSource] = {}
    for tile in ranked(_sizes(kernel, site, both), gpu, described):
        source = emit_matmul(kernel, tile, gpu, unaligned=unaligned, tf32=tf32, asserts=asserts, fast=fast)
        found.setdefault((source.text, source.config), source)
        if len(found) == most:
            break
    return _with_equal_arguments(tuple(found.values()))


def emit_matmul(
    kernel: Kernel,
    tile: ProductTile,
    gpu: Gpu = _HOPPER,
    *,
    unaligned: Set[str] = _NOTHING,
    tf32: bool = False,
    asserts: bool = True,
    fast: bool = False,
) -> KernelSource:
    """The source of a kernel with a :func:`dot_site`, in tiles. ``tf32`` lets f32 factors lose bits, as
    ``torch.backends.cuda.matmul.allow_tf32`` does."""
    site = _site(kernel)
    tile = tile.fitting((site.rows.extent, site.columns.extent, site.inner.extent))
    names = {site.columns.symbol: "XBLOCK", site.rows.symbol: "YBLOCK"}
    mapped = choose_index_width(map_to(kernel, names, tile.config))
    return _MatmulEmitter(mapped, site, tile, gpu, unaligned, tf32, asserts, fast).emit()


def _site(kernel: Kernel) -> MatmulSite:
    site = dot_site(kernel)
    if site is None:
        raise ValueError(f"kernel {kernel.name} is no matrix product")
    return site


def _sizes(kernel: Kernel, site: MatmulSite, both: tuple[Factor, Factor]) -> Sizes:
    count = size_hint(product(loop.extent for loop in kernel.grid[:-2]))
    rows, columns, inner = (size_hint(loop.extent) for loop in (site.rows, site.columns, site.inner))
    body = instructions(kernel.body)
    types = value_types(body)
    stored = max(bits(types.get(i.value, DType.I64)) for i in body if isinstance(i, Store))
    factor = 2 if both[0].half else max(bits(f.dtype) for f in both) // 8
    return Sizes(count, rows, columns, inner, factor, max(1, stored // 8))


def _with_equal_arguments(sources: tuple[KernelSource, ...]) -> tuple[KernelSource, ...]:
    """Ways that are compared take the same arguments: all take descriptors, of which some make no use."""
    wanted = [a for source in sources for a in source.arguments if a.kind == "descriptors"]
    if not wanted:
        return sources
    largest = max(wanted, key=lambda a: a.extent.constant or 0)
    return tuple(replace(s, arguments=(*(a for a in s.arguments if a.kind != "descriptors"), largest)) for s in sources)


class _MatmulEmitter(KernelEmitter):
    def __init__(
        self,
        kernel: Kernel,
        site: MatmulSite,
        tile: ProductTile,
        gpu: Gpu,
        unaligned: Set[str],
        tf32: bool,
        asserts: bool,
        fast: bool,
    ) -> None:
        super().__init__(kernel, asserts, fast)
        self.site, self.product_tile, self.gpu, self.tf32 = site, tile, gpu, tf32
        self.row_axis, self.rank = None, 2  # the summed loop is an axis of the factors only
        self.factors = factors_of(kernel, site, unaligned, gpu.arch)
        self.counts = tuple(_tiles(loop.extent, loop.map.width) for loop in (site_loops(kernel)))
        self.walks = tile.walks and self._may_walk()
        self.programs = gpu.processors * tile.at_once(gpu, _sizes(kernel, site, self.factors))
        extra = [("GROUP", max(1, min(tile.group, size_hint(self.counts[0]))))]
        extra += [("PROGRAMS", self.programs)] if self.walks else []
        self.config = replace(self.config, blocks=(*self.config.blocks, *extra))

    def _may_walk(self) -> bool:
        known = all(loop.extent.constant is not None for loop in self.kernel.grid)
        step = self.config.block("RBLOCK")
        return known and not self.wide and all(f.described(self.site.inner, step) for f in self.factors)

    # -- which tile ------------------------------------------------------------------------------------------

    def emit(self) -> KernelSource:
        source = super().emit()
        if not self.walks:
            return source
        count = min(self.programs, self._all_tiles().constant or 0)
        # Descriptors begin at multiples of their size, as all that torch's allocator gives on a device does.
        scratch = to_expr(2 * DESCRIPTOR_BYTES // 8 * self.programs)
        descriptors = KernelArgument("descriptors", "descriptors", DType.I64, True, scratch)
        return replace(source, arguments=(*source.arguments, descriptors), grid=((to_expr(count), None),))

    def _all_tiles(self) -> Expr:
        return product((*self.counts, *(loop.extent for loop in self.kernel.grid[:-2])))

    def _grid(self) -> None:
        """Which tile this is: groups of rows of tiles, in a group column by column, see
        :class:`~..products.ProductTile`."""
        scope, (rows, columns) = self.scope, self.counts
        if self.wide:
            scope.line("zero = tl.full([], 0, tl.int64)")
        program = "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"
        if self.walks:
            self._describe_factors()
            tiles = self.expr(self._all_tiles())
            scope.open(f"for program in tl.range({program}, {tiles}, PROGRAMS, flatten=True):")
        else:
            scope.line(f"program = {program}")
        tile = self._batch("program", self.expr(rows * columns))
        scope.line(f"across = GROUP * {self.expr(columns)}")
        scope.line(f"first = {tile} // across * GROUP")
        group, count = self.config.block("GROUP"), rows.constant
        even = count is not None and count % group == 0
        scope.line(f"height = {'GROUP' if even else f'tl.minimum({self.expr(rows)} - first, GROUP)'}")
        places = f"first + {tile} % across % height", f"{tile} % across // height"
        for axis, (loop, place) in enumerate(zip(self.tile, places, strict=True)):
            self._along_tile(axis, loop, place)

    def _batch(self, program: str, tiles: str) -> str:
        """The number of the tile in its own product, where there are several."""
        others = self.kernel.grid[:-2]
        if not others:
            return program
        self.scope.line(f"rest = program // {tiles}")
        for loop in reversed(others):
            name, size = identifier(loop.symbol), self.expr(loop.extent)
            if loop is others[0]:
                self.scope.line(f"{name} = rest")
            else:
                self.scope.line(f"{name} = rest % {size}")
                self.scope.line(f"rest = rest // {size}")
            self.symbols[Symbol(loop.symbol)] = Value(name, frozenset())
        self.scope.line(f"tile = program % {tiles}")
        return "tile"

    def _along_tile(self, axis: int, loop: Loop, place: str) -> None:
        scope, name, block = self.scope, identifier(loop.symbol), loop.map.block
        scope.line(f"start_{name} = ({place}) * {block}")
        scope.line(f"{name} = start_{name} + tl.arange(0, {block}){self.along(axis)}")
        self.symbols[Symbol(loop.symbol)] = Value(name, frozenset({axis}))
        if loop.map.tail == "masked":
            self.masks[axis], self.ends[axis] = f"in_{name}", End(name, loop)
            scope.line(f"in_{name} = {name} < {self.expr(loop.extent)}")

    def instruction(self, instr: Instr) -> None:
        """Anything but a reduce. One number for the whole tile is loaded as such, or each of its threads would load it
        for each of its results."""
        if not isinstance(instr, Load) or instr.mask or instr.buffer in self.written or not self._is_one(instr):
            super().instruction(instr)
            return
        pointer, index = self.address(instr.buffer, instr.indices[0], instr.dtype)
        self.define(instr.result, f"tl.load({pointer} + {self.expr(index)})", frozenset())

    def _is_one(self, load: Load) -> bool:
        symbols = load.indices[0].symbols
        computed = any(symbol.kind is SymbolKind.VALUE for symbol in symbols)
        return not computed and load.buffer not in self.scratch and not self.dims_of(load.indices[0])

    # -- what is computed of it ------------------------------------------------------------------------------

    def write_body(self) -> None:
        scope, site = self.scope, self.site
        scope.line("acc = tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)")
        wide = ".to(tl.int64)" if self.wide else ""
        saved = scope.enter_loop(f"for start in {self.range_of(self.expr(site.inner.extent), 'RBLOCK')}:")
        if not self.walks:
            scope.line(f"k = start + tl.arange(0, RBLOCK){wide}")
        left, right = (self._piece(factor) if self.walks else self._loaded(factor) for factor in self.factors)
        types = "".join(f", {factor.float8}" for factor in self.factors if factor.float8)
        half = self.factors[0].half or is_half(self.factors[0].dtype)
        function = "dot_float8" if types else "dot" if half else "dot_tf32" if self.tf32 else "dot_ieee"
        scope.line(f"acc = {function}({left}, {right}, acc{types})")
        scope.leave_loop(saved)
        scope.values[site.reduce.result] = Value("acc", frozenset({0, 1}))
        for nest in self.nests[1:]:
            self.body(nest.body)

    def _describe_factors(self) -> None:
        """A descriptor of each factor: its memory as a matrix, and the piece of it that one step takes."""
        for factor in self.factors:
            load, place = factor.load, factor.place
            assert load is not None and place is not None
            pointer, index = self.address(load.buffer, load.indices[0], load.dtype)
            offset = sum(each for monomial, each in index.terms if not monomial)
            base = f"{pointer} + {offset}" if offset else pointer
            blocks = (factor.outer.map.block, "RBLOCK")
            block = ", ".join(blocks if place.along_sum else blocks[::-1])
            text = f"{base}, [{place.rows}, {place.width}], [{place.pitch}, 1], [{block}]"
            self.scope.line(f"{factor.side} = tl.make_tensor_descriptor({text})")

    def _piece(self, factor: Factor) -> str:
        """One step's piece of a factor that has a descriptor."""
        place = factor.place
        assert place is not None
        starts = [f"start_{identifier(factor.outer.symbol)}", "start"]
        both = starts if place.along_sum else starts[::-1]
        for symbol, *further in place.offsets:
            name = self.symbols[Symbol(symbol)].text
            both = [f"{at} + {name} * {by}" if by else at for at, by in zip(both, further, strict=True)]
        loaded = f"{factor.side}.load([{', '.join(both)}])"
        straight = place.along_sum == (factor.side == "left")
        self.scope.line(f"{factor.side}_piece = {loaded if straight else f'tl.trans({loaded})'}")
        return f"{factor.side}_piece"

    def _loaded(self, factor: Factor) -> str:
        """One step's piece of a factor, by its pointers: zero past the end of the sum."""
        scope, site = self.scope, self.site
        axis = 1 if factor.side == "left" else 0
        symbols, masks, ends = dict(self.symbols), dict(self.masks), self.ends
        own, values = self.axes, dict(scope.values)
        self.axes = ["YBLOCK", "RBLOCK"] if axis else ["RBLOCK", "XBLOCK"]
        inner = scope.fresh("k")
        scope.line(f"{inner} = k{'[None, :]' if axis else '[:, None]'}")
        self.symbols[Symbol(site.inner.symbol)] = Value(inner, frozenset({axis}))
        self.masks = {other: mask for other, mask in masks.items() if other != axis}
        self.ends, self.zero_fills = {}, True
        constant = site.inner.extent.constant
        if constant is None or constant % self.config.block("RBLOCK"):
            self.masks[axis] = f"in_{inner}"
            scope.line(f"in_{inner} = {inner} < {self.expr(site.inner.extent)}")
        for instr in factor.needed:
            self.instruction(instr)
        value = scope.values[factor.name]
        tile = scope.fresh("tile")
        text = value.text
        if value.dims != {0, 1}:
            text = f"tl.broadcast_to({text}, [{', '.join(self.axes)}])"
        if axis in self.masks and not (factor.zero_past_end and axis in value.dims):
            text = f"tl.where({self.masks[axis]}, {text}, {factor.zero})"
        scope.line(f"{tile} = {text}{'.to(tl.float16)' if factor.half else ''}")
        self.symbols, self.masks, self.ends, self.zero_fills = symbols, masks, ends, False
        self.axes, scope.values = own, values
        return tile


def site_loops(kernel: Kernel) -> tuple[Loop, Loop]:
    """Rows and columns of a product's kernel."""
    rows, columns = kernel.grid[-2:]
    return rows, columns


def _tiles(size: Expr, block: int) -> Expr:
    return floordiv(size + (block - 1), block)
