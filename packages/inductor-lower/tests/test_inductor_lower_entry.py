"""What graphs come in with: fake values or none, subgraphs, memory at odd addresses, no ATen call at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.driver import run_graph_passes
from aotkit_inductor_lower.graph_passes.fake_values import with_fake_values
from aotkit_inductor_lower.launch_plan import CallExtern, CallSegment

aten = torch.ops.aten


def without_values(fn: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """A traced graph as it comes from text: no node knows its value."""
    graph = make_fx(fn)(*inputs)
    for node in graph.graph.nodes:
        node.meta.clear()
    return graph


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x * 1).relu().neg(), y + x.view(-1).sum())


class Watched:
    """Keeps the loop IR of all that is compiled."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def stage(self, _name: str, /) -> AbstractContextManager[Any]:
        """Nothing."""
        return nullcontext()

    def dump(self, name: str, _kind: str, text: Callable[[], str], /) -> None:
        """Keep it."""
        if name == "scheduled":
            self.programs.append(text())

    def event(self, _name: str, _fields: Mapping[str, object], /) -> None:
        """Nothing."""


@pytest.mark.covers("F5a.9")
@pytest.mark.parametrize("kind", ["real", "fake", "symbolic"])
def test_every_node_has_a_fake_value_before_and_after_the_passes_whatever_the_inputs_are(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    real = [torch.rand(4, 3, generator=generator), torch.rand(6, 2, generator=generator)]
    if kind == "symbolic":
        graph = make_fx(chain, tracing_mode="symbolic")(*real)
        given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        with given[0].fake_mode:
            for node in graph.graph.nodes:
                node.meta.clear()
    else:
        graph = without_values(chain, *real)
        mode = FakeTensorMode()
        given = real if kind == "real" else [mode.from_tensor(t) for t in real]
    if kind != "symbolic":
        with pytest.raises(ValueError, match="no fake values; pass example_inputs"):
            compile_graph(graph)
    filled = with_fake_values(graph, given)
    passed = run_graph_passes(filled, LowerOptions())
    assert len(passed.graph.nodes) < len(filled.graph.nodes)  # the product with one went
    for each in (filled, passed):
        for node in each.graph.nodes:
            if node.op != "output":
                value = node.meta["val"]
                assert hasattr(value, "fake_mode") or isinstance(value, torch.SymInt | int), node
    run = compile_graph(graph, given)
    torch.testing.assert_close(run([*real]), list(chain(*real)))


@pytest.mark.covers("F5a.10")
def test_a_pattern_inside_the_branches_of_a_conditional_and_in_the_body_of_a_loop_is_rewritten() -> None:
    def one(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cat([x[:2], x[2:]]).sin(),)  # the parts put together again: x

    def other(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x * 1).cos(),)

    def f(flag: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (chosen,) = torch.cond(flag, one, other, (x,))
        _, looped = torch._higher_order_ops.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, torch.cat([y[:1], y[1:]]).sin()), (torch.tensor(0), x)
        )
        return chosen, looped

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    flag = torch.tensor(True)
    torch._dynamo.reset()  # it traces the branches, with symbolic sizes if another test had other sizes before
    graph = make_fx(f, tracing_mode="fake")(flag, x)
    texts: dict[bool, str] = {}
    for disable in ((), ("merge-splits-and-cats", "fold-uniform", "remove-noops", "simplify", "fold-identities")):
        watched = Watched()
        run = compile_graph(graph, [flag, x], options=LowerOptions(disable=disable), observer=watched)
        for chosen in (True, False):
            got = run([torch.tensor(chosen), x])
            torch.testing.assert_close(got, list(f(torch.tensor(chosen), x)))
        assert len(watched.programs) == 5  # two branches, the condition and the body of the loop, and its start
        texts[not disable] = "".join(watched.programs)
    assert "aten.cat" in texts[False] and "= mul" in texts[False]
    assert "aten.cat" not in texts[True] and "= mul" not in texts[True]


@pytest.mark.covers("F5a.11")
@pytest.mark.parametrize("offset", [1, 3])
def test_an_input_at_an_odd_address_is_read_right_and_written_where_it_is(offset: int) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new = (x + y).sin()
        aten.copy_.default(x, new)
        return (new * 2,)

    aligned = torch.linspace(0, 1, 67), torch.linspace(2, 3, 67)
    run = compile_graph(make_fx(f, tracing_mode="fake")(*aligned), aligned)
    memory = torch.linspace(0, 1, 80)
    whole = memory.clone()
    x, y = memory[offset : offset + 67], torch.linspace(2, 3, 70)[offset:][:67]
    assert x.data_ptr() % 16 and y.data_ptr() % 16
    want_x = x.clone()
    (want,) = f(want_x, y)
    (got,) = run([x, y])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x, want_x, rtol=1e-6, atol=1e-6)
    assert torch.equal(memory[:offset], whole[:offset]) and torch.equal(memory[offset + 67 :], whole[offset + 67 :])


@pytest.mark.covers("F5a.19")
def test_a_plan_without_aten_calls_is_one_native_call() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.softmax(x, 1)
        columns = rows - rows.mean(0, keepdim=True)
        return (columns.t().contiguous() * 2, columns.sum())

    x = torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7)
    run = compile_graph(make_fx(f, tracing_mode="fake")(x), [x])
    steps = run.compiled.plan.steps
    assert run.report().kernel_count >= 3
    assert sum(isinstance(step, CallSegment) for step in steps) == 1
    assert not any(isinstance(step, CallExtern) for step in steps)
    torch.testing.assert_close(run([x]), list(f(x)))
