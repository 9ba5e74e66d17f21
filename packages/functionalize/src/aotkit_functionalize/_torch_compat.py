"""The only place that names torch's private functionalization functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._higher_order_ops.effects import has_effects
from torch._library.fake_class_registry import FakeScriptObject
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch._subclasses.meta_utils import MetaTensorDesc
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as untraced
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

__all__ = [
    "PLAIN_TYPES",
    "FakeScriptObject",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "all_mutations_under_no_grad",
    "below_functional_modes",
    "below_functionalization",
    "call_functionalized",
    "can_auto_functionalize",
    "depends_on_data",
    "disable_functional_mode",
    "disable_python_dispatcher",
    "enable_python_dispatcher",
    "enter_dispatcher_functionalization",
    "fakes_other_attributes",
    "functional_views",
    "has_data_mutation",
    "has_effects",
    "inner_wrapper",
    "is_base",
    "is_dense",
    "is_fake_tensor",
    "is_inner_wrapper",
    "is_known",
    "is_view_through",
    "is_viewed",
    "leave_dispatcher_functionalization",
    "outer_storage_identity",
    "real_object",
    "replace_value",
    "replay_views",
    "share_storage",
    "share_version_counter",
    "size_at_capture",
    "snapshot_fake",
    "sources_of_views",
    "storage_identity",
    "sync",
    "unseen_by_dynamo",
    "untraced",
    "unwatched",
    "unwrap_inner",
    "views_of_storage",
    "with_lazy_bits_as_they_are",
    "wrap_inner",
]


PLAIN_TYPES = (torch.Tensor, FakeTensor, FunctionalTensor)
"""What arguments of a captured operator may be beside tensor subclasses, which take it apart first."""


def fakes_other_attributes() -> bool:
    """Whether a fake of a tensor subclass may hold attributes that are no tensors: from torch 2.12 on."""
    return "opaque_attrs" in MetaTensorDesc.__dataclass_fields__


def enter_dispatcher_functionalization() -> None:
    """Functionalize in the dispatcher: views stay views, factories give functional tensors."""
    torch._enable_functionalization(reapply_views=True)


def leave_dispatcher_functionalization() -> None:
    """Undo :func:`enter_dispatcher_functionalization`."""
    torch._disable_functionalization()  # type: ignore[attr-defined]


def unwatched() -> AbstractContextManager[Any]:
    """Context for a look at tensors, which no torch-function mode is told of."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def with_lazy_bits_as_they_are() -> torch._C._ExcludeDispatchKeyGuard:
    """Context in which operators get tensors with lazy bits as they are, not copies without."""
    negated, conjugated = torch._C.DispatchKey.Negative, torch._C.DispatchKey.Conjugate
    keys = torch._C.DispatchKeySet(negated) | torch._C.DispatchKeySet(conjugated)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def below_functionalization() -> torch._C._ExcludeDispatchKeyGuard:
    """Context in which the dispatcher does not functionalize."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def disable_python_dispatcher() -> AbstractContextManager[Any]:
    """Context in which operators are run by torch's C++ kernels, not by those in Python for symbolic sizes."""
    return torch._C._DisablePythonDispatcher()


