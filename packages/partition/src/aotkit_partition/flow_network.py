"""Minimum s-t cut of a network whose edges cost bytes.

Dinic's algorithm (E. A. Dinic, 1970): shortest paths are filled a level graph at a time. It is written out here, over
whole numbers of any size, since the networks of rematerialization are small once their infinite edges are contracted:
to import a library for them takes longer than all cuts of a large model together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed edge; ``capacity`` may be infinite. ``tag`` >= 0 names what is paid for when the edge is cut."""

    start: int
    end: int
    capacity: float
    tag: int = -1


def min_cut(num_vertices: int, edges: Sequence[Edge], source: int, sink: int) -> tuple[float, frozenset[int]] | None:
    """The cheapest set of edges that separates ``sink`` from ``source``; among equals the one nearest to the sink.

    Capacities are rounded up to whole numbers.

    Returns:
        The cut's cost and the tags of the cut edges; None if only an infinite cut exists.
    """
    place = _contract(num_vertices, edges, source, sink)
    if place is None:
        return None
    residual = _Residual.of(edges, place)
    residual.fill()
    reaching = residual.reaching_sink()
    cut = [edge for edge in edges if reaching[place[edge.end]] and not reaching[place[edge.start]]]
    return sum(edge.capacity for edge in cut), frozenset(edge.tag for edge in cut if edge.tag >= 0)


def _contract(num_vertices: int, edges: Sequence[Edge], source: int, sink: int) -> list[int] | None:
    """A number for each vertex: that of the source for what infinite edges lead to from it, that of the sink for what
    they lead from to it, and one of its own for any other. None if they lead from the source to the sink."""
    after: list[list[int]] = [[] for _ in range(num_vertices)]
    before: list[list[int]] = [[] for _ in range(num_vertices)]
    for edge in edges:
        if math.isinf(edge.capacity):
            after[edge.start].append(edge.end)
            before[edge.end].append(edge.start)
    from_source, to_sink = _closure(source, after), _closure(sink, before)
    if any(map(int.__and__, from_source, to_sink)):
        return None
    place, others = [], _SINK
    for first, last in zip(from_source, to_sink, strict=True):
        others += not (first or last)
        place.append(_SOURCE if first else _SINK if last else others)
    return place


def _closure(start: int, neighbours: list[list[int]]) -> list[bool]:
    found, pending = [False] * len(neighbours), [start]
    found[start] = True
    while pending:
        for vertex in neighbours[pending.pop()]:
            if not found[vertex]:
                found[vertex] = True
                pending.append(vertex)
    return found


@dataclass(slots=True)
class _Residual:
    """What still fits through each edge. Edge ``e`` and its reverse, ``e ^ 1``, are neighbours in the lists."""

    edges_of: list[list[int]]
    end: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, edges: Sequence[Edge], place: list[int]) -> _Residual:
        """The empty network, without edges that carry nothing from the source to the sink."""
        made = cls([[] for _ in range(max(place, default=_SINK) + 2)])
        infinite = 1 + sum(math.ceil(edge.capacity) for edge in edges if not math.isinf(edge.capacity))
        for edge in edges:
            start, end = place[edge.start], place[edge.end]
            if start != end and start != _SINK and end != _SOURCE and edge.capacity > 0:
                capacity = infinite if math.isinf(edge.capacity) else math.ceil(edge.capacity)
                made._add(start, end, capacity)
        return made

    def _add(self, start: int, end: int, capacity: int) -> None:
        self.edges_of[start].append(len(self.end))
        self.edges_of[end].append(len(self.end) + 1)
        self.end += (end, start)
        self.left += (capacity, 0)

    def fill(self) -> None:
        """Send as much from the source to the sink as there is room for."""
        while (level := self._levels())[_SINK] >= 0:
            self._fill_levels(level)

    def _levels(self) -> list[int]:
        """How many edges each vertex is from the source; -1 for one that nothing more reaches, or behind the sink."""
        level = [-1] * len(self.edges_of)
        level[_SOURCE] = 0
        reached = [_SOURCE]
        for vertex in reached:  # which grows
            if level[_SINK] >= 0:
                break
            for edge in self.edges_of[vertex]:
                end = self.end[edge]
                if level[end] < 0 and self.left[edge]:
                    level[end] = level[vertex] + 1
                    reached.append(end)
        return level

    def _fill_levels(self, level: list[int]) -> None:
        """Fill all paths that go up a level with each edge. A vertex that no such path passes loses its level."""
        end, left, edges_of = self.end, self.left, self.edges_of
        tried = [0] * len(edges_of)
        path: list[int] = []
        vertex = _SOURCE
        while True:
            if vertex == _SINK:
                vertex = self._send(path)
            edges, place, above = edges_of[vertex], tried[vertex], level[vertex] + 1
            while place < len(edges) and not (left[edges[place]] and level[end[edges[place]]] == above):
                place += 1
            tried[vertex] = place
            if place < len(edges):
                path.append(edges[place])
                vertex = end[edges[place]]
            elif path:
                level[vertex] = -1
                vertex = end[path.pop() ^ 1]
            else:
                return

    def _send(self, path: list[int]) -> int:
        """Send what fits through a path, which ends before its first full edge then; the vertex where it ends."""
        left = self.left
        amount = min(left[edge] for edge in path)
        for edge in path:
            left[edge] -= amount
            left[edge ^ 1] += amount
        full = next(place for place, edge in enumerate(path) if not left[edge])
        vertex = self.end[path[full] ^ 1]
        del path[full:]
        return vertex

    def reaching_sink(self) -> list[bool]:
        """Whether something more could be sent to the sink from each vertex."""
        found, pending = [False] * len(self.edges_of), [_SINK]
        found[_SINK] = True
        while pending:
            for edge in self.edges_of[pending.pop()]:
                start = self.end[edge]
                if not found[start] and self.left[edge ^ 1]:
                    found[start] = True
                    pending.append(start)
        return found
