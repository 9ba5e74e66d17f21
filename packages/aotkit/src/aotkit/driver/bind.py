"""An artifact -> a callable. What was compiled just now, what a cache entry or a package holds and what was written
and read back in the verify mode are bound here, by one function; it imports no stage of a compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aotkit_cache import CacheWarning
from aotkit_inductor_lower import CompiledProgram
from aotkit_inductor_lower.memory.freed import keep_freed_memory
from aotkit_inductor_lower.runtime import ArenaPool, bind_program
from aotkit_runtime_wrappers import bind as bind_plan
from aotkit_runtime_wrappers import schema_checks
from aotkit_runtime_wrappers.double_backward import GradientRequest, Gradients, refusing

from .._notices import warn_user
from .._observer import SILENT, Observer
from ..artifact.records import Artifact, CompiledGraph, LiveCode, RecordedGraph
from ..artifact.torch_state import outside_of_modes
from .bound_recordings import BoundRecordings
from .process import collections_put_off

if TYPE_CHECKING:
    from aotkit_cudagraphs import CudagraphTrees

    from .ahead import BackwardAhead

__all__ = ["Later", "bind", "bind_graph"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Missing = tuple[bool, ...]


class Later(Protocol):
    """What a bound artifact may have to ask for after its first call; :class:`.CompileLater` is the only one."""

    @property
    def specializes(self) -> bool:
        """Whether there may be a backward for calls in which tangents are missing."""

    def backward(self, artifact: Artifact, missing: Missing) -> CompiledGraph | None:
        """Compile the backward, for calls in which these tangents are ``missing``; ``None`` if there is none."""

    def ahead(self, artifact: Artifact) -> BackwardAhead | None:
        """What begins the compile of the backward before it is asked for, if that is to be done."""

    def finished(self, artifact: Artifact) -> None:
        """The backward of ``artifact`` was compiled and bound."""

    def loaded(self, artifact: Artifact) -> None:
        """The backward of ``artifact``, which was stored, is bound."""

    def instead(self, artifact: Artifact, missing: Missing, error: Exception) -> CompiledGraph | None:
        """What runs where the compile of a backward failed, or ``None`` as of :meth:`backward`; or raises ``error``."""

    def gradients(self, artifact: Artifact, request: GradientRequest) -> tuple[Artifact, Later, Mapping[int, str]]:
        """Compile the gradients of ``artifact``, an artifact itself, and what it may have to ask for.

        Also the numbers of gradients that have derivatives which the artifact does not know, and why.
        """


def bind(
    artifact: Artifact,
    later: Later | None = None,
    *,
    observer: Observer = SILENT,
    arenas: ArenaPool | None = None,
    arguments: Mapping[int, torch.Tensor] | None = None,
    redzones: bool = False,
    name: str = "",
    trees: CudagraphTrees | None = None,
) -> Any:
    """The boxed callable of the user's flat arguments.

    Args:
        artifact: compiled or loaded.
        later: compiles what the artifact lacks when it is asked for; without it that is refused.
        observer: is told about binding.
        arenas: where temporaries live: a forward and its backward take turns.
        arguments: those that the artifact was frozen with, by position.
        redzones: watch the memory of every call; slow.
        name: of the graph, in traces of a profiler.
        trees: where recordings of CUDA graphs go, if not to those that all compiled graphs of a device share.
    """
    pool = arenas or ArenaPool()
    kind = "forward" if artifact.plan.call.training else "inference"
    recordings = BoundRecordings(trees)
    forward = bind_graph(artifact.forward, pool, arguments, redzones, name and f"{name}-{kind}", recordings)
    training: dict[str, Any] = {}
    if artifact.plan.call.training:
        keep_freed_memory()
        ahead = None if later is None else later.ahead(artifact)
        if ahead is not None:
            from .ahead import begun_by_first_call

            forward = begun_by_first_call(forward, ahead)
        label = name and f"{name}-backward"
        make_backward = _backwards(artifact, later, pool, redzones, label, recordings, ahead)
        training["backward"] = lambda: make_backward()
        training["backward_graph"] = None if artifact.graphs is None else artifact.graphs.backward_source()
        training["specialize"] = make_backward if later is None or later.specializes else None
        if later is not None and artifact.origin is not None:
            gradients = _gradients(artifact, later, observer, pool, redzones, trees)
            training["gradients"] = Gradients(artifact.metadata, gradients)
    return bind_plan(artifact.plan, forward, observer=observer, **training)


def bind_graph(
    graph: CompiledGraph,
    arenas: ArenaPool,
    arguments: Mapping[int, torch.Tensor] | None = None,
    redzones: bool = False,
    label: str = "",
    recordings: BoundRecordings | None = None,
) -> Boxed:
    """The boxed callable of one graph, with what stands directly around it.

    ``label``: its name in traces. ``recordings``: what a forward and its backward share, if they are recorded.
    """
    if isinstance(graph.code, LiveCode):
        call = graph.code.call
    elif isinstance(graph.code, RecordedGraph):
        parts = [bind_graph(part, arenas, arguments, redzones, label) for part in graph.code.parts]
        call = (recordings or BoundRecordings()).bind(graph.code, parts, graph.tensors, label)
    else:
        program = graph.program()
        constants = {
            name: (arguments or {})[value].detach() if isinstance(value, int) else value
            for name, value in graph.constants.items()
        }
        if isinstance(program, CompiledProgram):
            call = bind_program(program, constants, arenas, redzones=redzones, label=label)
        else:
            from aotkit_inductor_lower.runtime import bind_parts

            call = bind_parts(program, constants, arenas, redzones=redzones, label=label)
    if graph.detaches:
        call = _detaching(call)
    return schema_checks.checked_at_first_call(call, graph.checked) if graph.checked else call


def _backwards(
    artifact: Artifact,
    later: Later | None,
    arenas: ArenaPool,
    redzones: bool,
    label: str,
    recordings: BoundRecordings,
    ahead: BackwardAhead | None,
) -> Callable[..., Boxed | None]:
    """What gives the backward for calls in which given tangents are missing: bound if it is there, else compiled."""

    def make(missing: Missing = ()) -> Boxed | None:
        with outside_of_modes():
            return make_outside(missing)

    def make_outside(missing: Missing) -> Boxed | None:
        stored = artifact.backward
        if stored is not None and missing == artifact.missing:
            try:
                with collections_put_off():
                    bound = bind_graph(stored, arenas, None, redzones, label, recordings)
            except Exception as error:
                if later is None:
                    raise
                what = "a stored backward can't be used"  # whatever is wrong with it, the graph can be compiled
                warn_user(f"{what} ({type(error).__name__}: {error}); it is compiled again", CacheWarning)
            else:
                if later is not None:
                    later.loaded(artifact)
                return bound
        if later is None or (stored is not None and any(missing)):
            return None
        return _compiled_backward(artifact, later, missing, arenas, redzones, label, recordings, ahead)

    return make


def _compiled_backward(
    artifact: Artifact,
    later: Later,
    missing: Missing,
    arenas: ArenaPool,
    redzones: bool,
    label: str,
    recordings: BoundRecordings,
    ahead: BackwardAhead | None,
) -> Boxed | None:
    try:
        graph = later.backward(artifact, missing) if ahead is None else ahead.take(missing)
        if graph is None:
            return None
        bound = bind_graph(graph, arenas, None, redzones, label, recordings)
        later.finished(replace(artifact, backward=graph, missing=missing))
        return bound
    except Exception as error:  # noqa: BLE001  # raised again, unless there is something else to run
        graph = later.instead(artifact, missing, error)
        return None if graph is None else bind_graph(graph, arenas, None, redzones)


def _gradients(
    artifact: Artifact,
    later: Later,
    observer: Observer,
    arenas: ArenaPool,
    redzones: bool,
    trees: CudagraphTrees | None,
) -> Callable[[GradientRequest], Boxed]:
    def compile_gradients(request: GradientRequest) -> Boxed:
        with outside_of_modes():
            made, its_later, refused = later.gradients(artifact, request)
            with observer.stage("bind"):
                bound: Boxed = bind(made, its_later, observer=observer, arenas=arenas, redzones=redzones, trees=trees)
        return refusing(bound, refused) if refused else bound

    return compile_gradients


def _detaching(compiled: Boxed) -> Boxed:
    """Compiled code on detached arguments where an operator asks whether they require grad, though autograd is off."""

    def run(args: list[Any]) -> Any:
        args[:] = [v.detach() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in args]
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
