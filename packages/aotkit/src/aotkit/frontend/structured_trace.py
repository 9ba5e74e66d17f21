"""What a compile makes, as artifacts of torch's structured traces (``TORCH_TRACE=folder``, and tlparse).

Note [Names in structured traces]
    Graphs have torch's own names (:func:`.tracing_context.publish_graph`). So has generated code,
    ``inductor_output_code``, and whether a cache entry was found, ``aotautograd_cache_hit``, ``_miss`` and ``_bypass``,
    with the key and the reason: tools show these as they show Inductor's. What only this project has is an
    ``artifact`` whose name begins with ``aotkit_``. Why Dynamo compiles again it says itself (``recompile_reasons``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._guards import CompileContext, CompileId, compile_context
from torch._logging import _internal, trace_structured

__all__ = ["TraceSink", "as_part_of", "current_compile_id", "is_tracing", "publish_artifact"]

_CACHE = {"cache.hit": "hit", "cache.miss": "miss", "cache.bypass": "bypass"}


def is_tracing() -> bool:
    """Whether somebody has structured traces written."""
    return bool(_internal.trace_log.handlers)


class TraceSink:
    """A sink of a recorder: texts and events of one graph go into the trace."""

    kinds = frozenset({"ir", "kernels", "reports"})

    def __init__(self, graph: str) -> None:
        self.graph = graph

    def text(self, name: str, kind: str, text: Callable[[], str]) -> None:
        """Generated code, or a text of ours."""
        if kind == "kernels":
            trace_structured("inductor_output_code", lambda: {"filename": _plain(name)}, payload_fn=text)
        else:
            publish_artifact(_plain(name), text, "json" if name.endswith(".json") else "string")

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """An event of the cache; others are not for a trace."""
        state = _CACHE.get(name)
        if state is None:
            return
        shown = {"graph": self.graph, "cache_state": state} | {key: str(value) for key, value in fields.items()}
        trace_structured(
            "artifact", lambda: {"name": f"aotautograd_cache_{state}", "encoding": "json"}, payload_fn=lambda: shown
        )


def current_compile_id() -> CompileId | None:
    """Of the graph that Dynamo compiles now."""
    return CompileContext.current_compile_id()


@contextmanager
def as_part_of(compile_id: CompileId | None) -> Iterator[None]:
    """Around what is made later for a graph, such as its backward: logs and traces name the graph's compile."""
    if compile_id is None or CompileContext.try_get() is not None:
        yield
        return
    with compile_context(CompileContext(compile_id)):
        yield


def publish_artifact(name: str, text: Callable[[], Any], encoding: str = "string") -> None:
    """A text of this project's own."""
    trace_structured("artifact", lambda: {"name": f"aotkit_{name}", "encoding": encoding}, payload_fn=text)


def _plain(name: str) -> str:
    """A name that tools make a file of."""
    stem = name.removesuffix(".json")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem)
