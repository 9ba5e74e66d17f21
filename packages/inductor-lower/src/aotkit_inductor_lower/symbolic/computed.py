"""Sizes that the host computes with floats, before anything runs.

Note [Computed sizes]
    Index expressions are integer arithmetic, and exact. ``int(n * 1.7)`` has no form in them; it becomes a SIZE symbol
    of its own, whose value the host computes in double precision as Python would, when it reads the other sizes. To
    kernels, to those of a GPU, too, it is a number like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from .._float_sizes import ROUNDED, rounded_float
from .._size_text import evaluate_tree, parse_size, write_size
from .expr import Expr, Symbol, SymbolKind, sym
from .sympy_bridge import NameOf, UnsupportedExpression, from_symint

if TYPE_CHECKING:
    import sympy

__all__ = ["ComputedSizes", "with_computed"]


class ComputedSizes:
    """The sizes of a graph that are computed with floats, in the order in which they are met. ``texts``: by the names
    of their symbols."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._known: dict[sympy.Expr, Expr] = {}

    def convert(
        self, expression: sympy.Expr, name_of: Callable[[str], str | Expr], signed: Callable[[sympy.Expr], bool]
    ) -> Expr:
        """As :func:`.sympy_bridge.from_symint`, with symbols for what floats are rounded to. ``signed``: whether such
        a size may be negative."""
        from sympy import Symbol as Unknown

        names: dict[str, str | Expr] = {}
        stand_ins: dict[sympy.Expr, sympy.Expr] = {}
        for part in self._outermost(expression, name_of):
            stand_in = Unknown(f"computed_{len(names)}", integer=True)
            stand_ins[part], names[stand_in.name] = stand_in, self._symbol(part, name_of, signed)

        def name_or_computed(name: str) -> str | Expr:
            return names[name] if name in names else name_of(name)

        return from_symint(expression.xreplace(stand_ins), name_or_computed)

    def _outermost(self, expression: sympy.Expr, name_of: NameOf) -> list[sympy.Expr]:
        """The parts that have no form as integer expressions."""
        if type(expression).__name__ in ROUNDED:
            try:
                from_symint(expression, name_of)
            except UnsupportedExpression:
                return [expression]
            return []
        found = [part for arg in expression.args for part in self._outermost(arg, name_of)]
        return list(dict.fromkeys(found))

    def _symbol(
        self, part: sympy.Expr, name_of: Callable[[str], str | Expr], signed: Callable[[sympy.Expr], bool]
    ) -> Expr:
        if part not in self._known:
            tree = rounded_float(part, lambda inside: parse_size(str(self.convert(inside, name_of, signed))))
            if tree is None:
                raise UnsupportedExpression(
                    f"the size expression {part} has floats whose order of rounding is not known"
                )
            text = write_size(tree)
            if signed(part):
                above, below = (self._add(write_size(parse_size(f"max({s}({text}), 0)"))) for s in ("", "-"))
                self._known[part] = above - below
            else:
                self._known[part] = self._add(text)
        return self._known[part]

    def _add(self, text: str) -> Expr:
        name = f"computed{len(self.texts)}"
        self.texts[name] = text
        return sym(name, SymbolKind.SIZE)


def with_computed(computed: Iterable[tuple[str, str]], env: Mapping[Symbol, int]) -> dict[Symbol, int]:
    """The values of size symbols, with those of computed ones."""
    values: dict[str, int] = {str(symbol): value for symbol, value in env.items()}
    for name, text in computed:
        values[f"${name}"] = evaluate_tree(parse_size(text), values)
    return {Symbol(name[1:], SymbolKind.SIZE): value for name, value in values.items()}
