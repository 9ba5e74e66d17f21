"""The ``torch.compile`` backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotkit_aot_trace import Unsupported, floats_as_tensors
from aotkit_functionalize import OverlappingMutation
from aotkit_inductor_lower import LoweringError
from aotkit_partition import PartitionError
from aotkit_runtime_wrappers import WrapperError

from ._aliases import with_alias_variants
from ._compiled_autograd import defer_accumulations, has_lists, without_lists
from ._cudagraphs import fixed_arguments
from ._environment import read_environment
from ._inputs import fake_inputs, unsupported_device
from ._lift import lift_attributes
from ._observe import Recorder
from ._store import object_store
from .errors import CompileError, notify_eager
from .options import Options, resolve
from .pipeline import CompileContext, compile_flat, own_stages

__all__ = ["REFUSALS", "aotkit", "make_backend"]

BackendFn = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
REFUSALS = (Unsupported, OverlappingMutation, LoweringError, PartitionError, WrapperError)


def aotkit(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of the frontend; registered under the name ``"aotkit"``.

    ``mode`` is a name from :data:`aotkit.MODES`; ``options`` holds fields of :class:`aotkit.Options`, and optionally
    ``observer``, a :class:`aotkit.Recorder` that collects stage times and reports.
    Raises :class:`aotkit.UnknownOption`; with ``fallback="error"`` also :class:`aotkit.CompileError`.
    """
    given = dict(options or {})
    recorder = given.pop("observer", None)
    environment = read_environment()
    chosen = resolve(mode, given, environment.options())
    recorder = recorder or Recorder(log=environment.log, dump_dir=environment.dump_dir)
    compiled = compile_graph_module(gm, example_inputs, chosen, recorder)
    recorder.dump("seconds per stage", "timing", recorder.table)
    return compiled


def make_backend(options: Options | None = None, recorder: Recorder | None = None) -> BackendFn:
    """A backend with fixed options for ``torch.compile(backend=...)``; without options, the environment decides."""
    kept = recorder or Recorder()
    chosen = options or read_environment().options()

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph_module(gm, example_inputs, chosen, kept)

    return backend


def compile_graph_module(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, recorder: Recorder
) -> Callable[..., Any]:
    """Compile, or fall back to the frontend's graph with one notice, as ``options.fallback`` says."""
    if not options.capture:
        return gm
    if has_lists(example_inputs):
        return _compile_with_lists(gm, example_inputs, options, recorder)
    graph, held = lift_attributes(gm)
    graph = floats_as_tensors(graph)
    reason = unsupported_device([*example_inputs, *held], only_cpu=options.lowering == "kernels")
    if reason is None:
        number = next(_numbers)
        store = object_store(recorder) if options.cache else None
        fixed = fixed_arguments(example_inputs, held) if options.cudagraphs else frozenset()
        name = f"graph{number}"
        ctx = CompileContext(options, recorder, name, store, keep_input_mutations=True, fixed_arguments=fixed)

        def compile_for(args: Sequence[Any]) -> Callable[..., Any]:
            return compile_flat(graph, fake_inputs(args, graph)[1], args, ctx, own_stages())

        def compile_again(args: Sequence[Any]) -> Callable[..., Any]:
            try:
                return compile_for(args)
            except REFUSALS as refusal:
                if options.fallback == "error":
                    raise CompileError(f"graph {number} could not be compiled again: {refusal}") from refusal
                return _eager(graph, str(refusal), recorder)

        try:
            compiled = with_alias_variants(compile_for([*example_inputs, *held]), compile_again)
            return (lambda *args: compiled(*args, *held)) if held else compiled
        except REFUSALS as refusal:
            if options.fallback == "error":
                raise CompileError(f"graph {number} could not be compiled: {refusal}") from refusal
            reason = str(refusal)
    elif options.fallback == "error":
        raise CompileError(f"the graph could not be compiled: {reason}")
    return _eager(gm, reason, recorder)


def _compile_with_lists(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, recorder: Recorder
) -> Callable[..., Any]:
    try:
        plain, flat, flatten = without_lists(gm, example_inputs)
    except CompileError as refusal:
        if options.fallback == "error":
            raise
        return _eager(gm, str(refusal), recorder)
    accumulations = defer_accumulations(plain)
    run = compile_graph_module(plain, flat, options, recorder)
    return lambda *args: accumulations.finish(run(*flatten(args)))


def _eager(gm: torch.fx.GraphModule, reason: str, recorder: Recorder) -> Callable[..., Any]:
    recorder.add_fallback(reason)
    notify_eager(reason)
    return gm


_numbers = itertools.count()  # names dumps and kernels only; a counter cannot change what is compiled
