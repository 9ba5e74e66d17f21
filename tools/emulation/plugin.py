"""A pytest plugin: the CPU target's tests, with kernels for another processor that run under emulation.

``pytest -p tools.emulation.plugin --emulate aarch64 packages/inductor-lower/tests/test_inductor_lower_cpu_ops.py``

Whatever machine a test asks for, it gets the emulated one. Its expectations stay what they are: numbers from eager,
from float64 or from the interpreter of the IR, computed by this processor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.targets.cpu import generate as generating
from aotkit_inductor_lower.targets.cpu import load as loading
from aotkit_inductor_lower.targets.cpu import target as targets

from .kinds import all_kinds, kinds_of
from .processors import PROCESSORS, Emulated
from .programs import load_into, with_extents
from .server import Server


class Emulation:
    """What is emulated in this run of pytest."""

    def __init__(self, processor: Emulated) -> None:
        self.processor, self.machine = processor, processor.machine()
        self.kinds: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="aotkit-emulation-")
        self.server = Server(processor, Path(self._folder.name))

    def install(self) -> None:
        """Put the processor in the host's place; tests have not been imported yet."""
        machine, generate = self.machine, generating.generate

        def generate_for_it(program: Program, _target: object = None, *rest: Any, **options: Any) -> CompiledProgram:
            compiled = generate(program, machine, *rest, **options)
            self.kinds.update(kinds_of(program, compiled, machine))
            return with_extents(compiled, program)

        places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (generating, "generate", generate_for_it),
            (targets, "processor_machine", lambda _name: machine),
            (loading, "load", lambda compiled: load_into(self.server, compiled)),
        )
        for module, name, ours in places:
            setattr(module, name, ours)

    def pytest_report_header(self) -> str:
        """Say so at the top of the run."""
        return f"kernels: {self.processor.name}, by {' '.join(self.processor.emulator)}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """How much ran there."""
        called, loaded = self.server.called, self.server.loaded
        terminalreporter.write_line(f"{called} calls of {loaded} programs on an emulated {self.processor.name}")
        there = all_kinds(self.machine)
        missing = sorted(there - self.kinds)
        terminalreporter.write_line(f"{len(there) - len(missing)} of {len(there)} kinds of kernels")
        if missing:
            terminalreporter.write_line(f"not among them: {', '.join(missing)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the emulated process. With ``--every-kind``, a run that left out a kind of kernel has failed."""
        self.server.close()
        incomplete = session.config.getoption("--every-kind") and all_kinds(self.machine) - self.kinds
        if session.exitstatus == pytest.ExitCode.OK and (incomplete or not self.server.called):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which processor."""
    parser.addoption("--emulate", choices=[processor.name for processor in PROCESSORS], default=PROCESSORS[0].name)
    parser.addoption("--every-kind", action="store_true", help="fail where a kind of kernel was left out")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    processor = next(each for each in PROCESSORS if each.name == config.getoption("--emulate"))
    emulation = Emulation(processor)
    emulation.install()
    config.pluginmanager.register(emulation, "emulation")
