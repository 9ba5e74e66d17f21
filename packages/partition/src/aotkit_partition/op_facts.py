"""What the partitioner knows about operators: closed tables by operator name, plus what the dispatcher declares.

Facts come from three places, in this order: the tables below, the operator's schema (aliasing, mutation) and its tags
(``pointwise``, ``nondeterministic_seeded``).
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload

from ._torch_compat import has_effect


def _names(prefix: str, text: str) -> frozenset[str]:
    return frozenset(f"{prefix}.{name}" for name in text.split())


# Costly per output byte: recomputing one costs more time than saving its result costs memory.
COMPUTE_INTENSIVE = _names(
    "aten",
    """
    mm bmm addmm baddbmm addbmm addmv mv dot linear _scaled_mm _grouped_mm _int_mm convolution convolution_backward
    _convolution mkldnn_rnn_layer _thnn_fused_lstm_cell _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    _flash_attention_forward _efficient_attention_forward upsample_bilinear2d _cdist_forward fft_c2c fft_r2c fft_c2r
    _fft_c2c _fft_r2c _fft_c2r
    """,
) | {"mkldnn._linear_pointwise", "mkldnn._convolution_pointwise", "aotkit_lower.attention"}

# Views by behaviour that their schema doesn't declare.
UNDECLARED_VIEWS = _names("aten", "_unsafe_view lift_fresh") | _names(
    "prims", "broadcast_in_dim view_of squeeze transpose"
)

# Cheap per byte, though not tagged pointwise: fills, casts, gathers, sums, norms' pieces, softmax, layout changes.
RECOMPUTABLE = _names(
    "aten",
    """
    sum mean amax amin any all prod var var_mean std std_mean max min argmax argmin norm linalg_vector_norm logsumexp
    cumsum cumprod clone contiguous copy _to_copy to full full_like zeros zeros_like ones ones_like empty empty_like
    empty_strided empty_permuted new_empty new_empty_strided new_full new_zeros new_ones scalar_tensor arange eye
    linspace tril triu tril_indices triu_indices iota cat stack repeat flip roll constant_pad_nd gather index
    index_select embedding take _unsafe_index _unsafe_masked_index one_hot _softmax _log_softmax _safe_softmax softmax
    log_softmax native_layer_norm native_group_norm _fused_rms_norm rms_norm where masked_fill glu
    _low_memory_max_pool_with_offsets select_scatter slice_scatter as_strided_scatter diagonal_scatter scatter
    index_put _unsafe_index_put expand_copy view_copy sym_size sym_stride sym_numel sym_storage_offset bitwise_and
    bitwise_or bitwise_xor lift_fresh_copy nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    _log_softmax_backward_data
    """,
) | {
    "prims.convert_element_type",
    "prims.iota",
    "prims.sum",
    "prims.amax",
    "prims.amin",
    "prims.prod",
    "prims.var",
    "prims.device_put",
    "prims.fma",
    "prims.clone",
    "prims._low_memory_max_pool_with_offsets",
    "prims._low_memory_max_pool_offsets_to_indices",
}

# Elementwise, with a number drawn for each element: a kernel may draw it. Other random operators are kernels of a
# library's, as attention with its dropout is.
DRAWN = _names(
    "aten",
    """
    rand rand_like randn randn_like randint randint_like randperm bernoulli native_dropout normal normal_functional
    uniform random exponential geometric cauchy log_normal poisson binomial dropout alpha_dropout feature_dropout
    feature_alpha_dropout rrelu rrelu_with_noise rrelu_with_noise_functional _fused_dropout
    """,
)

# Higher-order operators have no tags.
RANDOM_HIGHER_ORDER = frozenset({"higher_order.run_and_save_rng_state"})

# Not elementwise, but each element of the result is one element of an argument, or a constant.
MOVES = _names(
    "aten",
    """
    clone copy contiguous _to_copy to full full_like zeros zeros_like ones ones_like empty empty_like empty_strided
    empty_permuted new_empty new_empty_strided new_full new_zeros new_ones scalar_tensor arange eye tril triu
    tril_indices triu_indices cat stack repeat flip roll constant_pad_nd gather index index_select embedding take
    _unsafe_index one_hot where masked_fill select_scatter slice_scatter as_strided_scatter diagonal_scatter
    expand_copy view_copy lift_fresh_copy
    """,
) | {"prims.convert_element_type", "prims.iota", "prims.device_put", "prims.clone"}

_SYM_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(operator, name.removeprefix("operator."))
    for name in _names(
        "operator",
        """
        abs add and_ eq floordiv ge gt inv invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor
        """,
    )
) | {builtins.max, builtins.min, builtins.round, builtins.pow, math.ceil, math.floor, math.trunc, math.sqrt}

_SIDE_EFFECT_NAMES = ("_assert", "record_function", "sym_constrain_range", "_sink_tokens", "with_effects", "print")


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known about one call target."""

    name: str
    is_view: bool = False
    is_random: bool = False
    is_compute_intensive: bool = False
    is_recomputable: bool = False
    is_mutating: bool = False
    has_side_effects: bool = False
    is_symbolic: bool = False  # works on sizes only
    is_getitem: bool = False
    is_collective: bool = False
    is_builtin: bool = True
    is_exact: bool = False  # the same bits, however its loops are tiled or fused


