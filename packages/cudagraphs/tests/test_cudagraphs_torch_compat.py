"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref

import pytest
import torch

from aotkit_cudagraphs import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Kept:
    """Something that can be referred to weakly."""


def test_torch_takes_a_reference_to_what_a_thread_keeps_from_torch_2_12_on() -> None:
    references = []

    def keep() -> None:
        kept = Kept()
        for _ in range(2):  # two references of ours, so that one too few leaves the object alive
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        before = sys.getrefcount(kept)
        torch._C._stash_obj_in_tls("aotkit versions", kept)
        references.append(sys.getrefcount(kept) - before)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    assert references == [1 if RELEASE >= (2, 12) else 0]


def test_what_a_thread_keeps_lives_as_long_as_the_thread_with_every_torch() -> None:
    seen = []

    def keep() -> None:
        kept = Kept()
        seen.append(weakref.ref(kept))
        _torch_compat.stash_in_thread("aotkit versions", kept)
        del kept
        seen.append(torch._C._get_obj_in_tls("aotkit versions") is seen[0]())

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    assert seen[1]
    for _ in range(500):  # what a thread keeps goes after the end that can be waited for
        if seen[0]() is None:
            break
        time.sleep(0.01)
    assert seen[0]() is None


@pytest.mark.parametrize("on", [True, False])
def test_torch_says_whether_its_allocator_is_on_from_2_12_on(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() or torch.version.cuda:
        assert hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled") == (RELEASE >= (2, 12))
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: on, raising=False)
    assert _torch_compat.allocator_is_on() == on
    monkeypatch.delattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled")
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    if not on:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert _torch_compat.allocator_is_on() == on
