"""Which rows of the features checklist are proven by which tests.

    python -m tools.features page [--check]      write (or compare) docs/coverage-of-features.md
    python -m tools.features list F3.7           the tests that prove a row

The checklist is docs/features.toml. A test names the rows it proves with `@pytest.mark.covers("F1.17", ...)`; the marks
are read from the syntax trees of the test files, so nothing needs to be installed or run. A mark with an unknown id is
an error. That a listed test passes is the business of the test run.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import PACKAGES, ROOT

PAGE = Path("docs") / "coverage-of-features.md"


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the checklist."""

    id: str
    package: str
    section: str
    feature: str
    seed: str
    test: str

    @property
    def required(self) -> bool:
        """Rows of the first specification must work; the others are built where they are needed."""
        return not self.seed.startswith("-")


@dataclass(frozen=True, slots=True)
class Mark:
    """One test that says which row it proves."""

    feature: str
    path: str
    line: int
    test: str


def load_features(root: Path = ROOT) -> list[Feature]:
    """Read docs/features.toml."""
    data = tomllib.loads((root / "docs" / "features.toml").read_text(encoding="utf-8"))
    return [Feature(**row) for row in data["feature"]]


def mark_ids(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The (line, id) pairs of every `...covers("...")` call below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name == "covers":
                for argument in call.args:
                    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                        raise ValueError(f"line {call.lineno}: covers(...) takes literal ids")
                    yield call.lineno, argument.value


def is_nightly(decorator: ast.expr) -> bool:
    """Whether a test is left out at a push, so that it proves nothing there."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.nightly")


def scan_file(text: str, path: str) -> Iterator[Mark]:
    """The marks of one test file: on functions, on classes, and on the whole module (`pytestmark`)."""

    def visit(body: Iterable[ast.stmt], prefix: str, inherited: tuple[str, ...]) -> Iterator[Mark]:
        body = list(body)
        for statement in body:
            if isinstance(statement, ast.Assign):
                targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
                if "pytestmark" in targets:
                    inherited += tuple(identity for _, identity in mark_ids(statement.value))
        for statement in body:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                own = tuple(identity for decorator in statement.decorator_list for _, identity in mark_ids(decorator))
                if isinstance(statement, ast.ClassDef):
                    yield from visit(statement.body, f"{prefix}{statement.name}.", inherited + own)
                elif statement.name.startswith("test") and not any(map(is_nightly, statement.decorator_list)):
                    for identity in dict.fromkeys(inherited + own):
                        yield Mark(identity, path, statement.lineno, prefix + statement.name)

    yield from visit(ast.parse(text).body, "", ())


def scan(root: Path = ROOT) -> list[Mark]:
    """The marks of all tests of the repository."""
    folders = [root / "packages" / name / "tests" for name in PACKAGES]
    folders += [root / "tools" / "tests", root / "tools" / "integration"]
    marks: list[Mark] = []
    for folder in folders:
        for path in sorted(folder.rglob("test_*.py")):
            marks += scan_file(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    return marks


def unknown_marks(features: list[Feature], marks: list[Mark]) -> list[Mark]:
    """Marks whose id is not in the checklist."""
    known = {feature.id for feature in features}
    return [mark for mark in marks if mark.feature not in known]


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def render(features: list[Feature], marks: list[Mark]) -> str:
    """The coverage page."""
    tests: dict[str, list[Mark]] = {feature.id: [] for feature in features}
    for mark in marks:
        tests[mark.feature].append(mark)
    lines = [
        "# Coverage of features",
        "",
        "Which rows of the checklist (`docs/features.toml`) are proven by a test. Written by",
        "`python -m tools.features page` from the tests' `covers` marks; `nox -s lint` fails while it is out of date.",
        "A row without a test is not claimed to work. *Required* rows come from the first specification.",
        "",
        "| package | rows | proven | required | required and proven |",
        "|---|---:|---:|---:|---:|",
    ]
    for package in PACKAGES:
        rows = [feature for feature in features if feature.package == package]
        required = [feature for feature in rows if feature.required]
        proven = sum(bool(tests[feature.id]) for feature in rows)
        required_proven = sum(bool(tests[feature.id]) for feature in required)
        lines.append(f"| {package} | {len(rows)} | {proven} | {len(required)} | {required_proven} |")
    section = None
    for feature in features:
        if feature.section != section:
            section = feature.section
            lines += ["", f"## {section}", "", "| row | behaviour | required | tests |", "|---|---|:---:|---|"]
        named = "<br>".join(f"`{mark.test}` ({Path(mark.path).name})" for mark in tests[feature.id]) or "–"
        lines.append(f"| {feature.id} | {cell(feature.feature)} | {'yes' if feature.required else ''} | {named} |")
    return "\n".join(lines) + "\n"


def write_page(root: Path, check: bool) -> int:
    """Write the page, or say whether the committed one is up to date."""
    features, marks = load_features(root), scan(root)
    unknown = unknown_marks(features, marks)
    for mark in unknown:
        print(f"{mark.path}:{mark.line}: {mark.test} covers {mark.feature!r}, which docs/features.toml does not list")
    if unknown:
        return 1
    text, page = render(features, marks), root / PAGE
    if check and (not page.exists() or page.read_text(encoding="utf-8") != text):
        print(f"{PAGE.as_posix()} is out of date: run `python -m tools.features page` and commit the result")
        return 1
    if not check:
        page.write_text(text, encoding="utf-8")
    proven = len({mark.feature for mark in marks})
    print(f"features: {proven} of {len(features)} rows proven by a test")
    return 0


def main(arguments: list[str], root: Path = ROOT) -> int:
    """The two commands of the module's docstring."""
    if arguments[:1] == ["page"]:
        return write_page(root, check="--check" in arguments)
    if arguments[:1] == ["list"] and len(arguments) == 2:
        for mark in scan(root):
            if mark.feature == arguments[1]:
                print(f"{mark.path}:{mark.line}: {mark.test}")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
