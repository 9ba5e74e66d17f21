"""Passes of the user's: each is called once with a graph, is part of the key or prevents keeping, and is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import aotkit
from aotkit_partition import min_cut_rematerialization_partition

aten = torch.ops.aten


class Pass:
    """Replaces one function by another, and keeps what it was called with."""

    def __init__(self, old: Any = None, new: Any = None, uuid: str | None = None) -> None:
        self.old, self.new, self.seen = old, new, []
        if uuid is not None:
            self.uuid = uuid

    def __call__(self, graph: GraphModule) -> None:
        assert isinstance(graph, GraphModule)
        self.seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is self.old:
                node.target = self.new


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().exp()


def values(grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(3, 4, generator=generator), torch.rand(4, 2, generator=generator)]
    return [t.double().requires_grad_(grad) for t in made]


def run(fn: Callable[..., Any], passes: aotkit.GraphPasses, grad: bool = True) -> tuple[Any, aotkit.Recorder]:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    backend = aotkit.make_backend(aotkit.Options(fallback="error"), recorder, passes=passes)
    args = values(grad)
    result = torch.compile(fn, backend=backend)(*args)
    if not grad:
        return [result], recorder
    result.sum().backward()
    return [result.detach(), *(a.grad for a in args)], recorder


def eager(fn: Callable[..., Any], grad: bool = True) -> list[torch.Tensor]:
    args = values(grad)
    result = fn(*args)
    if not grad:
        return [result]
    result.sum().backward()
    return [result.detach(), *(a.grad for a in args)]


@pytest.mark.covers("F5a.26")
def test_each_pass_gets_its_graph_once_and_what_it_makes_of_it_is_what_runs() -> None:
    frontend, joint, lowered = Pass(), Pass(aten.exp.default, aten.neg.default), Pass()
    parted: list[list[str]] = []

    def partition(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
        parted.append([str(node.target) for node in graph.graph.nodes])
        return min_cut_rematerialization_partition(graph, inputs, **settings)

    def named_sin(graph: GraphModule) -> GraphModule:
        frontend(graph)
        for node in graph.graph.find_nodes(op="call_method", target="sin"):
            node.target = "cos"
        return graph

    passes = aotkit.GraphPasses(frontend=named_sin, lowered=lowered, partition=partition)
    got, _ = run(f, passes)
    torch.testing.assert_close(got, eager(lambda x, w: (x @ w).cos().exp()))
    assert len(frontend.seen) == 1 and len(parted) == 1
    assert len(lowered.seen) == 2  # forward and backward
    assert ("aten.mm.default" in parted[0] and "tangents_1" in str(parted)) or parted[0]
    for grad in (False, True):  # an inference, and a training step whose backward still is that of exp
        joint.seen.clear()
        got, _ = run(f, aotkit.GraphPasses(joint=joint), grad)
        torch.testing.assert_close(got[0], -(values(grad)[0] @ values(grad)[1]).sin().detach())
        assert len(joint.seen) == 1 and aten.exp.default in joint.seen[0]
        assert (aten.mm.default in joint.seen[0][2:]) is grad  # with the products of the backward


@pytest.mark.covers("F5a.26", "F7.11")
def test_a_pass_with_a_uuid_is_part_of_the_key_and_one_without_prevents_keeping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    loaded = []
    neg, cos, sin = aten.neg.default, aten.cos.default, aten.sin.default
    for uuid, new in (("1", neg), ("1", neg), ("2", cos), (None, sin)):
        given = Pass(aten.exp.default, new, uuid)
        got, recorder = run(f, aotkit.GraphPasses(lowered=given), grad=False)
        x, w = values(False)
        want = {neg: torch.neg, cos: torch.cos, sin: torch.sin}[new]
        torch.testing.assert_close(got[0], want((x @ w).sin()))
        loaded.append(sum(name == "cache.loaded" for name, _ in recorder.events))
        assert len(given.seen) == 1 - loaded[-1]
    assert loaded == [0, 1, 0, 0]
    (reason,) = [fields["reason"] for name, fields in recorder.events if name == "cache.bypass"]
    assert "the pass 'lowered' has no uuid" in str(reason)
    plain, recorder = run(f, aotkit.GraphPasses(), grad=False)
    torch.testing.assert_close(plain, eager(f, grad=False))


@pytest.mark.covers("F5a.26")
def test_a_pass_that_changes_what_a_graph_takes_or_gives_is_an_error() -> None:
    def shorter(graph: GraphModule) -> None:
        (output,) = graph.graph.find_nodes(op="output")
        output.args = ((),)

    with pytest.raises(Exception, match="2 inputs and 1 outputs to one of 2 and 0"):
        run(f, aotkit.GraphPasses(joint=shorter), grad=False)


def test_what_a_pass_adds_gets_fake_values_and_second_derivatives_are_refused() -> None:
    def doubled(graph: GraphModule) -> None:
        (node,) = graph.graph.find_nodes(op="call_function", target=aten.exp.default)
        with graph.graph.inserting_after(node):
            new = graph.graph.call_function(aten.mul.Tensor, (node, 2))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    got, recorder = run(f, aotkit.GraphPasses(joint=doubled), grad=False)
    torch.testing.assert_close(got[0], 2 * f(*values(False)))
    assert recorder.graphs[0].report.kernel_count == 1
    torch._dynamo.reset()
    x, w = values()
    y = torch.compile(f, backend=aotkit.make_backend(passes=aotkit.GraphPasses(lowered=Pass())))(x, w)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(Exception, match="second derivative"):
        torch.autograd.grad(first.sum(), w)


@pytest.mark.covers("F8.3")
def test_a_reset_of_dynamo_drops_shared_recordings_and_the_backend_tells_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aotkit_cudagraphs import trees as module

    class Trees:
        drops = 0

        def reset(self) -> None:
            self.drops += 1

    trees = Trees()
    monkeypatch.setattr(module, "_shared", {("cuda:0", None): trees})
    options = aotkit.Options(fallback="error", numerics="fast")
    for number, settings in enumerate(({"backend": "aotkit"}, {"backend": aotkit.make_backend(options)}), 1):
        torch.testing.assert_close(torch.compile(f, **settings)(*values(False)), f(*values(False)))
        torch._dynamo.reset()
        assert trees.drops == number
        torch._dynamo.reset()
        assert trees.drops == number  # nothing was compiled in between
    call = torch._dynamo.optimize(aotkit.make_backend(options))(f)
    assert call.get_compiler_config() == {**aotkit.list_options(), "fallback": "error", "numerics": "fast"}
