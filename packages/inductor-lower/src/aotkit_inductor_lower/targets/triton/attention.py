"""Which attention is computed by kernels of ours on a device, and in which blocks.

Note [Blocks of an attention]
    A program instance computes a block of queries, key by key: blocks of keys and values come after one another, with
    the largest score so far and the sum of weights relative to it (Milakov and Gimelshein, Online normalizer
    calculation for softmax, 2018; Dao et al., FlashAttention, 2022). Scores are never in memory. Blocks of keys that a
    causal mask hides from all queries of the block are not read, and only those on its edge are masked.

Note [Keys in parts]
    A language model that writes one token after the other has few queries and many keys: a block of queries for each
    head of keys leaves most of a device idle. So keys are cut in parts, as many as make two program instances for each
    multiprocessor of a large device, of 64 or 128 keys (``tools.bench.triton_attention`` shows others): each writes its
    own largest score, sum of weights and sum of weighted values, and a second kernel adds these. Queries of heads that
    share keys are rows of one block, so keys are read once. A part whose keys a mask hides from all queries (-inf) is
    not read at all: how much of a cache is used shows only at run time.

    All sums are in an order that depends on sizes only.

Note [Which attention is ours on a device]
    ATen's fused kernels, where they take the operands, are left alone, but for few queries with a mask, which they
    compute with a program instance for each head. Attention for which there is none is ours: that which is written out,
    with dropout, with masks that are trained. That of many queries in float32 is ours where products may lose bits
    (``torch.backends.cuda.matmul.allow_tf32``): exact products have no tensor cores, and cuBLAS is good at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import Buffer, LoopNest
from ...kernel_ir.attention_site import AttentionSite, Places, attention_site
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_passes.normal_form import kernel_of
from ...ops.dtypes import is_half
from ...options import LowerOptions
from ...symbolic import Call, Expr, Symbol, mod, product, to_expr
from ...target import Choice
from .map_loops import next_power_of_two, size_hint
from .records import Config, Gpu

__all__ = ["AttentionTile", "attention_form", "attention_tile", "choose_attention", "computes_attention"]
__all__ += ["gradient_tiles", "shared_loop"]

LARGEST_HEAD = 256
SMALLEST_HEAD = 8
WIDEST_FLOATS = 128  # numbers of a head of float32: accumulators of more would not fit
FEWEST_KEYS = 16
FEW = 32  # rows of a block that several heads share, at most, and of queries whose keys are cut in parts
FEW_QUERIES = 16  # of a head, whose keys are cut in parts in the place of ATen's call
_SHORTEST = 64  # keys of a part
_LONGEST = 128
_INSTANCES = 256  # about two on each multiprocessor of a large device
_TYPES = ("float32", "bfloat16", "float16")
_HOPPER = Gpu()
_ROOMY = 96 << 10  # bytes of shared memory; kernels of float32 take a little more
_ROOMY_FOR_FLOATS = 100 << 10


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """``queries`` by ``keys``: a block of scores. ``part``: keys of a part, 0 where they are not cut in parts."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    part: int = 0

    def config(self, head: int) -> Config:
        """Its blocks, and what Triton is told."""
        blocks = [("YBLOCK", self.queries), ("XBLOCK", self.keys), ("HEAD", max(16, next_power_of_two(head)))]
        return Config((*blocks, *([("PART", self.part)] if self.part else [])), self.num_warps, self.num_stages)


def attention_form(kernel: Kernel) -> AttentionSite | None:
    """The attention that a kernel is, where it is written in blocks."""
    site = attention_site(kernel)
    if site is None or site.head > LARGEST_HEAD:
        return None
    return site


def choose_attention(nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions) -> Choice:
    """``"attention"``, or ATen's call."""
    site = attention_form(kernel_of(nest, buffers))
    if site is None:
        return Choice("aten", "the target has no form for its operands")
    if not site.backward and size_hint(site.counts[0]) <= FEW:
        return Choice("attention", "few queries: keys are cut in parts for all multiprocessors")
    return Choice("attention", "ATen has no fused kernel for it, and scores are never in memory")


def computes_attention(
    lengths: tuple[int | None, int | None], head: int, dtype: str, options: LowerOptions, *, tf32: bool
) -> bool:
    """Whether attention of such sizes has kernels, whatever its masks are, and is faster than when written out.
    ``tf32``: products of float32 may lose bits."""
    queries, keys = lengths
    if dtype not in _TYPES or not SMALLEST_HEAD <= head <= LARGEST_HEAD:
        return False
    if 0 in lengths or (keys is not None and keys < FEWEST_KEYS):
        return False
    if dtype != "float32" or options.contractions == "generated":
        return True
    few = queries is not None and queries <= FEW_QUERIES
    return few or (tf32 and head <= WIDEST_FLOATS)


# -- blocks --------------------------------------------------------------------------------------------------------


def shared_loop(site: AttentionSite) -> tuple[Loop, int] | None:
    """The loop over heads of queries of which several, one after the other, read the same keys and values, and how
    many do; for the forward."""
    for loop in site.batch:
        symbol = Symbol(loop.symbol)
        counts = {_divisor(lines.start, symbol, loop.extent.constant) for lines in site.inputs[1:3]}
        if len(counts) == 1 and (count := counts.pop()) > 1 and mod(loop.extent, to_expr(count)) == 0:
            return loop, count
    return None


