"""ATen's weights of 4 bits as it packs them on a processor with AVX-512: its two operators, in Python.

Kernels read such a weight as it lies, so which of them are written depends on how ATen packs.
"""

from __future__ import annotations

import warnings

import torch

__all__ = ["PANEL", "pack", "pack_as_there", "product"]

PANEL = 64  # columns of a panel; ATen's with AVX2 have 32


def pack(weight: torch.Tensor, _: int) -> torch.Tensor:
    """A byte has a column of a panel's first half and, in its upper bits, that of the second; of a last panel that is
    not whole, neighbours."""
    columns, summed = weight.shape
    whole = columns // PANEL * PANEL
    halves = weight[:whole].reshape(-1, 2, PANEL // 2, summed).permute(0, 3, 1, 2)
    rest = weight[whole:].reshape(-1, 2, summed).permute(2, 1, 0)
    parts = [halves[:, :, 0] | halves[:, :, 1] << 4, rest[:, 0] | rest[:, 1] << 4]
    return torch.cat([part.reshape(-1) for part in parts]).to(torch.uint8).view(columns, summed // 2)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    columns, summed = packed.shape[0], 2 * packed.shape[1]
    whole = columns // PANEL * PANEL
    flat = packed.reshape(-1).int()
    panels = flat[: whole * summed // 2].view(-1, summed, 1, PANEL // 2)
    first = torch.cat([panels & 15, panels >> 4], 2).permute(0, 2, 3, 1).reshape(whole, summed)
    rest = flat[whole * summed // 2 :].view(summed, -1, 1)
    last = torch.cat([rest & 15, rest >> 4], 2).reshape(summed, -1).t()
    return torch.cat([first, last])


def product(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    """Sums in float32, rounded once."""
    if packed.shape[1] != x.shape[1] // 2:
        raise RuntimeError(f"expected the weight's second size ({packed.shape[1]}) to be K/2")
    each = scales.float().repeat_interleave(group, 0)[: x.shape[1]]
    weight = (_unpacked(packed).float().t() - 8) * each[..., 0] + each[..., 1]
    return (x.float() @ weight).to(x.dtype)


def pack_as_there() -> torch.library.Library:
    """Let these be ATen's, as long as what is given lives."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is overridden
        library.impl("_convert_weight_to_int4pack_for_cpu", pack, "CPU")
        library.impl("_weight_int4pack_mm_for_cpu", product, "CPU")
    return library