def op_facts(target: Callable[..., Any] | str) -> OpFacts:
    """Facts about a call target. Pure; callers memoise per graph."""
    if target is operator.getitem:
        return OpFacts("getitem", is_getitem=True, is_recomputable=True)
    if isinstance(target, OpOverload):
        return _operator_facts(target)
    if isinstance(target, HigherOrderOperator):
        name = f"higher_order.{target.name()}"
        return OpFacts(
            name,
            is_random=name in RANDOM_HIGHER_ORDER,
            has_side_effects=_is_effectful_name(target.name()) or "mutation" in target.name(),
            is_builtin=False,
        )
    name = getattr(target, "__name__", str(target))
    if target in _SYM_FUNCTIONS or (getattr(torch, name, None) is target and name.startswith(("sym_", "_sym_"))):
        return OpFacts(name, is_recomputable=True, is_symbolic=True)
    return OpFacts(
        name,
        has_side_effects=_is_effectful_name(name) or target is torch._check or has_effect(target),
        is_builtin=False,
    )


def node_facts(node: torch.fx.Node, module: torch.nn.Module, known: dict[Any, OpFacts]) -> OpFacts | None:
    """Facts about what a node of ``module`` calls, with those of the graphs that it runs; None if it calls no function.

    ``known`` remembers those of targets.
    """
    if node.op != "call_function":
        return None
    target: Any = node.target
    found = known.get(target)
    if found is None:
        found = known[target] = op_facts(target)
    return _with_subgraphs(found, node, module, known) if isinstance(target, HigherOrderOperator) else found


def _with_subgraphs(facts: OpFacts, node: torch.fx.Node, module: torch.nn.Module, seen: dict[Any, OpFacts]) -> OpFacts:
    """A higher-order op that runs graphs, or an operator, draws numbers, or has effects, if what it runs does."""
    if node.args and isinstance(node.args[0], OpOverload) and has_effect(node.args[0]):
        facts = replace(facts, has_side_effects=True)
    for used in node.all_input_nodes:
        inner = getattr(module, str(used.target), None) if used.op == "get_attr" else None
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        if inner not in seen:  # one graph may be called often
            found = [node_facts(step, inner, seen) for step in inner.graph.nodes]
            seen[inner] = OpFacts(
                "graph",
                is_random=any(fact.is_random for fact in found if fact is not None),
                has_side_effects=any(fact.is_mutating or fact.has_side_effects for fact in found if fact is not None),
            )
        facts = replace(
            facts,
            is_random=facts.is_random or seen[inner].is_random,
            has_side_effects=facts.has_side_effects or seen[inner].has_side_effects,
        )
    return facts


def _is_effectful_name(name: str) -> bool:
    return any(part in name for part in _SIDE_EFFECT_NAMES)


def _operator_facts(target: OpOverload) -> OpFacts:
    namespace, _, short = target._schema.name.partition("::")
    name = f"{namespace}.{short}"
    is_view = name in UNDECLARED_VIEWS or _declares_view(target)
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    intensive = name in COMPUTE_INTENSIVE
    pointwise = torch.Tag.pointwise in target.tags
    mutating = target._schema.is_mutable
    effect = _is_effectful_name(short) or not target._schema.returns or has_effect(target)
    return OpFacts(
        name,
        is_view=is_view and not mutating,
        is_random=is_random,
        is_compute_intensive=intensive,
        is_recomputable=(pointwise or is_view or name in RECOMPUTABLE) and not (intensive or is_random or mutating),
        is_mutating=mutating,
        has_side_effects=effect,
        is_symbolic=short.startswith("sym_") and not effect,
        is_collective=namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional"),
        is_builtin=namespace in ("aten", "prims", "prim"),
        is_exact=(pointwise or is_view or name in MOVES) and not (is_random or mutating),
    )


def _declares_view(target: OpOverload) -> bool:
    """Every result shares its storage with an argument, and none is written."""
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)
