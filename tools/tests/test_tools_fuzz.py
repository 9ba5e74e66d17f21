"""The fuzzer finds what it should, and finds nothing in a sample of programs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aotkit_aot_trace import Unsupported
from aotkit_runtime_wrappers.errors import BackwardCompileError
from tools.fuzz.campaign import Campaign, Settings
from tools.fuzz.cells import CELLS, coverage_table, poorest
from tools.fuzz.compare import differences, observe
from tools.fuzz.execute import check, shows_a_later_write
from tools.fuzz.generate import generate
from tools.fuzz.planted import PLANTED, found_after
from tools.fuzz.program import Program
from tools.fuzz.refusals import refusal
from tools.fuzz.shrink import shrink
from tools.fuzz.stability import is_unstable, rounds_as_well
from tools.fuzz.tally import Tally

# Eager warns about some of what is tried.
pytestmark = pytest.mark.filterwarnings("ignore")

SETUP = ("m0 = values((4, 3), 0, torch.float32)", "a0 = m0.t()")


def test_a_program_is_the_same_one_for_the_same_number() -> None:
    assert generate(7) == generate(7) and len({generate(seed) for seed in range(20)}) == 20


def test_a_script_of_a_program_runs_by_itself() -> None:
    scope: dict[str, object] = {}
    exec(generate(8).program.script(), scope)
    assert isinstance(scope["outputs"], list)


@pytest.mark.parametrize("seed", range(12))
def test_the_graph_of_a_program_does_what_its_text_does(seed: int) -> None:
    program = generate(seed).program
    with torch.set_grad_enabled(program.training):
        eager = observe(program, program.function())
        assert eager.error is None
        assert differences(eager, observe(program, program.graph())) == []


def hidden_write(a: torch.Tensor) -> list[torch.Tensor]:
    a.data.add_(1)
    return []


@pytest.mark.parametrize(
    ("body", "outputs", "wrong"),
    [
        (("a0.add_(1)",), ("a0",), lambda a: [a + 1]),
        (("v1 = a0[0]",), ("v1",), lambda a: [a[0].clone()]),
        (("v1 = a0 * 2",), ("v1", "v1"), lambda a: [a * 2, a * 2]),
        (("v1 = a0.sin()",), ("v1",), lambda a: [a.sin().contiguous()]),
        (("a0.add_(1)",), (), hidden_write),
        (("a0.t_()",), (), lambda a: []),
    ],
    ids=["lost write", "lost alias", "two objects", "strides", "version", "shape"],
)
def test_a_wrong_result_is_found(body: tuple[str, ...], outputs: tuple[str, ...], wrong: Callable[..., Any]) -> None:
    program = Program(SETUP, ("a0",), body, outputs)
    eager = observe(program, program.function())
    assert differences(eager, observe(program, wrong))
    assert differences(eager, observe(program, program.function())) == []


def test_a_wrong_gradient_is_found() -> None:
    setup = ("l0 = values((4, 3), 0, torch.float32).requires_grad_()", "a0 = l0.clone()")
    program = Program(setup, ("a0",), ("v1 = a0 * 2",), ("v1",))
    wrong = observe(program, lambda a: [a + a.detach()])
    assert any("gradient" in found for found in differences(observe(program, program.function()), wrong))


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1.2, False)])
def test_half_gradients_of_views_may_be_added_up_in_another_order_and_no_worse(factor: float, accepted: bool) -> None:
    setup = ("l0 = values((5,), 0, torch.bfloat16).requires_grad_()", "a0 = l0[1:]")
    body, outputs = ("v1 = a0.unsqueeze(-1).expand(7, 4, 5)",), ("v1", "v1", "v1[:]")
    program = Program(setup, ("a0",), body, outputs)
    eager = observe(program, program.function())

    def of_each(a: torch.Tensor) -> list[torch.Tensor]:
        return [a.unsqueeze(-1).expand(7, 4, 5) * factor for _ in outputs]

    run = observe(program, of_each)
    run.facts = {**eager.facts, "l0 gradient": run.facts["l0 gradient"]}
    assert differences(eager, run)
    assert rounds_as_well(program, eager, run, 0.0) is accepted


def test_the_tolerance_of_a_short_dtype_holds_for_what_is_computed_from_it_and_for_nothing_else() -> None:
    setup = ("a0 = values((3,), 0, torch.bfloat16)", "a1 = values((3,), 1)", "a2 = values((3,), 2)")
    program = Program(
        setup, ("a0", "a1", "a2"), ("v1 = a0 * a1", "v2 = v1.to(torch.float32)", "v3 = a2 * 2"), ("v2", "v3")
    )
    eager = observe(program, program.function())

    def off(error: float) -> Callable[..., Any]:
        return lambda *inputs: [o * (1 + error) for o in program.function()(*inputs)]

    assert differences(eager, observe(program, off(2**-8)))[0].startswith("output 1 value")
    assert differences(eager, observe(program, off(2**-4)))[0].startswith("output 0 value")
    assert differences(eager, observe(program, program.function())) == []


@pytest.mark.parametrize("made", ["torch.ones(3, 4)", "a0.to(torch.float32).expand(3, 4)"])
def test_what_a_program_makes_in_a_short_dtype_counts_for_its_tolerance(made: str) -> None:
    setup = ("l0 = values((), 0, torch.float64).requires_grad_()", "a0 = l0.clone()")
    program = Program(setup, ("a0",), (f"v1 = {made} + a0",), ("v1",))
    alike = Program(setup, ("a0",), ("v1 = torch.ones(3, 4, dtype=torch.float64) + a0",), ("v1",))
    for known, accepted in ((program, True), (alike, False)):
        eager, run = (observe(known, known.function()) for _ in range(2))
        run.facts["l0 gradient"] = eager.facts["l0 gradient"] * (1 + 3e-7)
        assert (differences(eager, run) == []) is accepted


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_no_program_reads_other_elements_of_the_memory_that_it_writes_to(seed: int) -> None:
    for line in "\n".join(generate(seed).program.body).splitlines():
        written = re.match(r"\s*(\w+)\S+_\((\w+)[,)]", line)
        if written and written[1] == written[2]:
            assert re.match(r"\s*\w+(\.detach\(\)|\.data)?\.\w+_\(", line), line


def test_a_failing_program_is_made_smaller() -> None:
    body = ("v1 = a0 * 2", "v2 = v1 + 1", "v2.sin_()", "v3 = a0.t()")
    program = Program(SETUP, ("a0",), body, ("v2", "v3", "None"), afterwards="outputs[0].zero_()")
    smallest = shrink(program, lambda p: any("sin_" in statement for statement in p.body))
    assert smallest.body == ("a0.sin_()",) and smallest.outputs == () and smallest.afterwards is None


@pytest.mark.parametrize(("lowering", "programs"), [("none", 60), ("kernels", 25)])
def test_random_programs_behave_as_in_eager_or_are_refused(lowering: str, programs: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(30000, 30000 + programs):
        program = generate(seed).program
        outcome = check(program, lowering=lowering, verify=seed % 10 == 0)
        assert not outcome.failed, f"{outcome}\n{program.script()}"
        kinds[outcome.kind] += 1
    assert kinds["equal"] >= 0.8 * programs, kinds


#: Where a bug shows itself late: one of the programs shortly before, from which the search begins.
FIRST = {"missing clone of saved input": 60, "stale saved tensor": 95}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    number, detail = found_after(name, programs=400, first=FIRST.get(name, 0))
    assert number is not None and detail


def test_a_goal_is_reached_by_most_programs() -> None:
    goals = [cell for cell in CELLS if cell.view == "slice" and cell.mode != "no_grad inside"]
    reached = sum(goal in generate(seed, [goal]).cells for seed, goal in enumerate(goals))
    assert reached >= 0.9 * len(goals)


def test_four_goals_at_once_are_reached_by_most_programs() -> None:
    by_mode = [[cell for cell in CELLS[::7] if (cell.mode == "inference") is off] for off in (True, False)]
    groups = [cells[i : i + 4] for cells in by_mode for i in range(0, len(cells) - 3, 4)]
    reached = sum(generate(seed, goals).reached(goals) for seed, goals in enumerate(groups))
    assert reached >= 0.9 * 4 * len(groups)


def test_the_poorest_cells_come_first() -> None:
    counts = Counter(dict.fromkeys(CELLS, 5))
    counts[CELLS[3]], counts[CELLS[9]] = 1, 0
    assert poorest(counts, {}, 2) == [CELLS[9], CELLS[3]]
    assert poorest(counts, {CELLS[9]: 100}, 1) == [CELLS[3]]
    assert coverage_table(counts).count("\n") == 1 + len({(c.view, c.mutation) for c in CELLS})


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.fuzz.campaign.BATCH", 4)
    state = tmp_path / "state.jsonl"
    whole = Campaign(Settings(8)).run()
    Campaign(Settings(4), state=state).run()
    rest = Campaign(Settings(8), state=state).run()
    assert rest.to_json() == whole.to_json() and sum(whole.kinds.values()) == 8
    assert len(state.read_text().splitlines()) == 3 and set(rest.cells) <= set(CELLS)
    with pytest.raises(SystemExit, match="other settings"):
        Campaign(Settings(8, first=1), state=state).run()


def test_a_failed_compile_of_a_backward_is_a_refusal_only_where_it_was_refused() -> None:
    for cause, said in ((Unsupported("a", "b", "c"), "Unsupported: "), (TypeError("ours"), None)):
        error = BackwardCompileError("the backward could not be compiled")
        error.__cause__ = cause
        found = refusal(error)
        assert found is None if said is None else found is not None and found.startswith(said)


def test_a_tally_comes_back_from_the_file_it_was_written_to() -> None:
    tally = Tally(reports=["r"], failures=[3])
    tally.kinds["mismatch"] += 2
    tally.cells[CELLS[5]] += 4
    back = Tally.from_json(json.loads(json.dumps(tally.to_json())))
    assert back == tally and back.failed == 2 and back.cells[CELLS[5]] == 4


def test_a_later_write_that_autograd_does_not_see_is_no_mismatch_and_hides_none() -> None:
    setup = ("a0 = values((3,), 0).requires_grad_()", "a1 = values((3,), 1)")
    body = ("v0 = a1.data", "a1.square_()", "v1 = a0 + 1", "v1.mul_(v0)")
    program = Program(setup, ("a0", "a1"), body, ("v1", "a1"), entry="function", afterwards="outputs[1].mul_(2)")
    assert check(program).kind == "unseen write"

    def with_a_wrong_gradient(a0: torch.Tensor, a1: torch.Tensor) -> list[torch.Tensor]:
        kept = a1.data.square()
        a1.square_()
        return [(a0 + 1) * kept + (a0 - a0.detach()), a1]

    eager, wrong = observe(program, program.function()), observe(program, with_a_wrong_gradient)
    assert differences(eager, wrong) and not shows_a_later_write(program, eager, wrong, 0.0)


@pytest.mark.parametrize(("statement", "unstable"), [("b.sin_()", True), ("b.neg_()", False)])
def test_which_bits_a_nan_has_is_not_settled(statement: str, unstable: bool) -> None:
    program = Program(("a = torch.tensor([4, -2, -3])",), ("a",), ("b = a.view(torch.float32)", statement), ("a",))
    eager = observe(program, program.function(), 0.0)

    def other_bits(a: torch.Tensor) -> list[torch.Tensor]:
        program.function()(a)
        a[1:].fill_(-1)
        return [a]

    assert is_unstable(program, eager, observe(program, other_bits, 0.0), 0.0) is unstable
