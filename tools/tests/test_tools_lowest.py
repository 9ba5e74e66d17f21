"""The lowest versions of libraries that packages declare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.lowest import declared, lowest_requirements
from tools.workspace import PACKAGES, ROOT


def repository(folder: Path, **requirements: str) -> Path:
    """Packages that declare nothing, but for those that are given."""
    for name in PACKAGES:
        lines = requirements.get(name.replace("-", "_"), "")
        path = folder / "packages" / name / "pyproject.toml"
        path.parent.mkdir(parents=True)
        path.write_text(f'[project]\nname = "{name}"\n{lines}\n')
    return folder


def test_requirements_and_extras_are_read_but_for_torch_and_siblings(tmp_path: Path) -> None:
    root = repository(
        tmp_path,
        cache='dependencies = ["torch>=2.11,<2.16", "aotkit-functionalize>=0.1", "Some_Name>=3.12.1,<4"]\n'
        'optional-dependencies.more = ["other>=5"]',
    )
    assert lowest_requirements(root) == ["other==5.0.*", "some-name==3.12.*"]


@pytest.mark.parametrize(
    ("cache", "partition", "message"),
    [("some>=1.1", "some>=1.2", "several lowest versions of some: 1.1, 1.2"), ("some", "some>=1", "no lowest version")],
)
def test_what_can_not_be_tried_in_one_run_is_an_error(cache: str, partition: str, message: str, tmp_path: Path) -> None:
    root = repository(tmp_path, cache=f'dependencies = ["{cache}"]', partition=f'dependencies = ["{partition}"]')
    with pytest.raises(ValueError, match=message):
        lowest_requirements(root)


def test_what_is_pinned_for_the_other_tests_is_not_below_the_lowest() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "tools" / "constraints.txt").read_text(), re.MULTILINE))
    for name, versions in declared().items():
        at = {key.lower().replace("_", "-"): value for key, value in pinned.items()}[name]
        assert all(numbers(at) >= numbers(version) for version in versions), name


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers."""
    return tuple(map(int, version.split(".")))
