"""Masks of attention in Dynamo's graphs, laid out so that fused kernels of a CUDA device take them.

Note [Masks of fused attention]
    ``scaled_dot_product_attention`` has fused kernels, and products with a softmax in float32, which it takes where no
    fused kernel will do: ten times as long, on a device. Fused kernels want the numbers of a mask's row side by side.
    Compiled, transformers makes a mask for a BERT that has none in eager mode (whether one is needed, it can't look up
    while it is traced), of one number for each query, expanded along the keys; T5's biases of positions are a
    transposed table. Each call gets a copy of such a mask; calls that read the same one share it in the end. A mask
    that is trained is left as it is: fused kernels that give no gradient of a mask must not be chosen for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from .changed_graphs import change_calls, has_call

__all__ = ["has_strided_masks", "lay_out_masks"]

_MASK = 3  # its place among the arguments


def has_strided_masks(gm: GraphModule) -> bool:
    """Whether attention on a CUDA device reads a mask whose rows do not lie side by side."""
    return has_call(gm, _is_strided)


def lay_out_masks(gm: GraphModule) -> GraphModule:
    """``gm``, or a copy that copies such masks."""
    return change_calls(gm, _is_strided, _lay_out)


def _is_strided(node: Node) -> bool:
    if getattr(node.target, "__name__", "") != "scaled_dot_product_attention":
        return False
    mask = _mask_of(node)
    value = mask.meta.get("example_value") if isinstance(mask, Node) else None
    if not isinstance(value, FakeTensor) or value.device.type != "cuda" or value.dim() == 0 or value.requires_grad:
        return False
    step = value.stride(-1)
    return not (isinstance(step, int) and step == 1)


def _mask_of(node: Node) -> Any:
    return node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")


def _lay_out(gm: GraphModule, call: Node) -> None:
    mask = _mask_of(call)
    value: FakeTensor = mask.meta["example_value"]
    with gm.graph.inserting_before(call):
        copy = gm.graph.call_method("contiguous", (mask,))
    copy.meta = {name: kept for name, kept in call.meta.items() if name != "example_value"}
    with tracing(None), torch.no_grad(), value.fake_mode:
        copy.meta["example_value"] = value.new_empty(value.shape)
    call.replace_input_with(mask, copy)
