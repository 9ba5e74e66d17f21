"""Kernels on CPU tensors, in Triton's interpreter: what it lacks, in numpy and torch.

CUDA's libdevice is missing there, float16 and bfloat16 are rounded by truncation, and reductions with a function of
one's own go element by element. So those device functions are replaced here by the same functions on whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...errors import IndexOutOfRange
from ...ir import CONTRACTIONS
from ...ops.reductions import REDUCTIONS, Reduction, combine_tensors
from ...ops.scalar import MATH, OP_TABLE

__all__ = ["interpreter_functions", "interpreter_libm", "whole_number"]

Array = np.ndarray[Any, np.dtype[Any]]


def _tensor(data: Array, dtype: Any) -> Any:
    """An interpreter's tensor of ``data``."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    type_ = tl.block_type(dtype, list(data.shape)) if data.shape else dtype
    return tl.core.tensor(TensorHandle(data if data.shape else data.reshape(1), dtype), type_)


def whole_number(value: int) -> Any:
    """A size as the kernel on a device gets it: an i64, where the interpreter would take the type that fits."""
    import triton.language as tl

    return _tensor(np.asarray(value, dtype=np.int64), tl.int64)


def _lift(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A torch function of tensors as one of the interpreter's tensors, of the first one's type."""

    def run(*args: Any) -> Any:
        dtype = args[0].dtype.scalar
        data = [np.ascontiguousarray(a.handle.data).reshape(a.handle.data.shape) for a in args]
        result = function(*(torch.from_numpy(d.copy()) for d in data))
        return _tensor(np.asarray(result.numpy()), dtype)

    return run


class _Libm:
    """The functions of libdevice that kernels call."""


# Functions of libdevice that are no row's symbol.
_NAMES: dict[str, Callable[..., torch.Tensor]] = {
    "nearbyint": torch.round,
    "trunc": torch.trunc,
    "copysign": torch.copysign,
}


def interpreter_libm() -> object:
    """An object with the functions of ``libm``."""
    found = _Libm()
    functions = dict(_NAMES)
    functions.update((symbol.name, OP_TABLE[op].reference) for op, symbol in MATH.items())
    for name, function in functions.items():
        setattr(found, name, _lift(function))
    return found


def _reduction(run: Callable[[Array, int], Array]) -> Callable[[Any, Any], Any]:
    def reduce(x: Any, axis: Any) -> Any:
        data = x.handle.data
        found = run(data, int(getattr(axis, "value", axis)))
        return _tensor(np.asarray(found).astype(data.dtype), x.dtype.scalar)

    return reduce


# Scalar ops that numpy has a function of, which reduces.
_UFUNCS: dict[object, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    **dict.fromkeys(CONTRACTIONS.values(), np.multiply),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "logical_or": np.bitwise_or,  # bools are integers here
    "logical_and": np.bitwise_and,
}


def _reduced(row: Reduction) -> Callable[[Array, int], Array]:
    def reduce(x: Array, axis: int) -> Array:
        known = _UFUNCS.get(row.combine)
        if known is not None:
            return np.asarray(known.reduce(x, axis=axis, keepdims=True))
        data = torch.from_numpy(np.ascontiguousarray(x)).movedim(axis, -1)
        return row.reference(data).unsqueeze(-1).movedim(-1, axis).numpy()

    return reduce


def _scanned(row: Reduction) -> Callable[[Array, int], Array]:
    def scan(x: Array, axis: int) -> Array:
        known = _UFUNCS.get(row.combine)
        if known is not None:
            return np.asarray(known.accumulate(x, axis=axis))
        parts = list(torch.from_numpy(np.ascontiguousarray(x)).unbind(axis))
        for number in range(1, len(parts)):
            parts[number] = combine_tensors(row.kind, parts[number - 1], parts[number])
        return torch.stack(parts, axis).numpy()

    return scan


def _arg(lowest: bool) -> Callable[[Any, Any, Any], Any]:
    def reduce(x: Any, position: Any, axis: Any) -> Any:
        at = int(getattr(axis, "value", axis))
        data, places = np.broadcast_arrays(x.handle.data, position.handle.data)
        best = (np.min if lowest else np.max)(data, axis=at, keepdims=True)
        equal = (data == best) | ((data != data) & (best != best))
        last = np.iinfo(places.dtype).max
        return _tensor(np.where(equal, places, last).min(axis=at, keepdims=True), position.dtype.scalar)

    return reduce


def _squares(mean: Any, squares: Any, count: Any, axis: Any) -> Any:
    at = int(getattr(axis, "value", axis))
    means, n = mean.handle.data, count.handle.data
    common = (means * n).sum(axis=at, keepdims=True, dtype=np.float64) / n.sum(axis=at, keepdims=True)
    found = squares.handle.data + n * (means - common) ** 2
    return _tensor(found.sum(axis=at, keepdims=True).astype(means.dtype), mean.dtype.scalar)


def _fold_sum(x: Any, axis: Any) -> Any:
    data = x.handle.data.sum(axis=int(getattr(axis, "value", axis)))
    return _tensor(np.asarray(data, x.handle.data.dtype), x.dtype.scalar)


def _fold_max(x: Any, axis: Any) -> Any:
    data = np.fmax.reduce(x.handle.data, axis=int(getattr(axis, "value", axis)))
    return _tensor(np.asarray(data, x.handle.data.dtype), x.dtype.scalar)


def _dot(a: Any, b: Any, acc: Any) -> Any:
    """The interpreter's own takes the bits of a bfloat16 for an integer."""
    left, right = _numbers(a), _numbers(b)
    total = acc.handle.data + (left @ right).numpy()
    return _tensor(total.astype(acc.handle.data.dtype), acc.dtype.scalar)


def _dot_float8(a: Any, b: Any, acc: Any, first: Any, second: Any) -> Any:
    left, right = (
        torch.from_numpy(np.array(x.handle.data, order="C")).view(_FLOAT8[str(getattr(type_, "value", type_))]).float()
        for x, type_ in ((a, first), (b, second))
    )
    total = acc.handle.data + (left @ right).numpy()
    return _tensor(total.astype(acc.handle.data.dtype), acc.dtype.scalar)


_FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def _numbers(x: Any) -> torch.Tensor:
    data = torch.from_numpy(np.array(x.handle.data, order="C"))
    return (data.view(torch.bfloat16) if x.dtype.scalar.name == "bf16" else data).float()


def _f32_to_bf16(x: Any) -> Any:
    import triton.language as tl

    data = torch.from_numpy(np.ascontiguousarray(x.handle.data).reshape(x.handle.data.shape).copy())
    return _tensor(data.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def _f32_to_f16(x: Any) -> Any:
    import triton.language as tl

    return _tensor(x.handle.data.astype(np.float16), tl.float16)


def _check_index(value: Any, size: Any, mask: Any) -> Any:
    data = np.asarray(value.handle.data)
    bound = int(size.handle.data.item()) if hasattr(size, "handle") else int(getattr(size, "value", size))
    wrapped = np.where(data < 0, data + bound, data)
    good = (wrapped >= 0) & (wrapped < bound)
    bad = ~good & np.broadcast_to(mask.handle.data.astype(bool), data.shape)
    if bad.any():
        raise IndexOutOfRange(f"index {data[bad][0]} is out of bounds for dimension with size {bound}")
    return _tensor(np.where(good, wrapped, 0).astype(data.dtype), value.dtype.scalar)


def _atomic(name: str) -> Callable[[Any, Any, Any], None]:
    """The interpreter's own reads neither strides of its operands nor broadcasts."""

    def run(pointer: Any, value: Any, mask: Any) -> None:
        import triton.language as tl

        arrays = np.broadcast_arrays(pointer.handle.data, value.handle.data, mask.handle.data)
        full = [_tensor(np.ascontiguousarray(a), t.dtype.scalar) for a, t in zip(arrays, (pointer, value, mask))]
        getattr(tl, name)(full[0], full[1], mask=full[2])

    return run


def interpreter_functions() -> Mapping[str, Callable[..., Any]]:
    """Replacements of device functions, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for row in REDUCTIONS.values():
        if row.position_of:
            continue
        names = {row.name_in("triton", dtype) for dtype in row.domain}
        found.update((f"reduce_{name}", _reduction(_reduced(row))) for name in names)
        found.update((f"scan_{name}", _reduction(_scanned(row))) for name in names)
    found.update(reduce_argmin=_arg(True), reduce_argmax=_arg(False), check_index=_check_index)
    found.update(reduce_squares=_squares, fold_sum=_fold_sum, fold_max=_fold_max)
    found.update(dict.fromkeys(("dot", "dot_ieee", "dot_tf32"), _dot))
    found["dot_float8"] = _dot_float8
    found.update(f32_to_bf16=_f32_to_bf16, f32_to_f16=_f32_to_f16)
    found.update({name: _atomic(name) for name in ("atomic_add", "atomic_min", "atomic_max")})
    return found
