"""Which attention is computed in tile registers (AMX).

Note [Which attention is tiles]
    Kernels of ours take a third to four fifths of the time of ATen's fused attention forward; backward two fifths to
    three quarters in float32, and less than a fourth in bfloat16 (`python -m tools.bench.attention`, one core of a Xeon
    with AMX). Of few queries or keys, or small heads, most of a tile is padding: these are left to ATen; in float32,
    where tiles are six times the work, also those of whose blocks of scores less than :data:`_FILLED` is scores (48
    queries and keys take as long as ATen's, 33 half as long again). The same holds of attention that is written out
    (windows of 49 are 59 % full: a step of Swin has 1.6 times eager's speed, `python -m tools.bench --models swin
    --modes train`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...ir import Buffer, DType, LoopNest
from ...kernel_ir.attention_site import AttentionSite, attention_site
from ...kernel_ir.nodes import Kernel
from ...kernel_passes.normal_form import kernel_of
from ...options import LowerOptions
from ...target import Choice
from .choose_tiles import precision_of_products
from .machine import Machine
from .products import has_tiles
from .tile_forms import PANEL

__all__ = ["attention_form", "attention_is_tiles", "choose_attention", "multiplies_attention"]

_HEAD = 256  # numbers of a head, at most
_FILLED = 0.58
_SHORT = 16  # queries, keys, numbers of a head: of less, tiles are mostly padding


def multiplies_attention(machine: Machine) -> bool:
    """Whether there are tile registers, and instructions that narrow vectors to what these take."""
    return has_tiles(machine) and machine.has("avx512bf16")


def attention_form(kernel: Kernel, machine: Machine) -> AttentionSite | None:
    """The attention that a kernel is, where it is written for tile registers."""
    site = attention_site(kernel) if multiplies_attention(machine) else None
    if site is None or site.head > _HEAD or site.scale <= 0 or DType.F16 in _types(site):
        return None
    return site if site.backward or site.queries in kernel.grid else None  # of one query


def _types(site: AttentionSite) -> set[DType]:
    """Of the operands, and of a mask that is added."""
    added = site.mask.added if site.mask is not None else None
    return {site.dtype, *([added.dtype] if added is not None else [])}


def choose_attention(nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine) -> Choice:
    """``"amx-attention"`` or ATen's call."""
    kernel = kernel_of(nest, buffers)
    site = attention_form(kernel, machine)
    if site is None:
        return Choice("aten", "the target has no form for its operands")
    queries, keys = (count.constant for count in site.counts)
    against = _against((queries, keys), site.head, site.dtype is DType.F32, options)
    if against:
        return Choice("aten", against)
    precision = precision_of_products() if site.dtype is DType.F32 else "highest"
    return Choice("amx-attention", "tile registers take less time than ATen's blocks", precision=precision)


def attention_is_tiles(
    lengths: tuple[int | None, int | None],
    head: int,
    dtype: str,
    options: LowerOptions,
    machine: Machine,
) -> bool:
    """Whether attention of such sizes is computed in tile registers, whatever its masks are."""
    if not multiplies_attention(machine) or dtype not in ("float32", "bfloat16") or not 1 < head <= _HEAD:
        return False
    return not _against(lengths, head, dtype == "float32", options)


def _against(lengths: tuple[int | None, int | None], head: int, wide: bool, options: LowerOptions) -> str:
    """Why tiles would take more time; nothing where they don't."""
    if options.contractions == "generated":
        return ""
    if any(size is not None and size < _SHORT for size in (*lengths, head)):
        return "the heads are small"
    if wide and _filled(lengths) < _FILLED:
        return "much of the blocks of scores would be padding"
    return ""


def _filled(lengths: tuple[int | None, int | None]) -> float:
    """The share of blocks of scores that is scores; of sizes that are not known, all."""
    return math.prod(size / (-(-size // PANEL) * PANEL) for size in lengths if size)
