"""The text of a program's kernels to functions of this process: Python functions, which interpret it.

The code of this target is the kernel IR's text, so loading imports :mod:`..kernel_ir`; but no pass and no lowering.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from ... import _torch_compat
from ...errors import BindError, IndexOutOfRange
from ...ir.run_instr import DividedByZero
from ...kernel_ir.interpret import interpret_call
from ...kernel_ir.nodes import KernelCall, KernelModule
from ...kernel_ir.parse import parse_module
from ...launch_plan.loaded import Loaded
from ...launch_plan.records import CallSegment, CompiledProgram
from ...launch_plan.status import INDEX_ERROR, ZERO_DIVISION, failure, place_of, status_at
from ...symbolic import Expr, Symbol, SymbolKind
from ...symbolic.text import parse_expr

__all__ = ["load"]

Segment = Callable[[int, int], int]
Place = Callable[[str], str]
_ONE_THREAD = ("n = 1",)


def load(program: CompiledProgram) -> Loaded:
    """Read a program's kernels. Raises :class:`~.errors.BindError` for text that this version can't read."""
    segments, empty = _segments(program), _torch_compat.empty_strided_cpu
    return Loaded(program.plan, segments, _ONE_THREAD, {}, failure(program), empty)


def _segments(program: CompiledProgram) -> dict[str, Segment]:
    called = [step for step in program.plan.steps if isinstance(step, CallSegment)]
    if not called:
        return {}
    ((_, code),) = program.binary.sections
    try:
        module = parse_module(code.decode())
        layout = _Layout(program.plan.slots, _sizes(program, "bytes"), _sizes(program, "before"))
    except ValueError as error:
        raise BindError(f"the kernels of {program.plan.name} do not read here: {error}; compile again") from error
    calls = {call.step: call for call in module.calls}
    place = place_of(program)
    return {step.function: _segment(module, [calls[name] for name in step.launches], layout, place) for step in called}


def _sizes(program: CompiledProgram, fact: str) -> dict[str, Expr]:
    return {name: parse_expr(text) for name, text in program.binary.facts[fact].items()}


def _segment(module: KernelModule, calls: Sequence[KernelCall], layout: _Layout, place: Place) -> Segment:
    """The segment's function: its calls in order; one that fails ends it. An error of no program's making, as of an
    access outside of a buffer, is raised as it is."""

    def segment(address: int, _threads: int) -> int:
        frame = _Frame(layout, address)
        with _torch_compat.modes_and_autocast_off():
            for position, call in enumerate(calls):
                try:
                    interpret_call(module, call, frame.memory, frame.size, frame.before)
                except IndexOutOfRange:
                    return status_at(position, INDEX_ERROR)
                except DividedByZero:
                    return status_at(position, ZERO_DIVISION)
                except Exception as error:
                    error.add_note(place(call.step))
                    raise
        return 0

    return segment


class _Layout:
    """Where the entries of a frame are, and how many bytes the memories have whose addresses it holds: from there on,
    and ``before``."""

    def __init__(self, slots: Sequence[str], extents: Mapping[str, Expr], before: Mapping[str, Expr]) -> None:
        self.position = {name: number for number, name in enumerate(slots)}
        self.symbols = {Symbol(name[1:], SymbolKind.SIZE): name for name in slots if name.startswith("$")}
        self.extents, self.before = extents, before


class _Frame:
    """A call's frame, see Note [The frame]."""

    def __init__(self, layout: _Layout, address: int) -> None:
        self._layout = layout
        self._entries = (ctypes.c_int64 * len(layout.position)).from_address(address)
        self._env = {symbol: self._entry(name) for symbol, name in layout.symbols.items()}

    def _entry(self, name: str) -> int:
        return int(self._entries[self._layout.position[name]])

    def size(self, name: str) -> int:
        """The value of a size symbol."""
        return self._entry(f"${name}")

    def memory(self, name: str) -> torch.Tensor:
        """The bytes of a buffer, as a tensor over them."""
        before = self.before(name)
        count = before + self._layout.extents[name].evaluate(self._env)
        if count < 1:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_char * count).from_address(self._entry(name) - before), dtype=torch.uint8)

    def before(self, name: str) -> int:
        """How many of them lie before the buffer's address."""
        start = self._layout.before.get(name)
        return 0 if start is None else start.evaluate(self._env)
