"""The simulated device behaves like a device where that matters, and reports what a device would silently get wrong."""

import contextlib
import gc

import pytest
import torch

from aotkit_cudagraphs.drivers import CaptureError, SimulatedDriver
from aotkit_cudagraphs.simulated_driver import _CaptureMode, _SimulatedAttempt
from aotkit_cudagraphs.simulated_pool import SimulatedMemoryError, SimulatedPool
from aotkit_cudagraphs.simulated_streams import StreamOrderError

pytestmark = pytest.mark.covers("F6.29")


@pytest.fixture
def driver():
    return SimulatedDriver(capacity=1 << 16)


def capture(driver, fn, pool=None):
    pool = pool or driver.new_pool()
    recording, result = driver.capture(fn, pool=pool, stream=driver.new_stream())
    return pool, recording, result


def test_the_pool_is_accurate_to_the_block():
    pool = SimulatedPool(4096, granularity=512)
    first, second, third = pool.allocate(1), pool.allocate(513), pool.allocate(512)
    assert pool.live_bytes == 512 + 1024 + 512
    assert (second.data_ptr() - first.data_ptr(), third.data_ptr() - first.data_ptr()) == (512, 1536)
    assert first.data_ptr() % 512 == 0
    address = second.data_ptr()
    del second
    assert pool.live_bytes == 1024
    again = pool.allocate(700)
    assert again.data_ptr() == address, "the first gap that fits is used again"
    with pytest.raises(SimulatedMemoryError, match="no gap of 2560 bytes"):
        pool.allocate(2560)
    assert pool.peak_bytes == 2048


def test_freed_memory_is_poisoned_and_reads_through_an_old_address_see_it():
    pool = SimulatedPool(4096)
    tensor = torch.empty(0).set_(pool.allocate(64), 0, (16,), (1,))
    assert tensor.isnan().all(), "fresh memory is undefined"
    tensor.fill_(1.0)
    spy = torch.empty(0).set_(pool.storage_at(tensor.data_ptr(), 64), 0, (16,), (1,))
    assert (spy == 1).all()
    del tensor
    pool.collect()
    assert spy.isnan().all()
    new = torch.empty(0).set_(pool.allocate(64), 0, (16,), (1,)).fill_(2.0)
    assert (spy == 2).all() and new.data_ptr() == spy.data_ptr(), "use after overwrite is visible, as on a device"


def test_storages_outlive_their_pool_object():
    tensor = torch.empty(0).set_(SimulatedPool(4096).allocate(64), 0, (16,), (1,)).fill_(3.0)
    gc.collect()
    assert (tensor == 3).all()


def test_a_double_free_is_reported(driver):
    pool = driver.new_pool()
    with driver.use_pool(pool):
        tensor = driver.allocate(100)
    driver.free(tensor)
    assert driver.pool_bytes(pool) == 0 and (tensor == 255).all()
    with pytest.raises(SimulatedMemoryError, match="freed before"):
        driver.free(tensor)
    with pytest.raises(SimulatedMemoryError, match="none of this driver's pools"):
        driver.free(torch.ones(3))


def test_results_inside_use_pool_live_in_the_pool(driver):
    pool = driver.new_pool()
    with driver.use_pool(pool):
        made = torch.ones(100) + 1
        view = made[3:]
    outside = made + 1
    assert pool.owns(made.data_ptr()) and pool.owns(view.data_ptr()) and not pool.owns(outside.data_ptr())
    assert driver.pool_bytes(pool) == 512, "temporaries are freed, the view shares its base's block"
    del made
    assert driver.pool_bytes(pool) == 512
    del view
    assert driver.pool_bytes(pool) == 0


