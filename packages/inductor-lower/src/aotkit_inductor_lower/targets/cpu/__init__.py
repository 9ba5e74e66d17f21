"""LLVM IR text for loop nests, and its way to object code.

Names are imported when asked for: a process that only loads object code needs :mod:`.load` and :mod:`.machine`, and
none of the generator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...launch_plan.store import compilers
    from .machine import Machine, arm_machine, generic_machine, host_machine, processor_machine
    from .module import ModuleText
    from .object import compile_text
    from .render.kernel import emit_kernel
    from .threads import why_one_thread

__all__ = [
    "Machine",
    "ModuleText",
    "arm_machine",
    "compile_text",
    "compilers",
    "emit_kernel",
    "generic_machine",
    "host_machine",
    "processor_machine",
    "why_one_thread",
]

_HOMES = {
    "emit_kernel": "render.kernel",
    "ModuleText": "module",
    "compile_text": "object",
    "compilers": "..launch_plan.store",
    "Machine": "machine",
    "arm_machine": "machine",
    "generic_machine": "machine",
    "host_machine": "machine",
    "processor_machine": "machine",
    "why_one_thread": "threads",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
