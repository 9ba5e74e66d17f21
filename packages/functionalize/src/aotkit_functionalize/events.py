"""Changes of storage while the function runs: another storage (``set_``, ``x.data = y``), another size of it.

Note [Changes of storage]
    A functional graph has values and no storages, so nothing of this is recorded in it. The operations are noticed
    while the function runs (by :class:`.writes.RefuseWrongWrites`), and what they amount to at the end becomes a
    :class:`.StorageChange`, which is carried out on the caller's tensor after the call:

    * ``untyped_storage().resize_(n)``, as sharded parameters do it: only the last size counts. The values of a
      tensor whose storage ends up empty are not copied back. The order ``resize_`` then ``set_`` is refused, since
      the storage that was resized is then no longer that of any argument.
    * ``set_`` and ``x.data = y``: at the end the tensor looks at the storage of another input, or at one that the
      function made, which then becomes a forward output. What is set and set back is no change.
    * ``resize_`` beyond the storage: the functional tensor goes on with a larger copy of itself, which is right as
      long as no view of the smaller one is alive. The caller's tensor is resized and given the new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import NeedsDispatcherLayer, Unsupported
from .layouts import Layouts

__all__ = ["StorageEvents"]


@dataclass(slots=True)
class StorageEvents:
    """What happened to storages of functional tensors in one run: new sizes in bytes, tensors made larger, layouts."""

    num_bytes: dict[int, Any] = field(default_factory=dict)
    enlarged: dict[int, torch.Tensor] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=Layouts)
    sums_windows: bool = False  # see Note [Who sums windows] in :mod:`.summed_windows`

    def resize_storage(self, target: torch.Tensor, num_bytes: Any) -> None:
        """``target.untyped_storage().resize_(num_bytes)``."""
        self.num_bytes[compat.storage_identity(target)] = num_bytes

    def resize(self, target: torch.Tensor, sizes: Sequence[Any]) -> bool:
        """``target.resize_(sizes)`` if that needs a larger storage; else ``False`` and nothing is done."""
        compat.sync(target)
        plain = compat.unwrap_inner(compat.inner_wrapper(target))
        wanted = target.storage_offset()
        count: Any = 1
        for size in sizes:
            count = count * size
        if bool((wanted + count) * plain.element_size() <= plain.untyped_storage().nbytes()):
            return False
        if compat.inner_wrapper(target) is not target:
            raise NeedsDispatcherLayer("a tensor is made larger in place (resize_)")
        if not compat.is_base(target) or compat.functional_views(target) > 0:
            raise Unsupported(
                f"a tensor of sizes {tuple(target.shape)} is resized to {tuple(sizes)} and has views",
                "they would have to look at the larger storage",
                "Resize it before views of it are taken, or return a new tensor of the wanted size instead",
            )
        with torch.no_grad():
            target.set_(torch.ops.aten.resize.default(target, sizes))
        self.enlarged[id(target)] = target
        return True

    def replace(self, target: torch.Tensor) -> None:
        """``target`` is about to be given another storage."""
        if compat.inner_wrapper(target) is not target:
            raise NeedsDispatcherLayer("a tensor is given another storage (set_)")
