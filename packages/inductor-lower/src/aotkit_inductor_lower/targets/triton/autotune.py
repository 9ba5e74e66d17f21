"""Which block sizes a kernel runs with: a few candidates, compiled, those that spill left out, the fastest kept.

Note [Where a choice is kept]
    The winner is part of the compiled program, with the times of all candidates and why others were left out, so a
    program that is loaded again is not tuned again. The timer is an argument: a device measures, a test counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...kernel_ir.nodes import Kernel
from .compile import Compiler, KernelFacts, compile_all, compile_kernel, resource_facts
from .errors import TritonError
from .map_loops import TileLimits
from .records import Config, Cubin, KernelSource, KnownMemory
from .render.kernel import emit_kernel

__all__ = ["LIMITS", "Candidate", "Choice", "Timer", "candidates", "choose"]

#: Seconds that one launch of a compiled candidate takes.
Timer = Callable[[KernelSource, Cubin], float]

LIMITS = (
    TileLimits(),
    TileLimits(pointwise=512, reduction=2048),
    TileLimits(pointwise=2048, reduction=8192),
    TileLimits(pointwise=4096, reduction=4096, row=1024),
)
_NOTHING_KNOWN = KnownMemory()
_WARPS = (1, 2)  # times as many as the heuristic says


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a kernel: ``seconds`` measured, or ``None`` and why it was left out."""

    config: Config
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and what it was compared with. ``str()`` says why."""

    source: KernelSource
    cubin: Cubin
    tried: tuple[Candidate, ...]

    def __str__(self) -> str:
        measured = sorted((c.seconds, str(c.config.blocks)) for c in self.tried if c.seconds is not None)
        left_out = [f"{c.config.blocks}: {c.reason}" for c in self.tried if c.reason]
        times = ", ".join(f"{blocks} {seconds * 1e6:.1f} us" for seconds, blocks in measured)
        return f"{self.source.name}: {times or 'one candidate'}" + (f"; left out {left_out}" if left_out else "")


def candidates(
    kernel: Kernel,
    limits: Sequence[TileLimits] = LIMITS,
    asserts: bool = True,
    fast: bool = False,
    memory: KnownMemory = _NOTHING_KNOWN,
) -> tuple[KernelSource, ...]:
    """Different sources for one kernel, the heuristic's first; the others as in :func:`~.kernel.emit_kernel`."""
    found: dict[tuple[str, Config], KernelSource] = {}
    for limit in limits:
        source = emit_kernel(kernel, limit, asserts, fast, memory)
        for factor in _WARPS if source.grid else (1,):
            config = replace(source.config, num_warps=min(16, source.config.num_warps * factor))
            found.setdefault((source.text, config), replace(source, config=config))
    return tuple(found.values())


def choose(
    sources: Sequence[KernelSource],
    arch: int,
    timer: Timer | None,
    compiler: Compiler = compile_kernel,
    facts: Callable[[Cubin], KernelFacts] = resource_facts,
) -> Choice:
    """The fastest of the candidates that compile and do not spill. Without a ``timer`` the first of them. If all spill,
    the one that spills least; where nothing tells, none counts as spilling. Raises :class:`~.errors.TritonError` if
    none compiles."""
    tried: list[Candidate] = []
    good: list[tuple[float, int, KernelSource, Cubin]] = []
    spilling: list[tuple[int, int, KernelSource, Cubin]] = []
    for position, (source, cubin) in enumerate(zip(sources, compile_all(sources, arch, compiler), strict=True)):
        if isinstance(cubin, TritonError):
            tried.append(Candidate(source.config, None, str(cubin)))
            continue
        spills = _spills(cubin, facts)
        if spills:
            tried.append(Candidate(source.config, None, f"spills {spills} bytes"))
            spilling.append((spills, position, source, cubin))
            continue
        if timer is None:
            return Choice(source, cubin, (*tried, Candidate(source.config, None)))
        try:
            seconds = timer(source, cubin)
        except TritonError as error:  # too much shared memory for this device, say
            tried.append(Candidate(source.config, None, str(error)))
            continue
        tried.append(Candidate(source.config, seconds))
        good.append((seconds, position, source, cubin))
    ranked = sorted(good, key=lambda entry: entry[:2]) or sorted(spilling, key=lambda entry: entry[:2])
    if not ranked:
        raise TritonError("no candidate compiles: " + "; ".join(c.reason for c in tried))
    _, _, source, cubin = ranked[0]
    return Choice(source, cubin, tuple(tried))


def _spills(cubin: Cubin, facts: Callable[[Cubin], KernelFacts]) -> int:
    """Bytes; 0 where the tool that tells is missing: a timer finds the slow ones too."""
    try:
        return facts(cubin).spills
    except TritonError:
        return 0
