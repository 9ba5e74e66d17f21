"""Which ops are decomposed while tracing, on top of torch's decompositions.

Note [What is decomposed, and what is not]
    An op with a lowering rule stays whole: activations, softmax, norms and their derivatives are one graph node and
    one kernel each, which keeps tracing, partitioning and scheduling short and rounds where eager rounds. Matrix
    products, convolutions, attention and pooling stay whole because ATen's kernels are better. Left are losses and
    rarer functions, which torch's decompositions turn into ops that have rules. Random ops are never decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..ops.refusals import misfit
from ..target import on_host
from . import RULES
from .foreach import foreach_decompositions
from .upsampling import sample_grid, upsample_linear

__all__ = ["decompositions"]

_NAMES = """
addmv_ aminmax binary_cross_entropy_backward binary_cross_entropy_with_logits celu
channel_shuffle count_nonzero deg2rad diagonal_backward diag_embed dist elu_backward frac glu glu_backward hardshrink
heaviside huber_loss huber_loss_backward l1_loss lerp linspace log_sigmoid_backward log_sigmoid_forward logit
logit_backward masked_fill mish_backward mse_loss mse_loss_backward mvlgamma nan_to_num
native_dropout_backward native_group_norm_backward norm pixel_shuffle pixel_unshuffle
rad2deg reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
rot90 selu sgn sinc smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softshrink
special_entr special_erfcx special_log_ndtr threshold trace
unfold_backward unsafe_chunk unsafe_split unsafe_split_with_sizes upsample_nearest1d upsample_nearest2d
upsample_nearest3d xlogy _fused_rms_norm _fused_rms_norm_backward relu6 rrelu_with_noise hardswish_
split_copy unbind_copy narrow_copy expand_copy permute_copy select_copy slice_copy squeeze_copy t_copy transpose_copy
isneginf isposinf ldexp logaddexp2 nansum diagonal_copy unfold_copy _prelu_kernel _prelu_kernel_backward _safe_softmax
block_diag split_with_sizes_copy zero im2col col2im multi_margin_loss
upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d grid_sampler_2d max_unpool2d max_unpool3d renorm _chunk_cat
_euclidean_dist affine_grid_generator
addr isin logspace bucketize _batch_norm_with_update_functional _batch_norm_with_update batch_norm_backward
rrelu_with_noise_backward unsqueeze_copy view_copy alias_copy _reshape_copy detach_copy as_strided_copy
"""

_QUANTIZATIONS = """
quantize_per_tensor dequantize_per_tensor quantize_per_channel dequantize_per_channel quantize_per_token
dequantize_per_token dequantize_per_channel_group
"""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table to trace with: ops to functions that compute them from ops with lowering rules. A new dict each time,
    so that it may be changed."""
    return _fixed().copy() | _quantizations() | _whole()  # a copy hashes no operator again


@cache
def _fixed() -> MappingProxyType[Any, Callable[..., Any]]:
    packets = [getattr(torch.ops.aten, name) for name in _NAMES.split() if hasattr(torch.ops.aten, name)]
    table = {**get_decompositions(packets), **foreach_decompositions()}
    kept = {op: function for op, function in table.items() if op not in RULES}
    means = {op: partial(_of_elements, kept[op]) for op in _DIVIDED_BY_THE_NUMBER_OF_ELEMENTS if op in kept}
    mine: dict[Any, Callable[..., Any]] = {**kept, **means}
    mine |= {op: partial(function, mine[op]) for op, function in _BEFORE_TORCHS.items() if op in kept}
    return MappingProxyType({op: partial(_where_eager_computes, op, function) for op, function in mine.items()})


def _whole() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    return {
        aten._log_softmax.default: _log_softmax,
        aten.native_dropout.default: _native_dropout,
        aten.pixel_unshuffle.default: partial(_pixel_unshuffle, _fixed()[aten.pixel_unshuffle.default]),
    }


