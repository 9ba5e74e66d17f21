"""What is mutated together, and whose tests must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, load_package

__all__ = ["GROUPS", "Group", "package_files", "test_files"]


@dataclass(frozen=True, slots=True)
class Group:
    """Sources that are sampled together. ``folder`` is below the package's source folder, empty for all of it."""

    name: str
    package: str
    folder: str = ""

    def files(self) -> list[Path]:
        """The files that are mutated."""
        return sorted((load_package(self.package).source / self.folder).rglob("*.py"))


GROUPS = {
    group.name: group
    for group in (
        Group("lowering", "inductor-lower", "lowering"),
        Group("schedule", "inductor-lower", "schedule"),
        Group("codegen", "inductor-lower", "codegen"),
        Group("functionalize", "functionalize"),
        Group("runtime-wrappers", "runtime-wrappers"),
        Group("partition", "partition"),
    )
}


def package_files(package: str) -> list[Path]:
    """All sources of a package: what coverage is measured on."""
    return sorted(load_package(package).source.rglob("*.py"))


def test_files(package: str) -> list[Path]:
    """The test files of a package."""
    return sorted((ROOT / "packages" / package / "tests").glob("test_*.py"))
