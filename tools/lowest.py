"""The lowest versions of libraries that the packages declare, as requirements: what `nox -s lowest` installs.

Left out are our own packages, and torch, whose versions are run by `nox -s compat`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, folder_of_distribution, lowest_allowed, split_requirement

__all__ = ["declared", "lowest_requirements"]


def declared(root: Path = ROOT) -> Mapping[str, frozenset[str]]:
    """Per library the lowest versions that packages and their extras allow.

    Raises:
        ValueError: a package takes a library in any version, which nobody has tried.
    """
    found: dict[str, set[str]] = {}
    for folder in PACKAGES:
        project = tomllib.loads((root / "packages" / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project.get("dependencies", ()), *(each for extra in extras for each in extra)]:
            name, specifier = split_requirement(requirement)
            lowest = lowest_allowed(specifier)
            if lowest is None:
                raise ValueError(f"{folder} requires {requirement!r}, which names no lowest version")
            if name != "torch" and folder_of_distribution(name) is None:
                found.setdefault(name, set()).add(lowest)
    return {name: frozenset(versions) for name, versions in found.items()}


def lowest_requirements(root: Path = ROOT) -> list[str]:
    """``name==3.12.*`` for each library: the last repair of the lowest minor version.

    Raises:
        ValueError: two packages name different lowest versions.
    """
    found = []
    for name, versions in sorted(declared(root).items()):
        if len(versions) > 1:
            raise ValueError(f"packages name several lowest versions of {name}: {', '.join(sorted(versions))}")
        (version,) = versions
        found.append(f"{name}=={'.'.join([*version.split('.'), '0'][:2])}.*")
    return found
