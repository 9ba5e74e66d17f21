"""Graphs with calls that no launch plan can hold: compiled in parts around these calls.

Note [Compiled in parts]
    A launch plan is data: kernels and ATen calls over buffers whose sizes follow from the inputs' sizes. A higher-order
    operator takes functions, a token orders effects, ``.item()`` gives a number that no input's size tells. Such calls
    stay nodes of an outer graph, and every stretch of ordinary nodes between two of them becomes one compiled graph
    that it calls. Sizes that depend on data are ordinary size symbols of the parts that come after the call that makes
    them. Branches and loop bodies are compiled in the same way, once per distinct subgraph.

    The outer graph becomes data as well (Note [The outer plan]), unless it calls what no other process finds by a name,
    or what looks into the graphs that it is given: kernels of the user's own, flex attention. Then it stays an FX
    graph.
"""

from __future__ import annotations

from .run import CompiledParts, PartitionedGraph, compile_parts
from .split_ops import needs_partition

__all__ = ["CompiledParts", "PartitionedGraph", "compile_parts", "needs_partition"]
