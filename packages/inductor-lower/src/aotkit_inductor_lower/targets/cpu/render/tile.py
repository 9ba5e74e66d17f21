"""The function that sums a tile of a product in registers, see Note [Products in registers]."""

from __future__ import annotations

from dataclasses import dataclass

from .emitter import vector_type

__all__ = ["ALIGNED", "BYTES", "FLOATS", "PAIRS", "TileKind", "fma_of", "tile_function"]

CHUNK = 128  # steps of the summed loop after which a tile goes to memory
ALIGNED = 64  # bytes: where panels and tiles begin

#: By row and vector of a tile: the name of a value.
Sums = dict[tuple[int, int], str]


@dataclass(frozen=True, slots=True)
class TileKind:
    """What tiles multiply. ``name``: in names of functions; ``element``: of sums; ``item``: of panels, a number or a
    ``group`` of them that lie side by side along the sum; ``number``: of the left factor; ``dot``: the intrinsic for
    groups."""

    name: str
    element: str
    item: str
    number: str
    group: int = 1
    dot: str = ""

    def item_vector(self, lanes: int) -> str:
        """The type of a vector of groups, as the intrinsic takes it."""
        if self.group == 1:
            return vector_type(self.element, lanes)
        return vector_type("bfloat" if self.number == "i16" else "i8", lanes * self.group)

    @property
    def bits(self) -> int:
        """Of a number of the left factor."""
        return {"i8": 8, "i16": 16, "float": 32, "double": 64}[self.number]


FLOATS = {element: TileKind(element, element, element, element) for element in ("float", "double")}
PAIRS = TileKind("pairs", "float", "i32", "i16", 2, "llvm.x86.avx512bf16.dpbf16ps.512")
BYTES = TileKind("bytes", "i32", "i32", "i8", 4, "llvm.x86.avx512.vpdpbusd.512")


def fma_of(element: str, lanes: int) -> str:
    """The intrinsic that multiplies and adds vectors."""
    return f"llvm.fma.v{lanes}{'f32' if element == 'float' else 'f64'}"


