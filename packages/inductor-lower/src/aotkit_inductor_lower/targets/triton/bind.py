"""A device program to a callable: kernels loaded once, ATen ops looked up, one Python function emitted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...ir import Arg, Literal
from ...launch_plan import CallExtern, LaunchPlan
from ...ops.aten import resolve_target
from ...runtime import BindError
from ...runtime.emit import PlanEmitter
from ...runtime.externs import conform
from ...symbolic import Symbol, SymbolKind
from .drivers import CudaDriver, Driver, InterpreterDriver
from .errors import TritonError
from .launcher import LaunchRow, LaunchTable, segment_runner
from .program import ZERO_SLOT, DeviceLaunch, DeviceProgram

__all__ = ["BoundDeviceProgram", "bind_device", "bind_stored", "moved"]

ALIGNMENT = 16
KEPT_SIZES = 8


class BoundDeviceProgram:
    """A compiled graph in the boxed convention: takes one list, empties it, returns a list. ``source``: what runs."""

    _boxed_call = True

    def __init__(self, call: Callable[[list[Any]], list[Any]], source: str, driver: Driver) -> None:
        self._call, self.source, self._guard = call, source, driver.guard

    def __call__(self, args: list[Any]) -> list[Any]:
        guard = self._guard()
        if guard is None:
            return self._call(args)
        with guard:
            return self._call(args)


class _DeviceEmitter(PlanEmitter):
    """Segments take a stream; inputs that are not aligned are replaced by copies."""

    context_lines: tuple[str, ...] = ("n = stream()",)

    def __init__(self, program: DeviceProgram, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__(program.plan, True)
        self.aligned = program.aligned
        wanted = _aligned_slots(program)
        self.results = {name for name in wanted if self.buffers[name].storage == "call result"}
        self.constants = [name for name in constants if name in wanted and constants[name].data_ptr() % ALIGNMENT]
        self.names = [
            f"s_{_safe(name[1:])}" if name.startswith("$") else self.tensor_names[name] for name in self.plan.inputs
        ]

    def _write_inputs(self) -> None:
        slots = [s for s in self.plan.slots if not s.startswith("$") and self.buffers[s].storage == "input"]
        for slot in slots:
            self.lines.append(f"a_{_safe(slot)} = slots[{self.slot[slot]}] = {self.tensor_names[slot]}.data_ptr()")
        if self.aligned:
            every = " | ".join(f"a_{_safe(name)}" for name in self.aligned)
            self.lines.append(f"if ({every}) & {ALIGNMENT - 1}: return realigned([{', '.join(self.names)}])")
        for name in self.constants:
            self.lines.append(f"aligned_{_safe(name)} = aligned_copy({self.tensor_names[name]})")
            self.lines.append(f"slots[{self.slot[name]}] = aligned_{_safe(name)}.data_ptr()")

    def _write_slot(self, name: str) -> None:
        if name not in self.results:
            super()._write_slot(name)
            return
        slot, tensor = f"slots[{self.slot[name]}]", self.tensor_names[name]
        self.lines.append(f"at = {slot} = {tensor}.data_ptr()")
        self.lines.append(f"if at & {ALIGNMENT - 1}: {tensor} = aligned_copy({tensor}); {slot} = {tensor}.data_ptr()")


def _aligned_slots(program: DeviceProgram) -> set[str]:
    """Buffers of which some kernel takes it that they begin at a multiple of 16 bytes."""
    found: set[str] = set()
    for launch in program.launches():
        arguments = program.kernels[launch.kernel].source.arguments
        found.update(s for s, a in zip(launch.slots, arguments, strict=True) if a.kind == "pointer" and a.aligned)
    return found


def _aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in new memory, with its strides. Elements that share memory do so there too."""
    if torch._debug_has_internal_overlap(tensor) != 1:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def bind_device(
    program: DeviceProgram, driver: Driver, constants: Mapping[str, torch.Tensor] | None = None
) -> BoundDeviceProgram:
    """Make a device program callable. ``constants``: the tensors of its constant buffers by name, on the device.

    Raises :class:`~..plan.BindError` if a constant is missing or an ATen op does not exist in this torch, and
    :class:`~.errors.TritonError` if a kernel does not load.
    """
    if driver.device != program.device:
        program = replace(program, plan=moved(program.plan, driver.device))
    plan, constants = program.plan, dict(constants or {})
    missing = [b.name for b in plan.buffers if b.storage == "constant" and b.name not in constants]
    if missing:
        raise BindError(f"{plan.name} needs the constant tensors {', '.join(missing)}, which were not given")
    emitter = _DeviceEmitter(program, constants)
    source, tables = emitter.emit()
    frames = _Frames(program, constants)
    device = torch.device(driver.device)
    namespace: dict[str, Any] = dict(tables)
    namespace.update(_externs(plan))
    namespace.update(_segments(program, driver))
    namespace.update({f"constant_{_safe(name)}": tensor for name, tensor in constants.items()})
    namespace.update(
        lease=frames.lease,
        give_back=frames.give_back,
        free=frames.free_list(),
        empty=_allocator(device),
        conform=conform,
        aligned_copy=_aligned_copy,
        stream=driver.stream,
        fail=_failure(program, driver),
        torch=torch,
    )
    exec(compile(source, f"<aotkit plan {plan.name}>", "exec"), namespace)
    call = namespace["call"]
    namespace["realigned"] = _realigner(program, call)
    return BoundDeviceProgram(call, source, driver)


