"""``torch.compile(...).aot_compile(...)`` with a filter of guards that loses none which a file can hold."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._torch_compat import offering_aot_compile
from ..artifact.saved_checks import identity_row
from ..driver.saved_by_torch import SavedByTorch
from ..errors import CompileError
from ..frontend.guard_rows import IDENTITIES, UnknownGuard, is_about_torch, path_of
from ..options import Options

__all__ = ["KeptGuards", "call_module", "compile_keeping", "compile_to_save"]


def compile_to_save(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = None,
    options: Options | None = None,
) -> Any:
    """Compile one call of a function or a module, to be saved; what ``torch.compile(...).aot_compile(...)`` returns::

        compiled = aotkit.saved.compile_to_save(model, (x,))
        aotkit.saved.save_compiled_function(compiled, "model.aotkit")

    torch's own call refuses a function, or forgets guards, where Dynamo compares objects by their address. Here such
    guards are kept by the name or the code of what they are about. A module is called with itself as first argument:
    ``compiled(model, x)``.

    Args:
        fn: a function, a method or a module.
        args: example arguments, as ``fn`` takes them.
        kwargs: those that are passed by name.
        dynamic: as of ``torch.compile``.
        options: of the compile; the environment's by default.

    Raises :class:`CompileError` for what can't be compiled; what Dynamo raises passes through.
    """
    return compile_keeping(KeptGuards(), fn, args, kwargs, dynamic=dynamic, options=options)


def compile_keeping(
    kept: KeptGuards,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    dynamic: bool | None,
    options: Options | None,
) -> Any:
    """As :func:`compile_to_save`; ``kept`` is the filter of guards."""
    from ..backend import make_backend

    is_module = isinstance(fn, nn.Module)
    with offering_aot_compile():
        compiler: Any = torch.compile(
            call_module if is_module else fn,
            fullgraph=True,
            dynamic=dynamic,
            backend=make_backend(options),
            options={"guard_filter_fn": kept},
        )
    compiled = compiler.aot_compile(((fn, *args) if is_module else tuple(args), dict(kwargs or {})))
    graph = compiled._artifacts.compiled_fn
    if not isinstance(graph, SavedByTorch):
        raise CompileError(f"torch made a {type(graph).__name__} of what was compiled, which can't be saved")
    graph.identities = tuple(kept.rows)
    _name_modules(compiled._artifacts.runtime_env, compiled._extra_globals or {})
    return compiled


def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a module: a call of it, its hooks included."""
    return module(*args, **kwargs)


def _name_modules(runtime: Any, namespace: Mapping[str, Any]) -> None:
    """Tell torch's file from where the modules are that Dynamo put among the function's global variables. They are
    called by their address in this process, and torch writes those of one kind only: its loader would miss the others.
    """
    for name in runtime.external_refs:
        value = namespace.get(name)
        if isinstance(value, types.ModuleType) and name.startswith("___module_"):
            runtime.import_sources.setdefault(name, value.__name__)


class KeptGuards:
    """torch's filter: per guard whether torch keeps it. Those that it can't keep become rows, where they can."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        self.rows.clear()  # torch may ask more than once
        return [self._keeps(guard) for guard in guards]

    def _keeps(self, guard: Any) -> bool:
        if guard.is_global or is_about_torch(guard.orig_guard.name):
            return False  # the bytecode reads globals of the process that it runs in, as torch's own filter has it
        kinds = {guard.guard_type, *guard.derived_guard_types}
        unsupported = torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
        if not kinds & {*unsupported}:
            return True
        if "type(" not in guard.orig_guard.name and kinds & IDENTITIES:
            self.rows.append(_row(guard))
        return False


def _row(guard: Any) -> list[Any]:
    name = guard.orig_guard.name
    try:
        return identity_row(path_of(name), guard.value) or [[["local", name]], "unknown", name]
    except UnknownGuard:
        return [[["local", name]], "unknown", name]
