"""How far the tiles that are chosen for CUDA kernels are from the best.

    python -m tools.bench.triton_tiles [--only REGEX]

Row and column kernels of norms, their gradients and activations, in bfloat16, at sizes of known models. Each is
compiled with other numbers of rows and warps as well and timed (median, with CUDA events, cold second cache): printed
are the time of the choice, of the best, and the best three. Prints one line and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.kernel_passes.linearize import extents_of
from aotkit_inductor_lower.targets.triton import KernelSource, TritonError, kernels_of
from aotkit_inductor_lower.targets.triton.compile import compile_all
from aotkit_inductor_lower.targets.triton.records import Config

__all__ = ["CASES", "Case", "alternatives", "main"]

NO_DEVICE = "no CUDA device on this machine: tiles of CUDA kernels were not measured"
WARPS = (1, 2, 4, 8)
ROWS = (1, 2, 4, 8)
ELEMENTS = (512, 1024, 2048)
Graph = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """``graph`` of arguments of these shapes, in bfloat16 but those at ``wide``, which are float32."""

    name: str
    graph: Graph
    shapes: tuple[tuple[int, ...], ...]
    wide: tuple[int, ...] = ()


def _norm(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.layer_norm(x + bias, (x.shape[-1],), weight, shift),)


def _norm_backward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad, x, mean, rstd, weight, bias = args
    shape, wanted = [x.shape[-1]], [True, True, True]
    return torch.ops.aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, weight, bias, wanted)  # type: ignore[no-any-return]


def _rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x + residual
    wide = x.float()
    return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _gelu(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.gelu(x),)


def _gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.ops.aten.gelu_backward.default(grad, x),)


def _column_sum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.sum(0),)


def _norms(rows: int, columns: int) -> tuple[Case, Case]:
    size, row, one = (rows, columns), (columns,), (rows, 1)
    backward = (size, size, one, one, row, row)
    return (
        Case(f"layer norm {rows} x {columns}", _norm, (size, row, row, row)),
        Case(f"layer norm backward {rows} x {columns}", _norm_backward, backward, wide=(2, 3)),
    )


CASES: tuple[Case, ...] = (
    *_norms(6272, 384),
    *_norms(25088, 192),
    *_norms(100352, 96),
    *_norms(8192, 768),
    *_norms(8192, 1024),
    Case("rms norm 8192 x 1024", _rms_norm, ((8192, 1024), (8192, 1024), (1024,))),
    Case("gelu 8192 x 3072", _gelu, ((8192, 3072),)),
    Case("gelu backward 8192 x 3072", _gelu_backward, ((8192, 3072), (8192, 3072))),
    Case("column sum 8192 x 3072", _column_sum, ((8192, 3072),)),
)


def compiled(case: Case, interpreted: bool = False) -> Compiled:
    """The case's program; for Triton's interpreter no device is needed."""
    device = "cpu" if interpreted else "cuda"
    types = [torch.float32 if k in case.wide else torch.bfloat16 for k in range(len(case.shapes))]
    args = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(case.shapes, types, strict=True)]
    graph = make_fx(case.graph, decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(processor="triton-interpreter") if interpreted else LowerOptions()
    found = compile_to_program(graph, options=options)
    assert isinstance(found, Compiled)
    return found


def alternatives(source: KernelSource) -> Iterator[KernelSource]:
    """The kernel as it is chosen, and other ways to launch its text, which masks no tail that it does not have."""
    yield source
    blocks = dict(source.config.blocks)
    widths: Sequence[int] = (blocks["XBLOCK"],) if "XBLOCK" in blocks else ()
    if blocks.keys() == {"XBLOCK"}:
        widths = ROWS if source.persistent and "reduce" in source.text else ELEMENTS
    sizes = [size.constant for size, block in source.grid if block == "XBLOCK"]
    for width in widths:
        if any(size is None or size % width for size in sizes):
            continue
        for warps in WARPS:
            config = Config(tuple((blocks | {"XBLOCK": width}).items()), warps, source.config.num_stages)
            if config != source.config:
                yield replace(source, config=config)


def measure(case: Case, arch: int) -> Iterator[str]:
    """A line for each kernel of a case."""
    from aotkit_inductor_lower.targets.triton.drivers import CudaDriver
    from aotkit_inductor_lower.targets.triton.timing import device_timer

    found = compiled(case)
    timer = device_timer(CudaDriver("cuda:0"), extents_of(found.scheduled.buffers), {}, repeats=9)
    for kernel in kernels_of(found.program):
        sources = list(alternatives(kernel.source))
        times: list[tuple[float, Config]] = []
        for source, cubin in zip(sources, compile_all(sources, arch), strict=True):
            if isinstance(cubin, TritonError):
                continue
            try:
                times.append((timer(source, cubin) * 1e6, source.config))
            except TritonError as error:
                print(f"{source.name} {source.config}: {error}")
        if not times or times[0][1] != kernel.source.config:
            yield f"{case.name} | {kernel.source.name} | does not run"
            continue
        chosen, best = times[0][0], sorted(times, key=lambda pair: pair[0])[:3]
        shown = ", ".join(f"{took:.1f} {dict(c.blocks)} {c.num_warps} warps" for took, c in best)
        yield f"{case.name} | {kernel.source.name} | {chosen:.1f} us | {best[0][0] / chosen:.2f} | {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    options: Any = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    major, minor = torch.cuda.get_device_capability()
    print("case | kernel | chosen | best / chosen | best three")
    for case in CASES:
        if re.search(options.only, case.name):
            for line in measure(case, 10 * major + minor):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
