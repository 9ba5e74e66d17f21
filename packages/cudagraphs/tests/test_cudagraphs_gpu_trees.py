"""The tree on a real device: the programs of the simulator, and what only a device can show."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from aotkit_cudagraphs import CudagraphTrees, OverwrittenError, TreeOptions
from aotkit_cudagraphs.drivers import CudaDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="these tests need a CUDA device, and torch sees none"),
]

_spec = importlib.util.spec_from_file_location("tree_fuzz", Path(__file__).with_name("tree_fuzz.py"))
tree_fuzz = importlib.util.module_from_spec(_spec)
sys.modules["tree_fuzz"] = tree_fuzz
_spec.loader.exec_module(tree_fuzz)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_programs_give_plain_results_on_the_device(first):
    recordings = sum(tree_fuzz.run_program(seed, device="cuda").recordings for seed in range(first, first + 20))
    assert recordings > 10


def counts(trees):
    return {info.name: info.replays for info in trees.report().functions}


def test_matrix_products_are_recorded_without_leaving_workspaces_in_the_pool():
    trees = CudagraphTrees()
    weight = torch.randn(256, 256, device="cuda")
    fast = trees.wrap(lambda x, w: torch.relu(x @ w) @ w, static_input_indices=[1], name="mlp")
    for _ in range(5):
        x = torch.randn(64, 256, device="cuda")
        assert torch.equal(fast(x, weight), torch.relu(x @ weight) @ weight)
    assert counts(trees) == {"mlp": 4}
    assert CudaDriver().live_blocks(trees.manager().pools[0].handle) == {}


def test_a_path_keeps_its_results_while_more_is_recorded_after_it():
    trees = CudagraphTrees()
    functions = [trees.wrap(lambda x, k=k: x * 2 + k, name=f"fn{k}") for k in range(4)]
    for n in range(5):
        trees.mark_step()
        kept = [torch.full((1000,), float(n), device="cuda")]
        for fast in functions:
            kept.append(fast(kept[-1]))
        expected = float(n)
        for k, value in enumerate(kept[1:]):
            expected = expected * 2 + k
            assert (value == expected).all()
        del kept, value
    assert all(replays == 4 for replays in counts(trees).values())


def test_micro_steps_accumulate_as_in_eager():
    trees = CudagraphTrees()

    def forward(x, w):
        active = torch.relu(x @ w)
        return active.sum(), active, x

    def backward(inputs):
        active, x, w, grad = inputs
        inputs.clear()
        masked = grad.expand_as(active) * (active > 0)
        return [masked @ w.t(), x.t() @ masked]

    backward._boxed_call = True
    fast = trees.wrap(forward, static_input_indices=[1], training=True)
    fast_backward = fast.backward(backward, static_input_indices=[2])

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            loss, *ctx.kept = fast(x, w)
            ctx.kept.append(w)
            return loss

        @staticmethod
        def backward(ctx, grad):
            inputs, ctx.kept = [*ctx.kept, grad], None
            return tuple(fast_backward(inputs))

    weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    twin = torch.nn.Parameter(weight.detach().clone())
    for _ in range(3):
        for _ in range(4):
            x = torch.randn(16, 64, device="cuda")
            Compiled.apply(x, weight).backward()
            torch.relu(x @ twin).sum().backward()
            torch.testing.assert_close(weight.grad, twin.grad)
        weight.grad = twin.grad = None
    assert counts(trees) == {"forward": 11, "forward backward": 11}, "the backward ran in autograd's own thread"


def test_zero_copy_results_and_their_views_raise_once_their_memory_is_taken():
    trees = CudagraphTrees(options=TreeOptions(outputs="overwrite"))
    fast = trees.wrap(lambda x: x + 1, name="fn")
    x = torch.ones(1000, device="cuda")
    fast(x)
    result = fast(x)
    view = result[1:]
    fast(x)
    with pytest.raises(OverwrittenError):
        result + 1
    with pytest.raises(RuntimeError, match="result 0 of fn was read after"):
        view + 1


def test_dropping_all_callables_gives_the_memory_back():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    trees = CudagraphTrees()
    fast = trees.wrap(lambda x: x.repeat(100) + 1)
    x = torch.ones(100_000, device="cuda")
    for _ in range(3):
        fast(x)
    assert torch.cuda.memory_reserved() > before
    del fast, trees
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)
