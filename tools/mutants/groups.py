"""What is mutated together, and whose tests must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, load_package

__all__ = ["GROUPS", "Group", "package_files", "test_files"]


@dataclass(frozen=True, slots=True)
class Group:
    """Sources that are sampled together. ``folders`` are below the package's source folder, by default all of it."""

    name: str
    package: str
    folders: tuple[str, ...] = ("",)

    def files(self) -> list[Path]:
        """The files that are mutated."""
        source = load_package(self.package).source
        return sorted(file for folder in self.folders for file in (source / folder).rglob("*.py"))


GROUPS = {
    group.name: group
    for group in (
        Group("lowering", "inductor-lower", ("lowering", "ops")),
        Group("loop-passes", "inductor-lower", ("loop_passes", "analysis")),
        Group(
            "kernels", "inductor-lower", ("kernel_ir", "kernel_passes", "memory", "targets/cpu", "targets/interpreter")
        ),
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
