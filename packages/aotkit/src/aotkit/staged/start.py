"""The beginning: a function or a module, captured for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotkit_aot_trace.callables import FunctionalCall

from ..artifact.torch_state import state_of_call
from ..driver.bugs import line_of_function
from ..driver.compile import capture_function
from ..driver.context import CompileContext
from ..driver.specializations import example_fakes, next_name
from ..driver.stages import own_stages
from ..environment import read_environment
from ..errors import CompileError
from ..options import Options
from ..recorder import Recorder
from ..torch_api.live_module import LiveModule
from .call import Call, describe_call, describe_results
from .captured import Captured
from .running import in_stage

__all__ = ["Stages", "stages"]

_NOT_HERE = {"cudagraphs": False, "freezing": False, "capture": True, "lowering": "kernels", "tune": False}


def stages(fn: Callable[..., Any], *, options: Options | None = None) -> Stages:
    """The stages of a compile of ``fn``, a function or a module, one by one::

        captured = aotkit.stages(fn).capture(*args)     # an FX graph, forward and backward in one
        partitioned = captured.partition()              # forward and backward: what is saved, what is recomputed
        lowered = partitioned.lower()                   # fused loops
        compiled = lowered.compile()                    # kernels; call it

    Every stage prints, has ``cost()`` and ``memory()``, and is saved by ``save(path)`` and read by
    :func:`aotkit.staged.load`. It is for one call; see :class:`.Call`. ``options``: of the compile. Second derivatives
    through a stage are refused.

    Raises ``TypeError`` if ``fn`` can't be called, :class:`CompileError` for options that need a running process.
    """
    if not callable(fn):
        raise TypeError(f"stages takes a function or a module; {fn!r} can't be called")
    chosen = options or read_environment().options()
    for name, wanted in _NOT_HERE.items():
        if getattr(chosen, name) != wanted:
            raise CompileError(f"stages are data, and the option {name}={getattr(chosen, name)!r} needs a process")
    return Stages(fn, chosen)


@dataclass(frozen=True, slots=True)
class Stages:
    """A function or a module before its first stage; made by :func:`stages`."""

    fn: Callable[..., Any]
    options: Options

    def capture(self, *args: Any, **kwargs: Any) -> Captured:
        """The call ``fn(*args, **kwargs)`` as an FX graph, with its backward if anything requires grad.

        ``fn`` runs on fake tensors: nothing is computed and nothing written. Raises :class:`CompileError` for what
        can't be captured, and what ``fn`` raises.
        """
        module = self.fn if isinstance(self.fn, nn.Module) else None
        names, weights, training = LiveModule(module).read() if module is not None else ((), [], ())
        structure, leaves, arguments = describe_call(names, weights, args, kwargs)
        call = self.fn if module is None else FunctionalCall(module, list(names), strict_out_tuple=False)
        function = _Flat(call, len(names), args, kwargs)
        flat = [*weights, *leaves]
        with in_stage("capture", line_of_function(self.fn)):
            mode, fakes = example_fakes(flat, dynamic=False, num_static=len(names))
            name = next_name()
            ctx = CompileContext(
                self.options,
                Recorder().of_graph(name),
                own_stages(),
                name,
                num_static=len(names),
                publish=False,
                fake_mode=mode,
            )
            captured = capture_function(function, fakes, flat, ctx)
        made = Call(arguments, len(names), structure, function.structure, training, state_of_call())
        return Captured(made, self.options, captured.graph, captured.metadata, captured.inputs, module)


class _Flat:
    """``fn`` of the tensors among its arguments; what it returned is described in ``structure``."""

    def __init__(self, fn: Callable[..., Any], leading: int, args: Any, kwargs: Any) -> None:
        self._fn, self._leading, self._args, self._kwargs = fn, leading, args, kwargs
        self.structure: Any = None
        if hasattr(fn, "preferred_layer"):
            self.preferred_layer = fn.preferred_layer

    def __call__(self, *values: Any) -> list[Any]:
        rest = iter(values[self._leading :])
        args, kwargs = _filled(list(self._args), rest), _filled(dict(self._kwargs), rest)
        self.structure, results = describe_results(self._fn(*values[: self._leading], *args, **kwargs))
        return results


def _filled(value: Any, tensors: Iterator[Any]) -> Any:
    """``value`` with the next of the ``tensors`` in place of each of its own."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, tensors) for item in value)
    return value
