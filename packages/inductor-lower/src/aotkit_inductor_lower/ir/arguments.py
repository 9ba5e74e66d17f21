"""What calls are given, and where steps came from: the part of the loop IR that launch plans have as well.

It stands alone, since a process that only loads what was compiled needs no more of the IR than this.

Note [NaN literals compare equal]
    IR is compared by value, in tests and as a cache key, and nan != nan. Literals holding a nan hold the one object
    ``math.nan``, so that tuples of fields compare equal by identity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..symbolic import Expr

__all__ = ["Arg", "BufferRef", "Literal", "Origin", "SymInput", "is_negative_zero"]


def is_negative_zero(value: object) -> bool:
    """Python takes -0.0 and 0.0 for equal; nodes that hold them are not."""
    return isinstance(value, float) and value == 0 and math.copysign(1, value) < 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where generated code came from: names and ops of the FX nodes, and the user's source line."""

    nodes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A tensor argument of an extern call; with ``number`` the Python float that a tensor of one element holds."""

    name: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class SymInput:
    """An integer argument given by a size expression."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Literal:
    """Any other argument: None, bool, int, float, complex, str, or a torch dtype, device, layout or memory
    format by name (``kind`` says which; ``value`` is then its text, ``"torch.float32"``)."""

    kind: str
    value: bool | int | float | str | None
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.value != self.value:
            object.__setattr__(self, "value", math.nan)
        object.__setattr__(self, "negative_zero", is_negative_zero(self.value))


Arg = BufferRef | SymInput | Literal | tuple["Arg", ...]
