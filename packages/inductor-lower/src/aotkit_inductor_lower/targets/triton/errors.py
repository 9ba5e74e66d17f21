"""What can go wrong on the way to a CUDA kernel."""

from __future__ import annotations

from ...errors import LoweringError

__all__ = ["DeviceTooOld", "SharedMemoryExceeded", "Tf32Advice", "TritonError", "TritonMissing"]


class Tf32Advice(UserWarning):
    """Float32 products would be faster, and less exact, with a setting of torch."""


class TritonError(LoweringError, RuntimeError):
    """A graph cannot be compiled for, or run on, a CUDA device."""


class SharedMemoryExceeded(TritonError):
    """A kernel asks for more shared memory than a program instance has on the device."""


class TritonMissing(TritonError):
    """Kernels for CUDA are asked for where Triton is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "kernels for CUDA are compiled by Triton, which is not installed; "
            "install it with `pip install aotkit-inductor-lower[cuda]`, or run the graph eagerly"
        )


class DeviceTooOld(TritonError):
    """The device is older than what Triton generates code for."""

    def __init__(self, name: str, capability: tuple[int, int]) -> None:
        super().__init__(
            f"{name} has compute capability {capability[0]}.{capability[1]}; kernels are generated for 7.0 and above; "
            "run the graph eagerly on this device"
        )
