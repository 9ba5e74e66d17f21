"""What a new user does in one sitting, by copying from the site: train, look at a report, serve from another process.

Each step is a process of its own in a folder of the user's, with a cache that is empty at first, and the program is
what stands in the pages; only lines that show the test what happened are added.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import aotkit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.site_blocks import blocks_of, program_of  # noqa: E402

DOCS = ROOT / "docs"


def python_blocks(page: str) -> list[str]:
    """The blocks of a page that a reader copies."""
    return [block.text for block in blocks_of(DOCS / page) if block.language == "python"]


def environment(home: Path) -> dict[str, str]:
    """A user's: nothing set that has to do with aotkit or Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTKIT_", "PYTHON", "TORCH"))}
    return {**kept, "HOME": str(home), "AOTKIT_CACHE_DIR": str(home / "cache"), "OMP_NUM_THREADS": "1"}


def run(program: str, folder: Path, **variables: str) -> str:
    """What a program prints, also on standard error if variables are set."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    env = environment(folder) | variables
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr * bool(variables)


def test_aotkit_is_the_installed_wheel() -> None:
    assert not Path(str(aotkit.__file__)).resolve().is_relative_to(ROOT / "packages")


def test_a_new_user_trains_a_model_sees_a_report_and_finds_both_again(tmp_path: Path) -> None:
    first = run(program_of(DOCS / "tutorial.md"), tmp_path)
    before, _, after = first.splitlines()[0].removeprefix("loss ").partition(" -> ")
    assert float(after) < float(before) / 2
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for words in ("eager’s speed", "kernels, in ", "Memory over one step", "LayerNorm", "Nothing runs eagerly"):
        assert words in page
    assert "2 compiled graphs, " in first and "seconds per stage" in first
    assert (tmp_path / "step.aotkit").stat().st_size > 0 and (tmp_path / "model.aotkit").stat().st_size > 0
    again = run("\n".join(python_blocks("tutorial.md")[:3]), tmp_path, TORCH_LOGS="aotkit")
    for kind in ("forward", "backward"):
        assert f"{kind} loaded from the cache" in again  # as the page says
    assert first.splitlines()[0] in again


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[list[float]], list[list[float]]]]:
    """The address of a server in another process, and rows with what the model gives for them."""
    build, serve, *_ = python_blocks("howto/serve.md")
    shown = "import json\nrows = torch.randn(5, 16)\nprint(json.dumps([rows.tolist(), model(rows).tolist()]))\n"
    given, wanted = json.loads(run(f"{build}\n{shown}", tmp_path))
    program = f"{serve}\nprint(server.server_port, flush=True)\nserver.serve_forever()\n"
    (tmp_path / "server.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "server.py"]
    env = environment(tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", given, wanted
        finally:
            process.terminate()


def test_a_saved_model_is_served_from_another_process(
    served: tuple[str, list[list[float]], list[list[float]]],
) -> None:
    address, rows, wanted = served
    with urlopen(Request(address, data=json.dumps(rows).encode()), timeout=60) as answer:
        got = json.load(answer)
    assert len(got) == 5
    for line, right in zip(got, wanted, strict=True):
        assert line == pytest.approx(right, rel=1e-5, abs=1e-6)
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(address, data=b"[[1.0, 2.0]]"), timeout=60)
    with refused.value as answer:
        assert answer.code == 400 and "dimension 1" in answer.read().decode()
