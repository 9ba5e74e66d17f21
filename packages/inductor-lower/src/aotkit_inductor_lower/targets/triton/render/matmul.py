"""Nests that compute matrix products, as kernels around ``tl.dot``.

What :func:`~...kernel_ir.matmul_site.matmul_site` recognises: a tile is computed by ``tl.dot``.
"""

from __future__ import annotations

from dataclasses import replace

from ....ir import (
    Compute,
    DType,
    Instr,
    Load,
    Reduce,
    Store,
)
from ....kernel_ir.matmul_site import MatmulSite, matmul_site
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_passes.choose_index_width import choose_index_width
from ....ops.dtypes import is_half
from ....symbolic import Symbol
from ..map_loops import map_to, next_power_of_two, size_hint
from ..records import Config, KernelSource
from .kernel import KernelEmitter
from .lines import Value
from .ops import TYPE_NAMES

__all__ = ["CONFIGS", "dot_site", "emit_matmul"]


# -- kernels -----------------------------------------------------------------------------------------------------

CONFIGS = (
    Config((("XBLOCK", 128), ("YBLOCK", 128), ("RBLOCK", 32)), num_warps=8, num_stages=3),
    Config((("XBLOCK", 128), ("YBLOCK", 64), ("RBLOCK", 64)), num_warps=4, num_stages=3),
    Config((("XBLOCK", 64), ("YBLOCK", 64), ("RBLOCK", 64)), num_warps=4, num_stages=4),
    Config((("XBLOCK", 64), ("YBLOCK", 32), ("RBLOCK", 64)), num_warps=4, num_stages=4),
    Config((("XBLOCK", 32), ("YBLOCK", 32), ("RBLOCK", 32)), num_warps=2, num_stages=2),
)


def dot_site(kernel: Kernel) -> MatmulSite | None:
    """The product that a kernel computes, if ``tl.dot`` can: it sums in f32."""
    site = matmul_site(kernel)
    return site if site is not None and site.reduce.dtype is DType.F32 else None


def emit_matmul(
    kernel: Kernel,
    config: Config | None = None,
    *,
    tf32: bool = False,
    asserts: bool = True,
    fast: bool = False,
) -> KernelSource:
    """The source of a kernel with a :func:`dot_site`. ``tf32`` lets f32 factors lose bits, as
    ``torch.backends.cuda.matmul.allow_tf32`` does."""
    site = dot_site(kernel)
    if site is None:
        raise ValueError(f"kernel {kernel.name} is no matrix product")
    config = _fitting(config or CONFIGS[0], site)
    names = {site.columns.symbol: "XBLOCK", site.rows.symbol: "YBLOCK"}
    mapped = choose_index_width(map_to(kernel, names, config))
    return _MatmulEmitter(mapped, site, tf32, asserts, fast).emit()


def _fitting(config: Config, site: MatmulSite) -> Config:
    """Blocks no larger than the sizes, and at least the 16 that ``tl.dot`` asks for."""
    sizes = {"XBLOCK": site.columns.extent, "YBLOCK": site.rows.extent, "RBLOCK": site.inner.extent}
    blocks = tuple((n, max(16, min(b, next_power_of_two(size_hint(sizes[n]))))) for n, b in config.blocks)
    return replace(config, blocks=blocks)


class _MatmulEmitter(KernelEmitter):
    def __init__(self, kernel: Kernel, site: MatmulSite, tf32: bool, asserts: bool, fast: bool) -> None:
        super().__init__(kernel, asserts, fast)
        self.site, self.tf32 = site, tf32
        self.row_axis, self.rank = None, 2  # the summed loop is an axis of the factors only

    def write_body(self) -> None:
        scope, site = self.scope, self.site
        scope.line("acc = tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)")
        wide = ".to(tl.int64)" if self.wide else ""
        saved = scope.enter_loop(f"for start in {self.range_of(self.expr(site.inner.extent), 'RBLOCK')}:")
        scope.line(f"k = start + tl.arange(0, RBLOCK){wide}")
        left = self._factor(site.left, 1, ["YBLOCK", "RBLOCK"], site.rows)
        right = self._factor(site.right, 0, ["RBLOCK", "XBLOCK"], site.columns)
        half = is_half(self.types[left[1]])
        function = "dot" if half else "dot_tf32" if self.tf32 else "dot_ieee"
        scope.line(f"acc = {function}({left[0]}, {right[0]}, acc)")
        scope.leave_loop(saved)
        scope.values[site.reduce.result] = Value("acc", frozenset({0, 1}))
        for nest in self.nests[1:]:
            self.body(nest.body)

    def _factor(self, name: str, axis: int, axes: list[str], outer: Loop) -> tuple[str, str]:
        """The tile of one factor, with the summed loop along ``axis``, zero past its end; and the value it holds."""
        scope, site = self.scope, self.site
        needed, name = self._chain(name)
        symbols, masks, own, values = dict(self.symbols), dict(self.masks), self.axes, dict(scope.values)
        self.axes = axes
        inner = scope.fresh("k")
        scope.line(f"{inner} = k{'[None, :]' if axis else '[:, None]'}")
        self.symbols[Symbol(site.inner.symbol)] = Value(inner, frozenset({axis}))
        other = 1 - axis
        self.masks = {other: masks[other]} if other in masks else {}
        constant = site.inner.extent.constant
        if constant is None or constant % self.config.block("RBLOCK"):
            self.masks[axis] = f"in_{inner}"
            scope.line(f"in_{inner} = {inner} < {self.expr(site.inner.extent)}")
        for instr in needed:
            self.instruction(instr)
        value = scope.values[name]
        tile = scope.fresh("tile")
        text = f"tl.broadcast_to({value.text}, [{', '.join(axes)}])" if value.dims != {0, 1} else value.text
        if self.masks:
            where = " & ".join(self.masks[k] for k in sorted(self.masks))
            text = f"tl.where({where}, {text}, tl.full([1, 1], 0.0, {TYPE_NAMES[self.types[name]]}))"
        scope.line(f"{tile} = {text}")
        self.symbols, self.masks, self.axes, scope.values = symbols, masks, own, values
        return tile, name

    def _chain(self, name: str) -> tuple[list[Instr], str]:
        """The instructions that compute a factor. The last cast of float16 or bfloat16 is left to the product, which
        is exact."""
        body = self.nests[0].body
        made = {i.result: i for i in body if not isinstance(i, Store)}
        last = made[name]
        both = [made[n] for n in (self.site.left, self.site.right)]
        if all(isinstance(i, Compute) and i.op == "cast" and is_half(self.types[i.args[0]]) for i in both):
            kinds = {self.types[i.args[0]] for i in both if isinstance(i, Compute)}
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
