"""Distributed tensors that go in and come out: their gradients lie, and are placed, as a loss gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotkit  # noqa: F401  # registers the backend

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# Before torch 2.12 such tensors hold their mesh inside an object, which has no form in JSON.
OPTIONS = {"fallback": "error"} if RELEASE >= (2, 12) else {"fallback": "error", "verify": False}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def given(mesh: DeviceMesh, placement: Any, *sizes: int) -> list[DTensor]:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(sizes, generator=generator) for _ in range(2))
    return [distribute_tensor(value, mesh, [placement]).requires_grad_() for value in values]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y + 2


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).transpose(0, 1)


def partial_sums(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.transpose(0, 1).contiguous(), y.transpose(0, 1)).transpose(0, 1)


def means(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).mean(0)


LOSSES: dict[str, Callable[[DTensor], Tensor]] = {
    "sum of the local part": lambda result: result.to_local().sum(),
    "sum": lambda result: whole(result.sum()),
    "sum of what is made contiguous": lambda result: whole(result.contiguous().sum()),
    "sum of squares": lambda result: whole((result * result.detach()).sum()),
}


def compare(run: Callable[..., Any], fn: Callable[..., Any], loss: Callable[[Any], Tensor], *arguments: Any) -> None:
    mesh, placement, *sizes = arguments
    expected, found = given(mesh, placement, *sizes), given(mesh, placement, *sizes)
    wanted, result = fn(*expected), run(*found)
    loss(wanted).backward()
    loss(result).backward()
    torch.testing.assert_close(whole(result), whole(wanted))
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours.grad, DTensor) and isinstance(theirs.grad, DTensor)
        torch.testing.assert_close(whole(ours.grad), whole(theirs.grad))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replicate"])
@pytest.mark.parametrize("fn", [product, transposed, partial_sums, means])
def test_gradients_that_are_expanded_or_lie_otherwise(fn: Any, placement: Any, loss: Any, mesh: DeviceMesh) -> None:
    run = torch.compile(fn, backend="aotkit", fullgraph=True, options=OPTIONS)
    compare(run, fn, loss, mesh, placement, 4, 4)


@pytest.mark.skipif(RELEASE < (2, 12), reason="before torch 2.12 shards tell their sizes inside an object")
def test_sizes_of_the_local_part_are_read_off_the_result(mesh: DeviceMesh) -> None:
    def fn(x: Any, y: Any) -> Any:
        return (x * y).to_local()

    run = torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=True, options=OPTIONS)
    for rows in (4, 6, 10):
        compare(run, fn, torch.sum, mesh, Shard(0), rows, 8)


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow, self.norm = nn.Linear(width, 24), nn.Linear(24, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.narrow(torch.nn.functional.gelu(self.wide(x))))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_whose_layers_are_split_is_compiled_before_it_ran(dynamic: bool | None, mesh: DeviceMesh) -> None:
    """What Dynamo traces with in the place of the mesh is kept by DTensor's caches, and found by our capture."""
    width = 40 if dynamic else 48  # of which the caches know nothing yet
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    compiled, eager = (parallelize_module(Perceptron(width), mesh, plan) for _ in range(2))
    run = torch.compile(compiled, backend="aotkit", dynamic=dynamic, options=OPTIONS)
    for rows in (3, 5) if dynamic else (3,):
        x = torch.randn(2, rows, width)
        for model, call in ((compiled, run), (eager, eager)):
            model.zero_grad()
            call(x).square().sum().backward()
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert type(ours.grad) is type(theirs.grad)
            torch.testing.assert_close(whole(ours.grad), whole(theirs.grad), rtol=1e-4, atol=1e-5)
