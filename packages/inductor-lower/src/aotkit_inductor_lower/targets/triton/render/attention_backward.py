"""The backward of attention as two Triton kernels: the gradients of queries, and those of keys and values.

Note [Gradients of attention]
    Both kernels compute scores and weights again from what the forward saved. The first has a block of queries and goes
    over the keys; it also writes down the sum of each query's result times its gradient, which the second reads. That
    has a block of keys and goes over all queries of all heads that share them, with scores turned over: so no sum is of
    more than one program instance, and results do not depend on which comes first. Since the second reads what the
    first does, no result may lie where an operand does (:func:`~....ir.in_place.may_write_over`).
"""

from __future__ import annotations

from ....kernel_ir.attention_site import AttentionSite, Lines
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr, floordiv, product, to_expr
from ..attention import AttentionTile, gradient_tiles
from ..records import Gpu, KernelSource
from .attention import AttentionText, needs_wide_offsets

__all__ = ["gradient_sources"]

_HOPPER = Gpu()
_OF_QUERIES = ("seen_from", "seen_to")  # of the keys of each block of queries
_OF_KEYS = ("seeing_from", "seeing_to")  # of the queries of each block of keys, head by head


def gradient_sources(
    kernel: Kernel,
    site: AttentionSite,
    tiles: tuple[AttentionTile, AttentionTile] | None = None,
    *,
    gpu: Gpu = _HOPPER,
    tf32: bool = False,
    fast: bool = False,
) -> tuple[KernelSource, ...]:
    """The kernels of a backward, one after the other."""
    of_query, of_keys = gradient_tiles(site, gpu) if tiles is None else tiles
    wide = needs_wide_offsets(kernel)
    first = _OfQueries(kernel, site, of_query, kernel.name, wide=wide, tf32=tf32, fast=fast)
    second = _OfKeys(kernel, site, of_keys, f"{kernel.name}_keys", wide=wide, tf32=tf32, fast=fast)
    if not first.scans():
        return first.emit(), second.emit()
    seen = _SeenByQueries(kernel, site, of_query, f"{kernel.name}_seen", wide=wide, tf32=tf32, fast=fast)
    seeing = _SeenOfKeys(kernel, site, of_keys, f"{kernel.name}_seen_keys", wide=wide, tf32=tf32, fast=fast)
    return seen.emit(), first.emit(), seeing.emit(), second.emit()


