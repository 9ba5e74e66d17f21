"""Writes to inputs inside of an activation checkpoint: eager mode repeats them when it computes the region again.

Note [Writes that a checkpoint repeats]
    Eager checkpointing runs a region again in the backward, with all that it does: a batch norm there updates its
    running statistics twice, a counter counts twice. A joint graph has the region once, and what is recomputed of it
    is up to the partitioner. So the backward of the joint graph writes to such inputs itself: each node on the way
    from what an input held before the region to what it held behind it is recorded once more, on what the memory
    holds when the backward runs. Which writes eager repeats is known from what autograd saves: without reentrancy, a
    region runs again only as far as the last tensor that it saved. The last region runs again first.

    That is the whole story only where nothing else in the region depends on what is written, or the region would have
    other values the second time, and gradients of those. Such regions are refused.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from aotkit_functionalize import FunctionInput, Unsupported, records
from aotkit_functionalize.subclasses import tensors_inside
from aotkit_functionalize.tracing import (
    below_functional_layer,
    count_data_mutations,
    from_functional,
    is_functional,
)

from . import _torch_compat as compat

__all__ = [
    "HIDDEN_WRITERS",
    "CheckpointedRegion",
    "all_nodes",
    "is_checkpoint",
    "noting_regions",
    "refuse_own_regions",
    "regions_to_repeat",
    "repeat_writes",
    "run_region",
]

# They update running statistics though their names and schemas don't say so.
HIDDEN_WRITERS = frozenset({"batch_norm", "native_batch_norm", "instance_norm", "_batch_norm_impl_index", "lstm"})
# In training, a batch norm's results that depend on the running statistics: each on the argument at that position.
_STATISTICS = {3: 3, 4: 4}
_TRAINING_ARGUMENT = 5


@dataclass(frozen=True, slots=True)
class RegionRead:
    """A tensor that a region is given and that needs no gradient.

    Attributes:
        value: the tensor, functional.
        before: its node ahead of the region.
        writes: how often it was written to by the end of the region.
    """

    value: Tensor
    before: Node
    writes: int


@dataclass(frozen=True, slots=True)
class RegionWrite:
    """What a region makes of a tensor that it is given.

    Attributes:
        value: the tensor, functional.
        before: its node ahead of the region.
        after: what it holds behind the last write that eager mode repeats, as the recording has it, or none.
        final: what it holds behind the region.
        version_steps: by how much the repeated writes move its version counter.
    """

    value: Tensor
    before: Node
    after: Tensor | None
    final: Node
    version_steps: int


@dataclass(frozen=True, slots=True)
class CheckpointedRegion:
    """A region whose activations are checkpointed.

    Attributes:
        reads: what it is given.
        writes: what of it it writes to.
        nodes: what was recorded for the region.
        functions: the sequence numbers of its backward functions, from the first to behind the last.
        node: the call of the region.
    """

    reads: tuple[RegionRead, ...]
    writes: tuple[RegionWrite, ...]
    nodes: tuple[Node, ...]
    functions: range
    node: Node


@dataclass(slots=True)
class NotedRegions:
    """The checkpointed regions of a recording.

    Attributes:
        found: those that Dynamo's graph calls, in order.
        inside: whether one of them is being recorded.
        wrote: the operation by which a region that the function checkpoints by itself wrote to an input, if one did.
        differentiable: whether autograd has a history of something in such a region.
    """

    found: list[CheckpointedRegion] = field(default_factory=list)
    inside: bool = False
    wrote: str | None = None
    differentiable: bool = False


_NOTED: ContextVar[NotedRegions | None] = ContextVar("checkpointed regions of the recording in progress", default=None)


@contextmanager
def noting_regions(inputs: Sequence[FunctionInput]) -> Iterator[NotedRegions]:
    """Context of a recording: its checkpointed regions, as far as they are recorded by then.

    ``inputs``: those of a function that may checkpoint regions by itself; none for a graph.
    """
    regions = NotedRegions()
    token = _NOTED.set(regions)
    try:
        with _OwnCheckpoints(regions, inputs) if inputs else nullcontext():
            yield regions
    finally:
        _NOTED.reset(token)


class _OwnCheckpoints(TorchFunctionMode):
    """Sees writes to inputs in regions that a function checkpoints by itself, without Dynamo, which are recorded as
    if they were not checkpointed."""

    def __init__(self, regions: NotedRegions, inputs: Sequence[FunctionInput]) -> None:
        super().__init__()
        self._regions = regions
        self._values = [i.value for i in inputs if isinstance(i.value, Tensor) and is_functional(i.value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo, which `torch.cond` runs, looks into this function as well.
        if torch.compiler.is_dynamo_compiling() or self._regions.inside or not compat.in_checkpoint():
            return func(*args, **(kwargs or {}))
        before = [count_data_mutations(value) for value in self._values]
        result = func(*args, **(kwargs or {}))
        if before != [count_data_mutations(value) for value in self._values]:
            self._regions.wrote = str(getattr(func, "__name__", func))
        self._regions.differentiable |= isinstance(result, Tensor) and result.requires_grad
        return result


def is_checkpoint(node: Node) -> bool:
    """Whether the node calls a region whose activations are checkpointed."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "tag_activation_checkpoint"


