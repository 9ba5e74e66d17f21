"""A device program to functions of this process: kernels loaded once, a table of launches per segment.

It imports neither the renderer nor Triton: a program that was compiled before is launched from its cubins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import BindError
from ...ir import Arg, Literal
from ...launch_plan import CallExtern, LaunchPlan
from ...launch_plan.loaded import Alignment, Loaded
from ...symbolic import Symbol
from .drivers import CudaDriver, Driver, InterpreterDriver
from .errors import TritonError
from .launcher import LaunchRow, LaunchTable, segment_runner
from .program import ZERO_SLOT, DeviceLaunch, DeviceProgram

__all__ = ["load", "load_on", "moved"]

ALIGNMENT = 16


def load(program: DeviceProgram) -> Loaded:
    """Load a program on its own device; one for the ``cpu`` runs in Triton's interpreter.

    Raises :class:`~.errors.BindError` if the device is not there, or another one than its kernels are compiled for, and
    :class:`~.errors.TritonError` if a kernel does not load.
    """
    if torch.device(program.device).type == "cpu":
        return load_on(program, InterpreterDriver())
    if not torch.cuda.is_available():
        raise BindError(f"{program.plan.name} is compiled for {program.device}, and this process has no CUDA device")
    driver = CudaDriver(program.device)
    others = sorted({k.cubin.arch for k in program.kernels if k.cubin is not None} - {driver.arch})
    if others:
        raise BindError(
            f"the kernels of {program.plan.name} are compiled for sm_{others[0]}, and {program.device} is "
            f"sm_{driver.arch}; compile again"
        )
    return load_on(program, driver)


def load_on(program: DeviceProgram, driver: Driver) -> Loaded:
    """Load a program where ``driver`` runs kernels; what it allocates and computes with ATen is there, too."""
    plan = program.plan if driver.device == program.device else moved(program.plan, driver.device)
    return Loaded(
        plan,
        _segments(program, driver),
        ("n = stream()",),
        {"stream": driver.stream},
        _failure(program, driver),
        _allocator(torch.device(driver.device)),
        _entries(program),
        Alignment(ALIGNMENT, program.aligned, program.written, _aligned_buffers(program)),
        driver.guard,
    )


def _aligned_buffers(program: DeviceProgram) -> frozenset[str]:
    """Buffers of which some kernel takes it that they begin at a multiple of 16 bytes."""
    found: set[str] = set()
    for launch in program.launches():
        arguments = program.kernels[launch.kernel].source.arguments
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


def moved(plan: LaunchPlan, device: str) -> LaunchPlan:
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


def _segments(program: DeviceProgram, driver: Driver) -> dict[str, Callable[[int, int], int]]:
    position = {name: k for k, name in enumerate(program.plan.slots)}
    handles = [driver.load(kernel) for kernel in program.kernels]
    found: dict[str, Callable[[int, int], int]] = {}
    for function, launches in program.segments:
        rows = []
        for launch in launches:
            cubin = program.kernels[launch.kernel].cubin
            hidden = cubin.hidden if cubin is not None else 0
            arguments = [position[s] for s in launch.slots] + [position[ZERO_SLOT]] * hidden
            threads, shared = (cubin.threads, cubin.shared) if cubin is not None else (32, 0)
            rows.append(LaunchRow(handles[launch.kernel], position[launch.grid], threads, shared, tuple(arguments)))
        found[function] = segment_runner(driver.launch, LaunchTable(rows), driver.mend)
    return found


def _failure(program: DeviceProgram, driver: Driver) -> Callable[[int, Sequence[str]], None]:
    lines: dict[str, DeviceLaunch] = {launch.name: launch for launch in program.launches()}

    def fail(status: int, launches: Sequence[str]) -> None:
        launch = lines[launches[(status >> 32) - 1]]
        error = driver.failure(status & 0xFFFFFFFF)
        where = f"\n  kernel {launch.name}" + (f", from:\n{launch.line}" if launch.line else "")
        if isinstance(error, IndexError | TritonError):
            raise type(error)(f"{error}{where}") from None
        raise error

    return fail


def _entries(program: DeviceProgram) -> Callable[[Mapping[Symbol, int]], Mapping[str, int]]:
    """How many program instances launches have, and the null pointer that Triton's kernels take last."""

    def entries(env: Mapping[Symbol, int]) -> Mapping[str, int]:
        found = {ZERO_SLOT: 0}
        for slot, count in program.counts:
            found[slot] = count.evaluate(env)
            if found[slot] >= 2**31:
                name = program.plan.name
                raise TritonError(f"{name} would launch {found[slot]} program instances, more than 2^31")
        return found

    return entries
