"""What the plan must know about an ATen op: may it return its arguments, and can it write into given memory."""

from __future__ import annotations

import functools

import torch

from ..ops.fixups import GUARDED

__all__ = [
    "addresses_storage",
    "conform",
    "may_alias_arguments",
    "out_overload",
    "resolve_target",
    "returns_several",
]

# Ops whose out= overload pays: their results are large and their Python cost is the same.
_OUT = {
    "aten.mm.default": "aten.mm.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out",
}


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


_FRESH = {"mkldnn._linear_pointwise.default", *GUARDED}  # outside aten, and known to give new memory or none


@functools.cache
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


def returns_several(target: str) -> bool:
    """Whether the op's result is a tuple or list."""
    returns = resolve_target(target)._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def conform(value: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A result that is not laid out or typed as its op's fake kernel said, or is conjugated or negated lazily: copied
    into what was said, unless the difference is in strides that no element sees. Raises ``RuntimeError`` for another
    shape."""
    if value.layout is not torch.strided:
        return value
    value = value.resolve_conj().resolve_neg()
    if tuple(value.shape) != sizes:
        raise RuntimeError(f"an ATen op gave a result of shape {tuple(value.shape)} where its fake kernel said {sizes}")
    seen = (got == want for size, got, want in zip(sizes, value.stride(), strides, strict=True) if size > 1)
    if value.dtype is dtype and (value.numel() == 0 or all(seen)):
        return value
    return torch.empty_strided(sizes, strides, dtype=dtype, device=value.device).copy_(value)
