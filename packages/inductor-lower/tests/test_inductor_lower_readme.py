"""The README's examples run."""

import re
import runpy
from pathlib import Path


def test_the_readme_examples_run(capsys, tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for number, example in enumerate(examples):
        script = tmp_path / f"example{number}.py"
        script.write_text(example)
        runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "1 kernel; 3 of 3 eligible nodes generated" in printed
    assert "i0 i1 // 16 i1 % 16" in printed
