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
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .__about__ import __version__

if TYPE_CHECKING:
    from .driver import CompiledGraph, compile_graph, compile_to_program, lower_graph
    from .errors import InputMismatchError, LoweringError, UnsupportedGraphError
    from .graph_partition import PartitionedGraph
    from .graph_passes.freeze import freeze
    from .ir.interpret import interpret_program
    from .ir.parse import parse_program
    from .ir.print import print_program
    from .ir.verify import verify_program
    from .launch_plan import CompiledProgram
    from .lowering.decompositions import decompositions
    from .options import LowerOptions
    from .pass_lists import pass_names, schedule_program
    from .passes import Decision
    from .report import LoweringReport
    from .runtime import ArenaPool, BindError, RedzoneError
    from .runtime.programs import bind_program, compiled_from_json, compiled_to_json
    from .targets.cpu import Machine, host_machine, processor_machine

__all__ = [
    "ArenaPool",
    "BindError",
    "CompiledGraph",
    "CompiledProgram",
    "Decision",
    "InputMismatchError",
    "LowerOptions",
    "LoweringError",
    "LoweringReport",
    "Machine",
    "PartitionedGraph",
    "RedzoneError",
    "UnsupportedGraphError",
    "__version__",
    "bind_program",
    "compile_graph",
    "compile_to_program",
    "compiled_from_json",
    "compiled_to_json",
    "decompositions",
    "freeze",
    "host_machine",
    "interpret_program",
    "lower_graph",
    "parse_program",
    "pass_names",
    "print_program",
    "processor_machine",
    "schedule_program",
    "verify_program",
]

# Where each name is defined. It is imported when it is asked for: a process that only loads what was compiled before
# needs a small part of this package.
_HOMES = {
    name: home
    for home, names in {
        "lowering.decompositions": ("decompositions",),
        "errors": (
            "InputMismatchError",
            "LoweringError",
            "UnsupportedGraphError",
        ),
        "graph_passes.freeze": ("freeze",),
        "ir.interpret": ("interpret_program",),
        "ir.parse": ("parse_program",),
        "ir.print": ("print_program",),
        "ir.verify": ("verify_program",),
        "options": ("LowerOptions",),
        "graph_partition": ("PartitionedGraph",),
        "driver": (
            "CompiledGraph",
            "compile_graph",
            "compile_to_program",
            "lower_graph",
        ),
        "launch_plan": ("CompiledProgram",),
        "passes": ("Decision",),
        "runtime": ("ArenaPool", "BindError", "RedzoneError"),
        "targets.cpu": ("Machine", "host_machine", "processor_machine"),
        "runtime.programs": ("bind_program", "compiled_from_json", "compiled_to_json"),
        "report": ("LoweringReport",),
        "pass_lists": ("pass_names", "schedule_program"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
