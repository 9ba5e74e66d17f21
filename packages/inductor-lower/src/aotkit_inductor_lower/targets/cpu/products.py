"""Kernels that are products of matrices, as the CPU's renderer writes them: in tiles, or for a few rows."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, Instr, Load, LoopNest, Store
from ...ir.walk import operands
from ...kernel_ir.matmul_site import FewRowsSite, MatmulSite, few_rows_site, matmul_site
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import perfect_nests
from ...kernel_passes.linearize import Placement
from ...kernel_passes.normal_form import kernel_of
from ...symbolic import Symbol, product, to_expr
from .choose_few_rows import FEW_ROWS, LEAST
from .machine import Machine
from .map_loops import bears_mask

__all__ = ["computed_by", "few_rows", "lies_along_columns", "plain_left", "product_form", "product_of"]


def product_of(nest: LoopNest, buffers: Mapping[str, Buffer], target: Machine) -> MatmulSite | FewRowsSite | None:
    """What :func:`product_form` says of the kernel that a nest becomes. Whose memory an alias shows does not matter."""
    return product_form(kernel_of(nest, buffers, {name: Placement(name, to_expr(0)) for name in buffers}), target)


def product_form(kernel: Kernel, target: Machine) -> MatmulSite | FewRowsSite | None:
    """The product that a kernel in normal form is, if :class:`ProductEmitter` or :class:`FewRowsEmitter` can write it
    and it is large enough."""
    if not target.has("fma"):
        return None
    return few_rows(kernel) or _in_tiles(kernel)


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
    return site if all(map(bears_mask, (*before, *after))) else None


def lies_along_columns(kernel: Kernel, site: FewRowsSite) -> bool:
    """Whether neighbours in the right factor's memory are neighbouring columns, and no neighbours in the sum."""

    def contiguous(loop: Loop) -> bool:
        found = [i for i in computed_by(kernel, site.right) if isinstance(i, Load)]
        return any(load.indices[0].coefficient(Symbol(loop.symbol)) == 1 for load in found)

    return contiguous(site.columns) and not contiguous(site.inner[-1])


def _in_tiles(kernel: Kernel) -> MatmulSite | None:
    """The product that a kernel is, as :class:`ProductEmitter` writes it."""
    site = matmul_site(kernel)
    if site is None:
        return None
    sides = zip((site.rows, site.columns, site.inner), LEAST, strict=True)
    if any(loop.extent.constant is not None and loop.extent.constant < least for loop, least in sides):
        return None
    after = [stmt for stmt in kernel.body if not isinstance(stmt, Loop)]
    before = computed_by(kernel, site.right)
    if plain_left(kernel, site) is None:
        before = (*before, *computed_by(kernel, site.left))
    return site if all(map(bears_mask, (*before, *after))) else None


def computed_by(kernel: Kernel, value: str) -> tuple[Instr, ...]:
    """What one factor is computed by."""
    wanted, kept = {value}, []
    for instr in reversed(perfect_nests(kernel)[0].body):
        if not isinstance(instr, Store) and instr.result in wanted:
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
