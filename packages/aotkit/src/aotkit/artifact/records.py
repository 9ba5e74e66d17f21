"""All that a compiled function is, as data: what a compile returns, what a cache entry and a package hold.

Note [What is loaded]
    This module and what it imports, with :mod:`..driver.bind`, is the whole of what a cache hit needs: neither Dynamo
    nor sympy, neither the tracer nor the partitioner nor the code generator. Graphs as text (for second derivatives and
    compiled autograd) are kept packed, and are read, with the modules that can, when somebody asks for them.

Note [What can't be stored]
    A compile gives an artifact whatever is compiled, but not all of it is data: code of a caller's own compiler,
    calls between parts of a graph that no other process finds by a name. Such code is :class:`LiveCode`, and an
    artifact that holds some is bound like any other but not written (:meth:`Artifact.unstorable`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from aotkit_cache import Uncacheable
from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import CompiledProgram
from aotkit_inductor_lower.launch_plan.program_text import program_from_json, program_to_json
from aotkit_runtime_wrappers import WrapperPlan

from ..frontend.written_out_regions import calls_regions, write_out_regions
from .collectives import Collective, collectives_of
from .tensors import bytes_of, tensor_of

if TYPE_CHECKING:
    from aotkit_cudagraphs.plan import GraphPlan
    from aotkit_inductor_lower.launch_plan.parts import PartitionedProgram

__all__ = [
    "ARTIFACT_FORMAT",
    "Artifact",
    "CaptureOrigin",
    "CompiledGraph",
    "Graphs",
    "LiveCode",
    "RecordedGraph",
    "StoredReport",
]

ARTIFACT_FORMAT = 10
"""Of all that an artifact holds. Whoever changes the meaning of a plan, of metadata or of object code adds one."""

Boxed = Callable[[list[Any]], Sequence[Any]]

_MOST_CONSTANT_BYTES = 64 << 20
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class StoredReport:
    """The lowering's report on a graph as it was when the graph was compiled."""

    data: Mapping[str, Any]

    @property
    def kernel_count(self) -> int:
        """Generated kernels."""
        return int(self.data["kernel_count"])

    def to_json(self) -> dict[str, object]:
        """Plain data for ``json.dumps``."""
        return dict(self.data)

    def __str__(self) -> str:
        return str(self.data["text"])