def test_checkpoint_and_restore_bring_back_the_allocation_state(driver):
    pool = driver.new_pool()
    with driver.use_pool(pool):
        kept, dropped = torch.ones(10), torch.ones(10)
    state = driver.checkpoint(pool)
    addresses = kept.data_ptr(), dropped.data_ptr()
    with pytest.raises(SimulatedMemoryError, match="while blocks are in use"):
        driver.restore(pool, state, {})
    del kept, dropped
    spy = driver.storage_at(pool, addresses[0], 40)
    assert driver.live_blocks(pool) == {}, "a storage on the memory is no use of it"
    spy.fill_(7)
    (owner,) = driver.restore(pool, state, {addresses[0]: 40})
    assert driver.live_blocks(pool) == {addresses[0]: 40}
    with driver.use_pool(pool):
        assert torch.zeros(10).data_ptr() == addresses[1]
    del owner
    assert driver.live_blocks(pool) == {} and spy[0] == 7, "what others may still read is not poisoned"
    with pytest.raises(SimulatedMemoryError, match="no block for live storages"):
        driver.restore(pool, state, {addresses[1] + 512: 40})
    assert driver.reserved_bytes(pool) == 2048 - 1024


def test_a_capture_leaves_memory_in_use_as_it_was_even_if_the_callable_frees_and_reuses_it(driver):
    pool = driver.new_pool()
    with driver.use_pool(pool):
        inputs = [torch.full((4,), 2.0)]
    address = inputs[0].data_ptr()
    spy = torch.empty(0).set_(driver.storage_at(pool, address, 16), 0, (4,), (1,))

    def fn():
        doubled = inputs.pop() * 2
        return doubled + 1

    _, recording, result = capture(driver, fn, pool)
    assert result.data_ptr() == address and (spy == 2).all()
    driver.replay(recording)
    assert (result == 5).all()


def test_a_capture_executes_nothing_and_a_replay_does(driver):
    x, counter = torch.randn(4, 4), torch.zeros(3)

    def fn():
        counter.add_(1)
        return (x @ x).relu()

    pool, recording, result = capture(driver, fn)
    assert torch.equal(counter, torch.zeros(3)) and result.isnan().all()
    assert driver.pool_bytes(pool) == 512, "the temporary is free again"
    for count in (1, 2):
        x.copy_(torch.randn(4, 4))
        driver.replay(recording)
        assert torch.equal(result, (x @ x).relu()) and counter[0] == count


def test_a_replay_draws_new_random_numbers_from_the_generator(driver):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    _, recording, result = capture(driver, lambda: torch.rand(5))
    assert torch.equal(torch.get_rng_state(), before)
    draws = []
    for _ in range(2):
        driver.replay(recording)
        draws.append(result.clone())
    torch.manual_seed(1)
    assert torch.equal(draws[0], torch.rand(5)) and torch.equal(draws[1], torch.rand(5))


def test_a_recording_does_not_keep_its_inputs_alive_and_says_so(driver):
    inputs = [torch.ones(4)]
    _, recording, _ = capture(driver, lambda: inputs[0] + 1)
    driver.replay(recording)
    inputs.clear()
    with pytest.raises(SimulatedMemoryError, match="whose tensor has died"):
        driver.replay(recording)


def test_a_replay_overwrites_whoever_lives_at_its_addresses(driver):
    pool = driver.new_pool()
    x = torch.ones(4)
    _, recording, result = capture(driver, lambda: x + 1, pool)
    address = result.data_ptr()
    del result
    with driver.use_pool(pool):
        tenant = torch.full((4,), 7.0)
    assert tenant.data_ptr() == address
    driver.replay(recording)
    assert (tenant == 2).all(), "the bug that the logic above must prevent can be seen here"


def test_temporaries_are_poisoned_after_a_replay(driver):
    x = torch.ones(64)
    pool, recording, result = capture(driver, lambda: (x * 2) + 1)
    temporary = next(address for address in recording.own if address != result.data_ptr())
    driver.replay(recording)
    assert (result == 3).all()
    spy = torch.empty(0).set_(pool.storage_at(temporary, 256), 0, (64,), (1,))
    assert spy.isnan().all()


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x * torch.tensor(2.0)],
    ids=["item", "nonzero", "mask", "host constant"],
)
def test_what_a_device_could_not_capture_is_refused_and_undone(driver, fn):
    x, counter = torch.ones(4), torch.zeros(())

    def program():
        counter.add_(1)
        return fn(x)

    with pytest.raises(CaptureError):
        capture(driver, program)
    assert counter == 0