def _where_eager_computes(op: Any, decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Arguments that eager refuses stay the operator's own, which says so when it runs: numbers that do not fit the
    type, losses of integers. So do complex numbers, which no kernel holds."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    is_complex = dtype.is_complex or any(t.is_complex() for t in tensors)
    refused = (
        (is_complex and op not in _FAKES_NEED_A_KNOWN_OFFSET)
        or misfit(op._schema, args, kwargs, dtype, operands=True)
        or (any(word in op._schema.name for word in ("loss", "cross_entropy")) and not tensors[0].is_floating_point())
    )
    wraps = "soft_margin_loss" in op._schema.name and tensors[-1].dtype is torch.uint8  # eager takes its negative
    return NotImplemented if refused or wraps else decompose(*args, **kwargs)


# Torch's own fake kernels of these read the offset in the storage as a number, which it is not under symbolic sizes.
_FAKES_NEED_A_KNOWN_OFFSET = (torch.ops.aten.trace.default, torch.ops.aten.diagonal_copy.default)
_DIVIDED_BY_THE_NUMBER_OF_ELEMENTS = (
    torch.ops.aten.mse_loss_backward.default,
    torch.ops.aten.smooth_l1_loss_backward.default,
    torch.ops.aten.huber_loss_backward.default,
)


def _of_elements(decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Where there are no elements Python refuses to divide by their number, and the operator itself gives none."""
    return torch.zeros_like(args[1]) if guard_or_false(args[1].numel() == 0) else decompose(*args, **kwargs)


def _quantizations() -> dict[Any, Callable[..., Any]]:
    """The operators that exported quantized models hold, if they have been loaded, as what they themselves call."""
    packets = [getattr(torch.ops.quantized_decomposed, name, None) for name in _QUANTIZATIONS.split()]
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return {packet.default: partial(packet.default._op_dk, key) for packet in packets if packet is not None}


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """``(x - max) - log(sum(exp(x - max)))``, in single precision for float16 and bfloat16.

    In parts, though there is a rule for the whole: a loss reads one element of each row, and its backward can compute
    the others again from two numbers per row, so the result need not be in memory at all.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if x.dim() and guard_or_false(x.shape[dim] == 0):
        return wide if half_to_float else wide.to(x.dtype)
    shifted = wide - wide.amax(dim, keepdim=True)
    result = shifted - shifted.exp().sum(dim, keepdim=True).log()
    result = result if half_to_float else result.to(x.dtype)
    return result.contiguous()  # as eager lays it out, whatever ``x`` is like


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Outside of training a copy, which torch's fake kernel takes for the argument itself."""
    return (x.clone(), torch.ones_like(x, dtype=torch.bool)) if train is not None and not train else NotImplemented


def _linspace(decompose: Callable[..., Any], start: Any, end: Any, steps: Any, **kwargs: Any) -> Any:
    """Integers: between the whole parts of the ends, in double precision and from the nearer end, as in eager mode."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    start, end = (int(given) if isinstance(given, bool) else given for given in (start, end))
    plain = isinstance(start, int | float) and isinstance(end, int | float) and guard_or_false(steps > 1)
    if dtype.is_floating_point or dtype.is_complex or not plain:
        return decompose(start, end, steps, **kwargs)
    limits = torch.iinfo(dtype)
    if not all(limits.min <= int(number) <= limits.max for number in (start, end)):
        return NotImplemented  # eager refuses these
    first, last = float(int(start)), float(int(end))
    place = torch.arange(steps, dtype=torch.float64, device=kwargs.get("device"))
    step = (last - first) / (steps - 1)
    back = last - step * ((steps - 1) - place)
    return torch.where(place < steps // 2, first + step * place, back).to(dtype)


def _bucketize(decompose: Callable[..., Any], x: Any, boundaries: torch.Tensor, **kwargs: Any) -> Any:
    """Without boundaries there is one bucket; eager takes one row of them. Of a number, torch's reads elements."""
    if boundaries.dim() != 1 or not isinstance(x, torch.Tensor):
        return NotImplemented
    if guard_or_false(boundaries.numel() == 0):
        return x.new_zeros(x.shape, dtype=torch.int32 if kwargs.get("out_int32") else torch.int64)
    return decompose(x, boundaries, **kwargs) if x.dim() else decompose(x.view(1), boundaries, **kwargs).view(())


def _logspace(decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Integers, float16 and bfloat16 are rounded at places of eager's own."""
    wide = (kwargs.get("dtype") or torch.get_default_dtype()) in (torch.float32, torch.float64)
    return decompose(*args, **kwargs) if wide else NotImplemented


def _isin(decompose: Callable[..., Any], x: Any, tests: Any, **kwargs: Any) -> Any:
    """Nothing is in an empty set."""
    if not all(torch._prims_common.is_contiguous_or_false(t) for t in (x, tests)):
        return NotImplemented  # eager has a view of them where it can
    if guard_or_false(x.numel() == 0) or guard_or_false(tests.numel() == 0):
        return torch.full_like(x, bool(kwargs.get("invert")), dtype=torch.bool)
    return decompose(x, tests, **kwargs)


def _soft_margin_loss(decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Eager writes the losses into memory of the first argument's sizes, of which the second may not have more."""
    x, target = args[:2]
    fits = len(target.shape) <= len(x.shape) and all(
        guard_or_false(wanted == 1) or guard_or_false(wanted == n)
        for wanted, n in zip(reversed(target.shape), reversed(x.shape), strict=False)
    )
    return decompose(*args, **kwargs) if fits else NotImplemented


def _soft_margin_loss_backward(
    _: Callable[..., Any], grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int = 1
) -> Any:
    """Torch's takes 1 from a sigmoid that is nearly 1 where the margin is large, so that little or nothing is left."""
    kind = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    wide, dtype = torch._prims_common.elementwise_dtypes(grad, x, target, type_promotion_kind=kind)
    grad, x, target = (each.to(wide) for each in (grad, x, target))
    result = grad * -target * torch.sigmoid(-(target * x))
    return (result / x.numel() if reduction == 1 else result).to(dtype)


def _cross_entropy(decompose: Callable[..., Any], x: torch.Tensor, target: torch.Tensor, *rest: Any, **how: Any) -> Any:
    """Of one size; eager writes the loss over the target, and refuses what does not fit there."""
    same = x.dim() == target.dim() and all(guard_or_false(a == b) for a, b in zip(x.shape, target.shape, strict=True))
    fits = same and torch.can_cast(torch.result_type(x, target), target.dtype)
    return decompose(x, target, *rest, **how) if fits else NotImplemented


def _pixel_shuffle(decompose: Callable[..., Any], x: torch.Tensor, factor: int) -> Any:
    """Of whole squares of channels, which has to hold at each call."""
    return decompose(x, factor) if x.dim() > 2 and x.shape[-3] % (factor * factor) == 0 else NotImplemented


def _pixel_unshuffle(decompose: Callable[..., Any], x: torch.Tensor, factor: int) -> Any:
    """Of whole squares of pixels. Eager leaves nothing as it is; torch's fake kernel says that its sizes change."""
    if x.dim() < 3 or x.shape[-1] % factor != 0 or x.shape[-2] % factor != 0:
        return NotImplemented
    return x.clone() if guard_or_false(x.numel() == 0) else decompose(x, factor)


def _pad(decompose: Callable[..., Any], x: torch.Tensor, pads: Any) -> Any:
    """Eager refuses a result without elements, and channels without any. Along the elements that lie side by side it
    copies whole rows, which a kernel that computes where each element comes from does not."""
    rank = len(pads) // 2
    if on_host(x) and guard_or_false(x.stride(-1) == 1) and not guard_or_false(x.shape[-1] == 1):
        return NotImplemented
    sides = zip(reversed(x.shape[-rank:]), pads[::2], pads[1::2], strict=True)
    full = all(guard_or_false(n + a + b > 0) for n, a, b in sides)
    if not full or not all(guard_or_false(n > 0) for n in x.shape[-rank - 1 :]):
        return NotImplemented
    result = decompose(x, pads)
    return _laid_out_like(x, result) if on_host(x) else result


def _bicubic(decompose: Callable[..., Any], x: torch.Tensor, *how: Any) -> Any:
    """Of images with channels, which is what eager asks for."""
    return _laid_out_like(x, decompose(x, *how)) if guard_or_false(x.shape[1] > 0) else NotImplemented


def _laid_out_like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """In the memory format of ``x``. torch's decompositions ask a copy in float32 for it, where ``x`` is of halves,
    and the copy of a tensor that overlaps itself has another."""
    return result.contiguous(memory_format=torch._prims_common.suggest_memory_format(x))


def _nearest(decompose: Callable[..., Any], x: torch.Tensor, sizes: Any, *scales: Any) -> Any:
    """Where the factors do not fit the sizes, the last elements would be taken from beyond the input. A row of pixels
    is contiguous afterwards, whatever ``x`` is like."""
    if isinstance(sizes, list | tuple) and len(scales) == len(sizes):
        given = [(n, m, scale) for n, m, scale in zip(x.shape[2:], sizes, scales, strict=True) if scale is not None]
        if not all(scale > 0 and guard_or_false(m <= n * scale) for n, m, scale in given):
            return NotImplemented
    return _laid_out_like(x, decompose(x, sizes, *scales))


def _nansum(
    decompose: Callable[..., Any], x: torch.Tensor, *dims: Any, dtype: torch.dtype | None = None, **keep: Any
) -> Any:
    """Each element is rounded to the type that is asked for; a sum over several dimensions may not do so."""
    return decompose(x if dtype is None else x.to(dtype), *dims, dtype=dtype, **keep)


def _celu(decompose: Callable[..., Any], x: torch.Tensor, alpha: float = 1.0) -> Any:
    return NotImplemented if alpha == 0 else decompose(x, alpha)  # eager refuses to divide by it


def _channel_shuffle(_: Callable[..., Any], x: torch.Tensor, groups: int) -> Any:
    """Always memory of its own, also where nothing moves."""
    batch, channels, *rest = x.shape
    if channels % groups != 0:
        return NotImplemented
    apart = x.reshape(batch, groups, channels // groups, *rest).transpose(1, 2)
    moved = apart.clone(memory_format=torch.contiguous_format).view(x.shape)
    return _laid_out_like(x, moved)


def _ldexp(decompose: Callable[..., Any], x: torch.Tensor, exponent: torch.Tensor) -> Any:
    """Powers of two that are floats. For integers eager changes the exponents of floats: no power of two overflows
    before it meets a 0, or a number so small that the product is finite."""
    exact = x.is_floating_point() and not exponent.is_floating_point()
    return NotImplemented if exact else decompose(x, exponent)


def _threshold(decompose: Callable[..., Any], x: torch.Tensor, least: Any, value: Any) -> Any:
    """Of integers in their own type, to which eager rounds both numbers."""
    plain = all(isinstance(number, int | float) and math.isfinite(number) for number in (least, value))
    whole = plain and not x.is_floating_point()
    return decompose(x, int(least), int(value)) if whole else decompose(x, least, value)


def _smooth_l1_loss_backward(
    decompose: Callable[..., Any], grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *how: Any
) -> Any:
    """At nan it is nan: a sign has none."""
    distance = x - target
    return torch.where(distance.isnan(), distance, decompose(grad, x, target, *how))


def _logit_backward(
    decompose: Callable[..., Any], grad: torch.Tensor, x: torch.Tensor, eps: float | None = None
) -> Any:
    """Eager takes both bounds in the type of ``x``, in which 1 - eps may be 1; a bound below 0 is none."""
    if eps is None or eps < 0:
        return decompose(grad, x)
    low = x.new_full((), eps)
    return torch.where((x >= low) & (x <= 1 - low), decompose(grad, x), 0.0)


_PADS = ("reflection", "replication")
_BEFORE_TORCHS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linspace.default: _linspace,
    torch.ops.aten.bucketize.Tensor: _bucketize,
    torch.ops.aten.bucketize.Scalar: _bucketize,
    torch.ops.aten.channel_shuffle.default: _channel_shuffle,
    torch.ops.aten.pixel_shuffle.default: _pixel_shuffle,
    torch.ops.aten.celu.default: _celu,
    torch.ops.aten.nansum.default: _nansum,
    **{getattr(torch.ops.aten, f"{kind}_pad{rank}d").default: _pad for kind in _PADS for rank in (1, 2, 3)},
    **{getattr(torch.ops.aten, f"_upsample_nearest_exact{rank}d").default: _nearest for rank in (1, 2, 3)},
    **{getattr(torch.ops.aten, f"upsample_nearest{rank}d").default: _nearest for rank in (1, 2, 3)},
    torch.ops.aten.upsample_bicubic2d.default: _bicubic,
    torch.ops.aten.logspace.default: _logspace,
    torch.ops.aten.isin.Tensor_Tensor: _isin,
    torch.ops.aten.binary_cross_entropy_with_logits.default: _cross_entropy,
    torch.ops.aten.ldexp.Tensor: _ldexp,
    torch.ops.aten.soft_margin_loss.default: _soft_margin_loss,
    torch.ops.aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    torch.ops.aten.threshold.default: _threshold,
    torch.ops.aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    torch.ops.aten.logit_backward.default: _logit_backward,
    torch.ops.aten.grid_sampler_2d.default: sample_grid,
    torch.ops.aten.upsample_linear1d.default: upsample_linear,
    torch.ops.aten.upsample_bilinear2d.default: upsample_linear,
    torch.ops.aten.upsample_trilinear3d.default: upsample_linear,
}