def bind_stored(program: DeviceProgram, constants: Mapping[str, torch.Tensor] | None = None) -> BoundDeviceProgram:
    """Bind a program to its own device; one for the ``cpu`` runs in Triton's interpreter.

    Raises :class:`~..plan.BindError` if the device is not there, or another one than its kernels are compiled for.
    """
    if torch.device(program.device).type == "cpu":
        return bind_device(program, InterpreterDriver(), constants)
    if not torch.cuda.is_available():
        raise BindError(f"{program.plan.name} is compiled for {program.device}, and this process has no CUDA device")
    driver = CudaDriver(program.device)
    others = sorted({k.cubin.arch for k in program.kernels if k.cubin is not None} - {driver.arch})
    if others:
        raise BindError(
            f"the kernels of {program.plan.name} are compiled for sm_{others[0]}, and {program.device} is "
            f"sm_{driver.arch}; compile again"
        )
    return bind_device(program, driver, constants)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


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


def _externs(plan: LaunchPlan) -> dict[str, Any]:
    targets = {s.target for s in plan.steps if isinstance(s, CallExtern)}
    try:
        return {f"op_{_safe(target)}": resolve_target(target) for target in sorted(targets)}
    except LookupError as error:
        raise BindError(f"{plan.name} cannot be bound: {error}; compile again with this torch") from error


def _segments(program: DeviceProgram, driver: Driver) -> dict[str, Any]:
    position = {name: k for k, name in enumerate(program.plan.slots)}
    handles = [driver.load(kernel) for kernel in program.kernels]
    found: dict[str, Any] = {}
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


def _realigner(program: DeviceProgram, call: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Calls again with copies of the inputs that are not aligned; what the graph wrote is copied back."""
    position = {name: k for k, name in enumerate(program.plan.inputs)}

    def realigned(args: list[Any]) -> list[Any]:
        back = []
        for name in program.aligned:
            given = args[position[name]]
            if given.data_ptr() % ALIGNMENT:
                args[position[name]] = copy = _aligned_copy(given)
                if name in program.written:
                    back.append((given, copy))
        results = call(args)
        for given, copy in back:
            given.copy_(copy)
        return results

    return realigned


class _Frame:
    """One call's addresses and sizes."""

    __slots__ = ("address", "slots")

    def __init__(self, slots: ctypes.Array[ctypes.c_int64]) -> None:
        self.slots = slots
        self.address = ctypes.addressof(slots)


class _Frames:
    """Frames by sizes, reused between calls; each running call holds its own."""

    def __init__(self, program: DeviceProgram, constants: Mapping[str, torch.Tensor]) -> None:
        self._program, self._constants = program, constants
        self._names = [name for name, *_ in program.plan.symbol_sources]
        self._storage = {b.name: b.storage for b in program.plan.buffers}
        self._free: dict[tuple[int, ...], list[_Frame]] = {}
        self._lock = threading.Lock()

    def lease(self, *sizes: int) -> _Frame:
        frames = self._free.get(sizes)
        if frames:
            try:
                return frames.pop()
            except IndexError:  # another thread took the last one
                pass
        return self._make(sizes)

    def _make(self, sizes: tuple[int, ...]) -> _Frame:
        plan = self._program.plan
        env = {Symbol(name, SymbolKind.SIZE): size for name, size in zip(self._names, sizes, strict=True)}
        counts = dict(self._program.counts)
        slots = (ctypes.c_int64 * max(1, len(plan.slots)))()
        for position, slot in enumerate(plan.slots):
            if slot in counts:
                slots[position] = counts[slot].evaluate(env)
                if slots[position] >= 2**31:
                    raise TritonError(f"{plan.name} would launch {slots[position]} program instances, more than 2^31")
            elif slot.startswith("$") and slot != ZERO_SLOT:
                slots[position] = env[Symbol(slot[1:], SymbolKind.SIZE)]
            elif self._storage.get(slot) == "constant":
                slots[position] = self._constants[slot].data_ptr()
        return _Frame(slots)

    def free_list(self) -> list[_Frame]:
        """The free frames of a plan without size symbols."""
        return self._free.setdefault((), [])

    def give_back(self, frame: _Frame, *sizes: int) -> None:
        frames = self._free.get(sizes)
        if frames is None:
            with self._lock:
                while len(self._free) >= KEPT_SIZES:
                    self._free.pop(next(iter(self._free)))
                frames = self._free.setdefault(sizes, [])
        frames.append(frame)
