"""The fuzzer finds what it should, and finds nothing in a sample of programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.workspace import PACKAGES, ROOT

# The session for the tools has what the packages depend on, and the packages themselves only as sources.
sys.path += [str(ROOT / "packages" / name / "src") for name in PACKAGES]

from tools.fuzz.compare import differences, observe
from tools.fuzz.execute import check, shrink
from tools.fuzz.generate import generate
from tools.fuzz.program import Program

# Eager warns about some of what is tried.
pytestmark = pytest.mark.filterwarnings("ignore")

SETUP = ("m0 = values((4, 3), 0, torch.float32)", "a0 = m0.t()")


def test_a_program_is_the_same_one_for_the_same_number() -> None:
    assert generate(7) == generate(7) and len({generate(seed) for seed in range(20)}) == 20


def test_a_script_of_a_program_runs_by_itself() -> None:
    scope: dict[str, object] = {}
    exec(generate(8).script(), scope)
    assert isinstance(scope["outputs"], list)


@pytest.mark.parametrize("seed", range(12))
def test_the_graph_of_a_program_does_what_its_text_does(seed: int) -> None:
    program = generate(seed)
    eager = observe(program, program.function())
    if eager.error is None:
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


def test_a_failing_program_is_made_smaller() -> None:
    body = ("v1 = a0 * 2", "v2 = v1 + 1", "v2.sin_()", "v3 = a0.t()")
    program = Program(SETUP, ("a0",), body, ("v2", "v3", "None"), afterwards="outputs[0].zero_()")
    smallest = shrink(program, lambda p: any("sin_" in statement for statement in p.body))
    assert smallest.body == ("a0.sin_()",) and smallest.outputs == () and smallest.afterwards is None


@pytest.mark.parametrize("lowering", ["none", "kernels"])
def test_random_programs_behave_as_in_eager_or_are_refused(lowering: str) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(30000, 30060):
        training = seed % 3 != 0
        outcome = check(generate(seed), lowering=lowering, training=training)
        assert not outcome.failed, f"{outcome}\n{generate(seed).script()}"
        kinds[outcome.kind] += 1
    assert kinds["equal"] >= 40, kinds
