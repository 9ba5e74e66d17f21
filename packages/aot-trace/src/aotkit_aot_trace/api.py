"""Public entry points: one run of a function, captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_functionalize import FunctionalLayer, GraphMetadata, NeedsDispatcherLayer, fake_arguments
from aotkit_functionalize.subclasses import subclass_arguments

from ._observer import SILENT, Observer
from .exported import ExportRequest
from .finish import finish
from .graph_function import GraphFunction
from .record import Request, record
from .state import TRACING_LOCK, AutocastState, preserved_state
from .subclass_reach import with_reach

__all__ = ["Capture", "Origin", "TraceOptions", "capture", "trace_inference", "trace_joint"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a function is captured.

    Attributes:
        training: ``False`` for an inference graph, ``True`` for a joint graph (refused if nothing needs a
            gradient), ``None`` to decide from what the one run shows.
        dynamic: give real tensors symbolic sizes; fake tensors keep the sizes they have.
        layer: torch's functionalization to use; ``None`` chooses the cheapest that can do it.
        random_by_memory: random operators are recorded so that ATen draws eager mode's numbers into any layout.
        export: the graph returns every output of the function, aliases and constants too, see ``exported``.
    """

    training: bool | None = None
    dynamic: bool = False
    layer: FunctionalLayer | None = None
    export: ExportRequest | None = None
    random_by_memory: bool = True


@dataclass(frozen=True, slots=True)
class Origin:
    """What a capture recorded: the function, the functional layer it ran in, and autocast as it was."""

    function: Callable[..., Any]
    layer: FunctionalLayer
    autocast: AutocastState

    @property
    def is_gradient(self) -> bool:
        """Whether the function is the gradient of one that was captured before."""
        return bool(getattr(self.function, "is_gradient", False))


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured function.

    Attributes:
        graph: functional ATen. Inference: flat inputs -> forward outputs. Joint: flat inputs, tangents ->
            forward outputs, then one gradient or ``None`` per flat input. Every node has ``meta["val"]``; nodes
            of a joint graph have ``meta["partitioner_tag"]``.
        metadata: the calling contract, which says what the forward outputs mean.
        fake_mode: mode of the fake tensors in the graph.
        origin: what was recorded, to record its gradients later.
        refused: positions of outputs whose derivatives are not in the graph though they have some, and why.
    """

    graph: torch.fx.GraphModule
    metadata: GraphMetadata
    fake_mode: FakeTensorMode
    origin: Origin
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def shape_env(self) -> ShapeEnv | None:
        """Where the symbols of sizes live; ``None`` if all sizes are constants."""
        env = self.fake_mode.shape_env
        return env if env is not None and env.var_to_range else None

    def __str__(self) -> str:
        return f"{self.metadata}\n{self.graph.print_readable(print_output=False)}"


def capture(
    fn: Callable[..., Any],
    flat_args: Sequence[Any],
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fake_mode: FakeTensorMode | None = None,
    options: TraceOptions | None = None,
    observer: Observer = SILENT,
) -> Capture:
    """Run ``fn(*flat_args)`` once, on fake tensors, and record it as a graph with its metadata.

    Args:
        fn: takes flat arguments and returns a flat list or tuple: a Python function, a
            :class:`GraphFunction`, or an FX graph module (whose nodes' stack traces and tags are carried over).
        flat_args: tensors (real or fake; no object twice), ints, SymInts, other values.
        decompositions: operators to replace while recording, as from ``torch._decomp.get_decompositions``.
        fake_mode: mode to convert real tensors in; by default that of the fake arguments, or a new one.
        options: see :class:`TraceOptions`.
        observer: told about the stages ``trace`` and ``finish``.

    Raises:
        Unsupported: the function does something that cannot be captured faithfully.
        OverlappingMutation: inputs that share memory are mutated; capture again over a common base.
    """
    options = options or TraceOptions()
    traced = GraphFunction(fn) if isinstance(fn, torch.fx.GraphModule) else fn
    layer = options.layer
    if layer is None:
        layer = traced.preferred_layer() if hasattr(traced, "preferred_layer") else FunctionalLayer.MODE
    autocast = AutocastState.now()
    with TRACING_LOCK, preserved_state():
        exports = options.export is not None
        mode, plain = fake_arguments(flat_args, fake_mode=fake_mode, dynamic=options.dynamic, keep_bits=exports)
        subclasses = subclass_arguments(plain)
        if subclasses is not None:
            layer = FunctionalLayer.MODE  # see Note [Subclasses need the mode]
        request = Request(
            fn=traced,
            callers=flat_args,
            plain=plain,
            fake_mode=mode,
            decompositions=decompositions or {},
            layer=layer,
            training=options.training,
            # Symbolic sizes need it; of a Python function it is not known what it calls (see GraphFunction).
            python_dispatcher=_has_symbols(plain)
            or (isinstance(traced, GraphFunction) and traced.needs_python_dispatcher())
            or (layer is FunctionalLayer.DISPATCHER and not hasattr(traced, "preferred_layer")),
            subclasses=subclasses,
            export=options.export,
            random_by_memory=options.random_by_memory,
        )
        with observer.stage("trace"):
            try:
                recording = record(request)
            except NeedsDispatcherLayer:
                if options.layer is not None or layer is FunctionalLayer.DISPATCHER or subclasses is not None:
                    raise
                again = replace(request, layer=FunctionalLayer.DISPATCHER, python_dispatcher=True)
                layer, recording = again.layer, record(again)
        with observer.stage("finish"):
            # Dynamo's graphs hold these checks already.
            promises = None if hasattr(traced, "preferred_layer") else mode.shape_env
            graph = finish(recording, promises, keep_bits=exports)
    assert recording.metadata is not None
    metadata = recording.metadata
    if metadata.subclasses is not None and metadata.is_training:
        metadata = with_reach(graph.graph, metadata)
    return Capture(graph, metadata, mode, Origin(traced, layer, autocast))


def trace_inference(
    fn: Callable[..., Any],
    flat_args: Sequence[Any],
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fake_mode: FakeTensorMode | None = None,
    dynamic: bool = False,
    observer: Observer = SILENT,
) -> Capture:
    """:func:`capture` of the forward alone, whatever requires grad."""
    options = TraceOptions(training=False, dynamic=dynamic)
    return capture(
        fn, flat_args, decompositions=decompositions, fake_mode=fake_mode, options=options, observer=observer
    )


def trace_joint(
    fn: Callable[..., Any],
    flat_args: Sequence[Any],
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fake_mode: FakeTensorMode | None = None,
    dynamic: bool = False,
    observer: Observer = SILENT,
) -> Capture:
    """:func:`capture` of forward and backward; raises :class:`Unsupported` if nothing needs a gradient."""
    options = TraceOptions(training=True, dynamic=dynamic)
    return capture(
        fn, flat_args, decompositions=decompositions, fake_mode=fake_mode, options=options, observer=observer
    )


def _has_symbols(plain: Sequence[Any]) -> bool:
    return any(
        isinstance(v, torch.SymInt)
        or (isinstance(v, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in (*v.shape, *_strides(v))))
        for v in plain
    )


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return value.stride() if value.layout is torch.strided else ()
