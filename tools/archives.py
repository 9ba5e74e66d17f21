"""What stands in the archives that are published: every wheel, and every sdist, which is made here.

    python -m tools.archives DIST WHEEL ..

Makes an sdist of each package, and of each sdist a wheel, which must hold the same files as the wheel that was given.
What is published is put into the folder DIST, which is made anew: the wheels and the sdists.
It runs where hatchling is, and needs nothing else.
"""

from __future__ import annotations

import email
import shutil
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, Package, load_packages

__all__ = ["main", "problems_of_metadata", "problems_of_sdist", "problems_of_wheel"]

#: Fields that a page on PyPI is made of.
WANTED = ("Summary", "License-Expression", "License-File", "Project-URL", "Classifier", "Keywords", "Requires-Python")


def problems_of_wheel(path: Path) -> list[str]:
    """What is missing in a wheel, or should not be there."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (described,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = problems_of_metadata(email.message_from_bytes(archive.read(described)))
        home = described.removesuffix("/METADATA")
        licensed = f"{home}/licenses/LICENSE"
        if licensed not in names or archive.read(licensed) != (ROOT / "LICENSE").read_bytes():
            found.append("holds no LICENSE, or another one")
    if not any(name.endswith("/py.typed") for name in names):
        found.append("holds no py.typed")
    found += [f"holds {name}" for name in names if "/tests/" in name or "__pycache__" in name]
    return [f"{path.name} {problem}" for problem in found]


def problems_of_sdist(path: Path) -> list[str]:
    """The same for an sdist."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        root = archive.getnames()[0].partition("/")[0]
        member = archive.extractfile(f"{root}/PKG-INFO")
        assert member is not None
        found = problems_of_metadata(email.message_from_bytes(member.read()))
    found += [f"holds no {name}" for name in sorted({"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} - names)]
    return [f"{path.name} {problem}" for problem in found]


def problems_of_metadata(described: Message) -> list[str]:
    """Fields that are missing, or empty."""
    found = [f"has no {field}" for field in WANTED if not described.get(field)]
    if described.get("Description-Content-Type") != "text/markdown" or not described.get_payload():
        found.append("has no description")
    if described["Name"] == "aotkit" and "cuda" not in described.get_all("Provides-Extra", []):
        found.append("has no extra 'cuda'")
    return found


def build_sdist(package: Package, folder: Path) -> Path:
    """The sdist of a package, in ``folder``."""
    from hatchling.builders.sdist import SdistBuilder

    (made,) = SdistBuilder(str(package.path)).build(directory=str(folder), versions=["standard"])
    return Path(made)


def wheel_of_sdist(sdist: Path, folder: Path) -> Path:
    """The wheel that is made of an unpacked sdist, as by whoever installs it where there is no wheel."""
    from hatchling.builders.wheel import WheelBuilder

    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **safely)  # type: ignore[arg-type]
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    (made,) = WheelBuilder(str(unpacked)).build(directory=str(folder), versions=["standard"])
    return Path(made)


def files_of(wheel: Path) -> set[str]:
    """The names of its files."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def main(arguments: list[str]) -> int:
    """Check the wheels that are named, and an sdist of each package; returns 1 if something is wrong."""
    packages, (dist, *wheels) = load_packages(), map(Path, arguments)
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel, dist)
    found = [problem for wheel in wheels for problem in problems_of_wheel(wheel)]
    for name in PACKAGES:
        with tempfile.TemporaryDirectory(prefix="aotkit-sdist-") as folder:
            sdist = build_sdist(packages[name], Path(folder))
            found += problems_of_sdist(sdist)
            shutil.copy(sdist, dist)
            again = wheel_of_sdist(sdist, Path(folder) / "unpacked")
            same = [wheel for wheel in wheels if wheel.name == again.name]
            if not same or files_of(same[0]) != files_of(again):
                found.append(f"the wheel made of {sdist.name} is not the one that was built")
    print("\n".join(found or [f"archives: {len(wheels)} wheels and {len(PACKAGES)} sdists are complete"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
