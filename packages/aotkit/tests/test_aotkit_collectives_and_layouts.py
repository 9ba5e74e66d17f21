"""Calls whose operators are not ATen's: collectives in order, and custom operators that read strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import aotkit

# The names of some collectives change from one torch to the next; in eager mode the older one warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


GIVEN = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def compiled(fn: Callable[..., Any]) -> tuple[Callable[..., Any], aotkit.Recorder]:
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    return torch.compile(fn, backend="aotkit", fullgraph=True, options=options), recorder


def called(recorder: aotkit.Recorder) -> list[str]:
    return [call.target for record in recorder.graphs for call in record.report.externs]


def reduced_in_place(x: Tensor, group: Any) -> Tensor:
    y = x * 2
    dist.all_reduce(y, group=group)
    return y + 1


def reduced_argument(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return x + 1


def gathered_into(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x * 2, group=group)
    return out * 2


COLLECTIVES: dict[str, Callable[[Tensor, Any], Any]] = {
    "all_reduce": lambda x, g: functional.all_reduce(x * 2, "sum", g) + 1,
    "all_gather": lambda x, g: functional.all_gather_tensor(x * 2, 0, g) + 1,
    "reduce_scatter": lambda x, g: functional.reduce_scatter_tensor(x * 2, "sum", 0, g) + 1,
    "all_to_all": lambda x, g: functional.all_to_all_single(x * 2, None, None, g) + 1,
    "broadcast": lambda x, g: functional.broadcast(x * 2, 0, g) + 1,
    "several": lambda x, g: functional.all_reduce_coalesced([x * 2, x + 1], "sum", g),
    "several, gathered": lambda x, g: functional.all_gather_into_tensor_coalesced([x * 2, x + 1], g),
    "several, scattered": lambda x, g: functional.reduce_scatter_tensor_coalesced([x * 2, x + 1], "sum", [0, 0], g),
    "all_gather, differentiated": lambda x, g: functional.all_gather_tensor_autograd(x * 2, 0, g) * 3,
    "reduce_scatter, differentiated": lambda x, g: functional.reduce_scatter_tensor_autograd(x * 2, "sum", 0, g) * 3,
    "into a value": reduced_in_place,
    "into an argument": reduced_argument,
    "into memory": gathered_into,
}


@pytest.mark.covers("F5g.28")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # Dynamo's, before torch 2.13
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_what_it_gives_in_eager_mode(name: str, world: Any) -> None:
    fn = COLLECTIVES[name]
    differentiated = "differentiated" in name
    want_x, got_x = (GIVEN.clone().requires_grad_(differentiated) for _ in range(2))
    want, (run, _) = fn(want_x, world), compiled(fn)
    got = run(got_x, world)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_x, want_x)
    if differentiated:
        (want_grad,) = torch.autograd.grad(want.sin().sum(), want_x)
        torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), got_x)[0], want_grad)


@pytest.mark.covers("F5g.28")
def test_collectives_start_and_end_in_the_order_of_the_program(world: Any) -> None:
    """All processes must make the same calls in the same order. A wait belongs to its collective, and what a collective
    still reads is not written over: the sum that is not needed any more has no memory in common with what follows."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        first = functional.all_reduce(x.sin(), "sum", world)
        second = functional.all_gather_tensor(x.cos(), 0, world)
        between = (x.exp() * 2).sum(0)
        third = functional.broadcast(first + second, 0, world)
        return first * 2, between, third - 1

    run, recorder = compiled(fn)
    torch.testing.assert_close(run(GIVEN.clone()), fn(GIVEN.clone()))
    starts = [target for target in called(recorder) if "wait" not in target]
    order = ["all_reduce", "all_gather_into_tensor", "broadcast"]
    assert starts == [f"_c10d_functional.{name}.default" for name in order]


# -- custom operators that read strides --------------------------------------------------------------------------------

TAGS = {
    "exact strides": torch.Tag.needs_exact_strides,
    "order of strides": torch.Tag.needs_fixed_stride_order,
    "any layout": torch.Tag.flexible_layout,
    "untagged": None,
}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("aotkit_test_layouts", "FRAGMENT") as library:
        yield library


@pytest.mark.covers("F5c.14")
@pytest.mark.parametrize("tag", TAGS)
def test_a_custom_operator_sees_the_strides_that_it_sees_in_eager_mode(
    library: torch.library.Library, tag: str
) -> None:
    """Whatever it says about layouts: all of them get what eager gives."""
    seen: list[tuple[tuple[int, ...], int]] = []

    def implementation(x: Tensor) -> Tensor:
        seen.append((x.stride(), x.storage_offset() % 2))
        return x.clone(memory_format=torch.contiguous_format) + sum(x.stride())

    tags = () if TAGS[tag] is None else (TAGS[tag],)
    library.define("strides(Tensor x) -> Tensor", tags=tags)
    library.impl("strides", implementation, "CPU")
    library.impl("strides", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")
    op = torch.ops.aotkit_test_layouts.strides

    def fn(x: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        given = (y, y.t(), y[:, 1::2], y[:1].expand(3, 4), x.t() + 1, x.t(), images + 1, images.permute(0, 2, 3, 1) * 2)
        return tuple(op(t) for t in given)

    images = torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    want = fn(GIVEN, images)
    in_eager = seen.copy()
    seen.clear()
    run, _ = compiled(fn)
    torch.testing.assert_close(run(GIVEN, images), want)
    assert seen == in_eager and len(set(in_eager)) > 4


def test_layers_that_communicate_stay_in_the_whole_graph(world: Any) -> None:
    """Of a graph's collectives ranks compare the order, so none is in a layer that is compiled once."""

    def layers(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(functional.all_reduce(x, "sum", world)) + 1
        return x

    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder, "repeated_layers": "once"}
    run = torch.compile(layers, backend="aotkit", fullgraph=True, options=options)
    torch.testing.assert_close(run(GIVEN), layers(GIVEN), rtol=0, atol=1e-12)
    assert not [name for name, _ in recorder.events if name == "layers.once"]
    assert [what["reason"] for name, what in recorder.events if name == "layers.apart"] == [
        "a layer communicates with other ranks"
    ]
