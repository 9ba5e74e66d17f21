"""Sizes, strides and offsets as text over the graph's symbols: checked, evaluated, rendered as Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._size_text import (
    FUNCTIONS,
    OPERATIONS,
    ROUNDING,
    SizeTextError,
    Tree,
    evaluate_tree,
    parse_size,
    symbols_in,
    write_size,
)
from .contract import Dim
from .errors import PlanError

_INTEGERS = ("+", "-", "*", "//", "%", "neg", "min", "max", "isqrt", *ROUNDING)
_FLOATS = frozenset({"+", "-", "*", "/", "neg", "min", "max", "float", "sqrt", "pow"})  # under one of ROUNDING
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: OPERATIONS[name] for name in (*_INTEGERS, *_FLOATS)},
    "**": lambda base, exponent: int(base**exponent),
}
# Locals of emitted code (see emit.py); a symbol of such a name would overwrite one.
_RESERVED = re.compile(
    r"^(_.*|(in|base|fw|out|tg)\d+|args|box|result|grads|grad|ctx|run|torch|"
    f"{'|'.join(sorted(FUNCTIONS))})$"
)


def check_symbol_name(name: str) -> None:
    """Refuse a symbol name that is no identifier or that emitted code uses for itself."""
    if not name.isidentifier() or _RESERVED.match(name):
        raise PlanError(f"symbol name {name!r} cannot be used in generated code; name it s0, s1, .. in the metadata")


def symbols_of(dims: Iterable[Dim]) -> set[str]:
    """Names of the symbols that occur in ``dims``."""
    return {name for dim in dims if isinstance(dim, str) for name in symbols_in(_parse(dim))}


def render(dim: Dim) -> str:
    """Python source of one dimension; refuses everything but integer arithmetic over names."""
    if isinstance(dim, int):
        return str(int(dim))
    return write_size(_parse(dim))


def render_tuple(dims: Iterable[Dim]) -> str:
    """Python source of a tuple of dimensions."""
    parts = [render(dim) for dim in dims]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Value of one dimension when ``symbols`` have these values."""
    return int(dim) if isinstance(dim, int) else _evaluate(_parse(dim), symbols)


def evaluate_all(dims: Iterable[Dim], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Values of several dimensions."""
    return tuple(evaluate(dim, symbols) for dim in dims)


def _parse(text: str) -> Tree:
    try:
        tree = parse_size(text)
    except SizeTextError as error:
        raise PlanError(f"{text!r} is not a size expression: {error}") from error
    _check(tree, text)
    return tree


def _check(tree: Tree, text: str, of_floats: bool = False) -> None:
    """The text may come from a file: nothing but integers, names, arithmetic and functions of these gets through, and
    floats only where they are rounded to integers."""
    if isinstance(tree, str):
        check_symbol_name(tree)
    elif isinstance(tree, tuple) and tree[0] in (_FLOATS if of_floats else (*_INTEGERS, "**")):
        inside = tree[0] in ROUNDING or (of_floats and tree[0] != "float")
        for operand in tree[1:]:
            _check(operand, text, inside)
    elif of_floats and isinstance(tree, tuple):
        _check(tree, text)
    elif type(tree) is not int and not (of_floats and type(tree) is float):
        raise PlanError(
            f"{write_size(tree)!r} in the size expression {text!r} is not supported; "
            "write it with integers, symbols, + - * // % **, min, max and isqrt, and floats that are rounded"
        )


def _evaluate(tree: Tree, symbols: Mapping[str, int]) -> int:
    try:
        value: int = evaluate_tree(tree, symbols, _OPERATIONS)
    except KeyError as error:
        raise PlanError(f"symbol {error.args[0]!r} is used but bound from no input") from None
    return value
