"""Activation offload to another device (F3.47) and activation quantization (F3.48)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from .errors import InvalidOptionError
from .joint import value_bytes
from .partition import Partition
from .rewrite_saved import ActivationCodec, Emit, recodable, recode
from .runtime_estimate import RooflineEstimator

__all__ = ["offload_activations", "quantize_activations"]

_aten = torch.ops.aten


def offload_activations(
    result: Partition,
    *,
    device: str = "cpu",
    min_bytes: int = 1 << 20,
    names: Sequence[str] | None = None,
    bytes_per_second: float = 16e9,
) -> Partition:
    """Keep large saved activations on another device between forward and backward.

    A value leaves right after it is made and comes back so many ops before its first use as take, by the roofline, as
    long as the transfer. Copies do not block the host and run on the current stream.

    Args:
        result: a partition; it is not changed.
        device: where the values wait.
        min_bytes: smaller ones stay.
        names: these values instead of a choice by size and device.
        bytes_per_second: of the link, for the lead.

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
        needed, ops = value_bytes(part.meta["val"]) / bytes_per_second, 0
        for node in reversed(before):
            if needed <= 0:
                break
            needed -= estimator.seconds(node) if node.op == "call_function" else 0.0
            ops += 1
        return ops

    return recode(
        result, [node.name for node in chosen], ActivationCodec(f"offloaded to {device}", leave, come_back, lead)
    )


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
    symbolic = any(type(size) is not int for size in value.size())
    return value.dtype in (torch.float32, torch.float16, torch.bfloat16) and (dynamic or not symbolic)
