"""The forward of attention as Triton kernels: one, or two where keys are cut in parts."""

from __future__ import annotations

from ....kernel_ir.attention_site import AttentionSite
from ....kernel_ir.nodes import Kernel, Loop
from ....symbolic import Expr, Symbol, floordiv, product, to_expr
from ..attention import FEW, AttentionTile, attention_tile, shared_loop
from ..map_loops import size_hint
from ..records import Config, Gpu, KernelSource
from .attention import LOG2E, AttentionText, needs_wide_offsets

__all__ = ["attention_sources"]

_HOPPER = Gpu()
_ENDS = ("seen_from", "seen_to")  # of the keys of each block of queries
_PARTS = 16  # that the second kernel adds at once


def attention_sources(
    kernel: Kernel,
    site: AttentionSite,
    tile: AttentionTile | None = None,
    *,
    gpu: Gpu = _HOPPER,
    tf32: bool = False,
    fast: bool = False,
) -> tuple[KernelSource, ...]:
    """The kernels of a forward, one after the other."""
    tile = attention_tile(site, gpu) if tile is None else tile
    config = tile.config(site.head)
    first = _Forward(kernel, site, config, tile, kernel.name, wide=False, tf32=tf32, fast=fast)
    wide = needs_wide_offsets(kernel, first.numbers_of_parts)
    if wide:
        first = _Forward(kernel, site, config, tile, kernel.name, wide=wide, tf32=tf32, fast=fast)
    if not tile.part and first.scans():
        return _Seen(kernel, site, config, tile, f"{kernel.name}_seen", wide=wide, fast=fast).emit(), first.emit()
    if not tile.part:
        return (first.emit(),)
    config = Config((("HEAD", config.block("HEAD")), ("PARTS", _PARTS)), 4, 1)
    return first.emit(), _Combine(kernel, site, config, tile, f"{kernel.name}_sum", wide=wide, fast=fast).emit()


class _Rows(AttentionText):
    """Rows of queries, of several heads that share keys where these are few. ``inside``: the name of which rows there
    are, nothing where all are."""

    inside = ""

    def __init__(
        self,
        kernel: Kernel,
        site: AttentionSite,
        config: Config,
        tile: AttentionTile,
        name: str,
        *,
        wide: bool,
        tf32: bool = False,
        fast: bool = False,
    ) -> None:
        super().__init__(kernel, site, config, name, wide=wide, tf32=tf32, fast=fast)
        self.tile = tile
        queries, shared = site.counts[0], shared_loop(site)
        self.shared = shared if shared is not None and size_hint(queries) * shared[1] <= FEW else None
        self.many = self.shared[1] if self.shared is not None else 1
        self.count = queries * self.many  # rows of a head of keys
        self.parts = floordiv(site.counts[1] + (tile.part - 1), to_expr(tile.part)) if tile.part else to_expr(1)
        self.loops = [(loop, self._extent(loop)) for loop in site.batch]

    def _extent(self, loop: Loop) -> Expr:
        """How many program instances there are along a loop of the grid."""
        if self.shared is None or loop is not self.shared[0]:
            return loop.extent
        return floordiv(loop.extent, to_expr(self.many))

    @property
    def numbers_of_parts(self) -> Expr:
        """How many numbers the sums of values have, of all parts of all rows."""
        return product(extent for _, extent in self.loops) * self.count * self.parts * self.site.head

    def rooms(self) -> tuple[str, str, str]:
        """Memory for the largest score, the sum of weights and that of values of each part of each row."""
        count = product(extent for _, extent in self.loops) * self.count * self.parts
        return self.room("tops", count), self.room("totals", count), self.room("sums", self.numbers_of_parts)

    def place_rows(self) -> None:
        """Which query of which head each row is."""
        if self.shared is None:
            self.line("query = row")
            return
        symbol = Symbol(self.shared[0].symbol)
        one = self.site.counts[0] == 1
        self.line(f"first_head = {self.symbols[symbol]} * {self.many}")
        self.line(f"head = first_head + {'row' if one else f'row // {self.queries}'}")
        self.line("query = row * 0" if one else f"query = row % {self.queries}")
        self.symbols[symbol], self.rows[symbol] = "first_head", "head"

    def finish_rows(self) -> None:
        """Keep what the backward needs of the rows' ``top`` and ``total``; a row without keys is 0 where it is."""
        site = self.site
        if site.zero_empty:
            self.line("top = tl.where(top == float('-inf'), 0.0, top)")
            self.line("total = tl.where(total == 0.0, 1.0, total)")
        if not site.saved:
            return
        self.line(f"top = top * {1 / self.unit!r}")
        values = ["top", "total"] if len(site.saved) == 2 else [f"top + tl.log2(total) * {1 / LOG2E!r}"]
        for lines, value in zip(site.saved, values, strict=True):
            extra = f", mask={self.inside}" if self.inside else ""
            place = self.offsets(lines, "query")
            self.line(f"tl.store({self.pointer(lines, written=True)} + {place}, {value}{extra})")


