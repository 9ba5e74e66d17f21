"""Products of few rows: our kernels beside ATen's calls.

    python -m tools.bench.triton_rows [--only REGEX] [--rows 1 2 4 8] [--plain]

Weights of a Qwen2 of width 1024, of GPT-2 and of large models, in bfloat16. Each product is recorded as many times as
there are copies of its weight, which together are larger than the second cache, so neither launches nor cached weights
count; printed are microseconds of one product, ours and ATen's, and the gigabytes of the weight that ours reads a
second. Products of one row are also compiled in other tiles, of which the best is shown, unless ``--plain``. Prints one
line and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import Cubin, KernelSource, TritonError, TritonKernel, kernels_of
from aotkit_inductor_lower.targets.triton.compile import compile_all, compile_by, compile_kernel
from aotkit_inductor_lower.targets.triton.records import Config
from aotkit_inductor_lower.targets.triton.workers import shared_workers, worker_count

__all__ = ["CASES", "Case", "alternatives", "main", "source_of"]

NO_DEVICE = "no CUDA device on this machine: products of few rows were not measured"
CACHES = 160 << 20  # bytes of all copies of a weight
WIDTHS = (1, 2, 4, 8, 16, 32)
WARPS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """A weight with so many results and factors. ``down``: it is factors x results, as GPT-2 keeps its own."""

    name: str
    results: int
    factors: int
    down: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return (self.factors, self.results) if self.down else (self.results, self.factors)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What is measured."""
        return x @ weight if self.down else F.linear(x, weight)


CASES: tuple[Case, ...] = (
    Case("qwen2 q, o", 1024, 1024),
    Case("qwen2 k, v", 256, 1024),
    Case("qwen2 gate, up", 2816, 1024),
    Case("qwen2 down", 1024, 2816),
    Case("qwen2 words", 32000, 1024),
    Case("gpt2 qkv", 2304, 768, True),
    Case("gpt2 o", 768, 768, True),
    Case("gpt2 up", 3072, 768, True),
    Case("gpt2 down", 768, 3072, True),
    Case("gpt2 words", 50257, 768),
    Case("4096 x 4096", 4096, 4096),
    Case("14336 x 4096", 14336, 4096),
    Case("4096 x 14336", 4096, 14336),
    Case("words 128256 x 4096", 128256, 4096),
)


