"""The command that runs small programs with small thresholds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aotkit_inductor_lower.loop_passes import fuse_mixed_order_reductions
from aotkit_inductor_lower.target import HOST_SPLITS
from tools.fuzz import layers, low_thresholds, thresholds
from tools.fuzz.layer_programs import Input, LayerProgram
from tools.fuzz.low_thresholds import PASSES, UNREACHED, Trial, draw_trial, judge, shrink
from tools.fuzz.mixed_programs import make_mixed_program
from tools.fuzz.thresholds import LOW, LOW_SPLITS, exceptions, lowered, named_numbers, other_holders

LISTED = {(module, name) for module, names in LOW.items() for name in names}


@pytest.fixture(scope="module")
def numbers() -> set[tuple[str, str]]:
    return named_numbers()


def test_every_number_of_a_pass_or_of_the_target_is_a_threshold_or_has_a_reason_why_not(
    numbers: set[tuple[str, str]],
) -> None:
    staying = exceptions()
    excused = {(m, n) for m, n in numbers if {n, "*"} & staying.get(m, set())}
    assert numbers - LISTED - excused == set(), "new: to `LOW` or `EXCEPTIONS` of tools/fuzz/thresholds.py"
    assert LISTED & excused == set()
    assert len(numbers) > 200


def test_names_that_are_listed_exist(numbers: set[tuple[str, str]]) -> None:
    for module, names in [*LOW.items(), *exceptions().items()]:
        found = importlib.import_module(f"aotkit_inductor_lower.{module}")
        for name in names:
            exists = any(m == module for m, _ in numbers) if name == "*" else hasattr(found, name)
            assert exists, f"{module}.{name} is gone"
    assert all(hasattr(HOST_SPLITS, name) for name in LOW_SPLITS)
    assert set(PASSES) >= set(UNREACHED)


def test_modules_that_import_a_threshold_are_listed_with_it() -> None:
    assert other_holders() - LISTED == set()
    assert other_holders()


def test_what_the_source_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passes").mkdir()
    text = 'LEAST = 1 << 9\n_BOTH, MOST = 1, 2\nBY_TYPE = {"a": 1}\nNAME = "a"\nPASS = f(1)\nOF: int = 3\nlow = 4\n'
    (tmp_path / "passes" / "one.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(thresholds, "ROOT", tmp_path)
    monkeypatch.setattr(thresholds, "PLACES", ("passes",))
    assert named_numbers() == {("passes.one", name) for name in ("LEAST", "_BOTH", "MOST", "BY_TYPE", "OF")}


def test_thresholds_are_small_within_and_as_before_behind() -> None:
    module = fuse_mixed_order_reductions
    before, units = module.LEAST_SHARED, HOST_SPLITS.units
    with pytest.raises(ZeroDivisionError), lowered():
        assert (module.LEAST_SHARED, HOST_SPLITS.units) == (1, 4) != (before, units)
        raise ZeroDivisionError
    assert (module.LEAST_SHARED, HOST_SPLITS.units) == (before, units)
    with lowered({"target"}):
        assert (module.LEAST_SHARED, HOST_SPLITS.units) == (before, 4)


def test_a_number_gives_the_same_trial_and_most_numbers_another() -> None:
    assert draw_trial(4) == draw_trial(4)
    programs = [make_mixed_program(number) for number in range(80)]
    assert len({program.source for program in programs}) == 80
    text = "".join(map(str, programs))
    for word in ("keepdim=True", "softmax", "layer_norm", "sort(", "cumsum", "conv1d", "cat(", "scatter", "int8_"):
        assert word in text, word
    assert {True, False} == {program.training for program in programs} == {program.dynamic for program in programs}


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(30))
def test_a_slice_of_the_programs_equals_eager(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    count = 4 if part else 1
    assert low_thresholds.main(["--programs", str(count), "--seed", str(10 * part + 1)]) == 0, capsys.readouterr().out
    assert "0 failed" in capsys.readouterr().out


def test_outcomes_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(number: int, _: int) -> dict[str, Any]:
        kind = "mismatch" if number == 5 else "equal"
        return {"number": number, "kind": kind, "text": "", "passes": ["fuse-kernels"]}

    journal = tmp_path / "journal"
    again = ["--programs", "3", "--seed", "4", "--journal", str(journal)]
    monkeypatch.setattr(low_thresholds, "_outcome_of", outcome)
    assert low_thresholds.main([*again[:1], "2", *again[2:]]) == 1
    monkeypatch.setattr(low_thresholds, "_outcome_of", lambda number, _: outcome(number + 100, 0) | {"number": number})
    assert low_thresholds.main(again) == 1  # by the journal; the third is run
    assert "3 programs: 2 equal, 1 mismatch" in capsys.readouterr().out
    assert [json.loads(line)["number"] for line in journal.read_text(encoding="utf-8").splitlines()] == [4, 5, 6]
    assert low_thresholds.main([*again, "--again"]) == 0
    assert "1 programs: 1 equal" in (told := capsys.readouterr().out)
    assert "    1  fuse-kernels\n" in told and "write-through (NOT REACHED)" in told


def _trial(*lines: str, **more: Any) -> Trial:
    inputs = (Input("x0", (5, 33)), Input("x1", (5, 33), fill="positive"))
    flags = dict.fromkeys(("training", "autocast", "frozen", "dynamic"), False) | more
    program = LayerProgram(lines, inputs, torch.float32, **flags)
    return Trial(0, program, frozenset(LOW), "generated", verify=False)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of columns that read the largest number of a row before it is known: a check of the pass is left out."""
    trial = _trial("v0 = x0 * x1", "v1 = v0 - v0.amax(1, keepdim=True)", "return [v1.sum(0)]")
    assert judge(trial) == ("equal", "")
    true = fuse_mixed_order_reductions._illegal

    def lenient(rows: Any, columns: Any, match: Any, joined: int, buffers: Any) -> Any:
        return true(rows, columns, match, 1 << 10, buffers)

    monkeypatch.setattr(fuse_mixed_order_reductions, "_illegal", lenient)
    assert judge(trial)[0] == "mismatch"
    with monkeypatch.context() as patch:
        patch.setattr(low_thresholds, "lowered", lambda _: lowered(()))
        assert judge(trial) == ("equal", "")  # such a program is too small for the pass


def test_a_failure_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(trial: Trial, _: Any = None) -> tuple[str, str]:
        bad = "sort" in trial.program.source and "loop_passes.order_steps" in trial.groups
        return ("mismatch" if bad else "equal"), ""

    monkeypatch.setattr(low_thresholds, "judge", fails)
    trial = _trial(
        "v0 = x0 + x1",
        "v1 = v0.tanh()",
        "v2 = v1.sort(-1)[0]",
        "v3 = v2 * v0",
        "return [v3, v1]",
        training=True,
        dynamic=True,
    )
    least = shrink(trial)
    assert least.program.lines == ("v2 = x0.sort(-1)[0]", "return [v2]")
    assert [each.name for each in least.program.inputs] == ["x0"]
    assert (list(least.groups), least.program.training) == (["loop_passes.order_steps"], False)


def test_what_a_program_writes_to_its_inputs_is_compared() -> None:
    program = _trial("v0 = x0.mul_(0.5).add_(x1)", "return [v0.sum(-1)]").program

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: graph(*(each.clone() for each in args))

    assert layers.outcome(program, 0) == ("equal", "")
    assert layers.outcome(program, 0, backend)[0] == "mismatch"
