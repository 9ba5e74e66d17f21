"""Attention on a CUDA device: generated in several blocks each, beside ATen's fused kernels.

    python -m tools.bench.triton_attention [--only REGEX] [--rounds 15]

``token``: one query of a language model, with a static cache of keys and a mask that shows the first ``used`` of them,
as transformers writes it: ATen gets repeated heads and the bool. ``forward`` and ``backward``: many queries; ATen's
flash attention, or with a mask its memory-efficient one (its gradients by autograd, with the forward's launches left
out), or products and a softmax where it has no fused kernel. Sizes are batch x heads/heads of keys x queries x keys x
numbers of a head. A row says what ATen takes (median of rounds in which all take turns; each call is one CUDA graph,
replayed with a cold second cache), what the blocks take that are chosen, the best of all blocks, and the errors: the
largest difference from float32, over the largest number. All kernels are compiled before anything is timed. Prints one
line and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit_inductor_lower.ops.attention  # noqa: F401  defines the operators
from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import (
    Cubin,
    KernelSource,
    Rendered,
    TritonError,
    assemble,
    render_program,
    to_program,
)
from aotkit_inductor_lower.targets.triton.attention import AttentionTile
from aotkit_inductor_lower.targets.triton.compile import Compiler, code_identity, compile_all, compile_by
from aotkit_inductor_lower.targets.triton.render import attention_backward, attention_forward
from aotkit_inductor_lower.targets.triton.workers import shared_workers

__all__ = ["CASES", "Case", "Way", "main", "ways"]

NO_DEVICE = "no CUDA device on this machine: generated attention was not measured"
Tensors = list[torch.Tensor]
ops, aten = torch.ops.aotkit_lower, torch.ops.aten
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Case:
    """An attention: batch, heads, heads of keys, queries, keys, numbers of a head. ``used``: keys that a mask shows,
    0 without a mask. ``added``: a mask of numbers, for each head and pair."""

    kind: str
    sizes: tuple[int, int, int, int, int, int]
    causal: bool = False
    used: int = 0
    added: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        batch, heads, shared, queries, keys, width = self.sizes
        more = " causal" * self.causal + " added" * self.added + (f" used {self.used}" if self.used else "")
        return f"{self.kind} {batch}x{heads}/{shared}x{queries}x{keys}x{width}{more}"

    @property
    def flops(self) -> float:
        """Of the products."""
        batch, heads, _, queries, keys, width = self.sizes
        products = 5 if self.kind == "backward" else 2
        return 2.0 * products * batch * heads * queries * keys * width * (0.5 if self.causal else 1)

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.sizes[-1] ** -0.5)

    def tensors(self, device: torch.device) -> Tensors:
        """Query, key, value, and the mask, if there is one."""
        batch, heads, shared, queries, keys, width = self.sizes
        g = torch.Generator(device).manual_seed(0)

        def lines(count: int, length: int) -> torch.Tensor:
            made = torch.randn(batch, length, count, width, generator=g, device=device, dtype=torch.bfloat16)
            return made.transpose(1, 2)

        found = [lines(heads, queries), lines(shared, keys), lines(shared, keys)]
        if self.kind == "token":  # a cache has the lines of a head one after the other
            found[1:] = [each.contiguous() for each in found[1:]]
        if self.used:
            found.append((torch.arange(keys, device=device) < self.used).expand(batch, 1, queries, keys).contiguous())
        if self.added:
            found.append(torch.randn(1, heads, queries, keys, generator=g, device=device, dtype=torch.bfloat16))
        return found

    def settings(self, rest: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The arguments of our operator behind the tensors."""
        mask = rest[0] if rest else None
        added, seen = (mask, None) if self.added else (None, mask)
        return added, seen, None, self.scale, -INFINITY, False, 1.0, self.causal

    def ours(self, *given: torch.Tensor) -> Any:
        """What is compiled: of query, key, value and mask, or of what the backward takes."""
        if self.kind != "backward":
            return ops.attention(*given[:3], *self.settings(given[3:]), True)[0]
        return ops.attention_backward(*given[:7], *self.settings(given[7:]), self.scale)

    def operands(self, device: torch.device) -> Tensors:
        """What :meth:`ours` takes."""
        found = self.tensors(device)
        if self.kind != "backward":
            return found
        saved = self.written_out(found)
        gradient = torch.randn_like(saved[0])
        return [gradient, *found[:3], *saved, *found[3:]]

    def written_out(self, given: Tensors) -> Tensors:
        """Result, largest scores and sums of weights, with scores in memory."""
        return list(ops.attention(*given[:3], *self.settings(given[3:]), True))

    def wanted(self, given: Tensors) -> Tensors:
        """The results, from operands in float32."""
        wide = [x.float() if x.is_floating_point() else x for x in given]
        found = self.ours(*wide)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    def library(self, given: Tensors) -> Callable[[], Any]:
        """ATen's call."""
        if self.kind == "backward":
            return self._library_backward(given)
        query, key, value, *rest = given
        times = query.shape[1] // key.shape[1]

        def call() -> torch.Tensor:
            keys, values = (_repeated(each, times) for each in (key, value))
            mask = rest[0] if rest else None
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=self.causal)

        return call

    def _library_backward(self, given: Tensors) -> Callable[[], Any]:
        gradient, query, key, value = given[:4]
        if self.added:
            bias = given[7].expand(query.shape[0], -1, -1, -1)
            saved = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
            return lambda: aten._scaled_dot_product_efficient_attention_backward(
                gradient, query, key, value, bias, *saved, 0.0, [True, True, True, False], self.causal
            )
        out, sums, q_ends, k_ends, q_most, k_most, seed, unused, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, self.causal
        )
        rest = (q_ends, k_ends, q_most, k_most, 0.0, self.causal, seed, unused)
        return lambda: aten._scaled_dot_product_flash_attention_backward(gradient, query, key, value, out, sums, *rest)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """As transformers repeats heads."""
    if times == 1:
        return x
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