class _Tile:
    """Writes one such function: see :func:`tile_function`."""

    def __init__(self, kind: TileKind, lanes: int, vectors: int, rows: int, panel: int) -> None:
        self.kind, self.lanes, self.vectors, self.rows, self.panel = kind, lanes, vectors, rows, panel
        self.type = vector_type(kind.element, lanes)
        self.number = {"float": 4, "double": 8, "i32": 4}[kind.element]  # bytes of a sum, which may lie anywhere
        self.align = min(ALIGNED, lanes * self.number)  # of panels
        self.each = [(r, v) for r in range(rows) for v in range(vectors)]

    def begin(self) -> list[str]:
        """Where sums are, and where each row begins."""
        lines = []
        for r, v in self.each:
            if v == 0:
                lines.append(f"  %sums.at.{r} = mul i64 %apart, {r}")
                lines.append(f"  %sums.{r} = getelementptr {self.kind.element}, ptr %sums, i64 %sums.at.{r}")
            lines.append(f"  %sum.{r}.{v} = getelementptr {self.kind.element}, ptr %sums.{r}, i64 {v * self.lanes}")
        for r in range(self.rows):
            lines.append(f"  %at.{r} = mul i64 %row, {r}")
            lines.append(f"  %left.{r} = getelementptr {self.kind.number}, ptr %left, i64 %at.{r}")
        return lines

    def step(self, k: str, made: str, before: dict[tuple[int, int], str], rest: int = 0) -> list[str]:
        """``made.r.v``: what was ``before``, and the products of step ``k``, of ``rest`` numbers of a group or all."""
        kind, type_, lanes = self.kind, self.type, self.lanes
        vector = kind.item_vector(lanes)
        item, first = vector_type(kind.item, lanes), f"<{lanes} x i32> zeroinitializer"
        lines = [f"  %{made}.from = mul i64 {k}, {self.panel}", f"  %{made}.along = mul i64 {k}, %step"]
        for v in range(self.vectors):
            lines += [
                f"  %{made}.from.{v} = add i64 %{made}.from, {v * lanes}",
                f"  %{made}.at.{v} = getelementptr {kind.item}, ptr %panel, i64 %{made}.from.{v}",
                f"  %{made}.right.{v} = load {vector}, ptr %{made}.at.{v}, align {self.align // lanes}",
            ]
        for r in range(self.rows):
            number = f"%{made}.number.{r}"
            lines.append(f"  {number}.at = getelementptr {kind.number}, ptr %left.{r}, i64 %{made}.along")
            lines += self._some_of_group(number, rest) if rest else self._number(number)
            lines += [
                f"  %{made}.one.{r} = insertelement {item} poison, {kind.item} {number}, i64 0",
                f"  {number}.all = shufflevector {item} %{made}.one.{r}, {item} poison, {first}",
            ]
            if kind.group > 1:
                lines.append(f"  {number}.seen = bitcast {item} {number}.all to {vector}")
            for v in range(self.vectors):
                right, sum_ = f"{vector} %{made}.right.{v}", f"{type_} {before[r, v]}"
                if kind.group > 1:
                    given, op = f"{sum_}, {self._ordered(f'{vector} {number}.seen', right)}", kind.dot
                else:
                    given, op = f"{vector} {number}.all, {right}, {sum_}", fma_of(kind.element, lanes)
                lines.append(f"  %{made}.{r}.{v} = call {type_} @{op}({given})")
        return lines

    def _ordered(self, left: str, right: str) -> str:
        """Bytes without signs are the first factor: those of the panel."""
        return f"{right}, {left}" if self.kind is BYTES else f"{left}, {right}"

    def _number(self, name: str) -> list[str]:
        return [f"  {name} = load {self.kind.item}, ptr {name}.at, align {self.kind.bits // 8}"]

    def _some_of_group(self, name: str, rest: int) -> list[str]:
        """The first numbers of a group, and zeros: there may be no memory behind them."""
        kind, lines, whole = self.kind, [], "0"
        for position in range(rest):
            own = f"{name}.{position}"
            lines += [
                f"  {own}.at = getelementptr {kind.number}, ptr {name}.at, i64 {position}",
                f"  {own}.read = load {kind.number}, ptr {own}.at, align {kind.bits // 8}",
                f"  {own}.wide = zext {kind.number} {own}.read to i32",
                f"  {own}.moved = shl i32 {own}.wide, {position * kind.bits}",
                f"  {own if position + 1 < rest else name} = or i32 {own}.moved, {whole}",
            ]
            whole = own
        return lines

    def put(self, sums: Sums | None) -> list[str]:
        """Sums in memory, or zeros."""
        return [
            f"  store {self.type} {sums[r, v] if sums else 'zeroinitializer'}, ptr %sum.{r}.{v}, align {self.number}"
            for r, v in self.each
        ]

    def add(self, made: str, sums: Sums) -> list[str]:
        """Sums in memory, and these. ``made``: how what is computed here is named."""
        lines, add = [], "add" if self.kind.element == "i32" else "fadd"
        for r, v in self.each:
            lines += [
                f"  %{made}.before.{r}.{v} = load {self.type}, ptr %sum.{r}.{v}, align {self.number}",
                f"  %{made}.after.{r}.{v} = {add} {self.type} %{made}.before.{r}.{v}, {sums[r, v]}",
                f"  store {self.type} %{made}.after.{r}.{v}, ptr %sum.{r}.{v}, align {self.number}",
            ]
        return lines

    def loop(self, name: str, many: int, label: str, at: str, stop: str, sums: Sums) -> tuple[list[str], str, Sums]:
        """As many steps at a time as long as there are so many: from ``at`` to ``stop``, which differ by a multiple of
        ``many`` or are in the wrong order. ``label``: where this comes from. Gives where it ends, with the sums."""
        done: Sums = {}
        lines = [
            f"  %{name}.any = icmp slt i64 {at}, {stop}",
            f"  br i1 %{name}.any, label %{name}, label %{name}.done",
            f"{name}:",
            f"  %{name}.k = phi i64 [ {at}, %{label} ], [ %{name}.k.next, %{name} ]",
        ]
        now = {(r, v): f"%{name}.acc.{r}.{v}" for r, v in self.each}
        new = {(r, v): f"%{name}.{many - 1}.{r}.{v}" for r, v in self.each}
        lines += [f"  {now[e]} = phi {self.type} [ {sums[e]}, %{label} ], [ {new[e]}, %{name} ]" for e in self.each]
        for step in range(many):
            lines.append(f"  %{name}.{step}.k = add i64 %{name}.k, {step}")
            lines += self.step(f"%{name}.{step}.k", f"{name}.{step}", now)
            now = {(r, v): f"%{name}.{step}.{r}.{v}" for r, v in self.each}
        lines += [
            f"  %{name}.k.next = add i64 %{name}.k, {many}",
            f"  %{name}.more = icmp slt i64 %{name}.k.next, {stop}",
            f"  br i1 %{name}.more, label %{name}, label %{name}.done",
            f"{name}.done:",
        ]
        for r, v in self.each:
            done[r, v] = f"%{name}.sum.{r}.{v}"
            before, after = sums[r, v], new[r, v]
            lines.append(f"  {done[r, v]} = phi {self.type} [ {before}, %{label} ], [ {after}, %{name} ]")
        return lines, f"{name}.done", done


