"""The emulated demo's own decisions; that it runs is shown by `nox -s emulated_demo`."""

from __future__ import annotations

import pytest

from tools.emulation import whole


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("qemu-aarch64 version 11.1.3 (Debian 1:11.1.3+ds-1)\n", ""),
        ("qemu-aarch64 version 7.2.19 (Debian 1:7.2+dfsg-7)\n", "qemu 7.2 dies while torch is imported"),
        ("something else", "does not tell its version"),
    ],
)
def test_an_emulator_that_torch_does_not_load_in_is_refused(told: str, problem: str) -> None:
    assert problem in whole.emulator_problem(told) and (problem == "") == (whole.emulator_problem(told) == "")
