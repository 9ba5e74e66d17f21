"""Convolutions on a CUDA device: generated as implicit products in several tiles each, beside cuDNN's.

    python -m tools.bench.triton_convolutions [--only REGEX] [--most 3] [--show 3] [--search]

Convolutions of ResNet-50, ConvNeXt and the UNet of Stable Diffusion in bfloat16, channels last: forward, the gradients
by input and by weights, and with what a fusion computes behind them (a batch norm's scale and shift, a residual, relu;
ATen's calls one after the other on the other side). ``N x CxHxW > O kK sS``: images, then channels of the result, the
kernel and the stride. A row of the table says what ATen takes (median, CUDA events, cold second cache, normal numbers,
before and after ours, the less), what the tile takes that is chosen where nothing is measured, and the best tiles;
``error`` is the largest difference from the result in float32, over the largest number in it. ``--search``: cuDNN tries
its ways first (``torch.backends.cudnn.benchmark``). All kernels are compiled before anything is timed. Prints one line
and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.kernel_passes.linearize import extents_of, linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.targets.triton import TritonError
from aotkit_inductor_lower.targets.triton.compile import compile_by
from aotkit_inductor_lower.targets.triton.records import Gpu, KernelSource
from aotkit_inductor_lower.targets.triton.render.implicit import implicit_site, implicit_sources
from aotkit_inductor_lower.targets.triton.render.kernel import emit_kernel
from aotkit_inductor_lower.targets.triton.render.matmul import dot_site, product_sources
from aotkit_inductor_lower.targets.triton.workers import shared_workers

from .triton_products import COLUMNS, Bench, Row, Way, compile_ways, error_of

__all__ = ["CASES", "Case", "Shape", "cases_of", "lowered", "main", "ways"]

NO_DEVICE = "no CUDA device on this machine: generated convolutions were not measured"
BF16 = torch.bfloat16
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Images of ``count`` by ``channels`` by ``size`` by ``size``, ``filters`` of ``kernel`` by ``kernel``."""

    count: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int = 1
    pad: int = 0

    @property
    def places(self) -> int:
        """Of the result, along one side."""
        return (self.size + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def flops(self) -> int:
        """Of one of the three sums."""
        return 2 * self.count * self.places**2 * self.filters * self.channels * self.kernel**2

    def __str__(self) -> str:
        image = f"{self.count} x {self.channels}x{self.size}x{self.size}"
        return f"{image} > {self.filters} k{self.kernel} s{self.stride}"


@dataclass(frozen=True, slots=True)
class Case:
    """``graph`` of tensors of these shapes, those of four dimensions channels last."""

    name: str
    graph: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    flops: int

    def tensors(self, make: Callable[[tuple[int, ...]], torch.Tensor]) -> list[torch.Tensor]:
        """What it is called with."""
        made = (make(shape).to(BF16) for shape in self.shapes)
        return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in made]


