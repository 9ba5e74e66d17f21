"""Large graphs: what a node costs a compile, by the size of the graph.

    python -m tools.bench.nodes                             graphs of 1 000 to 50 000 nodes, inference and training

The graphs are chains of blocks of seven nodes (a product, GELU, a sum, a mean of rows, a difference, a factor, tanh),
handed to the backend as Dynamo would. Processor microseconds of a compile of forward and backward and their first call,
in a fresh process that has compiled a small graph before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule

import aotkit
from aotkit.backend import compile_graph_module
from tools.workspace import ROOT

__all__ = ["chain", "main", "measure"]

SIZES = (1_000, 5_000, 20_000, 50_000)
WAYS = ("inference", "training")
F = torch.nn.functional


def chain(nodes: int) -> GraphModule:
    """A graph with about that many nodes, of rows ``x`` [16, 32] and a matrix ``w`` [32, 32]."""
    graph = Graph()
    value = first = graph.placeholder("x")
    matrix = graph.placeholder("w")
    for block in range(max(nodes // 7, 1)):
        product = graph.call_function(torch.matmul, (value, matrix))
        added = value if block % 8 else first  # without which it would all become 0
        total = graph.call_function(torch.add, (graph.call_function(F.gelu, (product,)), added))
        mean = graph.call_function(torch.mean, (total, -1), {"keepdim": True})
        half = graph.call_function(torch.mul, (graph.call_function(torch.sub, (total, mean)), 0.5))
        value = graph.call_function(torch.tanh, (half,))
    graph.output((value,))
    return GraphModule(torch.nn.Module(), graph)


def compile_and_run(nodes: int, training: bool) -> tuple[float, float]:
    """Processor seconds, and the largest difference of the result and of the gradient from eager's."""
    graph = chain(nodes)
    x, w = torch.randn(16, 32, requires_grad=training), torch.randn(32, 32) / 8
    options = aotkit.Options(fallback="error", cache=False, repeated_layers="apart")
    begin = time.process_time()
    run = compile_graph_module(graph, [x, w], options, aotkit.Recorder())
    found = [run(x, w)[0]]
    if training:
        found += torch.autograd.grad(found[0].sum(), x)
    taken = time.process_time() - begin
    want = [torch.fx.Interpreter(graph).run(x, w)[0]]  # Python can't compile a function of so many lines
    if training:
        want += torch.autograd.grad(want[0].sum(), x)
    return taken, max(float((a - b).detach().abs().max()) for a, b in zip(found, want, strict=True))


def measure(nodes: int, way: str) -> dict[str, float]:
    """Microseconds of a node and the difference from eager mode, in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.bench.nodes", "--worker", str(nodes), way]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.nodes", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--worker", nargs=2, metavar=("NODES", "WAY"), help="measure one compile, print JSON")
    args = parser.parse_args(argv)
    if args.worker:
        nodes, training = int(args.worker[0]), args.worker[1] == "training"
        torch.manual_seed(0)
        torch.set_num_threads(1)
        compile_and_run(200, training)
        taken, off = compile_and_run(nodes, training)
        print(json.dumps({"us": 1e6 * taken / nodes, "off": off}))
        return 0
    print("| nodes | way | us a node | off eager by |\n|---:|---|---:|---:|")
    for way in args.ways:
        for nodes in args.sizes:
            found = measure(nodes, way)
            print(f"| {nodes} | {way} | {found['us']:.0f} | {found['off']:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
