"""Ops whose ATen kernels (matrix products, convolutions, attention) are kept whole; what counts as what."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["is_creation", "is_view", "library_reason"]

# reason -> ATen names
_FAMILIES = {
    "matrix products are left to ATen": """
        mm addmm bmm baddbmm addbmm mv addmv dot vdot addr linear matmul _int_mm _scaled_mm _grouped_mm
        _addmm_activation linear_backward _scaled_grouped_mm
    """,
    "convolutions are left to ATen": """
        convolution convolution_backward _convolution convolution_overrideable conv1d conv2d conv3d
        mkldnn_convolution _slow_conv2d_forward conv_transpose2d
    """,
    "attention is left to ATen": """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention scaled_dot_product_attention
        _scaled_dot_product_fused_attention_overrideable
    """,
    "pooling by random windows is left to ATen": """
        fractional_max_pool2d fractional_max_pool3d
    """,
}
_REASONS = {name: reason for reason, names in _FAMILIES.items() for name in names.split()}
_CREATED = """
    full full_like zeros zeros_like ones ones_like empty empty_like new_zeros new_ones new_full new_empty arange
    scalar_tensor iota empty_strided new_empty_strided empty_permuted eye lift_fresh_copy
"""
_CREATION = frozenset(_CREATED.split())


def library_reason(node: Node) -> str | None:
    """Why this op is better in ATen's library kernels, or ``None``."""
    name = _name(node)
    return _REASONS.get(name) if name is not None else None


def is_view(node: Node) -> bool:
    """Whether the node gives another view of its argument's memory (or something of a tuple)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem and integer arithmetic
    if target is torch.ops.aten._unsafe_view.default or target is torch.ops.aten.reshape.default:
        return True
    infos = [argument.alias_info for argument in target._schema.arguments]
    returned = [argument.alias_info for argument in target._schema.returns]
    return any(info is not None and not info.is_write for info in infos) and any(r is not None for r in returned)


def is_creation(node: Node) -> bool:
    """Whether the node makes a tensor from nothing."""
    return _name(node) in _CREATION


def _name(node: Node) -> str | None:
    target = node.target
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else None
