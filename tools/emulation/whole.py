"""The packages as a whole on an emulated 64-bit ARM processor: torch's wheel for it, our wheels, and the demo.

    nox -s emulated_demo -- FOLDER            # about 7 GB of downloads, which stay in the folder; then some minutes

Python comes from Debian's packages for arm64 and torch from its wheel, both only unpacked: nothing of them is installed
in this system. What runs is `tools/demo.py`, so a small BERT is compiled, by LLVM on the emulated processor, and
trained beside its eager copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..workspace import ROOT

__all__ = ["emulator_problem", "main"]

#: qemu 7.2 dies while torch's library is loaded; nothing between was tried.
OLDEST, TRIED = (10,), "11.1"
DEBIAN = "http://deb.debian.org/debian"
DEBIAN_PACKAGES = ("python3.11", "libgomp1", "libstdc++6", "libgcc-s1", "libopenblas0-pthread")
WANTED = ("numpy", "scipy", "llvmlite", "filelock", "sympy", "jinja2", "rich", "transformers")
#: What the wheels of torch and of what it needs are tagged with.
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 35)))
PROCESSOR = "neoverse-n1"
_REGISTER = "sys/devices/system/cpu/cpu{}/regs/identification/midr_el1"
_NEOVERSE_N1 = "0x00000000413fd0c1\n"


def emulator_problem(told: str) -> str:
    """Why the emulator that says this of its version can't be used, empty if it can."""
    found = re.search(r"version (\d+)\.(\d+)", told)
    if found is None:
        return "qemu-aarch64 does not tell its version"
    if (int(found[1]), int(found[2])) < OLDEST:
        return f"qemu {found[1]}.{found[2]} dies while torch is imported; take a later one ({TRIED} was tried)"
    return ""


def unpack_debian(folder: Path) -> None:
    """Debian's Python for arm64 under ``folder/root``, with lists of packages of its own."""
    lists = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (lists / part).mkdir(parents=True, exist_ok=True)
    (lists / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (lists / "sources.list").write_text(f"deb [arch=arm64 signed-by={key}] {DEBIAN} bookworm main\n")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": lists / "lists",
        "Dir::State::status": lists / "status",
        "Dir::Cache": lists / "cache",
        "Dir::Etc::sourcelist": lists / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "-y", "--no-install-recommends", "--download-only", "install", *DEBIAN_PACKAGES], check=True)
    making = folder / "root.making"
    for package in sorted((lists / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(making)], check=True)
    for processor in range(os.cpu_count() or 1):  # which model it is, oneDNN reads in a file
        register = making / _REGISTER.format(processor)
        register.parent.mkdir(parents=True)
        register.write_text(_NEOVERSE_N1)
    making.rename(folder / "root")


def unpack_wheels(folder: Path, torch: str) -> None:
    """torch and the other libraries for that processor under ``folder/site``."""
    tags = [part for platform in PLATFORMS for part in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", "3.11", *tags]
    subprocess.run([*pip, "--target", str(folder / "site.making"), f"torch=={torch}", *WANTED], check=True)
    (folder / "site.making").rename(folder / "site")


def install_ours(folder: Path, wheels: Sequence[str]) -> None:
    """Our wheels, which are of any platform, under ``folder/ours``."""
    shutil.rmtree(folder / "ours", ignore_errors=True)
    target = str(folder / "ours")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, *wheels], check=True)


def run_demo(folder: Path, steps: int) -> int:
    """The demo in the emulator; its exit status."""
    root, site = folder / "root", folder / "site"
    libraries = [path for path in site.glob("nvidia/**/lib") if path.is_dir()]
    libraries += [root / "usr/lib/aarch64-linux-gnu", root / "lib/aarch64-linux-gnu"]
    found = ":".join(map(str, libraries))
    emulator = ["qemu-aarch64", "-cpu", PROCESSOR, "-L", str(root), "-E", f"LD_LIBRARY_PATH={found}"]
    demo = [str(root / "usr/bin/python3.11"), str(ROOT / "tools" / "demo.py")]
    options = ["--layers", "1", "--threads", "1", "--steps", str(steps)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": f"{folder / 'ours'}:{site}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*emulator, *demo, *options], env=env, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is not there yet, and run the demo."""
    parser = argparse.ArgumentParser(prog="python -m tools.emulation.whole", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", nargs="*", help="our wheels; without, those of the last time")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    if shutil.which("qemu-aarch64") is None:
        print("qemu-aarch64 is not installed (Debian's qemu-user)")
        return 1
    told = subprocess.run(["qemu-aarch64", "--version"], capture_output=True, text=True, check=True).stdout
    problem = emulator_problem(told)
    if problem:
        print(problem)
        return 1
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "root").is_dir():
        unpack_debian(folder)
    if not (folder / "site").is_dir():
        unpack_wheels(folder, options.torch)
    if options.wheels:
        install_ours(folder, options.wheels)
    return run_demo(folder, options.steps)


if __name__ == "__main__":
    sys.exit(main())
