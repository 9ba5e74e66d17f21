"""The API snapshots: what a snapshot says and what counts as a change."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tools.check_api import describe, main, parts_of
from tools.workspace import PUBLIC_MODULES, import_name


class Colour(enum.Enum):
    """An enumeration."""

    RED = "red"


@dataclass(frozen=True, slots=True)
class Point:
    """A record."""

    x: int
    y: float = 0.5

    @property
    def norm(self) -> float:
        """Length."""
        return abs(self.x)

    @staticmethod
    def origin() -> Point:
        """Zero."""
        return Point(0)

    def _hidden(self) -> None: ...


class Refused(ValueError):
    """An error."""


def scale(point: Point, factor: float = 2.0, *, names: list[str] | None = None) -> Point:
    """A function."""
    return point


def make_module(**members: object) -> ModuleType:
    module = ModuleType("sample")
    vars(module).update(members, __all__=list(members))
    return module


def test_a_snapshot_lists_functions_classes_fields_and_constants() -> None:
    text = describe(make_module(Point=Point, scale=scale, Colour=Colour, Refused=Refused, LIMIT=3))
    assert text.splitlines() == [
        "class Colour(Enum):",
        "    RED = 'red'",
        "",
        "LIMIT: int",
        "",
        "class Point:",
        "    (x: int, y: float = 0.5) -> None",
        "    norm: float",
        "    staticmethod origin() -> Point",
        "",
        "class Refused(ValueError):",
        "",
        "def scale(point: Point, factor: float = 2.0, *, names: list[str] | None = None) -> Point",
    ]


def test_a_package_without_all_is_refused() -> None:
    with pytest.raises(ValueError, match="__all__"):
        describe(ModuleType("sample"))


def test_memory_addresses_do_not_get_into_a_snapshot() -> None:
    def f(callback: object = scale, marker: object = object()) -> None: ...

    assert "0x" not in describe(make_module(f=f))


def test_a_changed_signature_fails_until_the_snapshot_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.check_api.PUBLIC_MODULES", {})
    monkeypatch.setitem(sys.modules, "aotkit_cache", make_module(scale=scale))
    assert main(["cache", "--update"], tmp_path) == 0
    assert main(["cache"], tmp_path) == 0

    def changed(point: Point) -> Point:
        return point

    monkeypatch.setitem(sys.modules, "aotkit_cache", make_module(scale=changed))
    assert main(["cache"], tmp_path) == 1
    assert "+def scale(point: Point) -> Point" in capsys.readouterr().out


def test_a_package_without_a_snapshot_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.check_api.PUBLIC_MODULES", {})
    monkeypatch.setitem(sys.modules, "aotkit_cache", make_module(scale=scale))
    assert main(["cache"], tmp_path) == 1


@pytest.mark.parametrize("folder", PUBLIC_MODULES)
def test_a_root_is_short_and_public_modules_say_what_is_public(folder: str) -> None:
    root, *modules = (
        importlib.import_module(part.replace(folder, import_name(folder), 1)) for part in parts_of(folder)
    )
    assert len(root.__all__) <= (52 if folder == "aotkit" else 15)  # aotkit's root also has torch's own names
    for module in modules:
        assert module.__doc__ and module.__all__ and set(module.__all__) <= set(dir(module))


def test_each_public_module_has_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aotkit_cache", make_module(scale=scale))
    monkeypatch.setitem(sys.modules, "aotkit_cache.stores", make_module(Point=Point))
    assert main(["cache", "--update"], tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.sealed.txt", "cache.stores.txt", "cache.txt"]
