"""A pytest plugin: the CPU target's tests, with kernels for another processor that run under emulation.

``pytest -p tools.emulation.plugin --emulate aarch64 packages/inductor-lower/tests/test_inductor_lower_cpu_ops.py``

Whatever machine a test asks for, it gets the emulated one. Its expectations stay what they are: numbers from eager,
from float64 or from the interpreter of the IR, computed by this processor. With ``--emulate znver4`` and the like,
kernels for such a processor, which has vectors of 512 bits, run here on shorter ones (:mod:`.wide`); of these those
kinds are counted that neither ARM has nor a processor before it in the table.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.kernel_ir.nodes import Kernel
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.launch_plan.loaded import Loaded
from aotkit_inductor_lower.targets.cpu import Machine, host_machine, ways
from aotkit_inductor_lower.targets.cpu import generate as generating
from aotkit_inductor_lower.targets.cpu import load as loading
from aotkit_inductor_lower.targets.cpu import target as targets

from . import wide
from .kinds import all_kinds, kinds_of
from .processors import ARM, PROCESSORS, Emulated
from .programs import load_into, with_extents
from .server import Server


class Kinds:
    """Which kinds of kernels a run of pytest has called, of those of a machine that are not seen ``elsewhere``."""

    def __init__(self, name: str, machine: Machine, elsewhere: frozenset[str] = frozenset()) -> None:
        self.name, self.machine, self.elsewhere = name, machine, elsewhere
        self.called, self.calls = set[str](), 0
        self._of: dict[tuple[bytes, ...], frozenset[str]] = {}
        self._written: list[tuple[Kernel, str]] = []

    def way_of(self, kernel: Kernel, *rest: Any) -> Any:
        """What the generator asks for each kernel that it writes."""
        name, write = ways.way_of(kernel, *rest)
        self._written.append((kernel, name))
        return name, write

    def made(self, generate: Callable[[], CompiledProgram], program: Program) -> CompiledProgram:
        """Generate the program and remember of what kinds it is."""
        self._written.clear()
        compiled = generate()
        self._of[_code(compiled)] = frozenset(kinds_of(program, compiled, self._written, self.machine))
        return compiled

    def counted(self, compiled: CompiledProgram, loaded: Loaded) -> Loaded:
        """The same program; a call of it counts."""
        kinds = self._of.get(_code(compiled))
        if kinds is None:  # for another machine
            return loaded
        segments = {name: functools.partial(self._call, kinds, call) for name, call in loaded.segments.items()}
        return replace(loaded, segments=segments)

    def _call(self, kinds: frozenset[str], call: Callable[[int, int], int], frame: int, threads: int) -> int:
        self.called |= kinds
        self.calls += 1
        return call(frame, threads)

    def problems(self) -> list[str]:
        """What the tables and the kernels that ran do not agree on."""
        there = all_kinds(self.machine)
        left_out, unknown = sorted(there - self.elsewhere - self.called), sorted(self.called - there)
        told = {"did not run": left_out, "not in the tables": unknown}
        return [f"{what}: {', '.join(names)}" for what, names in told.items() if names]

    def pytest_report_header(self) -> str:
        """Say so at the top of the run."""
        return f"kernels: for {self.name}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """How much ran there."""
        there = all_kinds(self.machine) - self.elsewhere
        terminalreporter.write_line(f"{self.calls} calls on {self.name}")
        terminalreporter.write_line(f"{len(there & self.called)} of {len(there)} kinds of kernels")
        for problem in self.problems():
            terminalreporter.write_line(problem)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """With ``--every-kind``, a run that left out a kind of kernel has failed."""
        incomplete = session.config.getoption("--every-kind") and self.problems()
        if session.exitstatus == pytest.ExitCode.OK and (incomplete or not (self.calls or self.elsewhere)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _code(compiled: CompiledProgram) -> tuple[bytes, ...]:
    return tuple(code for _, code in compiled.binary.sections)


class Emulation(Kinds):
    """The same, where the kernels of a run are emulated."""

    def __init__(self, processor: Emulated) -> None:
        super().__init__(processor.name, processor.machine())
        self.processor = processor
        self._folder = tempfile.TemporaryDirectory(prefix="aotkit-emulation-")
        self.server = Server(processor, Path(self._folder.name))

    def pytest_report_header(self) -> str:
        """Say so at the top of the run."""
        return f"kernels: {self.processor.name}, by {' '.join(self.processor.emulator)}"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the emulated process."""
        self.server.close()
        super().pytest_sessionfinish(session)


def count_here(kinds: Kinds) -> None:
    """Count what runs on this processor; tests have not been imported yet."""
    generate, load = generating.generate, loading.load

    def generate_and_count(program: Program, target: Machine | None = None, *rest: Any, **options: Any) -> Any:
        call = functools.partial(generate, program, target, *rest, **options)
        return kinds.made(call, program) if target in (None, kinds.machine) else call()

    _put(kinds, generate_and_count, lambda compiled: kinds.counted(compiled, load(compiled)))


def emulate(emulation: Emulation) -> None:
    """Put the emulated processor in the host's place; tests have not been imported yet."""
    machine, generate = emulation.machine, generating.generate

    def generate_for_it(program: Program, _target: object = None, *rest: Any, **options: Any) -> CompiledProgram:
        call = functools.partial(generate, program, machine, *rest, **options)
        return emulation.made(lambda: with_extents(call(), program), program)

    def load(compiled: CompiledProgram) -> Loaded:
        return emulation.counted(compiled, load_into(emulation.server, compiled))

    asked: Any = targets
    asked.processor_machine = lambda _name: machine
    _put(emulation, generate_for_it, load)


def _put(kinds: Kinds, generate: Callable[..., CompiledProgram], load: Callable[[CompiledProgram], Loaded]) -> None:
    generator: Any = generating
    loader: Any = loading
    generator.way_of, generator.generate, loader.load = kinds.way_of, generate, load


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which processor."""
    names = [processor.name for processor in (*PROCESSORS, *wide.PROCESSORS)]
    parser.addoption("--emulate", choices=names, default=PROCESSORS[0].name)
    parser.addoption("--every-kind", action="store_true", help="fail where a kind of kernel was left out")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    name = config.getoption("--emulate")
    emulated = next((each for each in PROCESSORS if each.name == name), None)
    if emulated is not None:
        emulation = Emulation(emulated)
        emulate(emulation)
        kinds: Kinds = emulation
    else:
        wide.emulate_named(name)
        kinds = Kinds(f"{name}, on vectors of 256 bits", host_machine(), elsewhere=_elsewhere(name))
        count_here(kinds)
    config.pluginmanager.register(kinds, "emulation")


def _elsewhere(name: str) -> frozenset[str]:
    """Kinds of kernels that other runs look for."""
    others = itertools.takewhile(lambda each: each.name != name, wide.PROCESSORS)
    return all_kinds(ARM.machine()).union(*(all_kinds(each.machine()) for each in others))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what torch itself computes are not for a processor that it does not run on."""
    if config.getoption("--emulate") in {each.name for each in wide.PROCESSORS}:
        wide.pytest_collection_modifyitems(items)
