"""The library that runs packages without Python, built from its sources beside this package."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["HEADER", "LIBRARY", "build_runner"]

HEADER, LIBRARY = "aotkit_runner.h", "libaotkit_runner.so"
_SOURCES = Path(__file__).parents[1] / "runner"


def build_runner(folder: str | Path, compiler: str = "g++") -> Path:
    """Compile the runner against this torch; gives the path of the library, beside which the header lies.

    The library names torch's folder as the place of its libraries. Raises ``RuntimeError`` with what the compiler says,
    and on other systems than Linux on x86-64.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise RuntimeError("packages run without Python on Linux on x86-64 processors only")
    target, torch_folder = Path(folder), Path(torch.__file__).parent
    target.mkdir(parents=True, exist_ok=True)
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
    includes = ("-isystem", str(torch_folder / "include"), "-I", str(_SOURCES))
    libraries = str(torch_folder / "lib")
    link = (f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}", "-ldl")
    with tempfile.TemporaryDirectory() as scratch:
        # One translation unit: the compiler takes five times as long to read torch's headers as to compile our sources.
        whole = Path(scratch, "runner.cpp")
        whole.write_text("".join(f'#include "{source.name}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
        _run([compiler, *flags, *includes, "-shared", str(whole), *link, "-o", str(target / LIBRARY)])
    shutil.copyfile(_SOURCES / HEADER, target / HEADER)
    return target / LIBRARY


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no compiler {command[0]!r}; name one of C++20") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
