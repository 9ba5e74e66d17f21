"""Ways to spread a model over ranks, each with torch's own public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .models import Model

__all__ = ["WRAPS", "Wrap"]


@dataclass(frozen=True, slots=True)
class Wrap:
    """``ranks``: how many. ``split``: over how many of them ``plan`` splits each module; those have the same data.
    ``apply`` spreads a model over a mesh of the others. ``settings``: of Dynamo. ``averages``: gradients are means over
    ranks, not sums. ``waits``: a context in which gradients are not exchanged. ``compiles_backward``: the pass of the
    autograd engine is compiled as a whole, with what its hooks exchange. ``by_rank``: each rank saves its own tensors,
    since torch's `get_state_dict` has no names for them. ``variants``: which there are, if not all."""

    ranks: int
    apply: Callable[[nn.Module, Model, Any], nn.Module]
    split: int = 1
    plan: Callable[[Model], Mapping[str, Any] | None] = lambda _: None
    settings: Mapping[str, Any] = field(default_factory=dict)
    averages: bool = True
    waits: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None
    compiles_backward: bool = False
    by_rank: bool = False
    variants: tuple[str, ...] = ()

    @property
    def data_ranks(self) -> int:
        """How many have data of their own."""
        return self.ranks // self.split

    def fits(self, model: Model) -> bool:
        """Whether the model can be spread so."""
        return self.split == 1 or self.plan(model) is not None

    def mesh(self) -> Any:
        """Of all ranks, the split ones last."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {name: size for name, size in (("dp", self.data_ranks), ("tp", self.split)) if size > 1}
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def divide(self, net: nn.Module, model: Model, mesh: Any) -> nn.Module:
        """Split modules, before any of them is wrapped: a plan has their names."""
        from torch.distributed.tensor.parallel import parallelize_module

        plan = self.plan(model)
        return net if plan is None else parallelize_module(net, mesh["tp"], dict(plan))


def _as_it_is(net: nn.Module, _: Model, __: Any) -> nn.Module:
    return net


def _data_parallel(net: nn.Module, _: Model, mesh: Any) -> nn.Module:
    """Buckets so small that there are several."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 12  # type: ignore[attr-defined]  # read by DDP
    of_mesh = {"device_mesh": mesh["dp"]} if mesh.ndim > 1 else {}
    return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=2**-6, **of_mesh)


def _fully_sharded(reshard: bool) -> Callable[[nn.Module, Model, Any], nn.Module]:
    def apply(net: nn.Module, model: Model, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for holder, name in model.blocks(net):
            fully_shard(holder.get_submodule(name), mesh=mesh["dp"], reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh["dp"], reshard_after_forward=reshard)
        return net

    return apply


class _Gathered(nn.Module):
    """A parametrization: a parameter that ranks hold parts of is whole where it is used; gradients are summed.

    ``split``: over these ranks, by these placements, the module is split: to it the parameter is as
    `parallelize_module` made it.
    """

    def __init__(self, split: tuple[Any, Sequence[Any]] | None) -> None:
        super().__init__()
        self.split = split

    def forward(self, part: Any) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])
        return whole if self.split is None else DTensor.from_local(whole, *self.split, run_check=False)


def _gathered_in_the_graph(net: nn.Module, _: Model, mesh: Any) -> nn.Module:
    """Simple FSDP: no hooks, so gathers and reductions are operators of the graph. Of what is split, the ranks with
    the same part of it share that part."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.nn.utils import parametrize

    parts = dict[nn.Parameter, nn.Parameter]()
    for module in list(net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            own: Any = parameter.detach()
            split = None
            if isinstance(own, DTensor):
                own, split = own.to_local(), (own.device_mesh, own.placements)
            if parameter not in parts:  # some are tied
                parts[parameter] = nn.Parameter(distribute_tensor(own, mesh["dp"], [Shard(0)]))
            setattr(module, name, parts[parameter])
            parametrize.register_parametrization(module, name, _Gathered(split), unsafe=True)
    return net


def _columns_and_rows(model: Model) -> Mapping[str, Any] | None:
    return model.plan()


def _positions_as_well(model: Model) -> Mapping[str, Any] | None:
    return None if model.sequence_plan is None else model.sequence_plan()


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

_FOUR = ("static", "checkpoint")
_SPLIT: dict[str, Any] = {"split": 2, "plan": _columns_and_rows}
_SPREAD: dict[str, Any] = {"split": 2, "plan": _positions_as_well}

WRAPS: Mapping[str, Wrap] = {
    "ddp": Wrap(2, _data_parallel, waits=_no_sync),
    "ddp-4": Wrap(4, _data_parallel, waits=_no_sync, variants=_FOUR),
    "ddp-in-graph": Wrap(2, _data_parallel, settings=_REDUCER, waits=_no_sync, compiles_backward=True),
    "fsdp2": Wrap(2, _fully_sharded(True), waits=_no_gradient_sync),
    "fsdp2-4": Wrap(4, _fully_sharded(True), waits=_no_gradient_sync, variants=_FOUR),
    "fsdp2-kept": Wrap(2, _fully_sharded(False), waits=_no_gradient_sync),
    "simple-fsdp": Wrap(2, _gathered_in_the_graph, averages=False),
    "simple-fsdp-4": Wrap(4, _gathered_in_the_graph, averages=False, variants=_FOUR),
    "tp": Wrap(2, _as_it_is, **_SPLIT),
    "tp-ddp": Wrap(4, _data_parallel, waits=_no_sync, by_rank=True, **_SPLIT),
    "tp-fsdp2": Wrap(4, _fully_sharded(True), waits=_no_gradient_sync, **_SPLIT),
    "tp-simple-fsdp": Wrap(4, _gathered_in_the_graph, averages=False, by_rank=True, **_SPLIT),
    "sp": Wrap(2, _as_it_is, **_SPREAD),
    "sp-ddp": Wrap(4, _data_parallel, waits=_no_sync, by_rank=True, **_SPREAD),
    "sp-fsdp2": Wrap(4, _fully_sharded(True), waits=_no_gradient_sync, **_SPREAD),
    "sp-simple-fsdp": Wrap(4, _gathered_in_the_graph, averages=False, by_rank=True, **_SPREAD),
}
