"""The example in docs/architecture.md is what the stages print today."""

from __future__ import annotations

import os
import sys
from typing import Any

from tools.architecture_example import PAGE, updated_page
from tools.workspace import PACKAGES, ROOT


def test_the_page_shows_what_the_stages_print(forked: Any) -> None:
    sources = [str(ROOT), *(str(ROOT / "packages" / name / "src") for name in PACKAGES)]
    command = [sys.executable, "-m", "tools.architecture_example"]
    done = forked(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)})
    assert done.returncode == 0, done.stderr
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page, done.stdout.removesuffix("\n")) == page, "python -m tools.architecture_example --update"
