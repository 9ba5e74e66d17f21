"""Code of the compiler that is handed back after a compile: which pages, and that everything goes on working."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from aotkit_inductor_lower.memory.code_pages import release_code_pages, unwritten
from aotkit_inductor_lower.targets.cpu import compile_text, host_machine

on_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="this system does not list the pages of a process in /proc"
)
MAPPINGS = """\
7f00_0000-7f01_0000 r--p 00000000 fe:01 1 /lib/libcompiler.so
7f01_0000-7f05_0000 r-xp 00010000 fe:01 1 /lib/libcompiler.so
7f05_0000-7f08_0000 r--p 00050000 fe:01 1 /lib/libcompiler.so
7f08_0000-7f09_0000 r--p 00080000 fe:01 1 /lib/libcompiler.so
7f09_0000-7f0a_0000 rw-p 00090000 fe:01 1 /lib/libcompiler.so
7f0a_0000-7f0b_0000 rw-p 00000000 00:00 0
7f10_0000-7f20_0000 r-xp 00010000 fe:01 2 /lib/compiler/libother.so
7f20_0000-7f30_0000 r--p 00110000 fe:01 2 /lib/compiler/libother.so
""".replace("_", "")


def test_the_part_that_the_loader_may_have_filled_in_is_left_out() -> None:
    assert unwritten("libcompiler", MAPPINGS) == [(0x7F000000, 0x10000), (0x7F010000, 0x40000), (0x7F050000, 0x30000)]
    assert unwritten("libnone", MAPPINGS) == []


def test_a_last_part_that_can_only_be_read_may_be_filled_in_too() -> None:
    assert unwritten("libother", MAPPINGS) == [(0x7F100000, 0x100000)]


def _resident(library: str) -> int:
    """KiB of the library's code that are in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = library in line and " r-xp " in line
        elif inside and name == "Rss:":
            found += int(rest[0])
    return found


TEXT = "define double @twice(double %x) {\n  %y = fadd double %x, %x\n  ret double %y\n}\n"


@on_linux
def test_the_compiler_works_as_before_and_takes_less_memory_until_then() -> None:
    code = compile_text(TEXT, host_machine())
    before = _resident("llvmlite")
    assert release_code_pages("llvmlite") > 1 << 20
    assert _resident("llvmlite") < before / 2
    assert compile_text(TEXT, host_machine()) == code
    assert release_code_pages("no such library") == 0


@on_linux
def test_a_long_compile_is_followed_by_it_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_text(TEXT, host_machine())
    there = _resident("llvmlite")
    compile_text(TEXT, host_machine())
    assert _resident("llvmlite") >= there
    monkeypatch.setattr("aotkit_inductor_lower.targets.cpu.object._LONG", 0.0)
    compile_text(TEXT, host_machine())
    assert _resident("llvmlite") < there / 2


@on_linux
def test_threads_that_compile_meanwhile_are_not_disturbed() -> None:
    expected, wrong, done = compile_text(TEXT, host_machine()), [], threading.Event()

    def compile_until_done() -> None:
        while not done.is_set():
            if compile_text(TEXT, host_machine()) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=compile_until_done) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        release_code_pages("llvmlite")
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_goes_on_computing_when_its_code_was_handed_back() -> None:
    x = torch.arange(12.0).view(3, 4)
    expected = x @ x.t()
    release_code_pages("torch")
    assert torch.equal(x @ x.t(), expected)
