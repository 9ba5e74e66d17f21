"""The ``torch.compile`` backend.

What a compile needs and a hit in the cache does not is imported where a compile begins; see Note [What is loaded].
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext

from aotkit_cache import Uncacheable

from .artifact.store import CachedObjects, open_graph_cache
from .driver.alias_specializations import with_alias_variants
from .driver.bugs import first_line, is_bug, is_refusal, note_bug, raise_bug
from .driver.process import collections_put_off
from .environment import read_environment
from .errors import CompileError, notify_eager
from .frontend.inputs import has_lists, unsupported_input
from .frontend.lift import held_tensors
from .options import Options, resolve
from .recorder import Recorder

if TYPE_CHECKING:
    from .artifact.records import Artifact
    from .driver.cold import ColdCompiler
    from .driver.freezing import FrozenArguments
    from .driver.user_passes import GraphPasses

__all__ = ["GraphJob", "aotkit", "make_backend"]

BackendFn = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


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
    number = CompileContext.current_compile_id()
    recorder.dump("seconds per stage" + ("" if number is None else f" of {number}"), "timing", recorder.table)
    return compiled


def make_backend(
    options: Options | None = None, recorder: Recorder | None = None, *, passes: GraphPasses | None = None
) -> BackendFn:
    """A backend with fixed options for ``torch.compile(backend=...)``; without options, the environment decides.

    ``passes`` are run over the graphs of every compile. ``torch._dynamo.reset()`` drops recordings of CUDA graphs.
    """
    kept = recorder or Recorder()
    chosen = options or read_environment().options()

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph_module(gm, example_inputs, chosen, kept, passes)

    backend.reset = reset_recordings  # type: ignore[attr-defined]
    backend.get_compiler_config = lambda: asdict(chosen)  # type: ignore[attr-defined]
    return backend


def reset_recordings() -> None:
    """Drop the recordings of CUDA graphs that compiled graphs share; ``torch._dynamo.reset()`` calls this."""
    cudagraphs = sys.modules.get("aotkit_cudagraphs")
    if cudagraphs is not None:
        cudagraphs.reset_shared_trees()


aotkit.reset = reset_recordings  # type: ignore[attr-defined]


def compile_graph_module(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None = None,
) -> Callable[..., Any]:
    """Load or compile, or fall back to the frontend's graph with one notice, as ``options.fallback`` says."""
    if not options.capture:
        return gm
    try:
        if has_lists(example_inputs):
            return _compile_with_lists(gm, example_inputs, options, recorder, passes)
        return _compile_plain(gm, example_inputs, options, recorder, passes)
    except Exception as error:
        if not is_bug(error):
            raise
        return _run_in_spite_of(error, gm, options, recorder)


