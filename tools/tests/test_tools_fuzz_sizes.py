"""The command that runs random programs over sizes that depend on data."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tools.fuzz import sizes


def test_a_slice_of_the_random_programs_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    assert sizes.main(["--programs", "4", "--seed", "20"]) == 0
    assert "4 programs" in capsys.readouterr().out


def test_a_number_gives_the_same_program_and_most_numbers_another() -> None:
    assert sizes.make_program(3) == sizes.make_program(3)
    programs = [sizes.make_program(number) for number in range(50)]
    assert len({program.source for program in programs}) == 50
    text = "".join(program.source for program in programs)
    for construct in ("item()", "tolist()", "interpolate", "torch.cat", "nonzero", "linspace", "split(", "unique"):
        assert construct in text


@pytest.mark.parametrize("kind", ["mismatch", "crash", "refused"])
def test_a_backend_that_is_wrong_is_found(kind: str) -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        if kind == "crash":
            raise ZeroDivisionError("a bug")
        if kind == "refused":
            raise sizes.aotkit.CompileError("not this one")
        return lambda *args: [r + 1 if isinstance(r, torch.Tensor) else r for r in graph(*args)]

    program = sizes.Program(("v1 = torch.ones(k.item())", "return [v1 * x.sum(), x * y]"), grad=True)
    found, text = sizes.outcome(program, sizes.arguments(random.Random(0), True), backend)
    assert found == kind and "call 0" in text
