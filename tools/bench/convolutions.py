"""Convolutions and both their gradients: ATen's call and what is generated, interleaved, with errors against float64.

python -m tools.bench.convolutions                            networks' shapes, channels last
python -m tools.bench.convolutions --layout contiguous        pixels of a channel side by side
python -m tools.bench.convolutions --contractions generated   all of them ours (else what is ours without being asked)
python -m tools.bench.convolutions --only mobilenet --directions forward
python -m tools.bench.convolutions --threads 2                wall time of two threads (else processor time of one)

ATen's call is oneDNN's kernel. Turns follow each other at once, and the median of the ratios within a round is
reported. Freed memory stays with the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from tools.bench.__main__ import machine
from tools.bench.turns import begin, compared, geometric_mean

__all__ = ["DIRECTIONS", "SHAPES", "Row", "Shape", "main", "measure"]

aten = torch.ops.aten
DIRECTIONS = ("forward", "by input", "by weights")


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution of a network, with as many rows as columns or along one dimension (``line``); ``channels`` become
    ``results``."""

    network: str
    images: int
    channels: int
    results: int
    size: int
    taps: int
    stride: int = 1
    pad: int = 0
    groups: int = 1
    line: bool = False

    @property
    def dimensions(self) -> int:
        """Of an image."""
        return 1 if self.line else 2

    @property
    def operations(self) -> int:
        """Multiplications and additions of each of the three results."""
        places = (self.size + 2 * self.pad - self.taps) // self.stride + 1
        sums = self.images * self.results * places**self.dimensions
        return 2 * sums * self.channels // self.groups * self.taps**self.dimensions

    def __str__(self) -> str:
        kind = "depthwise " if self.groups == self.channels > 1 else f"{self.groups} groups " if self.groups > 1 else ""
        kind = "patches " if self.taps == self.stride > 1 and not self.pad and not kind else kind
        taps, size = ("x".join([str(n)] * self.dimensions) for n in (self.taps, self.size))
        return f"{self.network}: {kind}{taps}/{self.stride}, {self.channels} to {self.results}, {self.images}x{size}"