class _Forward(_Rows):
    """A block of queries over all keys, or a part of them. ``several``: there are other blocks of the same heads."""

    several = False

    def emit(self) -> KernelSource:
        """The kernel."""
        self._begin()
        self._load_query()
        self._walk()
        if self.tile.part:
            self._end_part()
        else:
            self._end()
        grid: list[tuple[Expr, str | None]] = [(extent, None) for _, extent in self.loops]
        grid.append((self.count, "YBLOCK"))
        return self.source([*grid, (self.site.counts[1], "PART")] if self.tile.part else grid)

    # -- the rows ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        blocks = floordiv(self.count + (self.tile.queries - 1), to_expr(self.tile.queries))
        self.several = blocks != 1
        self.program()
        rest = "program"
        if self.tile.part:
            self.line(f"part = program % {self.expr(self.parts)}")
            self.line(f"block = program // {self.expr(self.parts)}")
            rest = "block"
        if not self.several:
            self.unroll(self.loops, rest)
            self.line(f"row = {self.lanes('YBLOCK')}")
        else:
            size = self.expr(blocks)
            last = f"{size} - 1 - " if self.site.causal else ""  # those with the most keys first
            self.line(f"first = ({last}{rest} % {size}) * YBLOCK")
            self.unroll(self.loops, f"{rest} // {size}")
            self.line(f"row = first + {self.lanes('YBLOCK')}")
        self.inside = ""
        if self.count.constant is None or self.count.constant % self.tile.queries:
            self.inside = "in_row"
            self.line(f"in_row = row < {self.expr(self.count)}")
        self.place_rows()

    def _load_query(self) -> None:
        self.numbers_of_head()
        self.load_rows("of_query", self.site.inputs[0], "query", self.inside)
        self.line("top = tl.full([YBLOCK], float('-inf'), tl.float32)")
        self.line("total = tl.full([YBLOCK], 0.0, tl.float32)")
        self.line("acc = tl.full([YBLOCK, HEAD], 0.0, tl.float32)")

    # -- the keys ----------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        """All blocks of keys: first those of which nothing is masked for where they are."""
        self.line(f"end = {self._end_of_keys()}")
        self.prepare_masks(down=True, rows=self.inside, columns="")
        if self.tile.part:
            self.line("start_of_part = part * PART")
            self.line("end = tl.minimum(end, start_of_part + PART)")
            self._loop("start_of_part", "end", edge=True)
            return
        if self.scans():
            self.load_ends(_ENDS, "program", self._programs())
        if self.site.window:
            if not self.scans():
                self.line(f"near = {self._start_of_window()}")
            self._loop("near", "end", edge=True)
            return
        begin = "near" if self.scans() else "0"
        if not self.site.causal and not self.keys_end(known="XBLOCK"):
            self._loop(begin, "end", edge=False)
            return
        whole = f"{self.keys} // XBLOCK * XBLOCK"
        if self.site.causal:
            whole = f"tl.minimum({whole}, first // XBLOCK * XBLOCK)" if self._is_of_one_head() else "0"
        if whole != "0" and self.site.counts[1].constant not in range(1, self.tile.keys):
            if self.scans():
                self.line(f"whole = tl.minimum(tl.maximum({whole}, near), (end + XBLOCK - 1) // XBLOCK * XBLOCK)")
            else:
                self.line(f"whole = {whole}")
            self._loop(begin, "whole", edge=False)
            self._loop("whole", "end", edge=True)
        else:
            self._loop(begin, "end", edge=True)

    def _start_of_window(self) -> str:
        return self.start_of_keys("first") if self.site.window and self._is_of_one_head() else "0"

    def _programs(self) -> Expr:
        """How many program instances there are."""
        blocks = floordiv(self.count + (self.tile.queries - 1), to_expr(self.tile.queries))
        return product(extent for _, extent in self.loops) * blocks

    def _end_of_keys(self) -> str:
        """The first key that no query of the block sees."""
        if not self.site.causal:
            return self.keys
        return f"tl.minimum({self.keys}, {'first + YBLOCK' if self._is_of_one_head() else self.queries})"

    def _is_of_one_head(self) -> bool:
        """Whether the block is one of several of a head, and begins at the query ``first``."""
        return self.shared is None and self.several

    def _loop(self, start: str, end: str, *, edge: bool) -> None:
        self.open(f"for start in range({start}, {end}, XBLOCK):")
        self.line(f"key = start + {self.lanes('XBLOCK')}")
        columns = ""
        if edge and (self.keys_end(known="XBLOCK") or (self.tile.part and self.keys_end(known="PART"))):
            columns = "in_key"
            self.line(f"in_key = key < {self.keys}")
        hides = bool(self.tile.part) and self._hides()
        if hides:
            self.load_masks(down=True, rows=self.inside, columns=columns)
            self.open(f"if fold_max(fold_max({self._shown(columns)}, 1), 0) > 0:")
        self._block(edge, columns, loaded=hides)
        if hides:
            self.close()
        self.close()

    def _hides(self) -> bool:
        """Whether the masks can hide keys from all queries, so that they have no weight."""
        mask = self.site.mask
        return mask is not None and (mask.seen is None or mask.hidden == float("-inf"))

    def _shown(self, columns: str) -> str:
        """1 for keys that some query sees."""
        mask = self.site.mask
        assert mask is not None
        tests = ["seen"] if mask.seen is not None else []
        if mask.added is not None and not (mask.seen is not None and mask.replaces):
            tests.append("(added != float('-inf'))")
        if self.inside:
            tests.append("in_row[:, None]")
        if columns:
            tests.append(f"{columns}[None, :]")
        return f"tl.where({' & '.join(tests)}, 1.0, 0.0)"

    def _block(self, edge: bool, columns: str, *, loaded: bool) -> None:
        _, key, value = self.site.inputs
        self.load_rows("of_key", key, "key", columns, down=False)
        if self.tile.part:
            self.load_rows("of_value", value, "key", columns)
        self.line(f"score = {self.dot}(of_query, of_key, tl.full([YBLOCK, XBLOCK], 0.0, tl.float32))")
        self.finish_scores(down=True, edge=edge, rows=self.inside, columns=columns, loaded=loaded)
        self.line("higher = tl.maximum(top, fold_max(score, 1))")
        self.line("base = tl.where(higher == float('-inf'), 0.0, higher)")
        self.line(f"weight = {self.exponential('score - base[:, None]')}")
        self.line(f"fade = {self.exponential('top - base')}")
        self.line("total = total * fade + fold_sum(weight, 1)")
        if self.site.kept is not None:
            self.kept("factor", down=True, rows=self.inside, columns=columns)
            self.line("weight = weight * factor")
        if not self.tile.part:
            self.load_rows("of_value", value, "key", columns)
        self.line("acc = acc * fade[:, None]")
        self.line(f"acc = {self.dot}({self.narrow('weight')}, of_value, acc)")
        self.line("top = higher")

    # -- results -----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.finish_rows()
        self.store_rows(self.site.outputs[0], "query", self.inside, "(acc / total[:, None])")

    def _end_part(self) -> None:
        """What a part contributes: memory for each row of each part."""
        tops, totals, sums = self.rooms()
        place = f"(batch * {self.expr(self.count)} + row) * {self.expr(self.parts)} + part"
        self.line(f"place = {place}")
        extra = f", mask={self.inside}" if self.inside else ""
        self.line(f"tl.store({tops} + place, top{extra})")
        self.line(f"tl.store({totals} + place, total{extra})")
        masks = [f"{self.inside}[:, None]"] if self.inside else []
        masks += [] if self.whole_head else ["in_head[None, :]"]
        masks.append("(total != 0.0)[:, None]")
        where = f"{sums} + place[:, None] * {self.site.head} + number[None, :]"
        self.line(f"tl.store({where}, acc, mask={' & '.join(masks)})")


