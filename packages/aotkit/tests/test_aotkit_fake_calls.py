"""Where Dynamo cuts graphs, it asks each compiled piece, by a call with fake tensors, what the next piece gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import aotkit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        hidden = torch.relu(self.first(x)).t()
        self.seen.add_(1)
        return self.second(hidden.t())


def in_buckets(net: nn.Module) -> None:
    """What a data-parallel wrapper does that the optimizer looks at: nothing but that graphs are cut is of interest."""
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)


@pytest.mark.covers("F4.14")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_pieces_of_a_graph_are_asked_with_fake_tensors_and_then_run(dynamic: bool, grad: bool, monkeypatch):
    torch._dynamo.reset()
    net, eager = Net(), Net()
    in_buckets(net)
    in_buckets(eager)
    asked, ran = [], []
    backend = aotkit.make_backend(aotkit.Options(fallback="error", verify=True))

    def compile_piece(gm, inputs):
        assert TracingContext.get().fakify_first_call
        run = backend(gm, inputs)

        def watched(*args):
            results = run(*args)
            fake = any(isinstance(v, FakeTensor) for v in args)
            assert all(isinstance(r, FakeTensor) == fake for r in results)
            (asked if fake else ran).append([tuple(r.stride()) for r in results])
            return results

        return watched

    optimizer = DDPOptimizer(200, compile_piece, first_bucket_cap=200)
    compiled = torch.compile(net, backend=optimizer.compile_fn, dynamic=dynamic)
    for rows in (4, 6) if dynamic else (4, 4):
        x = torch.randn(rows, 8)
        with torch.set_grad_enabled(grad):
            y, expected = compiled(x), eager(x)
        torch.testing.assert_close(y, expected)
        if grad:
            y.square().sum().backward()
            expected.square().sum().backward()
    assert net.seen == eager.seen == 2
    assert len(asked) == 2 and len(ran) == 4
    assert [len(a) for a in asked] == [len(r) for r in ran[:2]]
    if not dynamic:
        assert asked == ran[:2]
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def by_columns(graph: torch.fx.GraphModule, examples):
    """A compiler that stores results of two dimensions by columns, and says so as torch's own does."""
    (output,) = graph.graph.find_nodes(op="output")
    results = [r.meta["val"] if isinstance(r, torch.fx.Node) else None for r in output.args[0]]
    said = TracingContext.get().output_strides
    for value in results:
        matrix = isinstance(value, torch.Tensor) and value.dim() == 2
        said.append((1, value.shape[0]) if matrix else None if value is None else tuple(value.stride()))

    def run(*args):
        made = graph(*args)
        return [m.t().contiguous().t() if isinstance(m, torch.Tensor) and m.dim() == 2 else m for m in made]

    return run


@pytest.mark.covers("F4.14")
@pytest.mark.parametrize("grad", [False, True])
def test_the_next_piece_is_compiled_for_the_strides_that_a_compiler_reports(grad: bool):
    torch._dynamo.reset()
    net, eager = Net(), Net()
    in_buckets(net)
    in_buckets(eager)
    given = []

    def compile_piece(gm, inputs):
        given.append([tuple(v.stride()) for v in inputs if v.shape == (4, 8)])
        return aotkit.aot_module_simplified(gm, inputs, fw_compiler=by_columns, bw_compiler=aotkit.nop)

    optimizer = DDPOptimizer(200, compile_piece, first_bucket_cap=200)
    compiled = torch.compile(net, backend=optimizer.compile_fn, dynamic=False)
    x = torch.randn(4, 8)
    with torch.set_grad_enabled(grad):
        y, expected = compiled(x), eager(x)
    torch.testing.assert_close(y, expected)
    assert len(given) == 2 and given[0] == [(8, 1)] and given[1] == [(1, 4)]
    assert y.stride() == (1, 4)
    if grad:
        y.square().sum().backward()
        expected.square().sum().backward()
        for a, b in zip(net.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("held", [False, True])
def test_a_program_that_runs_on_fake_tensors_of_its_own_gets_fake_results(held: bool):
    torch._dynamo.reset()
    net, x = Net(), torch.randn(3, 8)
    compiled = torch.compile(net, backend=aotkit.make_backend())
    expected = compiled(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        with pytest.warns(aotkit.EagerFallback, match="input . is, or holds, a fake tensor"):
            result = compiled(TwoTensor(fake, fake) if held else fake)
    parts = (result.a, result.b) if held else (result,)
    assert all(isinstance(part, FakeTensor) and part.shape == (3, 8) for part in parts)
    torch.testing.assert_close(compiled(x), expected)