def test_a_recording_that_failed_leaves_the_device_usable(driver):
    x, pool, stream = torch.ones(4), driver.new_pool(), driver.new_stream()
    outer = driver.current_stream()

    def hides_its_error():
        with contextlib.suppress(RuntimeError):
            x.sum().item()
        return x + 1

    def fails():
        raise KeyError("mine")

    def fails_after_all():
        try:
            x.sum().item()
        except RuntimeError as error:
            raise ValueError("the value is unknown") from error

    refused = [lambda: x.sum().item(), hides_its_error, fails_after_all]
    for fn, error in [*((fn, CaptureError) for fn in refused), (fails, KeyError)]:
        with pytest.raises(error):
            driver.capture(fn, pool=pool, stream=stream)
        assert driver.current_stream() == outer and not driver.live_blocks(pool)
    recording, result = driver.capture(lambda: x + torch.rand(4), pool=pool, stream=stream)
    driver.replay(recording)
    assert (result >= 1).all()


def test_the_simulated_device_shows_a_recording_that_nobody_ends(driver, monkeypatch):
    monkeypatch.setattr(_SimulatedAttempt, "abandon", lambda self: True)
    x, pool, stream = torch.ones(4), driver.new_pool(), driver.new_stream()
    held = []  # a mode that is never left would record the rest of this test
    monkeypatch.setattr(_CaptureMode, "__enter__", lambda self: held.append(self) or self)
    monkeypatch.setattr(_CaptureMode, "__exit__", lambda self, *error: None)
    with pytest.raises(KeyError):
        driver.capture(lambda: {}[x], pool=pool, stream=stream)
    with pytest.raises(SimulatedMemoryError, match="neither ended nor abandoned"):
        driver.capture(lambda: x + 1, pool=pool, stream=stream)


def test_in_place_and_out_variants_and_lists_replay(driver):
    xs, out = [torch.randn(3), torch.randn(4)], torch.zeros(3)

    def fn():
        torch.add(xs[0], 1, out=out)
        torch._foreach_mul_(xs, 2.0)
        first, second = torch.split(torch.cat(xs), [3, 4])
        return first.sin(), second

    before = [x.clone() for x in xs]
    _, recording, (sine, second) = capture(driver, fn)
    assert all(map(torch.equal, xs, before)) and (out == 0).all()
    driver.replay(recording)
    assert torch.equal(out, before[0] + 1) and torch.equal(xs[1], before[1] * 2)
    assert torch.equal(sine, (before[0] * 2).sin()) and torch.equal(second, before[1] * 2)


def test_unordered_streams_are_reported(driver):
    main, side = driver.current_stream(), driver.new_stream()
    x = torch.ones(4)
    with driver.use_stream(side):
        x.add_(1)
    with pytest.raises(StreamOrderError, match="written on stream 1"), driver.use_stream(main):
        x.mul(2)
    driver.wait_event(main, driver.record_event(side))
    with driver.use_stream(main):
        assert (x * 2 == 4).all()
    with pytest.raises(StreamOrderError, match="is read on stream 0"), driver.use_stream(side):
        x.zero_()
    driver.synchronize()
    with driver.use_stream(side):
        x.zero_()


def test_an_event_covers_only_what_came_before_it(driver):
    main, side = driver.current_stream(), driver.new_stream()
    x, y = torch.ones(4), torch.ones(4)
    with driver.use_stream(side):
        x.add_(1)
    event = driver.record_event(side)
    with driver.use_stream(side):
        y.add_(1)
    driver.wait_event(main, event)
    with driver.use_stream(main):
        x.add_(1)
    with pytest.raises(StreamOrderError), driver.use_stream(main):
        y.add_(1)
