"""Generated CUDA kernels beside eager and Inductor: `python -m tools.bench.triton_kernels [--size 4096]`.

Kernels that memory bounds, in bfloat16: time per call (median, with CUDA events, cold second cache), and what share of
the bandwidth of a plain copy that is. Then microseconds of Python per launch, beside Triton's own launcher. Prints one
line and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["CASES", "main"]

Call = Callable[..., Any]
NO_DEVICE = "no CUDA device on this machine: the benchmark of generated CUDA kernels was not run"


def _gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def _softmax(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.softmax(x + bias, -1)


def _layer_norm(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), bias, bias)


def _transpose(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x + bias).t().contiguous()


def _column_sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x * bias).sum(0)


#: Name, function, and how often each element of the large tensor is moved.
CASES: tuple[tuple[str, Call, int], ...] = (
    ("gelu", _gelu, 2),
    ("softmax", _softmax, 2),
    ("layer norm", _layer_norm, 2),
    ("transpose", _transpose, 2),
    ("column sum", _column_sum, 1),
)


def seconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median time of a call on the device."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times[3:])


def compiled_by_us(f: Call, args: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """``f`` as a bound device program."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from aotkit_inductor_lower import compile_graph, decompositions

    bound = compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(*args))
    torch.testing.assert_close(bound([*args])[0], f(*args), rtol=2e-2, atol=2e-2)
    return lambda: bound([*args])


def python_per_launch(call: Callable[[], Any], calls: int = 2000) -> float:
    """Seconds of the processor per call of a graph of one small kernel."""
    call()
    started = time.process_time()
    for _ in range(calls):
        call()
    taken = time.process_time() - started
    torch.cuda.synchronize()
    return taken / calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    torch.manual_seed(0)
    x = torch.randn(chosen.size, chosen.size, device="cuda", dtype=torch.bfloat16)
    args = (x, torch.randn(chosen.size, device="cuda", dtype=torch.bfloat16))
    target = torch.empty_like(x)
    bandwidth = 2 * x.numel() * x.element_size() / seconds(lambda: target.copy_(x))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'kernel':12} {'eager us':>9} {'Inductor us':>13} {'aotkit us':>10} {'of the copy':>12}")
    for name, f, moved in CASES:
        inductor = torch.compile(f)
        times = [seconds(c) for c in (lambda f=f: f(*args), lambda i=inductor: i(*args), compiled_by_us(f, args))]
        share = moved * x.numel() * x.element_size() / times[2] / bandwidth
        print(f"{name:12} {times[0] * 1e6:9.1f} {times[1] * 1e6:13.1f} {times[2] * 1e6:10.1f} {share:11.0%}")
    small = tuple(a.flatten()[:256].clone() for a in args)
    ours, theirs = compiled_by_us(_gelu, small), torch.compile(_gelu)
    print(f"a call of one small kernel: aotkit {python_per_launch(ours) * 1e6:.1f} us of processor time,", end=" ")
    print(f"Inductor {python_per_launch(lambda: theirs(*small)) * 1e6:.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
