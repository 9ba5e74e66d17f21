"""What torch does around captures on a CUDA device, as state to look at: streams, allocators, the generator.

Each step does what torch 2.11 to 2.13 do in the same order, so that a step that raises leaves the same half behind it.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace

import torch

from aotkit_cudagraphs import cuda_attempt


class FakeCuda:
    """A process with one device.

    Attributes:
        fails: steps that raise the next time: "pool", "begin", "end", "instantiate".
        host: whether the allocator of pinned memory takes part in captures (2.13), without a way to tell it otherwise.
        capturing: by stream, "active" or "invalid".
        open, host_open: pools that allocations go to.
        users, host_users: how many each pool believes it has.
    """

    def __init__(self, monkeypatch, host=True):
        self.fails, self.host = set(), host
        self.capturing, self.open, self.host_open = {}, set(), set()
        self.users, self.host_users = Counter(), Counter()
        self._pools = 0
        self.outer = SimpleNamespace(cuda_stream=0)
        self.current, self.generator_captures = self.outer, False
        fake = self

        class Graph(FakeGraph):
            def __init__(self):
                super().__init__(fake)

        cuda = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.current,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "graph_pool_handle": self._new_pool,
            "stream": self._use,
            "Stream": self._new_stream,
            "CUDAGraph": Graph,
            "get_allocator_backend": lambda: "native",
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        address = lambda index: self.current.cuda_stream  # one line among many
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", address, raising=False)
        is_capturing = lambda: self.current.cuda_stream in self.capturing
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", is_capturing, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocations, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self._release, raising=False)
        library = SimpleNamespace(cuStreamBeginCapture_v2=lambda stream, mode: self._begin(stream.value or 0))
        monkeypatch.setattr(cuda_attempt, "_driver_library", lambda: library)

    def invalidate(self):
        """Something that can't be captured happens on the current stream."""
        if self.current.cuda_stream in self.capturing:
            self.capturing[self.current.cuda_stream] = "invalid"
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def check(self, pool, host_open=False):
        """Nothing is left of a capture in `pool` that failed, but perhaps for the allocator of pinned memory."""
        assert self.current is self.outer and self.capturing == {}
        assert self.open == set() and self.users[pool] == 1 and not self.generator_captures
        assert self.host_open == ({pool} if host_open else set())
        assert self.host_users[pool] == self.host + host_open

    def fail(self, step):
        if step in self.fails:
            self.fails.discard(step)
            raise RuntimeError(f"{step} failed")

    def _new_pool(self):
        self._pools += 1
        return (0, self._pools)

    def _new_stream(self, device=None):
        return SimpleNamespace(cuda_stream=id(object()) + self._pools)

    @contextlib.contextmanager
    def _use(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _begin(self, stream):
        if stream in self.capturing:
            return 401
        self.capturing[stream] = "active"
        return 0

    def _end_allocations(self, device, pool):
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.discard(pool)

    def _release(self, device, pool):
        self.users[pool] -= 1
        assert self.users[pool] >= 0


class FakeGraph:
    """torch's graph: which half of its state each failing step leaves."""

    def __init__(self, fake):
        self._fake, self._stream = fake, fake.current
        self._registered = self._ended = False

    def capture_begin(self, pool, capture_error_mode):
        fake = self._fake
        self._pool = pool
        fake.fail("pool")
        fake.generator_captures = True
        for opened, users in [(fake.open, fake.users), (fake.host_open, fake.host_users)][: 1 + fake.host]:
            users[pool] += 1
            if pool in opened:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            opened.add(pool)
        fake.fail("begin")
        assert fake._begin(fake.current.cuda_stream) == 0
        self._registered = True

    def capture_end(self):
        fake = self._fake
        assert fake.current is self._stream, "Capture must end on the same stream it began on."
        state = fake.capturing.pop(fake.current.cuda_stream, None)
        fake.fail("end")
        if state != "active":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if not self._registered:
            raise RuntimeError("capture_end() called before capture_begin().")
        self._registered = False
        fake._end_allocations(0, self._pool)
        fake.host_open.discard(self._pool)
        fake.generator_captures = False
        self._ended = True
        fake.fail("instantiate")

    def pool(self):
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self):
        if self._ended:
            self._fake._release(0, self._pool)
            self._fake.host_users[self._pool] -= self._fake.host
        self._ended = False

    def replay(self):
        assert self._ended
