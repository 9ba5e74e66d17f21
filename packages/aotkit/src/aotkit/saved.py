"""Compiles that are saved: functions and modules, and whole training steps, loaded without Dynamo.

::

    import torch, aotkit

    compiled = aotkit.saved.compile_to_save(model, (x,))
    aotkit.saved.save_compiled_function(compiled, "model.aotkit")

    loaded = aotkit.saved.load_compiled_function("model.aotkit")   # in another process
    loaded(model, x).sum().backward()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .driver.process import collections_put_off

if TYPE_CHECKING:
    from .driver.saved_function import SavedFunction, load_compiled_function
    from .driver.saved_step import TrainingStep, load_step
    from .torch_api.compile_to_save import compile_to_save
    from .torch_api.for_ranks import compile_for_ranks
    from .torch_api.save_compiled import save_compiled_function
    from .torch_api.training_step import compile_step

__all__ = [
    "SavedFunction",
    "TrainingStep",
    "compile_for_ranks",
    "compile_step",
    "compile_to_save",
    "load_compiled_function",
    "load_step",
    "save_compiled_function",
]

# Where each name is defined: a process that loads imports no stage of a compile.
_HOMES = {
    "SavedFunction": ".driver.saved_function",
    "TrainingStep": ".driver.saved_step",
    "compile_for_ranks": ".torch_api.for_ranks",
    "compile_step": ".torch_api.training_step",
    "compile_to_save": ".torch_api.compile_to_save",
    "load_compiled_function": ".driver.saved_function",
    "load_step": ".driver.saved_step",
    "save_compiled_function": ".torch_api.save_compiled",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collections_put_off():
        value = getattr(import_module(_HOMES[name], "aotkit"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