def _compile_plain(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> Callable[..., Any]:
    held = held_tensors(gm)
    reason = unsupported_input([*example_inputs, *held], kernels=options.lowering == "kernels")
    if reason is not None:
        if options.fallback == "error":
            raise CompileError(f"the graph could not be compiled: {reason}")
        return _eager(gm, reason, recorder)
    job = GraphJob(gm, options, recorder, f"graph{next(_numbers)}", passes)
    recorder.event("compile.begin", {"graph": job.name, "compile_id": str(CompileContext.current_compile_id() or "")})
    job.note_fixed(example_inputs, held)
    first = job.compile_or_fall_back([*example_inputs, *held], "could not be compiled")
    compiled = with_alias_variants(first, lambda args: job.compile_or_fall_back(args, "could not be compiled again"))
    if job.frozen is not None and job.frozen.used:
        from .driver.freezing import check_frozen

        compiled = check_frozen(compiled, job.frozen, gm)
    return (lambda *args: compiled(*args, *held)) if held else compiled


class GraphJob:
    """One graph of the frontend, loaded or compiled for one kind of arguments after the other.

    A call of the result takes the graph's inputs and then the tensors that it holds.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        options: Options,
        recorder: Recorder,
        name: str,
        passes: GraphPasses | None = None,
    ) -> None:
        self.gm, self.options, self.recorder, self.name, self.passes = gm, options, recorder, name, passes
        self.cache = open_graph_cache(recorder) if options.cache else None
        self.frozen: FrozenArguments | None = None
        self._fixed: frozenset[int] = frozenset()
        self._compiler: ColdCompiler | None = None

    def note_fixed(self, example_inputs: Sequence[Any], held: Sequence[Any]) -> None:
        """Look which arguments keep their address or their value, where that matters."""
        if self.options.cudagraphs:
            from .driver.cudagraphs import fixed_arguments

            self._fixed = fixed_arguments(example_inputs, held)
        if self.options.freezing:
            from .driver.freezing import frozen_arguments

            self.frozen = frozen_arguments(example_inputs, held)

    def compile_or_fall_back(self, args: Sequence[Any], failure: str) -> Callable[..., Any]:
        """Load or compile for ``args``; a refusal raises :class:`CompileError`, or gives the graph itself.

        So does a bug of ours, see Note [Internal errors], which raises :class:`InternalError`.
        """
        try:
            return self.compile(args)
        except Exception as refusal:
            if is_bug(refusal):
                if self._compiler is not None:
                    return _run_in_spite_of(refusal, self._compiler.graph, self.options, self.recorder)
                run, count = _run_in_spite_of(refusal, self.gm, self.options, self.recorder), _count_inputs(self.gm)
                return lambda *values: run(*values[:count])
            if not is_refusal(refusal):
                raise
            if self.options.fallback == "error":
                raise CompileError(f"{self.name.replace('graph', 'graph ')} {failure}: {refusal}") from refusal
            return _eager(self._cold().graph, str(refusal), self.recorder)

    def compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Load or compile for ``args``. Raises the packages' typed refusals."""
        chosen = self.options
        uncached = chosen.verify or chosen.redzones or chosen.lowering == "none"
        if self.cache is None or uncached:
            return self._cold().compile(args)
        try:
            with collections_put_off():
                from .artifact.lookup import Later, prepare_lookup

                with self.recorder.stage("cache-key"):
                    lookup = prepare_lookup(
                        self.gm, args, self.options, self.cache, self.recorder, self.name, self.frozen, self.passes
                    )
                found = lookup.find(Later(self._gradients, self._backward))
        except Uncacheable as error:
            self.recorder.event("cache.bypass", {"graph": self.name, "reason": error.reason})
            return self._cold().compile(args)
        if found is not None:
            return found
        from .driver.collect import Collector

        collector = Collector(lookup.save, lookup.bypass, self.frozen)
        compiled = self._cold().compile(args, collector)
        collector.seal(lookup.guards)
        return compiled

    def _cold(self) -> ColdCompiler:
        if self._compiler is None:
            from .driver.cold import ColdCompiler

            store = None if self.cache is None else CachedObjects(self.cache)
            self._compiler = ColdCompiler(
                self.gm,
                self.options,
                self.recorder,
                self.name,
                store=store,
                fixed=self._fixed,
                frozen=self.frozen,
                passes=self.passes,
            )
        return self._compiler

    def _backward(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        from .driver.compile import backward_in_spite_of

        return backward_in_spite_of(lambda: self._cold().backward(graph), graph, self.options, self.recorder)

    def _gradients(self, artifact: Artifact) -> Callable[[Any], Any]:
        return lambda request: self._cold().gradients(artifact, request)


def _compile_with_lists(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> Callable[..., Any]:
    from .frontend.compiled_autograd import defer_accumulations, without_lists

    try:
        plain, flat, flatten = without_lists(gm, example_inputs)
    except CompileError as refusal:
        if options.fallback == "error":
            raise
        return _eager(gm, str(refusal), recorder)
    accumulations = defer_accumulations(plain)
    run = compile_graph_module(plain, flat, options, recorder, passes)
    return lambda *args: accumulations.finish(run(*flatten(args)))


def _run_in_spite_of(
    error: Exception, gm: torch.fx.GraphModule, options: Options, recorder: Recorder
) -> Callable[..., Any]:
    if options.fallback == "error":
        raise_bug(error, first_line(gm))
    note_bug(error, first_line(gm), recorder)
    return gm


def _count_inputs(gm: torch.fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="placeholder"))


def _eager(gm: torch.fx.GraphModule, reason: str, recorder: Recorder) -> Callable[..., Any]:
    recorder.add_fallback(reason)
    notify_eager(reason)
    return gm


_numbers = itertools.count()  # names dumps and kernels only; a counter cannot change what is compiled
