"""Calls that share a parallel region: where threads wait, values on any number of threads, and what an error leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.targets.cpu import arm_machine, parallel_regions
from aotkit_inductor_lower.targets.cpu.generate import generate


class Text:
    """An observer that keeps the generated text."""

    kernels = ""

    def stage(self, name: str) -> Any:
        return nullcontext()

    def dump(self, name: str, kind: str, text: Callable[[], str]) -> None:
        if kind == "kernels":
            self.kernels = text()


def compiled(f: Callable[..., Any], *args: Tensor, mode: str = "fake") -> tuple[Any, str]:
    """Every operator a kernel of its own, and the text of all."""
    text = Text()
    graph = make_fx(f, decompositions(), tracing_mode=mode)(*args)
    return compile_graph(graph, options=LowerOptions(fuse=False), observer=text), text.kernels  # type: ignore[arg-type]


def waits(text: str) -> list[str]:
    """The calls of each region in order, ``|`` where all threads wait, in parentheses what one thread does."""
    found = []
    for body in re.findall(r"define internal void @segment_\d+\.region\d+\(.*?\n}", text, re.DOTALL):
        marks = re.findall(r"@(region_wait)|@run_share\(ptr @kernel_(\w+?)_?\d*,|call i32 @kernel_(\w+?)_?\d*\(", body)
        found.append(" ".join("|" if wait else shared or f"({alone})" for wait, shared, alone in marks))
    return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    """Few enough that a segment is not cut for their memory."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def independent(x: Tensor) -> Any:
    a, b = x.sin(), x.cos()
    return a, b, a + b


def in_one_place(x: Tensor) -> Any:
    rows = x.sin().sum(1)  # whose argument is dead behind it: the cosines may lie there
    return rows, x.cos().sum(1)


def in_another_place(x: Tensor) -> Any:
    return x.sin().sum(1), x.cos()


def over_what_is_read(x: Tensor) -> Any:
    a = x.sin()
    return a.sum(1), a.cos().sum(0)  # the cosines may lie where the sines do


def small_between(x: Tensor) -> Any:
    row = x[0] + x[1]
    y = (x * row).sin()
    return ((y[0] + y[1]) * y).cos()


def alone_between(x: Tensor) -> Any:
    return x.sin(), x.flatten().cumsum(0), x.cos()


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (independent, ["sin cos | add"]),
        (in_one_place, ["sin | sum | cos | sum"]),
        (in_another_place, ["sin | sum cos"]),
        (over_what_is_read, ["sin | sum | cos | sum"]),
        (small_between, ["mul | sin | (add) | mul | cos"]),  # the first thread's work before is in no region
        (alone_between, ["sin (cumsum) cos"]),
        (lambda x: (x.sin(),), []),
    ],
)
def test_threads_wait_where_a_call_needs_what_others_compute_or_where_they_compute(f: Any, found: list[str]) -> None:
    x = numbers(300, 400)
    graph, text = compiled(f, x)
    assert waits(text) == found
    want = f(x)
    want = want if isinstance(want, tuple) else (want,)
    for count in (1, 2, 3):
        with threads(count):
            for got, value in zip(graph([x]), want, strict=True):
                torch.testing.assert_close(got, value)


def test_no_region_has_a_call_of_one_thread_for_which_the_others_would_wait_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_regions, "LONGEST_ALONE", 1 << 12)
    _, text = compiled(alone_between, numbers(300, 400))
    assert waits(text) == []


def test_sizes_known_at_run_time_only_share_no_region() -> None:
    x = numbers(300, 400)
    graph, text = compiled(independent, x, mode="symbolic")
    assert not graph.report().regions
    assert waits(text) == []
    for got, value in zip(graph([x]), independent(x), strict=True):
        torch.testing.assert_close(got, value)


def test_a_chain_in_which_threads_read_what_others_wrote_has_the_bits_of_one_thread_in_every_call() -> None:
    def chain(x: Tensor) -> Any:
        kept = []
        for k in range(4):
            x = (x.t().contiguous() * 2).sin() + x.mean(1)
            small = x[k] * 2 + x[:, k]
            x = (x * small).cos()
            kept.append(small)
        return x, *kept

    x = numbers(300, 300)
    graph, text = compiled(chain, x)
    assert len(waits(text)) == 1 and text.count("call i1 @region_wait") > 10
    with threads(1):
        want = graph([x])
    for count in (2, 3, 4):
        with threads(count):
            for _ in range(10):
                assert all(torch.equal(got, value) for got, value in zip(graph([x]), want, strict=True))


@pytest.mark.parametrize(("rows", "found"), [(3, "sin (index) | copy"), (300, "sin | index | copy")])
def test_a_call_that_fails_ends_the_region_before_anything_behind_it_is_written(rows: int, found: str) -> None:
    def f(state: Tensor, x: Tensor, index: Tensor) -> Any:
        sines, chosen = x.sin(), x[index]
        state.copy_(x)  # needs neither
        return sines, chosen

    x, state = numbers(300, 400), torch.zeros(300, 400)
    index = torch.arange(rows)
    graph, text = compiled(f, state, x, index)
    assert waits(text) == [found]
    bad = index.clone()
    bad[-1] = 1000
    for count in (1, 2, 3):
        with threads(count):
            with pytest.raises(IndexError, match="out of range"):
                graph([state, x, bad])
            assert not state.any()
            got = graph([state, x, index])
            assert torch.equal(got[1], x[index]) and torch.equal(state, x)
            torch.testing.assert_close(got[0], x.sin())
            state.zero_()


def test_the_report_names_regions_also_of_a_graph_that_was_found_compiled() -> None:
    store: dict[str, bytes] = {}

    class Store:
        get, put = staticmethod(store.get), staticmethod(store.__setitem__)

    graph = make_fx(independent, decompositions(), tracing_mode="fake")(numbers(300, 400))
    for _ in range(2):
        made = compile_graph(graph, options=LowerOptions(fuse=False), object_store=Store())  # type: ignore[arg-type]
        assert "  one parallel region: sin to add, 3 kernels; threads wait 1 times\n" in f"{made.report()}\n"
    assert len(store) == 1


def test_a_region_compiles_for_another_processor() -> None:
    graph, _ = compiled(independent, numbers(300, 400))
    made = generate(graph.program, arm_machine(), keep_text=True)
    assert waits(made.text) == ["sin cos | add"] and "@llvm.aarch64.hint" in made.text
    assert {"GOMP_parallel", "sched_yield"} <= set(made.binary.facts["imports"])
