"""The example in docs/architecture.md is what the stages print today."""

from __future__ import annotations

from tools.architecture_example import PAGE, section, updated_page


def test_the_page_shows_what_the_stages_print() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page, section()) == page, "run: python -m tools.architecture_example --update"
