"""Choices that are measured on this processor, with ``tune``: how long ATen's call and kernels of ours take.

Note [Measuring on the CPU]
    Both ways to compute a fragment are compiled as the graph would be and called by turns on tensors of random numbers,
    which a generator of their own makes: nothing of the user's is read, and torch's generator stays as it is. The least
    time of each counts. With one thread it is the processor's time of this thread, so that what else runs on the
    machine matters little; with several the time that passes. Compiling and measuring together take :data:`BUDGET`
    seconds of this thread for a graph (and what a last comparison takes longer), whatever else runs; what is left then
    is chosen by rules.

    Times are kept in the store of compiled programs, by the text of both fragments, the processor, its features and the
    number of threads. So another process measures nothing that was measured, in whichever graph it was. Compiled
    programs hold the code that was chosen, so that loading one measures nothing at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._torch_compat import modes_and_autocast_off
from ...ir import Buffer, BufferKind, CheckedIndex, Contraction, ExternCall, LoopNest, Program
from ...ir.print import print_program
from ...ir.walk import contains, without_single_iterations
from ...launch_plan.store import ObjectStore, program_digest
from ...lowering.convolutions import CONVOLUTION
from ...options import LowerOptions
from ...symbolic import product
from ...target import Choice, CompileProgram, Times
from .choose import choose_form
from .choose_attention import choose_attention
from .choose_convolutions import choose_convolution
from .machine import Machine
from .products import product_of
from .render.tile import CHUNK

__all__ = ["BUDGET", "MeasuredRace", "TimeInTurns", "time_in_turns"]

#: Seconds of two calls that compute the same; the first argument is ATen's.
TimeInTurns = Callable[[Callable[[], object], Callable[[], object]], tuple[float, float]]

BUDGET = 2.0  # seconds for a graph
WORTH = 1 << 16  # multiplications: of fewer, what is gained is less than what compiling takes
MOST_BYTES = 512 << 20  # of all tensors of a fragment
TURNS = 7
TURN = 1e-3  # seconds: so long is a short call repeated
CLEAR = 1.4  # times as long: no more turns are needed
CALLS = 4  # of ATen's have to fit into the time that is left


def time_in_turns(library: Callable[[], object], generated: Callable[[], object]) -> tuple[float, float]:
    """The least seconds of a call of each, in turns, see Note [Measuring on the CPU]."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = library, generated
    repeats = [max(1, min(256, int(TURN / max(_seconds(call, 1, clock), 1e-6)))) for call in calls]
    least = [float("inf")] * 2
    for turn in range(TURNS):
        for number, call in enumerate(calls):
            least[number] = min(least[number], _seconds(call, repeats[number], clock))
        if turn and max(least) > CLEAR * min(least):
            break
    return least[0], least[1]


