"""Install the Debian packages that the `system` session needs, where they are missing and we may.

A browser (chromium) for the documentation site, redis-server for the cache's Redis store, and what links and emulates
kernels for other processors: qemu-user, compilers of C and C++ for this processor (C++ also for the runner of packages
without Python) and one for 64-bit ARM.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: Program -> Debian package that holds it.
PROGRAMS = {
    "chromium": "chromium",
    "redis-server": "redis-server",
    "qemu-aarch64": "qemu-user",
    "gcc": "gcc",
    "g++": "g++",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
}

#: What comes along with these, but not without recommendations.
LIBRARIES = {"gcc": ("libc6-dev",), "aarch64-linux-gnu-gcc": ("libc6-dev-arm64-cross",)}


def missing_programs() -> list[str]:
    """The needed programs that are not on the path."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def main() -> int:
    """Install what is missing with apt-get; without root, say what to install."""
    missing = missing_programs()
    if not missing:
        print("system packages: all there")
        return 0
    packages = sorted({PROGRAMS[program] for program in missing}.union(*(LIBRARIES.get(p, ()) for p in missing)))
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"missing: {', '.join(missing)}. Install them first: apt-get install {' '.join(packages)}")
        return 1
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=env, stdin=subprocess.DEVNULL)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    still = missing_programs()
    print(f"system packages: installed {', '.join(packages)}" + (f"; still missing {still}" if still else ""))
    return 1 if still else 0


if __name__ == "__main__":
    sys.exit(main())
