"""No modules import each other in a circle, but for a list that only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_circles import circles, import_graph
from tools.workspace import PACKAGES, load_package

#: Modules that are still on a circle, by package. Whoever breaks a circle removes its modules; none is ever added.
LEFT: dict[str, set[str]] = {}
#: The same with imports that only a type checker reads.
LEFT_FOR_TYPES = {
    "functionalize": {"custom_backward", "events", "inputs", "layouts", "overlap", "unfold", "wrap", "writes"},
}


@pytest.mark.parametrize("typing", [False, True], ids=["run", "types"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_is_left_but_those_that_are_listed(package: str, typing: bool) -> None:
    found = circles(import_graph(load_package(package).source, typing))
    on_circles = {module.rpartition(".")[2] for circle in found for module in circle}
    left = (LEFT_FOR_TYPES if typing else LEFT).get(package, set())
    assert not on_circles - left, f"a new circle: {found}"
    assert not left - on_circles, "no longer on a circle: remove them from the list"


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