@dataclass(frozen=True, slots=True)
class LiveCode:
    """Code that is no data: it belongs to this process, for a ``reason`` that is told to who wants to store it.

    ``result_strides``: what its compiler said about the strides of its results, if that was asked for.
    """

    call: Boxed
    reason: str
    result_strides: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """One compiled graph.

    Attributes:
        code: a compiled program of inductor-lower, in parts or not; its JSON text, which is read when it is bound;
            parts that are recorded; or live code.
        constants: by name, the tensors that the graph holds; of those that are frozen arguments as they are, the
            positions among the user's arguments.
        detaches: an operator asks whether its arguments require grad, so they are detached before each call.
        checked: names of custom operators that are looked at in the first call.
        report: the lowering's, or a :class:`StoredReport`; ``None`` for live code and where parts have their own.
        collectives: what the graph asks of other ranks, in order; see :mod:`.collectives`.
    """

    code: Any
    constants: Mapping[str, torch.Tensor | int] = field(default_factory=dict)
    detaches: bool = False
    checked: tuple[str, ...] = ()
    report: Any = None
    collectives: tuple[Collective, ...] = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The constants that are kept with the graph."""
        return {name: value for name, value in self.constants.items() if isinstance(value, torch.Tensor)}

    def unstorable(self) -> str | None:
        """Why this can't be written, or ``None``."""
        if isinstance(self.code, LiveCode):
            return self.code.reason
        if isinstance(self.code, RecordedGraph):
            found = next(filter(None, (part.unstorable() for part in self.code.parts)), None)
            if found is not None:
                return found
        kept = self.tensors.values()
        if not all(type(t) is torch.Tensor and t.device.type in _DEVICES and t.layout is torch.strided for t in kept):
            return "the graph holds a constant that is no plain tensor on the CPU or on CUDA"
        size = sum(t.untyped_storage().nbytes() for t in kept)
        return f"the graph holds {size} bytes of constants" if size > _MOST_CONSTANT_BYTES else None

    def reports(self, name: str) -> list[tuple[str, Any]]:
        """The lowering's report with the ``name`` of the graph; of one that is recorded, those of its parts."""
        return [*self.code.reports(name)] if isinstance(self.code, RecordedGraph) else [(name, self.report)]

    def program_text(self) -> str:
        """The program as JSON text; not of what is live or recorded."""
        return self.code if isinstance(self.code, str) else program_to_json(self.code)

    def program(self) -> CompiledProgram | PartitionedProgram:
        """The program, read if it is there as text; not of what is live or recorded."""
        assert not isinstance(self.code, LiveCode | RecordedGraph)
        return program_from_json(self.code) if isinstance(self.code, str) else self.code

    def to_sections(self, name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Named bytes and JSON metadata; names begin with ``name``."""
        meta: dict[str, Any] = {}
        if isinstance(self.code, RecordedGraph):
            sections, meta["recorded"] = self.code.to_sections(name)
        else:
            sections = {name: self.program_text().encode()}
            report = self.report.to_json()
            meta["report"] = report if "text" in report else {**report, "text": str(self.report)}
        described = []
        for number, (constant, value) in enumerate(self.tensors.items()):
            sections[f"{name}.constant{number}"] = bytes_of(value)
            described.append([constant, str(value.dtype), list(value.shape), list(value.stride()), str(value.device)])
        return sections, {
            **meta,
            "constants": described,
            "detaches": self.detaches,
            "checked": list(self.checked),
            "collectives": [[c.group, c.call, c.line] for c in self.collectives],
            "borrowed": {name: index for name, index in self.constants.items() if isinstance(index, int)},
        }

    @staticmethod
    def from_sections(name: str, sections: Mapping[str, bytes], described: Mapping[str, Any]) -> CompiledGraph:
        """The inverse of :meth:`to_sections`."""
        constants: dict[str, torch.Tensor | int] = {
            constant: tensor_of(sections[f"{name}.constant{number}"], dtype, shape, stride, device)
            for number, (constant, dtype, shape, stride, device) in enumerate(described["constants"])
        }
        constants.update(described["borrowed"])
        recorded = described.get("recorded")
        return CompiledGraph(
            sections[name].decode() if recorded is None else RecordedGraph.from_sections(name, sections, recorded),
            constants,
            described["detaches"],
            tuple(described["checked"]),
            StoredReport(described["report"]) if recorded is None else None,
            tuple(Collective(*row) for row in described["collectives"]),
        )


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph whose parts become recordings of CUDA graphs, which each process makes itself.

    Attributes:
        plan: which parts are recorded, with which inputs in place.
        parts: the compiled parts, in the plan's order.
        outputs: see ``Options.cudagraph_outputs``.
        device: the CUDA device whose memory recordings use.
        static: of a forward, names of inputs that keep their address; what it saves of them goes by the same names.
    """

    plan: GraphPlan
    parts: Sequence[CompiledGraph]
    outputs: Literal["survive", "copy", "overwrite"]
    device: str
    static: Sequence[str] = ()

    def reports(self, name: str) -> Iterator[tuple[str, Any]]:
        """Names of the parts, in that of the graph, and the lowering's reports on them."""
        for planned, part in zip(self.plan.parts, self.parts, strict=True):
            yield f"{name}{planned.name.removeprefix(self.plan.name)}", part.report

    def to_sections(self, name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Named bytes and JSON metadata; names begin with ``name``."""
        sections, described = {}, []
        for number, part in enumerate(self.parts):
            own, meta = part.to_sections(f"{name}.part{number}")
            sections.update(own)
            described.append(meta)
        return sections, {
            "plan": self.plan.to_json(),
            "parts": described,
            "outputs": self.outputs,
            "device": self.device,
            "static": list(self.static),
        }

    @staticmethod
    def from_sections(name: str, sections: Mapping[str, bytes], described: Mapping[str, Any]) -> RecordedGraph:
        """The inverse of :meth:`to_sections`. Raises ``ValueError`` for a plan of another version."""
        from aotkit_cudagraphs.plan import GraphPlan  # only what is recorded needs it

        parts = [
            CompiledGraph.from_sections(f"{name}.part{number}", sections, meta)
            for number, meta in enumerate(described["parts"])
        ]
        plan = GraphPlan.from_json(described["plan"])
        if len(plan.parts) != len(parts):
            raise ValueError(f"a plan of {len(plan.parts)} parts has {len(parts)} compiled ones")
        return RecordedGraph(plan, parts, described["outputs"], described["device"], tuple(described["static"]))


@dataclass(frozen=True, slots=True)
class Graphs:
    """The FX graphs of forward and backward: as they are in the process that captured them, else as packed text."""

    forward: torch.fx.GraphModule | bytes
    backward: torch.fx.GraphModule | bytes

    def packed(self) -> dict[str, bytes]:
        """Both as packed text. Raises :class:`Uncacheable` for a graph that has none."""
        return {"forward": _packed(self.forward), "backward": _packed(self.backward)}

    def read_forward(self) -> torch.fx.GraphModule:
        """The forward; values that its text does not have are described."""
        return _read(self.forward, describe_missing=True)

    def read_backward(self) -> torch.fx.GraphModule:
        """The backward."""
        return _read(self.backward)

    def backward_source(self) -> torch.fx.GraphModule | Callable[[], torch.fx.GraphModule]:
        """The backward, its regions written out, if it is there so, else what reads it."""
        here = self.backward
        if isinstance(here, torch.fx.GraphModule) and not calls_regions(here):
            return here
        return lambda: write_out_regions(self.read_backward())[0]


def _packed(graph: torch.fx.GraphModule | bytes) -> bytes:
    if isinstance(graph, bytes):
        return graph
    from aotkit_partition import PartitionError, dump_graph  # the graph is here because it was partitioned here

    try:
        return zlib.compress(dump_graph(graph).encode(), 1)
    except PartitionError as error:
        raise Uncacheable(f"the graph has no text: {error}") from error


def _read(graph: torch.fx.GraphModule | bytes, describe_missing: bool = False) -> torch.fx.GraphModule:
    if isinstance(graph, torch.fx.GraphModule):
        return graph
    from aotkit_partition import load_graph  # asked for rarely, by what imports a tracer anyway

    return load_graph(zlib.decompress(graph).decode(), describe_missing=describe_missing)


@dataclass(frozen=True, slots=True)
class CaptureOrigin:
    """What second derivatives need to know of a capture, beside the function that was captured.

    Attributes:
        layer: the functional layer that it ran in.
        autocast: autocast as it was.
        inputs: an input plan as JSON text, if the function was captured over other inputs than its arguments.
        saved_tensors: how many tensors the forward saves.
        live: in the process that captured: aot-trace's record of it, and the values that the forward saves.
    """

    layer: str
    autocast: Sequence[Any]
    inputs: str | None
    saved_tensors: int
    live: Any = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what lives."""
        return {
            "layer": self.layer,
            "autocast": self.autocast,
            "inputs": self.inputs,
            "saved_tensors": self.saved_tensors,
        }


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled function.

    Attributes:
        plan: the wrapper plan.
        metadata: the graph's contract.
        forward: the compiled forward, or the graph of an inference.
        backward: the compiled backward. For inference there is none; for training there is none yet where
            it was not asked for.
        missing: per tangent whether the backward does without it; empty if it takes all of them.
        graphs: forward and backward as FX, for training.
        origin: what second derivatives need; ``None`` where they are refused.
        guards: see Note [Guards of an entry].
        frozen: positions of arguments whose values are constants of the graph.
    """

    plan: WrapperPlan
    metadata: GraphMetadata
    forward: CompiledGraph
    backward: CompiledGraph | None = None
    missing: tuple[bool, ...] = ()
    graphs: Graphs | None = None
    origin: CaptureOrigin | None = None
    guards: Sequence[Any] = ()
    frozen: Sequence[int] = ()

    @property
    def kind(self) -> str:
        """``training`` or ``inference``."""
        return "training" if self.plan.call.training else "inference"

    def collectives(self) -> tuple[Collective, ...]:
        """Those of the forward and then of the whole backward, whether that is compiled yet or not."""
        if self.backward is not None and not any(self.missing):
            return (*self.forward.collectives, *self.backward.collectives)
        if isinstance(getattr(self.graphs, "backward", None), torch.fx.GraphModule):
            return (*self.forward.collectives, *collectives_of(self.graphs.backward))  # type: ignore[union-attr,arg-type]
        if self.backward is None or not (self.forward.collectives or self.backward.collectives):
            return self.forward.collectives
        assert self.graphs is not None
        return (*self.forward.collectives, *collectives_of(self.graphs.read_backward()))

    def unstorable(self) -> str | None:
        """Why this can't be written, or ``None``; see Note [What can't be stored]."""
        if self.plan.call.fakes is not None:
            return "Dynamo asks the compiled graph for fake results"
        reason = self.forward.unstorable()
        return reason if reason is not None or self.backward is None else self.backward.unstorable()

    def unportable(self) -> str | None:
        """Why this can't be written for other processes to load, or ``None``. A cache's key names what is written; who
        loads a file may have other meshes."""
        boundary = self.metadata.subclasses
        if boundary is not None and boundary.has_opaque():
            return "a tensor subclass holds an object of this process, as distributed tensors do their mesh"
        return self.unstorable()

    def to_sections(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Named bytes, and JSON metadata, for a cache entry.

        Raises :class:`Uncacheable` or functionalize's ``Unsupported`` for what only writing shows to have no text.
        """
        sections = {"plan": self.plan.to_json().encode(), "metadata": self.metadata.to_json().encode()}
        if self.graphs is not None:
            sections.update({f"text.{name}": data for name, data in self.graphs.packed().items()})
        origin = None if self.origin is None else self.origin.to_json()
        meta: dict[str, Any] = {"artifact": ARTIFACT_FORMAT, "origin": origin, "guards": list(self.guards)}
        meta["frozen"] = list(self.frozen)
        meta["missing"] = list(self.missing)
        for name, graph in (("forward", self.forward), ("backward", self.backward)):
            if graph is not None:
                own, meta[name] = graph.to_sections(name)
                sections.update(own)
        return sections, meta

    @staticmethod
    def from_sections(sections: Mapping[str, bytes], meta: Mapping[str, Any]) -> Artifact:
        """The inverse of :meth:`to_sections`. Raises ``ValueError`` for another format."""
        guards = guards_of_sections(meta)
        texts = [sections.get(f"text.{name}") for name in ("forward", "backward")]
        return Artifact(
            WrapperPlan.from_json(sections["plan"].decode()),
            GraphMetadata.from_json(sections["metadata"].decode()),
            CompiledGraph.from_sections("forward", sections, meta["forward"]),
            CompiledGraph.from_sections("backward", sections, meta["backward"]) if "backward" in meta else None,
            tuple(meta["missing"]),
            None if texts[0] is None or texts[1] is None else Graphs(texts[0], texts[1]),
            None if meta["origin"] is None else CaptureOrigin(**meta["origin"]),
            guards,
            meta["frozen"],
        )


def guards_of_sections(meta: Mapping[str, Any]) -> Sequence[Any]:
    """The guards of an artifact that is not read yet. Raises ``ValueError`` for another format."""
    if meta.get("artifact") != ARTIFACT_FORMAT:
        raise ValueError(
            f"this artifact has format {meta.get('artifact')}, and this version reads format {ARTIFACT_FORMAT}; "
            "compile it again"
        )
    guards: Sequence[Any] = meta["guards"]
    return guards
