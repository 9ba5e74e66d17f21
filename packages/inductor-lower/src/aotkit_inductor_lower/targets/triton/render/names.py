"""What functions and parameters are called in a kernel's source."""

from __future__ import annotations

from keyword import iskeyword

from ..records import KernelArgument
from .indices import identifier
from .prelude import device_function_names

__all__ = ["argument_name", "function_name", "pointer_name"]

_TAKEN = frozenset({"tl", "jit", "libm", "triton", "range", "float", *device_function_names()})


def function_name(nest: str) -> str:
    """The kernel's name in the source: the nest's, unless that means something else there."""
    name = identifier(nest)
    return f"{name}_kernel" if name in _TAKEN or iskeyword(name) else name


def pointer_name(buffer: str) -> str:
    """The pointer parameter of a buffer."""
    return f"p_{identifier(buffer)}"


def argument_name(argument: KernelArgument) -> str:
    """The parameter's name in the source."""
    if argument.kind == "pointer":
        return pointer_name(argument.name)
    return f"{'scratch' if argument.kind == 'scratch' else 'size'}_{identifier(argument.name)}"
