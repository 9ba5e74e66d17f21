"""The staged documentation and the repository's own text files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.build_docs import stage, without_relative_links
from tools.workspace import PACKAGES, ROOT, load_packages

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_relative_links_of_a_readme_become_plain_words_and_others_stay() -> None:
    text = "see [this](../x.md), [that](https://example.org) and [here](#part)"
    assert without_relative_links(text) == "see this, [that](https://example.org) and [here](#part)"


def test_the_staged_site_holds_every_page_of_its_navigation(tmp_path: Path) -> None:
    stage(ROOT, tmp_path / "docs")
    named = re.findall(r":\s+(\S+\.md)$", (tmp_path / "docs" / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) >= 15
    for page in named:
        assert (tmp_path / "docs" / "pages" / page).is_file(), page


def test_a_package_page_holds_readme_and_changelog(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in PACKAGES:
        (root / "packages" / name).mkdir(parents=True)
        (root / "packages" / name / "README.md").write_text(f"# {name}\n[x](src)\n")
        (root / "packages" / name / "CHANGELOG.md").write_text("# Changelog\n## 0.1.0\n")
    stage(root, tmp_path / "out")
    page = (tmp_path / "out" / "pages" / "packages" / "cache.md").read_text()
    assert page == "# cache\nx\n\n## Changelog\n### 0.1.0\n"


def test_every_link_in_the_readme_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def anchors(page: Path) -> set[str]:
    """What a link to a part of a page may name, as mkdocs makes it of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (
        re.sub(r"[^\w\s-]", "", found).strip().lower() for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[-\s]+", "-", heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_link_of_a_page_leads_to_a_page_and_to_a_heading_of_it(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        other = (page.parent / target).resolve() if target else page
        assert other.is_relative_to(ROOT / "docs") and other.is_file(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


DEEPER = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent.name != "docs"]


@pytest.mark.parametrize("name", ["glossary.md", *DEEPER])
def test_files_that_the_glossary_and_the_how_tos_name_exist(name: str) -> None:
    lower = ROOT / "packages" / "inductor-lower"
    roots = [ROOT, lower, lower / "src" / "aotkit_inductor_lower", *(ROOT / "packages").glob("*/src")]
    for path in re.findall(r"`([\w./-]+(?:/|\.py|\.toml|\.md))`", (ROOT / "docs" / name).read_text()):
        within = "" if "/" in path else "**/"  # a bare name is a file that the sentence is about
        assert any(True for root in roots for _ in root.glob(within + path)), path


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "docs" / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page.relative_to(ROOT / 'docs')}\n" in config, page


def test_the_readme_names_every_package() -> None:
    text = (ROOT / "README.md").read_text()
    for package in load_packages().values():
        assert f"](packages/{package.name})" in text
        assert f"`{package.import_name}`" in text


def test_the_environment_variables_in_the_sources_are_the_documented_ones() -> None:
    page = (ROOT / "docs" / "environment-variables.md").read_text()
    documented = set(re.findall(r"`(AOTKIT_[A-Z_]+)`", page))
    used: set[str] = set()
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        used |= set(re.findall(r"\bAOTKIT_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    assert used == documented


@pytest.mark.parametrize("name", PACKAGES)
def test_torch_is_declared_with_the_supported_range(name: str) -> None:
    ranges = [d for d in load_packages()[name].dependencies if d.startswith("torch")]
    assert ranges == ["torch>=2.11,<2.16"]
