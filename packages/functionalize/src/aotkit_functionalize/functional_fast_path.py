"""torch's functionalization mode, with a short way through it for operators that only compute or view."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch

from . import _torch_compat as compat
from .custom_writes import call_custom_writer, is_custom_writer

__all__ = ["fast_functional_mode"]

# The mode's own way, without the layer that keeps Dynamo out: that is around both ways.
_the_long_way = inspect.unwrap(compat.FunctionalTensorMode.__torch_dispatch__)


class _Way(enum.Enum):
    LONG = "long"
    COMPUTES = "computes"
    VIEWS = "views"


def fast_functional_mode() -> compat.FunctionalTensorMode:
    """torch's mode; calls of operators that write nothing and are not made of others take a short way through it.

    Note [The short way through functionalization]
        torch's mode asks of each call whether it decomposes, writes, has effects, is a view, or holds anything but
        tensors, walks through its arguments five times, and is in turn watched by :class:`.RefuseWrongWrites` whenever
        it looks at a size. Most calls are of operators whose schema answers all this once for all: new results, or a
        view of the first argument, and of arguments that nothing was ever written to, so that no view of them has to
        be taken again. These go to the dispatcher's functionalization at once. And the wrappers that are made ask the
        fake tensor inside for its device, once each, through all of the modes below. Higher-order operators know the
        mode by its very class, so this is no class derived from it.
    """
    mode = compat.FunctionalTensorMode()
    mode.__dict__["__torch_dispatch__"] = MethodType(_dispatch, mode)
    return mode


@compat.unseen_by_dynamo
def _dispatch(mode: compat.FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    way = _way(func)
    if way is not _Way.LONG and all(kind is compat.FunctionalTensor for kind in types):
        with compat.unwatched():
            if not _any_written([*args, *kwargs.values()] if kwargs else args):
                result = compat.call_functionalized(func, _inside(args), _inside(kwargs) if kwargs else {})
                result = _outside(result, mode)
                # Autograd takes the conjugate of a Python number, which has no memory.
                if way is _Way.VIEWS and isinstance(args[0], torch.Tensor):
                    compat.share_storage(result, args[0])
                return result
    elif func is torch.ops.prim.device.default and not kwargs and compat.is_fake_tensor(args[0]):
        return args[0].fake_device
    elif is_custom_writer(func) and all(kind in compat.PLAIN_TYPES for kind in types):
        with compat.unwatched():
            return call_custom_writer(mode, partial(_the_long_way, mode, func, types), func, args, kwargs)
    return _the_long_way(mode, func, types, args, kwargs)


def _outside(result: Any, mode: compat.FunctionalTensorMode) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_outside(item, mode) for item in result)
    if isinstance(result, torch.Tensor) and compat.is_inner_wrapper(result):
        return compat.FunctionalTensor(result, mode)
    return result


def _inside(value: Any) -> Any:
    kind = type(value)
    if kind is compat.FunctionalTensor:
        return value.elem
    if kind is tuple or kind is list:
        return kind([_inside(item) for item in value])
    if kind is dict:
        return {name: _inside(item) for name, item in value.items()}
    return value


def _any_written(values: Iterable[Any]) -> bool:
    for value in values:
        if type(value) is compat.FunctionalTensor:
            if compat.count_data_mutations(value.elem):
                return True
        elif isinstance(value, list | tuple) and _any_written(value):
            return True
    return False


@lru_cache(maxsize=4096)
def _way(func: Any) -> _Way:
    """What the schema of an operator says about all its calls."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return _Way.LONG
    if func in compat.FunctionalTensor.metadata_fns or func is torch.ops.aten.lift_fresh.default:
        return _Way.LONG
    if func._can_decompose():
        return _Way.LONG
    unsafe = {torch.Tag.maybe_aliasing_or_mutating, torch.Tag.inplace_view} & set(func.tags)
    if unsafe or func._schema.is_mutable or compat.has_effects(func):
        return _Way.LONG
    arguments, returns = func._schema.arguments, func._schema.returns
    if not any(value.alias_info for value in (*arguments, *returns)):
        return _Way.COMPUTES
    tensors = [value for value in arguments if "Tensor" in str(value.type)]
    is_view = len(tensors) == len(returns) == 1 and tensors[0] is arguments[0] and str(tensors[0].type) == "Tensor"
    return _Way.VIEWS if is_view and str(returns[0].type) == "Tensor" and returns[0].alias_info else _Way.LONG
