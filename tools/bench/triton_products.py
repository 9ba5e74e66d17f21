"""Matrix products on a CUDA device: generated in several tiles each, beside ATen's.

    python -m tools.bench.triton_products [--only REGEX] [--most 8] [--show 3]

Products of training steps of BERT, GPT-2 and Qwen2 in bfloat16: forward, gradients of inputs and of weights, and with
what a fusion computes behind them. ``AxBxC``: rows, summed, columns. A row of the table says what ATen takes (median,
CUDA events, cold second cache, normal numbers), what the tile takes that is chosen where nothing is measured, and the
best tiles; ``error`` is the largest difference from the product in float32, over the largest number in it. ``split
S``: the sum in S parts, which a second kernel adds. All kernels are compiled before anything is timed. Prints one line
and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.ir import LoopNest, Program, Step
from aotkit_inductor_lower.ir.walk import buffers_of
from aotkit_inductor_lower.kernel_passes.linearize import extents_of, linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.loop_passes.rfactor import ReductionSplit
from aotkit_inductor_lower.loop_passes.split_reductions import split_nest
from aotkit_inductor_lower.symbolic import floordiv, to_expr
from aotkit_inductor_lower.targets.triton import Cubin, KernelSource, TritonError
from aotkit_inductor_lower.targets.triton.compile import Compiler, compile_all, compile_by
from aotkit_inductor_lower.targets.triton.records import Gpu
from aotkit_inductor_lower.targets.triton.render.kernel import emit_kernel
from aotkit_inductor_lower.targets.triton.render.matmul import dot_site, product_sources
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER
from aotkit_inductor_lower.targets.triton.workers import shared_workers

__all__ = ["CASES", "Case", "Way", "main", "ways"]

NO_DEVICE = "no CUDA device on this machine: generated matrix products were not measured"
Graph = Callable[..., Any]
BF16 = torch.bfloat16
DISABLED = ("pad-products", "split-reductions")  # a case says itself what it is
WALKS = ("", "walk")
PATIENCE = 5.0  # seconds that a kernel may take


@dataclass(frozen=True, slots=True)
class Case:
    """``graph`` of tensors of these shapes; generated with the sum in so many ``parts``."""

    name: str
    graph: Graph
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Way:
    """Kernels that compute a case one after the other, on memory of so many elements. ``result``: the name of its
    memory; ``inputs``: those of the arguments."""

    name: str
    sources: tuple[KernelSource, ...]
    extents: dict[str, tuple[int, torch.dtype]]
    inputs: tuple[str, ...]
    result: str
    walk: str = ""
    cubins: list[Cubin] = field(default_factory=list)


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def _residual(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b) + r


def _input(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return g @ w


def _weight(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return g.t() @ x


def _layer(rows: int, inner: int, columns: int, *, parts: Sequence[int] = (), kinds: str = "fiw") -> list[Case]:
    """A linear layer's products."""
    flops, found = 2 * rows * inner * columns, []
    x, w, g = (rows, inner), (columns, inner), (rows, columns)
    if "f" in kinds:
        found.append(Case(f"forward {rows}x{inner}x{columns}", _linear, (x, w), flops))
    if "i" in kinds:
        found.append(Case(f"input gradient {rows}x{columns}x{inner}", _input, (g, w), flops))
    if "w" in kinds:
        name = f"weight gradient {columns}x{rows}x{inner}"
        found += [Case(name, _weight, (g, x), flops, n) for n in (1, *parts)]
    return found


CASES: tuple[Case, ...] = (
    *_layer(8192, 768, 768, kinds="fw", parts=(4, 8)),
    *_layer(8192, 768, 3072, parts=(2,)),
    *_layer(8192, 3072, 768, kinds="f"),
    *_layer(8192, 1024, 2816, kinds="fw"),
    *_layer(8192, 2816, 1024, kinds="f"),
    *_layer(8192, 768, 50257, kinds="f"),
    *_layer(8192, 768, 50264, kinds="fiw"),
    Case("bias, gelu 8192x768x3072", _gelu, ((8192, 768), (3072, 768), (3072,)), 2 * 8192 * 768 * 3072),
    Case(
        "bias, residual 8192x3072x768",
        _residual,
        ((8192, 3072), (768, 3072), (768,), (8192, 768)),
        2 * 8192 * 768 * 3072,
    ),
)


# -- what is measured ----------------------------------------------------------------------------------------------