def call_functionalized(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """What the dispatcher's functionalization makes of a call on its wrappers, inside of the mode."""
    include = torch._C._dispatch_tls_local_include_set() | _FUNCTIONALIZE
    exclude = torch._C._dispatch_tls_local_exclude_set() - _FUNCTIONALIZE - FunctionalTensor._extra_dispatch_keys
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        reapply_views = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            return func._op_dk(torch._C.DispatchKey.Functionalize, *args, **kwargs)
        finally:
            torch._functionalize_enable_reapply_views(reapply_views)  # type: ignore[attr-defined]


def share_storage(view: torch.Tensor, source: torch.Tensor) -> None:
    """Let ``view``, a functional tensor of the mode, have the storage of ``source``."""
    torch._functionalize_unsafe_set(view, source)  # type: ignore[attr-defined]


def is_fake_tensor(value: object) -> bool:
    """Whether ``value`` is a fake tensor, and of no class of its own."""
    return type(value) is FakeTensor


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which Dynamo does not look into."""
    return torch._disable_dynamo(function)  # type: ignore[no-any-return, attr-defined]


def wrap_inner(value: torch.Tensor) -> torch.Tensor:
    """The dispatcher's functional wrapper around ``value``."""
    return torch._to_functional_tensor(value)


def inner_wrapper(value: torch.Tensor) -> torch.Tensor:
    """The dispatcher's wrapper inside either kind of functional tensor."""
    return value.elem if isinstance(value, FunctionalTensor) else value


def is_inner_wrapper(value: torch.Tensor) -> bool:
    """Whether ``value`` is the dispatcher's wrapper."""
    return bool(torch._is_functional_tensor(value))


def unwrap_inner(wrapper: torch.Tensor) -> torch.Tensor:
    """What the dispatcher's wrapper holds now."""
    return torch._from_functional_tensor(wrapper)


def sync(value: torch.Tensor) -> None:
    """Apply pending writes through other views to ``value``, a functional tensor of either layer."""
    if isinstance(value, FunctionalTensor):
        value.sync()
    else:
        torch._sync(value)


def has_data_mutation(wrapper: torch.Tensor) -> bool:
    """Whether the elements of the wrapper's storage were written to."""
    return bool(torch._functionalize_has_data_mutation(wrapper))  # type: ignore[attr-defined]


def count_data_mutations(wrapper: torch.Tensor) -> int:
    """How often the elements of the wrapper's storage were written to so far."""
    return int(torch._functionalize_mutation_counter(wrapper))  # type: ignore[attr-defined]


def storage_identity(value: torch.Tensor) -> int:
    """A number that functional tensors have in common exactly if they share a (functional) storage."""
    return int(inner_wrapper(value).untyped_storage()._cdata)


def outer_storage_identity(value: torch.Tensor) -> int:
    """The same for the tensor that the function sees, which ``x.data = y`` changes alone."""
    return int(value.untyped_storage()._cdata)


def is_base(wrapper: torch.Tensor) -> bool:
    """Whether the wrapper was made by no view operation."""
    return bool(torch._is_functional_tensor_base(wrapper))  # type: ignore[attr-defined]


def is_viewed(wrapper: torch.Tensor) -> bool:
    """Whether the wrapper was made by view operations of the tensor that its storage began with."""
    return bool(torch._C._functionalization.get_view_meta_sequence(wrapper))


def replay_views(wrapper: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Take of ``base`` the views by which ``wrapper`` was made of the tensor that its storage began with."""
    sequence = torch._C._functionalization.get_view_meta_sequence(wrapper)
    if not sequence:
        return base
    with _no_names_due(base):
        return torch._C._functionalization.apply_view_meta_sequence(base, sequence)


def _no_names_due(value: torch.Tensor) -> AbstractContextManager[Any]:
    """Names that sizes get meanwhile are of this replay alone: torch does not wait for a node that gives them."""
    sizes = value.fake_mode.shape_env if isinstance(value, FakeTensor) else None
    return nullcontext() if sizes is None else sizes.ignore_fresh_unbacked_symbols()


def views_of_storage(wrapper: torch.Tensor) -> tuple[Any, ...]:
    """The view operations by which the wrapper was made of the tensor that its storage began with, to be compared."""
    sequence = torch._C._functionalization.get_view_meta_sequence(wrapper)
    return tuple((type(view).__name__, *map(str, view.as_tuple())) for view in sequence)  # type: ignore[attr-defined]


def is_view_through(wrapper: torch.Tensor, operator: str) -> bool:
    """Whether one of the view operations by which the wrapper was made is ``operator``."""
    sequence = torch._C._functionalization.get_view_meta_sequence(wrapper)
    return any(type(view).__name__ == f"{operator}_ViewMeta" for view in sequence)


def sources_of_views(wrapper: torch.Tensor, operator: str, base: torch.Tensor, skip: int) -> Iterator[torch.Tensor]:
    """What the views by ``operator`` were taken of by which ``wrapper`` was made of ``base``, but for ``base`` itself.

    ``skip``: so many views were taken before, and led to ``base``.
    """
    sequence = torch._C._functionalization.get_view_meta_sequence(wrapper)[skip:]
    for place, view in enumerate(sequence):
        if place and type(view).__name__ == f"{operator}_ViewMeta":
            with _no_names_due(base):
                source = torch._C._functionalization.apply_view_meta_sequence(base, sequence[:place])
            yield source


def functional_views(wrapper: torch.Tensor) -> int:
    """How many other functional tensors look at the wrapper's storage."""
    storage = wrapper.untyped_storage()
    # Beside the other tensors, this one and the Python object count.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to one of them moves the version counter of the other."""
    versions = a._version, b._version
    torch.autograd.graph.increment_version(a)
    shared = a is b or b._version != versions[1]
    torch._C._autograd._unsafe_set_version_counter((a,), (versions[0],))
    return shared


def replace_value(wrapper: torch.Tensor, value: torch.Tensor) -> None:
    """Give the wrapper, and what it is a view of, the elements (and strides) of plain tensor ``value``."""
    torch._functionalize_replace(wrapper, value)
    torch._functionalize_commit_update(wrapper)  # type: ignore[attr-defined]
    torch._functionalize_sync(wrapper)  # type: ignore[attr-defined]


@contextmanager
def below_functional_modes() -> Iterator[None]:
    """Context in which plain tensors are computed with, and recorded if a recording is in progress."""
    with ExitStack() as stack:
        stack.enter_context(below_functionalization())
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None:
            stack.enter_context(disable_functional_mode())
        yield


def all_mutations_under_no_grad(wrapper: torch.Tensor) -> bool:
    """Whether every write happened under ``no_grad`` or ``inference_mode``."""
    return bool(torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(wrapper))


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; ``False`` where that depends on data."""
    return bool(guard_or_false(condition))


def depends_on_data(plain: torch.Tensor) -> bool:
    """Whether a size or stride depends on the elements of a tensor."""
    return bool(free_unbacked_symbols(plain))


def size_at_capture(size: int | torch.SymInt) -> int:
    """The number that a size is at capture; nothing is made to depend on it."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_dense(plain: torch.Tensor) -> bool:
    """Whether the elements of ``plain`` fill a range of its storage without gaps or overlap, in any order.

    ``False`` where that depends on the elements of a tensor.
    """
    if depends_on_data(plain):
        return is_non_overlapping_and_dense_or_false(plain)
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(plain))


def real_object(value: Any) -> Any:
    """What a stand-in of Dynamo's stands for, or ``value``."""
    return getattr(value, "real_obj", value) if isinstance(value, FakeScriptObject) else value
