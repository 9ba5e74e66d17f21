"""Kernels that are products of matrices, as the CPU's renderer writes them: in tiles of vectors or of tile registers,
or for a few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ...ir import Buffer, CheckedIndex, Compute, DType, Instr, Load, LoopNest, Store
from ...ir.walk import loads, operands, places_in
from ...kernel_ir.matmul_site import FewRowsSite, MatmulSite, few_rows_site, matmul_site
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.panels import Panels
from ...kernel_ir.product_site import ProductSite, product_site
from ...kernel_ir.walk import perfect_nests
from ...kernel_passes.normal_form import kernel_of
from ...symbolic import Symbol, SymbolKind, has_calls, product
from .choose_few_rows import FEW_FOR_TILES, FEW_ROWS, LEAST
from .machine import Machine
from .map_loops import bears_mask
from .render.types import width
from .tile_forms import DEPTH, FORMS, PANEL, TileForm

__all__ = ["GroupedProduct", "ProductForm", "TiledFactor", "TiledProduct", "bytes_of", "computed_by", "few_rows"]
__all__ += ["has_tiles", "has_tiles_of_bytes", "lies_along_columns"]
__all__ += [
    "grouped_product",
    "multiplies_bytes",
    "multiplies_few_bytes",
    "multiplies_pairs",
    "packed_form",
    "packed_right",
    "panels_of_tile_form",
    "panels_of_tiles",
    "plain_left",
    "product_form",
]
__all__ += ["product_of", "tiled_product", "widened_along_sum"]

LEAST_IN_TILES = (6, 8, 4)  # rows, columns, summed: of less there is no tile


@dataclass(frozen=True, slots=True)
class TiledFactor:
    """A factor as tiles take it: its value, the type of that, what computes it, and whether neighbors in memory are
    neighbors in the sum (``along``) or lines. ``panels``: how it lies in memory if it was packed before."""

    value: str
    dtype: DType
    body: tuple[Instr, ...]
    along: bool
    panels: Panels | None = None


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """A product for tile registers. ``filled``: the share of its steps that is not padding."""

    site: ProductSite
    form: TileForm
    left: TiledFactor
    right: TiledFactor
    filled: float


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """A product of numbers that an instruction multiplies several at once: where it is, and the loads of both factors,
    of which ``panels`` says how the right one is read."""

    site: MatmulSite
    left: Load
    right: Load
    panels: Panels


ProductForm = MatmulSite | FewRowsSite | TiledProduct | GroupedProduct


def product_of(nest: LoopNest, buffers: Mapping[str, Buffer], target: Machine) -> ProductForm | None:
    """What :func:`product_form` says of the kernel that a nest becomes. Whose memory an alias shows does not matter."""
    return product_form(kernel_of(nest, buffers), target)


def packed_form(nest: LoopNest, buffers: Mapping[str, Buffer], target: Machine) -> Panels | None:
    """The layout in which a product's kernel reads its right factor if that is packed before, or already is."""
    kernel = kernel_of(nest, buffers)
    form = _many_rows(kernel, target) if _may_be_packed(few_rows(kernel)) else product_form(kernel, target)
    if isinstance(form, TiledProduct):
        return _packed_for_tiles(form)
    site = form.site if isinstance(form, GroupedProduct) else form
    if not isinstance(site, MatmulSite):
        return None
    right = computed_by(kernel, site.right)
    halves = _widened(right, DType.BF16, DType.F32) if multiplies_pairs(target) else None
    narrow = halves is not None
    load = halves if narrow else right[0] if len(right) == 1 else None
    if not isinstance(load, Load) or load.mask is not None:
        return None
    panels = replace(panels_of_tiles(site, target), group=2 if narrow else 1)
    if has_calls(load.indices[0]):
        read = packed_right(kernel, site, panels) is not None and isinstance(form, GroupedProduct) == narrow
        return panels if read else None
    return _if_long(panels, site.columns, site.inner)


def _if_long(panels: Panels, columns: Loop, inner: Loop) -> Panels | None:
    """The layout, unless a matrix is one panel or one step of it: then it lies as it would anyway."""
    count, steps = columns.extent.constant, inner.extent.constant
    return panels if steps and steps > panels.group and count and count > panels.width else None


