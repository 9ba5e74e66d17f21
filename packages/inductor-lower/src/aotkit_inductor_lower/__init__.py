"""Compile functional ATen graphs into fused kernels for the CPU, with no C++ compiler, and for CUDA, with Triton.

::

    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from aotkit_inductor_lower import compile_graph, decompositions

    def f(x, b):
        return torch.nn.functional.gelu(x + b)

    x, b = torch.randn(64, 128), torch.randn(128)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(x, b)
    compiled = compile_graph(graph)
    (y,) = compiled([x, b])
    print(compiled.report())

The stages are usable one by one: :func:`lower_graph` gives the loop IR of a graph, :func:`schedule_program` fuses it,
:func:`print_program`, :func:`parse_program`, :func:`verify_program` and :func:`interpret_program` are its tools.
:func:`.driver.schedule_graph` does both, :func:`.driver.generate_program` makes code of what it gives.

Modules that are public by name: :mod:`.errors`, :mod:`.report`, :mod:`.driver` (all passes),
:mod:`.options`, :mod:`.runtime`, :mod:`.launch_plan.codec` (stored programs), :mod:`.launch_plan.facts`,
:mod:`.targets.cpu` (processors),
:mod:`.graph_partition`, :mod:`.graph_passes.freeze`, :mod:`.graph_passes.known_types`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .__about__ import __version__

if TYPE_CHECKING:
    from .compiled import CompiledGraph
    from .driver import compile_graph, compile_to_program, lower_graph, schedule_program
    from .errors import LoweringError
    from .ir.interpret import interpret_program
    from .ir.parse import parse_program
    from .ir.print import print_program
    from .ir.verify import verify_program
    from .launch_plan import CompiledProgram
    from .lowering.decompositions import decompositions
    from .options import LowerOptions
    from .runtime import bind_program

__all__ = [
    "CompiledGraph",
    "CompiledProgram",
    "LowerOptions",
    "LoweringError",
    "__version__",
    "bind_program",
    "compile_graph",
    "compile_to_program",
    "decompositions",
    "interpret_program",
    "lower_graph",
    "parse_program",
    "print_program",
    "schedule_program",
    "verify_program",
]

# Where each name is defined. It is imported when it is asked for: a process that only loads what was compiled before
# needs a small part of this package.
_HOMES = {
    "CompiledGraph": "compiled",
    "CompiledProgram": "launch_plan",
    "LowerOptions": "options",
    "LoweringError": "errors",
    "bind_program": "runtime",
    "compile_graph": "driver",
    "compile_to_program": "driver",
    "decompositions": "lowering.decompositions",
    "interpret_program": "ir.interpret",
    "lower_graph": "driver",
    "parse_program": "ir.parse",
    "print_program": "ir.print",
    "schedule_program": "driver",
    "verify_program": "ir.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
