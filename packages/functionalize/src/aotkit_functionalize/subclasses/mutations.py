"""What the function did to an argument that is a tensor subclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import Unsupported
from ..mutations import is_hidden_from_autograd
from ..records import InputInfo, InputKind, MutationKind
from ..symbols import dim, dims, tensor_meta
from .arguments import SubclassInput
from .meta import tensors_inside

__all__ = ["subclass_input_info"]


def subclass_input_info(entered: SubclassInput, parts: Sequence[InputInfo]) -> InputInfo:
    """The caller's record of an argument, from those of the tensors inside. ``updated_output`` is not set yet."""
    name = f"input {entered.index}, a {type(entered.original).__name__},"
    _check(entered, parts, name)
    written = any(part.mutation is not MutationKind.NONE for part in parts)
    hidden = written and is_hidden_from_autograd(entered)
    return InputInfo(
        index=entered.index,
        kind=InputKind.TENSOR,
        meta=replace(tensor_meta(entered.original, requires_grad=entered.requires_grad)),
        is_leaf=entered.is_leaf,
        mutation=MutationKind.DATA if written else MutationKind.NONE,
        mutation_hidden_from_autograd=hidden,
        version_steps=int(entered.value._version - entered.entry_version),
        mutation_under_no_grad=written and not hidden and _is_under_no_grad(entered, parts),
    )


def _is_under_no_grad(entered: SubclassInput, parts: Sequence[InputInfo]) -> bool:
    """See :func:`.mutations.is_under_no_grad`. The tensors inside are always written to below autograd."""
    if entered.value.requires_grad:
        return entered.value.grad_fn is entered.entry_grad_fn
    return False


def _check(entered: SubclassInput, parts: Sequence[InputInfo], name: str) -> None:
    value, before = entered.value, entered.original
    now = [id(tensor) for tensor in tensors_inside(value)]
    if now != [id(part.value) for part in entered.parts]:
        raise Unsupported(
            f"{name} is given other tensors to hold",
            "the caller's object would have to be changed after the call",
            "Write into the tensors that it holds with copy_",
        )
    if any(part.mutation is MutationKind.STORAGE for part in parts):
        raise Unsupported(
            f"{name} has the storage of a tensor that it holds replaced or resized",
            "the caller's object would have to be changed after the call",
            "Write into the tensors that it holds with copy_",
        )
    changed = any(part.mutation in (MutationKind.METADATA, MutationKind.DATA_AND_METADATA) for part in parts)
    if changed or _geometry(value) != _geometry(before):
        raise Unsupported(
            f"{name} has its sizes or strides changed in place",
            "what that does to the tensors it holds is known to its class only",
            "Use the operation that returns a new tensor (t(), unsqueeze(), ..)",
        )
    if bool(value.requires_grad) < entered.requires_grad:
        raise Unsupported(
            f"{name} has requires_grad changed (detach_, requires_grad_)",
            "the caller's tensor would have to leave autograd after the call",
            "Do it outside of the compiled region, or use detach()",
        )
    if entered.requires_grad and entered.is_leaf and value.grad_fn is not entered.entry_grad_fn:
        raise Unsupported(
            f"{name} is a leaf that requires grad and is changed in place",
            "autograd refuses this in eager mode as well",
            "Change it under torch.no_grad(), or change a copy",
        )
    written = any(part.mutation is not MutationKind.NONE for part in parts)
    if bool(value.requires_grad) > entered.requires_grad and not written:
        raise Unsupported(
            f"{name} has requires_grad changed (requires_grad_)",
            "the caller's tensor would have to enter autograd after the call",
            "Do it outside of the compiled region",
        )


def _geometry(value: object) -> object:
    return dims(value.shape), dims(value.stride()), dim(value.storage_offset())  # type: ignore[attr-defined]
