"""The staged documentation and the repository's own text files."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
from pathlib import Path

import pytest

from tools.build_docs import stage, with_pictures, without_relative_links
from tools.site_blocks import Block, blocks_of, pages, quotation_problem
from tools.site_pictures import main as make_pictures
from tools.site_pictures import pictures, read_table
from tools.statements import statements
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
    shutil.copy(ROOT / "SECURITY.md", root)
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
        if "/" in path:
            assert any((root / path).exists() for root in roots), path
        else:  # a bare name is a file that the sentence is about
            assert path in file_names(), path


@functools.cache
def file_names() -> frozenset[str]:
    """Of all files of the repository, but for what is made in it: environments and builds hold a hundred thousand."""
    found = set[str]()
    for _, folders, files in os.walk(ROOT):
        found.update(files)
        folders[:] = [each for each in folders if each != "build" and (each == ".github" or not each.startswith("."))]
    return frozenset(found)


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


QUOTATIONS = [(page, block) for page in pages() for block in blocks_of(page) if block.title]


@pytest.mark.parametrize(("page", "block"), QUOTATIONS, ids=lambda value: getattr(value, "stem", None))
def test_a_quotation_stands_in_its_file(page: Path, block: Block) -> None:
    assert quotation_problem(block, (ROOT / block.title).read_text(encoding="utf-8")) == ""


def test_a_quotation_that_is_wrong_is_found() -> None:
    source = "def f():\n    a = 1  # one\n    b = 2\n"
    assert len(QUOTATIONS) >= 6
    assert quotation_problem(Block("python", "x.py", "def f():\n    ...\n    b = 2\n"), source) == ""
    assert quotation_problem(Block("python", "x.py", "b = 2\na = 1\n"), source) == "a = 1"
    assert quotation_problem(Block("python", "x.py", "a = 2\n"), source) == "a = 2"


def commands() -> list[str]:
    """Every line of a block of shell commands."""
    blocks = (block for page in pages() for block in blocks_of(page) if block.language in ("console", "sh"))
    return [line.partition("  #")[0] for block in blocks for line in block.text.splitlines() if line.strip()]


def test_commands_name_sessions_modules_and_subcommands_that_there_are() -> None:
    import argparse

    from aotkit.cli.main import _parser

    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    lines, seen = commands(), 0
    for line in lines:
        for session in re.findall(r"nox -s \"?(\w+)", line):
            assert session in sessions, line
            seen += 1
        for module in re.findall(r"python -m (tools[.\w]*)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module.replace(".", "/")).is_dir(), (
                line
            )
            seen += 1
        found = re.match(r"aotkit (.+)$", line)
        if found:
            arguments = found.group(1).replace("export all", "export all.cache").split()
            assert isinstance(_parser().parse_args(arguments), argparse.Namespace), line
            seen += 1
    assert seen > 15


def test_the_pictures_are_those_of_the_tables(tmp_path: Path) -> None:
    assert make_pictures(["--check"]) == 0
    assert make_pictures(["--check"], tmp_path) == 1  # there are none
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (row,) = (
        row
        for row in read_table(page, "Figures")
        if row["model"] == "bert" and row["mode"] == "train" and row["backend"] == "aotkit"
    )
    shown = pictures(page)["first-call.svg"]
    assert f">{float(row['first call s']):.1f}<" in shown
    changed = page.replace(f"| bert | train | aotkit | {row['first call s']} |", "| bert | train | aotkit | 77.7 |")
    assert ">77.7<" in pictures(changed)["first-call.svg"]
    with pytest.raises(ValueError, match="no table"):
        read_table(page, "No such heading")


def test_pictures_become_parts_of_a_page_without_their_own_colours() -> None:
    page = with_pictures(
        "a\n\n<!-- picture: pipeline -->\n\n<!-- charts: inference memory -->\n", ROOT / "docs" / "assets"
    )
    assert page.count("<svg") == 4 and "<style>" not in page and "<!--" not in page
    with pytest.raises(FileNotFoundError):
        with_pictures("<!-- charts: nothing -->", ROOT / "docs" / "assets")


def test_the_tutorial_is_read_in_less_than_fifteen_minutes() -> None:
    """200 words a minute, and a line of code in four seconds."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    code = [
        line for block in blocks_of(ROOT / "docs" / "tutorial.md") for line in block.text.splitlines() if line.strip()
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    minutes = len(prose.split()) / 200 + len(code) * 4 / 60
    assert 2 < minutes < 15


def test_names_of_sphinx_roles_become_plain_names() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    shown = hooks.on_page_content(
        "see :func:<code>~.errors.CodegenError</code> and :class:<code>.Call</code>, as in::</p>"
    )
    assert shown == "see <code>CodegenError</code> and <code>Call</code>, as in:</p>"


def test_a_line_of_a_docstring_that_explains_names_explains_one() -> None:
    """The site makes a table of such a section, one name a row: of ``a, b: words`` it takes ``b`` for a type."""
    section, several = re.compile(r"(?:Args|Attributes|Raises):$"), re.compile(r"    \*{0,2}\w+(?:, \*{0,2}\w+)+:")
    found = []
    for path in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        tree = ast.parse(path.read_text())
        for node in (tree, *statements(tree)):
            documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            inside = False
            for line in ((ast.get_docstring(node) if documented else None) or "").splitlines():
                inside = bool(section.match(line)) or (inside and (not line or line.startswith(" ")))
                if inside and several.match(line):
                    found.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert found == []
