"""Attention as Triton kernels: what forward and backward share, see Note [Blocks of an attention] in
:mod:`..attention`.

Note [Scores of a block]
    Scores are products of a query and a key, of float32 sums, times the scale; masks are as Note [Attention as an
    operator] has them. Where no mask is added and none hides by a finite number, they are in units of ln 2, so that a
    weight is one fused multiplication and a power of two; what is kept for the backward is in ordinary units.
    Keys that do not exist have the score -inf, and so have no weight. A number that is computed for a query that does
    not exist is 0: whatever is there could be too large for what is made of it.

Note [Blocks that are seen]
    A mask that is computed tells without a product which blocks have a key that some query sees. A kernel ahead of each
    of those of the attention looks through the blocks of every program instance, from the first until one has, and from
    the last, and writes down where these are: documents one after the other, a prefix, what is near. Where all have
    some that takes two looks; what is hidden between seen ones is computed. In a backward a query without any key
    counts as one that sees all: its gradients may be nan. (Within the kernels, the loops that look took registers from
    those that multiply.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....ir import DType
from ....ir.walk import loads
from ....kernel_ir.attention_places import HEAD, KEY, QUERY
from ....kernel_ir.attention_site import AttentionSite, Lines, Places
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import memories
from ....kernel_passes.choose_index_width import FIRST_WIDE, choose_index_width
from ....ops.dtypes import is_half
from ....symbolic import Expr, Ranges, Symbol, SymbolKind, to_expr
from ..records import Config, KernelArgument, KernelSource
from .attention_places import Block, PlacesText
from .indices import expr_text, identifier
from .names import argument_name, function_name, pointer_name
from .ops import cast_text
from .prelude import prelude_for

__all__ = ["AttentionText", "needs_wide_offsets"]

LOG2E = math.log2(math.e)
_NOTHING = to_expr(0)
_EXACT = 1 << 24  # whole numbers below it are float32


def needs_wide_offsets(kernel: Kernel, room: Expr = _NOTHING) -> bool:
    """Whether offsets into memory need 64 bits; ``room``: the largest number of elements beside the kernel's own."""
    if room.constant is not None and room.constant >= FIRST_WIDE:
        return True
    return choose_index_width(replace(kernel, scratch=())).index_type is DType.I64


