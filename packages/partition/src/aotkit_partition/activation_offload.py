"""Activation offload to another device (F3.47) and activation quantization (F3.48)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.fx

from .errors import InvalidOptionError
from .joint import value_bytes
from .partition import Partition
from .rewrite_saved import ActivationCodec, Emit, recodable, recode
from .runtime_estimate import RooflineEstimator
from .transfers import OFFLOAD, OFFLOADED, RELOAD, RELOADED

__all__ = ["offload_activations", "quantize_activations"]

_aten = torch.ops.aten


def offload_activations(
    result: Partition,
    *,
    device: str = "cpu",
    min_bytes: int = 1 << 20,
    names: Sequence[str] | None = None,
    bytes_per_second: float = 16e9,
    own_stream: bool = False,
) -> Partition:
    """Keep large saved activations on another device between forward and backward.

    A value leaves right after it is made and comes back so many ops before its first use as take, by the roofline, as
    long as the transfer. Copies do not block the host and run on the current stream; with ``own_stream`` they run
    beside it, see Note [Transfers beside computation] of :mod:`.transfers`: the forward waits for a transfer so many
    ops behind its start as it takes, at the latest at its end, and the backward right before the first use.

    Args:
        result: a partition; it is not changed.
        device: where the values wait.
        min_bytes: smaller ones stay.
        names: these values instead of a choice by size and device.
        bytes_per_second: of the link, for the lead.
        own_stream: transfers run on a stream of their own. The graphs call operators of this package then.

    Raises:
        InvalidOptionError: a named value can't be recoded.
    """
    kind = torch.device(device).type
    chosen = recodable(result, min_bytes, names)
    if names is None:
        chosen = [node for node in chosen if node.meta["val"].device.type != kind]
    estimator = RooflineEstimator()

    def leave(emit: Emit, node: torch.fx.Node) -> Sequence[torch.fx.Node]:
        pinned = kind == "cpu" and node.meta["val"].device.type == "cuda"
        return [emit(_aten._to_copy.default, node, device=torch.device(device), pin_memory=pinned, non_blocking=pinned)]

    def come_back(emit: Emit, parts: Sequence[torch.fx.Node], value: torch.Tensor) -> torch.fx.Node:
        return emit(_aten._to_copy.default, parts[0], device=value.device, non_blocking=value.device.type == "cuda")

    def lead(part: torch.fx.Node, before: Sequence[torch.fx.Node]) -> int:
        return _ops_within(value_bytes(part.meta["val"]) / bytes_per_second, reversed(before), estimator)

    codec = ActivationCodec(f"offloaded to {device}", leave, come_back, lead)
    if own_stream:
        place = {node: number for number, node in enumerate(result.forward.graph.nodes)}
        chosen = sorted(chosen, key=place.__getitem__)
        codec = _beside_computation(codec, torch.device(device), bytes_per_second)
    return recode(result, [node.name for node in chosen], codec)


def _ops_within(seconds: float, ops: Iterable[torch.fx.Node], estimator: RooflineEstimator) -> int:
    """How many of ``ops`` it takes until they have run for ``seconds``."""
    count = 0
    for node in ops:
        if seconds <= 0:
            break
        seconds -= _seconds(node, estimator)
        count += 1
    return count


def _seconds(node: torch.fx.Node, estimator: RooflineEstimator) -> float:
    runs = node.op == "call_function" and node.target not in (OFFLOAD, OFFLOADED, RELOAD, RELOADED)
    return estimator.seconds(node) if runs else 0.0


def _beside_computation(codec: ActivationCodec, device: torch.device, bytes_per_second: float) -> ActivationCodec:
    """The codec with transfers on a stream of their own, where one waits for the other.

    It is asked in the order of the forward. Values are taken to be needed in the reverse order: each is on its way
    before those that were asked for earlier.
    """
    estimator = RooflineEstimator()
    left_at = back_at = math.inf  # seconds before the end of the forward, and behind the start of the backward

    def leave(emit: Emit, node: torch.fx.Node) -> Sequence[torch.fx.Node]:
        return [emit(OFFLOAD, node, device)]

    def has_left(emit: Emit, node: torch.fx.Node, parts: Sequence[torch.fx.Node]) -> Sequence[torch.fx.Node]:
        return [emit(OFFLOADED, parts[0], node)]

    def come_back(emit: Emit, parts: Sequence[torch.fx.Node], value: torch.Tensor) -> torch.fx.Node:
        return emit(RELOAD, parts[0], value.device)

    def is_back(emit: Emit, parts: Sequence[torch.fx.Node], made: torch.fx.Node) -> torch.fx.Node:
        return emit(RELOADED, made, parts[0])

    def lag(part: torch.fx.Node, behind: Sequence[torch.fx.Node]) -> int:
        nonlocal left_at
        left = sum(_seconds(node, estimator) for node in behind)
        left_at = min(left, left_at) - value_bytes(part.meta["val"]) / bytes_per_second
        return _ops_within(left - left_at, behind, estimator)

    def lead(part: torch.fx.Node, before: Sequence[torch.fx.Node]) -> int:
        nonlocal back_at
        passed = sum(_seconds(node, estimator) for node in before)
        back_at = min(passed, back_at) - value_bytes(part.meta["val"]) / bytes_per_second
        return _ops_within(passed - back_at, reversed(before), estimator)

    return replace(codec, encode=leave, decode=come_back, lead=lead, settle=has_left, lag=lag, arrive=is_back)


def quantize_activations(
    result: Partition,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    min_bytes: int = 1 << 20,
    names: Sequence[str] | None = None,
    dynamic: bool = False,
) -> Partition:
    """Save large floating-point activations in eight bits, scaled by their largest magnitude.

    The backward gets values that differ by half a unit in the last of ``dtype``'s digits: at most 1/16 of the value
    for ``float8_e4m3fn``, and at most 1/512 of 1/448 of the largest one near zero. Parameters and other inputs are
    never quantized.

    Args:
        result: a partition; it is not changed.
        dtype: a floating-point type of one byte.
        min_bytes: smaller values stay as they are.
        names: these values instead of a choice by size.
        dynamic: also values of symbolic size (judged by their example size).

    Raises:
        InvalidOptionError: ``dtype`` is none such, or a named value can't be recoded.
    """
    if not dtype.is_floating_point or dtype.itemsize != 1:
        raise InvalidOptionError(f"dtype is {dtype}; give a floating-point type of one byte, such as float8_e4m3fn.")
    largest = torch.finfo(dtype).max
    chosen = [node for node in recodable(result, min_bytes, names) if _can_shrink(node, dynamic or names is not None)]

    def shrink(emit: Emit, node: torch.fx.Node) -> Sequence[torch.fx.Node]:
        top = emit(_aten.amax.default, emit(_aten.abs.default, node), [], False)
        wide = emit(_aten._to_copy.default, top, dtype=torch.float32)
        step = emit(_aten.div.Tensor, emit(_aten.clamp_min.default, wide, 1e-30), largest)
        scaled = emit(_aten.div.Tensor, emit(_aten._to_copy.default, node, dtype=torch.float32), step)
        bounded = emit(_aten.clamp.default, scaled, -largest, largest)
        return [emit(_aten._to_copy.default, bounded, dtype=dtype), step]

    def grow(emit: Emit, parts: Sequence[torch.fx.Node], value: torch.Tensor) -> torch.fx.Node:
        wide = emit(_aten._to_copy.default, parts[0], dtype=torch.float32)
        scaled = emit(_aten.mul.Tensor, wide, parts[1])
        return scaled if value.dtype is torch.float32 else emit(_aten._to_copy.default, scaled, dtype=value.dtype)

    codec = ActivationCodec(f"quantized to {str(dtype).removeprefix('torch.')}", shrink, grow, lambda part, before: 0)
    return recode(result, [node.name for node in chosen], codec)


def _can_shrink(node: torch.fx.Node, dynamic: bool) -> bool:
    value = node.meta["val"]
    if any(type(size) is int and size == 0 for size in value.size()):
        return False  # which has no largest magnitude
    symbolic = any(type(size) is not int for size in value.size())
    return value.dtype in (torch.float32, torch.float16, torch.bfloat16) and (dynamic or not symbolic)
