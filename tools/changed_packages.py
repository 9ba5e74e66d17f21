"""Name the packages that a change concerns: the changed ones and everything that depends on them.

    python -m tools.changed_packages <base revision>

Prints a JSON list for a workflow's matrix. A change outside `packages/` that can alter a package's build or tests
(root configuration, noxfile, constraints) concerns all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

from tools.workspace import PACKAGES, ROOT, Package, dependents, load_packages

#: Files outside `packages/` on which every package's tests depend.
SHARED_FILES = ("pyproject.toml", "noxfile.py", "tools/constraints.txt", "tools/workspace.py", "tools/isolation/")


def affected(paths: Iterable[str], packages: dict[str, Package]) -> tuple[str, ...]:
    """The packages to test after these files (relative to the root, with `/`) changed."""
    changed: set[str] = set()
    for path in paths:
        if path.startswith(SHARED_FILES):
            return PACKAGES
        parts = path.split("/")
        if parts[0] == "packages" and len(parts) > 1 and parts[1] in packages:
            changed.add(parts[1])
    for folder in tuple(changed):
        changed.update(dependents(folder, packages))
    return tuple(name for name in PACKAGES if name in changed)


def changed_files(base: str) -> list[str]:
    """Files that differ between the merge base with `base` and the working tree's HEAD."""
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def main(arguments: list[str]) -> int:
    """Print the JSON list."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(json.dumps(affected(changed_files(arguments[0]), load_packages())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
