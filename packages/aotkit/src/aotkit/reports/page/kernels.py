"""The kernels and ATen calls of a step, with what they cost, where they come from and how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from aotkit_inductor_lower.report import FusionGroup, LoweringReport

from ..profile import ProfileRow, billions_per_second
from .collect import Findings
from .texts import Budget, SourceLine, llvm_of, nest_of, source_at, triton_of
from .watch import NodeRow

__all__ = ["Card", "cards_of", "packet_of", "plain_name", "step_of"]

_IR_CHARACTERS, _CODE_CHARACTERS, _MOST_LINES = 500_000, 1_000_000, 6


@dataclass
class Card:
    """Launches of one function in one graph, or calls of one operator of ATen.

    ``ms`` and ``share`` of the step are ``None`` where nothing was measured; ``texts`` are (title, text); ``modules``
    are those of the user's that the operators are in.
    """

    anchor: str
    graph: str
    names: list[str]
    ops: tuple[str, ...]
    reason: str = ""
    ms: float | None = None
    share: float | None = None
    calls: float = 0
    bytes: int | None = None
    flops: int | None = None
    sources: list[SourceLine] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    is_kernel: bool = True

    @property
    def short_ops(self) -> str:
        """The operators of a kernel that its name does not tell, at most four."""
        ops = list(dict.fromkeys(map(plain_name, self.ops))) if self.is_kernel else []
        if len(ops) == 1 and self.names[0].startswith(ops[0].partition(".")[0]):
            return ""
        return ", ".join([*ops[:4], "…"] if len(ops) > 4 else ops)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over time."""
        return billions_per_second(self.bytes, self.ms)

    @property
    def gflop_per_s(self) -> float | None:
        """Operations over time."""
        return billions_per_second(self.flops, self.ms)


def step_of(graph: str) -> str:
    """``graph0-forward``: ``forward``; ``graph0-backward.2`` likewise."""
    return graph.partition("-")[2] or graph


def plain_name(operator: str) -> str:
    """``aten.add.Tensor``: ``add``; operators of other namespaces keep theirs."""
    plain = operator.removesuffix(".default")
    return plain.removeprefix("aten.").partition(".")[0] if plain.startswith("aten.") else plain


def packet_of(operator: str) -> str:
    """``aten.mm.out``: ``aten.mm``."""
    return ".".join(operator.split(".")[:2])


def cards_of(found: Findings) -> list[Card]:
    """The slowest first; without a profile in the order of the graphs."""
    measured = _measured(found)
    cards = [*_kernel_cards(found, measured), *_call_cards(found, measured)]
    total = sum(card.ms or 0.0 for card in cards) or 1.0
    for card in cards:
        card.share = None if card.ms is None else card.ms / total
    if found.profile is not None:
        cards.sort(key=lambda card: -(card.ms or 0.0))
    ir, code = Budget(_IR_CHARACTERS), Budget(_CODE_CHARACTERS)
    for card in cards:
        _write_texts(card, found, ir, code)
    return cards


def _measured(found: Findings) -> dict[tuple[str, str], ProfileRow]:
    """Rows by graph and name. The profile is of a compile of its own, whose graphs come in the same order."""
    if found.profile is None:
        return {}
    mine = _numbers([graph.name for graph in found.watcher.graphs])
    theirs = _numbers([row.graph for row in found.profile.rows])
    names = dict(zip(theirs, mine, strict=False))
    kernels = {(graph, group.kernel) for graph, report in _groups(found) for group in report.groups}
    rows: dict[tuple[str, str], ProfileRow] = {}
    for row in found.profile.rows:
        graph = _renamed(row.graph, names)
        together = [name for name in row.name.split(", ") if (graph, name) in kernels]
        for name in together or [row.name]:  # kernels that one native call runs share its time
            rows[graph, name] = replace(row, name=name, ms=row.ms / max(len(together), 1))
    return rows


def _numbers(graphs: list[str]) -> list[str]:
    """Names of graphs without their kinds, in the order in which they were compiled."""
    return sorted({name.partition("-")[0] for name in graphs}, key=lambda name: (len(name), name))


