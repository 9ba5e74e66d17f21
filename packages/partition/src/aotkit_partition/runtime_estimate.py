"""How long an op takes, roughly: the larger of its arithmetic and its memory traffic at nominal machine rates (F3.40).

Only ratios matter to the budget solvers, so the rates are those of no particular machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ._torch_compat import symbolic_hint
from .cost import is_literal, is_view_like
from .joint import JointGraph

FLOPS_PER_SECOND = 1e12
BYTES_PER_SECOND = 1e11


def estimate_seconds(joint: JointGraph, index: int) -> float:
    """Nominal seconds to compute one node; 0 for views, sizes, tuple items and constants."""
    facts, node = joint.facts[index], joint.nodes[index]
    free = is_view_like(joint, index) or facts.is_getitem or facts.is_symbolic or is_literal(joint, index)
    if node.op != "call_function" or free:
        return 0.0
    traffic = joint.bytes_of[index] + sum(joint.bytes_of[used] for used in joint.inputs_of[index])
    return max(_flops(joint, index) / FLOPS_PER_SECOND, traffic / BYTES_PER_SECOND)


def _flops(joint: JointGraph, index: int) -> float:
    node = joint.nodes[index]
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs, out = torch.fx.node.map_arg(
        (node.args, node.kwargs, node), lambda used: _example(used.meta.get("val"))
    )
    return float(formula(*args, **kwargs, out_val=out))


def _example(value: Any) -> Any:
    """A stand-in of fixed size, so that counting never guards on a symbol."""
    if isinstance(value, torch.Tensor):
        sizes = [symbolic_hint(size) for size in value.size()]
        return torch.empty([4096 if size is None else int(size) for size in sizes], dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(_example(item) for item in value)
    return symbolic_hint(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
