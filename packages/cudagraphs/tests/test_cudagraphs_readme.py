"""The README's example runs."""

import re
import runpy
from pathlib import Path


def test_the_readme_example_runs(capsys, tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        script = tmp_path / "example.py"
        script.write_text(example)
        runpy.run_path(str(script))
    assert "2 recordings in 1 pools" in capsys.readouterr().out
