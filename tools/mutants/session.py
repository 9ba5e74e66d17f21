"""pytest as a host: everything is collected once, and then tests run in forks of that process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.workspace import PACKAGES, ROOT, load_package

from .coverage import LineTracer
from .supervise import Send

__all__ = ["collected", "limit_of", "run_in_order", "trace_tests"]

Items = dict[str, pytest.Item]


class _Host:
    """Calls a function in the place of pytest's loop over tests."""

    def __init__(self, loop: Callable[[Items], None]) -> None:
        self.loop = loop

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        # the same examples as always, but a failure is enough: nobody reads a small one
        settings.register_profile(
            "no-shrinking", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate), database=None
        )
        settings.load_profile("no-shrinking")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise RuntimeError("the tests cannot be collected")
        self.loop({item.nodeid: item for item in session.items})
        return True


def collected(tests: Sequence[str], log: Path, loop: Callable[[Items], None]) -> int:
    """Collect ``tests`` (files or folders) in this process, then call ``loop`` with them. Returns pytest's status."""
    for package in PACKAGES:
        sys.path.insert(0, str(load_package(package).path / "src"))
    os.chdir(ROOT)
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    shown = os.dup(1)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.environ["AOTKIT_MUTANTS_OUT"] = str(shown)
    sys.dont_write_bytecode = True
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no", "--tb=native"]
    return int(pytest.main([*options, *tests], plugins=[_Host(loop)]))


def run_in_order(items: Sequence[pytest.Item], send: Send, limits: Sequence[float]) -> None:
    """Run tests up to the first failure and send what came out."""
    from _pytest.runner import runtestprotocol

    for at, item in enumerate(items):
        send(test=item.nodeid, limit=limits[at])
        following = items[at + 1] if at + 1 < len(items) else None
        for report in runtestprotocol(item, log=False, nextitem=following):
            if report.failed:
                send(result="killed", why=_last_line(str(report.longrepr)))
                return
    send(result="survived")


def limit_of(seconds: float) -> float:
    """Processor time that a test may take which usually takes ``seconds``."""
    return 10 + 10 * seconds


def trace_tests(items: Iterable[pytest.Item], sources: Sequence[Path], send: Send) -> list[dict[str, Any]]:
    """Run tests and note time and lines of each; those that fail or are skipped are left out."""
    from _pytest.runner import runtestprotocol

    rows = []
    tracer = LineTracer(sources)
    listed = list(items)
    for at, item in enumerate(listed):
        send(test=item.nodeid, limit=1200.0)
        following = listed[at + 1] if at + 1 < len(listed) else None
        began = time.process_time()
        tracer.start()
        try:
            reports = runtestprotocol(item, log=False, nextitem=following)
        finally:
            lines = tracer.stop()
        if all(report.passed for report in reports):
            rows.append({"test": item.nodeid, "seconds": time.process_time() - began, "lines": lines})
    return rows


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
