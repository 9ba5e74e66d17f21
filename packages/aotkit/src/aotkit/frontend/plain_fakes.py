"""Fake tensors made quickly: of known sizes, with new memory of their own.

torch's converter asks of every tensor what it is a view of, and what each of its sizes is called. Weights of a model
are hundreds of tensors with fixed sizes that share nothing, of which nothing else can be told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._mode_utils import no_dispatch

__all__ = ["has_fixed_sizes", "new_fake", "new_fake_like", "plain_inputs", "plain_twin"]

_PLAIN = (Tensor, torch.nn.Parameter)


def new_fake(
    mode: FakeTensorMode, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """What ``torch.empty_strided`` gives under ``mode``, without a way through torch's layers of tracing."""
    with no_dispatch():  # type: ignore[no-untyped-call]
        meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        return FakeTensor(mode, meta, device)


def new_fake_like(like: FakeTensor) -> FakeTensor:
    """New memory with sizes, which are numbers, and strides of ``like``."""
    return new_fake(like.fake_mode, like.shape, like.stride(), like.dtype, like.device)


def plain_inputs(values: Sequence[Any]) -> frozenset[int]:
    """The ids of tensors whose fakes :func:`plain_twin` may make: what is all of its memory, which is no other's."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not all(type(value) in _PLAIN or isinstance(value, FakeTensor) for value in tensors):
        return frozenset()  # what a subclass holds may share memory with the others
    strided = [value for value in tensors if type(value) in _PLAIN and value.layout is torch.strided]
    storages = {id(value): value.untyped_storage() for value in strided}
    counts = Counter(storages[id(value)]._cdata for value in strided)
    return frozenset(
        id(value)
        for value in strided
        if counts[storages[id(value)]._cdata] == 1
        and storages[id(value)].nbytes() == value.numel() * value.element_size() == _reach(value)
        and _is_plain(value)
    )


def _is_plain(value: Tensor) -> bool:
    """Whether sizes, strides and what autograd says are all that there is to know of a tensor."""
    if not value.is_leaf or value._is_view() or value.grad is not None or value.is_inference():
        return False
    if value.storage_offset() or value.numel() == 0 or value.is_conj() or value.is_neg() or value.is_quantized:
        return False
    return not any(getattr(value, "names", ())) and getattr(value, "grad_dtype", None) in (None, value.dtype)


def _reach(value: Tensor) -> int:
    """Bytes from the first to the last element."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + last) * value.element_size()


def has_fixed_sizes(symbolic: Any) -> bool:
    """Whether a fake made in this symbolic context has numbers for sizes.

    Of an array of numpy's Dynamo keeps the second of two contexts. It calls all sizes fixed, and has the symbols that
    the first gave them: torch looks there first.
    """
    if any(kind is not DimDynamic.STATIC for kind in getattr(symbolic, "dynamic_sizes", (None,))):
        return False
    known = getattr(symbolic, "shape_env_to_source_to_symbol_cache", {}).values()
    return not any(getattr(size, "free_symbols", None) for sizes in known for size in sizes.values())


def plain_twin(value: Tensor, mode: FakeTensorMode, symbolic: Any) -> FakeTensor | None:
    """A fake of one of :func:`plain_inputs`, or ``None`` if Dynamo's context says that a size of it may change."""
    if symbolic is not None:
        alone = getattr(symbolic, "view_base_context", None) is None and not getattr(symbolic, "inner_contexts", None)
        if not alone or not has_fixed_sizes(symbolic):
            return None
    made = new_fake(mode, value.shape, value.stride(), value.dtype, value.device)
    made.requires_grad_(value.requires_grad)
    if type(value) is torch.nn.Parameter:
        made._is_param = True  # as torch's converter leaves it
    return made
