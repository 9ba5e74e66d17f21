"""Ways to spread a model over ranks, each with torch's own public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .models import Model

__all__ = ["WRAPS", "Wrap"]


@dataclass(frozen=True, slots=True)
class Wrap:
    """``ranks``: how many. ``data_ranks``: how many of them have data of their own; the others of each have the same.
    ``apply`` spreads a model. ``settings``: of Dynamo. ``averages``: gradients are means over ranks, not sums.
    ``waits``: a context in which gradients are not exchanged. ``compiles_backward``: the pass of the autograd engine is
    compiled as a whole, with what its hooks exchange."""

    ranks: int
    data_ranks: int
    apply: Callable[[nn.Module, Model], nn.Module]
    settings: Mapping[str, Any] = field(default_factory=dict)
    averages: bool = True
    waits: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None
    compiles_backward: bool = False


def _mesh(**sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _data_parallel(net: nn.Module, _: Model) -> nn.Module:
    """Buckets so small that there are several."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 12  # type: ignore[attr-defined]  # read by DDP
    return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=2**-6)


def _fully_sharded(reshard: bool) -> Callable[[nn.Module, Model], nn.Module]:
    def apply(net: nn.Module, model: Model, mesh: Any = None) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        mesh = mesh or _mesh(dp=dist.get_world_size())
        for holder, name in model.blocks(net):
            fully_shard(holder.get_submodule(name), mesh=mesh, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
        return net

    return apply


class _Gathered(nn.Module):
    """A parametrization: a parameter that ranks hold parts of is whole where it is used; gradients are summed."""

    def forward(self, part: Any) -> torch.Tensor:
        from torch.distributed.tensor import Partial, Replicate

        whole = part.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("sum")])


def _gathered_in_the_graph(net: nn.Module, model: Model) -> nn.Module:
    """Simple FSDP: no hooks, so gathers and reductions are operators of the graph."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.utils import parametrize

    mesh, parts = _mesh(dp=dist.get_world_size()), dict[nn.Parameter, nn.Parameter]()
    for module in list(net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in parts:  # some are tied
                parts[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            setattr(module, name, parts[parameter])
            parametrize.register_parametrization(module, name, _Gathered(), unsafe=True)
    return net


def _tensor_parallel(net: nn.Module, model: Model) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(net, _mesh(tp=dist.get_world_size()), dict(model.plan()))


def _tensor_parallel_and_sharded(net: nn.Module, model: Model) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = _mesh(dp=2, tp=2)
    net = parallelize_module(net, mesh["tp"], dict(model.plan()))
    return _fully_sharded(True)(net, model, mesh["dp"])  # type: ignore[call-arg]  # of apply


def _no_sync(net: Any) -> contextlib.AbstractContextManager[Any]:
    return net.no_sync()


@contextlib.contextmanager
def _no_gradient_sync(net: Any) -> Iterator[None]:
    net.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        net.set_requires_gradient_sync(True)


_REDUCER = {"optimize_ddp": "python_reducer"}

WRAPS: Mapping[str, Wrap] = {
    "ddp": Wrap(2, 2, _data_parallel, waits=_no_sync),
    "ddp-in-graph": Wrap(2, 2, _data_parallel, settings=_REDUCER, waits=_no_sync, compiles_backward=True),
    "fsdp2": Wrap(2, 2, _fully_sharded(True), waits=_no_gradient_sync),
    "fsdp2-kept": Wrap(2, 2, _fully_sharded(False), waits=_no_gradient_sync),
    "simple-fsdp": Wrap(2, 2, _gathered_in_the_graph, averages=False),
    "tp": Wrap(2, 1, _tensor_parallel),
    "tp-fsdp2": Wrap(4, 2, _tensor_parallel_and_sharded, waits=_no_gradient_sync),
}