def run_region(node: Node, arguments: Sequence[Any], run: Callable[[GraphModule], Any]) -> Any:
    """``run`` the region that ``node`` calls with ``arguments``, its graph first, and note what it writes to them.

    Raises :class:`Unsupported` for writes of which it can't be told what eager mode makes of them.
    """
    body: GraphModule = arguments[0]
    regions = _NOTED.get()
    tensors = [inner for a in arguments[1:] if isinstance(a, Tensor) for inner in tensors_inside(a)]
    given = list({id(a): a for a in tensors if is_functional(a)}.values())
    if regions is None or not torch.is_grad_enabled() or not given:
        return run(body)
    regions.inside, was_inside = True, regions.inside
    try:
        return _recorded(node, body, _Noting(given), run, regions.found)
    finally:
        regions.inside = was_inside


def _recorded(
    node: Node,
    body: GraphModule,
    noting: _Noting,
    run: Callable[[GraphModule], Any],
    regions: list[CheckpointedRegion],
) -> Any:
    last, first_function = noting.tracer.graph._root.prev, compat.next_sequence_number()
    nested = any(is_checkpoint(inner) for inner in all_nodes(body))  # whose own hooks have to stay away
    if nested or not _may_write(body):
        result = run(body)
        if noting.changed():
            how = "and has another region within it" if nested else "in a way that its graph doesn't show"
            raise _refusal(node, how)
        writes: tuple[RegionWrite, ...] = ()
    else:
        with _noting_saved_tensors(body, noting.note) as noting_body:
            result = run(noting_body)
        if node.kwargs.get("use_reentrant") or not compat.stops_early(node.kwargs):
            noting.note()
        writes = noting.writes()
    if any(write.value.requires_grad for write in writes):
        raise _refusal(node, "though its gradient is wanted")
    if writes and "_checkpoint_context_fn" in body.meta:
        raise _refusal(node, "under a policy for what is saved")
    functions = range(first_function, compat.next_sequence_number())
    nodes = tuple(_behind(last, noting.tracer.graph))
    regions.append(CheckpointedRegion(noting.reads(), writes, nodes, functions, node))
    return result


class _Noting:
    """What becomes of the tensors that a region is given, while it runs."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.tracer = compat.current_tracer()
        self._given = given
        self._before = [self._node(from_functional(value)) for value in given]
        self._counts = [count_data_mutations(value) for value in given]
        self._versions = [value._version for value in given]
        # By position: how often it was written to, what it held and its version, at the last note.
        self._noted: dict[int, tuple[int, Tensor, int]] = {}

    def note(self) -> None:
        """What was written up to now is written again by eager mode."""
        for position, value in enumerate(self._given):
            count = count_data_mutations(value)
            if count != self._counts[position] and count != self._noted.get(position, (0,))[0]:
                self._noted[position] = count, from_functional(value), value._version

    def changed(self) -> bool:
        """Whether any of the tensors was written to."""
        return self._counts != [count_data_mutations(value) for value in self._given]

    def reads(self) -> tuple[RegionRead, ...]:
        """Those that need no gradient."""
        pairs = zip(self._given, self._before, strict=True)
        return tuple(RegionRead(v, node, count_data_mutations(v)) for v, node in pairs if not v.requires_grad)

    def writes(self) -> tuple[RegionWrite, ...]:
        """Those that are written to, but for writes that find their own result unchanged."""
        found = []
        for position, (value, before, count) in enumerate(zip(self._given, self._before, self._counts, strict=True)):
            if count_data_mutations(value) == count:
                continue
            final = self._node(from_functional(value))
            if final.target is torch.ops.aten.relu.default and final.args == (before,):
                continue
            _, after, version = self._noted.get(position, (count, None, self._versions[position]))
            found.append(RegionWrite(value, before, after, final, version - self._versions[position]))
        return tuple(found)

    def _node(self, plain: Tensor) -> Node:
        node = self.tracer.unwrap_proxy(plain).node
        assert isinstance(node, Node)
        return node


def _behind(last: Node, graph: torch.fx.Graph) -> Iterator[Node]:
    node = last.next
    while node is not graph._root:
        yield node
        node = node.next


def _refusal(node: Node, how: str) -> Unsupported:
    return Unsupported(
        f"a checkpointed region writes to a tensor that it is given, {how}",
        "eager mode computes the region again in the backward, and it can't be told what it writes then",
        "Write to the tensor outside of the region",
        stack_trace=node.meta.get("stack_trace"),
    )


def _may_write(body: GraphModule) -> bool:
    """Whether some node of the graph, which is Dynamo's, may write in place."""
    return any(_node_may_write(node) for node in all_nodes(body))


