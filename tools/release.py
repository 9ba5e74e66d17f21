"""What a tag releases: one package, whose version, changelog and archives must agree.

python -m tools.release partition-v0.2.0 --check            # version and changelog
python -m tools.release partition-v0.2.0 DIST UPLOAD        # and copy its wheel and sdist from DIST to UPLOAD
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, Package, load_package, lowest_allowed

__all__ = ["archives_of", "main", "problems", "read_tag"]


def read_tag(tag: str) -> tuple[str, str]:
    """Package and version of a tag. Raises ``ValueError`` for one that names no package or no version."""
    name, _, version = tag.rpartition("-v")
    if name not in PACKAGES or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ValueError(f"{tag!r} is no tag of a release: <package>-v<version>, such as partition-v0.2.0")
    return name, version


def problems(package: Package, version: str, changelog: str) -> list[str]:
    """Why a version can't be released."""
    found = []
    if package.version != version:
        found.append(f"the version of {package.name} is {package.version}, and the tag says {version}")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (.+)$", changelog, re.MULTILINE)
    if heading is None:
        found.append(f"its changelog has no heading `## [{version}] - <date>`")
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading.group(1)):
        found.append(f"its changelog has no date for {version}, but {heading.group(1)!r}")
    for sibling, specifier in package.siblings().items():
        lowest = lowest_allowed(specifier)
        if lowest is None or "<" not in specifier:
            found.append(f"it takes any {sibling}: give a range, not {specifier!r}")
    return found


def archives_of(package: Package, version: str, folder: Path) -> list[Path]:
    """Its wheel and its sdist in ``folder``. Raises ``FileNotFoundError`` if one of them is not there."""
    base = f"{package.distribution.replace('-', '_')}-{version}"
    paths = [folder / f"{base}-py3-none-any.whl", folder / f"{base}.tar.gz"]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no {path.name}")
    return paths


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if the tag can't be released."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tag")
    parser.add_argument("dist", nargs="?", type=Path, help="where the archives are")
    parser.add_argument("upload", nargs="?", type=Path, help="gets those of the package")
    parser.add_argument("--check", action="store_true", help="look at version and changelog only")
    given = parser.parse_args(arguments)
    try:
        name, version = read_tag(given.tag)
        package = load_package(name)
        found = problems(package, version, (package.path / "CHANGELOG.md").read_text(encoding="utf-8"))
        if not given.check and not found:
            if given.dist is None or given.upload is None:
                parser.error("DIST and UPLOAD, or --check")
            paths = archives_of(package, version, given.dist)
            given.upload.mkdir(parents=True, exist_ok=True)
            for path in paths:
                shutil.copy(path, given.upload)
    except (ValueError, FileNotFoundError) as error:
        found = [str(error)]
    print("\n".join(found or [f"{given.tag} can be released from {ROOT.name}"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
