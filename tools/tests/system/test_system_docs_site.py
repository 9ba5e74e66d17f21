"""The built documentation site in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


def text_of(dom: str) -> str:
    """The words of a page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", dom))


def test_the_start_page_shows_title_and_navigation_and_scripts_ran(site: str, browse: Callable[..., str]) -> None:
    dom = browse(f"{site}/index.html")
    assert "<title>aotkit</title>" in dom
    text = text_of(dom)
    for words in ("A compile backend for PyTorch that you can read", "Architecture", "inductor-lower", "Contributing"):
        assert words in text
    assert re.search(r'<html[^>]*class="[^"]*\bjs\b', dom), "the theme replaces the class no-js when its script runs"


def test_the_coverage_page_lists_rows_of_every_package(site: str, browse: Callable[..., str]) -> None:
    dom = browse(f"{site}/coverage-of-features.html")
    assert "<title>Coverage of features - aotkit</title>" in dom
    text = text_of(dom)
    for identity in ("F1.1", "F2.1", "F3.1", "F4.1", "F5a.1", "F6.1", "F7.1", "F8.1"):
        assert re.search(rf"\b{re.escape(identity)}\b", text), identity


def test_a_package_page_shows_its_readme_and_changes(site: str, browse: Callable[..., str]) -> None:
    text = text_of(browse(f"{site}/packages/cache.html"))
    assert "aotkit-cache" in text and "0.1.0" in text


def test_the_start_page_can_be_drawn(site: str, browse: Callable[..., str], tmp_path: Path) -> None:
    picture = tmp_path / "start.png"
    browse(f"{site}/index.html", screenshot=picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
