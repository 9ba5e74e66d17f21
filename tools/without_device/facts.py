"""What is known of each kernel of a graph: traffic, resources, widths of loads, and the time that is expected of it.

Note [Expected times]
    A launch costs two microseconds, and its bytes come at the bandwidth of an H100's memory, or at what the loads that
    are under way at once allow (Little's law): as many program instances as registers and threads leave room for, or
    as there are, each with one iteration's loads. What a kernel loses is the difference to its different elements'
    bytes at full bandwidth. It ranks kernels; it is no measurement. Products, attention and convolutions, whose time is
    spent multiplying, count on both sides as a launch and their bytes at full bandwidth.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .kernels import Choice, Graph, Launch
from .pretend import PROCESSORS
from .traffic import Access, Argument, Traced, trace

__all__ = ["BANDWIDTH", "GraphFacts", "KernelFacts", "expected_seconds", "graph_facts", "load_widths", "narrow_lines"]

LAUNCH = 2e-6  # seconds
BANDWIDTH = 3.0e12  # bytes a second that a copy reaches
LATENCY = 7e-7  # seconds from a load to its value
THREADS, REGISTERS, INSTANCES = 2048, 65536, 32  # of a multiprocessor
WIDE = 8  # bytes a thread that a contiguous load should move


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """A kernel that is launched ``launches`` times. Bytes are of one launch; ``needed``: of different elements.
    ``widths``: bytes a thread of every load instruction; ``narrow``: lines of contiguous loads below 8 of them, ``odd``
    those that begin where no wider load can. ``is_call``: it stands in the place of a call of ATen."""

    name: str
    launches: int
    programs: int
    threads: int
    blocks: dict[str, int]
    read: float
    written: float
    needed: float
    registers: int
    spills: int
    widths: tuple[int, ...]
    narrow: tuple[str, ...]
    seconds: float
    is_call: bool
    odd: tuple[str, ...] = ()

    @property
    def lost(self) -> float:
        """Seconds of all launches beyond what their bytes need."""
        return self.launches * (self.seconds - self.needed / BANDWIDTH)


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A forward or backward. ``called_read``, ``called_written``: bytes of ATen's calls."""

    part: str
    launches: int
    calls: tuple[str, ...]
    kernels: tuple[KernelFacts, ...]
    called_read: float = 0.0
    called_written: float = 0.0

    def total(self, name: str) -> float:
        """A sum over all launches, of ``read`` and ``written`` and ``seconds`` with ATen's calls."""
        called = {"read": self.called_read, "written": self.called_written}
        called["seconds"] = len(self.calls) * LAUNCH + sum(called.values()) / BANDWIDTH
        return float(sum(k.launches * getattr(k, name) for k in self.kernels)) + called.get(name, 0.0)

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.total("read") + self.total("written")

    @property
    def called(self) -> float:
        """Bytes of what is left to ATen, or stands in its place."""
        own = sum(k.launches * (k.read + k.written) for k in self.kernels if k.is_call)
        return own + self.called_read + self.called_written

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @staticmethod
    def of(data: dict[str, Any]) -> GraphFacts:
        """The inverse of :meth:`data`."""
        kernels = tuple(
            KernelFacts(**k | {name: tuple(k[name]) for name in ("widths", "narrow", "odd") if name in k})
            for k in data["kernels"]
        )
        called = data["called_read"], data["called_written"]
        return GraphFacts(data["part"], data["launches"], tuple(data["calls"]), kernels, *called)


def graph_facts(graph: Graph, compiled: bool = True) -> GraphFacts:
    """The facts of a graph's kernels; without those of the compiler unless ``compiled``."""
    first: dict[str, Launch] = {}
    counts: dict[str, int] = {}
    for launch in graph.launches:
        first.setdefault(launch.key, launch)
        counts[launch.key] = counts.get(launch.key, 0) + 1
    # Not on threads: Python 3.11 fails now and then where two parse at once, as Triton does.
    kernels = tuple(_facts(first[key], counts[key], compiled) for key in first)
    called = (sum(getattr(call, name) for call in graph.calls) for name in ("read", "written"))
    return GraphFacts(graph.part, len(graph.launches), tuple(c.target for c in graph.calls), kernels, *called)


