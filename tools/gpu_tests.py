"""Run the tests that are marked `gpu`, each file in a process of its own.

    python -m tools.gpu_tests [--seconds 600] [FILE ...]

A kernel that stops at an assertion takes the device away from its whole process: so no file's tests can fail because of
another's. Nothing need be installed but what the tests import: the sources of the packages are put on the path. The
exit status is the number of files with a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.workspace import PACKAGES, ROOT

NO_TEST_RAN = 5


def files_with_gpu_tests(root: Path = ROOT) -> list[Path]:
    """Test files of the packages that mark a test, or themselves, with `gpu`."""
    files = sorted(root.glob("packages/*/tests/test_*.py"))
    return [path for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def environment() -> dict[str, str]:
    """This process's, with the sources on Python's path before all else. Their bytecode is kept, as that of installed
    packages is: else each process compiles hundreds of files again."""
    sources = [ROOT, *(ROOT / "packages" / name / "src" for name in PACKAGES)]
    path = os.pathsep.join([*map(str, sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}


def run_file(path: Path, seconds: float) -> int:
    """The status of pytest for one file; 124 if it took longer than that."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(path)]
    try:
        return subprocess.run(command, cwd=ROOT, env=environment(), timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=600, help="for each file")
    options = parser.parse_args(arguments)
    failed = []
    for path in options.files or files_with_gpu_tests():
        begin = time.monotonic()
        status = run_file(path.resolve(), options.seconds)
        what = {0: "passed", 124: "took too long", NO_TEST_RAN: "has no such test"}.get(status, f"failed ({status})")
        print(f"{path.name}: {what}, {time.monotonic() - begin:.0f} s", flush=True)
        if status:
            failed.append(path)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
