"""The callable that torch's own ``save_compiled_function`` writes: :class:`.SavedGraph` under torch's protocol.

Imported where torch asks a backend for such a callable, and where its loader finds one in a file: Dynamo is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.aot_compile_types import SerializableCallable

from aotkit_cache import Uncacheable

from ..artifact.custom_ops import operators_of
from ..artifact.graph_contract import contract_of
from ..errors import CompileError
from ..frontend.structured_trace import publish_artifact
from .saved_graph import SavedGraph, read_graph, write_graph

if TYPE_CHECKING:
    from ..options import Options
    from .job import GraphJob

__all__ = ["SavedByTorch", "complete_graph"]


class SavedByTorch(SerializableCallable):  # type: ignore[misc]
    """A compiled graph; see Note [Saved by torch].

    ``identities``: rows of checks (see Note [Checks of a saved function]) that stand for guards which torch can't keep.
    """

    def __init__(self, graph: SavedGraph) -> None:
        self.graph = graph
        self.identities: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return self.graph(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedByTorch) -> bytes:
        """What torch keeps of the graph. Raises :class:`aotkit.PackageError` for what has no form in a file."""
        return write_graph(fn.graph)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedByTorch:
        """The graph again. Raises :class:`aotkit.PackageError` for one that is damaged or can't run here.

        The load is told in structured traces. Where nobody asked for one, torch finds that out with the first thing
        that is told, for which it makes the text: this line, not the table of all guards, which comes next.
        """
        graph = read_graph(data)
        publish_artifact("saved_function_loaded", lambda: {"bytes": len(data), "options": graph.options}, "json")
        return cls(graph)


def complete_graph(job: GraphJob, gm: torch.fx.GraphModule, args: Sequence[Any], held: Sequence[Any]) -> SavedGraph:
    """Compile ``gm``, forward and backward, or load it from the cache, for Dynamo's example inputs ``args``.

    ``held``: the tensors in ``gm``. Raises :class:`CompileError` for what can't be compiled or belongs to one process.
    """
    options = job.options
    if options.freezing:
        raise CompileError("the option 'freezing' is for graphs of one process; leave it out to save a compile")
    reason, contract, operators = None, None, []
    artifact = job.complete([*args, *held])
    try:
        contract, operators = contract_of(gm, args), operators_of(gm, sorted(options.cacheable))
    except Uncacheable as error:
        reason = error.reason
    return SavedGraph(artifact, held, _described(options), operators, contract, reason or artifact.unportable())


def _described(options: Options) -> dict[str, Any]:
    return {"processor": options.processor}
