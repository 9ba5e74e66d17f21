"""What an ATen call reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that update running statistics while training although their schemas don't say so.
_UNDECLARED_BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in an argument or result: itself, or inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def written_tensors(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[torch.Tensor]:
    """Tensor arguments whose data the call writes (in-place and `out=` arguments, running statistics)."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        yield from _written_by_kernel(func, kwargs)
        return
    undeclared = func._schema.name in _UNDECLARED_BATCH_NORMS
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (undeclared and argument.name in ("running_mean", "running_var")):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _written_by_kernel(func: Any, settings: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """What a launch of a Triton kernel of the user's writes, by torch's reading of the kernel. Other higher-order
    operators, and the launch that returns new tensors, write to none of their arguments."""
    if func.name() == "triton_kernel_wrapper_mutation":
        from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors  # imports much

        given = settings["kwargs"]
        kernel, constants = settings["kernel_idx"], settings["constant_args_idx"]
        for name in get_mutated_tensors(kernel, constants, given, settings["tma_descriptor_metadata"]):
            yield from tensors_in(given[name])


def map_tensors(value: object, fn: Callable[[torch.Tensor], object]) -> Any:
    """`value` with each tensor replaced; lists, tuples and dicts are rebuilt."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, list):
        return [map_tensors(item, fn) for item in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, fn) for key, item in value.items()}
    return value


class UndoWrites(TorchDispatchMode):
    """Remembers the contents of each older storage before its first write; `undo` puts them back.

    Warm-up runs the callable for real, so a callable that updates a buffer (running statistics, a counter) would
    update it once too often. Writes by kernels that don't go through the dispatcher are invisible here; callers
    declare those inputs as mutated.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # Addresses only, so that temporaries die as they would. One that is used again is again a storage of ours.
        self._own: set[int] = set()
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def save(self, tensor: torch.Tensor) -> None:
        """Remember the storage of `tensor`, unless it was made under this mode."""
        if not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved and storage._cdata not in self._own:
            self._saved[storage._cdata] = (storage, storage.clone())

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` was written (or declared so)."""
        return tensor.untyped_storage()._cdata in self._saved

    def undo(self) -> None:
        """Restore all contents, and the states of generators that calls were given."""
        for storage, contents in self._saved.values():
            storage.copy_(contents)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self.save(tensor)
        for value in kwargs.values():
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators[value] = value.get_state()
        known = {
            tensor.untyped_storage()._cdata for tensor in tensors_in([*args, *kwargs.values()]) if _has_storage(tensor)
        }
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if _has_storage(tensor):
                address = tensor.untyped_storage()._cdata
                if address not in known:
                    self._own.add(address)
        return result


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
