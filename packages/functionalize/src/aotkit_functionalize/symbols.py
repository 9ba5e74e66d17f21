"""Sizes as text over symbols, and where each symbol's value is read at run time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ._float_sizes import rounded_float, under_whole_root
from .errors import Unsupported
from .records import Dim, SymbolBinding, TensorMeta

__all__ = ["bind_symbols", "dim", "dims", "is_symbolic", "tensor_meta", "used_symbols"]


def dim(size: int | torch.SymInt) -> Dim:
    """``size`` as an int, or as the text of its expression (Python syntax: ``// % min max isqrt``, and ``float / sqrt
    pow trunc floor ceil round`` where floats are rounded)."""
    if isinstance(size, int):
        return int(size)
    expr = size.node.expr
    return int(expr) if expr.is_number else _text(expr)


def dims(sizes: Iterable[int | torch.SymInt]) -> tuple[Dim, ...]:
    """:func:`dim` of each."""
    return tuple(dim(size) for size in sizes)


def is_symbolic(size: int | torch.SymInt) -> bool:
    """Whether ``size`` may differ from call to call."""
    return isinstance(dim(size), str)


def tensor_meta(
    value: torch.Tensor, *, requires_grad: bool | None = None, bits: tuple[bool, bool] | None = None
) -> TensorMeta:
    """The record of one strided tensor; ``requires_grad`` and ``bits`` (conj, neg) replace the tensor's own."""
    conj, neg = bits or (value.is_conj(), value.is_neg())
    return TensorMeta(
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
        sizes=dims(value.shape),
        strides=dims(value.stride()),
        storage_offset=dim(value.storage_offset()),
        requires_grad=value.requires_grad if requires_grad is None else requires_grad,
        conj=conj,
        neg=neg,
    )


def bind_symbols(flat_args: Sequence[Any]) -> tuple[SymbolBinding, ...]:
    """Where the value of each symbol is found among the flat arguments: first SymInts, then sizes, then strides."""
    found: dict[str, SymbolBinding] = {}

    def offer(value: Any, index: int, source: str, position: int | None = None) -> None:
        if not isinstance(value, torch.SymInt):
            return
        # A symbol may be found to equal another, or a number, between two records: each of its names is bound.
        for expr in (value.node.expr, value.node._expr):
            if expr.is_symbol:
                found.setdefault(str(expr), SymbolBinding(str(expr), index, source, position))

    for index, value in enumerate(flat_args):
        offer(value, index, "int")
    tensors = [(i, a) for i, a in enumerate(flat_args) if isinstance(a, torch.Tensor) and a.layout is torch.strided]
    for source in ("size", "stride"):
        for index, tensor in tensors:
            for position, size in enumerate(tensor.shape if source == "size" else tensor.stride()):
                offer(size, index, source, position)
    for index, tensor in tensors:
        offer(tensor.storage_offset(), index, "storage_offset")
    return tuple(found[name] for name in sorted(found))


