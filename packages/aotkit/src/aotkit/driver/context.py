"""What the stages of one compile share, and what they hand on. This module knows no stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from aotkit_aot_trace import Origin
from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower.runtime import ArenaPool
from aotkit_runtime_wrappers import InputPlan

from ..artifact.frozen import FrozenArguments
from ..artifact.records import CompiledGraph
from ..frontend.tracing_context import publish_graph
from ..options import Options
from ..recorder import Recorder

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode

    from aotkit_cudagraphs import CudagraphTrees

__all__ = ["Boxed", "Captured", "CompileContext", "Kind", "Recordings", "Split", "Stages", "readable"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Kind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Captured:
    """The result of the first half of a compile: a functional graph, its contract, how arguments become its inputs."""

    graph: torch.fx.GraphModule
    metadata: GraphMetadata
    inputs: InputPlan
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class Split:
    """A partitioned joint graph, and how many tensors and integers the forward hands to the backward."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_saved_tensors: int
    num_saved_symints: int


@dataclass(frozen=True, slots=True)
class Stages:
    """The exchangeable stages of a compile; :func:`.own_stages` are ours.

    ``lower(graph, kind, name, ctx)`` compiles one functional graph.
    ``begin(arguments, ctx)`` is called before a function is captured, with its fake arguments: what takes a while may
    start then.
    ``reuses_donated``: the compiled backward writes into saved tensors whose memory is marked to be its own.
    ``specializes``: a backward may be compiled for calls in which tangents are missing.
    """

    decompositions: Mapping[Any, Callable[..., Any]]
    split: Callable[[torch.fx.GraphModule, GraphMetadata, CompileContext], Split]
    lower: Callable[[torch.fx.GraphModule, Kind, str, CompileContext], CompiledGraph]
    reuses_donated: bool = False
    specializes: bool = False
    begin: Callable[[Sequence[Any], CompileContext], None] | None = None


class Recordings(Protocol):
    """Stands between a compile and its stage ``lower``: plans which parts of a graph CUDA graphs record."""

    def note_static(self, metadata: GraphMetadata, inputs: InputPlan, static_inputs: frozenset[int]) -> None:
        """Look which inputs of the graph stay at their address."""

    def lower(self, graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
        """Compile the parts of one graph by ``ctx.stages``."""


@dataclass(frozen=True, slots=True)
class CompileContext:
    """What every stage of one compile shares: options, the recorder, the stages, a name for dumps, where objects are
    kept.

    ``num_static``: so many leading arguments (parameters and buffers) are in the same memory at every call.
    ``keep_input_mutations``: the graph of an inference writes to its inputs itself, where that can be.
    ``static_inputs``: positions of arguments that Dynamo knows to keep their address, mostly.
    ``frozen``: arguments that become constants of an inference.
    ``trees``: where recordings of CUDA graphs go, if not to those that all compiled graphs of a device share.
    ``recordings``: of this compile, with the option ``cudagraphs``.
    ``arenas``: where temporaries live, those of a forward and its backward in turn.
    ``publish``: graphs go to torch's own log artifacts (``TORCH_LOGS``, structured traces) too.
    ``fake_mode``: the mode of the fake arguments, which tells where symbols live if no argument is a tensor.
    """

    options: Options
    recorder: Recorder
    stages: Stages
    name: str = "graph"
    object_store: Any = None
    num_static: int = 0
    keep_input_mutations: bool = False
    publish: bool = True
    static_inputs: frozenset[int] = frozenset()
    frozen: FrozenArguments | None = None
    trees: CudagraphTrees | None = None
    recordings: Recordings | None = None
    arenas: ArenaPool = field(default_factory=ArenaPool)
    fake_mode: FakeTensorMode | None = None

    def lower(self, graph: torch.fx.GraphModule, kind: Kind) -> CompiledGraph:
        """Compile one graph by the stage of this compile."""
        stage = self.stages if self.recordings is None else self.recordings
        return stage.lower(graph, kind, f"{self.name}-{kind}", self)

    def short(self, name: str) -> str:
        """The name of a part of this compile without that of the compile, which the recorder knows."""
        return name.removeprefix(f"{self.name}-")

    def dump_graph(self, name: str, graph: torch.fx.GraphModule) -> None:
        """Show ``graph`` to whoever watches."""
        self.recorder.dump(f"{self.short(name)}.py", "graphs", lambda: readable(graph))
        self.recorder.keep(self.short(name), graph)
        if self.publish:
            publish_graph(name, graph)


def readable(graph: torch.fx.GraphModule) -> str:
    """The graph as Python."""
    return str(graph.print_readable(print_output=False))
