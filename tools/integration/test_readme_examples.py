"""Every Python example of every README and of every page of the site runs as it stands, each page in a process of its
own outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from tools.site_blocks import pages, program_of  # noqa: E402
from tools.warm_python import COMPILER  # noqa: E402

HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
READMES = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
#: Their programs take several seconds, and do what other tests do as well: these are left to the nightly run.
LONG = [
    *(ROOT / "docs" / "howto" / f"{name}.md" for name in ("flex-attention", "generate", "hugging-face", "lightning")),
    ROOT / "docs" / "tutorial.md",  # a new user runs it
]

#: Each program in a process of its own, which has torch and others imported, what a compile imports of it, and nothing
#: of ours.
EACH_BY_ITSELF = """
import contextlib, gc, importlib, os, runpy, sys, traceback
import torch, torch._dynamo, llvmlite.binding, transformers

for name in sys.argv.pop(1).split(","):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # which empties the processor's caches to measure them
gc.freeze()  # a million objects, that each program would look through
gc.set_threshold(50_000, 20, 20)
for path in sys.argv[1:]:
    process = os.fork()
    if process == 0:
        os.chdir(os.path.dirname(path))
        sys.argv[:], sys.stdout = [path], sys.stderr
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        sys.exit(f"{path} failed")
print(len(sys.argv) - 1, "ran")
"""


def test_all_nine_readmes_are_found() -> None:
    assert len(READMES) == 9


@pytest.mark.sample(1)
@pytest.mark.parametrize("long", [False, True])
def test_the_examples_of_every_page_run(long: bool, tmp_path: Path) -> None:
    programs = []
    for page in pages():
        if (page in LONG) != long:
            continue
        program = program_of(page)
        assert program or page not in (*READMES, *HOWTOS), f"{page.relative_to(ROOT)} has no Python example"
        if not program:
            continue
        folder = tmp_path / page.parent.name / page.stem
        folder.mkdir(parents=True)
        programs.append(folder / "example.py")
        programs[-1].write_text(program, encoding="utf-8")
    assert long or len(programs) >= len(READMES) + len(HOWTOS) + 4 - len(LONG)
    of_torch = ",".join(name for name in COMPILER if name.startswith("torch."))
    command = [sys.executable, "-c", EACH_BY_ITSELF, of_torch, *map(str, programs)]
    # What torch keeps of an earlier run, it would find by the names and lines of the programs.
    kept = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=kept)
    assert (done.returncode, done.stdout) == (0, f"{len(programs)} ran\n"), done.stderr[-8000:]
