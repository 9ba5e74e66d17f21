"""The same promises on a real device."""

import pytest
import torch

from aotkit_cudagraphs import CudagraphNotice, CudagraphOptions, SkipKind, cudagraphify
from aotkit_cudagraphs.drivers import CudaDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="these tests need a CUDA device, and torch sees none"),
]


def test_replays_equal_the_callable():
    weight = torch.randn(64, 64, device="cuda")

    def fn(x, weight):
        return torch.relu(x @ weight), x[1:], weight.t()

    fast = cudagraphify(fn, [torch.randn(8, 64, device="cuda"), weight], static_input_indices=[1])
    results = []
    for _ in range(20):
        x = torch.randn(8, 64, device="cuda")
        results.append((fast(x, weight), fn(x, weight)))
    for got, expected in results:
        assert all(map(torch.equal, got, expected))
    assert fast.report().replays == 20 and fast.report().pool_bytes > 0


def test_random_numbers_continue_as_without_recording():
    def fn(x):
        return torch.dropout(x, 0.5, True)

    x = torch.ones(1000, device="cuda")
    fast = cudagraphify(fn, [x])
    torch.manual_seed(5)
    got = [fast(x) for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(a, fn(x)) for a in got)


def test_buffers_are_updated_once_per_call():
    counter = torch.zeros(2, device="cuda")

    def fn(x):
        counter.add_(1)
        return x + 1

    fast = cudagraphify(fn, [torch.ones(4, device="cuda")], options=CudagraphOptions(warmup_iterations=3))
    assert counter[0] == 0
    fast(torch.ones(4, device="cuda"))
    fast(torch.ones(4, device="cuda"))
    assert counter[0] == 2


def test_what_waits_for_the_device_runs_uncaptured():
    with pytest.warns(CudagraphNotice):
        fast = cudagraphify(lambda x: x * x.sum().item(), [torch.ones(3, device="cuda")])
    assert (fast(torch.ones(3, device="cuda")) == 3).all()
    assert [reason.kind for reason in fast.report().skips] == [SkipKind.CAPTURE_FAILED]
    assert (torch.ones(3, device="cuda") + 1).sum() == 6, "the device still works"


def test_pool_state_can_be_checkpointed_and_restored():
    driver = CudaDriver()
    pool, stream = driver.new_pool(), driver.new_stream()
    empty = driver.checkpoint(pool)
    x = torch.ones(1000, device="cuda")
    first, kept = driver.capture(lambda: x + 1, pool=pool, stream=stream)
    state, address = driver.checkpoint(pool), kept.data_ptr()
    assert list(driver.live_blocks(pool)) == [address] and driver.pool_bytes(pool) >= 4000
    del kept
    assert driver.live_blocks(pool) == {}
    spy = torch.empty(0, device="cuda").set_(driver.storage_at(pool, address, 4000), 0, (1000,), (1,))
    driver.replay(first)
    (owner,) = driver.restore(pool, state, {address: 4000})
    assert list(driver.live_blocks(pool)) == [address]
    second, later = driver.capture(lambda: spy * 2, pool=pool, stream=stream)
    driver.replay(second)
    assert later.data_ptr() != address and (later == 4).all() and (spy == 2).all()
    del owner, later
    assert driver.live_blocks(pool) == {}
    assert driver.restore(pool, empty, {}) == [] and driver.reserved_bytes(pool) > 0
