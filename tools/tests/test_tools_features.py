"""The features checklist and its coverage page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.features import Feature, Mark, load_features, main, render, scan_file, unknown_marks
from tools.workspace import PACKAGES, ROOT


def ids(text: str) -> list[tuple[str, str]]:
    return [(mark.feature, mark.test) for mark in scan_file(text, "test_x.py")]


def test_marks_on_functions_are_read() -> None:
    text = "import pytest\n@pytest.mark.covers('F1.1', 'F1.2')\ndef test_a(): ...\ndef test_b(): ...\n"
    assert ids(text) == [("F1.1", "test_a"), ("F1.2", "test_a")]


def test_a_test_that_is_left_out_at_a_push_proves_nothing() -> None:
    text = "@pytest.mark.covers('F1.1')\n@pytest.mark.nightly('test_b')\ndef test_a(): ...\n"
    assert ids(text) == [] and ids(text.replace("nightly", "sample")) == [("F1.1", "test_a")]


def test_a_bare_covers_decorator_counts() -> None:
    assert ids("covers = object\n@covers('F1.1')\ndef test_a(): ...\n") == [("F1.1", "test_a")]


def test_marks_on_a_class_and_on_the_module_reach_their_tests() -> None:
    text = (
        "pytestmark = [pytest.mark.covers('F1.1')]\n"
        "@pytest.mark.covers('F1.2')\nclass TestA:\n    def test_b(self): ...\n    def helper(self): ...\n"
        "def test_c(): ...\n"
    )
    assert ids(text) == [("F1.1", "TestA.test_b"), ("F1.2", "TestA.test_b"), ("F1.1", "test_c")]


def test_marks_on_parameters_are_read() -> None:
    text = "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.covers('F1.3'))])\ndef test_a(x): ...\n"
    assert ids(text) == [("F1.3", "test_a")]


def test_an_id_that_is_not_a_literal_is_refused() -> None:
    with pytest.raises(ValueError, match="literal"):
        ids("@pytest.mark.covers(NAME)\ndef test_a(): ...\n")


FEATURE = Feature("F1.1", "cache", "1. cache", "a | b", "S0", "shows")


def test_a_mark_with_an_unknown_id_is_found() -> None:
    mark = Mark("F9.99", "test_x.py", 3, "test_a")
    assert unknown_marks([FEATURE], [mark]) == [mark]


def test_the_page_names_the_tests_of_a_row_and_escapes_bars() -> None:
    page = render([FEATURE], [Mark("F1.1", "packages/cache/tests/test_x.py", 3, "test_a")])
    assert "| F1.1 | a \\| b | yes | `test_a` (test_x.py) |" in page
    assert "| cache | 1 | 1 | 1 | 1 |" in page


def test_a_row_without_a_test_shows_a_dash() -> None:
    assert "| F1.1 | a \\| b | yes | – |" in render([FEATURE], [])


def test_the_checklist_has_unique_ids_and_known_packages() -> None:
    features = load_features()
    assert len(features) == len({feature.id for feature in features}) > 400
    assert {feature.package for feature in features} == set(PACKAGES)
    assert all(re.fullmatch(r"F\d[a-h]?\.\d+[a-z]?", feature.id) for feature in features)


def test_an_outdated_page_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "features.toml", tmp_path / "docs" / "features.toml")
    tests = tmp_path / "packages" / "cache" / "tests"
    tests.mkdir(parents=True)
    assert main(["page", "--check"], tmp_path) == 1  # there is none
    assert main(["page"], tmp_path) == 0
    assert main(["page", "--check"], tmp_path) == 0
    (tests / "test_x.py").write_text("import pytest\n@pytest.mark.covers('F7.1')\ndef test_a(): ...\n")
    assert main(["page", "--check"], tmp_path) == 1
    (tests / "test_x.py").write_text("import pytest\n@pytest.mark.covers('F7.999')\ndef test_a(): ...\n")
    assert main(["page"], tmp_path) == 1