class _Gradients(AttentionText):
    """What both have in common. ``down``: queries are below each other, else beside."""

    down = True

    def __init__(
        self, kernel: Kernel, site: AttentionSite, tile: AttentionTile, name: str, *, wide: bool, tf32: bool, fast: bool
    ) -> None:
        super().__init__(kernel, site, tile.config(site.head), name, wide=wide, tf32=tf32, fast=fast)
        self.tile = tile
        self.loops = [(loop, loop.extent) for loop in site.batch]
        self.skips = site.causal and len(site.outputs) < 4  # blocks that no query sees
        self.head = "shared_head" if site.shared > 1 else ""
        count = site.counts[0].constant
        self.in_query = "in_query" if count is None or count % tile.queries else ""
        self.in_key = "in_key" if self.keys_end(known="XBLOCK") else ""

    def blocks(self, count: Expr, size: int) -> Expr:
        """How many blocks there are."""
        return floordiv(count + (size - 1), to_expr(size))

    def numbers(self, lines: Lines, other: str) -> str:
        """What was saved of each query of the block."""
        extra = f", mask={self.in_query}, other={other}" if self.in_query else ""
        return f"tl.load({self.pointer(lines)} + {self.offsets(lines, 'query', self.head)}{extra})"

    def load_saved(self) -> None:
        """The largest score of each query and what its weights are divided by, or the logarithm of both. That of a
        query that does not exist is infinite: no weight is left, whatever number a mask gave as its score."""
        unit = f" * {self.unit!r}" if self.unit != 1.0 else ""
        top = self.numbers(self.site.saved[0], "float('inf')")
        self.line(f"top = {top}{unit}")
        if len(self.site.saved) == 2:
            self.line(f"share = 1.0 / {self.numbers(self.site.saved[1], '1.0')}")

    def delta(self) -> str:
        """Where the sum of the result times its gradient is, of each query."""
        count = product(extent for _, extent in self.loops) * (self.site.counts[0] * self.site.shared)
        at = f"batch * {self.site.shared} + {self.head}" if self.head else "batch"
        return f"{self.room('delta', count)} + ({at}) * {self.queries} + query"

    def name_queries(self, first: str) -> None:
        """The queries of a block."""
        self.line(f"query = {first} + {self.lanes('YBLOCK')}")
        if self.in_query:
            self.line(f"in_query = query < {self.queries}")

    def name_keys(self, first: str) -> None:
        """The keys of a block."""
        self.line(f"key = {first} + {self.lanes('XBLOCK')}")
        if self.in_key:
            self.line(f"in_key = key < {self.keys}")

    def changes(self) -> None:
        """``used``, the weights that values were multiplied by, and ``change``, the gradients of products of queries
        and keys, of ``score`` and ``slope``, which are products."""
        site, given = self.site, {"down": self.down, "rows": self.in_query, "columns": self.in_key, "head": self.head}
        axis = "[:, None]" if self.down else "[None, :]"
        self.finish_scores(edge=True, **given)  # type: ignore[arg-type]
        self.line(f"weight = {self.exponential(f'score - top{axis}')}")
        if len(site.saved) == 2:
            self.line(f"weight = weight * share{axis}")
        self.line("used = weight")
        if site.kept is not None:
            self.kept("factor", **given)  # type: ignore[arg-type]
            self.line("used = weight * factor")
            self.line("slope = slope * factor")
        self.line(f"change = (slope - delta{axis}) * weight")
        if site.mask is not None and site.mask.replaces:
            self.line("change = tl.where(seen, change, 0.0)")

    def rounded_change(self) -> str:
        """As a factor of a product."""
        bent = " * (1.0 - bent * bent)" if self.site.cap else ""
        return self.narrow(f"(change{bent} * {self.site.slope!r})")


