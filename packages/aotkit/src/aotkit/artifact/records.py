"""All that a compiled graph is, as data: written to a cache entry or a package, read back, bound to this process.

Note [What is loaded]
    This module and what it imports is the whole of what a hit needs: neither Dynamo nor sympy, neither the tracer nor
    the partitioner nor the code generator. Graphs as text (for second derivatives and compiled autograd) are
    kept packed, and are read, with the modules that can, when somebody asks for them.
"""

from __future__ import annotations

import ctypes
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotkit_cache import CacheWarning
from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import ArenaPool, bind_program, compiled_from_json, compiled_to_json
from aotkit_runtime_wrappers import Gradients, WrapperPlan, bind

from ..driver.around import around_compiled
from ..driver.process import collections_put_off

__all__ = ["ARTIFACT_FORMAT", "Artifact", "StoredGraph", "StoredReport", "bind_artifact"]

ARTIFACT_FORMAT = 6
"""Of all that an artifact holds. Whoever changes the meaning of a plan, of metadata or of object code adds one."""

Boxed = Callable[[list[Any]], Sequence[Any]]


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
class StoredGraph:
    """One compiled graph.

    Attributes:
        program: launch plan and object code or cubins, as JSON text.
        constants: tensors that the graph holds, by name.
        borrowed: of the others, frozen as they are, the positions among the user's arguments.
        detaches: see :class:`.WithoutHistory`.
        checked: names of custom operators that are looked at in the first call.
        report: the lowering's report, with its ``text``.
    """

    program: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    detaches: bool = False
    checked: tuple[str, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    borrowed: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(compiled: Any, detaches: bool, checked: Sequence[str], borrowed: Mapping[str, int]) -> StoredGraph:
        """From a ``CompiledGraph`` of inductor-lower."""
        report = {**compiled.report().to_json(), "text": str(compiled.report())}
        program = compiled_to_json(compiled.compiled)
        constants = {name: value for name, value in compiled.constants.items() if name not in borrowed}
        return StoredGraph(program, constants, detaches, tuple(checked), report, dict(borrowed))

    def bind(self, arenas: ArenaPool, arguments: Mapping[int, torch.Tensor] | None = None) -> Boxed:
        """The callable, with what stands directly around it; its temporaries live in ``arenas``."""
        constants = dict(self.constants)
        constants.update({name: (arguments or {})[index].detach() for name, index in self.borrowed.items()})
        bound: Boxed = bind_program(compiled_from_json(self.program), constants, arenas)
        return around_compiled(bound, self.detaches, self.checked)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled function.

    Attributes:
        plan, metadata: the wrapper plan and the graph's contract, as JSON text.
        forward, backward: compiled graphs; no backward for inference.
        texts: packed graph texts of forward and backward, for training.
        origin: what second derivatives need beside the function: layer, autocast, input plan.
        guards: see Note [Guards of an entry].
        frozen: positions of arguments whose values are constants of the graph.
        missing: per tangent whether the backward does without it; empty if it takes all of them.
    """

    plan: str
    metadata: str
    forward: StoredGraph
    backward: StoredGraph | None = None
    texts: Mapping[str, bytes] = field(default_factory=dict)
    origin: Mapping[str, Any] | None = None
    guards: Sequence[Any] = ()
    frozen: Sequence[int] = ()
    missing: tuple[bool, ...] = ()

    def to_sections(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Named bytes, and JSON metadata, for a cache entry."""
        sections = {"plan": self.plan.encode(), "metadata": self.metadata.encode()}
        sections.update({f"text.{name}": data for name, data in self.texts.items()})
        meta: dict[str, Any] = {"artifact": ARTIFACT_FORMAT, "origin": self.origin, "guards": list(self.guards)}
        meta["frozen"] = list(self.frozen)
        meta["missing"] = list(self.missing)
        for name, graph in (("forward", self.forward), ("backward", self.backward)):
            if graph is None:
                continue
            sections[name] = graph.program.encode()
            described = []
            for number, (constant, value) in enumerate(graph.constants.items()):
                sections[f"{name}.constant{number}"] = bytes_of(value)
                described.append(
                    [constant, str(value.dtype), list(value.shape), list(value.stride()), str(value.device)]
                )
            meta[name] = {
                "constants": described,
                "detaches": graph.detaches,
                "checked": list(graph.checked),
                "report": graph.report,
                "borrowed": dict(graph.borrowed),
            }
        return sections, meta

    @staticmethod
    def from_sections(sections: Mapping[str, bytes], meta: Mapping[str, Any]) -> Artifact:
        """The inverse of :meth:`to_sections`. Raises ``ValueError`` for another format."""
        if meta.get("artifact") != ARTIFACT_FORMAT:
            raise ValueError(
                f"this artifact has format {meta.get('artifact')}, and this version reads format {ARTIFACT_FORMAT}; "
                "compile it again"
            )
        return Artifact(
            sections["plan"].decode(),
            sections["metadata"].decode(),
            _graph(sections, meta, "forward"),
            _graph(sections, meta, "backward") if "backward" in meta else None,
            {name[5:]: data for name, data in sections.items() if name.startswith("text.")},
            meta["origin"],
            meta["guards"],
            meta["frozen"],
            tuple(meta["missing"]),
        )

    def text(self, name: str) -> str:
        """A graph text, unpacked."""
        return zlib.decompress(self.texts[name]).decode()


def _graph(sections: Mapping[str, bytes], meta: Mapping[str, Any], name: str) -> StoredGraph:
    described = meta[name]
    constants = {
        constant: _tensor(sections[f"{name}.constant{number}"], dtype, shape, stride, device)
        for number, (constant, dtype, shape, stride, device) in enumerate(described["constants"])
    }
    program, checked = sections[name].decode(), tuple(described["checked"])
    return StoredGraph(program, constants, described["detaches"], checked, described["report"], described["borrowed"])


def bytes_of(value: torch.Tensor) -> bytes:
    """The elements in memory order, first to last, gaps between them included."""
    if value.numel() == 0:
        return b""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.device.type != "cpu":
        value = value.as_strided((last + 1,), (1,)).cpu()
    return ctypes.string_at(value.data_ptr(), (last + 1) * value.element_size())


def _tensor(data: bytes, dtype: str, shape: Sequence[int], stride: Sequence[int], device: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    if not data:
        return torch.empty_strided(shape, stride, dtype=kind, device=device)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)
    return flat.to(device).as_strided(shape, stride)


def bind_artifact(
    artifact: Artifact,
    *,
    observer: Any = None,
    gradients: Callable[[Artifact], Callable[[Any], Boxed]] | None = None,
    on_backward: Callable[[], None] | None = None,
    arguments: Mapping[int, torch.Tensor] | None = None,
    whole_backward: Callable[[torch.fx.GraphModule], Boxed] | None = None,
) -> Any:
    """The boxed callable of the user's flat arguments; ``arguments``: those that it was frozen with, by position.

    ``gradients(artifact)`` gives what compiles second derivatives; without it they are refused. ``on_backward`` is
    called when the backward is bound, at its first run. ``whole_backward`` compiles the backward graph, where what is
    stored is for calls in which tangents are missing and one comes in which they are not.
    """
    arenas = ArenaPool()  # a forward and its backward take turns
    plan = WrapperPlan.from_json(artifact.plan)
    forward = artifact.forward.bind(arenas, arguments)
    backward = artifact.backward
    if backward is None:
        return bind(plan, forward, observer=observer)

    def bind_backward(missing: tuple[bool, ...] = ()) -> Boxed | None:
        if missing != artifact.missing:
            return None if missing or whole_backward is None else whole_backward(backward_graph())
        assert backward is not None
        try:
            with collections_put_off():
                bound = backward.bind(arenas)
        except Exception as error:
            if whole_backward is None:
                raise
            what = "a stored backward can't be used"  # whatever is wrong with it, the graph can be compiled
            warnings.warn(f"{what} ({type(error).__name__}: {error}); it is compiled again", CacheWarning, stacklevel=2)
            return None if any(missing) else whole_backward(backward_graph())
        if on_backward is not None:
            on_backward()
        return bound

    second = None
    if gradients is not None and artifact.origin is not None:
        second = Gradients(GraphMetadata.from_json(artifact.metadata), gradients(artifact))

    def backward_graph() -> torch.fx.GraphModule:
        from aotkit_partition import load_graph  # asked for rarely, by what imports a tracer anyway

        return load_graph(artifact.text("backward"))

    return bind(
        plan,
        forward,
        lambda: bind_backward(),
        observer=observer,
        gradients=second,
        backward_graph=backward_graph,
        specialize=bind_backward,
    )


def packed(text: str) -> bytes:
    """A graph text for :attr:`Artifact.texts`."""
    return zlib.compress(text.encode(), 1)
