"""Microseconds per call of the generated wrapper and of torch's own, around the same compiled graphs, in one run.

    OMP_NUM_THREADS=1 python packages/runtime-wrappers/tests/measure_overhead.py

torch's ``aot_function`` captures a three-op graph with pass-through compilers; the graphs it hands to them are
then bound by both stacks, so that the difference is the wrapper alone. "bare" is the graph itself. Measurements
are interleaved; the figure is the best of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified

from aotkit_functionalize.metadata import GraphMetadata
from aotkit_functionalize.records import InputInfo, InputKind, OutputInfo, OutputKind, TangentInfo, TensorMeta
from aotkit_runtime_wrappers import bind, build_plan


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(str(tensor.dtype), "cpu", tuple(tensor.shape), tensor.stride(), 0, tensor.requires_grad)


def _metadata(x: torch.Tensor, w: torch.Tensor) -> GraphMetadata:
    training = w.requires_grad
    fresh = TensorMeta("torch.float32", "cpu", tuple(x.shape), x.stride(), 0, training)
    return GraphMetadata(
        inputs=(InputInfo(0, InputKind.TENSOR, _meta(x)), InputInfo(1, InputKind.TENSOR, _meta(w))),
        outputs=(OutputInfo(0, OutputKind.FRESH, fresh, graph_output=0),),
        tangents=(TangentInfo(0, _meta(x)),) if training else (),
        num_forward_outputs=1,
        forward_requires_grad=(training,),
        differentiable_inputs=(1,) if training else (),
        is_training=training,
    )


def capture(training: bool) -> dict[str, Callable[[], Any]]:
    """Calls to measure, by name."""
    x, w = torch.randn(4, 8), torch.randn(4, 8, requires_grad=training)
    graphs: dict[str, Any] = {}

    def compiler(name: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            outputs = graph.graph.output_node().args[0]
            constants: list[Any] = []  # compiled code that costs next to nothing

            def run(args: list[Any]) -> list[Any]:
                args.clear()
                if not constants:  # the compiler itself is called under fake tensors
                    constants.extend(None if node is None else torch.randn(4, 8) for node in outputs)
                return [c if c is None else c.detach() for c in constants] if name == "forward" else list(constants)

            run._boxed_call = True
            graphs[name], graphs[name + "_outputs"] = run, len(outputs)
            inputs_of_graph = list(graph.graph.find_nodes(op="placeholder"))
            graphs[name + "_saved"] = [inputs_of_graph.index(o) if o in inputs_of_graph else -1 for o in outputs[1:]]
            return run

        return compile_graph

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
            return ((x * w).sin() + 1,)

    theirs = aot_module_simplified(
        torch.fx.symbolic_trace(Model()), (x, w), fw_compiler=compiler("forward"), bw_compiler=compiler("backward")
    )
    (first,) = theirs(x, w)
    if training:
        first.sum().backward()
    saved = graphs["forward_outputs"] - 1
    plan = build_plan(
        _metadata(x, w),
        num_saved_tensors=saved if training else 0,
        saved_inputs=graphs["forward_saved"] if training else None,
    )
    ours = bind(plan, graphs["forward"], graphs.get("backward"))
    calls = {
        "bare": lambda: graphs["forward"]([x, w]),
        "torch": lambda: theirs(x, w),
        "aotkit": lambda: ours([x, w]),
        "eager": lambda: (x * w).sin() + 1,
    }
    tangent = torch.randn(4, 8)

    def step(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            (out,) = call()
            torch.autograd.grad(out, w, tangent)

        return run

    if training:
        calls |= {"torch step": step(calls["torch"]), "aotkit step": step(calls["aotkit"])}
        calls["eager step"] = step(lambda: (calls["eager"](),))
    return calls


def measure(calls: dict[str, Callable[[], Any]], rounds: int = 25, count: int = 1000) -> dict[str, float]:
    """Best microseconds per call over interleaved rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(count):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / count * 1e6)
    return best


def main() -> None:
    """Print one table."""
    torch.set_num_threads(1)
    for training in (False, True):
        calls = capture(training)
        times = measure(calls)
        print("training" if training else "inference")
        for name, microseconds in times.items():
            print(f"  {name:12} {microseconds:8.2f} us")
        for suffix in ("", " step") if training else ("",):
            print(f"  aotkit/torch{suffix}: {times['aotkit' + suffix] / times['torch' + suffix]:.2f}", end="")
            if not suffix:
                bare = times["bare"]
                print(f"  (wrapper alone: {(times['aotkit'] - bare) / (times['torch'] - bare):.2f})", end="")
            print()


if __name__ == "__main__":
    main()
