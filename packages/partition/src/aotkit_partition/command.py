"""The command line: partition a joint graph from a file, and write what was asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.fx

from .errors import PartitionError
from .graph_text import dump_graph, load_graph
from .joint import is_backward_input
from .options import KNAPSACKS, RUNTIMES, STRATEGIES, PartitionOptions
from .partition import partition
from .plots import cut_svg, front_svg, html_report, memory_svg

_REPORTS = (".html", ".json", ".txt", ".md")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aotkit_partition",
        description="Split a joint forward-backward graph, written by aotkit_partition.dump_graph, and say why.",
    )
    add = parser.add_argument
    add("graph", type=Path, help="the joint graph (JSON text of dump_graph)")
    add("--strategy", choices=STRATEGIES, default="min-cut")
    add("--budget", type=float, help="memory budget from 0 to 1")
    add("--knapsack", choices=KNAPSACKS, default="dp", help="solver for budgets of bytes")
    add("--runtime", choices=RUNTIMES, default="roofline", help="estimator of op times")
    add("--num-fwd-outputs", type=int, help="leading outputs that belong to the forward (else found from tangents)")
    add("--report", type=_report, help="write the report: .html, .json, or text as .txt or .md")
    add("--plots", type=Path, help="folder for memory.svg, front.svg and cut.svg")
    add("--forward", type=Path, help="write the forward graph (JSON)")
    add("--backward", type=Path, help="write the backward graph (JSON)")
    add("--quiet", action="store_true", help="print only the headline")
    return parser


def _report(text: str) -> Path:
    place = Path(text)
    if place.suffix not in _REPORTS:
        raise argparse.ArgumentTypeError(
            f"a report is written as {', '.join(_REPORTS[:-1])} or {_REPORTS[-1]}, by its suffix; {text!r} has another"
        )
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 after a refusal, which is printed."""
    chosen = _parser().parse_args(arguments)
    try:
        said = _run(chosen)
    except (PartitionError, OSError, ValueError) as error:
        print(f"aotkit_partition: {error}", file=sys.stderr)
        return 1
    try:
        print("\n".join(said), flush=True)
    except BrokenPipeError:  # whoever reads has seen enough; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return 0


def _run(chosen: argparse.Namespace) -> list[str]:
    """Partition and write files; what is to be said comes afterwards, so that a reader who leaves costs no file."""
    joint = load_graph(chosen.graph.read_text(encoding="utf-8"), describe_missing=True)
    count = chosen.num_fwd_outputs
    if count is None:
        count = count_forward_outputs(joint)
    options = PartitionOptions(
        strategy=chosen.strategy,
        memory_budget=chosen.budget,
        knapsack=chosen.knapsack,
        runtime=chosen.runtime,
        details="front",
    )
    result = partition(joint, count, options)
    report = result.report
    said = [str(report).splitlines()[0] if chosen.quiet else str(report)]
    if chosen.report is not None:
        writers = {
            ".html": lambda: html_report(result, f"Partition of {chosen.graph.name}"),
            ".json": report.to_json,
        }
        said.append(_write(chosen.report, writers.get(chosen.report.suffix, lambda: f"{report}\n")()))
    if chosen.plots is not None:
        chosen.plots.mkdir(parents=True, exist_ok=True)
        for name, draw in (("memory", memory_svg), ("front", front_svg)):
            said.append(_write(chosen.plots / f"{name}.svg", draw(report)))
        said.append(_write(chosen.plots / "cut.svg", cut_svg(result)))
    for place, graph in ((chosen.forward, result.forward), (chosen.backward, result.backward)):
        if place is not None:
            said.append(_write(place, dump_graph(graph)))
    return said


def _write(place: Path, words: str) -> str:
    place.write_text(words, encoding="utf-8")
    return f"wrote {place}"


def count_forward_outputs(joint: torch.fx.GraphModule) -> int:
    """Leading outputs that no tangent reaches: a graph file does not say how many belong to the forward."""
    reached: set[torch.fx.Node] = set()
    outputs: Sequence[object] = ()
    for node in joint.graph.nodes:
        if node.op == "output":
            outputs = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        elif is_backward_input(node) or any(used in reached for used in node.all_input_nodes):
            reached.add(node)
    count = 0
    for output in outputs:
        if output is None or output in reached:
            break
        count += 1
    return count
