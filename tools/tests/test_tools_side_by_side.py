"""Sessions side by side: none is lost, none is hidden, no failure is forgotten."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tools import side_by_side
from tools.side_by_side import Outcome, clock, main, run_sessions, table

PROGRAMS = {
    "good": "print('all is well')",
    "bad(one)": "import sys; print('this went wrong', file=sys.stderr); sys.exit(3)",
    "first": "import sys, time, pathlib as p; p.Path('{0}/first').touch(); "
    "end = time.time() + 60\nwhile not p.Path('{0}/second').exists(): time.sleep(0.02); assert time.time() < end",
    "second": "import sys, time, pathlib as p; p.Path('{0}/second').touch(); "
    "end = time.time() + 60\nwhile not p.Path('{0}/first').exists(): time.sleep(0.02); assert time.time() < end",
}


@pytest.fixture
def command(tmp_path: Path):
    return lambda name: [sys.executable, "-c", PROGRAMS[name].replace("{0}", str(tmp_path))]


def test_sessions_run_at_the_same_time_and_each_has_a_log(tmp_path: Path, command) -> None:
    found = {each.name: each for each in run_sessions(["first", "second"], 2, tmp_path, command)}
    assert {name: each.code for name, each in found.items()} == {"first": 0, "second": 0}, "each waited for the other"
    assert found["first"].log != found["second"].log


def test_no_more_sessions_run_than_asked_for(tmp_path: Path, command) -> None:
    ended = [each.name for each in run_sessions(["good", "bad(one)", "good"], 1, tmp_path, command)]
    assert ended == ["good", "bad(one)", "good"]


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="this system has no priorities")
def test_a_session_gives_way_to_those_before_it(tmp_path: Path) -> None:
    program = "import os, sys, time; time.sleep(0.5); print(os.getpriority(os.PRIO_PROCESS, 0))"
    ended = run_sessions(["a", "b", "c"], 2, tmp_path, lambda _: [sys.executable, "-c", program])
    priorities = {each.name: int(each.log.read_text()) for each in ended}
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities == {"a": here, "b": min(here + 1, 19), "c": min(here + 2, 19)}


@pytest.mark.skipif(side_by_side.resource is None, reason="this system does not count what processes use")
def test_a_session_has_the_processors_time_that_it_and_its_processes_used(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    inside = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}], check=True)"
    programs = {"idle": "import time; time.sleep(1)", "busy": inside}
    ended = run_sessions(["idle", "busy"], 2, tmp_path, lambda name: [sys.executable, "-c", programs[name]])
    used = {each.name: each.used for each in ended}
    assert used["idle"] < 0.5 <= used["busy"]


def test_a_failure_is_kept_and_stops_no_other(tmp_path: Path, command) -> None:
    bad, good = run_sessions(["bad(one)", "good"], 1, tmp_path, command)
    assert (bad.code, good.code) == (3, 0)
    assert bad.log.name == "bad-one.log" and "this went wrong" in bad.log.read_text()


def test_what_runs_is_said_now_and_then(tmp_path: Path, command, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(run_sessions(["first", "second"], 2, tmp_path, command, pause=0))) == 2
    assert "running: first, second\n" in capsys.readouterr().out


def test_what_still_runs_is_stopped_with_its_caller(tmp_path: Path, command) -> None:
    sessions = run_sessions(["good", "first"], 2, tmp_path, command)
    next(sessions)
    begun = time.monotonic()
    sessions.close()
    assert time.monotonic() - begun < 30, "it would have waited a minute for the second"


def test_the_command_prints_logs_and_times_and_fails_with_a_session(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_by_side, "run_sessions", lambda names, jobs: run_sessions(names, jobs, tmp_path, command))
    assert main(["good"]) == 0
    assert main(["--jobs", "2", "good", "bad(one)"]) == 1
    printed = capsys.readouterr().out
    assert "all is well" in printed and "this went wrong" in printed
    assert "session bad(one) FAILED in  0 min" in printed and "2 sessions, 1 failed, in  0 min" in printed


def test_the_longest_session_comes_first_in_the_table(tmp_path: Path) -> None:
    outcomes = [Outcome("a", 0, 1.4, tmp_path, 0.6), Outcome("bb", 1, 754.0, tmp_path, 1000.0)]
    assert table(outcomes, 755.0).splitlines() == [
        "session bb FAILED in 12 min 34 s, 16 min 40 s of a processor",
        "session a  passed in  0 min 01 s,  0 min 01 s of a processor",
        "2 sessions, 1 failed, in 12 min 35 s, 16 min 41 s of a processor",
    ]
    assert clock(59.7) == " 1 min 00 s"
