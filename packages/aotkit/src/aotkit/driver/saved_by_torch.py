"""The callable that torch's own ``save_compiled_function`` writes: :class:`.SavedGraph` under torch's protocol.

Imported where torch asks a backend for such a callable, and where its loader finds one in a file: Dynamo is there.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable

from .saved_graph import SavedGraph, read_graph, write_graph

__all__ = ["SavedByTorch"]


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
        """The graph again. Raises :class:`aotkit.PackageError` for one that is damaged or can't run here."""
        return cls(read_graph(data))