def all_nodes(body: GraphModule) -> Iterator[Node]:
    """The nodes of a graph and of the graphs within it."""
    for module in body.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def _node_may_write(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):  # the graphs that it calls are looked at by themselves
        return "mutation" in target.name()
    if node.op == "call_module":
        return True
    name = compat.called_name(node)
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or name in HIDDEN_WRITERS
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, one)._schema.is_mutable for one in target.overloads()) or name in HIDDEN_WRITERS
    if getattr(target, "__module__", "") == "_operator":  # iadd, setitem
        return name.startswith("i") or name == "setitem"
    option = any(value is True for value in (*node.args, node.kwargs.get("inplace"))) or "out" in node.kwargs
    return option or name in HIDDEN_WRITERS or name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")


@contextmanager
def _noting_saved_tensors(body: GraphModule, note: Callable[[], None]) -> Iterator[GraphModule]:
    """The graph with calls around it that have autograd ``note`` each tensor that it saves in between.

    Checkpointing puts hooks of its own in place while it runs the region, so these come into place inside of it.
    """
    hooks = compat.SavedTensorHooks(note)
    graph = copy.deepcopy(body.graph)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        graph.call_function(hooks.begin)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(hooks.end)
    noting = GraphModule(body, graph)
    noting.meta.update(body.meta)
    try:
        yield noting
    finally:
        hooks.end()


def regions_to_repeat(
    noted: Sequence[CheckpointedRegion],
    functions: Sequence[Sequence[Any]],
    inputs: Sequence[FunctionInput],
    parts: Collection[int] = (),
) -> tuple[list[CheckpointedRegion], frozenset[int]]:
    """The regions that the backward computes again, and the inputs that they write to.

    ``functions``: the backward functions that each differentiable output comes from. ``parts``: which of the inputs are
    inside of tensor subclasses. Raises :class:`Unsupported` for regions that write to these, or to something else,
    since what it holds is needed within them, or that not all outputs come from, since it depends on the caller of the
    backward whether they are computed again.
    """
    index_of = {id(entered.value): entered.index for entered in inputs}
    regions = []
    for region in noted:
        written = {write.before for write in region.writes}
        later = [
            r.before for r in region.reads if id(r.value) in index_of and count_data_mutations(r.value) != r.writes
        ]
        stale = any(_dependent(region, [node for node in later if node not in written]))
        if not region.writes and not stale:
            continue
        reached = [_is_reached(region, of_output) for of_output in functions]
        if not any(reached):
            continue
        if region.writes and not all(reached):
            raise _refusal(region.node, "and only some of the graph's differentiable outputs come from it")
        if any(id(write.value) not in index_of for write in region.writes):
            raise _refusal(region.node, "and that is no input of the graph")
        if any(index_of[id(write.value)] in parts for write in region.writes):
            raise _refusal(region.node, "and that is inside of a tensor subclass")
        if stale:
            raise Unsupported(
                "a checkpointed region reads a tensor that is written to later in the forward",
                "eager mode computes the region again with what the tensor holds by then, and so other gradients",
                "Give the region a copy of the tensor",
                stack_trace=region.node.meta.get("stack_trace"),
            )
        regions.append(region)
    repeated = (write for region in regions for write in region.writes if write.after is not None)
    return regions, frozenset(index_of[id(write.value)] for write in repeated)


