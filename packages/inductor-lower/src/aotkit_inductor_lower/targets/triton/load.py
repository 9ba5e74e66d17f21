"""A device program to functions of this process: kernels loaded once, a table of launches per segment.

It imports neither the renderer nor Triton: a program that was compiled before is launched from its cubins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import BindError
from ...ir import Arg, Literal
from ...launch_plan import CallExtern, CompiledProgram, LaunchPlan
from ...launch_plan.loaded import Alignment, Loaded
from ...launch_plan.status import place_of
from ...symbolic import Symbol
from .binary import ZERO_SLOT, Contents, contents_of
from .drivers import CudaDriver, Driver, InterpreterDriver
from .errors import TritonError
from .launcher import LaunchRow, LaunchTable, segment_runner

__all__ = ["load", "load_on"]

ALIGNMENT = 16


def load(program: CompiledProgram) -> Loaded:
    """Load a program on its own device; one that was not compiled runs in Triton's interpreter, on the CPU.

    Raises :class:`~.errors.BindError` if the device is not there, or another one than its kernels are compiled for, and
    :class:`~.errors.TritonError` if a kernel does not load.
    """
    contents = contents_of(program.binary)
    archs = {kernel.cubin.arch for kernel in contents.kernels if kernel.cubin is not None}
    device = contents.device
    if torch.device(device).type == "cpu" or (contents.kernels and not archs):
        return _loaded(program, contents, InterpreterDriver())
    if not torch.cuda.is_available():
        raise BindError(f"{program.plan.name} is compiled for {device}, and this process has no CUDA device")
    driver = CudaDriver(device)
    others = sorted(archs - {driver.arch})
    if others:
        raise BindError(
            f"the kernels of {program.plan.name} are compiled for sm_{others[0]}, and {device} is sm_{driver.arch}; "
            "compile again"
        )
    return _loaded(program, contents, driver)


def load_on(program: CompiledProgram, driver: Driver) -> Loaded:
    """Load a program where ``driver`` runs kernels; what it allocates and computes with ATen is there, too."""
    return _loaded(program, contents_of(program.binary), driver)


def _loaded(program: CompiledProgram, contents: Contents, driver: Driver) -> Loaded:
    plan = program.plan if driver.device == contents.device else _moved(program.plan, driver.device)
    return Loaded(
        plan,
        _segments(plan, contents, driver),
        ("n = stream()",),
        {"stream": driver.stream},
        _failure(program, driver),
        _allocator(torch.device(driver.device)),
        _entries(plan.name, contents),
        Alignment(ALIGNMENT, contents.aligned, contents.written, _aligned_buffers(contents)),
        driver.guard,
    )


def _aligned_buffers(contents: Contents) -> frozenset[str]:
    """Buffers of which some kernel takes it that they begin at a multiple of 16 bytes."""
    found: set[str] = set()
    for _, launches in contents.segments:
        for launch in launches:
            arguments = contents.kernels[launch.kernel].source.arguments
            found.update(s for s, a in zip(launch.slots, arguments, strict=True) if a.kind == "pointer" and a.aligned)
    return frozenset(found)


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """torch's allocation without argument parsing, where this torch has it."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Callable[..., torch.Tensor] | None = getattr(guards, f"_empty_strided_{device.type}", None)
    if found is not None:
        return found

    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def _moved(plan: LaunchPlan, device: str) -> LaunchPlan:
    """The plan on another device: its ATen calls name it."""

    def move(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(move(a) for a in arg)
        return Literal("device", device) if isinstance(arg, Literal) and arg.kind == "device" else arg

    steps = tuple(
        replace(s, args=tuple(map(move, s.args)), kwargs=tuple((k, move(v)) for k, v in s.kwargs))
        if isinstance(s, CallExtern)
        else s
        for s in plan.steps
    )
    return replace(plan, steps=steps, buffers=tuple(replace(b, device=device) for b in plan.buffers))


def _segments(plan: LaunchPlan, contents: Contents, driver: Driver) -> dict[str, Callable[[int, int], int]]:
    position = {name: k for k, name in enumerate(plan.slots)}
    handles = _handles(contents, driver)
    found: dict[str, Callable[[int, int], int]] = {}
    for function, launches in contents.segments:
        rows = []
        for launch in launches:
            cubin = contents.kernels[launch.kernel].cubin
            hidden = cubin.hidden if cubin is not None else 0
            arguments = [position[s] for s in launch.slots] + [position[ZERO_SLOT]] * hidden
            threads, shared = (cubin.threads, cubin.shared) if cubin is not None else (32, 0)
            rows.append(LaunchRow(handles[launch.kernel], position[launch.grid], threads, shared, tuple(arguments)))
        found[function] = segment_runner(driver.launch, LaunchTable(rows), driver.mend)
    return found


def _handles(contents: Contents, driver: Driver) -> list[int]:
    """What the driver launches each kernel by. Kernels that were compiled once are loaded once."""
    loaded: dict[object, int] = {}
    found = []
    for kernel in contents.kernels:
        code = id(kernel) if kernel.cubin is None else (kernel.cubin.name, kernel.cubin.code)
        if code not in loaded:
            loaded[code] = driver.load(kernel)
        found.append(loaded[code])
    return found


def _failure(program: CompiledProgram, driver: Driver) -> Callable[[int, Sequence[str]], None]:
    place = place_of(program)

    launched = {record.name for record in program.kernels if record.combo in ("", record.name)}

    def fail(status: int, launches: Sequence[str]) -> None:
        first = [name for name in launches if name in launched]  # of each launch
        where = place(first[(status >> 32) - 1])
        error = driver.failure(status & 0xFFFFFFFF)
        if isinstance(error, IndexError | TritonError):
            raise type(error)(f"{error}{where}") from None
        raise error

    return fail


def _entries(name: str, contents: Contents) -> Callable[[Mapping[Symbol, int]], Mapping[str, int]]:
    """How many program instances launches have, and the null pointer that Triton's kernels take last."""

    def entries(env: Mapping[Symbol, int]) -> Mapping[str, int]:
        found = {ZERO_SLOT: 0}
        for slot, count in contents.counts:
            found[slot] = count.evaluate(env)
            if found[slot] >= 2**31:
                raise TritonError(f"{name} would launch {found[slot]} program instances, more than 2^31")
        return found

    return entries
