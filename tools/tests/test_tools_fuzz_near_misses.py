"""The command that changes patterns a little and compares what they become with eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tools.fuzz import near_misses, near_planted
from tools.fuzz.mutations import Mutation
from tools.fuzz.near_misses import Case, Verdict, draw_case, judge, shrink
from tools.fuzz.near_more_seeds import ALL_SEEDS
from tools.fuzz.near_seeds import Seed

BY_NAME = {each.name: each for each in ALL_SEEDS}


def plain_case(name: str, mode: str = "inference", *mutations: Mutation) -> Case:
    seed = BY_NAME[name]
    return Case(seed, mode, seed.inputs, decomposed=False, mutations=mutations)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(sum(len(each.modes) for each in ALL_SEEDS)))
def test_each_pattern_is_recognised_and_equals_eager(seed: int) -> None:
    known = [(each, mode) for each in ALL_SEEDS for mode in each.modes]
    chosen, mode = known[seed * 37 % len(known)]
    verdict = judge(Case(chosen, mode, chosen.inputs, decomposed=False))
    assert (verdict.kind, verdict.fired) == ("equal", True), f"{chosen.name}, {mode}: {verdict.text}"


def test_a_slice_of_the_cases_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    assert near_misses.main(["--cases", "1", "--only", "attention, window"]) == 0
    assert "1 cases" in capsys.readouterr().out


def test_a_number_gives_the_same_case_and_most_numbers_another() -> None:
    seeds = [BY_NAME["attention, triangle"]]
    cases = [draw_case(number, seeds) for number in range(3)]
    assert cases[1] == draw_case(1, seeds)
    assert len({each and each.mutations for each in cases}) == 3


def test_a_planted_fault_is_found() -> None:
    changed = Mutation("default", "tril", 1, 1)  # the triangle has another diagonal
    case = plain_case("attention, triangle", "inference", changed)
    fault = near_planted.FAULTS["any triangle"]
    assert judge(case) == Verdict("equal", "", fired=False)  # its mask is a tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.place, fault.name, fault.spoiled(getattr(fault.place, fault.name)))
        assert judge(case).kind == "mismatch"


def test_what_does_not_matter_is_left_out_of_a_failure() -> None:
    matters, other = Mutation("constant", "mul", 1, 3), Mutation("returned", "mul")
    case = plain_case("attention", "inference", other, matters)
    inputs = tuple(replace(each, layout="cut") for each in case.inputs)
    least = shrink(replace(case, inputs=inputs), lambda each: matters in each.mutations)
    assert least == replace(case, mutations=(matters,))
    assert "constant mul[1]: 3" in str(least) and "aten.mul.Tensor" in str(least)


def test_what_eager_refuses_is_told_apart() -> None:
    assert judge(plain_case("attention, a term", "inference", Mutation("exchange", "add", 0, 1))).kind == "equal"
    assert judge(plain_case("attention", "inference", Mutation("exchange", "bmm", 0, 1))).kind == "eager"


def test_a_wrong_written_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph writes to its inputs is compared as well."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.mul_(2)]

    seed = Seed("written", run, BY_NAME["nested maxima"].inputs, ("inference",), ".")
    case = Case(seed, "inference", seed.inputs, decomposed=False)
    monkeypatch.setitem(near_misses._BY_NAME, "written", seed)
    assert judge(case).kind == "equal"
    true = near_misses._compiled

    def forgets(gm: Any, case: Case, given: Any) -> Any:
        _, seen = true(gm, case, given)
        return lambda x: [x * 2], seen

    monkeypatch.setattr(near_misses, "_compiled", forgets)
    assert judge(case).kind == "mismatch"
