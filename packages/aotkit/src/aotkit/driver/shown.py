"""What whoever watches is shown of a compiled graph beside its stages; of a loaded one, all that its entry holds.

Note [A warm start is no blank page]
    A cache hit makes no graph, loop IR or kernels that could be logged or dumped. Shown is what the entry keeps: the
    report, the launch plan, the text of the kernels, forward and backward of a training graph. Of the rest one line
    says how to get it. None of this is made, or imported, unless it is wanted.
"""

from __future__ import annotations

import json
from typing import Any

from aotkit_inductor_lower import CompiledProgram
from aotkit_inductor_lower.launch_plan.program_text import programs_in

from ..artifact.records import Artifact, CompiledGraph, LiveCode, RecordedGraph
from ..frontend.tracing_context import publish_absent, publish_graph
from ..recorder import Recorder

__all__ = ["show_compiled", "show_loaded"]

_HOW = "To see a compile, set AOTKIT_CACHE_DIR to an empty folder or pass options={'cache': False}"


def show_compiled(graph: CompiledGraph, recorder: Recorder) -> None:
    """Dump the report and the launch plan; ``recorder`` is that of the graph's part."""
    if isinstance(graph.code, RecordedGraph):
        for part in graph.code.parts:
            show_compiled(part, recorder)
        return
    if graph.report is not None:
        recorder.dump("report", "reports", lambda: f"{graph.report}\n")
    if not isinstance(graph.code, LiveCode):
        recorder.dump("plan.json", "reports", lambda: _plans_text(graph))


def show_loaded(artifact: Artifact, kind: str, name: str, recorder: Recorder) -> None:
    """Show the forward, inference or backward (``kind``) of an entry; ``name`` is that of its graph."""
    graph = artifact.backward if kind == "backward" else artifact.forward
    assert graph is not None
    graphs = artifact.graphs
    read = None if graphs is None else graphs.read_backward if kind == "backward" else graphs.read_forward
    if read is None:
        publish_absent(f"{name}-{kind}", _HOW)
    else:
        if kind == "forward":
            publish_absent(f"{name}-joint", _HOW)
            recorder.dump("metadata", "graphs", lambda: str(artifact.metadata))
        publish_graph(f"{name}-{kind}", read)
        recorder.dump(f"{kind}.py", "graphs", lambda: str(read().print_readable(print_output=False)))
    part = recorder.part(kind)
    show_compiled(graph, part)
    text = _kernel_text(graph) if recorder.wants("kernels") else ""
    if text:
        part.dump(f"graph{_language(graph)}", "kernels", lambda: text)
    missing = [what for wanted, what in _missing(recorder, has_graph=read is not None, has_text=bool(text)) if wanted]
    if missing:
        recorder.tell(f"{name}-{kind} was loaded from the cache, which keeps no {' and no '.join(missing)}. {_HOW}")


def _missing(recorder: Recorder, *, has_graph: bool, has_text: bool) -> list[tuple[bool, str]]:
    return [
        (recorder.wants("graphs") and not has_graph, "graph of an inference"),
        (recorder.wants("kernels") and not has_text, "text of these kernels"),
        (recorder.wants("ir") or recorder.wants("passes"), "loop IR or passes"),
    ]


def _plans_text(graph: CompiledGraph) -> str:
    """The launch plan; of a graph in parts, the outer plan with the launch plans of its parts."""
    return json.dumps(_without_code(json.loads(graph.program_text())), indent=1)


def _without_code(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_without_code(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    return _without_code(raw["plan"]) if "sections" in raw else {key: _without_code(v) for key, v in raw.items()}


def _programs(graph: CompiledGraph) -> list[CompiledProgram]:
    if isinstance(graph.code, RecordedGraph):
        return [program for part in graph.code.parts for program in _programs(part)]
    return [] if isinstance(graph.code, LiveCode) else [*programs_in(graph.program())]


def _kernel_text(graph: CompiledGraph) -> str:
    return "\n".join(program.text for program in _programs(graph) if program.text)


def _language(graph: CompiledGraph) -> str:
    targets = {program.binary.target for program in _programs(graph)}
    return {frozenset({"cpu"}): ".ll", frozenset({"triton"}): ".py"}.get(frozenset(targets), ".ir")