def lowered(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> Compiled:
    """A graph for a CUDA device, lowered without one."""
    args = [torch.empty(shape, dtype=BF16) for shape in shapes]
    traced = make_fx(lambda *a: (graph(*a),), decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(processor="triton-interpreter", contractions="generated", disable=DISABLED)
    found = compile_to_program(traced, options=options)
    assert isinstance(found, Compiled)
    return found


def in_parts(program: Program, parts: int) -> Program:
    """A program of one product, with its sum in parts."""
    if parts == 1:
        return program
    buffers, steps = buffers_of(program), list[Step]()
    for nest in program.steps:
        if not isinstance(nest, LoopNest):  # a view
            steps.append(nest)
            continue
        position = next(k for k, stage in enumerate(nest.stages) if stage.ranges)
        (loop,) = nest.stages[position].ranges
        cut = ReductionSplit(loop, to_expr(parts), floordiv(loop.size + (parts - 1), parts), place=0)
        steps += split_nest(nest, position, cut, buffers, TRITON_INTERPRETER)
    return replace(program, steps=tuple(steps), buffers=tuple(buffers.values()))


def ways(case: Case, gpu: Gpu, most: int) -> list[Way]:
    """How a case can be computed; first as it is where nothing is measured."""
    program = in_parts(lowered(case.graph, case.shapes).scheduled, case.parts)
    kernels = normalize(linearize(program)).kernels
    types = {b.name: getattr(torch, b.dtype) for b in program.buffers}
    extents = {name: (extent.constant or 0, types[name]) for name, extent in extents_of(program.buffers).items()}
    result = program.outputs[0].name  # type: ignore[union-attr]
    choices = [_different(product_sources(k, gpu, most=50), most) if dot_site(k) else [emit_kernel(k)] for k in kernels]
    found = []
    for k in range(max(map(len, choices))):
        sources = tuple(each[min(k, len(each) - 1)] for each in choices)
        tiled = next(s for s in sources if "YBLOCK" in dict(s.config.blocks))
        blocks, config = dict(tiled.config.blocks), tiled.config
        walk = "walk" if "flatten" in tiled.text else ""
        name = (
            f"{blocks['YBLOCK']}x{blocks['XBLOCK']}x{blocks['RBLOCK']} {config.num_warps}w{config.num_stages}s {walk}"
        )
        split = f"split {case.parts} " if case.parts > 1 else ""
        found.append(Way(f"{split}{name}".strip(), sources, extents, tuple(program.inputs), result, walk))
    return found


def _different(sources: Sequence[KernelSource], most: int) -> list[KernelSource]:
    """The first ``most``, and of those that differ in stages and warps only the first."""
    found: dict[object, KernelSource] = {}
    for source in sources:
        found.setdefault((source.config.blocks[:3], "flatten" in source.text), source)
    return list(found.values())[:most]


class Bench:
    """Runs kernels on a device, and times them."""

    def __init__(self, driver: Any, repeats: int) -> None:
        self.driver, self.repeats, self.device = driver, repeats, torch.device(driver.device)
        self.flush = torch.empty(256 << 20 if self.device.type == "cuda" else 1, dtype=torch.int8, device=self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call on the device."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        times = []
        for _ in range(self.repeats + 2):
            self.flush.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            times.append((before, after))
        torch.cuda.synchronize()
        return statistics.median(b.elapsed_time(a) / 1e3 for b, a in times[2:])

    def wait(self) -> None:
        """Until the device is done. Raises ``TimeoutError`` if that takes too long."""
        if self.device.type != "cuda":
            return
        done, until = torch.cuda.Event(), time.monotonic() + PATIENCE
        done.record()
        while not done.query():
            if time.monotonic() > until:
                raise TimeoutError(f"a kernel takes more than {PATIENCE:.0f} s")
            time.sleep(1e-4)

    def prepared(self, way: Way, args: Sequence[torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What launches a way, and the memory of its result."""
        from aotkit_inductor_lower.targets.triton.launcher import LaunchRow, LaunchTable, segment_runner
        from aotkit_inductor_lower.targets.triton.records import TritonKernel

        memory = dict(zip(way.inputs, args, strict=True))
        slots: list[int] = [0]
        kept: list[Any] = [memory]
        rows = []
        for source, cubin in zip(way.sources, way.cubins, strict=True):
            own = []
            for argument in source.arguments:
                if argument.kind == "pointer":
                    if argument.name not in memory:
                        extent, dtype = way.extents[argument.name]
                        memory[argument.name] = torch.zeros(extent, dtype=dtype, device=self.device)
                    place = memory[argument.name].data_ptr()
                else:
                    kept.append(torch.zeros(argument.extent.evaluate({}), dtype=torch.int64, device=self.device))
                    place = kept[-1].data_ptr()
                own.append(len(slots))
                slots.append(place)
            count = 1
            for size, block in source.grid:
                count *= -(-size.evaluate({}) // (source.config.block(block) if block else 1))
            slots.append(count)
            function = self.driver.load(TritonKernel(source, cubin=cubin))
            arguments = (*own, *[0] * cubin.hidden)
            rows.append(LaunchRow(function, len(slots) - 1, cubin.threads, cubin.shared, arguments))
        frame = (ctypes.c_int64 * len(slots))(*slots)
        run, kept = segment_runner(self.driver.launch, LaunchTable(rows)), [*kept, frame]

        def launch(kept: Any = kept) -> None:
            status = run(ctypes.addressof(frame), self.driver.stream())
            if status:
                raise TritonError(str(self.driver.failure(status & 0xFFFFFFFF)))

        return launch, memory[way.result]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest number, block by block of rows."""
    most = max(float((g.float() - w).abs().max()) for g, w in zip(got.split(1024), want.split(1024), strict=True))
    return most / float(want.abs().max())


#: What :meth:`Row.line` says behind the name of a case.
COLUMNS = "ATen us | chosen us | ATen / chosen | ATen / best | TFLOP/s ATen / best | error ATen / ours | tiles"


class Measured(Protocol):
    """What a row is of."""

    @property
    def name(self) -> str:
        """As the table has it."""

    @property
    def flops(self) -> float:
        """Of its products."""


C = TypeVar("C", bound=Measured)


@dataclass(slots=True)
class Row(Generic[C]):
    """What is known of a case: ATen's time and error, and ``times``: seconds, error and name of each way."""

    case: C
    ways: list[Way]
    aten: float = float("inf")
    error: float = 0.0
    times: list[tuple[float, float, str]] = field(default_factory=list)

    def line(self, show: int) -> str:
        """A line of the table."""
        head = f"{self.case.name} | {self.aten * 1e6:.1f}"
        if not self.times:
            return f"{head} | nothing ran"
        ranking = sorted(self.times)
        chosen = next((each for each in self.times if each[2] == self.ways[0].name), ranking[-1])
        tera = f"{self.case.flops / self.aten / 1e12:.0f} / {self.case.flops / ranking[0][0] / 1e12:.0f}"
        errors = f"{self.error:.1e} / {max(error for _, error, _ in self.times):.1e}"
        best = ", ".join(f"{took * 1e6:.1f} {name}" for took, _, name in ranking[:show])
        rule = f"{chosen[0] * 1e6:.1f} {chosen[2]} | {self.aten / chosen[0]:.2f}"
        return f"{head} | {rule} | {self.aten / ranking[0][0]:.2f} | {tera} | {errors} | {best}"


def measure(row: Row[Case], walk: str, bench: Bench) -> None:
    """The ways of a row that walk so."""
    own = [way for way in row.ways if way.walk == walk]
    if not own:
        return
    case, g = row.case, torch.Generator(bench.device).manual_seed(0)
    args = [torch.randn(shape, generator=g, device=bench.device).to(BF16) for shape in case.shapes]
    torch.backends.cuda.matmul.allow_tf32 = False
    want = case.graph(*(a.float() for a in args))
    row.aten = min(row.aten, bench.seconds(lambda: case.graph(*args)))
    row.error = error_of(case.graph(*args), want)
    for way in own:
        try:
            launch, result = bench.prepared(way, args)
            launch()
            bench.wait()
            row.times.append((bench.seconds(launch), error_of(result.view(want.shape), want), way.name))
        except TritonError as problem:
            print(f"{case.name} | {way.name}: {problem}")
    row.aten = min(row.aten, bench.seconds(lambda: case.graph(*args)))


def measure_all(rows: Sequence[Row[Case]], bench: Bench) -> bool:
    """Plain ways first: one that the device does not survive ends the process. Whether none did."""
    for walk in WALKS:
        for row in rows:
            try:
                measure(row, walk, bench)
            except (RuntimeError, TimeoutError) as problem:
                print(f"{row.case.name} | {walk or 'no walk'}: {type(problem).__name__}: {str(problem)[:300]}")
                return False
    return True


def compile_ways(every: Sequence[Sequence[Way]], arch: int, compiler: Compiler) -> tuple[int, list[str]]:
    """Give each way its cubins, all at once; how many kernels there were, and what does not compile."""
    wanted = [(way, source) for own in every for way in own for source in way.sources]
    compiled = compile_all([source for _, source in wanted], arch, compiler)
    failed = []
    for (way, _), cubin in zip(wanted, compiled, strict=True):
        if isinstance(cubin, TritonError):
            failed.append(f"{way.name}: {str(cubin)[:200]}")
        else:
            way.cubins.append(cubin)
    return len(wanted), failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    parser.add_argument("--most", type=int, default=7, help="tiles of each product")
    parser.add_argument("--show", type=int, default=9, help="tiles in a line of the table")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    from aotkit_inductor_lower.targets.triton.drivers import CudaDriver

    facts, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    gpu = Gpu(10 * major + minor, facts.multi_processor_count)
    print(f"{facts.name}, {gpu.processors} multiprocessors, torch {torch.__version__}")
    cases = [case for case in CASES if re.search(options.only, case.name)]
    started = time.perf_counter()
    every = [ways(case, gpu, options.most if case.parts == 1 else min(4, options.most)) for case in cases]
    lowering = time.perf_counter() - started
    count, failed = compile_ways(every, gpu.arch, compile_by(shared_workers(options.workers)))
    print(f"lowered in {lowering:.1f} s, {count} kernels compiled in {time.perf_counter() - started - lowering:.1f} s")
    for line in failed:
        print(f"does not compile: {line}")
    bench = Bench(CudaDriver("cuda:0"), options.repeats)
    rows: dict[str, Row[Case]] = {}
    for case, own in zip(cases, every, strict=True):
        whole = [way for way in own if len(way.cubins) == len(way.sources)]
        rows.setdefault(case.name, Row(case, [])).ways.extend(whole)
    survived = measure_all(list(rows.values()), bench)
    print(f"product | {COLUMNS}")
    for row in rows.values():
        print(row.line(options.show), flush=True)
    if not survived:
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait for the device
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
