"""Random ops. In this slice all of them are ATen calls in program order, which keeps eager's bits."""

from __future__ import annotations

from torch.fx import Node

from .context import LoweringContext, NodeValue
from .registry import Decline, RuleTable, aten

__all__ = ["TABLE", "is_random"]

TABLE = RuleTable("random")


def _left_to_aten(ctx: LoweringContext, node: Node, *_: object, **__: object) -> NodeValue:
    raise Decline("random numbers are drawn by ATen, so that they are eager's")


for _name in ("rand", "randn", "rand_like", "randn_like", "bernoulli", "native_dropout"):
    _packet = getattr(aten, _name)
    for _overload in _packet.overloads():
        if not _overload.endswith("out"):
            TABLE.add(getattr(_packet, _overload), _left_to_aten)


def is_random(target: str) -> bool:
    """Whether an ATen call (``"aten.bernoulli.p"``) draws random numbers, so that its order must be kept."""
    import torch

    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
