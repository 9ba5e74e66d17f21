"""No modules import each other in a circle, not even for type checkers; what a circle is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_circles import circles, import_graph
from tools.workspace import PACKAGES, load_package


@pytest.mark.parametrize("typing", [False, True], ids=["run", "types"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str, typing: bool) -> None:
    assert circles(import_graph(load_package(package).source, typing)) == []


def write(folder: Path, **files: str) -> Path:
    """A package `pack` of these modules; `a__b` is the module `a.b`."""
    for name, text in files.items():
        path = folder / "pack" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return folder / "pack"


@pytest.mark.parametrize(
    "back",
    [
        "from .one import f\n",
        "from . import one\n",
        "from pack.one import f\n",
        "import pack.one\n",
        "def g():\n    from .one import f\n    return f\n",
        "try:\n    from .one import f\nexcept ImportError:\n    f = None\n",
    ],
)
def test_a_planted_circle_is_found_however_it_is_written(tmp_path: Path, back: str) -> None:
    source = write(tmp_path, one="from .two import g\n", two=back, three="from .one import f\n")
    assert circles(import_graph(source, typing=False)) == [["one", "two"]]


def test_a_circle_through_folders_is_found(tmp_path: Path) -> None:
    source = write(tmp_path, low__one="from ..high.two import g\n", high__two="from ..low import one\n")
    assert circles(import_graph(source, typing=False)) == [["high.two", "low.one"]]


def test_imports_for_type_checkers_are_told_apart(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import f\n"
    source = write(tmp_path, one="from .two import g\n", two=text)
    assert circles(import_graph(source, typing=False)) == []
    assert circles(import_graph(source, typing=True)) == [["one", "two"]]


def test_what_several_import_is_no_circle(tmp_path: Path) -> None:
    source = write(tmp_path, one="from . import two, three\n", two="from .three import x\n", three="x = 1\n")
    assert circles(import_graph(source, typing=True)) == []
