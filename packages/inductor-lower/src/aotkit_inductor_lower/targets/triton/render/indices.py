"""Index expressions as Triton text."""

from __future__ import annotations

from collections.abc import Callable

from ....kernel_ir.bounds import lower_bound
from ....symbolic import Call, Expr, Symbol

__all__ = ["expr_text", "identifier"]


def identifier(name: str) -> str:
    """``name`` as a Python identifier."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() else text


def expr_text(expr: Expr, symbol_text: Callable[[Symbol], str]) -> str:
    """``expr`` over integers. Triton divides towards zero, so what may be negative goes through device functions."""
    terms = []
    for monomial, factor in expr.terms:
        atoms = [symbol_text(a) if isinstance(a, Symbol) else _call_text(a, symbol_text) for a in monomial]
        if factor != 1 or not atoms:
            atoms.append(str(factor))
        terms.append(" * ".join(atoms))
    if not terms:
        return "0"
    return f"({' + '.join(terms)})" if len(terms) > 1 else terms[0]


def _call_text(call: Call, symbol_text: Callable[[Symbol], str]) -> str:
    args = [_operand(arg, symbol_text) for arg in call.args]
    if call.fn in ("floordiv", "mod"):
        if lower_bound(call.args[0]) < 0:
            return f"{'index_floor_divide' if call.fn == 'floordiv' else 'index_modulo'}({args[0]}, {args[1]})"
        return f"({args[0]} {'//' if call.fn == 'floordiv' else '%'} {args[1]})"
    if call.fn == "isqrt":
        return f"index_square_root({args[0]})"
    result = args[0]
    for arg in args[1:]:
        result = f"tl.{call.fn}imum({result}, {arg})"
    return result


def _operand(expr: Expr, symbol_text: Callable[[Symbol], str]) -> str:
    text = expr_text(expr, symbol_text)
    return f"({text})" if len(expr.terms) == 1 and " * " in text else text
