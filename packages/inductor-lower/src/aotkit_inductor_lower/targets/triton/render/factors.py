"""The two factors of a matrix product: what computes them, and whether a descriptor can say where they are."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from ....ir import Compute, DType, Instr, Load, Reduce, Store
from ....ir.walk import instructions, value_types
from ....kernel_ir.matmul_site import MatmulSite
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import perfect_nests
from ....ops.dtypes import bits, is_half
from ....symbolic import Expr, Symbol
from ..sectors import WIDEST
from .float8 import FLOAT8_ARCH, byte_of
from .ops import TYPE_NAMES

__all__ = ["Factor", "Place", "factor_chain", "factors_of"]

_LARGEST = 2**31 - 1  # of a size of a described matrix, whose places are numbers of 32 bits


@dataclass(frozen=True, slots=True)
class Place:
    """Where a factor is, as a matrix in memory: ``along_sum``: neighbours are those along the sum; ``pitch``: elements
    from one row of neighbours to the next; ``rows`` of ``width`` neighbours. ``offsets``: for each of several products,
    by the loops that count them, by how many rows and neighbours its factor lies further on. ``whole``: what is behind
    the end of the sum is another product's, not zero, so steps must end where the sum does."""

    along_sum: bool
    pitch: int
    rows: int
    width: int
    offsets: tuple[tuple[str, int, int], ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Factor:
    """``side``: ``"left"`` or ``"right"``. ``needed``: the instructions that compute ``name``, of type ``dtype``.
    ``outer``: the loop that it varies along besides the summed one. ``load``: what it is, if nothing but that;
    ``place``: where that is, if a descriptor can say it. ``float8``: Triton's type of the bytes that it is, and
    ``half``: float16 holds all of it, though it is computed in more bits; see Note [Factors of 8 bits]."""

    side: str
    name: str
    dtype: DType
    needed: tuple[Instr, ...]
    outer: Loop
    load: Load | None
    place: Place | None
    float8: str = ""
    half: bool = False

    def described(self, inner: Loop, step: int) -> bool:
        """Whether descriptors can tell the factor's pieces of so many steps, see Note [Walks] in :mod:`..products`."""
        return self.place is not None and not (self.place.whole and (inner.extent.constant or 1) % step)

    @property
    def zero_past_end(self) -> bool:
        """Whether lanes that a load masks off are 0 in the factor, too."""
        return self.load is not None and (not self.load.mask or self.load.other == 0)

    @property
    def zero(self) -> str:
        """Its zero as a tensor, of what is computed."""
        return f"tl.full([1, 1], {0 if self.float8 else 0.0}, {TYPE_NAMES[self.dtype]})"


def factors_of(
    kernel: Kernel, site: MatmulSite, unaligned: Set[str] = frozenset(), arch: int = 90
) -> tuple[Factor, Factor]:
    """The factors of a kernel's product. ``unaligned``: memory that may begin anywhere. ``arch`` of the device."""
    types = value_types(instructions(kernel.body))
    rows, columns = kernel.grid[-2:]
    left = _factor("left", site.left, rows, kernel, types, site, unaligned)
    right = _factor("right", site.right, columns, kernel, types, site, unaligned)
    return _of_bytes(left, right, kernel, site, arch)


def _of_bytes(left: Factor, right: Factor, kernel: Kernel, site: MatmulSite, arch: int) -> tuple[Factor, Factor]:
    """The factors as what is multiplied, where both are 8-bit floats; see Note [Factors of 8 bits]."""
    body = perfect_nests(kernel)[0].body
    found = [byte_of(name, body) for name in (site.left, site.right)]
    if found[0] is None or found[1] is None:
        return left, right
    types = value_types(instructions(kernel.body))
    stored = max(bits(types[i.value]) for i in instructions(kernel.body) if isinstance(i, Store))
    if arch < FLOAT8_ARCH or stored > bits(DType.F16):
        sides = (replace(each, half=not is_half(each.dtype)) for each in (left, right))
        return next(sides), next(sides)
    made = []
    for factor, (name, format_) in zip((left, right), (found[0], found[1]), strict=True):
        needed, _ = factor_chain(name, body, types, (name, name))
        load = needed[-1]
        assert isinstance(load, Load)
        made.append(replace(factor, name=name, dtype=DType.U8, needed=tuple(needed), load=load, float8=format_))
    return made[0], made[1]


def _factor(
    side: str,
    name: str,
    outer: Loop,
    kernel: Kernel,
    types: dict[str, DType],
    site: MatmulSite,
    unaligned: Set[str],
) -> Factor:
    body = perfect_nests(kernel)[0].body
    needed, name = factor_chain(name, body, types, (site.left, site.right))
    last = needed[-1] if needed else None
    load = last if isinstance(last, Load) and last.result == name and len(needed) == 1 else None
    place = None if load is None or load.buffer in unaligned else _place(load, outer, kernel, site)
    return Factor(side, name, types[name], tuple(needed), outer, load, place)


def factor_chain(
    name: str, body: tuple[Instr, ...], types: Mapping[str, DType], both: tuple[str, str]
) -> tuple[list[Instr], str]:
    """The instructions of ``body`` that compute a factor, one of ``both``, and its name. The last cast of float16 or
    bfloat16 is left to the product, which is exact."""
    made = {i.result: i for i in body if not isinstance(i, Store)}
    last = made[name]
    ends = [made[n] for n in both]
    if all(isinstance(i, Compute) and i.op == "cast" and is_half(types[i.args[0]]) for i in ends):
        kinds = {types[i.args[0]] for i in ends if isinstance(i, Compute)}
        if len(kinds) == 1 and isinstance(last, Compute):
            name = last.args[0]
    wanted, pending = set(), [name]
    while pending:
        at = pending.pop()
        if at in wanted or at not in made:
            continue
        wanted.add(at)
        instr = made[at]
        if isinstance(instr, Compute):
            pending += instr.args
        elif isinstance(instr, Load) and instr.mask:
            pending.append(instr.mask)
    return [i for i in body if not isinstance(i, Store | Reduce) and i.result in wanted], name


def _place(load: Load, outer: Loop, kernel: Kernel, site: MatmulSite) -> Place | None:
    """Where a load's memory is, if a descriptor can say that."""
    index, size = load.indices[0], bits(load.dtype) // 8
    others = kernel.grid[:-2]
    loops = (outer, site.inner, *others)
    steps = [_step(index, loop) for loop in loops]
    extents = [loop.extent.constant or 0 for loop in loops]
    known = not load.mask and index.symbols <= {Symbol(loop.symbol) for loop in loops}
    if not known or not is_half(load.dtype) or 0 in extents or None in steps or min(_numbers(steps)) < 0:
        return None
    (across, down, *apart), along = _numbers(steps), steps[1] == 1
    pitch, own = (across, extents[:2]) if along else (down, extents[1::-1])
    offset = sum(factor for monomial, factor in index.terms if not monomial)
    aligned = pitch * size % WIDEST == 0 and offset * size % WIDEST == 0 and offset >= 0
    if (across if not along else down) != 1 or pitch <= 0 or not aligned:
        return None
    offsets, (rows, width) = list[tuple[str, int, int]](), own
    for loop, step in zip(others, apart, strict=True):
        down, right = divmod(step, pitch)
        offsets.append((loop.symbol, down, right))
        last = (loop.extent.constant or 1) - 1
        rows, width = rows + down * last, width + right * last
    if width > pitch or max(rows, pitch) > _LARGEST or any(right * size % WIDEST for *_, right in offsets):
        return None
    whole = any(each[2 if along else 1] for each in offsets)
    return Place(along, pitch, rows, width, tuple(offsets), whole)


def _step(index: Expr, loop: Loop) -> int | None:
    factor = index.coefficient(Symbol(loop.symbol))
    return None if factor is None else factor.constant


def _numbers(steps: list[int | None]) -> list[int]:
    return [step for step in steps if step is not None]
