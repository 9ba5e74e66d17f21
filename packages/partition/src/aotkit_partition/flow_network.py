"""Minimum s-t cut over scipy's max flow.

Note [Capacities in 32 bits]
scipy's max flow takes 32-bit integers, and the flow must stay below 2**31. Costs are bytes, so below 2**30 bytes in
total they are used as they are and the cut is exact. Above, a first coarse solution bounds the value of the cut;
whatever costs more than that bound is as good as infinite, and scaling by the bound loses at most about one part in
2**30 per edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_LIMIT = 2**30
_INFINITE = 2**30 + 2**29


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed edge; ``capacity`` may be infinite. ``tag`` >= 0 names what is paid for when the edge is cut."""

    start: int
    end: int
    capacity: float
    tag: int = -1


def min_cut(num_vertices: int, edges: list[Edge], source: int, sink: int) -> tuple[float, frozenset[int]] | None:
    """The cheapest set of edges that separates ``sink`` from ``source``; among equals the one nearest to the sink.

    Returns:
        The cut's cost and the tags of the cut edges; None if only an infinite cut exists.
    """
    finite = sum(edge.capacity for edge in edges if not math.isinf(edge.capacity))
    sink_side = _sink_side(num_vertices, edges, source, sink, min(1.0, _LIMIT / max(finite, 1.0)))
    if sink_side is None:
        return None
    cut = _cut_edges(edges, sink_side)
    cost = sum(edge.capacity for edge in cut)
    if finite > _LIMIT and cost > 0:
        refined = _sink_side(num_vertices, edges, source, sink, min(1.0, _LIMIT / (cost * 1.001)))
        if refined is not None:
            candidate = _cut_edges(edges, refined)
            candidate_cost = sum(edge.capacity for edge in candidate)
            if candidate_cost <= cost:
                cut, cost = candidate, candidate_cost
    return cost, frozenset(edge.tag for edge in cut if edge.tag >= 0)


def _cut_edges(edges: list[Edge], sink_side: np.ndarray) -> list[Edge]:
    return [edge for edge in edges if sink_side[edge.end] and not sink_side[edge.start]]


def _sink_side(num_vertices: int, edges: list[Edge], source: int, sink: int, scale: float) -> np.ndarray | None:
    """For each vertex whether it can still reach the sink in the residual network."""
    from scipy.sparse import csr_matrix  # 0.15 s, which an inference does not need
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    if not edges:
        alone = np.zeros(num_vertices, dtype=bool)
        alone[sink] = True
        return alone
    starts = np.fromiter((edge.start for edge in edges), dtype=np.int32, count=len(edges))
    ends = np.fromiter((edge.end for edge in edges), dtype=np.int32, count=len(edges))
    raw = np.fromiter((edge.capacity for edge in edges), dtype=np.float64, count=len(edges))
    scaled = np.where(np.isinf(raw), _INFINITE, np.minimum(np.ceil(raw * scale), _INFINITE)).astype(np.int64)
    capacities = csr_matrix((scaled, (starts, ends)), shape=(num_vertices, num_vertices))  # adds parallel edges
    capacities.data = np.minimum(capacities.data, _INFINITE).astype(np.int32)
    capacities.eliminate_zeros()
    result = maximum_flow(capacities, source, sink, method="dinic")
    if result.flow_value >= _INFINITE:
        return None
    residual = (capacities - result.flow).astype(np.int32).tocsr()
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual.T.tocsr(), sink, directed=True, return_predecessors=False)
    sink_side = np.zeros(num_vertices, dtype=bool)
    sink_side[reached] = True
    return None if sink_side[source] else sink_side
