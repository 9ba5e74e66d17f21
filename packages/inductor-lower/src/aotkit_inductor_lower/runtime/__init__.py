"""From a compiled program to a callable: how a launch plan is bound to a process."""

from .arena import ArenaPool
from .bind import BoundProgram, bind_program
from .errors import BindError, RedzoneError
from .parts import bind_parts

__all__ = ["ArenaPool", "BindError", "BoundProgram", "RedzoneError", "bind_parts", "bind_program"]
