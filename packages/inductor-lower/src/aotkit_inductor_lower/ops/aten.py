"""Facts about ATen's overloads: whose library kernels are kept, views, creation, random numbers, aliasing, ``out=``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.fx import Node

from .._torch_compat import has_effect
from .attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_SCORES
from .fixups import FIX_UPS

__all__ = [
    "addresses_storage",
    "call_counts",
    "collective_role",
    "in_a_row",
    "is_creation",
    "is_opaque_result",
    "is_random",
    "is_view",
    "library_reason",
    "may_alias_arguments",
    "out_overload",
    "resolve_target",
    "returns_lists",
    "returns_several",
]

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
        _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_cudnn_attention
        _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
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
# Ops whose out= overload pays: their results are large and their Python cost is the same.
_OUT = {
    "aten.mm.default": "aten.mm.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out",
}
_OWN = {str(op) for op in (ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_SCORES)}
_FRESH = {"mkldnn._linear_pointwise.default", *_OWN, *FIX_UPS}  # outside aten, and known to give new memory or none
#: Results that only the op's own backward reads, by their names in the schema, or by position where they have none.
#: Their fake kernels don't say what every library's kernel returns there (on CUDA less than elsewhere).
_OPAQUE = """
    logsumexp log_sumexp softmax_logsumexp rng_state unused philox_seed philox_offset debug_attn_mask
    cum_seq_q cum_seq_k
"""
_OPAQUE_NAMES = frozenset(_OPAQUE.split())
_OPAQUE_POSITIONS = {
    "aten._cudnn_rnn.default": (3, 4),
    "aten.miopen_rnn.default": (3, 4),
    "aten.mkldnn_rnn_layer.default": (3,),
    "aten.cudnn_batch_norm.default": (3,),
    "aten._batch_norm_with_update.default": (3,),
    "aten._batch_norm_with_update_functional.default": (3,),
    "aten._native_multi_head_attention.default": (1,),  # weights: None where they are not asked for
}


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


def is_random(target: str) -> bool:
    """Whether an ATen call (``"aten.bernoulli.p"``) draws random numbers, so that its order must be kept."""
    if target in FIX_UPS:
        return False
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags


def call_counts(target: str) -> bool:
    """Whether each call of ``target`` counts, in its order, though nobody uses its result: it is random or has an
    effect."""
    return is_random(target) or (target not in FIX_UPS and has_effect(resolve_target(target)))


def resolve_target(target: str) -> torch._ops.OpOverload:
    """``"aten.mm.default"`` to the overload. Raises ``LookupError`` if this torch has none of that name."""
    namespace, name, overload = target.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise LookupError(f"this torch has no op {target}") from error
    assert isinstance(found, torch._ops.OpOverload)
    return found


def out_overload(target: str) -> str | None:
    """The ``out=`` overload to use for results in planned memory, if any."""
    return _OUT.get(target)


@functools.cache
def collective_role(target: str) -> Literal["start", "wait"] | None:
    """Whether the op starts a collective, on which all ranks of its group have to meet, or waits for one."""
    if not target.startswith(("_c10d_functional.", "_c10d_functional_autograd.")):
        return None
    return "wait" if ".wait_tensor." in target else "start"


def may_alias_arguments(target: str) -> bool:
    """Whether a result may share an argument's memory. Unknown ops may."""
    if target in _FRESH:
        return False
    if not target.startswith("aten."):
        return True
    try:
        op = resolve_target(target)
    except LookupError:
        return True
    if any(result.alias_info is not None for result in op._schema.returns):
        return True
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


@functools.cache
def addresses_storage(target: str) -> bool:
    """Whether the op counts elements from the start of an argument's storage, as ``as_strided_scatter`` does."""
    try:
        return any(argument.name == "storage_offset" for argument in resolve_target(target)._schema.arguments)
    except LookupError:
        return False


@functools.cache
def is_opaque_result(target: str, position: int) -> bool:
    """Whether a result is for the op's own backward only, in whatever form the library that computes it has it."""
    if position in _OPAQUE_POSITIONS.get(target, ()):
        return True
    returns = resolve_target(target)._schema.returns
    is_attention = target.startswith("aten.") and "attention" in target
    return is_attention and position < len(returns) and returns[position].name in _OPAQUE_NAMES


def in_a_row(results: Sequence[Any]) -> list[Any]:
    """The results of a call, with the elements of a list among them in the list's place."""
    row: list[Any] = []
    for result in results:
        row += result if isinstance(result, list | tuple) else [result]
    return row


def returns_lists(target: str) -> bool:
    """Whether the op gives a tuple some of whose parts are lists; its results in one row are the lists' elements."""
    returns = resolve_target(target)._schema.returns
    return len(returns) > 1 and any(isinstance(given.type, torch.ListType) for given in returns)


def returns_several(target: str) -> bool:
    """Whether the op's result is a tuple or list."""
    returns = resolve_target(target)._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)
