"""The function that sums a tile of a product in registers, see Note [Products in registers]."""

from __future__ import annotations

from .emitter import vector_type

__all__ = ["ALIGNED", "fma_of", "tile_function"]

CHUNK = 128  # steps of the summed loop after which a tile goes to memory
ALIGNED = 64  # bytes: where panels and tiles begin


def fma_of(element: str, lanes: int) -> str:
    """The intrinsic that multiplies and adds vectors."""
    return f"llvm.fma.v{lanes}{'f32' if element == 'float' else 'f64'}"


def tile_function(name: str, element: str, lanes: int, vectors: int, rows: int, panel: int) -> str:
    """The text of the function that sums a tile: ``rows`` of the left factor, ``row`` elements apart and ``step``
    from one to the next number, times the first ``vectors`` of a panel of ``count`` steps. ``panel``: elements of a
    row of the panel and of the tile."""
    type_ = vector_type(element, lanes)
    align = min(ALIGNED, lanes * {"float": 4, "double": 8}[element])
    each = [(r, v) for r in range(rows) for v in range(vectors)]
    fma = fma_of(element, lanes)
    lines = [
        f"define internal void @{name}(ptr %left, i64 %row, i64 %step, ptr %panel, i64 %count, ptr %sums) noinline {{",
        "entry:",
    ]
    for r, v in each:
        place = r * panel + v * lanes
        lines.append(f"  %sum.{r}.{v} = getelementptr {element}, ptr %sums, i64 {place}")
        lines.append(f"  store {type_} zeroinitializer, ptr %sum.{r}.{v}, align {align}")
    for r in range(rows):
        lines.append(f"  %at.{r} = mul i64 %row, {r}")
        lines.append(f"  %left.{r} = getelementptr {element}, ptr %left, i64 %at.{r}")
    lines += [
        "  %any = icmp sgt i64 %count, 0",
        "  br i1 %any, label %chunk, label %done",
        "chunk:",
        "  %first = phi i64 [ 0, %entry ], [ %last, %add ]",
        f"  %wanted = add i64 %first, {CHUNK}",
        "  %last = call i64 @llvm.smin.i64(i64 %wanted, i64 %count)",
        "  br label %steps",
        "steps:",
        "  %k = phi i64 [ %first, %chunk ], [ %k.next, %steps ]",
    ]
    for r, v in each:
        lines.append(f"  %acc.{r}.{v} = phi {type_} [ zeroinitializer, %chunk ], [ %new.{r}.{v}, %steps ]")
    lines.append(f"  %from = mul i64 %k, {panel}")
    for v in range(vectors):
        lines.append(f"  %from.{v} = add i64 %from, {v * lanes}")
        lines.append(f"  %right.at.{v} = getelementptr {element}, ptr %panel, i64 %from.{v}")
        lines.append(f"  %right.{v} = load {type_}, ptr %right.at.{v}, align {align // lanes}")
    lines.append("  %along = mul i64 %k, %step")
    for r in range(rows):
        lines += [
            f"  %number.at.{r} = getelementptr {element}, ptr %left.{r}, i64 %along",
            f"  %number.{r} = load {element}, ptr %number.at.{r}",
            f"  %one.{r} = insertelement {type_} poison, {element} %number.{r}, i64 0",
            f"  %all.{r} = shufflevector {type_} %one.{r}, {type_} poison, <{lanes} x i32> zeroinitializer",
        ]
        for v in range(vectors):
            given = f"{type_} %all.{r}, {type_} %right.{v}, {type_} %acc.{r}.{v}"
            lines.append(f"  %new.{r}.{v} = call {type_} @{fma}({given})")
    lines += [
        "  %k.next = add i64 %k, 1",
        "  %more = icmp slt i64 %k.next, %last",
        "  br i1 %more, label %steps, label %add",
        "add:",
    ]
    for r, v in each:
        lines += [
            f"  %before.{r}.{v} = load {type_}, ptr %sum.{r}.{v}, align {align}",
            f"  %after.{r}.{v} = fadd {type_} %before.{r}.{v}, %new.{r}.{v}",
            f"  store {type_} %after.{r}.{v}, ptr %sum.{r}.{v}, align {align}",
        ]
    lines += ["  %left.over = icmp slt i64 %last, %count", "  br i1 %left.over, label %chunk, label %done"]
    lines += ["done:", "  ret void", "}"]
    return "\n".join(lines)
