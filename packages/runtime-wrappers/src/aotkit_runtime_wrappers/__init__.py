"""The user's calling convention around a compiled functional graph.

A compiled graph is functional: it returns the new values of inputs that the user's function mutates, and
knows nothing of views or of autograd. :func:`build_plan` works out from graph metadata what has to happen
around it, as data; :func:`bind` turns that and the compiled code into one generated Python function;
:func:`interpret` runs the same data slowly. Public by name are also :mod:`.refinements` (random state, fake
results, donated buffers), :mod:`.synthetic_base` (overlapping arguments), :mod:`.double_backward`,
:mod:`.compiler_wrapper`, :mod:`.schema_checks`, :mod:`.placed_arguments` and :mod:`.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .__about__ import __version__
from .bind import bind
from .boxed import make_boxed, unboxed
from .errors import AliasingChangedError, DoubleBackwardError, WrapperError
from .interpret import interpret
from .plan import WrapperOptions, WrapperPlan

if TYPE_CHECKING:
    from .build import build_plan
    from .compiler_wrapper import compile_wrapped
    from .inputs import InputPlan, prepare_inputs
    from .serialized import SerializableFunction

__all__ = [
    "AliasingChangedError",
    "DoubleBackwardError",
    "InputPlan",
    "SerializableFunction",
    "WrapperError",
    "WrapperOptions",
    "WrapperPlan",
    "__version__",
    "bind",
    "build_plan",
    "compile_wrapped",
    "interpret",
    "make_boxed",
    "prepare_inputs",
    "unboxed",
]

# What makes plans is imported when it is asked for: a process that loads what was compiled before needs none of it.
_HOMES = {
    "InputPlan": "inputs",
    "SerializableFunction": "serialized",
    "build_plan": "build",
    "compile_wrapped": "compiler_wrapper",
    "prepare_inputs": "inputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