def used_symbols(sizes: Iterable[int | torch.SymInt]) -> set[str]:
    """Names of the symbols in ``sizes``."""
    return {str(s) for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


_ATOM, _UNARY, _PRODUCT, _SUM = 3, 2, 1, 0


def _text(expr: Any) -> str:
    return _render(expr)[0]


def _render(expr: Any) -> tuple[str, int]:
    """Text of a sympy expression over integers, and how tightly its outermost operator binds."""
    name = type(expr).__name__
    if expr.is_Symbol:
        return str(expr), _ATOM
    if expr.is_Integer:
        return (str(int(expr)), _ATOM) if expr >= 0 else (str(int(expr)), _UNARY)
    if expr.is_Add:
        return " + ".join(_wrap(a, _PRODUCT) for a in expr.args), _SUM
    if expr.is_Mul and all(a.is_integer is not False for a in expr.args):
        return "*".join(_wrap(a, _UNARY) for a in expr.args), _PRODUCT
    if expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
        return "*".join([_wrap(expr.args[0], _UNARY)] * int(expr.args[1])), _PRODUCT
    if name in ("FloorDiv", "CleanDiv"):
        return f"{_wrap(expr.args[0], _ATOM)}//{_wrap(expr.args[1], _ATOM)}", _SUM
    if name in ("Mod", "PythonMod"):
        return f"{_wrap(expr.args[0], _ATOM)} % {_wrap(expr.args[1], _ATOM)}", _SUM
    if name == "ModularIndexing":
        base, divisor, modulus = (_wrap(a, _ATOM) for a in expr.args)
        return f"({base}//{divisor}) % {modulus}", _SUM
    if name in ("Max", "Min"):
        return f"{name.lower()}({', '.join(_text(a) for a in expr.args)})", _ATOM
    if name == "Abs":
        return f"max({_text(expr.args[0])}, {_text(-expr.args[0])})", _ATOM
    square = under_whole_root(expr)
    if square is not None:
        return f"isqrt({_text(square)})", _ATOM
    whole = _rounded_quotient(expr)
    if whole is not None:
        return _render(whole)
    with_floats = rounded_float(expr, _as_operand)
    if with_floats is not None:
        return _call_text(with_floats), _ATOM
    raise Unsupported(
        f"a size is {expr}",
        f"{name} has no form in the metadata, which knows + - * // % min, max and isqrt over integers, and of floats "
        "what Python computes in one order",
        "Compute the size with these, or compile with static shapes",
    )


def _as_operand(expr: Any) -> str:
    """An expression over integers, among floats."""
    if expr.is_integer is not True:
        raise Unsupported(f"a size depends on {expr}", "that is a float", "Compute the size with integers")
    return _wrap(expr, _ATOM)


def _call_text(tree: Any) -> str:
    """The text of a tree of floats, whose operands are numbers and texts, all of it in parentheses."""
    if not isinstance(tree, tuple):
        return repr(tree) if isinstance(tree, float) else str(tree)
    sign, *operands = [tree[0], *map(_call_text, tree[1:])]
    if sign in ("+", "*", "/"):
        return f"({f' {sign} '.join(operands)})"
    return f"{sign}({', '.join(operands)})"


def _rounded_quotient(expr: Any) -> Any:
    """``TruncToInt(0.5*ToFloat(s))`` and its kind as a sympy expression over integers; ``None`` where floats round.

    Note [Floats between sizes]
        ``int(n * 0.75)`` (a scale factor of an interpolation) is written with floats in the shape environment. It is
        ``n * 3 // 4`` exactly as long as Python's floats are exact: sums and products of sizes and numbers with few
        bits are; and one division of integers below 2**52, which rounds, never rounds up to a whole number. With any
        other factor (0.7 times 10 is 7.0 in floats and less than 7 in truth) there is no such expression.
    """
    name = type(expr).__name__
    value = _quotient(expr.args[0]) if name in ("TruncToInt", "FloorToInt", "CeilToInt") else None
    if value is None:
        return None
    from torch.utils._sympy.functions import FloorDiv, Max

    numerator, denominator = value.as_numer_denom()
    if not denominator.is_positive:  # of either sign, as an integer argument may be
        if name == "TruncToInt":
            return None
        return FloorDiv(numerator, denominator) if name == "FloorToInt" else -FloorDiv(-numerator, denominator)
    if name == "CeilToInt":
        return -FloorDiv(-numerator, denominator)
    if name == "FloorToInt" or numerator.is_nonnegative:
        return FloorDiv(numerator, denominator)
    return FloorDiv(Max(numerator, 0), denominator) - FloorDiv(Max(-numerator, 0), denominator)


def _quotient(expr: Any) -> Any:
    """The rational number that a float rounds once at most; ``None`` if it may be rounded before."""
    if type(expr).__name__ == "IntTrueDiv":
        return expr.args[0] / expr.args[1]
    if type(expr).__name__ != "FloatTrueDiv":
        return _exact(expr)
    above, below = map(_exact, expr.args)
    return None if above is None or below is None else above / below


def _exact(expr: Any) -> Any:
    """The rational number that a float is, computed from one size and numbers of few bits; else ``None``."""
    if expr.is_integer:
        return expr
    if type(expr).__name__ == "ToFloat":
        return expr.args[0]
    if expr.is_Float:
        from sympy import Rational

        p, q = float(expr).as_integer_ratio()
        return Rational(p, q) if max(abs(p), q) <= 1 << 10 else None
    if len(expr.args) != 2 or not (expr.is_Add or (expr.is_Mul and expr.args[0].is_number)):
        return None
    parts = [_exact(arg) for arg in expr.args]
    return None if None in parts else expr.func(*parts)


def _wrap(expr: Any, at_least: int) -> str:
    text, tightness = _render(expr)
    return text if tightness >= at_least else f"({text})"