def source_of(case: Case, rows: int, dtype: torch.dtype = torch.bfloat16) -> KernelSource | None:
    """The kernel of a product, whether or not ATen would be called; nothing where there are several."""
    shapes = (rows, case.factors), case.shape

    def graph(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (case.product(x, weight),)

    args = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    found = make_fx(graph, decompositions(), tracing_mode="fake")(*[torch.empty_like(a, device="cpu") for a in args])
    options = LowerOptions(processor="triton-interpreter", contractions="generated")
    made = compile_to_program(found, options=options)
    assert isinstance(made, Compiled)
    kernels = kernels_of(made.program)
    return kernels[0].source if len(kernels) == 1 else None


def alternatives(source: KernelSource) -> Iterator[KernelSource]:
    """Other tiles for the same text, which masks no tail that it does not have."""
    blocks = dict(source.config.blocks)
    (count,) = [size.constant or 0 for size, block in source.grid if block == "XBLOCK"]
    masked = count % blocks["XBLOCK"] != 0
    for width in WIDTHS:
        if not masked and count % width:
            continue
        for warps in WARPS:
            config = Config(tuple((blocks | {"XBLOCK": width}).items()), warps, source.config.num_stages)
            loads = width * source.config.num_warps // (blocks["XBLOCK"] * warps)
            if config != source.config and 4 * blocks["XBLOCK"] >= width and loads <= 4 and "RBLOCK" not in blocks:
                yield replace(source, config=config)


# -- on a device -------------------------------------------------------------------------------------------------


def microseconds(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Of one of several calls that are recorded together."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        recording.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / len(calls))
    return statistics.median(times[1:])


class Launcher:
    """Launches compiled kernels on the present stream."""

    def __init__(self) -> None:
        from aotkit_inductor_lower.targets.triton.drivers import CudaDriver
        from aotkit_inductor_lower.targets.triton.launcher import LaunchRow, LaunchTable, segment_runner

        self.driver = CudaDriver("cuda:0")
        self._row, self._table, self._runner = LaunchRow, LaunchTable, segment_runner
        self._kept: list[Any] = []

    def call(self, source: KernelSource, cubin: Cubin, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A launch of a kernel that takes ``tensors``, in the order of its arguments."""
        count = 1
        for size, block in source.grid:
            count *= -(-(size.constant or 0) // (source.config.block(block) if block else 1))
        slots = [tensor.data_ptr() for tensor in tensors]
        frame = (ctypes.c_int64 * (len(slots) + 2))(*slots, 0, count)
        arguments = (*range(len(slots)), *[len(slots)] * cubin.hidden)
        function = self.driver.load(TritonKernel(source, cubin=cubin))
        row = self._row(function, len(slots) + 1, cubin.threads, cubin.shared, arguments)
        run = self._runner(self.driver.launch, self._table([row]))
        self._kept.append((frame, run))

        def launch() -> None:
            status = run(ctypes.addressof(frame), self.driver.stream())
            if status:
                raise TritonError(str(self.driver.failure(status & 0xFFFFFFFF)))

        return launch


Compiled_ = dict[tuple[str, int], list[tuple[KernelSource, Cubin]]]


def compiled(cases: Sequence[Case], rows: Sequence[int], arch: int, plain: bool) -> Compiled_:
    """By case and rows the kernels that compile, the chosen one first."""
    sources: list[tuple[tuple[str, int], KernelSource]] = []
    for case in cases:
        for count in rows:
            source = source_of(case, count)
            others = () if plain or count > 1 or source is None else alternatives(source)
            sources += [((case.name, count), each) for each in (source, *others) if each is not None]
    workers = worker_count(None)
    compiler = compile_by(shared_workers(workers), None) if workers else compile_kernel
    found: Compiled_ = {}
    for (key, source), cubin in zip(sources, compile_all([s for _, s in sources], arch, compiler), strict=True):
        if isinstance(cubin, TritonError):
            print(f"{key}: {source.config}: {cubin}")
            continue
        found.setdefault(key, []).append((source, cubin))
    return found


def measure(case: Case, rows: Sequence[int], kernels: Compiled_, launcher: Launcher) -> Iterator[str]:
    """A line for each number of rows."""
    nbytes = 2 * case.results * case.factors
    copies = max(2, -(-CACHES // nbytes))
    weights = [torch.randn(case.shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for count in rows:
        x = torch.randn(count, case.factors, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(count, case.results, device="cuda", dtype=torch.bfloat16)
        library = microseconds([partial(case.product, x, w) for w in weights])
        exact = case.product(x.double(), weights[-1].double())
        times: list[tuple[float, KernelSource]] = []
        for source, cubin in kernels.get((case.name, count), []):
            calls = [launcher.call(source, cubin, _ordered(source, x, w, out)) for w in weights]
            times.append((microseconds(calls), source))
            error = float((out.double() - exact).norm() / exact.norm())
            if not error < 4e-3:
                yield f"{case.name} | {count} | {source.config} is wrong: {error}"
        if not times:
            yield f"{case.name} | {count} | ATen's | {library:.2f}"
            continue
        took, best = times[0][0], min(times, key=lambda pair: pair[0])
        line = f"{case.name} | {count} | {took:.2f} | {library:.2f} | {took / library:.2f} | {nbytes / took / 1e3:.0f}"
        chosen = f"{dict(times[0][1].config.blocks)} {times[0][1].config.num_warps}"
        yield f"{line} | {chosen} | {best[0]:.2f} {dict(best[1].config.blocks)} {best[1].config.num_warps}"


def _ordered(source: KernelSource, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    names = [argument.name for argument in source.arguments if not argument.written]
    assert len(names) == 2
    given = iter((x, w))
    return [out if argument.written else next(given) for argument in source.arguments]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--plain", action="store_true", help="no other tiles")
    options: Any = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    major, minor = torch.cuda.get_device_capability()
    cases = [case for case in CASES if re.search(options.only, case.name)]
    kernels, launcher = compiled(cases, options.rows, 10 * major + minor, options.plain), Launcher()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("weight | rows | ours, us | ATen, us | ratio | GB/s | tile and warps | best")
    for case in cases:
        for line in measure(case, options.rows, kernels, launcher):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
