"""Layers that a model repeats, compiled once: a graph of Dynamo in which each of them is one call.

Note [A layer compiled once]
    :mod:`..frontend.repeats` finds the layers. The first one is captured and split into a forward and a backward, as
    any graph is. The graph is then captured with a call in the place of each layer: an operator of ours, of which
    autograd knows the backward, a call of the same operator. Both name the graph that they call and say what it gives,
    so nothing has to be looked up or traced again. In the captured graph they become calls of nested regions
    (``invoke_subgraph``), and inductor-lower compiles a region once, however often it is called.

    Layers of which a call can't tell all that a graph needs to know are refused (:class:`NotAlike`), and the graph is
    compiled as it stands: one that gives one of its inputs back or a view, that communicates, of which ranks compare
    the order in the whole graph, or that writes to its inputs in another way than Note [Layers that write] says.

    What is lost is fusion over the edge of a layer, and memory that a backward may write over
    (:func:`donated_tensors`); the edge is where little is lost (Note [Where to cut]).

Note [What a layer saves]
    A layer gives a few results and saves many, each of which would pass all of torch's layers of tracing. So the
    operator gives one tensor without elements for all that a forward saves, which goes to the backward. They are put
    in its place when the graph is captured.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.fx import Graph, GraphModule, Node

from aotkit_aot_trace import Capture, TraceOptions, capture
from aotkit_functionalize import GraphMetadata
from aotkit_functionalize.records import OutputKind

from .._torch_compat import lazy_graph_module
from ..artifact.collectives import collectives_of
from ..frontend.plain_fakes import new_fake, new_fake_like
from ..frontend.repeats import Layers, body_of, find_layers, has_products
from .context import CompileContext
from .layers_that_write import NotAlike, check_memory_of_writes, put_layer, renamed_modules, writes_of

__all__ = ["NotAlike", "RepeatedLayers", "asks_for_layers", "repeated_layers"]

_library = torch.library.Library("aotkit", "DEF")
_SIGNATURE = "(Tensor[] inputs, str graph, str results) -> Tensor[]"
_TAGS = (torch.Tag.flexible_layout,)  # for others, torch's tracer notes what each call was given
_library.define(f"call_layer{_SIGNATURE}", tags=_TAGS)
_library.define(f"call_random_layer{_SIGNATURE}", tags=(*_TAGS, torch.Tag.nondeterministic_seeded))

FEWEST = {"once": 6, "auto": 15}
"""By option, so many equal layers are compiled once. Of residual layers one less is found than there are, since they
are cut within (Note [Where to cut]). A call of a small layer takes a few per cent of its time
(``python -m tools.bench.layers --steps``), so by themselves only many are, which take long to compile apart, and only
layers with products in them."""


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """A graph in which layers are calls.

    Attributes:
        graph: with one call for each layer.
        called: by name the graphs that are called.
        saved: by the name of a backward what it takes before the tangents, as in ``_LayerCall.saved``.
        hiding: names of the forwards that save something.
        counts: how many layers each group has.
        writing: the layers that write to their inputs, by the name of their graph; see Note [Layers that write].
    """

    graph: GraphModule
    called: Mapping[str, GraphModule]
    saved: Mapping[str, tuple[int, ...]]
    hiding: frozenset[str]
    counts: tuple[int, ...]
    writing: Mapping[str, Layers]

    def as_regions(self, captured: GraphModule) -> GraphModule:
        """``captured``, a capture of ``graph``, with its calls as those of nested regions, in place; layers that write
        are put there as they are."""
        for name, called in self.called.items():
            if name not in self.writing:
                setattr(captured, name, called)
        saves: dict[Node, Node] = {}
        seen: dict[str, int] = dict.fromkeys(self.writing, 0)
        for node in list(captured.graph.nodes):
            if node.op != "call_function" or node.target not in (_PLAIN, _RANDOM):
                continue
            name = str(node.args[1])
            if name in self.writing:
                put_layer(captured.graph, node, self.called[name], renamed_modules(self.writing[name], seen[name]))
                seen[name] += 1
            else:
                self._as_region(captured.graph, node, saves)
        for token in saves:
            captured.graph.erase_node(token)
        captured.recompile()
        return captured

    def _as_region(self, graph: Graph, node: Node, saves: dict[Node, Node]) -> None:
        """Put the call of a region in the place of an operator. ``saves``: by what stands for saved tensors, the call
        that saves them."""
        inputs, name, _ = node.args
        given: list[Any] = list(inputs)  # type: ignore[arg-type]
        if name in self.saved:
            rest = iter(given[1:])
            saved = [next(rest) if s < 0 else _result(graph, saves, given[0], s) for s in self.saved[str(name)]]
            given = [*saved, *rest]
        with graph.inserting_before(node):
            region = graph.get_attr(str(name))
            call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (region, name, *given))  # type: ignore[misc]
        made: Any = self.called[str(name)].graph.output_node().args[0]
        call.meta = {**node.meta, "val": tuple(made_node.meta["val"] for made_node in made)}
        call.meta["new_memory"] = True  # by :func:`_check_memory`; else the last layer may hold memory of all others
        region.meta = {key: node.meta[key] for key in _TRACED if key in node.meta}
        for user in list(node.users):
            if len(node.meta["val"]) - 1 == user.args[1] and name in self.hiding:
                saves[user] = call
        node.replace_all_uses_with(call)
        graph.erase_node(node)


def asks_for_layers(fakes: Sequence[Any], ctx: CompileContext) -> bool:
    """Whether equal layers are looked for. Recordings of device graphs and frozen weights belong to each layer."""
    chosen = ctx.options
    if chosen.repeated_layers == "apart" or chosen.lowering == "none" or chosen.cudagraphs or ctx.frozen is not None:
        return False
    return all(fake.device.type == "cpu" for fake in fakes if isinstance(fake, Tensor))


def repeated_layers(gm: GraphModule, fakes: Sequence[Any], ctx: CompileContext) -> RepeatedLayers | None:
    """``gm`` with a call for each of its layers, or ``None`` if it has none. ``fakes``: its inputs.

    Raises :class:`NotAlike`, and the refusals of a capture.
    """
    groups = find_layers(gm, FEWEST[ctx.options.repeated_layers])
    if ctx.options.repeated_layers == "auto":
        groups = [group for group in groups if has_products(group)]
    if not groups:
        return None
    known = dict(zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=False))
    called: dict[str, GraphModule] = {}
    calls: dict[Node, tuple[_LayerCall, Layers, int]] = {}
    writing: dict[str, Layers] = {}
    for number, group in enumerate(groups):
        inputs = [_fake(known.get(node, node.meta.get("example_value")), ctx) for node in group.inputs[0]]
        call, graphs = _compile_layer(f"layer{number}", body_of(gm, group), inputs, ctx)
        called.update(graphs)
        if call.writes:
            check_memory_of_writes(group, [place for place, _ in call.writes])
            writing[call.forward.name] = group
        calls.update({layer[-1]: (call, group, place) for place, layer in enumerate(group.layers)})
    trained = [call for call, _, _ in calls.values() if call.backward is not None]
    saved = {call.backward.name: call.saved for call in trained if call.backward is not None}
    hiding = frozenset(call.forward.name for call in trained)
    counts = tuple(len(group.layers) for group in groups)
    return RepeatedLayers(_with_calls(gm, calls), called, saved, hiding, counts, writing)


def _fake(like: Any, ctx: CompileContext) -> Tensor:
    assert isinstance(like, Tensor) and ctx.fake_mode is not None
    with ctx.fake_mode:
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)


# -- one layer ---------------------------------------------------------------------------------------------


def _compile_layer(
    name: str, body: GraphModule, inputs: Sequence[Tensor], ctx: CompileContext
) -> tuple[_LayerCall, dict[str, GraphModule]]:
    """What stands for a layer, and its graphs by name."""
    how = TraceOptions(random_by_memory=ctx.options.rng == "eager")
    found = capture(body, inputs, decompositions=ctx.stages.decompositions, options=how, observer=ctx.recorder)
    _check(found)
    assert ctx.fake_mode is not None
    metadata, outputs = found.metadata, len(found.metadata.outputs)
    described = tuple(map(_described, inputs))
    if not metadata.is_training:
        callee = _Callee.of(name, found.graph, ctx.fake_mode)
        return _LayerCall(callee, outputs, inputs=described, writes=writes_of(metadata)), {name: found.graph}
    with ctx.recorder.stage("partition"):
        parts = ctx.stages.split(found.graph, metadata, ctx)
    if parts.num_saved_symints:
        raise NotAlike("a layer saves a size")
    names = f"{name}_forward", f"{name}_backward"
    tangents = [t.forward_output for t in metadata.tangents]
    results = parts.forward.graph.output_node().args[0]
    strides = [tuple(results[place].meta["val"].stride()) for place in tangents]  # type: ignore[index,union-attr]
    forward = _Callee.of(names[0], parts.forward, ctx.fake_mode, outputs)
    backward = _Callee.of(names[1], parts.backward, ctx.fake_mode)
    saved = tuple(source for source in forward.sources[outputs:] if source is not None)
    if any(
        source is not None and source < 0 and ~source < len(saved) and saved[~source] >= 0
        for source in backward.sources
    ):
        raise NotAlike("a gradient of a layer is a tensor that it saves")
    call = _LayerCall(
        forward,
        outputs,
        backward,
        saved,
        tuple(zip(tangents, strides, strict=True)),
        described,
        _gradients_from(metadata),
    )
    return call, dict(zip(names, (parts.forward, parts.backward), strict=True))


def _gradients_from(metadata: GraphMetadata) -> tuple[tuple[int, ...], ...]:
    """Per input the results that its gradient comes from."""
    places = [tangent.forward_output for tangent in metadata.tangents]
    if not metadata.reached_by:
        return (tuple(places),) * len(metadata.inputs)
    return tuple(tuple(places[number] for number in numbers) for numbers in metadata.reached_by)


def _check(found: Capture) -> None:
    """Raise :class:`NotAlike` for a layer that does more than give new tensors."""
    metadata = found.metadata
    if metadata.subclasses is not None or metadata.backward_writes or metadata.effects or metadata.symbols:
        raise NotAlike("a layer has tensor subclasses, effects, sizes known at run time or a backward that writes")
    if collectives_of(found.graph):
        raise NotAlike("a layer communicates with other ranks")
    written = writes_of(metadata)
    places = [result for _, result in written]
    places += [info.graph_output if info.kind is OutputKind.FRESH else None for info in metadata.outputs]  # type: ignore[misc]
    if places != list(range(metadata.num_forward_outputs)) or metadata.repeated_outputs:
        raise NotAlike("a layer gives back an input, a view, a result twice or no tensor")


@dataclass(frozen=True, slots=True)
class _Callee:
    """A graph that is called.

    Attributes:
        name: of the graph.
        results: what the operator gives, as it is told: the first ``visible`` of the results that the graph makes. If
            there are more, one tensor without elements stands for them; see Note [What a layer saves].
        sources: per result the number of it among those that the graph makes, ``~position`` of an input, or ``None``.
        visible: how many of those the operator gives.
        is_random: the graph draws random numbers.
        mode: of the fake tensors that it is called with.
    """

    name: str
    results: str
    sources: tuple[int | None, ...]
    visible: int
    is_random: bool
    mode: FakeTensorMode

    @staticmethod
    def of(name: str, graph: GraphModule, mode: FakeTensorMode, outputs: int | None = None) -> _Callee:
        """What stands for ``graph``, whose output becomes the results that it makes, each once. ``outputs``: how many
        of its results come before those that it saves."""
        output = graph.graph.output_node()
        inputs = {node: ~position for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        made: dict[Node, int] = {}
        sources: list[int | None] = []
        returned: Any = output.args[0]
        visible = 0
        for position, node in enumerate(returned):
            if node is None or node in inputs:
                sources.append(None if node is None else inputs[node])
            else:
                sources.append(made.setdefault(node, len(made)))
            visible = len(made) if outputs is None or position < outputs else visible
        _check_memory([*inputs, *made])
        output.args = (tuple(made),)
        graph.recompile()
        rows = [_row(node.meta["val"]) for node in made]
        rows = rows[:visible] + [[[0], [1], "float32", "cpu"]] * (outputs is not None)
        random = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes)
        return _Callee(name, json.dumps(rows), tuple(sources), visible, random, mode)

    def call(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the operator gives. torch's cache of fake results is not asked: it has none for operators that are not
        torch's, and finds that out from a description of all inputs."""
        with disable_fake_tensor_cache(self.mode):
            made: list[Tensor] = (_RANDOM if self.is_random else _PLAIN)(list(inputs), self.name, self.results)
        return made

    def results_of(self, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor | None]:
        """The results, but for those that the operator does not give."""
        known = [s for s in self.sources if s is None or s < self.visible]
        return [None if s is None else inputs[~s] if s < 0 else made[s] for s in known]


