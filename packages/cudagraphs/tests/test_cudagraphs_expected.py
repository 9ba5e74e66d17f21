"""Calls like the last one replay at once; whatever differs takes the long way. See Note [Expected calls]."""

import pytest
import torch

from aotkit_cudagraphs import CudagraphNotice, CudagraphTrees, TreeOptions, manager
from aotkit_cudagraphs.drivers import SimulatedDriver


@pytest.fixture
def trees():
    return CudagraphTrees(SimulatedDriver(capacity=1 << 20), TreeOptions())


@pytest.fixture
def long_ways(monkeypatch):
    """The calls whose inputs were looked at one by one."""
    seen, plain = [], manager.place_inputs

    def place_inputs(inputs, *args):
        seen.append(len(inputs))
        return plain(inputs, *args)

    monkeypatch.setattr(manager, "place_inputs", place_inputs)
    return seen


def boxed(fn):
    def run(inputs):
        values = list(inputs)
        inputs.clear()
        return fn(values)

    run._boxed_call = True
    run.__name__ = fn.__name__
    return run


@pytest.mark.covers("F6.9", "F6.10")
def test_a_training_step_like_the_last_one_replays_at_once(trees, long_ways):
    weight = torch.randn(3, 3)

    def forward(values):
        x, w = values
        return [(x @ w).relu(), x @ w, w]

    def backward(values):
        product, w, gradient = values
        return [(gradient * (product > 0)) @ w.t()]

    forwards = trees.wrap(boxed(forward), training=True, static_input_indices=[1])
    backwards = forwards.backward(boxed(backward), static_input_indices=[1])
    for step in range(8):
        x, gradient = torch.randn(2, 3), torch.randn(2, 3)
        out, product, w = forwards([x, weight])
        inputs = [product, w, gradient]
        del product, w
        (found,) = backwards(inputs)
        torch.testing.assert_close(out, (x @ weight).relu())
        torch.testing.assert_close(found, (gradient * (x @ weight > 0)) @ weight.t())
        if step == 4:
            del long_ways[:]
    assert not long_ways
    assert [function.replays for function in trees.report().functions] == [7, 7]


CHANGES = {
    "sizes": lambda x, w, n: [torch.randn(4, 3), w, n],
    "strides": lambda x, w, n: [torch.randn(3, 2).t(), w, n],
    "dtype": lambda x, w, n: [x.double(), w, n],
    "conjugate": lambda x, w, n: [torch.complex(x, x).conj(), w, n],
    "another weight": lambda x, w, n: [x, torch.randn(3), n],
    "another number": lambda x, w, n: [x, w, 5],
    "a bool": lambda x, w, n: [x, w, True],
    "gradients wanted": lambda x, w, n: [x.requires_grad_(), w, n],
    "a parameter": lambda x, w, n: [torch.nn.Parameter(x), w, n],
    "one argument more": lambda x, w, n: [x, w, n, 3],
    "no tensor": lambda x, w, n: [2, w, n],
}


@pytest.mark.covers("F6.10")
@pytest.mark.filterwarnings("ignore::aotkit_cudagraphs.CudagraphNotice")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_differs_takes_the_long_way(trees, long_ways, change):
    weight = torch.randn(3)

    def compute(values):
        return [values[0] * values[1] + values[2] + len(values)]

    fast = trees.wrap(boxed(compute), static_input_indices=[1])
    for _ in range(4):
        fast([torch.randn(2, 3), weight, 1])
    del long_ways[:]
    torch.testing.assert_close(fast([torch.ones(2, 3), weight, 1]), [1 * weight.expand(2, 3) + 4])
    assert not long_ways
    held = []  # a recording may be asked for as long as what it reads in place is there
    for _ in range(4):
        changed = change(torch.randn(2, 3), weight, 1)
        held.append(changed)
        for call in (changed, [torch.randn(2, 3), weight, 1]):
            torch.testing.assert_close(fast(list(call)), compute(call))
        assert long_ways
        del long_ways[:]


@pytest.mark.covers("F6.9", "F6.10")
def test_a_result_that_is_kept_is_never_overwritten_by_an_expected_call(trees, long_ways):
    fast = trees.wrap(boxed(lambda values: [values[0] + 1]))
    for _ in range(4):
        fast([torch.zeros(4)])
    del long_ways[:]
    kept = [fast([torch.full((4,), float(n))])[0] for n in range(4)]
    assert long_ways, "the first result is in the way of the second call"
    for n, result in enumerate(kept):
        assert (result == n + 1).all()


@pytest.mark.covers("F6.17")
def test_a_written_input_is_written_by_expected_calls_and_no_other_has_its_memory(trees, long_ways):
    state = torch.zeros(3)

    def count(values):
        values[1].add_(1)
        return [values[0] + values[1]]

    fast = trees.wrap(boxed(count), static_input_indices=[1], mutated_input_indices=[1])
    x = torch.randn(3)
    for n in range(1, 6):
        torch.testing.assert_close(fast([x, state]), [x + n])
    del long_ways[:]
    version = state._version
    torch.testing.assert_close(fast([x, state]), [x + 6])
    assert not long_ways and state._version > version
    with pytest.warns(CudagraphNotice, match="shares memory"):
        torch.testing.assert_close(fast([state.view(3), state]), [torch.full((3,), 14.0)])


@pytest.mark.covers("F7.1")
def test_a_recording_that_is_gone_is_expected_no_more(trees, long_ways):
    fast = trees.wrap(boxed(lambda values: [values[0] + 1]))
    for _ in range(4):
        fast([torch.zeros(4)])
    (function,) = trees.manager().functions
    assert function.expected
    trees.reset()
    assert not function.expected and not function.nodes
    torch.testing.assert_close(fast([torch.ones(4)]), [torch.full((4,), 2.0)])


def test_calls_that_alternate_are_given_up(trees, long_ways):
    fast = trees.wrap(boxed(lambda values: [values[0] + 1]))
    for n in range(100):
        size = 3 + n % 2
        torch.testing.assert_close(fast([torch.full((size,), float(n))]), [torch.full((size,), n + 1.0)])
    (function,) = trees.manager().functions
    assert function.unlike == manager.MOST_UNLIKE
