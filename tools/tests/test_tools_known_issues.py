"""The page of programs that are right here: each row of it, run with aotkit and compared with eager mode."""

from __future__ import annotations

import re

import pytest
import torch

from tools.known_issues import CASES, PAGE, Case, agrees, observe, outcome, table


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_reported_program_gives_what_eager_gives(case: Case) -> None:
    assert outcome(case, "aotkit") == "as eager"


def test_the_page_has_a_row_for_each_program() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\| \[(\d+)\]\([^)]*\) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [(int(issue), what) for issue, what, _, _ in found] == [(case.issue, case.what) for case in CASES]
    assert {ours for _, _, _, ours in found} == {"as eager"}


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda x: x + 1, "another result than eager's"),
        (lambda x: -x * 0, "another result than eager's"),  # zeros of the other sign
        (lambda x: x.double(), "another result than eager's"),
        (lambda x: x.view(7), "raises RuntimeError, where eager has a result"),
    ],
)
def test_what_differs_is_seen(run: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    case = Case(0, "zeros", zeros, lambda: [(torch.zeros(3),)])
    monkeypatch.setattr(torch, "compile", lambda *_args, **_options: run)
    assert outcome(case, "some backend") == says


def test_an_error_that_is_let_pass_is_seen() -> None:
    (case,) = (case for case in CASES if case.name == "183769")
    wanted = observe(case, "eager")
    assert wanted == ["raises IndexError"] and not agrees(wanted, [[torch.zeros(1)]])
    assert "| as eager | as eager |" in table([(case, "as eager", "as eager")])
