"""A recorder that remembers what a report shows: graphs, texts, programs, and when each stage ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aotkit_inductor_lower import CompiledProgram
from aotkit_partition import PartitionReport

from ...recorder import Recorder

__all__ = ["NodeRow", "Watcher"]

_TEXTS = frozenset({"graphs", "ir", "kernels"})


@dataclass(frozen=True, slots=True)
class NodeRow:
    """An operation of a graph. ``modules``: the user's modules that it is in, the outermost first, as (path, class)."""

    name: str
    target: str
    result: str
    modules: tuple[tuple[str, str], ...]
    line: str


@dataclass
class Watcher(Recorder):
    """Keeps texts by their full name (``graph0-forward-scheduled``), graphs as rows, programs, partitions."""

    texts: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, tuple[NodeRow, ...]] = field(default_factory=dict)
    programs: dict[str, CompiledProgram] = field(default_factory=dict)
    partitions: dict[str, PartitionReport] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)

    @property
    def _shows(self) -> bool:
        return True

    def wants(self, kind: str) -> bool:
        """Texts are kept; of passes only their names, so nobody writes a graph for each."""
        return kind in _TEXTS

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """Keep a text, or the name of a pass that changed something."""
        if kind == "passes":
            self.passes.append(f"{self._prefix}{name}")
        elif kind in _TEXTS:
            content = self.texts[self._prefix + name] = text()
            if self._sink is not None and kind in self._sink.kinds:  # a trace gets them, too
                self._sink.text(self._prefix + name, kind, lambda: content)

    def keep(self, name: str, what: object, /) -> None:
        """Keep what a page shows of a graph, a partition or a program."""
        full = self._prefix + name
        if isinstance(what, torch.fx.GraphModule):
            self.nodes[full] = tuple(_row(n) for n in what.graph.nodes if n.op in ("call_function", "call_method"))
        elif isinstance(what, PartitionReport):
            self.partitions[full] = what
        elif isinstance(what, CompiledProgram):
            self.programs[full] = what


def _row(node: torch.fx.Node) -> NodeRow:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    modules = tuple((_path(path), getattr(kind, "__name__", str(kind))) for path, kind in stack.values())
    value = node.meta.get("val")
    shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return NodeRow(node.name, str(node.target), shape, modules, _line(node))


def _path(path: str) -> str:
    """``L['self'].layers.0`` as a user writes it: ``layers.0``; empty for the whole."""
    if path.startswith("L["):
        path = path.partition("]")[2]
    for written, plain in (("['", "."), ("']", ""), ('["', "."), ('"]', ""), ("_modules.", "")):
        path = path.replace(written, plain)
    return path.lstrip(".")


def _line(node: torch.fx.Node) -> str:
    stack: Any = node.meta.get("stack_trace")
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")] if stack else []
    if not frames:
        return ""
    file, number, *_ = frames[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{number.removeprefix('line ')}"
