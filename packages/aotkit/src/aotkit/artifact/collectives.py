"""The collectives of a graph as data: what ranks have to ask of each other alike, and in the same order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .distributed_tensors import meshes_of

__all__ = ["RANKS_ARE_NO_PROCESSES", "Collective", "collectives_of", "groups_of_inputs"]

#: Backends of groups for tests, whose ranks are threads, or are not there.
RANKS_ARE_NO_PROCESSES = ("fake", "threaded")

_NAMESPACES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCHS_FILES = ("/torch/", "\\torch\\")
#: Ranks may send parts of different sizes.
_UNEVEN = ("all_to_all",)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: the name of its ``group``, the ``call`` as text with what ranks must have alike, and the
    user's ``line``, which is for messages."""

    group: str
    call: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.call} at {self.line}" if self.line else self.call


def collectives_of(graph: torch.fx.GraphModule) -> tuple[Collective, ...]:
    """Those that ``graph`` and the graphs that it calls start, in order; waits are a rank's own business."""
    return tuple(
        found
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and (found := _collective(node)) is not None
    )


def groups_of_inputs(values: Sequence[Any]) -> Iterator[str]:
    """Groups of meshes, and of those that tensors are spread over, whose operators may become collectives."""
    for mesh in meshes_of(values):
        yield from (group.group_name for group in mesh.get_all_groups())


def _collective(node: torch.fx.Node) -> Collective | None:
    name = str(node.target)
    if not name.startswith(_NAMESPACES):
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a packet, as Dynamo's own graph has it
        schema = getattr(node.target, node.target.overloads()[0])._schema  # type: ignore[union-attr,operator]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    group = given.pop("group_name", None)
    if not isinstance(group, str):
        return None
    short = name.split(".")[1]
    tensors, others = [], []
    for key, value in given.items():
        nodes = value if isinstance(value, list | tuple) else [value]
        if nodes and all(isinstance(item, torch.fx.Node) for item in nodes):
            tensors += [_described(item, not short.startswith(_UNEVEN)) for item in nodes]
        elif not short.startswith(_UNEVEN):
            others.append(f"{key}={value}")
    return Collective(group, f"{short}({', '.join([*tensors, *others])})", _line(node))


def _described(node: torch.fx.Node, sized: bool) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return "?"
    kind = str(value.dtype).removeprefix("torch.")
    sizes = ", ".join(str(n) if isinstance(n, int) else "?" for n in value.shape)
    return f"{kind}[{sizes}]" if sized else kind


def _line(node: torch.fx.Node) -> str:
    """The innermost line that is not torch's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    own = [frame for frame in frames if not any(part in frame[0] for part in _TORCHS_FILES)]
    return "{}:{}".format(*own[-1]) if own else ""
