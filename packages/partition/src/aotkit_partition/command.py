"""The command line: partition a joint graph from a file, and write what was asked for."""

from __future__ import annotations

import argparse
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
    add("--report", type=Path, help="write the report: .html, .json or text")
    add("--plots", type=Path, help="folder for memory.svg, front.svg and cut.svg")
    add("--forward", type=Path, help="write the forward graph (JSON)")
    add("--backward", type=Path, help="write the backward graph (JSON)")
    add("--quiet", action="store_true", help="print only the headline")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 after a refusal, which is printed."""
    chosen = _parser().parse_args(arguments)
    try:
        _run(chosen)
    except (PartitionError, OSError, ValueError) as error:
        print(f"aotkit_partition: {error}", file=sys.stderr)
        return 1
    return 0


def _run(chosen: argparse.Namespace) -> None:
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
    print(str(report).splitlines()[0] if chosen.quiet else report)
    if chosen.report is not None:
        writers = {
            ".html": lambda: html_report(result, f"Partition of {chosen.graph.name}"),
            ".json": report.to_json,
        }
        _write(chosen.report, writers.get(chosen.report.suffix, lambda: f"{report}\n")())
    if chosen.plots is not None:
        chosen.plots.mkdir(parents=True, exist_ok=True)
        for name, draw in (("memory", memory_svg), ("front", front_svg)):
            _write(chosen.plots / f"{name}.svg", draw(report))
        _write(chosen.plots / "cut.svg", cut_svg(result))
    for place, graph in ((chosen.forward, result.forward), (chosen.backward, result.backward)):
        if place is not None:
            _write(place, dump_graph(graph))


def _write(place: Path, words: str) -> None:
    place.write_text(words, encoding="utf-8")
    print(f"wrote {place}")


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