class AttentionText:
    """Writes a kernel of an attention, line by line. ``symbols``: what loops of the grid are called in the text;
    ``rows``: the same for lines of queries, where these are of several heads. ``scratch``: memory beside the
    program's."""

    def __init__(
        self, kernel: Kernel, site: AttentionSite, config: Config, name: str, *, wide: bool, tf32: bool, fast: bool
    ) -> None:
        self.kernel, self.site, self.config, self.wide, self.fast = kernel, site, config, wide, fast
        self.name = function_name(name)
        self.half = is_half(site.dtype)
        self.dot = "dot" if self.half else "dot_tf32" if tf32 else "dot_ieee"
        self.lines: list[str] = []
        self.depth = 0
        self.symbols: dict[Symbol, str] = {}
        self.rows: dict[Symbol, str] = {}
        self.pointers: dict[str, DType] = {}
        self.written: set[str] = set()
        self.scratch: dict[str, KernelArgument] = {}
        self.queries, self.keys = (self.expr(count) for count in site.counts)
        self.unit = 1.0 if self._in_ordinary_units() else LOG2E
        self.whole_head = config.block("HEAD") == site.head
        self.masks: dict[str, PlacesText] = {}  # that are computed

    def _in_ordinary_units(self) -> bool:
        mask = self.site.mask
        return mask is not None and (mask.added is not None or math.isfinite(mask.hidden))

    # -- text --------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """One line."""
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        """A line that begins a block."""
        self.line(text)
        self.depth += 1

    def close(self) -> None:
        """End the block."""
        self.depth -= 1

    def expr(self, expr: Expr, *, rows: bool = False) -> str:
        """A number; ``rows``: of each row of a block of queries."""
        names = {**self.symbols, **self.rows} if rows else self.symbols
        return expr_text(expr, lambda s: self._symbol(s, names))

    def _symbol(self, symbol: Symbol, names: dict[Symbol, str]) -> str:
        return f"size_{identifier(symbol.name)}" if symbol.kind is SymbolKind.SIZE else names[symbol]

    def source(self, grid: Sequence[tuple[Expr, str | None]]) -> KernelSource:
        """The kernel of the lines."""
        text = "\n".join(self.lines)
        arguments = [
            KernelArgument("pointer", param.name, self.pointers[param.name], param.name in self.written)
            for param in memories(self.kernel)
            if param.name in self.pointers
        ]
        arguments += self.scratch.values()
        for param in (param for param in self.kernel.params if param.kind == "size"):
            argument = KernelArgument("size", param.name, DType.I64)
            if argument_name(argument) in text:
                arguments.append(argument)
        parameters = [argument_name(a) for a in arguments] + [f"{n}: tl.constexpr" for n, _ in self.config.blocks]
        origin = self.kernel.origin
        head = [f"# {' '.join(origin.nodes)}: {' '.join(dict.fromkeys(origin.ops))}"[:200]] if origin.nodes else []
        head += ["@jit", f"def {self.name}({', '.join(parameters)}):"]
        body = "\n".join([*head, *(f"    {line}" for line in self.lines)]) + "\n"
        made = prelude_for(body) + body
        return KernelSource(self.name, made, tuple(arguments), tuple(grid), self.config, False, False, self.fast)

    # -- where things are --------------------------------------------------------------------------------------

    def pointer(self, lines: Lines, *, written: bool = False) -> str:
        """The memory of lines."""
        self.pointers.setdefault(lines.buffer, lines.dtype)
        if written:
            self.written.add(lines.buffer)
        return pointer_name(lines.buffer)

    def room(self, name: str, extent: Expr) -> str:
        """Float32 numbers beside the program's memory."""
        argument = self.scratch.setdefault(name, KernelArgument("scratch", name, DType.F32, True, extent))
        return argument_name(argument)

    def program(self) -> None:
        """The number of this program instance."""
        self.line(f"program = tl.program_id(0){'.to(tl.int64)' if self.wide else ''}")

    def lanes(self, block: str) -> str:
        """The numbers of a block's lines, as wide as what they are multiplied with: a product is no wider than its
        factors, and a step may be large."""
        return f"tl.arange(0, {block}){'.to(tl.int64)' if self.wide else ''}"

    @property
    def zero(self) -> str:
        """Where a loop over heads begins, whose numbers are as wide."""
        return "tl.full([], 0, tl.int64)" if self.wide else "0"

    def unroll(self, loops: Sequence[tuple[Loop, Expr]], rest: str) -> str:
        """Name iterations of loops, the last of which is the fastest; the name of all of them together."""
        self.line(f"batch = {rest}")
        names = [f"at_{identifier(loop.symbol)}" for loop, _ in loops]
        rest = "batch"
        for (loop, extent), name in list(zip(loops, names, strict=True))[:0:-1]:
            size = self.expr(extent)
            self.line(f"{name} = {rest} % {size}")
            self.line(f"rest_{name} = {rest} // {size}")
            rest = f"rest_{name}"
            self.symbols[Symbol(loop.symbol)] = name
        if loops:
            self.line(f"{names[0]} = {rest}")
            self.symbols[Symbol(loops[0][0].symbol)] = names[0]
        return "batch"

    def offsets(self, lines: Lines, row: str, head: str = "") -> str:
        """Where lines begin, one for each ``row``, which is a ``"query"`` or a ``"key"``; ``head``: which of the heads
        that share keys. Keys are those of the first head of a block, whatever it is told by."""
        text = f"{self.expr(lines.start, rows=row == 'query')} + {row} * {self._step(lines.step)}"
        return f"{text} + {head} * {self._step(lines.head)}" if head and lines.head != 0 else text

    def _step(self, step: Expr) -> str:
        text = self.expr(step)
        return f"({text})" if " " in text else text

    def load_rows(self, name: str, lines: Lines, row: str, inside: str, head: str = "", down: bool = True) -> None:
        """Lines of a head, one below the other, or (``down`` off) beside each other. ``inside``: which there are;
        nothing where all are."""
        self.line(f"{name} = {self.rows_text(lines, row, inside, head, down)}")

    def rows_text(self, lines: Lines, row: str, inside: str, head: str = "", down: bool = True) -> str:
        """As :meth:`load_rows`."""
        axis, other = ("[:, None]", "[None, :]") if down else ("[None, :]", "[:, None]")
        masks = [f"{inside}{axis}"] if inside else []
        masks += [] if self.whole_head else [f"in_head{other}"]
        extra = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({self.pointer(lines)} + ({self.offsets(lines, row, head)}){axis} + number{other}{extra})"

    def store_rows(self, lines: Lines, row: str, inside: str, value: str, head: str = "") -> None:
        """Write lines of a head, in their type."""
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [] if self.whole_head else ["in_head[None, :]"]
        extra = f", mask={' & '.join(masks)}" if masks else ""
        place = f"{self.pointer(lines, written=True)} + ({self.offsets(lines, row, head)})[:, None] + number[None, :]"
        self.line(f"tl.store({place}, {cast_text(value, DType.F32, lines.dtype)}{extra})")

    def numbers_of_head(self) -> None:
        """The numbers of a head, in a block."""
        self.line("number = tl.arange(0, HEAD)")
        if not self.whole_head:
            self.line(f"in_head = number < {self.site.head}")

    # -- scores ------------------------------------------------------------------------------------------------

    def table(self, lines: Lines, other: str, *, down: bool, rows: str, columns: str, head: str = "") -> str:
        """A block of a mask: queries below each other (``down``) and keys beside, or the other way round. ``rows`` and
        ``columns``: which queries and keys there are; nothing where all are."""
        axis, beside = ("[:, None]", "[None, :]") if down else ("[None, :]", "[:, None]")
        masks = [f"{columns}{beside}"] if columns else []
        place = f"key{beside}"
        if lines.step == 0 and not self._varies(lines):
            place += f" + {self.expr(lines.start)}"
        else:
            place += f" + ({self.offsets(lines, 'query', head)}){axis}"
            masks += [f"{rows}{axis}"] if rows else []
        extra = f", mask={' & '.join(masks)}, other={other}" if masks else ""
        text = f"tl.load({self.pointer(lines)} + {place}{extra})"
        return f"({text} != 0)" if lines.dtype is DType.BOOL else cast_text(text, lines.dtype, DType.F32)

    def _varies(self, lines: Lines) -> bool:
        """Whether lines of a mask differ by what the rows of a block are: heads."""
        return bool(lines.head != 0) or any(symbol in self.rows for symbol in lines.start.symbols)

    def prepare_masks(self, *, down: bool, rows: str, columns: str, head: str = "") -> None:
        """What masks are computed of that is the same for all blocks of the loop that follows."""
        mask = self.site.mask
        for name, given in (("seen", mask.seen), ("added", mask.added)) if mask is not None else ():
            if not isinstance(given, Places):
                continue
            ranges = Ranges({Symbol(QUERY): self.site.counts[0], Symbol(KEY): self.site.counts[1]} | self._sizes())
            self.masks[name] = PlacesText(name, given, ranges, self.line, lambda s: self._symbol(s, self.symbols))
            for load in loads(given.body):
                self.pointers.setdefault(load.buffer, load.dtype)
            self.masks[name].write_ahead(self._block_of(down, rows, columns, head), self.fast)

    def _sizes(self) -> dict[Symbol, Expr]:
        batch = {Symbol(loop.symbol): loop.extent for loop in self.site.batch}
        return batch | {Symbol(HEAD): to_expr(self.site.shared)}

    def _block_of(self, down: bool, rows: str, columns: str, head: str) -> Block:
        """Where the scores of a block are; in a loop over keys if queries are below each other, else over queries."""
        axes, texts = ((0, 1) if down else (1, 0)), ("[:, None]", "[None, :]")
        row, column = (texts[axis] for axis in axes)
        names: dict[Symbol, tuple[str, int | None]] = {
            Symbol(QUERY): (f"query{row}", axes[0]),
            Symbol(KEY): (f"key{column}", axes[1]),
            Symbol(HEAD): (head or "0", None),
        }
        names |= {symbol: (f"{text}{row}", axes[0]) for symbol, text in self.rows.items()}
        given = [f"{text}{axis}" if text else "" for text, axis in ((rows, row), (columns, column))]
        moving = {Symbol(KEY)} if down else {Symbol(QUERY), Symbol(HEAD)}
        return Block(names, (given[axes[0]], given[axes[1]]), frozenset(moving))

    def scans(self) -> bool:
        """Whether blocks are looked for that a computed mask shows to some query, see Note [Blocks that are seen]."""
        mask = self.site.mask
        if mask is None or not isinstance(mask.seen, Places) or mask.hidden != -math.inf:
            return False
        known = all(count.constant is not None and count.constant < _EXACT for count in self.site.counts)
        whole = mask.replaces or mask.added is None
        return known and whole and (not self.site.backward or len(self.site.outputs) < 4)

    def scan(self, ends: tuple[str, str], step: str, name: Callable[[str], None], shown: Callable[[], str]) -> None:
        """Let ``ends``, the names of where a loop over blocks begins and ends, be around those that are seen. ``name``
        names the lines of the block that begins somewhere, ``shown`` tells which are seen, 1 or 0."""
        low, high = ends
        for at, onward in ((low, f"{low} + {step}"), ("last", f"last - {step}")):
            if at == "last":
                self.line(f"last = {low} + ({high} - {low} - 1) // {step} * {step}")
            self.line(f"going = {low} < {high}")
            self.open("while going:")
            name(at)
            self.line(f"found = fold_max(fold_max({shown()}, 1), 0) > 0")
            self.line(f"{at} = tl.where(found, {at}, {onward})")
            left = f"{at} < {high}" if at == low else f"last > {low}"
            self.line(f"going = (found == 0) & ({left})")
            self.close()
        self.line(f"{high} = tl.minimum({high}, last + {step})")

    def keep_ends(self, names: tuple[str, str], at: str, count: Expr) -> None:
        """Write down where the loop over blocks of ``at`` begins and ends, one of ``count``, under these names."""
        for name, value in zip(names, ("near", "end"), strict=True):
            self.line(f"tl.store({self.room(name, count)} + {at}, {value}.to(tl.float32))")

    def load_ends(self, names: tuple[str, str], at: str, count: Expr) -> None:
        """What :meth:`keep_ends` wrote."""
        width = "tl.int64" if self.wide else "tl.int32"
        for name, value in zip(names, ("near", "end"), strict=True):
            self.line(f"{value} = tl.load({self.room(name, count)} + {at}).to({width})")

    def seen_text(self, *, down: bool, rows: str, columns: str, head: str = "", more: str = "") -> str:
        """1 where a computed mask shows a key to a query, or ``more`` says that it counts for another reason."""
        block = self._block_of(down, rows, columns, head)
        self.masks["seen"].write(block, self.fast)
        seen = f"({self.masks['seen'].value()}{f' | {more}' if more else ''})"
        tests = [seen, *(text for text in block.inside if text)]
        return f"tl.where({' & '.join(tests)}, 1.0, 0.0)"

    def load_masks(self, *, down: bool, rows: str, columns: str, head: str = "") -> None:
        """The masks of a block, as ``seen`` and ``added``."""
        mask, given = self.site.mask, {"down": down, "rows": rows, "columns": columns, "head": head}
        for name, lines in (("seen", mask.seen), ("added", mask.added)) if mask is not None else ():
            if isinstance(lines, Lines):
                nothing = "0" if name == "seen" else "0.0"
                self.line(f"{name} = {self.table(lines, nothing, **given)}")  # type: ignore[arg-type]
            elif lines is not None:
                block = self._block_of(down, rows, columns, head)
                self.masks[name].write(block, self.fast)
                value, inside = self.masks[name].value(), block.inside[0 if down else 1]
                value = value if name == "seen" else cast_text(value, lines.dtype, DType.F32)
                bare = not inside or name == "seen"
                self.line(f"{name} = {value if bare else f'tl.where({inside}, {value}, 0.0)'}")

    def finish_scores(
        self, *, down: bool, edge: bool, rows: str, columns: str, loaded: bool = False, head: str = ""
    ) -> None:
        """``score``, which is a product, with scale and masks. ``edge``: the block may hold keys that a causal mask
        hides, or that there are not."""
        mask = self.site.mask
        if mask is not None and not loaded:
            self.load_masks(down=down, rows=rows, columns=columns, head=head)
        if self.site.cap:
            self.line(f"bent = 1.0 - 2.0 / (tl.exp2(score * {2 * LOG2E * self.site.scale / self.site.cap!r}) + 1.0)")
            self.line(f"score = bent * {self.site.cap * self.unit!r}")
        else:
            self.line(f"score = score * {self.site.scale * self.unit!r}")
        hidden = self._number(mask.hidden) if mask is not None else ""
        if mask is not None and mask.added is not None and (mask.seen is None or mask.replaces):
            self.line("score = score + added")
        if mask is not None and mask.seen is not None:
            if mask.replaces or (mask.hidden == -math.inf and mask.added is None):
                self.line(f"score = tl.where(seen, score, {hidden})")
            else:
                bias = "added" if mask.added is not None else "0.0"
                self.line(f"score = score + tl.where(seen, {bias}, {hidden})")
        axis, beside = ("[:, None]", "[None, :]") if down else ("[None, :]", "[:, None]")
        tests = [f"(key{beside} <= query{axis})"] if self.site.causal and edge else []
        tests += [f"(key{beside} > query{axis} - {self.site.window})"] if self.site.window and edge else []
        tests += [f"{columns}{beside}"] if columns and edge else []
        if tests:
            self.line(f"score = tl.where({' & '.join(tests)}, score, float('-inf'))")

    def _number(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else f"float('{value}')"

    def exponential(self, value: str) -> str:
        """The power that a score stands for."""
        return f"tl.exp2({value})" if self.unit != 1.0 else f"tl.exp2(({value}) * {LOG2E!r})"

    def kept(self, name: str, *, down: bool, rows: str, columns: str, head: str = "") -> None:
        """What dropout multiplies weights by."""
        lines = self.site.kept
        assert lines is not None
        text = self.table(lines, "0", down=down, rows=rows, columns=columns, head=head)
        self.line(f"{name} = tl.where({text}, {self.site.kept_scale!r}, 0.0)")

    def narrow(self, value: str) -> str:
        """A factor of a product, in the type of the operands."""
        return cast_text(value, DType.F32, self.site.dtype) if self.half else value

    def start_of_keys(self, first: str) -> str:
        """Where the block of keys begins that has the first one in the window of query ``first``."""
        if not self.site.window:
            return "0"
        return f"tl.maximum({first} - {self.site.window - 1}, 0) // XBLOCK * XBLOCK"

    def keys_end(self, *, known: str) -> bool:
        """Whether blocks of so many keys may go past the last."""
        count = self.site.counts[1].constant
        return count is None or count % self.config.block(known) != 0
