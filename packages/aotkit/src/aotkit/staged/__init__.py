"""A compile one stage after the other, each an object that prints, tells what it costs, and is saved and loaded.

::

    import torch, aotkit

    def step(w, x):
        return (x @ w).sin().sum()

    captured = aotkit.stages(step).capture(torch.randn(4, 2, requires_grad=True), torch.randn(8, 4))
    compiled = captured.partition().lower().compile()
    print(captured, compiled.cost(), compiled.memory())

:func:`load` reads what ``save`` of any stage wrote, in any process: the rest of the way goes on from there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import Argument, Call, CallError
    from .captured import Captured
    from .compiled import Compiled
    from .costs import GraphCost, Memory
    from .lowered import Lowered, LoweredGraph
    from .partitioned import Partitioned
    from .reading import load
    from .start import Stages, stages

__all__ = [
    "Argument",
    "Call",
    "CallError",
    "Captured",
    "Compiled",
    "GraphCost",
    "Lowered",
    "LoweredGraph",
    "Memory",
    "Partitioned",
    "Stages",
    "load",
    "stages",
]

# Where each name is defined: a process that only calls what was compiled elsewhere imports no stage of a compile.
_HOMES = {
    name: home
    for home, names in {
        ".call": ("Argument", "Call", "CallError"),
        ".captured": ("Captured",),
        ".compiled": ("Compiled",),
        ".costs": ("GraphCost", "Memory"),
        ".lowered": ("Lowered", "LoweredGraph"),
        ".partitioned": ("Partitioned",),
        ".reading": ("load",),
        ".start": ("Stages", "stages"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