def cases_of(shape: Shape, kinds: str = "fuiw") -> list[Case]:
    """``f``: forward; ``u``: with what follows; ``i``, ``w``: the gradients by input and by weights."""
    x = (shape.count, shape.channels, shape.size, shape.size)
    w = (shape.filters, shape.channels, shape.kernel, shape.kernel)
    y = (shape.count, shape.filters, shape.places, shape.places)
    channel = (1, shape.filters, 1, 1)
    how = [[shape.stride] * 2, [shape.pad] * 2, [1, 1], False, [0, 0], 1]

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, stride=shape.stride, padding=shape.pad)

    def followed(
        x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, r: torch.Tensor
    ) -> torch.Tensor:
        return F.relu(forward(x, w) * scale + shift + r)

    def gradient(which: int) -> Callable[..., torch.Tensor]:
        mask = [k == which for k in range(3)]

        def of(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.ops.aten.convolution_backward(g, x, w, None, *how, mask)[which]
            return found

        return of

    every = {
        "f": Case(f"forward {shape}", forward, (x, w), shape.flops),
        "u": Case(f"scale, residual, relu {shape}", followed, (x, w, channel, channel, y), shape.flops),
        "i": Case(f"input gradient {shape}", gradient(0), (y, x, w), shape.flops),
        "w": Case(f"weight gradient {shape}", gradient(1), (y, x, w), shape.flops),
    }
    return [every[kind] for kind in kinds]


CASES: tuple[Case, ...] = (
    *cases_of(Shape(64, 64, 56, 64, 3, 1, 1)),
    *cases_of(Shape(64, 128, 28, 128, 3, 1, 1)),
    *cases_of(Shape(64, 256, 14, 256, 3, 1, 1)),
    *cases_of(Shape(64, 512, 7, 512, 3, 1, 1)),
    *cases_of(Shape(64, 128, 56, 128, 3, 2, 1), "fiw"),
    *cases_of(Shape(64, 256, 56, 512, 1, 2), "fiw"),
    *cases_of(Shape(64, 64, 56, 256, 1)),
    *cases_of(Shape(64, 3, 224, 64, 7, 2, 3), "fuw"),
    *cases_of(Shape(64, 96, 56, 192, 2, 2), "fiw"),
    *cases_of(Shape(64, 3, 224, 96, 4, 4), "fw"),
    *cases_of(Shape(4, 320, 64, 320, 3, 1, 1)),
    *cases_of(Shape(4, 640, 32, 640, 3, 1, 1)),
    *cases_of(Shape(4, 1280, 16, 1280, 3, 1, 1)),
)


# -- what is measured ----------------------------------------------------------------------------------------------


def lowered(case: Case) -> Compiled:
    """A case for a CUDA device, lowered without one."""
    traced = make_fx(lambda *a: (case.graph(*a),), decompositions(), tracing_mode="fake")(*case.tensors(torch.empty))
    options = LowerOptions(processor="triton-interpreter", contractions="generated", disable=("pad-products",))
    found = compile_to_program(traced, options=options)
    assert isinstance(found, Compiled) and not found.report.externs, case.name
    return found


def ways(case: Case, gpu: Gpu, most: int) -> list[Way]:
    """How a case can be computed; first as it is where nothing is measured."""
    program = lowered(case).scheduled
    kernels = normalize(linearize(program)).kernels
    types = {b.name: getattr(torch, b.dtype) for b in program.buffers}
    extents = {name: (extent.constant or 0, types[name]) for name, extent in extents_of(program.buffers).items()}
    result = program.outputs[0].name  # type: ignore[union-attr]
    choices = [_sources(kernel, gpu, most) for kernel in kernels]
    found = []
    for k in range(max(map(len, choices))):
        sources = tuple(each[min(k, len(each) - 1)] for each in choices)
        tiled = next(s for s in sources if "YBLOCK" in dict(s.config.blocks))
        blocks, config = dict(tiled.config.blocks), tiled.config
        split = "split " if any("_partial" in s.name for s in sources) else ""
        size = f"{blocks['YBLOCK']}x{blocks['XBLOCK']}x{blocks['RBLOCK']} {config.num_warps}w{config.num_stages}s"
        several = f" {len(sources)} kernels" if len(sources) > 1 else ""
        found.append(Way(f"{split}{size}{several}", sources, extents, tuple(program.inputs), result))
    return found


def _sources(kernel: Any, gpu: Gpu, most: int) -> list[KernelSource]:
    """The ways to write one kernel."""
    if implicit_site(kernel) is not None:
        found = implicit_sources(kernel, gpu, most=4 * most)
    elif dot_site(kernel) is not None:
        found = tuple(s for s in product_sources(kernel, gpu, most=4 * most) if "descriptor" not in s.text)
    else:
        return [emit_kernel(kernel)]
    different: dict[object, KernelSource] = {}
    for source in found:  # of those that differ in stages and warps only the first
        different.setdefault(source.config.blocks[:3], source)
    return list(different.values())[:most]


def measure(row: Row[Case], bench: Bench) -> None:
    """All ways of a row, between two turns of ATen's."""
    case = row.case
    g = torch.Generator(bench.device).manual_seed(0)
    args = case.tensors(lambda shape: torch.randn(shape, generator=g, device=bench.device))
    want = case.graph(*(a.float() for a in args))
    reference = case.graph(*args)
    row.error = error_of(reference, want)
    row.aten = bench.seconds(lambda: case.graph(*args))
    for way in row.ways:
        try:
            launch, memory = bench.prepared(way, args)
            launch()
            bench.wait()
            got = memory.as_strided(reference.shape, reference.stride())
            row.times.append((bench.seconds(launch), error_of(got, want), way.name))
        except TritonError as problem:
            print(f"{case.name} | {way.name}: {problem}")
    row.aten = min(row.aten, bench.seconds(lambda: case.graph(*args)))


def measure_all(rows: Sequence[Row[Case]], bench: Bench) -> bool:
    """Whether the device survived all."""
    for row in rows:
        try:
            measure(row, bench)
        except (RuntimeError, TimeoutError) as problem:
            print(f"{row.case.name}: {type(problem).__name__}: {str(problem)[:300]}")
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    parser.add_argument("--most", type=int, default=3, help="tiles of each convolution")
    parser.add_argument("--show", type=int, default=3, help="tiles in a line of the table")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    parser.add_argument("--search", action="store_true", help="cuDNN tries its ways first")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    from aotkit_inductor_lower.targets.triton.drivers import CudaDriver

    torch.backends.cudnn.benchmark = options.search
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    facts, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    gpu = Gpu(10 * major + minor, facts.multi_processor_count)
    print(f"{facts.name}, {gpu.processors} multiprocessors, torch {torch.__version__}")
    cases = [case for case in CASES if re.search(options.only, case.name)]
    started = time.perf_counter()
    every = [ways(case, gpu, options.most) for case in cases]
    lowering = time.perf_counter() - started
    count, failed = compile_ways(every, gpu.arch, compile_by(shared_workers(options.workers)))
    print(f"lowered in {lowering:.1f} s, {count} kernels compiled in {time.perf_counter() - started - lowering:.1f} s")
    for line in failed:
        print(f"does not compile: {line}")
    rows = [
        Row(case, [way for way in own if len(way.cubins) == len(way.sources)])
        for case, own in zip(cases, every, strict=True)
    ]
    survived = measure_all(rows, Bench(CudaDriver("cuda:0"), options.repeats))
    print(f"convolution | {COLUMNS}")
    for row in rows:
        print(row.line(options.show), flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if not survived:
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait for the device
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
