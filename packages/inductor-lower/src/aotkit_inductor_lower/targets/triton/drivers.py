"""What runs kernels: a CUDA device through its driver library, or Triton's interpreter on CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ...ops.dtypes import to_torch_dtype
from .errors import TritonError
from .records import TritonKernel

__all__ = ["CudaDriver", "Driver", "InterpreterDriver"]

LARGE_SHARED = 48 * 1024  # more shared memory than this a kernel must ask for
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver(Protocol):
    """``device``: where tensors live. ``launch``: address of a function with the signature of ``cuLaunchKernel``."""

    device: str
    launch: int

    def load(self, kernel: TritonKernel) -> int:
        """The handle that ``launch`` takes."""

    def stream(self) -> int:
        """The present stream."""

    def guard(self) -> AbstractContextManager[object] | None:
        """What to enter around a call, if the process's present device is another one."""

    def mend(self, status: int) -> bool:
        """Whether what made the first launch fail with ``status`` is mended."""

    def failure(self, status: int) -> Exception:
        """The error that a status of ``launch`` stands for."""


_pointer, _unsigned = ctypes.c_void_p, ctypes.c_uint
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, *[_unsigned] * 7, _pointer, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)), _pointer
)


class InterpreterDriver:
    """Kernels run in Triton's interpreter, on the CPU: slow, and without a device.

    The launches go the same way as on a device: frame, table, native function; a Python callback stands for the
    driver's launch function.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._kernels: list[TritonKernel] = []
        self._error: Exception | None = None
        self.launched: list[str] = []
        self._callback = _LAUNCH(self._run)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        self.launch: int = address

    def load(self, kernel: TritonKernel) -> int:
        from .jit import triton_module

        triton_module()  # refuses now, not at the first call
        self._kernels.append(kernel)
        return len(self._kernels)

    def stream(self) -> int:
        return 0

    def guard(self) -> AbstractContextManager[object] | None:
        return None

    def mend(self, status: int) -> bool:
        return False

    def failure(self, status: int) -> Exception:
        error, self._error = self._error, None
        return error or TritonError(f"the interpreter failed with status {status}")

    def _run(self, handle: int, *rest: Any) -> int:
        grid, params = rest[0], rest[8]
        from .jit import run_interpreted

        source = self._kernels[handle - 1].source
        self.launched.append(source.name)
        try:
            arguments = []
            for argument, param in zip(source.parameters, params, strict=False):
                value = param[0]
                arguments.append(value if argument.kind == "size" else _at(value, to_torch_dtype(argument.dtype)))
            run_interpreted(source, arguments, grid)
        except Exception as error:  # noqa: BLE001  # cannot pass through native code; raised by the caller
            self._error = _cause(error)
            return 1
        return 0


def _cause(error: Exception) -> Exception:
    """What the kernel raised, without the interpreter's wrapping."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at an address; the interpreter reads on from there."""
    if not address:
        return torch.empty(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


class CudaDriver:
    """A CUDA device, through the driver's library. Streams are torch's. ``arch``: 90 for sm_90.

    The driver launches in the context that is current in the calling thread. torch makes the device's own one current
    where it calls the device, which a thread that got all its memory from torch's cache has not done yet: such a launch
    fails before anything ran, :meth:`mend` makes the context current, and the thread's next calls do without.
    """

    def __init__(self, device: str = "cuda:0", library: Any = None) -> None:
        self.device = device
        self._index = torch.device(device).index or 0
        self._library = library if library is not None else _open_library()
        address = ctypes.cast(self._library.cuLaunchKernel, ctypes.c_void_p).value
        assert address is not None
        self.launch: int = address
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current: Callable[[], int] = torch._C._cuda_getDevice
        major, minor = torch.cuda.get_device_capability(self._index)
        self.arch = major * 10 + minor
        ordinal, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(ctypes.byref(ordinal), self._index))
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal))

    def load(self, kernel: TritonKernel) -> int:
        if kernel.cubin is None:
            raise TritonError(f"the kernel {kernel.source.name} is not compiled")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._index):
            self._check(self._library.cuCtxSetCurrent(self._context))
            self._check(self._library.cuModuleLoadData(ctypes.byref(module), kernel.cubin.code))
            name = kernel.cubin.name.encode()
            self._check(self._library.cuModuleGetFunction(ctypes.byref(function), module, name))
            if kernel.cubin.shared > LARGE_SHARED:
                wanted = ctypes.c_int(kernel.cubin.shared)
                self._check(self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, wanted))
        return function.value or 0

    def stream(self) -> int:
        return self._raw_stream(self._index)

    def guard(self) -> AbstractContextManager[object] | None:
        return torch.cuda.device(self._index) if self._current() != self._index else None

    def mend(self, status: int) -> bool:
        return status == _INVALID_CONTEXT and not self._library.cuCtxSetCurrent(self._context)

    def failure(self, status: int) -> Exception:
        name = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(name))
        return TritonError(f"the CUDA driver says: {(name.value or b'unknown error').decode()} ({status})")

    def _check(self, status: int) -> None:
        if status:
            raise self.failure(status)


def _open_library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TritonError(f"this machine has no CUDA driver ({error}); run the graph eagerly") from error
