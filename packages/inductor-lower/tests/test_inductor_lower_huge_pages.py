"""Large memory is asked for in huge pages, and nothing else changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower._torch_compat import empty_strided_cpu
from aotkit_inductor_lower.memory import huge_pages
from aotkit_inductor_lower.memory.huge_pages import LARGE, allocator_of_large, move_to_huge_pages, wish_huge_pages

HUGE = 1 << 21


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the system is asked for: address, bytes, advice."""
    seen: list[tuple[int, int, int]] = []

    def found() -> Callable[[int, int, int], int]:
        def madvise(address: int, nbytes: int, advice: int) -> int:
            seen.append((address, nbytes, advice))
            return 0

        return madvise

    monkeypatch.setattr(huge_pages, "system_madvise", found)
    return seen


def test_whole_huge_pages_inside_of_the_memory_are_asked_for(wishes: list[tuple[int, int, int]]) -> None:
    for address in (HUGE, HUGE + 64, 5 * HUGE - 64):
        for nbytes in (LARGE, LARGE + 4096, 3 * LARGE + 8):
            assert wish_huge_pages(address, nbytes)
            first, length, advice = wishes.pop()
            assert advice == 14 and first % HUGE == 0 and length % HUGE == 0
            assert address <= first < address + HUGE
            assert first + length <= address + nbytes < first + length + HUGE
    assert not wish_huge_pages(HUGE, LARGE - 1) and not wishes


def test_only_large_results_are_asked_for(wishes: list[tuple[int, int, int]]) -> None:
    def run(rows: int, dynamic: bool) -> int:
        x = torch.randn(rows, 1024)
        mode = "symbolic" if dynamic else "real"
        graph = make_fx(lambda x: x.sin() + 1, tracing_mode=mode)(x)
        compiled = compile_graph(graph, [x], options=LowerOptions())
        wishes.clear()
        (got,) = compiled([x])
        torch.testing.assert_close(got, x.sin() + 1)
        inside = [w for w in wishes if got.data_ptr() <= w[0] < got.data_ptr() + got.nbytes]
        return len(inside)

    for dynamic in (False, True):
        assert run(LARGE // 4096, dynamic) == 1
        assert run(LARGE // 4096 - 1, dynamic) == 0


def test_the_system_itself_takes_the_wish_and_the_memory_is_as_before() -> None:
    large = allocator_of_large(empty_strided_cpu)
    tensor = large((1 << 22,), (1,), torch.float32)
    assert tensor.shape == (1 << 22,) and tensor.is_contiguous()
    tensor.fill_(3)
    assert (tensor == 3).all()
    kept = (ctypes.c_uint8 * (LARGE + HUGE))()
    kept[LARGE] = 7
    wish_huge_pages(ctypes.addressof(kept), len(kept))
    assert kept[LARGE] == 7 and kept[0] == 0


def test_without_the_call_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "system_madvise", lambda: None)
    assert not wish_huge_pages(HUGE, LARGE)


def test_pages_of_which_half_is_given_are_moved_once(wishes: list[tuple[int, int, int]]) -> None:
    half = HUGE // 2
    ranges = [
        (4 * HUGE + half, half),  # half of a page
        (8 * HUGE + half + 64, half - 64),  # less
        (12 * HUGE, 2 * HUGE + half - 1),  # two pages and less than half
        (12 * HUGE, HUGE),  # again
        *((20 * HUGE + place * HUGE // 4, HUGE // 4 - 64) for place in range(4)),  # what lies side by side
        (30 * HUGE, 0),
    ]
    assert move_to_huge_pages(ranges) == 4 * HUGE
    assert wishes == [(page * HUGE, HUGE, 25) for page in (4, 12, 13, 20)]


def test_what_the_system_does_not_move_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "system_madvise", lambda: lambda *_: -1)
    assert move_to_huge_pages([(HUGE, 4 * HUGE)]) == 0
    monkeypatch.setattr(huge_pages, "system_madvise", lambda: None)
    assert move_to_huge_pages([(HUGE, 4 * HUGE)]) == 0


def test_moved_memory_is_as_before() -> None:
    tensors = [torch.arange(1 << 20) + number for number in range(3)]
    places = [tensor.data_ptr() for tensor in tensors]
    moved = move_to_huge_pages((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert moved % HUGE == 0 and moved <= sum(tensor.nbytes + 2 * HUGE for tensor in tensors)
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert all(torch.equal(tensor, torch.arange(1 << 20) + number) for number, tensor in enumerate(tensors))
