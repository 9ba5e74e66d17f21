"""Processes that are forks of one that has imported behave as processes that were started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.warm_python import WarmPython

SCRIPT = """
import os, sys, helper
from pathlib import Path
here = Path(__file__).name
print([__name__, sys.argv, os.getcwd(), helper.said, os.environ.get("MINE"), here, sys.stdin.read()])
print("told", file=sys.stderr)
import atexit
atexit.register(lambda: print("at exit"))
sys.exit(len(sys.argv))
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    processes = WarmPython(("json", "no_such_module"))
    yield processes
    processes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("said = 'from beside the script'\n")
    return tmp_path


def started(arguments: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    "arguments",
    [["program.py", "a", "b"], ["-m", "program", "c"], ["-c", SCRIPT.replace("__file__", "'.'"), "d"]],
    ids=lambda arguments: arguments[0],
)
def test_a_fork_is_as_a_process_that_was_started(warm: WarmPython, folder: Path, arguments: list[str]) -> None:
    env = {**os.environ, "MINE": "1"}
    ours, real = warm.run(arguments, cwd=folder, env=env), started(arguments, folder, env)
    assert (ours.returncode, ours.stdout, ours.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.stdout.endswith("at exit\n")


def test_paths_of_the_environment_come_before_the_library(warm: WarmPython, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "json.py").write_text("")
    (tmp_path / "more" / "colorsys.py").write_text("mine = True")
    code = "import colorsys, helper, sys; print(colorsys.mine, helper.said, sys.path[1:])"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'more'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ours, real = warm.run(["-c", code], cwd=folder, env=env), started(["-c", code], folder, env)
    assert ours.stdout == real.stdout and ours.stdout.startswith("True from beside the script")


def test_an_error_is_told_and_a_signal_is_the_code(warm: WarmPython) -> None:
    done = warm.run(["-c", "1 / 0"])
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert warm.run(["-c", "import os; os.abort()"]).returncode == -6
    assert warm.run(["-c", "import os; os._exit(7)"]).returncode == 7


def test_two_processes_after_each_other_have_other_hashes_and_nothing_of_each_other(warm: WarmPython) -> None:
    code = "import sys, os; print(hash('a text'), hasattr(sys, 'left'), 'LEFT' in os.environ)"
    code += "; sys.left = os.environ['LEFT'] = '1'"
    first, second, third = (warm.run(["-c", code]).stdout.split() for _ in range(3))
    assert first[0] != second[0] and first == third
    assert first[1:] == second[1:] == ["False", "False"]


def test_a_process_that_takes_too_long_is_ended(warm: WarmPython) -> None:
    for _ in range(2):
        with pytest.raises(subprocess.TimeoutExpired):
            warm.run(["-c", "import time; time.sleep(600)"], timeout=0.3)
    assert warm.run(["-c", "print(1)"]).stdout == "1\n"


def test_what_a_child_of_a_process_writes_is_waited_for(warm: WarmPython) -> None:
    code = "import os, time\nif not os.fork():\n    time.sleep(0.3)\n    os.write(1, b'last')\n    os._exit(0)"
    assert warm.run(["-c", code]).stdout == "last"
    code = "import subprocess; print(subprocess.run(['echo', 'by a program'], capture_output=True, text=True).stdout)"
    assert warm.run(["-c", code]).stdout.strip() == "by a program"


def test_variables_that_an_import_reads_are_there_when_it_does(warm: WarmPython) -> None:
    code = "import sys; print(sys.flags.utf8_mode, sys.flags.dont_write_bytecode)"
    env = {**os.environ, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    assert warm.run(["-c", code], env=env).stdout == "1 1\n"


@pytest.fixture(scope="module")
def of_torch() -> Iterator[WarmPython]:
    processes = WarmPython(("torch",), seeds=("1",))
    yield processes
    processes.close()


def test_a_process_waits_for_its_threads_and_ends_without_taking_modules_apart(of_torch: WarmPython) -> None:
    code = """
import sys, threading, time
class Last:
    def __del__(self):
        print("taken apart", flush=True)
sys.modules["last"] = Last()
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
"""
    assert of_torch.run(["-c", code]).stdout == "thread\n"
    assert of_torch.run(["-c", code], only_torch=True).stdout == "thread\ntaken apart\n"


def test_variables_of_logs_hold_in_a_fork(of_torch: WarmPython, tmp_path: Path) -> None:
    code = "import torch; torch._logging.trace_structured('artifact', lambda: {'name': 'x'}, payload_fn=lambda: 'y')"
    for folder in ("one", "two"):
        of_torch.run(["-c", code], env={**os.environ, "TORCH_TRACE": str(tmp_path / folder)})
    logs = [path.read_text() for folder in ("one", "two") for path in (tmp_path / folder).glob("*.log")]
    assert [log.count('{"name": "x"}') for log in logs] == [1, 1]
