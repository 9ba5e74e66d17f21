"""Products over any number of loops, convolutions above all, as kernels around ``tl.dot``.

Note [Implicit products]
    A convolution is a product of matrices that nobody writes to memory: a row is a place of an image, a column a
    channel of the result, and what is summed are taps and channels (in the gradient by the weights, images and places).
    So tiles are those of a product, and each axis of a tile counts through several loops, whose variables are quotients
    and remainders of its own. Of rows and columns these are computed once for a tile. Along the sum there are two ways:

    * by *runs*: each step goes along the innermost loop alone, and the others are plain numbers there. Their quotients
      cost nothing, and rows of channels are loaded 16 bytes a thread.
    * *flat*: the axis of a step counts through all of the loops, for those whose innermost one is short (the three
      channels of a picture) or would leave much of its last step empty. As long as a run is a multiple of 16 bytes,
      loads are as wide; divisors are constants in the text for that.

    What lies outside of an image is not loaded: its mask is part of the factor, and 0 is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....ir import Compute, Const, DType, Index, Instr, Load, Store
from ....ir.walk import instructions, loads, operands, value_types
from ....kernel_ir.matmul_site import matmul_site
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.product_site import ProductSite, product_site
from ....kernel_ir.walk import perfect_nests
from ....kernel_passes.choose_index_width import choose_index_width
from ....ops.dtypes import bits, is_half
from ....symbolic import Expr, Symbol, floordiv, product
from ..map_loops import map_to, size_hint
from ..products import ProductTile, Sizes, ranked
from ..records import Gpu, KernelSource
from .factors import factor_chain
from .indices import identifier
from .kernel import KernelEmitter
from .lines import Value
from .ops import TYPE_NAMES

__all__ = ["emit_implicit", "implicit_site", "implicit_sources"]

_HOPPER = Gpu()
_ROWS = 64  # of one loop, which a plain product's tiles are filled by
_SHORT = 16  # of an innermost summed loop: steps along it would be shorter than tl.dot takes
_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})
_LARGEST = 2**31 - 1
_EMPTY = 1.15  # times as much as there is may be multiplied


def implicit_site(kernel: Kernel) -> ProductSite | None:
    """The product that a kernel computes, if :func:`emit_implicit` should write it: it sums in f32, and it is none of
    two plain matrices."""
    site = product_site(kernel)
    if site is None or site.reduce.dtype is not DType.F32:
        return None
    if len(site.rows) == len(site.columns) == len(site.inner) == 1:
        return None
    plain = matmul_site(kernel)
    if plain is not None and size_hint(plain.rows.extent) >= _ROWS:
        return None
    few = min(size_hint(extent) for extent in site.sizes[:2])
    return _with_channels_last(site, kernel) if few >= _SHORT else None


def implicit_sources(
    kernel: Kernel,
    gpu: Gpu = _HOPPER,
    *,
    most: int = 1,
    tf32: bool = False,
    asserts: bool = True,
    fast: bool = False,
) -> tuple[KernelSource, ...]:
    """The ``most`` ways to compute a product that are expected to be the fastest, the best first."""
    site = _site(kernel)
    found: dict[tuple[str, object], KernelSource] = {}
    for tile in ranked(_sizes(kernel, site), gpu, described=False):
        source = emit_implicit(kernel, tile, tf32=tf32, asserts=asserts, fast=fast)
        found.setdefault((source.text, source.config), source)
        if len(found) == most:
            break
    return tuple(found.values())


def emit_implicit(
    kernel: Kernel, tile: ProductTile, *, tf32: bool = False, asserts: bool = True, fast: bool = False
) -> KernelSource:
    """The source of a kernel with an :func:`implicit_site`, in tiles. ``tf32``: see :func:`~.matmul.emit_matmul`."""
    site = _site(kernel)
    tile = tile.fitting(site.sizes)
    step, flat = _step(site.inner, tile.inner)
    tile = replace(tile, inner=step, walks=False)
    mapped = choose_index_width(map_to(kernel, {}, tile.config))
    return _ImplicitEmitter(mapped, _site(mapped), tile, flat, tf32, asserts, fast).emit()


def _site(kernel: Kernel) -> ProductSite:
    site = product_site(kernel)
    if site is None or site.reduce.dtype is not DType.F32:
        raise ValueError(f"kernel {kernel.name} is no product that is summed in f32")
    return _with_channels_last(site, kernel)


def _with_channels_last(site: ProductSite, kernel: Kernel) -> ProductSite:
    """The site with that summed loop innermost along which elements lie side by side, the longest one of such."""
    places = [load.indices[0] for load in loads(perfect_nests(kernel)[0].body)]

    def beside(loop: Loop) -> int:
        steps = (place.coefficient(Symbol(loop.symbol)) for place in places)
        return size_hint(loop.extent) if any(step is not None and step == 1 for step in steps) else 0

    return replace(site, inner=tuple(sorted(site.inner, key=beside)))


def _sizes(kernel: Kernel, site: ProductSite) -> Sizes:
    rows, columns, inner = map(size_hint, site.sizes)
    body = instructions(kernel.body)
    types = value_types(body)
    stored = max(bits(types.get(i.value, DType.I64)) for i in body if isinstance(i, Store))
    wide = max(bits(side.dtype) for side in _sides(kernel, site))
    count = size_hint(product(loop.extent for loop in site.batch))
    return Sizes(count, rows, columns, inner, wide // 8, max(1, stored // 8))


def _step(inner: Sequence[Loop], most: int) -> tuple[int, bool]:
    """How long a step is, and whether steps are flat, see Note [Implicit products]."""
    if len(inner) == 1:
        return most, False
    run = inner[-1].extent.constant
    if run is None:
        return most, False
    for step in (most, most // 2):
        if step >= _SHORT and -(-run // step) * step <= _EMPTY * run:
            return step, False
    return most, True


@dataclass(frozen=True, slots=True)
class _Side:
    """One factor: the instructions that compute it, its value's name and type. ``loaded``: it is nothing but a load,
    so that lanes which that masks off are 0."""

    axis: int
    needed: tuple[Instr, ...]
    name: str
    dtype: DType
    loaded: bool


def _sides(kernel: Kernel, site: ProductSite) -> tuple[_Side, _Side]:
    types = value_types(instructions(kernel.body))
    body = perfect_nests(kernel)[0].body
    found = []
    for axis, factor in ((1, site.left), (0, site.right)):
        needed, name = factor_chain(factor, body, types, (site.left, site.right))
        last = needed[-1]
        loaded = isinstance(last, Load) and last.result == name and (last.mask is None or last.other == 0)
        found.append(_Side(axis, tuple(needed), name, types[name], loaded))
    return found[0], found[1]


class _ImplicitEmitter(KernelEmitter):
    def __init__(
        self,
        kernel: Kernel,
        site: ProductSite,
        tile: ProductTile,
        flat: bool,
        tf32: bool,
        asserts: bool,
        fast: bool,
    ) -> None:
        super().__init__(kernel, asserts, fast)
        self.site, self.flat, self.tf32 = site, flat, tf32
        self.tile, self.axes = [], ["YBLOCK", "XBLOCK"]
        self.row_axis, self.rank = None, 2
        self.ends_in_step = False
        rows, columns, _ = site.sizes
        self.counts = _tiles(rows, tile.rows), _tiles(columns, tile.columns)
        group = max(1, min(tile.group, size_hint(self.counts[0])))
        self.config = replace(tile.config, blocks=(*tile.config.blocks, ("GROUP", group)))

    def emit(self) -> KernelSource:
        rows, columns, _ = self.site.sizes
        batch = tuple((loop.extent, None) for loop in self.site.batch)
        return replace(super().emit(), grid=(*batch, (rows, "YBLOCK"), (columns, "XBLOCK")))

    # -- which tile ------------------------------------------------------------------------------------------

    def _grid(self) -> None:
        """Which tile this is, in the order of :class:`~.matmul.ProductTile`'s groups."""
        scope, (rows, columns) = self.scope, (self.expr(count) for count in self.counts)
        if self.wide:
            scope.line("zero = tl.full([], 0, tl.int64)")
        scope.line(f"program = tl.program_id(0){'.to(tl.int64)' if self.wide else ''}")
        if self.site.batch:
            scope.line(f"batch = program // ({rows} * {columns})")
            scope.line(f"program = program % ({rows} * {columns})")
            self._count_through("batch", self.site.batch, frozenset())
        scope.line(f"across = GROUP * {columns}")
        scope.line("first = program // across * GROUP")
        scope.line(f"height = tl.minimum({rows} - first, GROUP)")
        places = "first + program % across % height", "program % across // height"
        sides = self.site.rows, self.site.columns
        for axis, (name, place, loops) in enumerate(zip(("row", "column"), places, sides, strict=True)):
            block, count = self.axes[axis], self.site.sizes[axis]
            scope.line(f"{name} = ({place}) * {block} + tl.arange(0, {block}){self.along(axis)}")
            if count.constant is None or count.constant % self.config.block(block):
                self.masks[axis] = f"in_{name}"
                scope.line(f"in_{name} = {name} < {self.expr(count)}")
            self._count_through(name, loops, frozenset({axis}))

    def _count_through(self, number: str, loops: Sequence[Loop], dims: frozenset[int]) -> None:
        """The variables of loops from the number of an iteration of all."""
        rest = number
        for loop in reversed(loops):
            name, size = identifier(loop.symbol), self.expr(loop.extent)
            self.symbols[Symbol(loop.symbol)] = Value(name, dims)
            if loop is loops[0]:
                self.scope.line(f"{name} = {rest}")
                return
            self.scope.line(f"{name} = {rest} % {size}")
            self.scope.line(f"rest_{name} = {rest} // {size}")
            rest = f"rest_{name}"

    # -- what is computed of it ------------------------------------------------------------------------------

    def write_body(self) -> None:
        scope, site = self.scope, self.site
        scope.line("acc = tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)")
        along, size = self._steps()
        saved = scope.enter_loop(f"for step in {self.range_of(size)}:")
        self._along_sum(along)
        sides = _sides(self.kernel, site)
        left, right = map(self._loaded, sides)
        function = "dot" if is_half(sides[0].dtype) else "dot_tf32" if self.tf32 else "dot_ieee"
        scope.line(f"acc = {function}({left}, {right}, acc)")
        scope.leave_loop(saved)
        scope.values[site.reduce.result] = Value("acc", frozenset({0, 1}))
        for nest in self.nests[1:]:
            self.body(nest.body)

    def _steps(self) -> tuple[tuple[Loop, ...], str]:
        """The loops that the axis of a step counts through, and how many steps there are."""
        step, inner = self.config.block("RBLOCK"), self.site.inner
        if self.flat:
            return inner, self.expr(_tiles(product(loop.extent for loop in inner), step))
        others = product(loop.extent for loop in inner[:-1])
        return inner[-1:], self.expr(others * _tiles(inner[-1].extent, step))

    def _along_sum(self, along: tuple[Loop, ...]) -> None:
        """The variables of the summed loops in a step; those that vary within it are vectors, see :meth:`_loaded`."""
        scope, step = self.scope, self.config.block("RBLOCK")
        others, at = self.site.inner[: len(self.site.inner) - len(along)], "step"
        if others:
            parts = self.expr(_tiles(along[0].extent, step))
            scope.line(f"run = step // {parts}")
            scope.line(f"part = step % {parts}")
            self._count_through("run", others, frozenset())
            at = "part"
        wide = ".to(tl.int64)" if self.wide else ""
        scope.line(f"k = {at} * RBLOCK + tl.arange(0, RBLOCK){wide}")
        size = product(loop.extent for loop in along)
        if size.constant is None or size.constant % step:
            scope.line(f"in_k = k < {self.expr(size)}")
            self.ends_in_step = True
        self._count_through("k", along, frozenset({0}))

    def _loaded(self, side: _Side) -> str:
        """One step's piece of a factor: zero past the end of the sum."""
        scope, axis = self.scope, side.axis
        along, _ = self._steps()
        symbols, masks, own, values = dict(self.symbols), dict(self.masks), self.axes, dict(scope.values)
        self.axes = ["YBLOCK", "RBLOCK"] if axis else ["RBLOCK", "XBLOCK"]
        shown = "[None, :]" if axis else "[:, None]"
        for loop in along:
            name = self.symbols[Symbol(loop.symbol)].text
            own_name = scope.fresh(name)
            scope.line(f"{own_name} = {name}{shown}")
            self.symbols[Symbol(loop.symbol)] = Value(own_name, frozenset({axis}))
        self.masks = {other: mask for other, mask in masks.items() if other != axis}
        self.zero_fills = True
        if self.ends_in_step:
            inside = scope.fresh("in_k")
            scope.line(f"{inside} = in_k{shown}")
            self.masks[axis] = inside
        for instr in side.needed if self.wide else _narrow(side.needed):
            self.instruction(instr)
        value = scope.values[side.name]
        tile, text = scope.fresh("tile"), value.text
        if value.dims != {0, 1}:
            text = f"tl.broadcast_to({text}, [{', '.join(self.axes)}])"
        if axis in self.masks and not (side.loaded and axis in value.dims):
            text = f"tl.where({self.masks[axis]}, {text}, tl.full([1, 1], 0.0, {TYPE_NAMES[side.dtype]}))"
        scope.line(f"{tile} = {text}")
        self.symbols, self.masks, self.zero_fills = symbols, masks, False
        self.axes, scope.values = own, values
        return tile


def _narrow(body: Sequence[Instr]) -> Sequence[Instr]:
    """The body with places in an image as i32, where all that is done with them is to compare them: offsets fit i32
    in this kernel, and so do they."""
    compared = {name for i in body if isinstance(i, Compute) and i.op in _COMPARISONS for name in i.args if name}
    used = {name for i in body if not (isinstance(i, Compute) and i.op in _COMPARISONS) for name in operands(i)}
    alone = compared - used
    return [
        replace(i, dtype=DType.I32)
        if isinstance(i, Index | Const) and i.dtype is DType.I64 and i.result in alone and _fits(i)
        else i
        for i in body
    ]


def _fits(instr: Index | Const) -> bool:
    """Whether a value is an index, or a number that is none too large."""
    return isinstance(instr, Index) or abs(int(instr.value)) <= _LARGEST


def _tiles(size: Expr, block: int) -> Expr:
    return floordiv(size + (block - 1), block)