CASES = (
    Case("token", (1, 14, 2, 1, 256, 64), used=128),
    Case("token", (1, 14, 2, 1, 1024, 64), used=512),
    Case("token", (1, 14, 2, 1, 4096, 64), used=512),
    Case("token", (1, 14, 2, 1, 4096, 64), used=4096),
    Case("token", (1, 32, 8, 1, 4096, 128), used=4000),
    Case("token", (8, 32, 8, 1, 2048, 128), used=2000),
    Case("forward", (8, 12, 12, 1024, 1024, 64)),
    Case("forward", (8, 12, 12, 1024, 1024, 64), causal=True),
    Case("forward", (4, 16, 16, 2048, 2048, 128), causal=True),
    Case("forward", (8, 12, 12, 512, 512, 64), added=True),
    Case("backward", (8, 12, 12, 1024, 1024, 64)),
    Case("backward", (8, 12, 12, 1024, 1024, 64), causal=True),
    Case("backward", (4, 16, 16, 2048, 2048, 128), causal=True),
    Case("backward", (8, 12, 12, 512, 512, 64), added=True),
)
_FORWARDS = {
    64: (
        AttentionTile(128, 64, 4, 3),
        AttentionTile(128, 64, 8, 3),
        AttentionTile(128, 128, 8, 2),
        AttentionTile(64, 128, 4, 2),
        AttentionTile(128, 32, 4, 4),
    ),
    128: (
        AttentionTile(128, 64, 8, 3),
        AttentionTile(128, 128, 8, 2),
        AttentionTile(64, 64, 4, 3),
        AttentionTile(64, 128, 4, 2),
    ),
}
_BACKWARDS = {
    64: (
        (AttentionTile(128, 64, 8, 2), AttentionTile(64, 128, 8, 2)),
        (AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 3)),
        (AttentionTile(128, 128, 8, 2), AttentionTile(128, 64, 8, 2)),
        (AttentionTile(64, 128, 4, 2), AttentionTile(32, 128, 4, 3)),
    ),
    128: (
        (AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 8, 2)),
        (AttentionTile(128, 64, 8, 2), AttentionTile(32, 128, 8, 2)),
        (AttentionTile(64, 32, 4, 2), AttentionTile(32, 64, 4, 3)),
        (AttentionTile(128, 32, 8, 3), AttentionTile(64, 128, 8, 1)),
    ),
}
_PARTS = (16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class Way:
    """Kernels of a case. ``run``: what launches them, once there is a binary."""

    name: str
    rendered: Rendered
    run: Callable[[], Any] | None = None
    times: list[float] = field(default_factory=list)
    error: float = float("nan")

    @property
    def sources(self) -> list[KernelSource]:
        """Its kernels."""
        return [kernel.source for kernel in self.rendered.kernels]


def lowered(case: Case, given: Tensors) -> Compiled:
    """A case as a scheduled program, for the device that its operands are on."""
    graph = make_fx(case.ours, tracing_mode="fake")(*given)
    found = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter"))
    assert isinstance(found, Compiled)
    return found


def ways(case: Case, given: Tensors) -> list[Way]:
    """How a case can be computed; first as it is where nothing is said."""
    program, device = lowered(case, given).scheduled, str(given[0].device)
    found = [Way("chosen", render_program(program, device))]
    for name, tile in _choices(case):
        module, function = (
            (attention_backward, "gradient_tiles") if case.kind == "backward" else (attention_forward, "attention_tile")
        )
        with mock.patch.object(module, function, lambda site, gpu, tile=tile: tile):
            found.append(Way(name, render_program(program, device)))
    return found


def _choices(case: Case) -> list[tuple[str, Any]]:
    *_, keys, width = case.sizes
    if case.kind == "token":
        block = min(128, 16384 // width)
        parts = [part for part in _PARTS if part < keys]
        return [(f"part {part}", AttentionTile(16, min(block, part), 4, 2, part)) for part in parts]
    if case.kind == "forward":
        return [(_text(tile), tile) for tile in _FORWARDS[width]]
    return [(" and ".join(map(_text, pair)), pair) for pair in _BACKWARDS[width]]


def _text(tile: AttentionTile) -> str:
    return f"{tile.queries}x{tile.keys} {tile.num_warps}w{tile.num_stages}s"


def compile_ways(every: Sequence[Way], arch: int, compiler: Compiler) -> tuple[int, list[str]]:
    """Give each way its binary, all compiled at once; how many kernels there were, and what does not compile."""
    wanted = [source for way in every for source in way.sources]
    made = dict(zip(map(code_identity, wanted), compile_all(wanted, arch, compiler), strict=False))
    failed = []

    def known(source: KernelSource, arch: int) -> Cubin:
        found = made[code_identity(source)]
        if isinstance(found, TritonError):
            raise found
        return found

    for way in every:
        try:
            way.rendered = assemble(way.rendered, arch, compiler=known)
        except TritonError as problem:
            failed.append(f"{way.name}: {str(problem)[:200]}")
    return len(set(map(code_identity, wanted))), failed


def error_of(got: Any, want: Tensors) -> float:
    """The largest difference over the largest number, of all results."""
    results = [got] if isinstance(got, torch.Tensor) else [x for x in got if isinstance(x, torch.Tensor)]
    pairs = zip(results, want, strict=False)
    return max(float((x.float() - w).abs().max()) / float(w.abs().max()) for x, w in pairs)


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a graph of the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each call, of rounds in which all take turns."""
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    events: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for _ in range(rounds + 2):
        for call, own in zip(calls, events, strict=True):
            flush.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            own.append((before, after))
    torch.cuda.synchronize()
    return [statistics.median(b.elapsed_time(a) / 1e3 for b, a in own[2:]) for own in events]


def measure(case: Case, own: Sequence[Way], given: Tensors, rounds: int) -> str:
    """A line of the table."""
    want = case.wanted(given)
    library = case.library(given)
    error = error_of(library(), want)
    usable, problems = [], []
    for way in own:
        try:
            bound = bind_program(to_program(way.rendered))
            run = lambda bound=bound: bound(list(given))  # noqa: E731
            way.error = error_of(run(), want)
            way.run = recorded(run)
            usable.append(way)
        except (TritonError, RuntimeError, ValueError) as problem:
            problems.append(f"{way.name}: {type(problem).__name__} {str(problem)[:120]}")
    calls = [recorded(library), *(way.run for way in usable if way.run is not None)]
    first, *rest = turns(calls, rounds)
    ranking = sorted(zip(rest, (way.name for way in usable), strict=True))
    chosen = next((took for took, name in ranking if name == "chosen"), float("nan"))
    tera = f"{case.flops / first / 1e12:.0f} / {case.flops / ranking[0][0] / 1e12:.0f}" if ranking else ""
    best = ", ".join(f"{took * 1e6:.1f} {name}" for took, name in ranking[:4])
    errors = f"{error:.1e} / {max((way.error for way in usable), default=float('nan')):.1e}"
    line = f"{case.name} | {first * 1e6:.1f} | {chosen * 1e6:.1f} | {first / chosen:.2f} | {tera} | {errors} | {best}"
    return "\n".join([line, *problems])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    facts, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    print(f"{facts.name}, {facts.multi_processor_count} multiprocessors, torch {torch.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = [case for case in CASES if re.search(options.only, case.name)]
    started = time.perf_counter()
    every = [(case, ways(case, case.operands(torch.device("cuda:0")))) for case in cases]
    lowering = time.perf_counter() - started
    flat = [way for _, own in every for way in own]
    count, failed = compile_ways(flat, 10 * major + minor, compile_by(shared_workers(options.workers)))
    print(f"lowered in {lowering:.1f} s, {count} kernels compiled in {time.perf_counter() - started - lowering:.1f} s")
    for line in failed:
        print(f"does not compile: {line}")
    print("attention | ATen us | chosen us | ATen / chosen | TFLOP/s ATen / best | error ATen / ours | best blocks")
    for case, own in every:
        whole = [way for way in own if all(kernel.cubin is not None for kernel in way.rendered.kernels)]
        print(measure(case, whole, case.operands(torch.device("cuda:0")), options.rounds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
