"""Functions that emitted code calls in the cases it does not handle in line."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._torch_compat import (
    advance_version,
    disable_autocast,
    dtype_from_name,
    forward_ad,
    put_versions,
    unsafe_view,
)
from .boxed import BoxedCallable
from .contract import ViewSpec, with_lazy_bits, without_lazy_bits
from .errors import AliasingChangedError, CallingConventionError, MetadataMismatchError, WrapperError
from .overlap import byte_range

__all__ = [
    "bump_versions",
    "check_strides",
    "clone_exact",
    "coerce_tangent",
    "keep_values",
    "mark_dynamic",
    "own_outputs",
    "refuse_duals",
    "refuse_transform",
    "replay_view",
    "set_versions",
    "versions_of",
    "with_history",
    "without_autocast",
    "write_late",
    "wrong_count",
    "wrong_duplicate",
    "zero_tangent",
]


def wrong_count(what: str, expected: int, got: int) -> NoReturn:
    """Refuse a list of the wrong length."""
    raise CallingConventionError(f"this graph was compiled for {expected} {what}, but there are {got}")


def wrong_duplicate(value: str, first: str) -> NoReturn:
    """Two arguments that were one tensor while tracing are two now."""
    raise AliasingChangedError(
        f"arguments {value} and {first} were the same tensor when the graph was captured and are not now; "
        "capture the function again with these arguments"
    )


def refuse_transform() -> NoReturn:
    """A transform sees through Python, not through compiled code."""
    raise WrapperError(
        "a compiled graph was called under a torch.func transform (vmap, grad, jvp, ...), which cannot see into it; "
        "apply the transform to the original function and compile the result"
    )


def refuse_duals(args: Sequence[Any]) -> None:
    """Refuse tensors with gradients of forward mode, which compiled code would drop."""
    if any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in args):
        raise WrapperError(
            "a compiled graph was called with dual tensors (torch.autograd.forward_ad), or its gradients were, and it "
            "has no gradients of forward mode; compile the function that makes the dual tensors instead, or run this "
            "part in eager (torch.compiler.disable)"
        )


def without_autocast(function: BoxedCallable, box: list[Any]) -> Any:
    """Run compiled code, whose dtypes are fixed, where a surrounding autocast must not cast once more."""
    with disable_autocast():
        return function(box)


def own_outputs(out: Sequence[Any], positions: Sequence[int], first_saved: int, end_saved: int) -> list[Any]:
    """Forward outputs at ``positions`` as tensors of their own instead of views of a buffer of the backend.

    Note [Saved tensors follow the version counter of an output]
        A view made by the backend shares a version counter with its buffer, and with every other view of
        it, so a saved view of an output notices when the user writes to the output. Giving the output its
        own counter would lose that and give a wrong gradient without a word. So saved tensors over the same
        buffer are taken anew, of the output.
    """
    result = list(out)
    for position in positions:
        output = result[position]
        if not isinstance(output, Tensor) or not output._is_view():
            continue
        buffer = output._base
        same = [i for i in range(first_saved, end_saved) if _shares(result[i], output, buffer)]
        if any(result[i].dtype != output.dtype for i in same):
            continue  # stays a view: correct, if less convenient for the user
        owned = unsafe_view(output)
        for i in same:
            saved = result[i]
            result[i] = (
                owned
                if saved is output
                else owned.detach().as_strided(saved.size(), saved.stride(), saved.storage_offset())
            )
        result[position] = owned
    return result


def _shares(saved: Tensor | None, output: Tensor, buffer: Tensor | None) -> bool:
    if saved is output:
        return True
    if saved is None or (saved is not buffer and saved._base is not buffer):
        return False
    (low, high), (start, end) = byte_range(saved), byte_range(output)
    return max(low, start) < min(high, end)


def coerce_tangent(tangent: Tensor, position: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tangent in the layout that the backward was compiled for.

    Resolves lazy conjugation, negation and zeros, of which compiled code knows nothing; copies only if a stride
    differs in a dimension of more than one element.
    """
    if type(tangent) is not Tensor and hasattr(tangent, "__tensor_flatten__"):
        tangent = _plain_tangent(tangent, position)
    if tuple(tangent.size()) != tuple(sizes):
        raise MetadataMismatchError(
            f"the gradient of forward output {position} has sizes {tuple(tangent.size())}, compiled for {tuple(sizes)}"
        )
    if tangent._is_zerotensor():
        return torch.empty_strided(sizes, strides, dtype=tangent.dtype, device=tangent.device).zero_()
    tangent = tangent.resolve_neg().resolve_conj() if tangent.is_complex() else tangent.resolve_neg()
    if _same_strides(tangent, strides):
        return tangent if tangent.stride() == tuple(strides) else tangent.as_strided(sizes, strides)
    copy = torch.empty_strided(sizes, strides, dtype=tangent.dtype, device=tangent.device)
    return copy.copy_(tangent)


def _plain_tangent(tangent: Tensor, position: int) -> Tensor:
    """The plain tensor that a subclass makes of itself where one is expected."""
    hook = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
    plain = None if hook is None else hook(None, Tensor)
    if type(plain) is not Tensor:
        raise MetadataMismatchError(
            f"the gradient of forward output {position} is a {type(tangent).__name__} where the backward was compiled "
            "for a plain tensor; convert the gradient to a plain tensor before it reaches the compiled graph"
        )
    return plain


def _same_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    if tensor.numel() == 0:
        return True
    return all(
        size == 1 or have == want for size, have, want in zip(tensor.size(), tensor.stride(), strides, strict=True)
    )