def _row(value: Any) -> list[Any]:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise NotAlike("a layer gives what is no tensor")
    if not all(type(size) is int for size in (*value.shape, *value.stride())):
        raise NotAlike("a layer has sizes known at run time")
    return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch."), str(value.device)]


def _check_memory(nodes: Sequence[Node]) -> None:
    """What is called is told to make new memory, each result its own."""
    values = [node.meta.get("val") for node in nodes]
    storages = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
    if len(set(storages)) != len(storages):
        raise NotAlike("results of a layer, or of its backward, share memory")


# -- its call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """Stands for a layer in the graph that is captured.

    ``saved``: where the tensors that the backward takes before the tangents come from, as in ``_Callee.sources``.
    ``tangents``: results that have one, with its strides. ``inputs``: what those of the first layer are, to compare.
    ``gradients_from``: per input the results that its gradient comes from. ``writes``: pairs of an input and the result
    that is its new value; these results come first.
    """

    forward: _Callee
    outputs: int
    backward: _Callee | None = None
    saved: tuple[int, ...] = ()
    tangents: tuple[tuple[int, tuple[int, ...]], ...] = ()
    inputs: tuple[tuple[Any, ...], ...] = ()
    gradients_from: tuple[tuple[int, ...], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()

    __name__ = "layer"
    __qualname__ = "layer"

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if tuple(map(_described, inputs)) != self.inputs:
            raise NotAlike("a layer takes other tensors than the first one")
        if self.backward is None:
            results: list[Any] = self.forward.results_of(inputs, self.forward.call(inputs))
            for place, result in self.writes:
                inputs[place].copy_(results[result])
            return tuple(results[len(self.writes) :])
        if not torch.is_grad_enabled():
            raise NotAlike("a layer runs without gradients")
        return _Layer.apply(self, *inputs)  # type: ignore[no-any-return,no-untyped-call]


def _described(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.device, tuple(value.shape), tuple(value.stride()), value.requires_grad


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LayerCall, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        made = call.forward.call(inputs)
        results = call.forward.results_of(inputs, made)[: call.outputs]
        ctx.call, ctx.gradients_from = call, call.gradients_from
        ctx.save_for_backward(made[-1], *(inputs[~source] for source in call.saved if source < 0))
        differentiable = {place for place, _ in call.tangents}
        ctx.mark_non_differentiable(*(r for place, r in enumerate(results) if place not in differentiable))
        ctx.set_materialize_grads(False)
        return tuple(results)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call = ctx.call
        tangents = [_laid_out(gradients[place], strides) for place, strides in call.tangents]
        token, *saved = ctx.saved_tensors
        rest = iter(saved)
        inputs = [token if source >= 0 else next(rest) for source in call.saved]
        made = call.backward.call([token, *saved, *tangents])
        return None, *call.backward.results_of([*inputs, *tangents], made)


def _laid_out(gradient: Tensor | None, strides: tuple[int, ...]) -> Tensor:
    """The gradient in the layout that the backward was captured for."""
    if gradient is None:
        raise NotAlike("a result of a layer has no gradient")
    if gradient.stride() == strides:
        return gradient
    dense = gradient.contiguous()
    if dense.stride() != strides:
        raise NotAlike("a gradient is laid out in another way than a result")
    return dense


def _with_calls(gm: GraphModule, calls: Mapping[Node, tuple[_LayerCall, Layers, int]]) -> GraphModule:
    """A copy of ``gm`` with the call in the place of each layer, whose last node is given."""
    inside = {node for _, group, place in calls.values() for node in group.layers[place]}
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    new: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node not in inside:
            new[node] = graph.node_copy(node, lambda used: new[used])
        elif node in calls:
            call, group, place = calls[node]
            made = graph.call_function(call, tuple(new[used] for used in group.inputs[place]))
            made.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            for number, position in enumerate(group.outputs):
                result = group.layers[place][position]
                new[result] = graph.call_function(operator.getitem, (made, number))
                new[result].meta = dict(result.meta)
    made_module = lazy_graph_module(gm, graph)
    made_module.meta = dict(gm.meta)
    return made_module


# -- the operators -----------------------------------------------------------------------------------------


def _results(inputs: Sequence[FakeTensor], graph: str, results: str) -> list[FakeTensor]:
    return [new_fake(inputs[0].fake_mode, *row) for row in _read_results(results)]


@lru_cache(maxsize=64)
def _read_results(text: str) -> tuple[tuple[list[int], list[int], torch.dtype, torch.device], ...]:
    rows = json.loads(text)
    return tuple((sizes, strides, getattr(torch, kind), torch.device(where)) for sizes, strides, kind, where in rows)


for _name in ("call_layer", "call_random_layer"):
    torch.library.register_fake(f"aotkit::{_name}", _results, lib=_library)

_PLAIN, _RANDOM = torch.ops.aotkit.call_layer.default, torch.ops.aotkit.call_random_layer.default


def _result(graph: Graph, saves: Mapping[Node, Node], token: Node, number: int) -> Node:
    """The node of a result of the call that ``token`` stands for, behind it."""
    call = saves[token]
    for user in call.users:
        if user.target is operator.getitem and user.args[1] == number and user is not token:
            return user
    with graph.inserting_after(call):
        result = graph.call_function(operator.getitem, (call, number))
    value = new_fake_like(call.meta["val"][number])
    result.meta = {**{key: call.meta[key] for key in _TRACED if key in call.meta}, "val": value}
    return result


_TRACED = ("partitioner_tag", "stack_trace", "nn_module_stack", "seq_nr")
