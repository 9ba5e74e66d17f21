"""In-place operations that torch's functionalization would replace by something else."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from . import _torch_compat as compat
from .custom_backward import note_hook
from .errors import OverlappingWrite, Unsupported
from .events import StorageEvents
from .layouts import EXPANSIONS, RESHAPES, STRIDE_DEPENDENT, without_expansion
from .masked_writes import without_unknown_sizes
from .named_arguments import by_position
from .overlap import definitely_disjoint, repeats_memory
from .pending_gradients import HALF_SPECTRA, settle_gradient
from .random_writes import as_eager_draws, check_normal
from .recurrent import lstm_apart
from .summed_windows import SUMS_WINDOWS, with_summed_windows
from .unfold import without_gaps
from .written_types import refuse_other_types

__all__ = ["RefuseWrongWrites"]

# They end in an underscore and change no element.
_NO_WRITES = RESHAPES | {"as_strided_", "detach_", "requires_grad_"}

_LAYOUTS = RESHAPES | STRIDE_DEPENDENT | EXPANSIONS | {"unfold"}

# Whose further arguments are looked at.
_BY_POSITION = frozenset(("addbmm_", "bernoulli", "index_put_", "resize_", "resize_as_"))

# Their numbers may depend on how the result lies in memory, see Note [Random numbers and memory].
_DRAW_BY_LAYOUT = frozenset(("normal", "bernoulli", "multinomial"))

# torch's functionalization takes their results for copies. The others give views, to which autograd lets nobody write,
# so they are taken where it has no say; where it has one, nobody may write to the parts.
_AS_VIEWS: dict[str, Any] = {
    "unsafe_split": torch.Tensor.split,
    "unsafe_chunk": torch.Tensor.chunk,
    "unsafe_split_with_sizes": torch.Tensor.split_with_sizes,
}


class RefuseWrongWrites(TorchFunctionMode):
    """While active, refuses in-place operations on expanded functional tensors, and views given as ``out=`` that may be
    of another size than the result.

    Note [Writes to expanded tensors]
        The base of an expanded tensor is given ``base + sum(new - old)`` over the copies. That is right only where one
        of the copies is written to, and even then only up to rounding: ``1e30 + (0.5 - 1e30)`` is 0.
    """

    def __init__(self, storages: StorageEvents) -> None:
        super().__init__()
        self.storages = storages
        self._parts = WeakTensorKeyDictionary()  # that are memory of a whole, and no views of it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # of ``aten.add_.Tensor`` the first part
        if kwargs and (name in _LAYOUTS or name in _AS_VIEWS or name in _BY_POSITION):
            args, kwargs = by_position(name, args, kwargs)
        layouts = self.storages.layouts
        doubtful = layouts.stale or layouts.moved or layouts.outside or layouts.reshaped
        if doubtful and not layouts.finished and not name.startswith("__get__"):
            self.storages.layouts.check_uses((args, *(kwargs or {}).values()))
        if name == "register_hook":
            note_hook(args[0])
        if "set_" in name or "resize_" in name:
            target = args[0] if args else None
            if isinstance(target, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(target)):
                return self._change_of_storage(name, func, args, kwargs or {})
        out = (kwargs or {}).get("out")
        # Functions of torch.nn.functional come here themselves; what they call does not.
        in_place = _is_in_place(name) or (kwargs or {}).get("inplace") is True
        target = _first(args, kwargs or {}) if in_place else out
        if in_place:
            refuse_other_types(name, args, kwargs or {})
        if not isinstance(target, torch.Tensor):
            if isinstance(target, list | tuple):
                return self._write_to_lists(name, func, args, kwargs or {})
            return self._change_of_layout(name, func, args, kwargs or {})
        wrapper, is_out = compat.inner_wrapper(target), target is out
        if not compat.is_inner_wrapper(wrapper):
            return func(*args, **(kwargs or {}))
        _refuse_expanded(target)
        self._refuse_part(target)
        choice = without_unknown_sizes(name, args, kwargs or {})
        if choice is not None:
            name, func, args, kwargs = "copy_", torch.Tensor.copy_, choice, {}
        if name == "addbmm_" and tuple(target.shape) != (args[1].shape[1], args[2].shape[2]):
            raise Unsupported(
                f"addbmm_ adds to a tensor of sizes {tuple(target.shape)}, which is not the size of the result",
                "eager mode resizes the tensor, which its functional form cannot",
                "Use torch.addbmm, which returns a new tensor",
            )
        if name == "normal_":
            check_normal(target)
        if is_out and not compat.is_base(wrapper):
            fitting = _result_for_view(name, func, target, args, kwargs or {})
            if fitting is not None:
                return self.storages.layouts.write(
                    target, torch.Tensor.copy_, (target, fitting), {}, other_layout=False
                )
            raise Unsupported(
                f"the out argument of {name} is a view",
                "it may have another size than the result, which nothing checks where sizes are only computed",
                "Use copy_ of the result into the view",
            )
        sizes = wrapper.shape
        result = self.storages.layouts.write(target, func, args, kwargs or {}, other_layout=is_out)
        if is_out and wrapper.shape != sizes and compat.functional_views(wrapper) > 0:
            raise Unsupported(
                f"the out argument of {name} is resized from {tuple(sizes)} to {tuple(wrapper.shape)} and has views",
                "they would have to look at the larger storage",
                "Pass an out argument of the size of the result",
            )
        return result

    def _write_to_lists(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """In-place operators on lists: functionalization leaves the version counters of the members where they are."""
        before = {}
        written = _written_arguments(name)
        lists = _values_of(written, args, kwargs)
        for members in lists:
            for target in members:
                if not isinstance(target, torch.Tensor) or not compat.is_inner_wrapper(compat.inner_wrapper(target)):
                    continue
                _refuse_expanded(target)
                self._refuse_part(target)
                before[id(target)] = (target, target._version)
        _refuse_overlap([target for target, _ in before.values()], name)
        read = [value for k, value in enumerate(args) if k not in written]
        read += [value for key, value in kwargs.items() if key not in written.values()]
        for members in lists if len(before) > 1 else ():
            _refuse_read_later(members, read, name)
        result = self._write_to_results(kwargs.get("out"), func, args, kwargs)
        if name.startswith("_foreach_"):  # eager mode counts no writes of the others, of fused optimizers among them
            still = [target for target, version in before.values() if target._version == version]
            torch.autograd.graph.increment_version(still)
        return result

    def _write_to_results(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Of a function that is given several tensors as ``out=``, each of which keeps its strides."""
        targets = [t for t in out or () if isinstance(t, torch.Tensor)]
        targets = [t for t in targets if compat.is_inner_wrapper(compat.inner_wrapper(t))]
        for target in targets:

            def func(*args: Any, _write: Any = func, _target: Any = target, **kwargs: Any) -> Any:
                return self.storages.layouts.write(_target, _write, args, kwargs, other_layout=True)

        return func(*args, **kwargs)

    def _change_of_layout(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in HALF_SPECTRA:
            settle_gradient(args, kwargs)
        if name in SUMS_WINDOWS:
            return with_summed_windows(self.storages, name, func, args, kwargs)
        if name == "lstm":
            return lstm_apart(func, args, kwargs)
        if name == "dropout" and not _drops(*args, **kwargs):
            with compat.disable_python_dispatcher():  # torch's Python kernel returns a copy
                return func(*args, **kwargs)
        if name in _AS_VIEWS and args:
            if not (args[0].requires_grad and torch.is_grad_enabled()):
                return _AS_VIEWS[name](*args, **kwargs)
            parts = func(*args, **kwargs)
            self._parts.update(dict.fromkeys(parts, name))
            return parts
        if name == "lift_fresh_copy":
            return args[0].clone(memory_format=torch.contiguous_format)  # functionalized, it keeps strides
        if name == "bernoulli" and args and isinstance(args[0], torch.Tensor):
            return func(*as_eager_draws(args, kwargs), **kwargs)
        if args and name in _LAYOUTS:
            target = args[0]
            if isinstance(target, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(target)):
                if name == "unfold":
                    return without_gaps(func, args, kwargs)
                if name in RESHAPES:
                    return self.storages.layouts.reshape(func, args, kwargs)
                if name in EXPANSIONS:
                    return without_expansion(func, args, kwargs)
                return self.storages.layouts.view(name, func, args, kwargs or {})
        return func(*args, **kwargs)

    def _refuse_part(self, target: torch.Tensor) -> None:
        for written in (target, target._base):
            if written is not None and written in self._parts:
                raise Unsupported(
                    f"a part that {self._parts[written]} gave of a tensor that requires grad is written to",
                    "captured, the parts are copies, and the tensor would keep its old values",
                    "Write to the parts under torch.no_grad(), or to those of a clone that split gave",
                )

    def _change_of_storage(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """See Note [Changes of storage]."""
        target = args[0]
        if name == "resize_storage_bytes_":
            return self.storages.resize_storage(target, args[1])
        if name == "set_" or (name == "__set__" and func.__self__ is torch.Tensor.data):
            self.storages.replace(target)
        if name in ("resize_", "resize_as_") and len(args) > 1 and not kwargs:
            sizes = args[1:] if isinstance(args[1], int | torch.SymInt) else args[1]
            if self.storages.resize(target, sizes.shape if isinstance(sizes, torch.Tensor) else sizes):
                return target
        return func(*args, **kwargs)


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Whether a dropout draws numbers: it returns its very argument if it drops nothing, a product with 0 if all."""
    return training and train and p != 0 and p != 1


def _refuse_expanded(target: torch.Tensor) -> None:
    if compat.is_view_through(compat.inner_wrapper(target), "expand"):
        raise OverlappingWrite(f"a view of sizes {tuple(target.shape)} made by expand()")
    root = target._base
    if root is not None:  # the arguments themselves are looked at in the end
        wrapper = compat.inner_wrapper(root)
        if compat.is_inner_wrapper(wrapper) and repeats_memory(compat.unwrap_inner(wrapper)):
            raise OverlappingWrite(f"a view of sizes {tuple(target.shape)} of a tensor that overlaps itself")


def _refuse_overlap(targets: list[torch.Tensor], name: str) -> None:
    """Eager mode writes to one after the other; the functional form computes all of them from the old values."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for target in targets:
        by_storage.setdefault(compat.storage_identity(target), []).append(target)
    for members in by_storage.values():
        plain = []
        for member in members if len(members) > 1 else ():
            compat.sync(member)
            plain.append(compat.unwrap_inner(compat.inner_wrapper(member)))
        if not all(definitely_disjoint(a, b) for k, a in enumerate(plain) for b in plain[:k]):
            raise Unsupported(
                f"{name} writes to tensors that share memory",
                "its functional form computes each from the old values",
                "Write to them one after the other",
            )


def _refuse_read_later(targets: Any, read: list[Any], name: str) -> None:
    """Eager mode reads what it wrote to a member before, where that is an argument of a later one."""
    for k, target in enumerate(targets):
        for value in read:
            # A tensor that is given for all members is read for each of them anew.
            later = value[k + 1 :] if isinstance(value, list | tuple) else [value]
            for other in later:
                if _may_overlap(target, other):
                    raise Unsupported(
                        f"{name} reads memory that it writes to before",
                        "its functional form computes each from the old values",
                        "Write to them one after the other",
                    )


def _result_for_view(name: str, func: Any, target: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What ``func`` gives without its ``out``, a view, if copying that into the view is what eager mode does: it has
    the view's sizes and type, nothing else that is read is in the same memory, and no gradient is wanted. The view's
    own elements may be read where each is read before it is written (``torch.mul(part, 2, out=part)``)."""
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    read = [value for value in pytree.tree_leaves((args, rest)) if isinstance(value, torch.Tensor)]
    if not read or name in _DRAW_BY_LAYOUT or isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    if torch.is_grad_enabled() and any(value.requires_grad for value in (target, *read)):
        return None  # eager mode refuses it
    if any(_may_overlap(target, v) and not (_is_pointwise(name) and _are_same_elements(target, v)) for v in read):
        return None
    result = func(*args, **rest)
    if not isinstance(result, torch.Tensor) or (result.dtype, result.device) != (target.dtype, target.device):
        return None
    same = result.dim() == target.dim() and all(
        compat.is_known(size == wanted) for size, wanted in zip(result.shape, target.shape, strict=True)
    )
    return result if same else None


def _may_overlap(a: Any, b: Any) -> bool:
    wrappers = [compat.inner_wrapper(value) for value in (a, b) if isinstance(value, torch.Tensor)]
    if len(wrappers) < 2 or not all(map(compat.is_inner_wrapper, wrappers)):
        return False
    if compat.storage_identity(a) != compat.storage_identity(b):
        return False
    compat.sync(a)
    compat.sync(b)
    return not definitely_disjoint(*map(compat.unwrap_inner, wrappers))


def _are_same_elements(a: Any, b: Any) -> bool:
    """Whether two tensors of one storage certainly have the same element at each index."""
    if a.dtype != b.dtype or a.dim() != b.dim():
        return False
    places = [
        (*t.shape, *t.stride(), t.storage_offset())
        for t in (compat.unwrap_inner(compat.inner_wrapper(a)), compat.unwrap_inner(compat.inner_wrapper(b)))
    ]
    return all(compat.is_known(place == other) for place, other in zip(*places, strict=True))


@lru_cache(maxsize=256)
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, k).tags for k in packet.overloads())


@lru_cache(maxsize=256)
def _written_arguments(name: str) -> dict[int, str]:
    """Positions and names of what an operator on lists (``_foreach_add_``, ``_fused_adam_``) writes to."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return {}
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    infos = [argument.alias_info for argument in arguments]
    return {k: arguments[k].name for k, info in enumerate(infos) if info is not None and info.is_write}


def _values_of(written: dict[int, str], args: Any, kwargs: Any) -> list[list[Any]]:
    """A list for each of these arguments: of one where it is a tensor (``found_inf`` of a gradient scaler)."""
    found = [args[k] if k < len(args) else kwargs.get(name, ()) for k, name in written.items()]
    return [list(value) if isinstance(value, list | tuple) else [value] for value in found]


def _first(args: Any, kwargs: Any) -> Any:
    """What an in-place function writes to."""
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def _is_in_place(name: str) -> bool:
    writes = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return writes or name == "__setitem__"