def _depthwise(network: str, channels: int, size: int, taps: int, stride: int = 1, images: int = 4) -> Shape:
    return Shape(network, images, channels, channels, size, taps, stride, taps // 2, channels)


def _line(network: str, channels: int, size: int, taps: int, stride: int = 1, images: int = 4) -> Shape:
    return Shape(network, images, channels, channels, size, taps, stride, taps - 1, channels, line=True)


SHAPES = (
    Shape("resnet", 4, 3, 64, 112, 7, 2, 3),
    Shape("resnet", 4, 64, 64, 28, 3, 1, 1),
    Shape("resnet", 4, 64, 256, 28, 1),
    Shape("resnet", 4, 128, 128, 28, 3, 2, 1),
    Shape("resnet", 4, 256, 512, 28, 1, 2),
    Shape("resnet", 4, 256, 256, 14, 3, 1, 1),
    Shape("resnet", 4, 512, 512, 7, 3, 1, 1),
    Shape("mobilenet", 4, 3, 32, 112, 3, 2, 1),
    _depthwise("mobilenet", 32, 56, 3),
    _depthwise("mobilenet", 96, 56, 3, 2),
    _depthwise("mobilenet", 144, 28, 3),
    _depthwise("mobilenet", 192, 28, 3, 2),
    _depthwise("mobilenet", 384, 14, 3),
    _depthwise("mobilenet", 576, 14, 3, 2),
    _depthwise("mobilenet", 960, 7, 3),
    Shape("mobilenet", 4, 144, 24, 28, 1),
    Shape("mobilenet", 4, 96, 576, 14, 1),
    Shape("convnext", 4, 3, 96, 112, 4, 4),
    _depthwise("convnext", 96, 56, 7, images=2),
    _depthwise("convnext", 192, 28, 7),
    _depthwise("convnext", 384, 14, 7),
    _depthwise("convnext", 768, 7, 7),
    Shape("convnext", 4, 96, 192, 28, 2, 2),
    Shape("segformer", 4, 3, 32, 112, 7, 4, 3),
    Shape("segformer", 4, 32, 64, 28, 3, 2, 1),
    Shape("convnext", 4, 192, 384, 14, 2, 2),
    Shape("convnext", 4, 384, 768, 7, 2, 2),
    Shape("swin", 4, 3, 48, 224, 4, 4),
    Shape("vit", 4, 3, 256, 224, 16, 16),
    Shape("segformer", 4, 32, 32, 28, 8, 8),
    Shape("segformer", 2, 32, 32, 64, 8, 8),
    Shape("segformer", 2, 64, 64, 32, 4, 4),
    Shape("segformer", 2, 160, 160, 16, 2, 2),
    _depthwise("segformer", 128, 28, 3),
    _depthwise("segformer", 640, 14, 3),
    _depthwise("many", 512, 14, 3),
    _depthwise("many", 1024, 14, 3),
    _depthwise("many", 960, 14, 3),
    _depthwise("many", 768, 28, 3, images=2),
    _depthwise("many", 512, 28, 3, images=2),
    Shape("unet", 2, 64, 64, 64, 3, 1, 1),
    Shape("unet", 2, 256, 128, 32, 3, 1, 1),
    Shape("unet", 2, 128, 128, 32, 3, 2, 1),
    Shape("unet", 2, 320, 320, 16, 3, 1, 1),
    Shape("unet", 2, 320, 4, 32, 3, 1, 1),
    _line("mamba", 512, 64, 4, images=2),
    _line("mamba", 1536, 512, 4, images=1),
    _line("sequence", 256, 256, 3),
    _line("sequence", 256, 256, 3, 2),
    _line("sequence", 256, 256, 9),
)


@dataclass(slots=True)
class Row:
    """One result of one convolution: times in ms, the speed over ATen's, errors over the largest value. ``own``: all of
    it is kernels."""

    shape: Shape
    direction: str
    aten: float
    ours: float
    ratio: float
    errors: tuple[float, float]
    own: bool


def _program(shape: Shape, direction: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    stride, pad, step, more = ([number] * shape.dimensions for number in (shape.stride, shape.pad, 1, 0))
    how = (stride, pad, step, False, more, shape.groups)
    if direction == "forward":
        return lambda x, w: (aten.convolution(x, w, None, *how),)
    mask = [direction == "by input", direction == "by weights", False]
    return lambda grad, x, w: tuple(
        result for result in aten.convolution_backward(grad, x, w, None, *how, mask) if result is not None
    )


def _operands(shape: Shape, direction: str, layout: torch.memory_format, dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.randn(shape.images, shape.channels, *[shape.size] * shape.dimensions, dtype=dtype)
    w = torch.randn(shape.results, shape.channels // shape.groups, *[shape.taps] * shape.dimensions, dtype=dtype)
    if not shape.line:
        x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
    elif layout is torch.channels_last:
        x = x.mT.contiguous().mT
    if direction == "forward":
        return [x, w]
    (result,) = _program(shape, "forward")(x, w)
    return [torch.randn_like(result), x, w]


def measure(
    shape: Shape,
    direction: str,
    rounds: int,
    clock: Callable[[], float],
    options: LowerOptions,
    layout: torch.memory_format = torch.channels_last,
    dtype: torch.dtype = torch.float32,
) -> Row:
    """One result in interleaved turns."""
    program, args = _program(shape, direction), _operands(shape, direction, layout, dtype)
    own = compile_graph(make_fx(program, tracing_mode="fake")(*args), options=options)
    assert isinstance(own, CompiledGraph)

    times = compared(lambda: program(*args), lambda: own(list(args)), rounds, clock)
    (true,) = program(*(x.double() for x in args))
    got = program(*args)[0], own(list(args))[0]
    off = [float((each.double() - true).abs().max() / true.abs().max()) for each in got]
    return Row(shape, direction, *times, (off[0], off[1]), not own.report().externs)


def _summary(found: Sequence[Row], title: str) -> None:
    if found:
        mean = geometric_mean([row.ratio for row in found])
        print(f"{title}: {len(found)} rows, geometric mean {mean:.2f}, least {min(row.ratio for row in found):.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an error is more than 1.3 times ATen's, and 2e-7 (of bfloat16 1e-3)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.convolutions", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layout", choices=("last", "contiguous"), default="last")
    parser.add_argument("--contractions", choices=("aten", "auto", "generated"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--directions", nargs="*", choices=[d.split()[-1] for d in DIRECTIONS], default=())
    parser.add_argument("--only", default="", help="a part of the name")
    chosen = parser.parse_args(argv)
    clock = begin(chosen.threads)
    layout = torch.channels_last if chosen.layout == "last" else torch.contiguous_format
    options = LowerOptions(contractions=chosen.contractions, check_inputs=False)
    what = f"{chosen.dtype}; {chosen.layout}; contractions: {chosen.contractions}"
    print(f"{machine()}; threads: {chosen.threads}; {what}\n")
    print("| convolution | result | by | ATen ms | its GFLOP/s | ours ms | x ATen | error ATen | error |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    found: list[Row] = []
    for shape in (each for each in SHAPES if chosen.only in str(each)):
        for direction in DIRECTIONS:
            if chosen.directions and direction.split()[-1] not in chosen.directions:
                continue
            row = measure(shape, direction, chosen.rounds, clock, options, layout, getattr(torch, chosen.dtype))
            found.append(row)
            speed = shape.operations / row.aten / 1e6
            numbers = f"{row.aten:.3f} | {speed:.0f} | {row.ours:.3f} | {row.ratio:.2f}"
            numbers += f" | {row.errors[0]:.1e} | {row.errors[1]:.1e}"
            print(f"| {shape} | {direction} | {'kernels' if row.own else 'ATen'} | {numbers} |", flush=True)
    print()
    for direction in DIRECTIONS:
        _summary([row for row in found if row.direction == direction], direction)
    _summary([row for row in found if row.own], "by kernels of ours")
    _summary(found, "all")
    slack = 1e-3 if chosen.dtype == "bfloat16" else 2e-7
    return int(any(row.errors[1] > 1.3 * row.errors[0] + slack for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
