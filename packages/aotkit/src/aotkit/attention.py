"""Attention with functions of the scores: :func:`flex_attention`, on the CPU with gradients too.

Scores are ``query @ key.t() * scale``; ``score_mod`` changes each of them and ``mask_mod`` leaves some out. Both are
called once, for one score, and vectorized over the positions (``torch.vmap``). The idea, and the functions' signatures,
are those of FlexAttention (Dong et al., 2024, arXiv:2412.05496).

Note [Flex attention on the CPU]
    ``torch.nn.attention.flex_attention`` refuses inputs that require grad on the CPU. What it computes is written out
    here in operators that autograd knows. Compiled, the changes of a score and its gradients, also those of tensors
    that the functions read, are kernels around products; scores are whole in memory in between, and blocks that a
    :class:`~torch.nn.attention.flex_attention.BlockMask` leaves out are computed and masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flex_attention"]

ScoreMod = Callable[..., torch.Tensor]
MaskMod = Callable[..., torch.Tensor]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(score_mod(query @ key.t() * scale)) @ value`` as ``torch.nn.attention.flex_attention`` computes it.

    On other devices it is that function. On the CPU gradients flow to ``query``, ``key``, ``value`` and to the tensors
    that ``score_mod`` reads, in eager mode and compiled; the gradients match those of attention that is written out.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), or (1, H, S, E) for all of the batch.
        value: (B, H, S, Ev), likewise.
        score_mod: ``score_mod(score, b, h, q, k)``, all of them without dimensions; the score that counts instead.
        block_mask: what ``create_block_mask`` returned for ``L`` and ``S``. Its ``mask_mod`` says which scores count.
        scale: of the products; ``1 / sqrt(E)`` by default.
        enable_gqa: ``Hq`` may be a multiple of ``H``: heads of queries share those of keys and values.
        return_lse: return the logarithms of the sums of exponentials of the scores as well, (B, Hq, L).

    Returns:
        (B, Hq, L, Ev) in the type of ``query``. A row whose scores are all left out is 0, its logarithm -inf.

    Raises:
        ValueError: for sizes that do not fit, with what was given.
    """
    if query.device.type != "cpu":
        from torch.nn.attention.flex_attention import AuxRequest
        from torch.nn.attention.flex_attention import flex_attention as on_device

        asked = AuxRequest(lse=return_lse)
        result, beside = on_device(query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux=asked)
        return result if beside.lse is None else (result, beside.lse)
    _check(query, key, value, block_mask, enable_gqa)
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(narrow) for each in (query, key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    mask_mod = None if block_mask is None else block_mask.mask_mod
    with torch.autocast("cpu", enabled=False):
        result, lse, _ = attend(query, key, value, score_mod, mask_mod, scale)
    return (result, lse) if return_lse else result


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the logarithms of the sums of exponentials, and the largest scores, the last two (B, Hq, L).

    Scores are float64 for float64 inputs, else float32; see :func:`flex_attention` for sizes.
    """
    batch, heads, *_ = query.shape
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    key, value = (_for_heads(each, batch, heads) for each in (key, value))
    scores = (query.to(working) @ key.to(working).transpose(-2, -1)) * scale
    places = [torch.arange(size, dtype=torch.int32, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = _over_places(score_mod, with_score=True)(scores, *places).to(working)
    if mask_mod is not None:
        scores = torch.where(_over_places(mask_mod, with_score=False)(*places), scores, -math.inf)
    largest = scores.amax(-1)
    empty = largest == -math.inf  # all left out
    lse = scores.masked_fill(empty.unsqueeze(-1), 0).logsumexp(-1).masked_fill(empty, -math.inf)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    return _laid_out_as(query, weights.to(query.dtype) @ value.to(query.dtype)), lse, largest


def _laid_out_as(query: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result`` as torch's lies in memory: numbers of a head side by side, other dimensions in the order of the
    query's. So what is a view of the one is a view of the other."""
    order = [0, 0, 0, 3]  # from the outermost dimension on; Dynamo sorts no sizes that are known at run time only
    for dim in range(3):
        order[sum(1 for other in range(3) if _lies_outside(query, other, dim))] = dim
    if order == [0, 1, 2, 3]:
        return result
    lying = result.permute(order).clone(memory_format=torch.contiguous_format)
    return lying.permute([order.index(dim) for dim in range(4)])


def _lies_outside(query: torch.Tensor, dim: int, other: int) -> bool:
    """Of two dimensions of one stride, the first."""
    own, its = query.stride(dim), query.stride(other)
    return bool(own > its or (own == its and dim < other))


def _for_heads(shared: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """Keys or values for each head of queries, and each of the batch."""
    shared = shared.expand(batch, -1, -1, -1)
    groups = heads // shared.shape[1]
    if groups == 1:
        return shared
    return shared.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _over_places(function: Callable[..., torch.Tensor], *, with_score: bool) -> Callable[..., torch.Tensor]:
    """A function of one place as one of all: (score,) b, h, q, k."""
    first = (0,) if with_score else ()
    for place in (3, 2, 1, 0):  # from the innermost dimension on
        function = torch.vmap(function, in_dims=(*first, *(0 if place == each else None for each in range(4))))
    return function


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, enable_gqa: bool) -> None:
    if any(each.dim() != 4 for each in (query, key, value)):
        shapes = _shapes(query, key, value)
        raise ValueError(f"query, key and value have four dimensions (batch, heads, rows, width), not {shapes}")
    if query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3] or key.shape[0] not in (1, query.shape[0]):
        raise ValueError(f"query, key and value of these shapes do not fit each other: {_shapes(query, key, value)}")
    if query.shape[1] % key.shape[1] or (query.shape[1] != key.shape[1] and not enable_gqa):
        raise ValueError(
            f"{query.shape[1]} heads of queries have {key.shape[1]} of keys: that takes enable_gqa=True and a multiple"
        )
    if len({each.dtype for each in (query, key, value)}) > 1:
        raise ValueError(f"query, key and value have one type, not {query.dtype}, {key.dtype}, {value.dtype}")
    lengths = (query.shape[2], key.shape[2])
    if mask is not None and tuple(mask.seq_lengths) != lengths:
        raise ValueError(f"the block mask is for {tuple(mask.seq_lengths)} queries and keys, not for {lengths}")


def _shapes(*tensors: torch.Tensor) -> str:
    """For an error only: Dynamo makes no text of sizes that are known at run time only."""
    return ", ".join(str(tuple(each.shape)) for each in tensors)