def _divisor(start: Expr, symbol: Symbol, extent: int | None) -> int:
    """How many values of ``symbol``, one after the other, give the same ``start``."""
    found: set[int] = set()
    for monomial, _ in start.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                found |= {1} if atom == symbol else set()
            elif symbol in _symbols(atom):
                found.add(_floor_of(atom, symbol))
    if not found:
        return extent or 1
    return found.pop() if len(found) == 1 else 1


def _symbols(call: Call) -> frozenset[Symbol]:
    return frozenset().union(*(arg.symbols for arg in call.args))


def _floor_of(call: Call, symbol: Symbol) -> int:
    given, by = call.args
    alone = call.fn == "floordiv" and given.symbols == {symbol} and given.coefficient(symbol) == 1
    whole = alone and not any(not monomial for monomial, _ in given.terms) and by.constant is not None
    return (by.constant or 1) if whole else 1


def attention_tile(site: AttentionSite, gpu: Gpu = _HOPPER) -> AttentionTile:
    """The block of a forward."""
    tile = _forward_tile(site)
    if _is_crowded(site, gpu) and site.head > (128 if is_half(site.dtype) else 64):
        tile = replace(tile, queries=min(32, tile.queries), keys=min(16, tile.keys))
    return tile


def _is_crowded(site: AttentionSite, gpu: Gpu) -> bool:
    """Whether blocks of wide heads that are right for Hopper ask for more shared memory than there is; what is a little
    too much is cured by fewer stages, see :func:`~.compile.compile_all`."""
    return gpu.shared < (_ROOMY if is_half(site.dtype) else _ROOMY_FOR_FLOATS)


def _forward_tile(site: AttentionSite) -> AttentionTile:
    shared = shared_loop(site)
    queries, keys = map(size_hint, site.counts)
    rows = queries * (shared[1] if shared is not None else 1)
    if queries <= FEW:
        heads = size_hint(product(loop.extent for loop in site.batch)) // (shared[1] if shared and rows <= FEW else 1)
        rows = rows if rows <= FEW else queries
        part = _part(keys, heads)
        if part:
            return AttentionTile(max(16, next_power_of_two(rows)), min(part, _few_keys(site)), 4, 2, part)
    return _no_larger(_whole(site), queries, keys)


def _no_larger(tile: AttentionTile, queries: int, keys: int) -> AttentionTile:
    """A block that is not larger than there are queries and keys, with as many scores for each thread."""
    count, width = (max(16, next_power_of_two(n)) for n in (queries, keys))
    made = replace(tile, queries=min(count, tile.queries), keys=min(width, tile.keys))
    warps = tile.num_warps * made.queries * made.keys // (tile.queries * tile.keys)
    return replace(made, num_warps=min(tile.num_warps, max(4, warps)))


def _part(keys: int, heads: int) -> int:
    """How long a part of the keys is that gives every multiprocessor two; 0 where all keys are one."""
    wanted = -(-_INSTANCES // max(1, heads))
    part = _LONGEST
    while part > _SHORTEST and -(-keys // part) < wanted:
        part //= 2
    return part if keys > part and wanted > 1 else 0


def _few_keys(site: AttentionSite) -> int:
    """Keys of a block of few rows: of wide heads few, since keys and values are in registers."""
    wide = 2 if site.dtype.value == "f32" else 1
    return max(16, min(128, 16384 // (max(16, next_power_of_two(site.head)) * wide)))


def _whole(site: AttentionSite) -> AttentionTile:
    if not is_half(site.dtype):
        if site.head <= 64:
            return AttentionTile(64, 32, 8, 2)
        return AttentionTile(32, 16, 8, 2) if site.head <= 128 else AttentionTile(32, 16, 8, 1)
    return AttentionTile(64, 64, 4, 3) if site.head <= 128 else AttentionTile(64, 32, 4, 2)


def gradient_tiles(site: AttentionSite, gpu: Gpu = _HOPPER) -> tuple[AttentionTile, AttentionTile]:
    """The blocks of both kernels of a backward, which hold lines of three tensors of their own: of wide heads few,
    where a program instance has little shared memory."""
    first, second = _whole_gradients(site)
    if _is_crowded(site, gpu) and site.head > 64:
        few = 32 if site.head <= 128 and is_half(site.dtype) else 16
        first, second = (replace(t, queries=min(few, t.queries), keys=min(few, t.keys)) for t in (first, second))
    if site.mask is not None and isinstance(site.mask.added, Places) and isinstance(site.mask.seen, Places):
        second = replace(second, num_warps=8)  # what both are made of takes registers, beside two accumulators
    queries, keys = map(size_hint, site.counts)
    return _no_larger(first, queries, keys), _no_larger(second, queries, keys)


def _whole_gradients(site: AttentionSite) -> tuple[AttentionTile, AttentionTile]:
    if not is_half(site.dtype):
        if site.head <= 64:
            return AttentionTile(32, 32, 8, 2), AttentionTile(32, 32, 8, 2)
        return AttentionTile(16, 32, 8, 1), AttentionTile(16, 32, 8, 1)
    if site.head <= 64:
        return AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 3)
    if site.head <= 128:
        return AttentionTile(64, 32, 4, 2), AttentionTile(32, 64, 4, 3)
    return AttentionTile(32, 32, 8, 1), AttentionTile(32, 32, 8, 1)