def _facts(launch: Launch, count: int, compiled: bool) -> KernelFacts:
    traced = [(c, trace(launch.define, launch.arguments, c.grid, c.constants)) for c in launch.choices]
    choice, found = min(traced, key=lambda pair: expected_seconds(pair[1], pair[0].threads, 32))
    registers, spills = 32, 0
    widths: dict[int, list[int]] = {}
    narrow = odd = tuple[str, ...]()
    if compiled:
        ptx, cubin, name = choice.make()
        registers, spills = _resources(cubin, name)
        widths = load_widths(ptx)
        narrow, odd = narrow_lines(launch, choice, found.accesses, widths)
    moved = _once(launch, found) if launch.is_call else (found.bytes_of("load"), found.bytes_of("store"))
    seconds = expected_seconds(found, choice.threads, registers)
    if launch.is_call:
        seconds = LAUNCH + sum(moved) / BANDWIDTH
    return KernelFacts(
        launch.name,
        count,
        found.programs,
        choice.threads,
        dict(choice.constants),
        *moved,
        sum(moved) if launch.is_call else sum(a.needed for a in found.accesses),
        registers,
        spills,
        tuple(sorted(width for each in widths.values() for width in each)),
        narrow,
        seconds,
        launch.is_call,
        odd,
    )


def _once(launch: Launch, traced: Traced) -> tuple[float, float]:
    """Bytes read and written in the place of a call of ATen, see Note [What calls count] in :mod:`.kernels`."""
    asked: dict[tuple[bool, str], float] = {}
    for access in traced.accesses:
        key = access.kind == "load", access.argument
        asked[key] = asked.get(key, 0.0) + access.needed
    found = {True: 0.0, False: 0.0}
    for (loads, name), count in asked.items():
        argument = launch.arguments[name]
        if isinstance(argument, Argument) and not (loads and name in launch.known):
            found[loads] += min(count, float(argument.elements * argument.itemsize))
    return found[True], found[False]


def expected_seconds(traced: Traced, threads: int, registers: int) -> float:
    """The time of one launch, see Note [Expected times]."""
    fitting = min(THREADS // threads, REGISTERS // (max(1, registers) * threads), INSTANCES)
    resident = min(traced.programs, PROCESSORS * max(1, fitting))
    asked = (sum(a.asked for a in traced.accesses if (a.kind == "load") == load) for load in (True, False))
    under_way = resident * max(asked)
    moved = traced.bytes_of("load") + traced.bytes_of("store")
    return LAUNCH + moved / min(BANDWIDTH, max(1, under_way) / LATENCY)


_INSTRUCTION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)|\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", re.M)


def load_widths(ptx: str) -> dict[int, list[int]]:
    """Bytes a thread of every global load, by the line of the kernel's text."""
    found: dict[int, list[int]] = {}
    line = 0
    for match in _INSTRUCTION.finditer(ptx):
        if match[1]:
            line = int(match[2])
        else:
            found.setdefault(line, []).append(int(match[3] or 1) * int(match[4]) // 8)
    return found


def narrow_lines(
    launch: Launch, choice: Choice, accesses: Sequence[Access], widths: dict[int, list[int]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Loads of neighbours that move less than eight bytes a thread, though an instance asks for that many. Apart from
    these such as begin at places where no more can be loaded at once: rows of 30522 halves begin at multiples of four
    bytes."""
    text = launch.text.splitlines()
    narrow, odd = list[str](), list[str]()
    for access in accesses:
        own = widths.get(access.line + launch.line - 1, [])
        contiguous = access.run >= 4 * WIDE and access.asked >= WIDE * choice.threads
        if access.kind == "load" and contiguous and own and max(own) < WIDE:
            found = narrow if max(own) < access.start else odd
            found.append(f"{max(own)} bytes: {text[access.line - 1].strip()}")
    return tuple(narrow), tuple(odd)


_USAGE = re.compile(r"Function (\S+):\s*\n?\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def _resources(code: bytes, name: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for function, registers, _, _, local in _USAGE.findall(text):
        if function == name:
            return int(registers), int(local)
    raise ValueError(f"cuobjdump names no kernel {name}")
