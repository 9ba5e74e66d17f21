"""The user's calling convention around a compiled functional graph.

A compiled graph is functional: it returns the new values of inputs that the user's function mutates, and
knows nothing of views or of autograd. :func:`build_plan` works out from graph metadata what has to happen
around it, as data; :func:`bind` turns that and the compiled code into one generated Python function;
:func:`interpret` runs the same data slowly.
"""

from __future__ import annotations

from .__about__ import __version__
from .bind import bind
from .boxed import make_boxed, unboxed
from .build import build_plan
from .compiler_wrapper import CompilerWrapper, compile_wrapped
from .donated import plan_donated
from .double_backward import GradientRequest, Gradients
from .errors import AliasingChangedError, DoubleBackwardError, WrapperError
from .forward_adapters import RandomSource, plan_fake_results, plan_random_state
from .inputs import InputPlan, prepare_inputs
from .interpret import interpret
from .plan import RandomState, WrapperOptions, WrapperPlan, checks_aliases
from .serialized import SerializableFunction
from .synthetic_base import PreparedFunction, graph_inputs, plan_synthetic_bases

__all__ = [
    "AliasingChangedError",
    "CompilerWrapper",
    "DoubleBackwardError",
    "GradientRequest",
    "Gradients",
    "InputPlan",
    "PreparedFunction",
    "RandomSource",
    "RandomState",
    "SerializableFunction",
    "WrapperError",
    "WrapperOptions",
    "WrapperPlan",
    "__version__",
    "bind",
    "build_plan",
    "checks_aliases",
    "compile_wrapped",
    "graph_inputs",
    "interpret",
    "make_boxed",
    "plan_donated",
    "plan_fake_results",
    "plan_random_state",
    "plan_synthetic_bases",
    "prepare_inputs",
    "unboxed",
]
