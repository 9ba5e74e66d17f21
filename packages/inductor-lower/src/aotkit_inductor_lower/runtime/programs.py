"""Compiled programs as text, whatever they were compiled for.

A program for a CUDA device and one for the CPU are different records; who stores them need not know which is which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import launch_plan
from ..launch_plan import CompiledProgram
from .bind import bind as bind_program

if TYPE_CHECKING:
    from ..targets.triton.program import DeviceProgram

__all__ = ["bind_program", "compiled_from_json", "compiled_to_json"]


def compiled_to_json(compiled: CompiledProgram | DeviceProgram) -> str:
    """A compiled program as JSON text; object code and cubins are base64."""
    if isinstance(compiled, CompiledProgram):
        return launch_plan.compiled_to_json(compiled)
    from ..targets.triton.program import device_to_json

    return device_to_json(compiled)


def compiled_from_json(text: str) -> CompiledProgram | DeviceProgram:
    """The inverse of :func:`compiled_to_json`. Raises ``ValueError`` for another format or a damaged cubin."""
    if not text.startswith('{"device":'):
        return launch_plan.compiled_from_json(text)
    from ..targets.triton.program import device_from_json

    return device_from_json(text)
