"""Copy the files that several packages share from tools/shared into each of them, and the license into all.

    python -m tools.vendor [--check]

A package of their own would be one more release and one more pin for eight others, for some hundred lines on the
standard library. So each is written once, in tools/shared, and copied; `--check` compares byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, load_package

__all__ = ["USERS", "copies", "main"]

SHARED = ROOT / "tools" / "shared"

#: Which packages have a copy.
USERS: dict[str, tuple[str, ...]] = {
    "_observer.py": (
        "aot-trace", "aotkit", "cache", "cudagraphs", "inductor-lower", "partition", "runtime-wrappers",
    ),
    "_notices.py": ("aotkit", "cache", "partition"),
    "_records.py": ("aot-trace", "cudagraphs", "functionalize", "inductor-lower", "partition", "runtime-wrappers"),
    "_kept_calls.py": ("aot-trace", "inductor-lower", "partition"),
    "_size_text.py": ("aotkit", "inductor-lower", "runtime-wrappers"),
    "_tensors_alike.py": ("aotkit", "cudagraphs"),
    "_user_kernels.py": ("aotkit", "inductor-lower", "partition"),
    "_dynamo_frames.py": ("aotkit", "runtime-wrappers"),
    "_float_sizes.py": ("aotkit", "functionalize", "inductor-lower"),
}  # fmt: skip


def copies() -> list[tuple[Path, Path]]:
    """Each original with each of its copies."""
    shared = [(SHARED / name, load_package(user).source / name) for name, users in USERS.items() for user in users]
    return shared + [(ROOT / "LICENSE", load_package(name).path / "LICENSE") for name in PACKAGES]


def main(arguments: list[str]) -> int:
    """Write the copies that differ; with `--check`, name them and return 1."""
    changed = [
        (original, copy)
        for original, copy in copies()
        if not copy.exists() or copy.read_bytes() != original.read_bytes()
    ]
    for original, copy in changed:
        if "--check" in arguments:
            print(f"{copy.relative_to(ROOT)} differs from {original.relative_to(ROOT)}")
        else:
            copy.write_bytes(original.read_bytes())
            print(f"wrote {copy.relative_to(ROOT)}")
    if changed and "--check" in arguments:
        print("Change the file in tools/shared and run `nox -s vendor`.")
        return 1
    print(f"vendored files: {len(copies())} copies of {len(USERS) + 1} files are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
