"""From a compiled program to a callable: how a launch plan is bound to a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arena import ArenaPool
from .argument_reader import ArgumentReader, Placement
from .bind import BoundProgram, bind_program
from .dict_states import DictStates
from .errors import BindError, RedzoneError
from .object_walk import Fact, Node, ObjectWalk

if TYPE_CHECKING:
    from .parts import bind_parts

__all__ = ["ArenaPool", "ArgumentReader", "BindError", "BoundProgram", "DictStates", "Fact", "Node", "ObjectWalk"]
__all__ += ["Placement", "RedzoneError", "bind_parts", "bind_program"]


def __getattr__(name: str) -> Any:
    if name != "bind_parts":  # imported when a program in parts is bound
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .parts import bind_parts

    return bind_parts


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
