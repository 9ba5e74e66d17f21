"""Random programs through the scheduler and the code generator, against the interpreter."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.driver import schedule_program
from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu.generate import generate


def assert_agree(program: Program, wanted: list[object], found: list[object], *, exact: bool) -> None:
    assert len(wanted) == len(found)
    for position, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        problem = difference(a, b, exact=exact)
        assert problem is None, f"output {position}: {problem}\n{print_program(program)}"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.covers("F5h.1", "F5h.3")
def test_scheduling_changes_no_result(seed: int) -> None:
    options = RandomOptions(nests=5)
    program = random_program(seed, options)
    scheduled, _ = schedule_program(program)
    verify_program(scheduled, size_minimum=1)
    inputs = random_inputs(program, seed, options)
    assert_agree(scheduled, interpret_program(program, inputs), interpret_program(scheduled, inputs), exact=True)


def test_scheduling_fuses_some_of_the_random_programs() -> None:
    programs = [random_program(seed, RandomOptions(nests=5)) for seed in range(40)]
    assert sum(len(schedule_program(p)[0].steps) < len(p.steps) for p in programs) >= 3


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.covers("F5d.4", "F5g.1", "F5g.8")
def test_generated_code_does_what_the_interpreter_does(seed: int, exact: bool) -> None:
    options = RandomOptions(exact_only=exact)
    program = random_program(seed, options)
    compiled = bind_program(generate(program))
    for sizes in range(2 if program.symbol_sources else 1):
        inputs = random_inputs(program, seed + 1000 * sizes, options)
        assert_agree(program, interpret_program(program, inputs), compiled(list(inputs)), exact=exact)
