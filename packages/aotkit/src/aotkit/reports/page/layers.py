"""The graph as layers of the user's modules: which operators each has, and which kernel computes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from aotkit_inductor_lower.launch_plan.facts import extern_calls
from aotkit_inductor_lower.report import LoweringReport

from .collect import Findings
from .kernels import Card, packet_of, plain_name, step_of
from .watch import NodeRow

__all__ = ["Box", "Layer", "layers_of"]

COLOURS = 8


@dataclass
class Box:
    """Operators that follow each other and are computed together. ``sort``: kernel, aten or view."""

    sort: str
    title: str
    anchor: str = ""
    colour: int = 0
    ops: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)


@dataclass
class Layer:
    """A module, its own operators by direction (forward, backward), and the modules in it."""

    path: str
    kind: str
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    parts: dict[str, Layer] = field(default_factory=dict)
    ms: float = 0.0
    ops: int = 0

    def short(self, around: str) -> str:
        """The path from the module around it."""
        return self.path.removeprefix(around).lstrip(".") if around else self.path

    def total(self) -> None:
        """Add up what the parts take and hold."""
        for part in self.parts.values():
            part.total()
            self.ms += part.ms
            self.ops += part.ops


def layers_of(found: Findings, cards: list[Card]) -> Layer:
    """The tree of modules over all graphs of a step."""
    whole = Layer("", found.name)
    for name, rows in found.watcher.nodes.items():
        direction = step_of(name).partition(".")[0]
        if direction not in ("forward", "backward", "inference") or _is_newer(name, found):
            continue
        homes, costs = _homes(name, found, cards)
        for row in rows:
            if row.target.startswith("<built-in function getitem"):  # one of several results: no operator
                continue
            layer = _layer(whole, row)
            layer.ops += 1
            layer.ms += costs.get(row.name, 0.0)
            _add(layer.boxes.setdefault(direction, []), row, homes.get(row.name))
    whole.total()
    while not whole.boxes and len(whole.parts) == 1:
        (part,) = whole.parts.values()
        if not part.parts:
            break
        whole = part
    return whole


def _is_newer(name: str, found: Findings) -> bool:
    """A backward for calls in which tangents are missing stands beside the one that was compiled first."""
    return "." in step_of(name) and step_of(name).partition(".")[0] in found.watcher.nodes


def _layer(whole: Layer, row: NodeRow) -> Layer:
    layer = whole
    for path, kind in row.modules:
        if path and path != layer.path:
            layer = layer.parts.setdefault(path, Layer(path, kind))
    return layer


def _homes(name: str, found: Findings, cards: list[Card]) -> tuple[dict[str, tuple[str, Card]], dict[str, float]]:
    """By operator: the name of what computes it with its card, and its share of the time."""
    report = next((g.report for g in found.watcher.graphs if g.name == name), None)
    mine = [card for card in cards if card.graph == name]
    by_kernel = {kernel: card for card in mine if card.is_kernel for kernel in card.names}
    homes: dict[str, tuple[str, Card]] = {}
    costs: dict[str, float] = {}
    for group in report.groups if isinstance(report, LoweringReport) else ():
        card = by_kernel.get(group.kernel)
        for node in group.nodes if card is not None else ():
            assert card is not None
            homes.setdefault(node, (group.kernel, card))
            costs[node] = costs.get(node, 0.0) + (card.ms or 0.0) / len(card.names) / len(group.nodes)
    program = found.watcher.programs.get(name)
    by_target = {card.names[0]: card for card in mine if not card.is_kernel}
    for target, result in extern_calls(program) if program is not None else ():
        card = by_target.get(packet_of(target))
        if card is not None and result:
            for node in (result, result.rpartition("_")[0]):
                homes.setdefault(node, (card.names[0], card))
            costs[result] = costs.get(result, 0.0) + (card.ms or 0.0) / max(card.calls, 1)
    return homes, costs


def _add(boxes: list[Box], row: NodeRow, home: tuple[str, Card] | None) -> None:
    sort = "view" if home is None else "kernel" if home[1].is_kernel else "aten"
    title = "" if home is None else home[0]
    if not boxes or (boxes[-1].sort, boxes[-1].title) != (sort, title) or sort == "aten":
        anchor = "" if home is None else home[1].anchor
        boxes.append(Box(sort, title, anchor, sum(map(ord, title)) % COLOURS))
    boxes[-1].ops.append(plain_name(row.target))
    boxes[-1].shapes.append(row.result)