class _OfQueries(_Gradients):
    """A block of queries of one head, over all keys."""

    def emit(self) -> KernelSource:
        """The kernel."""
        site = self.site
        query, key, value, gradient, result = site.inputs
        self._begin()
        self._multiply(query, key, value, gradient, result)
        self.store_rows(site.outputs[0], "query", self.in_query, "acc", self.head)
        return self.source(self._grid())

    def _grid(self) -> list[tuple[Expr, str | None]]:
        grid: list[tuple[Expr, str | None]] = [(extent, None) for _, extent in self.loops]
        return [*grid, (to_expr(self.site.shared), None), (self.site.counts[0], "YBLOCK")]

    def _programs(self) -> Expr:
        """How many program instances there are."""
        blocks = self.blocks(self.site.counts[0], self.tile.queries)
        return product(extent for _, extent in self.loops) * self.site.shared * blocks

    def _begin(self) -> None:
        """The queries of this program instance."""
        site, blocks = self.site, self.blocks(self.site.counts[0], self.tile.queries)
        self.program()
        self.line(f"first = program % {self.expr(blocks)} * YBLOCK")
        rest = f"program // {self.expr(blocks)}"
        if self.head:
            self.line(f"head = {rest}")
            self.line(f"shared_head = head % {site.shared}")
            rest = f"head // {site.shared}"
        self.unroll(self.loops, rest)
        self.name_queries("first")

    def _name_ends(self) -> None:
        """The first key that positions show to a query of the block, and the first behind them."""
        self.line(f"end = {f'tl.minimum({self.keys}, first + YBLOCK)' if self.skips else self.keys}")
        self.line(f"near = {self.start_of_keys('first') if self.skips else '0'}")

    def _multiply(self, query: Lines, key: Lines, value: Lines, gradient: Lines, result: Lines) -> None:
        """Over all keys."""
        site = self.site
        self.numbers_of_head()
        for name, lines in (("of_query", query), ("of_result", result), ("of_gradient", gradient)):
            self.load_rows(name, lines, "query", self.in_query, self.head)
        self.line("delta = fold_sum(of_result.to(tl.float32) * of_gradient.to(tl.float32), 1)")
        self.line(f"tl.store({self.delta()}, delta{f', mask={self.in_query}' if self.in_query else ''})")
        self.load_saved()
        self.line("acc = tl.full([YBLOCK, HEAD], 0.0, tl.float32)")
        if self.scans():
            self.load_ends(_OF_QUERIES, "program", self._programs())
        else:
            self._name_ends()
        self.prepare_masks(down=True, rows=self.in_query, columns=self.in_key, head=self.head)
        self.open("for start in range(near, end, XBLOCK):")
        self.name_keys("start")
        self.load_rows("of_key", key, "key", self.in_key)
        self.load_rows("of_value", value, "key", self.in_key)
        zeros = "tl.full([YBLOCK, XBLOCK], 0.0, tl.float32)"
        self.line(f"score = {self.dot}(of_query, tl.trans(of_key), {zeros})")
        self.line(f"slope = {self.dot}(of_gradient, tl.trans(of_value), {zeros})")
        self.changes()
        if len(site.outputs) == 4:
            self._store_change(site.outputs[3])
        self.line(f"acc = {self.dot}({self.rounded_change()}, of_key, acc)")
        self.close()

    def _store_change(self, lines: Lines) -> None:
        masks = [f"{self.in_query}[:, None]"] * bool(self.in_query) + [f"{self.in_key}[None, :]"] * bool(self.in_key)
        extra = f", mask={' & '.join(masks)}" if masks else ""
        rows = f"({self.offsets(lines, 'query', self.head)})[:, None]"
        self.line(f"tl.store({self.pointer(lines, written=True)} + {rows} + key[None, :], change{extra})")