def _renamed(graph: str, names: dict[str, str]) -> str:
    number, dash, kind = graph.partition("-")
    return names.get(number, number) + dash + kind


def _groups(found: Findings) -> Iterator[tuple[str, LoweringReport]]:
    for graph in found.watcher.graphs:
        if isinstance(graph.report, LoweringReport):
            yield graph.name, graph.report


def _kernel_cards(found: Findings, measured: dict[tuple[str, str], ProfileRow]) -> list[Card]:
    cards: dict[tuple[str, str], Card] = {}
    for graph, report in _groups(found):
        program = found.watcher.programs.get(graph)
        rows = {row.name: row for row in found.watcher.nodes.get(graph, ())}
        functions = {} if program is None else {record.name: record.function for record in program.kernels}
        for group in report.groups:
            function = functions.get(group.kernel, group.kernel)
            ops = () if program is None else next((k.origin.ops for k in program.kernels if k.name == group.kernel), ())
            card = cards.get((graph, function))
            if card is None:
                card = cards[graph, function] = Card(f"{graph}-{function}", graph, [], ops or group.nodes)
            _add_launch(card, group, measured.get((graph, group.kernel)))
            modules = [_module(rows[node]) for node in group.nodes if node in rows]
            card.modules += [name for name in dict.fromkeys(modules) if name and name not in card.modules]
    return list(cards.values())


def _module(row: NodeRow) -> str:
    """The innermost module of an operator, as ``layers.0.norm LayerNorm``; empty outside of modules."""
    path, kind = row.modules[-1] if row.modules else ("", "")
    return f"{path} {kind}" if path else ""


def _add_launch(card: Card, group: FusionGroup, row: ProfileRow | None) -> None:
    first = not card.names
    card.names.append(group.kernel)
    card.calls += 1 if row is None else row.calls
    card.bytes = _plus(card.bytes, group.bytes, first)
    card.flops = _plus(card.flops, group.flops, first)
    if row is not None:
        card.ms = (card.ms or 0.0) + row.ms
    if group.line and len(card.sources) < _MOST_LINES:
        source = source_at(group.line)
        if source.place not in {each.place for each in card.sources}:
            card.sources.append(source)


def _plus(total: int | None, more: int | None, first: bool) -> int | None:
    if more is None or (total is None and not first):
        return None
    return (total or 0) + more


def _call_cards(found: Findings, measured: dict[tuple[str, str], ProfileRow]) -> list[Card]:
    """One card for all overloads of an operator: a call may become one that writes into memory of the plan."""
    cards: dict[tuple[str, str], Card] = {}
    kernels = set[tuple[str, str]]()
    for graph, report in _groups(found):
        kernels |= {(graph, group.kernel) for group in report.groups}
        for call in report.externs:
            card = cards.setdefault((graph, packet_of(call.target)), _empty(graph, call.target))
            card.calls += call.count
            if call.reason and call.reason not in card.reason:
                card.reason = f"{card.reason}; {call.reason}" if card.reason else call.reason
    for (graph, name), row in measured.items():
        if (graph, name) not in kernels:
            card = cards.setdefault((graph, packet_of(name)), _empty(graph, name))
            card.ms, card.calls = (card.ms or 0.0) + row.ms, max(card.calls, row.calls)
    return list(cards.values())


def _empty(graph: str, target: str) -> Card:
    packet = packet_of(target)
    return Card(f"{graph}-{packet}", graph, [packet], (packet,), is_kernel=False)


def _write_texts(card: Card, found: Findings, ir: Budget, code: Budget) -> None:
    if not card.is_kernel:
        return
    texts, function = found.watcher.texts, card.anchor.removeprefix(f"{card.graph}-")
    short = function.removeprefix("kernel_")
    parts = (
        ("Loops", ir, nest_of(texts.get(f"{card.graph}-scheduled", ""), card.names[0])),
        ("Kernel", ir, nest_of(texts.get(f"{card.graph}-kernels", ""), short)),
        ("LLVM", code, llvm_of(texts.get(f"{card.graph}-graph.ll", ""), function)),
        ("Triton", code, triton_of(texts.get(f"{card.graph}-graph.py", ""), short)),
    )
    card.texts = [(title, budget.take(text)) for title, budget, text in parts if text]
