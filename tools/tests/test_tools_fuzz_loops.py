"""The command that runs random loop programs."""

from __future__ import annotations

import pytest

from aotkit_inductor_lower.runtime import RedzoneError
from tools.fuzz import loops


def test_a_slice_of_the_random_loop_programs_agrees_with_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert loops.main(["--programs", "8", "--seed", "7000"]) == 0
    assert loops.main(["--programs", "8", "--seed", "7000", "--target", "interpreter"]) == 0
    assert capsys.readouterr().out.count("8 programs") == 2


def test_a_program_that_fails_is_counted_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> object:
        def run(_: object) -> object:
            raise RedzoneError("step 0 wrote to memory behind buffer t")

        return run

    monkeypatch.setattr(loops, "bind_program", broken)
    assert loops.main(["--programs", "2", "--seed", "7000"]) == 1
    out = capsys.readouterr().out
    assert "behind buffer t" in out and "2 failed" in out and "loop" in out
