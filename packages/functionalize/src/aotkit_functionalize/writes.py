"""In-place operations that torch's functionalization would replace by something else."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import _torch_compat as compat
from .errors import Unsupported

__all__ = ["RefuseWrongWrites"]

# They end in an underscore and change no element.
_NO_WRITES = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "requires_grad_")
)


class RefuseWrongWrites(TorchFunctionMode):
    """While active, refuses in-place operations on expanded functional tensors, and views given as ``out=``.

    Note [Writes to expanded tensors]
        The base of an expanded tensor is given ``base + sum(new - old)`` over the copies. That is right only where one
        of the copies is written to, and even then only up to rounding: ``1e30 + (0.5 - 1e30)`` is 0.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        out = (kwargs or {}).get("out")
        target = args[0] if args and _is_in_place(name) else out
        if not isinstance(target, torch.Tensor):
            return func(*args, **(kwargs or {}))
        wrapper = compat.inner_wrapper(target)
        if compat.is_inner_wrapper(wrapper) and compat.is_view_through(wrapper, "expand"):
            raise Unsupported(
                f"an expanded tensor of sizes {tuple(target.shape)} is written to by {name}",
                "elements of it may be the same memory, and which of their new values remains is not defined",
                "Write to the tensor before it is expanded, or to a clone",
            )
        if target is out and compat.is_inner_wrapper(wrapper) and not compat.is_base(wrapper):
            raise Unsupported(
                f"the out argument of {name} is a view",
                "it may have another size than the result, which nothing checks where sizes are only computed",
                "Use copy_ of the result into the view",
            )
        return func(*args, **(kwargs or {}))


def _is_in_place(name: str) -> bool:
    writes = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return writes or name == "__setitem__"
