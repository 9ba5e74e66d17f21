"""Compiled optimizer steps: parameters and state that Dynamo stores on the graph become inputs."""

from __future__ import annotations

import copy

import pytest
import torch

import aotkit
from aotkit.frontend.inputs import lift_attributes


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True),
        lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    ],
    ids=["adam-foreach", "adam-fused", "sgd"],
)
def test_a_compiled_optimizer_step_updates_as_eager(make):
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(3, k + 1)) for k in range(3)]
    theirs = copy.deepcopy(mine)
    ours, eager = make(mine), make(theirs)
    recorder = aotkit.Recorder()
    step = torch.compile(ours.step, backend="aotkit", options={"observer": recorder})
    for number in range(3):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.full_like(p, 0.1 * number) + p.detach()
            q.grad = torch.full_like(q, 0.1 * number) + q.detach()
        step()
        eager.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)
        assert p.requires_grad and p.is_leaf and p._version == q._version
    assert not recorder.fallbacks
    torch.compiler.reset()


def test_attributes_with_names_that_look_alike_are_lifted_apart():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.a_b = torch.nn.Module(), torch.nn.Parameter(torch.full((3,), 5.0))
            self.a.b = torch.nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x, attribute_a_b):
            return x * self.a.b + self.a_b * attribute_a_b

    gm = torch.fx.symbolic_trace(Module())
    lifted, held = lift_attributes(gm)
    given = torch.ones(3), torch.full((3,), 100.0)
    assert torch.equal(lifted(*given, *held), gm(*given))


def test_only_tensors_that_the_graph_reads_are_lifted_and_the_graph_given_stays():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))
            self.unused = torch.nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.weight + self.weight

    gm = torch.fx.symbolic_trace(Module())
    lifted, held = lift_attributes(gm)
    assert held == (gm.weight,) and not list(lifted.parameters())
    assert [n.op for n in lifted.graph.nodes] == [
        "placeholder",
        "placeholder",
        "call_function",
        "call_function",
        "output",
    ]
    x = torch.randn(3)
    assert torch.equal(lifted(x, *held), gm(x))
    plain = torch.fx.symbolic_trace(torch.nn.Identity())
    assert lift_attributes(plain) == (plain, ())