def _is_reached(region: CheckpointedRegion, functions: Sequence[Any]) -> bool:
    return any(f._sequence_nr() in region.functions and compat.has_saved(f) for f in functions)


def refuse_own_regions(noted: NotedRegions) -> None:
    """Raise :class:`Unsupported` if a region that the function checkpoints by itself would be computed again."""
    if noted.wrote is not None and noted.differentiable:
        raise Unsupported(
            f"a region that torch.utils.checkpoint runs writes to an input by {noted.wrote}",
            "eager mode computes the region again in the backward, and so writes again; captured without Dynamo, it is "
            "computed once",
            "Capture it by torch.compile, or write outside of the region",
        )


def repeat_writes(
    regions: Sequence[CheckpointedRegion],
    inputs: Sequence[FunctionInput],
    placeholders: Mapping[int, Tensor],
    results: Sequence[Any],
    tracer: Any,
) -> dict[int, tuple[records.BackwardWrite, Tensor]]:
    """Record the writes of ``regions`` once more; see Note [Writes that a checkpoint repeats].

    Args:
        regions: those that the backward computes again.
        inputs: of the function.
        placeholders: by the index of an input, what it holds when the backward runs.
        results: of the joint graph so far.
        tracer: of the recording.

    Returns:
        By the index of an input, the record of the write and the new value.
    """
    if not regions:
        return {}
    index_of = {id(entered.value): entered.index for entered in inputs}
    now, steps = dict(placeholders), dict.fromkeys(placeholders, 0)
    live = _live(tracer.unwrap_proxy(result).node for result in results if isinstance(result, Tensor))
    for region in reversed(regions):
        repeated = [(index_of[id(write.value)], write, write.after) for write in region.writes]
        writes = [(index, write, after) for index, write, after in repeated if after is not None]
        if any(index not in now for index, _, _ in writes):
            raise _refusal(region.node, "and that has gaps or is lazily conjugated or negated")
        afters = {index: tracer.unwrap_proxy(after).node for index, _, after in writes}
        again = {write.before: tracer.unwrap_proxy(now[index]).node for index, write, _ in writes}
        for node in _between(region, set(afters.values()), live):
            again[node] = _copied(node, again, tracer.graph)
        for index, write, after in writes:
            steps[index] += write.version_steps
            now[index] = _tensor_of(again[afters[index]], after, tracer) if afters[index] in again else after
    return {index: (records.BackwardWrite(index, steps[index]), value) for index, value in now.items()}


def _live(nodes: Iterable[Node]) -> set[Node]:
    live, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting.extend(node.all_input_nodes)
    return live


def _between(region: CheckpointedRegion, afters: set[Node], live: set[Node]) -> list[Node]:
    """The region's nodes from what inputs held before it to ``afters``, what they hold behind it, in order."""
    found = list(_dependent(region, [write.before for write in region.writes]))
    needed = _live(afters)
    allowed = needed | _live(write.final for write in region.writes)
    if any(node in live and node not in allowed for node in found):
        raise _refusal(region.node, "and also computes with what the tensor holds")
    return [node for node in found if node in needed]


def _dependent(region: CheckpointedRegion, sources: Iterable[Node]) -> Iterator[Node]:
    """The region's nodes that depend on ``sources``."""
    dependent = set(sources)
    for node in region.nodes if dependent else ():
        if _depends(node, dependent):
            dependent.add(node)
            yield node


def _depends(node: Node, dependent: Collection[Node]) -> bool:
    if node.target is operator.getitem:
        source, number = cast(tuple[Node, int], node.args)
        norm = source.target is torch.ops.aten._native_batch_norm_legit_functional.default
        if norm and source.args[_TRAINING_ARGUMENT] is True:
            position = _STATISTICS.get(number)
            return position is not None and source.args[position] in dependent
    return any(used in dependent for used in node.all_input_nodes)


def _copied(node: Node, again: Mapping[Node, Node], graph: torch.fx.Graph) -> Node:
    copied = graph.node_copy(node, lambda used: again.get(used, used))
    copied.meta = {key: value for key, value in node.meta.items() if key not in ("recompute", "ac_graph_id")}
    return copied


def _tensor_of(node: Node, like: Tensor, tracer: Any) -> Tensor:
    with compat.untraced(), below_functional_layer(), torch.no_grad():
        fake = like.detach()
    compat.track(fake, torch.fx.Proxy(node, tracer), tracer)
    return fake
