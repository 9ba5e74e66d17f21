"""Layers that write to a cache are captured once: results, caches and their versions are those of eager, and the graph
is the one that a capture of the whole gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotkit
from aotkit.driver import graph_compiler

COUNT, ROOM, WIDTH = 8, 6, 8


class Cached(nn.Module):
    """Writes a row of its own cache and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        keys.index_copy_(0, place, self.line(x))
        weights = (self.back(x) @ keys.t()).softmax(-1)
        return x + weights @ keys


class Counted(Cached):
    """Writes twice to what it writes to."""

    def forward(self, x: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        keys.mul_(0.5)
        return super().forward(x, keys, place)


class Shifted(nn.Module):
    """All rows of the cache become one row."""

    def forward(self, x: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        old = x + 0.5 * keys[0]
        keys.copy_(old.expand(ROOM, WIDTH))
        return old * 2


class Swapped(nn.Module):
    """Exchanges two caches, so that the new value of one is the other's old one."""

    def forward(self, x: Tensor, both: tuple[Tensor, Tensor], place: Tensor) -> Tensor:
        one, other = both
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        return torch.sin(x) + one.mean(0, keepdim=True)


class Reading(Cached):
    """Gives back a part of what it writes to."""

    def forward(self, x: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        super().forward(x, keys, place)
        return keys[:1]


class Stack(nn.Module):
    """``shown``: what a layer gets of the caches."""

    def __init__(self, make: Callable[[], nn.Module], shown: Callable[[Sequence[Tensor], int], Tensor]) -> None:
        super().__init__()
        self.blocks, self.shown = nn.ModuleList(make().double() for _ in range(COUNT)), shown

    def forward(self, x: Tensor, caches: Sequence[Tensor], place: Tensor) -> Tensor:
        x = torch.tanh(x)
        for number, block in enumerate(self.blocks):
            x = block(x, self.shown(caches, number), place)
        return x * 2


def own(caches: Sequence[Tensor], number: int) -> Tensor:
    return caches[number]


def first(caches: Sequence[Tensor], number: int) -> Tensor:
    return caches[0]


def turned(caches: Sequence[Tensor], number: int) -> Tensor:
    return caches[number].view(ROOM, WIDTH)


def separate() -> list[Tensor]:
    return [torch.randn(ROOM, WIDTH, dtype=torch.float64) for _ in range(COUNT)]


def rows_of_one() -> list[Tensor]:
    """Caches that are parts of one memory, which they share in part."""
    return [
        *torch.randn(COUNT + ROOM, WIDTH, dtype=torch.float64)
        .as_strided((COUNT, ROOM, WIDTH), (WIDTH, WIDTH, 1))
        .unbind()
    ]


def outcome(call: Any, caches: list[Tensor]) -> list[Any]:
    """Results, caches and by how much their versions moved, of three calls."""
    before = [cache._version for cache in caches]
    results = [
        call(torch.full((1, WIDTH), 0.3, dtype=torch.float64), caches, torch.tensor([place])).clone()
        for place in (2, 3, 3)
    ]
    return [*results, *caches, *(cache._version - at for cache, at in zip(caches, before, strict=True))]


def assert_like_eager(model: nn.Module, make: Callable[[], list[Tensor]], **chosen: Any) -> aotkit.Recorder:
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "observer": recorder, "cache": False, "repeated_layers": "once", **chosen}
    torch._dynamo.reset()
    call = torch.compile(model, backend="aotkit", options=options)
    torch.manual_seed(1)
    with torch.no_grad():
        eagers = outcome(model, make())
        torch.manual_seed(1)
        ours = outcome(call, make())
    for a, b in zip(ours, eagers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return recorder


def found(recorder: aotkit.Recorder) -> tuple[list[Any], str]:
    """How many layers were captured once, and why they were not."""
    once = [what["layers"] for name, what in recorder.events if name == "layers.once"]
    apart = " ".join(str(what["reason"]) for name, what in recorder.events if name == "layers.apart")
    return once, apart


@pytest.mark.parametrize("shown", [own, first])
def test_layers_with_caches_are_captured_once(shown: Any) -> None:
    torch.manual_seed(0)
    once, apart = found(assert_like_eager(Stack(Cached, shown), separate))
    assert [sum(layers) for layers in once] == [COUNT - 1] and not apart


@pytest.mark.parametrize("place", [ROOM, -1, 1 << 40])
def test_a_place_behind_the_end_of_the_caches_writes_nothing(place: int) -> None:
    torch.manual_seed(0)
    options = {"fallback": "error", "cache": False, "repeated_layers": "once", "redzones": True}
    call = torch.compile(Stack(Cached, own), backend="aotkit", options=options)
    around = torch.randn(COUNT, 3 * ROOM, WIDTH, dtype=torch.float64)  # caches with memory before and behind them
    kept, x = around.clone(), arguments()[0]
    with torch.no_grad():
        call(x, [cache.clone() for cache in around[:, ROOM : 2 * ROOM]], torch.tensor([1]))
        with pytest.raises(IndexError, match="out of range"):
            call(x, list(around[:, ROOM : 2 * ROOM].unbind()), torch.tensor([place]))
    assert torch.equal(around, kept)


@pytest.mark.parametrize("chosen", [{"verify": True}, {"redzones": True}], ids=str)
def test_other_options_hold_for_layers_with_caches(chosen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    once, _ = found(assert_like_eager(Stack(Cached, own), separate, **chosen))
    assert [sum(layers) for layers in once] == [COUNT - 1]


def test_each_layer_has_the_names_of_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graphs: list[torch.fx.GraphModule] = []
    compile_captured = graph_compiler.compile_captured

    def seen(captured: Any, ctx: Any) -> Any:
        graphs.append(captured.graph)
        return compile_captured(captured, ctx)

    monkeypatch.setattr(graph_compiler, "compile_captured", seen)
    options = {"fallback": "error", "cache": False, "repeated_layers": "once"}
    with torch.no_grad():
        torch.compile(Stack(Cached, own), backend="aotkit", options=options)(*arguments())
    written = [n for n in graphs[0].graph.nodes if n.target is torch.ops.aten.index_copy.default]
    paths = [[path for path, _ in node.meta["nn_module_stack"].values()][-1] for node in written]
    assert len(set(paths)) == len(paths) == COUNT and all("blocks" in path for path in paths)


def test_what_is_compiled_is_what_a_capture_of_the_whole_gives() -> None:
    torch.manual_seed(0)
    model, graphs = Stack(Cached, own), {}
    for how in ("once", "apart"):
        recorder = aotkit.Recorder()
        options = {"fallback": "error", "observer": recorder, "cache": False, "repeated_layers": how}
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend="aotkit", options=options)(*arguments())
        (graph,) = recorder.graphs
        graphs[how] = graph.report.kernel_count, graph.report.externs  # type: ignore[attr-defined]
    assert graphs["once"] == graphs["apart"]


def arguments() -> tuple[Tensor, list[Tensor], Tensor]:
    return torch.full((1, WIDTH), 0.3, dtype=torch.float64), separate(), torch.tensor([2])


def two(caches: Sequence[Tensor], number: int) -> Any:
    return caches[number], caches[number - 1]


@pytest.mark.parametrize(
    ("kind", "shown", "make", "reason"),
    [
        (Counted, own, separate, "writes to its inputs"),
        (Reading, own, separate, ""),
        (Cached, turned, separate, ""),
        (Shifted, own, separate, ""),
        (Swapped, two, separate, ""),
        (Cached, own, rows_of_one, "share memory"),
    ],
    ids=["written twice", "given back", "a view", "copied over", "exchanged", "overlapping"],
)
def test_other_layers_are_what_eager_computes(kind: Any, shown: Any, make: Any, reason: str) -> None:
    torch.manual_seed(0)
    recorder = assert_like_eager(Stack(kind, shown), make)
    if reason:
        once, apart = found(recorder)
        assert not once and reason in apart


# -- random layers -----------------------------------------------------------------------------------------

_WRITES: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    lambda keys, x, place: keys.index_copy_(0, place, x),
    lambda keys, x, place: keys[1:2].copy_(x),
    lambda keys, x, place: keys.add_(x),
    lambda keys, x, place: keys.t().mul_(1.1),
    lambda keys, x, place: keys.copy_(x.expand_as(keys)),
    lambda keys, x, place: keys.index_put_((place,), x, accumulate=True),
    lambda keys, x, place: None,
    lambda keys, x, place: keys.copy_(keys.flip(0)),
]


class Random(nn.Module):
    """Reads and writes two of the caches, of which both may be one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.line, rng = nn.Linear(WIDTH, WIDTH), random.Random(seed)
        self.steps = [(rng.choice("rww"), rng.randrange(2), rng.choice(_WRITES)) for _ in range(rng.randrange(2, 5))]

    def forward(self, x: Tensor, both: tuple[Tensor, Tensor], place: Tensor) -> Tensor:
        for kind, which, write in self.steps:
            if kind == "w":
                write(both[which], torch.sin(x), place)
            else:
                x = x * 0.5 + both[which].mean(0, keepdim=True)
        return x + self.line(x)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(24))
def test_random_layers_that_write(seed: int) -> None:
    torch.manual_seed(seed)
    apart = random.Random(seed).choice([0, 1, 3])

    def shown(caches: Sequence[Tensor], number: int) -> Any:
        return caches[number], caches[(number + apart) % COUNT]

    assert_like_eager(Stack(lambda: Random(seed), shown), separate if seed % 4 else rows_of_one)
