"""Which operators kernels are generated for, which become others while tracing, and which are left to ATen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aotkit_inductor_lower import decompositions
from aotkit_inductor_lower.lowering.graph import RULES
from aotkit_inductor_lower.ops.aten import library_reason

aten = torch.ops.aten

GENERATED = {
    "pointwise": """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
        bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min copysign cos cosh div elu
        erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod gelu hardsigmoid hardswish hardtanh hypot leaky_relu lgamma
        log log10 log1p log2 logical_and logical_not logical_or logical_xor logit masked_fill maximum minimum mish mul
        nan_to_num neg nextafter pow _prelu_kernel reciprocal relu remainder round rsqrt rsub sigmoid sign silu sin
        sinc sinh softplus sqrt square sub tan tanh threshold trunc where xlogy __lshift__ __rshift__""",
    "comparisons": "eq ne lt le gt ge isnan isinf signbit",
    "conversions": "_to_copy",
    "reductions": """sum prod mean var var_mean any all amax amin argmax argmin logsumexp linalg_vector_norm max min""",
    "scans": "cumsum cumprod cummax cummin",
    "views": """alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose
        unbind unfold unsqueeze view flip roll repeat""",
    "pieces": "cat stack constant_pad_nd slice_scatter select_scatter diagonal_scatter tril triu",
    "indices": """gather index index_select scatter scatter_add scatter_reduce index_put index_add embedding
        embedding_dense_backward bucketize take put""",
    "pads": "reflection_pad1d reflection_pad2d replication_pad2d replication_pad3d im2col col2im pixel_shuffle",
    "pooling": """max_pool2d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d adaptive_max_pool2d
        max_pool2d_with_indices_backward avg_pool2d_backward""",
    "resampling": "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d grid_sampler_2d",
    "norms and softmax": """native_layer_norm native_layer_norm_backward _native_batch_norm_legit native_group_norm
        _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _fused_rms_norm""",
    "orders": "sort topk kthvalue median",
    "losses": """nll_loss_forward nll_loss_backward mse_loss huber_loss soft_margin_loss
        binary_cross_entropy_with_logits""",
    "constants": "full full_like zeros ones arange eye scalar_tensor empty linspace",
    "lists": "_foreach_add _foreach_mul _foreach_addcdiv _foreach_lerp _foreach_sqrt",
}
LIBRARY = """mm addmm bmm baddbmm addmv dot convolution convolution_backward _int_mm _scaled_mm _grouped_mm
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"""
OTHERS = """mode multinomial randperm poisson unique_dim _unique2 nonzero bincount histc
    _fft_c2c _fft_r2c _fft_c2r linalg_inv_ex linalg_eigh linalg_qr _linalg_svd linalg_lu_solve logcumsumexp
    fractional_max_pool2d _embedding_bag _ctc_loss masked_scatter searchsorted as_strided_scatter
    binary_cross_entropy"""


def overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.covers("F5c.1")
@pytest.mark.parametrize("family", GENERATED)
def test_operators_that_profit_from_fusion_have_a_rule_or_become_ones_that_have(family: str) -> None:
    table = decompositions()
    left = [
        name
        for name in GENERATED[family].split()
        if not any(overload in RULES or overload in table for overload in overloads(name))
    ]
    assert left == []


@pytest.mark.covers("F5c.1")
def test_operators_of_libraries_stay_whole_and_say_why() -> None:
    table = decompositions()
    for name in LIBRARY.split():
        assert not any(overload in RULES or overload in table for overload in overloads(name)), name
        assert "left to ATen" in str(library_reason(SimpleNamespace(target=overloads(name)[0]))), name
    for name in OTHERS.split():
        assert not any(overload in RULES or overload in table for overload in overloads(name)), name
