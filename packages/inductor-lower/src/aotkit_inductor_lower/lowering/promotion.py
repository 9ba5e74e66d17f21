"""Result types of mixed operands, as eager decides them, and the type to compute in."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..errors import Fallback
from ..ir import DType
from ..ops.dtypes import from_torch_dtype
from ..symbolic import Expr
from .values import FloatExpr, View

__all__ = ["compute_dtype", "float_result", "ir_dtype", "promote", "refuse_narrowing", "refuse_overflow"]

_RANK = {torch.bool: 0}


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else _RANK.get(dtype, 1)


def _join(a: torch.dtype | None, b: torch.dtype) -> torch.dtype:
    return b if a is None else torch.promote_types(a, b)


def promote(operands: Iterable[object]) -> torch.dtype:
    """The common type of views, Python numbers and integer expressions: tensors with dimensions decide, unless a
    0-d tensor or a number is of a higher kind (bool < int < float < complex)."""
    groups: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, View):
            place = 0 if operand.sizes else 1
            groups[place] = _join(groups[place], operand.dtype)
        else:
            groups[2] = _join(groups[2], _number_dtype(operand))
    result: torch.dtype | None = None
    for group in groups:
        if group is None:
            continue
        if result is None or _category(group) > _category(result):
            result = group
    if result is None:
        raise TypeError("no operands to promote")
    if _category(result) == 2 and groups[0] is None and groups[1] is None:
        return torch.get_default_dtype()
    return result


def _number_dtype(value: object) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int | Expr):
        return torch.int64
    if isinstance(value, float | FloatExpr):
        return torch.get_default_dtype()
    raise TypeError(f"not a number: {value!r}")


def float_result(dtype: torch.dtype) -> torch.dtype:
    """The type of ``exp`` and its like: integers become the default float type."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def ir_dtype(dtype: torch.dtype) -> DType:
    """The loop IR's type. Raises ``TypeError`` for types that generated code cannot hold."""
    found = from_torch_dtype(dtype)
    if found is None:
        raise TypeError(f"generated code has no {dtype}")
    return found


def compute_dtype(dtype: torch.dtype) -> DType:
    """The type arithmetic on ``dtype`` is done in: f32 for float16 and bfloat16, else the type itself."""
    found = ir_dtype(dtype)
    return DType.F32 if found in (DType.F16, DType.BF16) else found


def refuse_narrowing(dtype: torch.dtype, number: object) -> None:
    """Raises :class:`Fallback` for a tensor taken as a number, of a type with numbers that do not fit ``dtype``: ATen
    looks at the number, and refuses those."""
    if not isinstance(number, View) or number.dtype is dtype or not _narrows(number.dtype, dtype):
        return
    raise Fallback(f"whether a tensor of {number.dtype} is a number that fits {dtype} is left to ATen")


def _narrows(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a type has finite numbers beyond another one, or fractions, or a sign (small negative integers wrap)."""
    if given.is_complex or dtype.is_complex:
        return given.is_complex
    if torch.bool in (given, dtype):
        return False
    if given.is_floating_point and not dtype.is_floating_point:
        return True
    limits = [torch.finfo(t) if t.is_floating_point else torch.iinfo(t) for t in (given, dtype)]
    return limits[0].max > limits[1].max


def refuse_overflow(dtype: torch.dtype, *numbers: object) -> None:
    """Raises :class:`Fallback` for Python numbers that do not fit ``dtype``: ATen refuses them."""
    if dtype is torch.bool:
        return
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low = -limits.max if dtype is torch.uint8 else limits.min
    for number in numbers:
        if not isinstance(number, int | float) or low <= number <= limits.max:
            continue
        if math.isfinite(number) or not dtype.is_floating_point:
            raise Fallback(f"a number that does not fit {dtype} is left to ATen, which refuses it")