def clone_exact(saved: Tensor) -> Tensor:
    """A copy with the very strides of ``saved``, for which the backward was compiled."""
    copy = saved.clone()
    if copy.stride() == saved.stride():
        return copy
    return torch.empty_strided(saved.size(), saved.stride(), dtype=saved.dtype, device=saved.device).copy_(saved)


def keep_values(saved: Sequence[Any], written: Sequence[Tensor]) -> list[Any]:
    """Saved tensors that the epilogue cannot change; see the note. (``None``: see Note [Witnesses].)

    Note [Saved inputs that are written back]
        The compiled backward was worked out for the values that inputs had in the forward. A saved tensor may be
        such an input, or a view of one, and the epilogue writes the input's new value into it. Autograd would then
        refuse the backward (or, for a write that is hidden from it, not notice). So what shares a storage with a
        written input is copied. Only graphs that write back pay for the look.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in written}
    return [clone_exact(t) if t is not None and t.untyped_storage()._cdata in storages else t for t in saved]


def zero_tangent(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tangent of an output that the loss does not depend on."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).zero_()


def bump_versions(tensors: Sequence[Tensor], times: int, moved: Tensor | None = None) -> None:
    """Advance each version counter behind ``tensors`` once by ``times``; views share the counter of their base. That of
    ``moved`` is left alone."""
    if moved is not None:
        tensors = _with_other_counters(tensors, moved)
    before = [None if t.is_inference() else t._version for t in tensors]
    for tensor, version in zip(tensors, before, strict=True):
        if version is not None and tensor._version == version:
            advance_version(tensor, times)


def _with_other_counters(tensors: Sequence[Tensor], moved: Tensor) -> list[Tensor]:
    """Those whose version counter is not that of ``moved``: which, is seen when it moves."""
    before, now = versions_of(tensors), versions_of([moved])
    advance_version(moved, 1)
    after = versions_of(tensors)
    set_versions([moved], now, [0])
    return [tensor for tensor, then, later in zip(tensors, before, after, strict=True) if then == later]


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """The version counters; inference tensors have none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # the rare case: asking each first would cost every call of an optimizer
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def set_versions(tensors: Sequence[Tensor], before: Sequence[int | None], steps: Sequence[int]) -> None:
    """Make the version counters ``before + steps``."""
    if None in before:
        counted = [k for k, version in enumerate(before) if version is not None]
        tensors, before, steps = (
            [tensors[k] for k in counted],
            [before[k] for k in counted],
            [steps[k] for k in counted],
        )
    put_versions(tensors, list(map(operator.add, before, steps)))


def write_late(targets: Sequence[Tensor], values: Sequence[Tensor], steps: Sequence[int]) -> None:
    """Give inputs that the backward writes to their new values, and their version counters eager mode's."""
    before = versions_of(targets)
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    set_versions(targets, before, steps)


def check_strides(value: Tensor, name: str, strides: tuple[int, ...]) -> None:
    """Views are taken of ``value`` by strides, so wrong ones would give wrong elements."""
    if not _same_strides(value, strides):
        raise MetadataMismatchError(
            f"the compiled graph returned {name} with strides {value.stride()}, but the caller gets views of it that "
            f"were worked out for strides {strides}; the compiler has to keep the strides of intermediate bases"
        )


def _reinterpret(base: Tensor, dtype: torch.dtype) -> Tensor:
    """``base`` in another dtype over the same memory."""
    if base.is_complex() and not dtype.is_complex and base.dtype.to_real() == dtype:
        return torch.view_as_real(base)
    if base.element_size() == dtype.itemsize:
        return base.view(dtype)
    # Elements of another size are found along a dimension without gaps only; those that do not fill one are left out.
    low, high = byte_range(base)
    whole = (high - low) // max(dtype.itemsize, base.element_size()) * max(dtype.itemsize // base.element_size(), 1)
    return base.as_strided((whole,), (1,), base.storage_offset()).view(dtype)


def replay_view(base: Tensor, view: ViewSpec, sizes: tuple[int, ...], strides: tuple[int, ...], delta: int) -> Tensor:
    """``view`` of ``base`` in another dtype; sizes, strides and offset evaluated, in elements of the view's dtype."""
    taken = _in_dtype(without_lazy_bits(base), dtype_from_name(view.dtype), sizes, strides, delta)
    return with_lazy_bits(taken, view.conj, view.neg)


def _in_dtype(base: Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], delta: int) -> Tensor:
    if dtype.is_complex and not base.is_complex() and dtype.to_real() == base.dtype:
        doubled = tuple(2 * stride for stride in strides)
        pairs = base.as_strided((*sizes, 2), (*doubled, 1), base.storage_offset() + 2 * delta)
        return torch.view_as_complex(pairs)
    source = _reinterpret(base, dtype)
    return source.as_strided(sizes, strides, source.storage_offset() + delta)


class _WithHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, memory: Tensor) -> Tensor:
        # Of an argument that is returned autograd takes a view, in which dimensions of size one have other strides.
        return torch.ops.aten.alias.default(memory) if 1 in memory.shape else memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def with_history(source: Tensor, memory: Tensor) -> Tensor:
    """``memory``, a detached view, with the gradient of ``source``."""
    result: Tensor = _WithHistory.apply(source, memory)
    return result


def mark_dynamic(value: Tensor, dims: Sequence[int]) -> None:
    """Add ``dims`` to those that Dynamo treats as varying, unless the user's own marking is there."""
    known: set[int] = getattr(value, "_dynamo_weak_dynamic_indices", set())
    value._dynamo_weak_dynamic_indices = set(known) | set(dims)  # type: ignore[attr-defined]
