"""A pass, a rewrite or a stage that makes a result wrong is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import aotkit
from aotkit_inductor_lower.driver import GRAPH_PASSES
from aotkit_inductor_lower.passes import PassContext

aten = torch.ops.aten


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + (2 * x).sin() + (3 * x).sin()


def right(backend: Any) -> bool:
    x = torch.linspace(0, 1, 8, dtype=torch.float64)
    return torch.allclose(torch.compile(f, backend=backend)(x), f(x))


@contextmanager
def broken(name: str, spare: int) -> Iterator[None]:
    """The pass ``name`` also makes a cosine of every sine but the first ``spare`` ones, as fuel lasts."""
    (each,) = [p for p in GRAPH_PASSES if p.name == name]
    run = each.run

    def bad(graph: Graph, ctx: PassContext) -> Graph:
        graph = run(graph, ctx)
        sines = graph.find_nodes(op="call_function", target=aten.sin.default)
        for number, node in enumerate(sines):
            if ctx.fuel.take():
                node.target = aten.cos.default if number >= spare else node.target
        return graph

    object.__setattr__(each, "run", bad)
    try:
        yield
    finally:
        object.__setattr__(each, "run", run)


@pytest.mark.covers("F5a.28")
def test_an_injected_bad_pass_and_the_rewrite_that_breaks_the_result_are_found() -> None:
    name = "simplify"
    with broken(name, spare=2):
        assert not right(aotkit.make_backend(aotkit.Options(cache=False)))
        found = aotkit.find_culprit(right)
    assert found.where == f"the graph pass {name!r}" and found.rewrite == 3
    assert found.options == {"disable": [name]}
    assert "rewrite number 3 breaks it; right with options={'disable'" in str(found)
    assert found.checks < 30


@pytest.mark.covers("F5a.28")
def test_a_pass_of_the_users_and_a_function_that_is_wrong_by_itself_are_told_apart() -> None:
    def bad(graph: GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    found = aotkit.find_culprit(right, passes=aotkit.GraphPasses(lowered=bad))
    assert found.where == "the given pass 'lowered'" and found.checks == 2
    assert aotkit.find_culprit(right).where == "nothing: the result is right"
    assert aotkit.find_culprit(lambda backend: False).where == "the function itself or Dynamo"


@pytest.mark.covers("F5a.28")
@pytest.mark.parametrize(
    "stage, where",
    [
        ("capture", "capture, partitioning or the code around the graph"),
        ("fusion", "the loop pass 'fuse-kernels'"),
        ("merging", "the kernel pass 'merge-loops'"),
        ("rewrites", "several graph, loop and kernel passes"),
        ("rendering", "code generation"),
        ("kernels", "lowering, or code generation for a device"),
    ],
)
def test_a_stage_that_is_wrong_is_found(stage: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(backend: Any) -> bool:
        seen: list[aotkit.Options] = []
        real = aotkit.backend.compile_graph_module

        def spy(gm: Any, inputs: Any, options: aotkit.Options, *rest: Any) -> Any:
            seen.append(options)
            return real(gm, inputs, options, *rest) if stage == "fusion" else gm.forward  # right, and not compiled

        with monkeypatch.context() as patched:
            patched.setattr(aotkit.backend, "compile_graph_module", spy)
            assert right(backend)
        (options,) = seen
        wrong = {
            "capture": options.capture,
            "fusion": options.capture
            and options.lowering == "kernels"
            and options.fuel != 0
            and "fuse-kernels" not in options.disable,
            "merging": options.capture
            and options.lowering == "kernels"
            and options.fuel != 0
            and "merge-loops" not in options.disable,
            "rewrites": options.capture and options.lowering == "kernels" and options.fuel != 0,
            "rendering": options.capture and options.lowering == "kernels" and options.processor != "interpreter",
            "kernels": options.capture and options.lowering == "kernels",
        }
        return not wrong[stage]

    assert aotkit.find_culprit(check).where == where


@pytest.mark.covers("F5a.28")
def test_what_is_refused_is_no_crash() -> None:
    def refused(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def check(backend: Any) -> bool:
        return torch.compile(refused, backend=backend)(torch.empty(3, device="meta")).device.type == "meta"

    with pytest.warns(aotkit.EagerFallback, match="on device meta"):
        assert aotkit.find_culprit(check).where == "nothing: the result is right"
