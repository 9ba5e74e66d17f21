"""Which attention is computed in blocks, in tile registers (AMX) or on vectors.

Note [Which attention is tiles]
    Kernels of ours take a third to four fifths of the time of ATen's fused attention forward; backward two fifths to
    three quarters in float32, and less than a fourth in bfloat16 (`python -m tools.bench.attention`, one core of a Xeon
    with AMX). Of few queries or keys, or small heads, most of a tile is padding: these are left to ATen; in float32,
    where tiles are six times the work, also those of whose blocks of scores less than :data:`_FILLED` is scores (48
    queries and keys take as long as ATen's, 33 half as long again). The same holds of attention that is written out
    (windows of 49 are 59 % full: a step of Swin has 1.6 times eager's speed, `python -m tools.bench --models swin
    --modes train`).

Note [Which attention is vectors]
    On AMD's processors with 512-bit vectors blocks of vectors take less time than ATen's, whose products are not
    written for them: in float32 0.4 to 0.95 of it, in bfloat16 (in pairs) 0.05 to 0.6, from eight queries and keys on,
    with heads of 4 to 256 numbers (`python -m tools.bench.attention`, with `--sizes` for other sizes, on Zen 4). Where
    torch has no more than AVX2, products of bfloat16 are what takes ATen's time: ours take 0.4 to 0.8 of it forward,
    and 0.05 to 0.15 backward (Zen 4, with torch, MKL and oneDNN held to AVX2; Zen 3 the same). On Zen 3 that of float32
    is ours there, too: half to all of ATen's time, the latter where a thousand keys are all seen, and products are most
    of the work. Elsewhere nothing was measured, and attention stays ATen's unless ours is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...ir import Buffer, DType, LoopNest
from ...kernel_ir.attention_site import AttentionSite, Places, attention_site
from ...kernel_ir.nodes import Kernel
from ...kernel_passes.normal_form import kernel_of
from ...options import LowerOptions
from ...target import Choice
from .choose_few_rows import AMD, SHORT_AMD
from .choose_tiles import precision_of_products
from .machine import Machine
from .products import has_tiles, multiplies_pairs
from .tile_forms import PANEL

__all__ = ["attends_in_vectors", "attention_form", "choose_attention", "computes_attention", "multiplies_attention"]

Lengths = tuple[int | None, int | None]
_HEAD = 256  # numbers of a head, at most
_FILLED = 0.58
_SHORT = 16  # queries, keys, numbers of a head: of less, tiles are mostly padding
_FEW = 8  # queries and keys: of less, vectors are
_NARROW = 4  # numbers of a head, at least
_LEAST_SCALE = 2.0**-126  # of scores: less is 0 in float32, or what a processor may take for 0, and times infinity nan


def multiplies_attention(machine: Machine) -> bool:
    """Whether there are tile registers, and instructions that narrow vectors to what these take."""
    return has_tiles(machine) and machine.has("avx512bf16")


def attends_in_vectors(machine: Machine) -> bool:
    """Whether attention is written for vectors: there are no tile registers, and vectors are multiplied and added."""
    return machine.has("fma") and not multiplies_attention(machine)


def attention_form(kernel: Kernel, machine: Machine) -> AttentionSite | None:
    """The attention that a kernel is, where it is written in blocks."""
    site = attention_site(kernel) if machine.has("fma") else None
    if site is None or site.window or site.cap or site.head > _HEAD or DType.F16 in _types(site):
        return None
    if site.scale < _LEAST_SCALE:  # negative: the largest product is not the largest score
        return None
    if site.mask is not None and (isinstance(site.mask.added, Places) or isinstance(site.mask.seen, Places)):
        return None
    return site if site.backward or site.queries in kernel.grid else None  # of one query


def _types(site: AttentionSite) -> set[DType]:
    """Of the operands, and of a mask that is added."""
    added = site.mask.added if site.mask is not None else None
    return {site.dtype, *([added.dtype] if added is not None else [])}


def choose_attention(
    nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine, processor: str
) -> Choice:
    """``"amx-attention"``, ``"fma-attention"`` or ATen's call. ``processor``: what that runs on."""
    kernel = kernel_of(nest, buffers)
    site = attention_form(kernel, machine)
    if site is None:
        return Choice("aten", "the target has no form for its operands")
    queries, keys = (count.constant for count in site.counts)
    against = _against((queries, keys), site.head, site.dtype is DType.F32, options, machine, processor)
    if against:
        return Choice("aten", against)
    if attends_in_vectors(machine):
        return Choice("fma-attention", f"blocks of vectors take less time than ATen's on {processor}")
    precision = precision_of_products() if site.dtype is DType.F32 else "highest"
    return Choice("amx-attention", "tile registers take less time than ATen's blocks", precision=precision)


def computes_attention(
    lengths: Lengths, head: int, dtype: str, options: LowerOptions, machine: Machine, processor: str
) -> bool:
    """Whether attention of such sizes is computed in blocks, whatever its masks are."""
    if not machine.has("fma") or dtype not in ("float32", "bfloat16") or not 1 < head <= _HEAD:
        return False
    return not _against(lengths, head, dtype == "float32", options, machine, processor)


def _against(lengths: Lengths, head: int, wide: bool, options: LowerOptions, machine: Machine, processor: str) -> str:
    """Why blocks would take more time; nothing where they don't."""
    if options.contractions == "generated":
        return ""
    if attends_in_vectors(machine):
        return _against_vectors(lengths, head, wide, machine, processor)
    if any(size is not None and size < _SHORT for size in (*lengths, head)):
        return "the heads are small"
    if wide and _filled(lengths) < _FILLED:
        return "much of the blocks of scores would be padding"
    return ""


def _against_vectors(lengths: Lengths, head: int, wide: bool, machine: Machine, processor: str) -> str:
    """The same of vectors, see Note [Which attention is vectors]."""
    fast = processor in AMD and (machine.vector_bits == 512 if wide else multiplies_pairs(machine))
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        fast = fast or not wide or (processor in SHORT_AMD and machine.vector_bits == 256)
    if not fast:
        return f"ATen's blocks were not measured to be slower on {processor}"
    if head < _NARROW or any(size is not None and size < _FEW for size in lengths):
        return "the heads are small"
    return ""


def _filled(lengths: Lengths) -> float:
    """The share of blocks of scores that is scores; of sizes that are not known, all."""
    return math.prod(size / (-(-size // PANEL) * PANEL) for size in lengths if size)