def _packed_for_tiles(form: TiledProduct) -> Panels | None:
    """The same of a product for tile registers, whose right factor is a matrix that is read as it is."""
    site, right = form.site, form.right
    if right.panels is not None:
        return right.panels
    panels = panels_of_tile_form(form.form, right.dtype)
    load = right.body[0] if len(right.body) == 1 else None
    single = len(site.columns) == 1 and len(site.inner) == 1
    if panels is None or not isinstance(load, Load) or load.mask is not None or not single:
        return None
    return _if_long(panels, site.columns[0], site.inner[0]) if load.dtype is right.dtype else None


def panels_of_tile_form(form: TileForm, dtype: DType) -> Panels | None:
    """The panels that tiles of a form are loaded from; ``None`` where a factor is packed in each call."""
    if form.pieces == 1 and dtype in (DType.BF16, DType.I8):
        return Panels(PANEL, 2 if dtype is DType.BF16 else 4, form.depth)
    return Panels(PANEL, 2, DEPTH, DEPTH // 2, form.pieces) if dtype is DType.F32 and form.pieces == 3 else None


def panels_of_tiles(site: MatmulSite, target: Machine) -> Panels:
    """The panels that the tiles of a product read, see Note [Products in registers]."""
    vectors = 4 if target.vector_bits == 512 or target.triple.startswith("aarch64") else 2
    return Panels(target.lanes(width(site.reduce.dtype)) * vectors)


def packed_right(kernel: Kernel, site: MatmulSite, panels: Panels) -> Load | None:
    """The load of a right factor that lies in these panels already."""
    steps = site.inner.extent.constant
    for load in loads(computed_by(kernel, site.right)) if steps else ():
        loops = (Symbol(site.columns.symbol), Symbol(site.inner.symbol))
        if panels.piece_at(load.indices[0], *loops, steps or 0) is not None:
            return load
    return None


def product_form(kernel: Kernel, target: Machine) -> ProductForm | None:
    """The product that a kernel in normal form is, if :class:`ProductEmitter`, :class:`TiledProductEmitter` or
    :class:`FewRowsEmitter` can write it and it is large enough."""
    if not target.has("fma"):
        return None
    site = few_rows(kernel)
    if site is not None and site.reduce.dtype is DType.I32:
        return site if multiplies_few_bytes(target) and bytes_of(kernel, site) is not None else None
    if not _may_be_packed(site):
        return site or _many_rows(kernel, target)
    return tiled_product(kernel, target) or (_many_rows(kernel, target) if _is_packed(kernel, target) else site)


def _may_be_packed(site: FewRowsSite | None) -> bool:
    """Whether a product of a few rows has so many of them that tiles of a packed matrix take less time."""
    return site is not None and site.count > FEW_FOR_TILES


def _is_packed(kernel: Kernel, target: Machine) -> bool:
    """Whether the right factor lies in panels of tiles."""
    site = matmul_site(kernel)
    panels = None if site is None else panels_of_tiles(site, target)
    if site is None or panels is None:
        return False
    return any(packed_right(kernel, site, replace(panels, group=group)) is not None for group in (1, 2))


def _many_rows(kernel: Kernel, target: Machine) -> ProductForm | None:
    """The product that a kernel is in tiles of any kind."""
    return tiled_product(kernel, target) or grouped_product(kernel, target) or _in_tiles(kernel)


def multiplies_pairs(target: Machine) -> bool:
    """Whether there are instructions for vectors of products of pairs of bfloat16."""
    return target.vector_bits == 512 and target.has("avx512bf16")


def grouped_product(kernel: Kernel, target: Machine) -> GroupedProduct | None:
    """The product of bfloat16 or of bytes that a kernel is, as :class:`GroupedProductEmitter` writes it: both factors
    are read from memory, where neighbors are neighbors in the sum, or the right one lies in panels of pairs."""
    site = matmul_site(kernel, whole=True)
    known = {DType.F32: multiplies_pairs, DType.I32: multiplies_bytes}
    if site is None or site.reduce.dtype not in known or not known[site.reduce.dtype](target):
        return None
    if not _fills_tiles(kernel, site):
        return None
    group = 4 if site.reduce.dtype is DType.I32 else 2
    values = site.left, site.right
    narrow = DType.I8 if group == 4 else DType.BF16
    left, right = (_widened(computed_by(kernel, value), narrow, site.reduce.dtype) for value in values)
    inner, steps = Symbol(site.inner.symbol), site.inner.extent.constant
    if left is None or right is None or steps is None or left.indices[0].coefficient(inner) != 1:
        return None
    row = left.indices[0].coefficient(Symbol(site.rows.symbol))
    panels = replace(panels_of_tiles(site, target), group=group)
    if row is None or not {Symbol(site.rows.symbol), inner}.isdisjoint(row.symbols):
        return None
    if group > 2 or packed_right(kernel, site, panels) is None:
        step = right.indices[0].coefficient(Symbol(site.columns.symbol))
        groups = step is not None and step.constant is not None and step.constant % group == 0 and steps % group == 0
        if not groups or right.indices[0].coefficient(inner) != 1:
            return None
    return GroupedProduct(site, left, right, panels)


def _widened(body: Sequence[Instr], narrow: DType, wide: DType) -> Load | None:
    """The load of a factor that was of a narrower type, and that nothing else is computed of."""
    if len(body) != 2:
        return None
    load, cast = body
    if not isinstance(load, Load) or load.mask is not None or load.dtype is not narrow:
        return None
    return load if isinstance(cast, Compute) and cast.op == "cast" and cast.dtype is wide else None


def has_tiles(target: Machine) -> bool:
    """Whether there are tile registers, beside vectors that fill a row of them."""
    return target.vector_bits == 512 and target.has("amx-bf16")


def has_tiles_of_bytes(target: Machine) -> bool:
    """Whether tile registers multiply bytes, too."""
    return has_tiles(target) and target.has("amx-int8")


def multiplies_bytes(target: Machine) -> bool:
    """Whether there are instructions for vectors of products of bytes."""
    return target.vector_bits == 512 and target.has("avx512vnni")


def multiplies_few_bytes(target: Machine) -> bool:
    """Whether there are such instructions, or at least such for words that bytes are widened to."""
    return target.vector_bits >= 256


def bytes_of(kernel: Kernel, site: FewRowsSite) -> tuple[Load, Load] | None:
    """The loads of bytes that both factors are, if the right ones follow each other along the sum."""
    left, right = _loaded_byte(kernel, site.left), widened_along_sum(kernel, site, DType.I8)
    return None if left is None or right is None else (left, right)


def widened_along_sum(kernel: Kernel, site: FewRowsSite, dtype: DType) -> Load | None:
    """The load of the matrix, where that has this type, lies along the one summed loop and is only widened on the way
    to the type that is summed in."""
    load = _widened(computed_by(kernel, site.right), dtype, site.reduce.dtype)
    if load is None or len(site.inner) != 1:
        return None
    return load if load.indices[0].coefficient(Symbol(site.inner[0].symbol)) == 1 else None


def _loaded_byte(kernel: Kernel, value: str) -> Load | None:
    """The byte that a factor is widened from."""
    return _widened(computed_by(kernel, value), DType.I8, DType.I32)


def tiled_product(kernel: Kernel, target: Machine) -> TiledProduct | None:
    """The product that a kernel is, as :class:`TiledProductEmitter` writes it: of known sizes, no side of which is much
    smaller than a panel, and with factors whose neighbors in memory are neighbors in a panel."""
    if not has_tiles(target):
        return None
    site = product_site(kernel, whole=True)
    if site is None or any((size.constant or 0) < PANEL // 2 for size in site.sizes):
        return None
    if site.reduce.dtype is DType.I32:
        return _tiled_bytes(kernel, site) if has_tiles_of_bytes(target) else None
    if site.reduce.dtype is not DType.F32:
        return None
    factors = [_tiled_factor(kernel, value) for value in (site.left, site.right)]
    narrow = all(factor.dtype is DType.BF16 for factor in factors)
    if not narrow:
        factors = [_wide_factor(kernel, value) for value in (site.left, site.right)]
    form = FORMS["bf16" if narrow else site.precision]
    factors[1] = replace(factors[1], panels=_panels_of(site, factors[1], form))
    lying = _best_order(site, *factors)
    if lying is None:
        return None
    site, left, right, filled = lying
    if len(site.columns) > 1 and (site.columns[-1].extent.constant or 1) % (PANEL // 2):
        return None  # vectors of results would be in two rows of columns
    after = [stmt for stmt in kernel.body if not isinstance(stmt, Loop)]
    if not all(map(bears_mask, (*left.body, *right.body, *after))):
        return None
    return TiledProduct(site, form, left, right, filled)


def _tiled_bytes(kernel: Kernel, site: ProductSite) -> TiledProduct | None:
    """The product of bytes that a kernel is: both factors are read from memory, or the right one from panels."""
    loads_ = [_loaded_byte(kernel, value) for value in (site.left, site.right)]
    if None in loads_ or any(len(loops) > 1 for loops in (site.rows, site.columns, site.inner)):
        return None
    factors = [TiledFactor(load.result, DType.I8, (load,), along=False) for load in loads_ if load is not None]
    factors[1] = replace(factors[1], panels=_panels_of(site, factors[1], FORMS["int8"]))
    lying = _best_order(site, *factors)
    after = [stmt for stmt in kernel.body if not isinstance(stmt, Loop)]
    if lying is None or not all(map(bears_mask, after)):
        return None
    site, left, right, filled = lying
    return TiledProduct(site, FORMS["int8"], left, right, filled)


def _panels_of(site: ProductSite, factor: TiledFactor, form: TileForm) -> Panels | None:
    """The panels that the right factor lies in already: it is an element of them, or the sum of an element's pieces,
    the largest of which is first."""
    panels = panels_of_tile_form(form, factor.dtype)
    if panels is None or len(site.columns) > 1 or len(site.inner) > 1:
        return None
    pieces, computed = loads(factor.body), [i for i in factor.body if isinstance(i, Compute)]
    if len(factor.body) != len(pieces) + len(computed) or any(load.mask is not None for load in pieces):
        return None
    loops, steps = (Symbol(site.columns[0].symbol), Symbol(site.inner[0].symbol)), site.inner[0].extent.constant
    found = [panels.piece_at(load.indices[0], *loops, steps or 0) for load in pieces]
    stored = DType.I8 if factor.dtype is DType.I8 else DType.BF16
    in_place = found == list(range(panels.pieces)) and all(load.dtype is stored for load in pieces)
    return panels if in_place and _is_sum(factor.value, pieces, computed) else None


def _is_sum(value: str, terms: Sequence[Load], computed: Sequence[Compute]) -> bool:
    """Whether a value is a single number, or the sum of several as float32 in their order."""
    if len(terms) == 1:
        return not computed and value == terms[0].result
    made = {instr.result: (instr.op, instr.args, instr.dtype) for instr in computed}
    for number in reversed(range(1, len(terms))):
        op, args, dtype = made.pop(value, ("", (), None))
        if op != "add" or dtype is not DType.F32 or made.pop(args[1], None) != _widening(terms[number]):
            return False
        value = args[0]
    return made.pop(value, None) == _widening(terms[0]) and not made


def _widening(load: Load) -> tuple[str, tuple[str, ...], DType]:
    return "cast", (load.result,), DType.F32


def _wide_factor(kernel: Kernel, value: str) -> TiledFactor:
    return TiledFactor(value, DType.F32, computed_by(kernel, value), along=False)


def _tiled_factor(kernel: Kernel, value: str) -> TiledFactor:
    """A factor, before it is widened if it was bfloat16."""
    body = computed_by(kernel, value)
    types = {instr.result: instr.dtype for instr in body if not isinstance(instr, Store | CheckedIndex)}
    last = body[-1]
    if isinstance(last, Compute) and last.op == "cast" and types.get(last.args[0]) is DType.BF16:
        return TiledFactor(last.args[0], DType.BF16, body[:-1], along=False)
    if isinstance(last, Compute) and last.op == "cast" and types.get(last.args[0]) in (DType.I8, DType.U8, DType.BOOL):
        narrow = replace(last, dtype=DType.BF16)  # which has all values of a byte
        return TiledFactor(value, DType.BF16, (*body[:-1], narrow), along=False)
    return TiledFactor(value, DType.F32, body, along=False)


def _best_order(
    site: ProductSite, left: TiledFactor, right: TiledFactor
) -> tuple[ProductSite, TiledFactor, TiledFactor, float] | None:
    """The product with that of its summed loops innermost which fills steps best, of those along which neighbors in
    memory are neighbors in panels; ``None`` if there is none. In which order is summed does not matter."""
    found = []
    for last in site.inner:
        others = tuple(loop for loop in site.inner if loop is not last)
        rows = _lying(left, site.rows, last)
        columns = right if right.panels is not None else _lying(right, site.columns, last)
        if rows is not None and columns is not None:
            size = last.extent.constant or 1
            flat = not others or not (rows.along or columns.along)  # else steps end where the innermost loop does
            depth = site.sizes[2].constant or 1 if flat else size
            step = FORMS["int8"].depth if left.dtype is DType.I8 else DEPTH
            filled = depth / (-(-depth // step) * step)
            found.append((filled, size, (replace(site, inner=(*others, last)), rows, columns, filled)))
    return max(found, key=lambda item: item[:2])[2] if found else None


def _lying(factor: TiledFactor, lines: tuple[Loop, ...], last: Loop) -> TiledFactor | None:
    """A factor with how it lies in memory; ``None`` where its neighbors are no neighbors in a panel."""
    offsets = [instr.indices[0] for instr in factor.body if isinstance(instr, Load)]

    def contiguous(loop: Loop) -> bool:
        return any(offset.coefficient(Symbol(loop.symbol)) == 1 for offset in offsets)

    if contiguous(last):
        return replace(factor, along=True)
    whole = len(lines) == 1 or (lines[-1].extent.constant or 1) % (PANEL // 2) == 0
    return factor if whole and contiguous(lines[-1]) else None


def few_rows(kernel: Kernel) -> FewRowsSite | None:
    """The product of a few rows that a kernel is, as :class:`FewRowsEmitter` writes it."""
    site = few_rows_site(kernel, FEW_ROWS)
    if site is None:
        return None
    sizes = site.columns.extent.constant, product(loop.extent for loop in site.inner).constant
    if any(size is not None and size < least for size, least in zip(sizes, LEAST[1:], strict=True)):
        return None
    after = [stmt for stmt in kernel.body if not isinstance(stmt, Loop)]
    before = (*computed_by(kernel, site.left), *computed_by(kernel, site.right))
    places = {instr.result for instr in places_in(perfect_nests(kernel)[0].body) if not isinstance(instr, Store)}
    before = tuple(instr for instr in before if not (isinstance(instr, Load) and _is_at(instr, places)))
    return site if all(map(bears_mask, (*before, *after))) else None


def _is_at(load: Load, places: Set[str]) -> bool:
    """Whether values in the index of a load are among those that are the same for all lanes."""
    return all(s.name in places for s in load.indices[0].symbols if s.kind is SymbolKind.VALUE)


def lies_along_columns(kernel: Kernel, site: FewRowsSite) -> bool:
    """Whether neighbours in the right factor's memory are neighbouring columns, and no neighbours in the sum."""

    along, inner = Symbol(site.columns.symbol), Symbol(site.inner[-1].symbol)
    places = [i.indices[0] for i in computed_by(kernel, site.right) if isinstance(i, Load)]
    places = [place for place in places if {along, inner} <= set(place.symbols)] or places  # no condition or scale
    return any(p.coefficient(along) == 1 for p in places) and not any(p.coefficient(inner) == 1 for p in places)


def _in_tiles(kernel: Kernel) -> MatmulSite | None:
    """The product that a kernel is, as :class:`ProductEmitter` writes it."""
    site = matmul_site(kernel)
    if site is None or not _fills_tiles(kernel, site):
        return None
    before = computed_by(kernel, site.right)
    if plain_left(kernel, site) is None:
        before = (*before, *computed_by(kernel, site.left))
    return site if all(map(bears_mask, before)) else None


def _fills_tiles(kernel: Kernel, site: MatmulSite) -> bool:
    """Whether no side is shorter than a tile, and what is computed of sums can be masked."""
    sides = zip((site.rows, site.columns, site.inner), LEAST_IN_TILES, strict=True)
    if any(loop.extent.constant is not None and loop.extent.constant < least for loop, least in sides):
        return False
    return all(bears_mask(stmt) for stmt in kernel.body if not isinstance(stmt, Loop))


def computed_by(kernel: Kernel, value: str) -> tuple[Instr, ...]:
    """What one factor is computed by, without places that are known before (:func:`~...ir.walk.places_in`)."""
    wanted, kept = {value}, []
    for instr in reversed(perfect_nests(kernel)[0].body):
        if not isinstance(instr, Store | CheckedIndex) and instr.result in wanted:
            kept.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(kept))


def plain_left(kernel: Kernel, site: MatmulSite) -> Load | None:
    """The load that the left factor is, if it is nothing else and its elements are evenly spaced both ways."""
    made = computed_by(kernel, site.left)
    load = made[0] if len(made) == 1 else None
    if not isinstance(load, Load) or load.mask is not None or load.dtype is not site.reduce.dtype:
        return None
    loops = [Symbol(loop.symbol) for loop in (site.rows, site.inner)]
    steps = [load.indices[0].coefficient(symbol) for symbol in loops]
    return load if all(step is not None and not set(loops) & set(step.symbols) for step in steps) else None