class _OfKeys(_Gradients):
    """A block of keys and values, over all queries of the heads that share them."""

    down = False

    def emit(self) -> KernelSource:
        """The kernel."""
        site = self.site
        query, key, value, gradient, _ = site.inputs
        self._begin()
        self.numbers_of_head()
        self.load_rows("of_key", key, "key", self.in_key)
        self.load_rows("of_value", value, "key", self.in_key)
        for name in ("key_sum", "value_sum"):
            self.line(f"{name} = tl.full([XBLOCK, HEAD], 0.0, tl.float32)")
        self.prepare_masks(down=False, rows=self.in_query, columns=self.in_key, head=self.head)
        depth = self.depth
        self._open_queries()
        self.load_rows("of_query", query, "query", self.in_query, self.head)
        self.load_rows("of_gradient", gradient, "query", self.in_query, self.head)
        self.load_saved()
        self.line(f"delta = tl.load({self.delta()}{f', mask={self.in_query}, other=0.0' if self.in_query else ''})")
        zeros = "tl.full([XBLOCK, YBLOCK], 0.0, tl.float32)"
        self.line(f"score = {self.dot}(of_key, tl.trans(of_query), {zeros})")
        self.line(f"slope = {self.dot}(of_value, tl.trans(of_gradient), {zeros})")
        self.changes()
        self.line(f"value_sum = {self.dot}({self.narrow('used')}, of_gradient, value_sum)")
        self.line(f"key_sum = {self.dot}({self.rounded_change()}, of_query, key_sum)")
        self.depth = depth
        self.store_rows(site.outputs[1], "key", self.in_key, "key_sum")
        self.store_rows(site.outputs[2], "key", self.in_key, "value_sum")
        return self.source(self._grid())

    def _begin(self) -> None:
        """The keys of this program instance."""
        blocks = self.blocks(self.site.counts[1], self.tile.keys)
        self.program()
        self.line(f"first_key = program % {self.expr(blocks)} * XBLOCK")
        self.unroll(self.loops, f"program // {self.expr(blocks)}")
        self.name_keys("first_key")

    def _grid(self) -> list[tuple[Expr, str | None]]:
        grid: list[tuple[Expr, str | None]] = [(extent, None) for _, extent in self.loops]
        return [*grid, (self.site.counts[1], "XBLOCK")]

    def _open_queries(self) -> None:
        """The loop over blocks of queries: of all heads, from the first on that sees a key of the block."""
        if self.scans():
            self._open_seen_queries()
            return
        last = self._name_ends()
        if not self.head:
            self.open(f"for start in range(least, {last}, YBLOCK):")
            self.name_queries("start")
            return
        self.line(f"steps = tl.maximum({last} - least + (YBLOCK - 1), 0) // YBLOCK")
        self.open(f"for step in range({self.zero}, steps * {self.site.shared}):")
        self.line("shared_head = step // steps")
        self.name_queries("least + step % steps * YBLOCK")

    def _name_ends(self) -> str:
        """The first query that positions show a key of the block to, as ``least``; the name of where these end."""
        self.line(f"least = {'first_key // YBLOCK * YBLOCK' if self.skips else '0'}")
        last = self.queries
        if self.site.window and self.skips:
            last = "most"
            self.line(f"most = tl.minimum({self.queries}, first_key + XBLOCK + {self.site.window - 1})")
        return last

    def _open_seen_queries(self) -> None:
        """The same, from the first on that is seen to the last, head by head."""
        at = "program"
        if self.head:
            self.open(f"for shared_head in range({self.zero}, {self.site.shared}):")
            at = f"program * {self.site.shared} + shared_head"
        self.load_ends(_OF_KEYS, at, self._programs())
        self.open("for start in range(near, end, YBLOCK):")
        self.name_queries("start")

    def _programs(self) -> Expr:
        """How many program instances there are, of each head."""
        blocks = self.blocks(self.site.counts[1], self.tile.keys)
        return product(extent for _, extent in self.loops) * blocks * self.site.shared


class _SeenByQueries(_OfQueries):
    """Looks for the keys that the queries of each block see."""

    def emit(self) -> KernelSource:
        """The kernel."""
        self._begin()
        self.line(f"top = {self.numbers(self.site.saved[0], '0.0')}")
        self._name_ends()
        self.line("near = program * 0 + near")
        self.line("end = program * 0 + end")
        given = {"down": True, "rows": self.in_query, "columns": self.in_key, "head": self.head}
        self.prepare_masks(**given)  # type: ignore[arg-type]

        def shown() -> str:
            return self.seen_text(**given, more="(top == float('-inf'))[:, None]")  # type: ignore[arg-type]

        self.scan(("near", "end"), "XBLOCK", self.name_keys, shown)
        self.keep_ends(_OF_QUERIES, "program", self._programs())
        return self.source(self._grid())


class _SeenOfKeys(_OfKeys):
    """Looks for the queries that see the keys of each block, of each head that shares them."""

    def emit(self) -> KernelSource:
        """The kernel."""
        site, given = self.site, {"down": False, "rows": self.in_query, "columns": self.in_key, "head": self.head}
        self._begin()
        self.prepare_masks(**given)  # type: ignore[arg-type]
        last = self._name_ends()
        at = "program"
        if self.head:
            self.open(f"for shared_head in range({self.zero}, {site.shared}):")
            at = f"program * {site.shared} + shared_head"
        self.line("near = program * 0 + least")
        self.line(f"end = program * 0 + {last}")

        def shown() -> str:
            self.line(f"lost = {self.numbers(site.saved[0], '0.0')} == float('-inf')")
            return self.seen_text(**given, more="lost[None, :]")  # type: ignore[arg-type]

        self.scan(("near", "end"), "YBLOCK", self.name_queries, shown)
        self.keep_ends(_OF_KEYS, at, self._programs())
        return self.source(self._grid())
