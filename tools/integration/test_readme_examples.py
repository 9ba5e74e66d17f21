"""Every Python example of every README runs as it stands, each README in a fresh process outside the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_all_nine_readmes_are_found() -> None:
    assert len(READMES) == 9


@pytest.mark.parametrize("readme", READMES, ids=["root", *(path.parent.name for path in READMES[1:])])
def test_the_examples_of_a_readme_run(readme: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    assert blocks, f"{readme.relative_to(ROOT)} has no Python example"
    program = tmp_path / "example.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
