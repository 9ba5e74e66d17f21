"""Debug mode: values at run time against the metadata."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._torch_compat import dtype_from_name
from .errors import MetadataMismatchError

__all__ = ["check_value"]


def check_value(
    value: Any,
    what: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: str,
    device: str,
    requires_grad: bool | None,
) -> None:
    """Raise :class:`MetadataMismatchError` that names the first field in which ``value`` differs."""
    if not isinstance(value, Tensor):
        raise MetadataMismatchError(f"{what} is a {type(value).__name__} where the metadata has a tensor")
    found = {"sizes": tuple(value.size()), "dtype": value.dtype, "device": str(value.device)}
    expected = {"sizes": sizes, "dtype": dtype_from_name(dtype), "device": device}
    if strides is not None and value.numel() > 0:
        real = [i for i, size in enumerate(sizes) if size != 1]
        found["strides"] = tuple(value.stride()[i] for i in real if i < value.dim())
        expected["strides"] = tuple(strides[i] for i in real)
    if requires_grad is not None:
        found["requires_grad"], expected["requires_grad"] = value.requires_grad, requires_grad
    for name, want in expected.items():
        if found[name] != want:
            raise MetadataMismatchError(
                f"{what}: {name} is {found[name]} at run time and {want} in the metadata. The graph is used outside "
                "what it was captured for, or the compiler does not keep what the metadata promises"
            )