class _Seen(_Forward):
    """Looks for the keys that the queries of each block see."""

    def emit(self) -> KernelSource:
        """The kernel."""
        self._begin()
        self.line(f"end = program * 0 + {self._end_of_keys()}")
        self.line(f"near = program * 0 + {self._start_of_window()}")
        self.prepare_masks(down=True, rows=self.inside, columns="")
        columns = "in_key" if self.keys_end(known="XBLOCK") else ""

        def name(first: str) -> None:
            self.line(f"key = {first} + {self.lanes('XBLOCK')}")
            if columns:
                self.line(f"in_key = key < {self.keys}")

        self.scan(("near", "end"), "XBLOCK", name, lambda: self.seen_text(down=True, rows=self.inside, columns=columns))
        self.keep_ends(_ENDS, "program", self._programs())
        grid: list[tuple[Expr, str | None]] = [(extent, None) for _, extent in self.loops]
        return self.source([*grid, (self.count, "YBLOCK")])


class _Combine(_Rows):
    """Adds the parts of one row."""

    def emit(self) -> KernelSource:
        """The kernel."""
        count, parts = self.expr(self.count), self.expr(self.parts)
        self.program()
        self.unroll(self.loops, f"program // {count}")
        self.line(f"row = program % {count} + tl.arange(0, 1)")
        self.place_rows()
        self.numbers_of_head()
        tops, totals, sums = self.rooms()
        self.line("top = tl.full([1], float('-inf'), tl.float32)")
        self.line("total = tl.full([1], 0.0, tl.float32)")
        self.line("acc = tl.full([1, HEAD], 0.0, tl.float32)")
        self.open(f"for start in range(0, {parts}, PARTS):")
        self.line("part = start + tl.arange(0, PARTS)")
        self.line(f"in_part = part < {parts}")
        self.line(f"place = program * {parts} + part")
        self.line(f"tops = tl.load({tops} + place, mask=in_part, other=float('-inf'))")
        self.line(f"totals = tl.load({totals} + place, mask=in_part, other=0.0)")
        masks = "(totals != 0.0)[:, None]" + ("" if self.whole_head else " & in_head[None, :]")
        where = f"{sums} + place[:, None] * {self.site.head} + number[None, :]"
        self.line(f"sums = tl.load({where}, mask={masks}, other=0.0)")
        self.line("higher = tl.maximum(top, fold_max(tops, 0))")
        self.line("base = tl.where(higher == float('-inf'), 0.0, higher)")
        self.line(f"weight = {self.exponential('tops - base')}")
        self.line(f"fade = {self.exponential('top - base')}")
        self.line("total = total * fade + fold_sum(weight * totals, 0)")
        self.line("acc = acc * fade[:, None] + fold_sum(sums * weight[:, None], 0)[None, :]")
        self.line("top = higher")
        self.close()
        self.finish_rows()
        self.store_rows(self.site.outputs[0], "query", "", "(acc / total[:, None])")
        grid: list[tuple[Expr, str | None]] = [(extent, None) for _, extent in self.loops]
        return self.source([*grid, (self.count, None)])
