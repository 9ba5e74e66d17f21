"""Sizes from which on passes and rules of the CPU target begin, and small values of theirs for small programs.

A test compares both tables with the source: every number that a module of :data:`PLACES` names is in one of them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aotkit_inductor_lower
from aotkit_inductor_lower.target import HOST_SPLITS

__all__ = ["EXCEPTIONS", "LOW", "LOW_SPLITS", "PLACES", "exceptions", "lowered", "named_numbers", "other_holders"]

ROOT = Path(aotkit_inductor_lower.__file__).parent

#: What passes over graphs, loops and kernels, and the choices of the CPU target, consist of.
PLACES = ("graph_passes", "loop_passes", "kernel_passes", "targets.cpu")

#: Of :data:`aotkit_inductor_lower.target.HOST_SPLITS`.
LOW_SPLITS = {"units": 4, "least": 8, "chunk": 16, "long_row": 24, "columns": 4}

#: By module and name. Other modules that import a name are listed with it.
LOW: dict[str, dict[str, Any]] = {
    "graph_passes.channels_last": {
        "_MOST_COPIED": 4.0,
        "_HEAVY": 8.0,
        "_OWN_PART": 0.0,
        "_FEW_TAPS": 9,
        "_CHANNELS": 1,
    },
    "graph_passes.fuse_attention": {"_SMALLEST": 1},
    "graph_passes.multiply_patches": {"RESULTS": 1, "SUMMED": 1, "SHORT": (1, 1)},
    "graph_passes.widen_packed": {"BLOCK": 1 << 12},
    "graph_passes.write_out_attention": {"_WORTH_READING": 1},
    "kernel_passes.choose_index_width": {"FIRST_WIDE": 1 << 11},
    "kernel_passes.deduplicate": {"LEAST_SIZES": 1, "LEAST_MEMBERS": 2},
    "kernel_passes.mark_nontemporal": {"NONTEMPORAL_BYTES": 1},
    "kernel_passes.merge_loops": {"_SHORT": 4},
    "loop_passes.choose_library_calls": {"_LEAST_WORK": {"float32": 1, "bfloat16": 1}},
    "loop_passes.expand_convolutions": {"GAIN": 1e9},
    "loop_passes.fuse_concats": {"_SHORTEST_RUN": 2, "_SHORTEST_WHOLE": 2},
    "loop_passes.fuse_kernels": {"_SMALL_ELEMENTS": 1, "_LARGE_BYTES": 64, "SHORT_ROW": 16},
    "loop_passes.fuse_mixed_order_reductions": {
        "LEAST_SHARED": 1,
        "MOST_CHUNKS": 3,
        "MOST_PARTS": 16,
        "LEAST_CHUNK": 2,
        "LONGEST_CHUNK": 16,
    },
    "loop_passes.gather_launches": {"_HELD": 1 << 12},
    "loop_passes.inline_producers": {"_FEW_ELEMENTS": 8},
    "loop_passes.interleave_outer_reductions": {"LEAST_ROWS": 2, "LEAST_WORK": 1},
    "loop_passes.overlap_collectives": {"LEAST_BYTES": 1},
    "loop_passes.order_steps": {"LEAST_BYTES": 1, "_LEAST_GAIN": 1 << 20},
    "lowering.long_sorts": {"_SHORTEST": {8: 5, 4: 5}, "_SHORTEST_NARROW": 5, "_SELDOM_EQUAL": 48},
    "lowering.pooling": {"LARGE": 16},
    "memory.segments": {"SMALL": 16},
    "targets.cpu.beside": {"LONGEST": 16, "FEWEST_LOADS": 2},
    "targets.cpu.choose": {"SHORT": (1, 1, 1), "SHORT_OF_PACKED": (1, 1, 1), "WORTH": 1, "WORTH_OF_PAIRS": 1}
    | {"WIDE": 32, "ROWS_OF_WIDE": (2, 1024), "STEPS_OF_WIDE": (2, 768), "LONG": 1 << 20, "LEAST": (1, 1, 1)},
    "targets.cpu.choose_attention": {"_SHORT": 1, "_FEW": 1, "_NARROW": 1, "_FILLED": 0.0},
    "targets.cpu.choose_convolutions": {
        "TILED": (1, 1, 1),
        "RESULTS": 1,
        "FILLED": 0.0,
        "WORTH": 1,
        "WORTH_OF_POINTS": 1,
        "WIDE": 1,
        "LONG_ROW": 1,
        "LARGE_ROW": 1 << 30,
        "MANY": 1 << 30,
        "MANY_TAPS": 4,
    },
    "targets.cpu.choose_few_rows": {"WORTH_READING": 1, "LEAST": (1, 1, 1)},
    "targets.cpu.choose_tiles": {"SHORT": (1, 1, 1), "WORTH": 1},
    "targets.cpu.map_loops": {"LEAST_TAIL": 1, "LEAST_WEIGHT": 1, "ROWS": 4},
    "targets.cpu.module": {"GRAIN": 1},
    "targets.cpu.parallel_regions": {"GRAIN": 1, "COMBO_WORK": 1, "LONGEST_ALONE": 8},
    "targets.cpu.products": {"LEAST": (1, 1, 1)},
    "targets.cpu.render.attention_blocks": {"CHAIN": 32, "HEAD_CHAIN": 16},
    "targets.cpu.render.attention_vectors_backward": {"KEYS": 96, "KEYS_OF_MASKS": 96},
    "targets.cpu.render.attention_vectors_forward": {"KEYS": 64, "KEYS_OF_MASKS": 32},
    "targets.cpu.render.few_rows_along_columns": {"PART": 16, "STRIP": 64, "STRIP_OF_BLOCKS": 64},
    "targets.cpu.render.few_rows_along_sums": {"PART": 128},
    "targets.cpu.render.few_rows_of_bytes_in_digits": {"CHUNK": 64},
    "targets.cpu.render.kernel": {"STACK_ROW_BYTES": 64, "MOST_IN_VERSIONS": 12},
    "targets.cpu.render.loops": {"CHUNK": 8},
    "targets.cpu.render.blocked_product": {
        "STRIP": 1 << 10,
        "BLOCK_OF_LEFT": 1 << 11,
        "MOST_STEPS": 128,
        "STEPS_OF_UNKNOWN": 128,
        "LEAST_PANELS": 1,
        "LEAST_ROWS": 12,
    },
    "targets.cpu.render.product": {"STRIP": 1 << 10, "FEW": 2},
    "targets.cpu.render.reductions": {"CHUNK": 8},
    "targets.cpu.render.sort_in_digits": {"STACK_ROW_BYTES": 64, "_SHORT": 48},
    "targets.cpu.strips": {"ROWS": 4, "FEWEST_SAVED": 1},
    "targets.triton.render.attention": {"FIRST_WIDE": 1 << 11},
}

#: Numbers that stay, by the reason: lines of a module and its names, or of a module all of whose numbers stay.
EXCEPTIONS: dict[str, str] = {
    "counts instructions, readers or terms of a program, not sizes": """
        graph_passes.attention_nodes _MOST_TERMS
        graph_passes.attention_parts _MOST_STEPS
        graph_passes.convolution_biases _OF_BIAS
        kernel_passes.recompute_scratch _MOST_READS _MOST_INSTRUCTIONS
        kernel_passes.split_loops_by_divisors _MOST
        loop_passes.expand_convolutions _WEIGHTS _BIAS
        loop_passes.fragments MOST
        loop_passes.fuse_concats MOST_MASKED
        loop_passes.fuse_kernels _RECENT_READERS _LITTLE
        loop_passes.inline_norms _READERS
        loop_passes.inline_operands MOST
        loop_passes.inline_producers _PART _READERS _SMALL _TIMES _WEIGHED
        loop_passes.recompute_from_stored _READERS _SIZE
        loop_passes.unroll_taps MOST_TAPS MOST_SUMS
        loop_passes.write_out_short_rows _LARGEST
        targets.cpu.parallel_regions LEAST_SHARED MOST_AT_ONCE
    """,
    "an upper bound, which small programs keep": """
        graph_passes.freeze _MOST_GROWTH
        graph_passes.keep_pool_offsets _MOST_PIXELS
        graph_passes.widen_packed MOST_BLOCKS
        graph_passes.write_out_attention _ROWS
        loop_passes.computed_matrices LONGEST LARGEST
        loop_passes.inline_norms MOST
        loop_passes.interleave_outer_reductions WIDTH MOST_VECTORS
        loop_passes.write_out_short_rows _LONGEST
        targets.cpu.beside MOST_LOADS SAVED
        targets.cpu.choose_attention _HEAD
        targets.cpu.choose_convolutions FEW_TAPS CACHED SHORT_ROW STEP_PLACES FEW_IN_LINE SMALL_IMAGE PAGE
        targets.cpu.choose_few_rows FEW_ROWS FEW_FOR_TILES ROWS_OF_A_GROUP
        targets.cpu.choose_sorts _LONGEST
        targets.cpu.products FEW_ROWS FEW_FOR_TILES
        targets.cpu.target SLOW_ROWS
    """,
    "what is exact or right depends on it": """
        graph_passes.attention_places
        graph_passes.fuse_attention _LARGE
        graph_passes.keep_pool_offsets _BYTE _COMPARED
        graph_passes.multiply_patches _BY_IMAGES _BY_WEIGHTS _BY_BIAS
        graph_passes.slice_strided_images _BY_WEIGHTS
        graph_passes.unshift_bytes _SHIFT
        graph_passes.widen_bytes EXACT
        loop_passes.compute_masks _INTEGERS
        targets.cpu.choose_attention _LEAST_SCALE
        targets.cpu.region_text _FAILED
        targets.cpu.render.attention _LEAST _MOST
        targets.cpu.render.attention_hidden _LARGEST _SCALE _BYTES
        targets.cpu.render.attention_tiles _LEAST
        targets.cpu.render.few_rows_in_short_digits
        targets.cpu.render.few_rows_of_halves UPPER
        targets.cpu.render.groups_in_digits
        targets.cpu.render.lane_limits _FAR
        targets.cpu.render.lanes _LEAST _MOST
        targets.cpu.render.math.erf_table
        targets.cpu.render.math.exponentials
        targets.cpu.render.math.logarithms
        targets.cpu.render.math.polynomials
        targets.cpu.render.math.trigonometry
        targets.cpu.render.product_in_groups _SIGNS
    """,
    "for devices or several ranks": """
        graph_passes.bucket_collectives _FULL
        graph_passes.pad_products
        loop_passes.chunks UNKNOWN_LENGTH
        loop_passes.compute_masks _SMALL _CACHED _DEAR _LARGEST
        loop_passes.lay_out_temporaries _LEAST
        loop_passes.overlap_collectives _AHEAD _MEMORY _ARITHMETIC
        loop_passes.product_chunks _LEAST
    """,
    "for processors with tile registers or instructions of bfloat16 alone": """
        targets.cpu.choose_few_rows FULL
        targets.cpu.choose_tiles FEW_ROWS LONG_SUM FEW
        targets.cpu.products LEAST_IN_TILES
        targets.cpu.render.amx_check
        targets.cpu.render.amx_pack
        targets.cpu.render.amx_pack_plain
        targets.cpu.render.amx_product
        targets.cpu.render.amx_tiles
        targets.cpu.render.attention_backward
        targets.cpu.render.attention_forward
        targets.cpu.tile_forms
    """,
    "about times that are measured": """
        loop_passes.race GAIN
        targets.cpu.measured
        targets.cpu.object _LONG
        targets.cpu.region_text SPINS
    """,
    "what an unknown size counts as": """
        kernel_passes.choose_index_width _UNKNOWN
        targets.cpu.choose UNKNOWN_ROWS
        targets.cpu.choose_few_rows UNKNOWN
        targets.cpu.map_loops FEW
    """,
    "the form of a kernel: registers, vectors, bytes that are fetched ahead": """
        targets.cpu.beside WIDTHS
        targets.cpu.map_loops FEW_APART
        targets.cpu.render.attention_blocks ROWS FLOAT _TURNED
        targets.cpu.render.attention_on_vectors _APART
        targets.cpu.render.attention_writer ALIGNED
        targets.cpu.render.body MOST_SPACED _UNIT_DEPTH
        targets.cpu.render.columns_apart APART COLUMNS_AHEAD
        targets.cpu.render.few_rows LINE BLOCK
        targets.cpu.render.few_rows_along_columns STEPS TOGETHER
        targets.cpu.render.few_rows_along_sums STRIP AHEAD NARROW MOST_BYTES_APART AHEAD_APART JOINED LONG
        targets.cpu.render.few_rows_in_digits STEPS FACTORS
        targets.cpu.render.panels_apart STREAMS
        targets.cpu.render.digits LEAST FRACTION SIGNIFICANT
        targets.cpu.render.few_rows_of_bytes_in_digits DIGITS OF_DIGIT BITS
        targets.cpu.render.few_rows_in_panels
        targets.cpu.render.few_rows_of_bytes
        targets.cpu.render.blocked_product UNITS BEHIND MANY_STEPS LINE MOST_LINES
        targets.cpu.render.product ROWS TURNED
        targets.cpu.render.sort_in_digits _PLACE _WORK _SIDE
        targets.cpu.render.tile CHUNK ALIGNED
        targets.cpu.render.turn _BITS
        targets.cpu.render.types _WIDTH
        targets.cpu.render.windows _REGISTER
        targets.cpu.sort_site _COUNT
    """,
}


def exceptions() -> dict[str, set[str]]:
    """By module the names that stay; ``*`` for all of its numbers."""
    found: dict[str, set[str]] = {}
    for text in EXCEPTIONS.values():
        for module, *names in (line.split() for line in text.splitlines() if line.strip()):
            found.setdefault(module, set()).update(names or ["*"])
    return found


@contextmanager
def lowered(groups: Collection[str] | None = None) -> Iterator[None]:
    """Within, thresholds of these modules (by default, of all) have their small values; ``target`` are the splits."""
    chosen = {*LOW, "target"} if groups is None else set(groups)
    before: list[tuple[Any, str, Any]] = []
    try:
        for name in sorted(chosen - {"target"}):
            module = _module(name)
            for constant, value in LOW[name].items():
                before.append((module, constant, getattr(module, constant)))
                setattr(module, constant, value)
        for field, value in LOW_SPLITS.items() if "target" in chosen else ():
            before.append((HOST_SPLITS, field, getattr(HOST_SPLITS, field)))
            object.__setattr__(HOST_SPLITS, field, value)  # targets hold this very object
        yield
    finally:
        for place, name, value in reversed(before):
            object.__setattr__(place, name, value)


def _module(name: str) -> Any:
    return importlib.import_module(f"{aotkit_inductor_lower.__name__}.{name}")


# --- what the source says ---------------------------------------------------------------------------------------


def named_numbers() -> set[tuple[str, str]]:
    """Modules of :data:`PLACES` with names that they give numbers, or collections of numbers, outside functions."""
    found = set[tuple[str, str]]()
    for place in PLACES:
        for path in sorted((ROOT / place.replace(".", "/")).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                found.update((module, name) for name in _numbers_of(node) if name.isupper())
    return found


def _numbers_of(node: ast.stmt) -> list[str]:
    """Names that a statement gives numbers."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not _is_number(node.value):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return type(node.value) in (int, float)
        case ast.BinOp():
            return _is_number(node.left) and _is_number(node.right)
        case ast.UnaryOp():
            return _is_number(node.operand)
        case ast.Tuple() | ast.List():
            return bool(node.elts) and all(map(_is_number, node.elts))
        case ast.Dict():
            return bool(node.values) and all(map(_is_number, node.values))
    return False


def other_holders() -> set[tuple[str, str]]:
    """Modules that import one of the names of :data:`LOW` from where it is defined, with the name."""
    defined = {(module, name) for module, names in LOW.items() for name in names}
    found = set[tuple[str, str]]()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for _, name in defined):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                source = ".".join((*parts[: len(parts) - node.level], *(node.module or "").split(".")))
                found.update((".".join(parts), each.name) for each in node.names if (source, each.name) in defined)
    return found
