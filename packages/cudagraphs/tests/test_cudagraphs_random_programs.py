"""Random programs: recorded and plain execution agree in results, in what they write, and in what they leave alone."""

import random
import warnings

import pytest
import torch

from aotkit_cudagraphs import CudagraphNotice, CudagraphOptions, cudagraphify
from aotkit_cudagraphs.drivers import SimulatedDriver

SIZE = 6


def random_input(rng):
    """A 6 by 6 tensor of a random layout."""
    return rng.choice(
        [
            lambda: torch.randn(SIZE, SIZE),
            lambda: torch.randn(SIZE, SIZE).t(),
            lambda: torch.randn(SIZE, 1).expand(SIZE, SIZE),
            lambda: torch.randn(2 * SIZE, 3 * SIZE)[::2, 1::3],
            lambda: torch.randn(SIZE * SIZE + 1)[1:].view(SIZE, SIZE),
        ]
    )()


def random_program(rng, inputs, written):
    """A function of `inputs` inputs that may write those in `written`, made of ten random steps."""
    steps = [(rng.randrange(8), rng.randrange(99), rng.randrange(99)) for _ in range(10)]
    returned = [rng.randrange(99) for _ in range(4)]

    def program(*args):
        values = list(args)
        for kind, a, b in steps:
            x, y = values[a % len(values)], values[b % len(values)]
            match kind:
                case 0:
                    values.append(x + y)
                case 1:
                    values.append(torch.tanh(x @ y))
                case 2:
                    values.append(x.t())
                case 3:
                    values.append(torch.softmax(x, -1))
                case 4:
                    values.append(x * torch.rand(SIZE, SIZE))
                case 5:
                    values.append(torch.cat([x[:3], y[3:]]))
                case 6 if written:
                    args[sorted(written)[a % len(written)]].mul_(0.5)
                case 7:
                    fresh = x - y
                    fresh[1:3].add_(1)
                    values.append(fresh)
        return [values[index % len(values)] for index in returned]

    assert inputs
    return program


@pytest.mark.covers("F6.1", "F6.17", "F6.25", "F6.29")
@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_gives_the_same_recorded_and_plain(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.randint(2, 4)
    layouts = [rng.getrandbits(32) for _ in range(count)]
    static = {index for index in range(count) if rng.random() < 0.5}
    held = {index: torch.randn(SIZE, SIZE) for index in static}
    twins = {index: tensor.clone() for index, tensor in held.items()}
    program = random_program(rng, count, [index for index in static if rng.random() < 0.5])
    driver = SimulatedDriver(capacity=1 << 18)

    def inputs(memory):
        return [memory[i] if i in static else random_input(random.Random(layouts[i])) for i in range(count)]

    example = inputs(held)
    options = CudagraphOptions(on_skip="raise")
    fast = cudagraphify(program, example, static_input_indices=sorted(static), driver=driver, options=options)
    kept = []
    for call in range(6):
        given = inputs(held)
        plain = [twins[i] if i in static else tensor.clone() for i, tensor in enumerate(given)]
        torch.manual_seed(call)
        got = fast(*given)
        torch.manual_seed(call)
        expected = program(*plain)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        for index in static:
            assert torch.equal(held[index], twins[index])
        own = [a for a in got if all(a.untyped_storage()._cdata != h.untyped_storage()._cdata for h in held.values())]
        kept += [(a, a.clone()) for a in own]
    assert all(torch.equal(a, copy) for a, copy in kept), "what was returned stays as it was"
    report = fast.report()
    assert (report.replays, report.uncaptured, report.rerecords) == (6, 0, 0) and len(report.recordings) == 1
    pool = driver._pools[0]
    bytes_before = driver.pool_bytes(pool)
    fast(*inputs(held))
    assert driver.pool_bytes(pool) == bytes_before, "a replay leaks nothing"


def test_the_comparison_notices_a_program_that_is_recorded_wrongly():
    """The test above must be able to fail: a static input that moves unnoticed gives another result."""
    driver = SimulatedDriver(capacity=1 << 18)
    options = CudagraphOptions(check_static_addresses=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CudagraphNotice)
        fast = cudagraphify(torch.neg, [torch.ones(3)], static_input_indices=[0], driver=driver, options=options)
    other = torch.zeros(3)
    assert not torch.equal(fast(other), torch.neg(other))
