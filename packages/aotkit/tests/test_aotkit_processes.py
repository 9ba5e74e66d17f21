"""Compiled functions in other processes: forked after a compile, spawned, workers of a DataLoader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMON = """
import multiprocessing, os, sys
import torch
import aotkit

SIZE = 1 << 18  # large enough that threads share a kernel

def f(x):
    return (x.sin() * 2 + x).relu().sum(1)

def check(compiled):
    x = torch.arange(float(SIZE)).reshape(512, -1).remainder(7)
    torch.testing.assert_close(compiled(x), f(x))

def in_another_process(index):
    check(torch.compile(f, backend="aotkit", options={"fallback": "error"}))
    return index

class Squares(torch.utils.data.Dataset):
    compiled = None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if Squares.compiled is None:
            Squares.compiled = torch.compile(lambda x: x * x + 1, backend="aotkit", options={"fallback": "error"})
        return Squares.compiled(torch.full((3,), float(index)))
"""

FORKED = """
    torch.set_num_threads(2)
    compiled = torch.compile(f, backend="aotkit", options={"fallback": "error"})
    check(compiled)
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)  # of ATen's own threads, which a fork leaves behind
        check(compiled)
        os._exit(7)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    check(compiled)
"""

SPAWNED = """
    in_another_process(0)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sorted(pool.map(in_another_process, [1, 2])) == [1, 2]
"""

LOADED = """
    torch.set_num_threads(1)
    how = {{"num_workers": {workers}, "multiprocessing_context": {how!r}}}
    loader = torch.utils.data.DataLoader(Squares(), batch_size=3, **how)
    for again in range({times}):
        assert torch.cat(list(loader))[:, 0].tolist() == [1, 2, 5, 10, 17, 26]
        in_another_process(0)  # workers that are forked later come from a process that has compiled
"""

PROGRAMS = {
    "fork": FORKED,
    "workers forked": LOADED.format(how="fork", workers=2, times=2),
    "workers spawned": LOADED.format(how="spawn", workers=1, times=1),
    "spawn": SPAWNED,  # as the workers before
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_functions_in_other_processes(name: str, tmp_path: Path, warm_python: Any) -> None:
    if "fork" in name and not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    program = tmp_path / "program.py"
    program.write_text(f'{COMMON}\nif __name__ == "__main__":{PROGRAMS[name]}    print("done")\n')
    environment = {**os.environ, "AOTKIT_CACHE_DIR": str(tmp_path / "cache")}
    done = warm_python.run([str(program)], env=environment)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-3000:]


SUBINTERPRETER = """
import os, sys
import {imported}
try:
    import _interpreters as interpreters
    kind = ["legacy"]
except ImportError:
    import _xxsubinterpreters as interpreters
    kind = []

CODE = '''
import os
try:
    import aotkit
    said = "imported"
except ImportError as error:
    said = str(error)
os.write(1, said.encode())
'''
made = interpreters.create(*kind)
interpreters.run_string(made, CODE)
interpreters.destroy(made)
"""


@pytest.mark.parametrize("imported", ["aotkit", "torch", "json"])
def test_a_subinterpreter_is_refused_before_torch_is_imported(imported: str) -> None:
    """Also where the main interpreter has imported it. The import of torch itself hangs there, or fails."""
    program = SUBINTERPRETER.format(imported=imported)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "does not run in a subinterpreter" in done.stdout and "processes" in done.stdout
