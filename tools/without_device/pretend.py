"""A CUDA device that is only said to be there: tensors are fake, graphs are traced, and nothing is computed.

A torch without CUDA knows neither a device guard nor hooks for it, which autograd asks for. Both are a few lines of
C++, compiled once and loaded before torch is; :func:`pretend` then replaces what `torch.cuda` asks of a driver. The
process can't be used for anything else afterwards.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["ARCH", "PROCESSORS", "pretend", "pretend_attention", "pretend_for_triton"]

ARCH = 90
PROCESSORS = 132  # streaming multiprocessors of an H100

_SOURCE = """\
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct Guard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  // Layouts of convolutions' results are those that cuDNN wants.
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  long versionCuDNNFrontend() const override { return 11400; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""

_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=PROCESSORS,
    total_memory=80 << 30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="",
)


def pretend() -> None:
    """Make this process believe in one H100. Raises ``RuntimeError`` where torch is imported already, and
    ``subprocess.CalledProcessError`` without a C++ compiler."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, so it knows that there is no device")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled(root)), mode=ctypes.RTLD_GLOBAL)
    _replace_driver_calls()


def _compiled(root: Path) -> Path:
    key = hashlib.sha256((_SOURCE + str(root) + (root / "version.py").read_text()).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pretended-device-{key}"
    made = folder / "guard.so"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            source, library = Path(own) / "guard.cpp", Path(own) / "guard.so"
            source.write_text(_SOURCE)
            flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
            command = ["g++", *flags, str(source), "-o", str(library), "-lc10", "-ltorch_cpu"]
            subprocess.run(command, check=True, timeout=300)
            library.replace(made)
    return made


def _replace_driver_calls() -> None:
    import torch

    host_state = torch.random.get_rng_state

    def nothing() -> Callable[..., None]:  # each its own: Dynamo has a rule for each
        return lambda *_, **__: None

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: host_state(),
        "get_rng_state_all": list,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name in ("set_rng_state", "set_rng_state_all", "set_device", "synchronize", "current_stream", "_lazy_init"):
        answers[name] = nothing()
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]


class _Driver:
    """Says which device Triton compiles for, and nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda


def pretend_for_triton() -> None:
    """Make Triton compile for that device too."""
    from triton.runtime import driver

    driver.set_active(_Driver())


def pretend_attention() -> Any:
    """Fused attention as an H100 has it: ATen's choice asks the device, and takes none for the answer. Gives what must
    be kept alive."""
    import torch

    aten = torch.ops.aten

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa:
            shared = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
        if attn_mask.dtype == torch.bool:
            nothing = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, nothing, float("-inf"))
        bias = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        given = query, key, value, bias, True, dropout_p, is_causal
        return aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    return library
