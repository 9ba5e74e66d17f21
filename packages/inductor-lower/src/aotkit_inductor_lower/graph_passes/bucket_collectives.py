"""Pass: gathers and reductions of one block of a model are one collective.

Before ``wait(all_gather(a)), wait(all_gather(b))``, of the parameters of a layer. After, one gather of
``cat([a, b])`` as flat memory, of which each is cut out. Likewise ``reduce_scatter`` and ``all_reduce``. Requires that
none of them needs another's result, and that sizes are known. What joins and cuts are kernels, into which casts before
and readers behind are fused.

Note [How large a bucket is]
    A collective takes a latency and then its bytes by a bandwidth (`LowerOptions.link_latency`, `link_bandwidth`). A
    bucket is full where the latency is a ninth of its time: more in it would save less than that, and what overlaps
    with computation gets less if little begins late. Buckets end where blocks of the model do, as the module stack
    of the nodes tells them: the module behind the first index of a path (`layers.3`), else the first attribute. Nodes
    that no module stack is known of, as in a backward pass that was recorded as a whole, are one block.

    What is joined depends on the graph and the options, so that ranks that compile the same graph join the same. It is
    done before the graphs of ranks are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass, PassContext
from .model_blocks import block_of
from .node_facts import is_random, same_tensor_type, until_first_write
from .patterns import emit
from .replace import replace_node
from .rewriting import drop_dead_nodes

__all__ = ["PASS", "bucket_collectives", "has_buckets"]

aten = torch.ops.aten
_FULL = 8  # so many times the bytes that a link moves during its latency


def _ops() -> Any:
    return torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class _Member:
    """A collective with its wait. ``key``: what only those have in common that can be one."""

    start: Node
    wait: Node
    key: tuple[object, ...]
    nbytes: int

    @property
    def given(self) -> Node:
        """Its argument."""
        found = self.start.args[0]
        assert isinstance(found, Node)
        return found


@dataclass(slots=True)
class _Buckets:
    """``all``: in the order of their first members. ``of``: the bucket of each start that is in one. ``next``: of nodes
    that keep their order, the one behind."""

    all: list[list[_Member]] = field(default_factory=list)
    of: dict[Node, list[_Member]] = field(default_factory=dict)
    next: dict[Node, Node] = field(default_factory=dict)

    def add(self, member: _Member, bucket: list[_Member]) -> None:
        """One more member."""
        if not bucket:
            self.all.append(bucket)
        bucket.append(member)
        self.of[member.start] = bucket

    def depend(self, member: _Member, bucket: Sequence[_Member]) -> bool:
        """Whether one needs the result of the other, given that buckets start as one."""
        inside = {each.start for each in bucket}
        return self._reaches([member.start], inside) or self._reaches(inside, {member.start})

    def _reaches(self, starts: Iterable[Node], goals: set[Node]) -> bool:
        left, seen = [user for start in starts for user in start.users], set[Node]()
        while left:
            node = left.pop()
            if node in goals:
                return True
            if node in seen:
                continue
            seen.add(node)
            left += node.users
            if node in self.next:
                left.append(self.next[node])
            for other in self.of.get(node, ()):
                left += other.start.users
        return False


def has_buckets(graph: Graph) -> bool:
    """Whether there may be something to join: two collectives of a kind that can be."""
    return sum(_member(node) is not None for node in graph.nodes) > 1


def bucket_collectives(graph: Graph, fuel: int, latency: float, bandwidth: float) -> int:
    """Run the pass; the number of collectives that others took in. ``latency`` in seconds, ``bandwidth`` in bytes per
    second."""
    buckets = _choose(graph, int(_FULL * latency * bandwidth), fuel)
    joined = [bucket for bucket in buckets.all if len(bucket) > 1]
    made = sum(_join(graph, bucket) for bucket in joined)
    if made:
        _sort(graph)
        drop_dead_nodes(graph)
    return made


def _choose(graph: Graph, full: int, fuel: int) -> _Buckets:
    ordered = _in_order(graph)
    buckets = _Buckets(next=dict(itertools.pairwise(ordered)))
    open_: dict[tuple[object, ...], list[_Member]] = {}
    spent = 0
    for member in filter(None, map(_member, until_first_write(graph))):
        bucket = open_.get(member.key)
        fits = bucket is not None and sum(each.nbytes for each in bucket) + member.nbytes <= full
        if bucket is None or not fits or spent >= fuel or buckets.depend(member, bucket):
            bucket = open_[member.key] = []
        else:
            spent += 1
        buckets.add(member, bucket)
    return buckets


def _member(node: Node) -> _Member | None:
    kind = _kinds().get(node.target) if node.op == "call_function" else None
    if kind is None or node.kwargs or len(node.users) != 1:
        return None
    (wait,), given = node.users, node.args[0]
    value = given.meta.get("val") if isinstance(given, Node) else None
    if wait.target is not _ops().wait_tensor.default or not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in value.shape) or not value.numel():
        return None
    result = wait.meta.get("val")
    if not isinstance(result, torch.Tensor) or not result.is_contiguous() or not value.dim():
        return None
    nbytes = max(value.numel(), result.numel()) * value.element_size()
    return _Member(node, wait, (node.target, *node.args[1:], value.dtype, value.device, block_of(node)), nbytes)


_Joiner = Callable[..., Any]


def _kinds() -> dict[object, _Joiner]:
    """How to join each kind of collective: given what its members take, what comes out for each."""
    if not hasattr(_ops(), "all_gather_into_tensor"):
        return {}
    return {
        _ops().all_gather_into_tensor.default: _gather,
        _ops().reduce_scatter_tensor.default: _scatter,
        _ops().all_reduce.default: _reduce,
    }


def _join(graph: Graph, bucket: Sequence[_Member]) -> int:
    """How many of the bucket are gone: all but one, or none."""
    first, last = bucket[0], bucket[-1]
    new = list(_kinds()[first.start.target](graph, last.wait, bucket, first.start.args[1:]))
    if not all(same_tensor_type(piece, member.wait) for piece, member in zip(new, bucket, strict=True)):
        return 0
    if not all(replace_node(member.wait, piece) for piece, member in zip(new, bucket, strict=True)):
        raise AssertionError("results of a bucket have no storage but their own")
    for member in bucket:
        graph.erase_node(member.wait)
        graph.erase_node(member.start)
    return len(bucket) - 1


def _gather(graph: Graph, at: Node, bucket: Sequence[_Member], others: Sequence[Any]) -> Iterator[Node]:
    """Each rank's parts beside each other, so that a parameter is a column."""
    ranks, group = others
    flat = _cat(graph, at, [_shaped(graph, at, member.given, [-1]) for member in bucket], 0)
    whole = _emit(graph, at, lambda flat: _waited(_ops().all_gather_into_tensor.default(flat, ranks, group)), flat=flat)
    for member, first, past in _places(bucket, [_numel(member.given) for member in bucket]):
        shape = list(member.wait.meta["val"].shape)

        def cut(whole: Any, first: int = first, past: int = past, shape: list[int] = shape) -> Any:
            column = aten.slice.Tensor(aten.view.default(whole, [ranks, -1]), 1, first, past)
            return aten._unsafe_view.default(aten.clone.default(column, memory_format=torch.contiguous_format), shape)

        yield _emit(graph, at, cut, whole=whole)


