"""What is missing in an archive is told; `nox -s wheels` looks at the real ones."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from tools.archives import problems_of_sdist, problems_of_wheel
from tools.workspace import ROOT

COMPLETE = """Metadata-Version: 2.4
Name: aotkit
Summary: a stack
License-Expression: BSD-3-Clause
License-File: LICENSE
Project-URL: Homepage, https://pypi.org/project/aotkit/
Classifier: Typing :: Typed
Keywords: compiler
Requires-Python: >=3.11
Provides-Extra: cuda
Description-Content-Type: text/markdown

# aotkit
"""


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "aotkit-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_without_license_links_or_types_is_told_of(tmp_path: Path) -> None:
    info = "aotkit-0.1.0.dist-info"
    files = {
        "aotkit/py.typed": "",
        f"{info}/METADATA": COMPLETE,
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_text(),
    }
    assert problems_of_wheel(wheel(tmp_path, files)) == []
    bare = {f"{info}/METADATA": "Metadata-Version: 2.4\nName: aotkit\n\n", "aotkit/tests/test_x.py": ""}
    found = "\n".join(problems_of_wheel(wheel(tmp_path, bare)))
    for missing in ("Project-URL", "Classifier", "Keywords", "description", "extra 'cuda'"):
        assert f"has no {missing}" in found
    assert "holds no LICENSE" in found and "holds no py.typed" in found and "holds aotkit/tests/test_x.py" in found


def test_an_sdist_without_license_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "aotkit-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("PKG-INFO", "README.md", "CHANGELOG.md", "pyproject.toml"):
            member = tarfile.TarInfo(f"aotkit-0.1.0/{name}")
            member.size = len(COMPLETE)
            archive.addfile(member, io.BytesIO(COMPLETE.encode()))
    assert problems_of_sdist(path) == ["aotkit-0.1.0.tar.gz holds no LICENSE"]
