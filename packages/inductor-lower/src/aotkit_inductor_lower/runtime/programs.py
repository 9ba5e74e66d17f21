"""Compiled programs as text and as callables, whatever they were compiled for.

A program for a CUDA device and one for the CPU are different records; who stores them need not know which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import launch_plan
from ..launch_plan import CompiledProgram
from .arena import ArenaPool
from .bind import bind

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


def bind_program(
    compiled: CompiledProgram | DeviceProgram,
    constants: Mapping[str, torch.Tensor] | None = None,
    arenas: ArenaPool | None = None,
    *,
    redzones: bool = False,
) -> Callable[[list[Any]], list[Any]]:
    """Make a compiled program callable, in the boxed convention. ``constants``: the tensors of its constant buffers by
    name. ``arenas``: where its temporaries live, shared with other programs; its own by default (on a CUDA device
    torch's allocator). ``redzones``: watch the memory of every call on the CPU; slow, for tests and bug hunts.

    Raises :class:`BindError` if a constant is missing, an ATen op does not exist in this torch, or the code does
    not load here.
    """
    if isinstance(compiled, CompiledProgram):
        return bind(compiled, constants, arenas, redzones=redzones)
    from ..targets.triton.bind import bind_stored

    return bind_stored(compiled, constants)