def _scatter(graph: Graph, at: Node, bucket: Sequence[_Member], others: Sequence[Any]) -> Iterator[Node]:
    """What each rank gets of all members is a row."""
    op, ranks, group = others
    rows = _cat(graph, at, [_shaped(graph, at, member.given, [ranks, -1]) for member in bucket], 1)

    def reduced(rows: Any) -> Any:
        return _waited(_ops().reduce_scatter_tensor.default(aten.view.default(rows, [-1]), op, ranks, group))

    flat = _emit(graph, at, reduced, rows=rows)
    yield from _slices(graph, at, flat, bucket)


def _reduce(graph: Graph, at: Node, bucket: Sequence[_Member], others: Sequence[Any]) -> Iterator[Node]:
    flat = _cat(graph, at, [_shaped(graph, at, member.given, [-1]) for member in bucket], 0)
    flat = _emit(graph, at, lambda flat: _waited(_ops().all_reduce.default(flat, *others)), flat=flat)
    yield from _slices(graph, at, flat, bucket)


def _slices(graph: Graph, at: Node, flat: Node, bucket: Sequence[_Member]) -> Iterator[Node]:
    """Memory of its own for each: one that leaves the graph must not keep the others alive."""
    for member, first, past in _places(bucket, [_numel(member.wait) for member in bucket]):
        shape = list(member.wait.meta["val"].shape)

        def cut(flat: Any, first: int = first, past: int = past, shape: list[int] = shape) -> Any:
            piece = aten.view.default(aten.slice.Tensor(flat, 0, first, past), shape)
            return aten.clone.default(piece, memory_format=torch.contiguous_format)

        yield _emit(graph, at, cut, flat=flat)


def _places(bucket: Sequence[_Member], sizes: Sequence[int]) -> Iterator[tuple[_Member, int, int]]:
    first = 0
    for member, size in zip(bucket, sizes, strict=True):
        yield member, first, first + size
        first += size


def _numel(node: Node) -> int:
    return int(node.meta["val"].numel())


def _waited(started: Any) -> Any:
    return _ops().wait_tensor.default(started)


def _shaped(graph: Graph, at: Node, node: Node, shape: list[int]) -> Node:
    """The elements in their order, in this shape."""
    if node.meta["val"].is_contiguous():
        return _emit(graph, at, lambda x: aten.view.default(x, shape), x=node)
    copied = {"memory_format": torch.contiguous_format}
    return _emit(graph, at, lambda x: aten._unsafe_view.default(aten.clone.default(x, **copied), shape), x=node)


def _cat(graph: Graph, at: Node, parts: list[Node], dim: int) -> Node:
    return _emit(graph, at, lambda parts: aten.cat.default(parts, dim), parts=parts)


def _emit(graph: Graph, at: Node, function: Callable[..., Any], **given: Any) -> Node:
    new = emit(graph, function, at, **given)
    assert new is not None, "copies and collectives of known sizes"
    return new


def _sort(graph: Graph) -> None:
    """Each node behind what it needs, else as before; what draws random numbers or writes keeps its order."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    needs = {node: set(node.all_input_nodes) for node in graph.nodes}
    ordered = _in_order(graph)
    for before, after in itertools.pairwise(ordered):
        needs[after].add(before)
    done: set[Node] = set()
    order: list[Node] = []
    for node in graph.nodes:  # depth first: what a node needs comes right before it
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [] if top in done else sorted(needs[top] - done, key=place.__getitem__)
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if top not in done:
                done.add(top)
                order.append(top)
    last = graph._root
    for node in order:
        last.append(node)
        last = node
    graph.lint()


def _in_order(graph: Graph) -> list[Node]:
    """What draws random numbers or writes."""
    return [node for node in graph.nodes if node.op == "call_function" and is_random(node)]


def _run(graph: Graph, ctx: PassContext) -> Graph:
    made = bucket_collectives(graph, ctx.fuel.left, ctx.options.link_latency, ctx.options.link_bandwidth)
    ctx.fuel.spend(made)
    return graph


PASS = Pass("bucket-collectives", _run, why="the latency of a collective is paid once a block, not once a parameter")
