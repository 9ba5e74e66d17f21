"""The example in docs/architecture.md is what the stages print today."""

from __future__ import annotations

import os
import subprocess
import sys

from tools.architecture_example import PAGE, updated_page
from tools.workspace import PACKAGES, ROOT


def test_the_page_shows_what_the_stages_print() -> None:
    sources = [str(ROOT), *(str(ROOT / "packages" / name / "src") for name in PACKAGES)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.architecture_example"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page, done.stdout.removesuffix("\n")) == page, "python -m tools.architecture_example --update"
