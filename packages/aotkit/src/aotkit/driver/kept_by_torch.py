"""Compiled graphs in torch's own cache of guards and bytecode, ``torch._dynamo.config.caching_precompile``.

Note [Kept by torch]
    With that setting Dynamo keeps the guards and the bytecode of each compiled function, and a later process that finds
    them traces nothing. torch writes them when ``torch.compiler.save_cache_artifacts`` is called, each with what the
    backend recorded for its graphs, and leaves out a function of which a graph was not recorded. Ours record the sealed
    block of Note [Saved by torch], forward and backward. What it can't be used for (another processor, another version
    of a custom operator, damage) is refused while torch reads the file, after which torch compiles as ever: an error
    while it installs what it has read would end in torch's own assertion that a package is read once.

    The process that compiles runs the graph as without the setting, loaded from our cache, where the same compile put
    it. Without our cache nothing is recorded, nor where ranks compile together, nor what would hold values of this
    process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext

from ..errors import CompileError, PackageError
from .bugs import is_refusal
from .job import GraphJob
from .saved_by_torch import SavedByTorch, complete_graph
from .saved_graph import write_graph

__all__ = ["KeptByTorch", "keep"]


class KeptByTorch(BackendCacheArtifact[SavedByTorch]):  # type: ignore[misc]
    """The sealed block of a compiled graph, under the name that Dynamo gave the graph.

    Unpickling one reads the block, and raises :class:`aotkit.PackageError` for one that is damaged or can't run here.
    """

    def __init__(self, key: str, content: bytes, graph: SavedByTorch | None = None) -> None:
        super().__init__(key, content)
        self._graph = graph

    def after_deserialization(self) -> SavedByTorch:
        """The graph again."""
        return self._graph or SavedByTorch.deserialize_compile_artifacts(self.content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.key, self.content)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptByTorch:
        return self  # torch copies what is recorded; nobody writes to this


def _read(key: str, content: bytes) -> KeptByTorch:
    return KeptByTorch(key, content, SavedByTorch.deserialize_compile_artifacts(content))


def keep(job: GraphJob, gm: torch.fx.GraphModule, args: Sequence[Any], held: Sequence[Any], backend_id: str) -> None:
    """Compile ``gm``, forward and backward, for Dynamo's example inputs, and record it; tell the recorder where that is
    not possible. ``held``: the tensors in ``gm``."""
    try:
        block = write_graph(complete_graph(job, gm, args, held))
    except Exception as error:
        if not (isinstance(error, CompileError | PackageError) or is_refusal(error)):
            raise
        job.recorder.event("precompile.bypass", {"graph": job.name, "reason": str(error)})
        return
    PrecompileContext.record_artifact(KeptByTorch(key=backend_id, content=block))