def _seconds(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


@dataclass(slots=True)
class MeasuredRace:
    """:class:`~...target.Race` of one graph on this processor, by LLVM's name. ``key``: what decides how long a program
    takes. ``compiled``: makes a program callable. ``left``: seconds that may still be spent, by ``clock``."""

    machine: Machine
    processor: str
    key: str
    options: LowerOptions
    compiled: CompileProgram
    store: ObjectStore | None = None
    times: TimeInTurns = time_in_turns
    clock: Callable[[], float] = time.thread_time
    left: float = BUDGET
    known: dict[str, Times] = field(default_factory=dict)

    def product_form(self, contraction: Contraction, buffers: Mapping[str, Buffer]) -> Choice | None:
        """What is generated where everything is, if that can be written for the operands as they lie, and there is
        something to gain."""
        call = contraction.library
        called = call is not None and call.target.startswith("aten.")
        if not called or not _is_worth_it([contraction]) or contains(contraction.body, CheckedIndex):
            return None  # random numbers are no places
        form = choose_form(contraction, buffers, self._generated, self.machine, self.processor)
        nest = without_single_iterations(contraction.as_nest())
        return form if form.form != "aten" and product_of(nest, buffers, self.machine) is not None else None

    def convolution_form(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer]
    ) -> Choice | None:
        """The same of a result of a convolution. Of several channels there are tiles or nothing: plain loops would take
        long to be measured, and never win. In a forward tiles of vectors have to sum in one chain, as by the rules, so
        that results have eager's bits."""
        if not _is_worth_it(parts):
            return None
        form = choose_convolution(parts, call, buffers, self._generated, self.machine, self.processor)
        loops = [loop for part in parts for loop in (*part.rows, *part.columns, *part.reduced)]
        deep = any(loop.size != 1 for loop in loops if loop.symbol in ("c", "o"))
        sums = [product(loop.size for loop in part.reduced).constant or 0 for part in parts]
        parted = form.form == "fma" and call.target == CONVOLUTION and max(sums) > CHUNK
        return None if parted or (form.form == "nest" and deep) else form

    def attention_form(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice | None:
        """The same of ATen's fused attention."""
        return choose_attention(nest, buffers, self._generated, self.machine, self.processor)

    @property
    def _generated(self) -> LowerOptions:
        return replace(self.options, contractions="generated")

    def compare(self, library: Program, generated: Program, behind: str) -> Times:
        """How long the two take, or why that was not measured; what was once measured is known."""
        digest = program_digest(f"times {self.key}", f"{behind}\n{print_program(library)}\n{print_program(generated)}")
        if digest not in self.known:
            kept = None if self.store is None else self.store.get(digest)
            self.known[digest] = self._measured(library, generated, behind) if kept is None else _from_json(kept)
            if kept is None and self.store is not None and self.known[digest].lasting:
                self.store.put(digest, _to_json(self.known[digest]))
        return self.known[digest]

    def _measured(self, library: Program, generated: Program, behind: str) -> Times:
        total = sum(_bytes(buffer) for buffer in {*library.buffers, *generated.buffers})
        if total > MOST_BYTES:
            return Times(why=f"its tensors take {total >> 20} MiB", lasting=True)
        if self.left <= 0:
            return Times(why="the time for measuring this graph is over")
        start = self.clock()
        try:
            with modes_and_autocast_off(), torch.no_grad():
                return self._run(library, generated, behind, start)
        finally:
            self.left -= self.clock() - start

    def _run(self, library: Program, generated: Program, behind: str, start: float) -> Times:
        tensors: dict[str, torch.Tensor] = {}
        random = torch.Generator().manual_seed(0)
        for buffer in (*library.buffers, *generated.buffers):
            if buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT) and buffer.name not in tensors:
                tensors[buffer.name] = _example(buffer, random)
        try:
            call = self._callable(library, tensors, behind)
            call()  # which makes what libraries keep for later calls
            before = self.clock()
            call()
            now = self.clock()
        except Exception as error:  # noqa: BLE001  # whatever a kernel or ATen says of made-up operands
            return Times(why=f"its call fails with random operands ({_text(error)})", lasting=True)
        if CALLS * (now - before) > self.left - (now - start):
            return Times(why="a call takes longer than there is time for measuring")
        try:
            ours = self._callable(generated, tensors, behind)
            ours()
            seconds = self.times(call, ours)
        except Exception as error:  # noqa: BLE001  # whatever a compiler or a kernel says
            return Times(why=f"the form of ours fails ({_text(error)})", failed=True, lasting=True)
        return Times(*seconds, lasting=True)

    def _callable(self, program: Program, tensors: Mapping[str, torch.Tensor], behind: str) -> Callable[[], list[Any]]:
        constants = {b.name: tensors[b.name] for b in program.buffers if b.kind is BufferKind.CONSTANT}
        call = self.compiled(program, constants, behind)
        given = [tensors[name] for name in program.inputs]
        return lambda: call(list(given))


def _is_worth_it(parts: Sequence[Contraction]) -> bool:
    """Whether there is enough to compute. Where a size is not known, there may be."""
    loops = [(*part.outer, *part.reduced) for part in parts]
    counts = [product(loop.size for loop in each).constant for each in loops]
    return None in counts or sum(count or 0 for count in counts) >= WORTH


def _span(buffer: Buffer) -> int:
    """Elements from the first to the last one in memory."""
    sizes = [size.constant or 0 for size in buffer.sizes]
    steps = [step.constant or 0 for step in buffer.strides]
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if all(sizes) else 0


def _bytes(buffer: Buffer) -> int:
    return _span(buffer) * int(getattr(torch, buffer.dtype).itemsize)


def _example(buffer: Buffer, random: torch.Generator) -> torch.Tensor:
    """A tensor that lies as one of the graph does: of random numbers, of zeros where numbers may be places, and of ones
    where these are truths: a mask that hides everything would leave nothing to compute."""
    dtype = getattr(torch, buffer.dtype)
    flat = torch.full((_span(buffer),), dtype is torch.bool, dtype=dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        flat.uniform_(-1, 1, generator=random)
    elif dtype.is_floating_point:
        flat.copy_(torch.empty(flat.shape).uniform_(-1, 1, generator=random))
    elif dtype in (torch.int8, torch.uint8):
        flat.random_(0, 127, generator=random)
    return flat.as_strided([size.constant or 0 for size in buffer.sizes], [s.constant or 0 for s in buffer.strides])


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _to_json(times: Times) -> bytes:
    return json.dumps([times.library, times.generated, times.why, times.failed]).encode()


def _from_json(kept: bytes) -> Times:
    library, generated, why, failed = json.loads(kept)
    return Times(library, generated, why, failed, lasting=True)
