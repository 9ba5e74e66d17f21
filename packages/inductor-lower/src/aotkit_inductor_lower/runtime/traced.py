"""Calls while torch's profiler is on: what a compiled graph runs shows in the trace by name.

Note [Names in traces]
    A segment is one native call, which a profiler sees nothing of. While one is on, every segment and every ATen call
    of a bound program runs in a range of its own: ``graph0-forward: softmax_1, add_2``. A program looks at each call
    whether a profiler is on (the value of one variable of torch's), and only then binds the source once more, over the
    functions that are defined here. With the option ``separate_kernels`` a segment is one kernel, so each has a range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _torch_compat
from ..launch_plan.records import CallSegment, LaunchPlan

__all__ = ["range_name", "traced_functions"]

MOST_NAMES = 6


def range_name(label: str, launches: tuple[str, ...]) -> str:
    """What a segment with these launches is called in a trace."""
    shown = list(launches[:MOST_NAMES])
    if len(launches) > MOST_NAMES:
        shown.append(f"{len(launches) - MOST_NAMES} more")
    return f"{label}: {', '.join(shown)}"


def traced_functions(plan: LaunchPlan, namespace: Mapping[str, Any], label: str) -> dict[str, Callable[..., Any]]:
    """The segments and ATen calls of ``namespace``, in ranges. ``label``: what the names of the ranges begin with."""
    launches = {s.function: s.launches for s in plan.steps if isinstance(s, CallSegment)}
    found = {name: _in_range(namespace[name], range_name(label, kernels)) for name, kernels in launches.items()}
    calls = {name: value for name, value in namespace.items() if name.startswith("op_")}
    return found | {name: _in_range(call, f"{label}: {_call_name(name, call)}") for name, call in calls.items()}


def _call_name(name: str, call: Callable[..., Any]) -> str:
    return str(call) if isinstance(call, torch._ops.OpOverload) else name.removeprefix("op_")


def _in_range(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _torch_compat.RecordRange(name):
            return function(*args, **kwargs)

    return run
