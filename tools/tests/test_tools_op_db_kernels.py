"""A slice of torch's table of operators through generated kernels; the whole table is ``nox -s conformance``."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.conformance import coverage
from tools.conformance.journal import read_journal, work_through
from tools.conformance.kernels import PASSED, check_pair
from tools.conformance.pairs import Pair, all_pairs, compare, entries, make_program, run
from tools.workspace import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY = list(all_pairs())
SLICE = [pair for pair in EVERY[7::149] if pair.operator.partition(".")[0] not in ("linalg", "fft", "sparse")]


@pytest.mark.covers("F5g.1", "F5c.1")
def test_pairs_of_every_dtype_and_direction_equal_eager() -> None:
    assert {pair.dtype for pair in SLICE} == {"float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"}
    outcomes = {pair.key: check_pair(pair) for pair in SLICE}
    wrong = {key: outcome for key, outcome in outcomes.items() if outcome["kind"] not in (*PASSED, "eager", "absent")}
    assert not wrong
    assert sum(not outcome["externs"] for outcome in outcomes.values() if outcome["kind"] in PASSED) > len(SLICE) / 2


def test_a_wrong_result_and_an_extern_call_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_pair(Pair("mm", "float32", "forward"))["externs"] == {"aten.mm.default": 1}
    monkeypatch.setattr("torch.compile", lambda fn, **_: lambda *args: fn(*args) + 1)
    assert check_pair(Pair("sin", "float32", "forward"))["kind"] == "different"
    monkeypatch.setattr("torch.compile", lambda fn, **_: lambda x, *args: fn(x.detach(), *args) + x - x)
    assert check_pair(Pair("sin", "float32", "gradient"))["reason"].startswith("gradients")


def test_a_half_may_be_nearer_to_the_exact_result_than_eagers() -> None:
    program = make_program(Pair("sin", "float16", "forward"))
    eager = run(program, program.fn)
    off = replace(eager, outputs=[eager.outputs[0] * 1.01])
    assert compare(program, eager, eager)[0] == "equal"
    assert compare(program, eager, off)[0] == "different"
    assert compare(program, off, eager)[0] == "nearer"
    single = make_program(Pair("sin", "float32", "forward"))
    right = run(single, single.fn)
    assert compare(single, replace(right, outputs=[right.outputs[0] * 1.01]), right)[0] == "different"


def test_a_dead_process_is_one_failing_pair_and_a_second_run_goes_on(tmp_path: Path) -> None:
    pairs = [Pair("sin", "float32", "forward"), Pair("cos", "float32", "forward"), Pair("tan", "float32", "forward")]

    def check(part, emit):
        for pair in part:
            emit(pair, {})
            if pair.operator == "cos":
                os.kill(os.getpid(), signal.SIGKILL)
            emit(pair, {"kind": "equal", "reason": ""})

    journal = tmp_path / "journal.jsonl"
    kinds = {key: entry["kind"] for key, entry in work_through(pairs, journal, check, chunk=3).items()}
    assert list(kinds.values()) == ["equal", "died", "equal"]
    assert "SIGKILL" in read_journal(journal)["cos float32 forward"]["reason"]
    work_through(pairs, journal, lambda *_: os._exit(1), chunk=3)  # nothing is left to do
    assert len(read_journal(journal)) == 3


ONE_CHUNK = """
import os, signal, sys
from pathlib import Path
from tools.conformance.journal import work_once
from tools.conformance.pair import Pair

def check(part, emit):
    for pair in part:
        emit(pair, {})
        if pair.operator == "cos":
            os.kill(os.getpid(), signal.SIGKILL)
        emit(pair, {"kind": "equal", "reason": ""})
        if pair.operator == "tan":  # the device is gone
            return

work_once([Pair(name, "float32", "forward") for name in sys.argv[2:]], Path(sys.argv[1]), check, 3)
"""


def test_a_device_is_used_by_processes_of_their_own(tmp_path: Path) -> None:
    names = ["sin", "tan", "cos", "exp"]
    journal = tmp_path / "journal.jsonl"
    command = [sys.executable, "-c", ONE_CHUNK, str(journal), *names]
    pairs = [Pair(name, "float32", "forward") for name in names]
    found = work_through(pairs, journal, lambda *_: pytest.fail("in this process"), chunk=3, command=command)
    assert [found[pair.key]["kind"] for pair in pairs] == ["equal", "equal", "died", "equal"]


def test_every_operator_has_a_class_and_every_pattern_an_operator() -> None:
    classes = coverage.load_classes()
    assert [name for name in entries() if not any(c.holds(name) for c in classes)] == []
    unused = [p for c in classes for p in c.operators if not any(coverage.fnmatchcase(name, p) for name in entries())]
    assert unused == []


def test_the_page_is_what_the_committed_results_make_it() -> None:
    assert coverage.main(["--check"]) == 0


@pytest.mark.covers("F5c.1")
def test_the_committed_results_keep_what_was_promised() -> None:
    counted = [row for row in coverage.load_rows() if row.counted]
    fusable = [row for row in counted if row.cls.fusable]
    assert sum(row.passed for row in counted) >= 0.98 * len(counted)
    assert sum(row.generated for row in fusable) >= 0.80 * len(fusable)
    limits = (ROOT / "docs" / "limits.md").read_text()
    missing = {row.operator for row in counted if row.inductor in PASSED and not row.passed}
    assert [name for name in sorted(missing) if f"`{name}`" not in limits] == []
