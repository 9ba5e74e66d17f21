"""What several tests of the tools share: processes of their own that need not import all anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tools.warm_python import WarmPython

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _guards_are_not_timed(guards_are_not_timed: None, quick_interpreter: None) -> None:
    """Most tests of benchmarks and fuzzers compile something."""


@pytest.fixture(scope="session")
def forked() -> Iterator[Run]:
    """``forked([sys.executable, ..], cwd=.., env=..)``, for ``subprocess.run`` of a command that compiles something."""
    processes = WarmPython(seeds=("1",))

    def run(
        command: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
        **_: Any,
    ) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        done = processes.run(command[1:], cwd=cwd, env=env)
        assert not check or done.returncode == 0, done.stderr
        return done

    yield run
    processes.close()


@pytest.fixture
def fork_in(monkeypatch: pytest.MonkeyPatch, forked: Run) -> Callable[[ModuleType], None]:
    """``fork_in(module)``: processes that a tool starts by ``subprocess.run`` are forks."""

    def patch(module: ModuleType) -> None:
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": forked}))

    return patch
