"""What a CUDA device must have, for a graph to be compiled for it."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from ...ir import Program
from .errors import DeviceTooOld, Tf32Advice, TritonError

__all__ = ["advise_tf32", "check_device", "check_types", "products_lose_bits"]

OLDEST = (7, 0)
FIRST_WITH_BFLOAT16 = 80
FIRST_WITH_TF32 = 80
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))


def check_types(program: Program, arch: int) -> None:
    """Raise :class:`~.errors.TritonError` for a type that ``sm_<arch>`` does not convert: bfloat16 before sm_80."""
    found = next((b.name for b in program.buffers if b.dtype == "bfloat16"), None)
    if arch < FIRST_WITH_BFLOAT16 and found is not None:
        raise TritonError(
            f"{found} is bfloat16, which sm_{arch} does not convert in hardware; use float16, or run the graph eagerly"
        )


def products_lose_bits() -> bool:
    """Whether products of float32 may lose bits: those of ATen do then.

    torch's older settings are kept in the newer one too, and refuse to be asked once the newer one was set.
    """
    return str(torch._C._get_fp32_precision_getter("cuda", "matmul")) == "tf32"


def advise_tf32(program: Program, arch: int) -> None:
    """Warn, once a process, that float32 products of ``program`` could run on tensor cores of ``sm_<arch>``."""
    if arch < FIRST_WITH_TF32 or products_lose_bits():
        return
    for step in program.steps:
        names = [result for result in getattr(step, "results", ()) if result is not None]
        if getattr(step, "target", "") in _PRODUCTS and program.buffer(names[0]).dtype == "float32":
            tell_tf32()
            return


@cache  # filters of warnings are reset by whoever catches some, so they do not keep to one
def tell_tf32() -> None:
    """Warn, the first time."""
    warnings.warn(
        "a compiled graph multiplies float32 matrices, and this device has tensor cores that do so faster with "
        "10 bits of mantissa (TF32); torch.set_float32_matmul_precision('high') allows that",
        Tf32Advice,
        stacklevel=3,
    )


def check_device(device: str) -> int:
    """The architecture (90 for sm_90) of a CUDA device. Raises :class:`~.errors.TritonError` if it is none, and
    :class:`~.errors.DeviceTooOld` for one that kernels are not generated for."""
    if torch.device(device).type != "cuda":
        raise TritonError(f"kernels are generated for CUDA devices, not for {device}")
    if not torch.cuda.is_available():
        raise TritonError(f"the graph is on {device}, and this process has no CUDA device; run it eagerly")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise DeviceTooOld(torch.cuda.get_device_name(device), capability)
    return capability[0] * 10 + capability[1]
