"""Pass: a maximum over more dimensions starts from one over fewer of them.

Before ``amax(x, [0, 1])`` beside ``amax(x, [1])``. After ``amax(amax(x, [1]), [0])``, which reads the small result.
Only maxima and minima: the order in which they are taken changes no bit, NaN included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "reuse_reductions"]

aten = torch.ops.aten


def reuse_reductions(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of reductions that read another's result."""
    done = 0
    seen: dict[tuple[object, Node], list[tuple[Node, frozenset[int], bool]]] = {}
    for node in before_writes(graph):
        if node.op != "call_function" or node.target not in (aten.amax.default, aten.amin.default):
            continue
        source, dims, keep = _read(node)
        known = seen.setdefault((node.target, source), [])
        smaller = [entry for entry in known if entry[1] < dims]
        known.append((node, dims, keep))
        if not smaller or done >= fuel or source.meta["val"].dim() == 0:
            continue
        best = max(smaller, key=lambda entry: len(entry[1]))
        new = emit(graph, _again(node.target, best, dims, keep, source.meta["val"].dim()), node, small=best[0])
        if new is not None:
            done += replace_node(node, new)
    return done


def _read(node: Node) -> tuple[Node, frozenset[int], bool]:
    source = node.args[0]
    assert isinstance(source, Node)
    rank = source.meta["val"].dim()
    given: Any = node.args[1] if len(node.args) > 1 else ()
    dims = frozenset(d % max(rank, 1) for d in given) or frozenset(range(rank))
    return source, dims, bool(node.args[2]) if len(node.args) > 2 else False


def _again(target: Any, small: tuple[Node, frozenset[int], bool], dims: frozenset[int], keep: bool, rank: int) -> Any:
    _, taken, kept = small
    left = [d for d in range(rank) if kept or d not in taken]  # which dimensions the small result still has

    def run(small: Any) -> Any:
        wanted = [left.index(d) for d in sorted(dims if kept else dims - taken)]
        result = target(small, wanted, keep)
        for d in sorted(taken) if keep and not kept else ():
            result = aten.unsqueeze.default(result, d)
        return result

    return run


PASS = Pass(
    "reuse-reductions",
    rewriting(reuse_reductions),
    why="a maximum over more dimensions can start from one over fewer of them",
    after=("simplify",),
)
