"""A graph whose parts become recordings of CUDA graphs, as data: each process makes the recordings itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from aotkit_cudagraphs.plan import GraphPlan

    from .records import CompiledGraph

__all__ = ["RecordedGraph"]


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """Compiled parts of a graph, and how they are recorded.

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

        from .records import CompiledGraph

        parts = [
            CompiledGraph.from_sections(f"{name}.part{number}", sections, meta)
            for number, meta in enumerate(described["parts"])
        ]
        plan = GraphPlan.from_json(described["plan"])
        if len(plan.parts) != len(parts):
            raise ValueError(f"a plan of {len(plan.parts)} parts has {len(parts)} compiled ones")
        return RecordedGraph(plan, parts, described["outputs"], described["device"], tuple(described["static"]))
