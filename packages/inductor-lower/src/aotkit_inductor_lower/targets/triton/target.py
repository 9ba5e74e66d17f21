"""The Triton target: a CUDA device, or Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import Buffer, ExternCall
from ...ops.dtypes import ATOMIC
from ...target import Capabilities, Choice, SplitPolicy

__all__ = ["INTERPRETER", "TritonTarget", "cuda_capabilities"]

# One instance may walk a row of up to ``long_row`` elements several times.
SPLITS = SplitPolicy(units=256, least=1024, shortest=128, tail="mask", long_row=1 << 14, assume=4096)

def cuda_capabilities(device: str) -> Capabilities:
    """What kernels on a CUDA device can do. Sums that are added up in memory, a row after the other, would leave
    nothing to do at once."""
    return Capabilities(
        device=device,
        arena=False,
        host_memory=False,
        unordered=True,
        sorts_rows=False,
        wide_statistics=False,
        careful_variance=False,
        channels_last=False,
        accumulates_rows=False,
        one_pass_rows=True,
        atomics=ATOMIC,
        contraction_forms=("dot",),
    )


#: The kernels are those of a CUDA device. Tensors are on the CPU, and so are ATen's calls: statistics are as wide as
#: eager's there, and convolutions gain by the layout. Program instances run one after the other.
INTERPRETER = replace(
    cuda_capabilities("cpu"), host_memory=True, unordered=False, wide_statistics=True, channels_last=True
)


@dataclass(frozen=True, slots=True)
class TritonTarget:
    """``id``: ``"cuda:0"`` and so on, or ``"triton-interpreter"``."""

    id: str
    capabilities: Capabilities
    split_policy: SplitPolicy | None = SPLITS

    def choose(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """ATen's call, unless it is measured."""
        return Choice("aten", "matrix products are left to ATen")
