"""Sizes, strides and offsets as text over the graph's symbols: checked, evaluated, rendered as Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from .contract import Dim
from .errors import PlanError

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow)
_FUNCTIONS = {"min": min, "max": max}
# Locals of emitted code (see emit.py); a symbol of such a name would overwrite one.
_RESERVED = re.compile(r"^(_.*|(in|base|fw|out|tg)\d+|args|box|result|grads|grad|ctx|run|torch|min|max)$")


def check_symbol_name(name: str) -> None:
    """Refuse a symbol name that is no identifier or that emitted code uses for itself."""
    if not name.isidentifier() or _RESERVED.match(name):
        raise PlanError(f"symbol name {name!r} cannot be used in generated code; name it s0, s1, .. in the metadata")


def symbols_of(dims: Iterable[Dim]) -> set[str]:
    """Names of the symbols that occur in ``dims``."""
    return {name for dim in dims if isinstance(dim, str) for name in _names(_parse(dim))}


def render(dim: Dim) -> str:
    """Python source of one dimension; refuses everything but integer arithmetic over names."""
    if isinstance(dim, int):
        return str(int(dim))
    return ast.unparse(_parse(dim))


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


def _parse(text: str) -> ast.expr:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise PlanError(f"{text!r} is not a size expression: {error.msg}") from error
    _check(tree, text)
    return tree


def _check(node: ast.expr, text: str) -> None:
    """The text may come from a file: nothing but integers, names, arithmetic, min and max gets through."""
    match node:
        case ast.Constant(value=int()):
            return
        case ast.Name(id=name):
            check_symbol_name(name)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            _check(left, text)
            _check(right, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and len(args) >= 2:
            for arg in args:
                _check(arg, text)
        case _:
            raise PlanError(
                f"{ast.unparse(node)!r} in the size expression {text!r} is not supported; "
                "write it with integers, symbols, + - * // % **, min and max"
            )


def _names(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.BinOp(left=left, right=right):
            return _names(left) | _names(right)
        case ast.UnaryOp(operand=operand):
            return _names(operand)
        case ast.Call(args=args):
            return set().union(*(_names(arg) for arg in args))
    return set()


def _evaluate(node: ast.expr, symbols: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            if name not in symbols:
                raise PlanError(f"symbol {name!r} is used but bound from no input")
            return symbols[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, symbols)
        case ast.Call(func=ast.Name(id=name), args=args):
            return int(_FUNCTIONS[name](_evaluate(arg, symbols) for arg in args))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, symbols), _evaluate(right, symbols)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b
                case ast.Mod():
                    return a % b
                case ast.Pow():
                    return int(a**b)
    raise PlanError(f"{ast.unparse(node)!r} cannot be evaluated")