def tile_function(
    name: str, kind: TileKind, lanes: int, vectors: int, rows: int, panel: int, rest: int = 0, many: int = 1
) -> str:
    """The text of the function that sums a tile: ``rows`` of the left factor, ``row`` numbers apart and ``step``
    from one group to the next, times the first ``vectors`` of a panel of ``count`` whole groups. ``panel``: items of a
    row of the panel; ``apart``: sums from one row to the next; ``fresh``: whether sums begin here, or are added to what
    is there; ``rest``: numbers of the sum's last group, if that is not whole. ``many``: steps, a power of two, that are
    written one after the other, so that the end of a chunk is foreseen by the processor."""
    tile = _Tile(kind, lanes, vectors, rows, panel)
    given = "ptr %left, i64 %row, i64 %step, ptr %panel, i64 %count, ptr %sums, i64 %apart, i1 %fresh"
    lines = [
        f"define internal void @{name}({given}) noinline {{",
        "entry:",
        *tile.begin(),
        "  %any = icmp sgt i64 %count, 0",
        "  br i1 %any, label %chunk, label %none",
        "none:",
        "  br i1 %fresh, label %clear, label %done",
        "clear:",
        *tile.put(None),
        "  br label %done",
        "chunk:",
        "  %first = phi i64 [ 0, %entry ], [ %last, %next ]",
        f"  %wanted = add i64 %first, {CHUNK}",
        "  %last = call i64 @llvm.smin.i64(i64 %wanted, i64 %count)",
    ]
    label, at, sums = "chunk", "%first", dict.fromkeys(tile.each, "zeroinitializer")
    if many > 1:
        lines.append(f"  %whole = and i64 %last, {-many}")
        made, label, sums = tile.loop("steps", many, label, at, "%whole", sums)
        lines += [*made, "  %at = call i64 @llvm.smax.i64(i64 %first, i64 %whole)"]
        at = "%at"
    made, _, sums = tile.loop("single", 1, label, at, "%last", sums)
    lines += [
        *made,
        "  %is.first = icmp eq i64 %first, 0",
        "  %is.new = and i1 %is.first, %fresh",
        "  br i1 %is.new, label %put, label %add",
        "put:",
        *tile.put(sums),
        "  br label %next",
        "add:",
        *tile.add("new", sums),
        "  br label %next",
        "next:",
        "  %left.over = icmp slt i64 %last, %count",
        "  br i1 %left.over, label %chunk, label %done",
        "done:",
    ]
    if rest:
        lines += tile.step("%count", "end", dict.fromkeys(tile.each, "zeroinitializer"), rest)
        lines += tile.add("end", {(r, v): f"%end.{r}.{v}" for r, v in tile.each})
    return "\n".join([*lines, "  ret void", "}"])
