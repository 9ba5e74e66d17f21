"""Random graphs through the scheduler: what it makes of them computes the same, waits for nothing, and is not more."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import interpret_program, lower_graph, schedule_program, verify_program
from aotkit_inductor_lower.ir import LoopNest

#: Kernels that each graph takes today. A change that fuses more lowers them; more kernels need a reason.
KERNELS = [6, 5, 6, 9, 5, 10, 5, 5, 7, 7, 7, 7, 9, 7, 4, 8, 4, 3, 8, 10, 6, 9, 10, 9]
SIZE = 24  # 576 elements: enough for kernels to be joined by what they read


def step(rng, known):
    """One more square matrix, made of the known ones."""
    a, b = rng.choice(known), rng.choice(known)
    cut = rng.randrange(1, SIZE)
    return rng.choice(
        [
            lambda: a.sin() + b,
            lambda: a * b,
            lambda: (a * 0.5).exp().tanh(),
            lambda: torch.where(a > b, a, b * 2),
            lambda: a.softmax(rng.choice((0, 1))),
            lambda: a - b.mean(1, keepdim=True),
            lambda: a * b.amax(0),
            lambda: a + (b * b).sum(),
            lambda: a.cumsum(1) * 0.1,
            lambda: a.t() * b,
            lambda: a.flip(0) + 1,
            lambda: a.roll(3, 1),
            lambda: a.reshape(4, 6, SIZE).sum(1).repeat(6, 1) + b,
            lambda: torch.cat([a[:cut].cos(), b[cut:]]),
            lambda: torch.cat([a[:, cut:], b[:, :cut]], 1) * 2,
            lambda: torch.nn.functional.pad(a[:cut, 1:], (1, 0, 0, SIZE - cut)),
            lambda: (a @ b) * 0.05,
            lambda: torch.logcumsumexp(a, 0) * 0.1,
        ]
    )()


def program(seed):
    """A function of three matrices that returns some of what it computes and may write to the first two."""

    def f(*inputs):
        rng = random.Random(seed)
        known = list(inputs)
        for _ in range(12):
            known.append(step(rng, known[-6:]))
            if rng.random() < 0.12:
                inputs[rng.randrange(2)].copy_(known[-1])
        return [known[-1], *rng.sample(known[3:], 2)]

    return f


def matrices():
    return [torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)]


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(24))
def test_a_scheduled_random_graph_computes_what_eager_does_in_no_more_kernels(seed):
    f = program(seed)
    lowered = lower_graph(make_fx(f, tracing_mode="fake")(*matrices()))
    scheduled, records = schedule_program(lowered)
    verify_program(scheduled)
    mine, theirs = matrices(), matrices()
    for got, want in zip([*interpret_program(scheduled, mine), *mine], [*f(*theirs), *theirs], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    before, after = (sum(isinstance(s, LoopNest) for s in p.steps) for p in (lowered, scheduled))
    assert after <= KERNELS[seed] < before and any(r.fused for r in records)
    again, _ = schedule_program(lowered)
    assert again == scheduled
