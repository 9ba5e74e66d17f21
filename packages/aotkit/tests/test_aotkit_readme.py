"""The README's example runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_example_in_the_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
