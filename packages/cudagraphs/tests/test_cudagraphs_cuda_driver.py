"""The driver for CUDA on a fake of torch's: what it leaves behind, and how much it asks."""

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aotkit_cudagraphs import CudagraphNotice, cuda_attempt, cudagraphify
from aotkit_cudagraphs.drivers import CaptureError, CudaDriver, SimulatedDriver

_spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).with_name("fake_cuda.py"))
fake_cuda = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_cuda)


@pytest.fixture(params=[False, True], ids=["torch 2.11", "torch 2.13"])
def fake(request, monkeypatch):
    return fake_cuda.FakeCuda(monkeypatch, host=request.param)


def fails_in_a_capture(fake, how):
    """A callable that fails in a capture, or runs where one fails."""

    def fn():
        fake.fails |= {how} & {"end", "instantiate"}
        if how in ("refused", "hidden", "renamed"):
            try:
                fake.invalidate()
            except RuntimeError as error:
                if how == "refused":
                    raise
                if how == "renamed":
                    raise ValueError("the value is unknown") from error
        if how == "mine":
            raise KeyError("mine")
        if how == "interrupted":
            raise KeyboardInterrupt
        return 1

    fake.fails |= {how} & {"pool", "begin"}
    return fn


@pytest.mark.parametrize("how", ["refused", "hidden", "renamed", "mine", "interrupted", "end", "instantiate"])
def test_a_capture_that_fails_leaves_nothing_behind(fake, how):
    driver = CudaDriver()
    pool, stream = driver.new_pool(), driver.new_stream()
    fake.check(pool.handle)
    expected = {"mine": KeyError, "interrupted": KeyboardInterrupt}.get(how, CaptureError)
    with pytest.raises(expected):
        driver.capture(fails_in_a_capture(fake, how), pool=pool, stream=stream)
    fake.check(pool.handle)
    graph, result = driver.capture(lambda: 2, pool=pool, stream=stream)
    assert result == 2
    graph.replay()
    graph.reset()
    fake.check(pool.handle)


@pytest.mark.parametrize("how", ["pool", "begin", "refused"])
def test_where_torch_can_t_end_a_capture_the_device_is_still_told(fake, monkeypatch, how):
    """It did not begin, or there is no driver library to begin an empty one with."""
    if how == "refused":
        monkeypatch.setattr(cuda_attempt, "_driver_library", missing_library)
    driver = CudaDriver()
    pool, stream = driver.new_pool(), driver.new_stream()
    with pytest.raises(CaptureError):
        driver.capture(fails_in_a_capture(fake, how), pool=pool, stream=stream)
    pinned_memory_hangs = fake.host and how != "pool"
    fake.check(pool.handle, host_open=pinned_memory_hangs)
    if pinned_memory_hangs:
        with pytest.raises(CaptureError, match="already recording"):
            driver.capture(lambda: 2, pool=pool, stream=stream)
        pool = driver.new_pool()
    assert driver.capture(lambda: 2, pool=pool, stream=stream)[1] == 2


def missing_library():
    raise RuntimeError("no CUDA driver library")


SEGMENTS = [
    {"segment_pool_id": (0, 1), "allocated_size": 512, "total_size": 2048, "address": 4096, "blocks": []},
    {"segment_pool_id": (0, 2), "allocated_size": 99, "total_size": 99, "address": 0, "blocks": []},
]


def test_only_the_pool_s_memory_is_described(fake, monkeypatch):
    asked = []

    def snapshot(mempool_id=None, include_traces=True):
        asked.append((mempool_id, include_traces))
        return SEGMENTS

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    driver = CudaDriver()
    pool = driver.new_pool()
    assert driver.pool_bytes(pool) == 512 and driver.reserved_bytes(pool) == 2048 and driver.live_blocks(pool) == {}
    assert asked == [((0, 1), False)] * 3


@pytest.mark.covers("F6.20")
def test_the_object_of_a_stream_is_made_once(fake, monkeypatch):
    driver, made = CudaDriver(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.append(device) or SimpleNamespace())
    first = driver.current_stream()
    fake.current = SimpleNamespace(cuda_stream=7)
    second = driver.current_stream()
    assert driver.current_stream() is second is not first and len(made) == 2
    fake.current = fake.outer
    assert driver.current_stream() is first and len(made) == 2
    for address in range(100):
        fake.current = SimpleNamespace(cuda_stream=1000 + address)
        driver.current_stream()
    assert len(driver._streams) <= 64


@pytest.mark.parametrize("how", ["sound", "hidden"])
def test_a_stream_that_is_captured_is_told_from_one_that_is_not(fake, how):
    """Also where the capture is invalid, and nobody knows yet."""
    driver, seen = CudaDriver(), []
    pool, stream = driver.new_pool(), driver.new_stream()

    def fn():
        if how == "hidden":
            fails_in_a_capture(fake, how)()
        seen.append(driver.is_capturing())

    with contextlib.nullcontext() if how == "sound" else pytest.raises(CaptureError):
        driver.capture(fn, pool=pool, stream=stream)
    assert [*seen, driver.is_capturing()] == [True, False]


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync", "pluggable"])
def test_an_allocator_that_keeps_no_states_of_pools_records_nothing(fake, monkeypatch, backend):
    """What torch says of the other two: `getCheckpointState` and snapshots raise."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, raising=False)
    reason = CudaDriver().unusable_reason()
    assert reason is None if backend == "native" else backend in reason


def test_where_pools_can_t_be_used_one_callable_runs_as_it_is():
    class Bare(SimulatedDriver):
        def unusable_reason(self):
            return "there are no pools"

    with pytest.warns(CudagraphNotice, match="there are no pools"):
        fast = cudagraphify(torch.sin, [torch.ones(2)], driver=Bare())
    assert torch.equal(fast(torch.ones(2)), torch.ones(2).sin())
