"""What a compiled graph assumes about symbolic sizes: written with an entry, checked and installed again on a hit.

Note [Guards of an entry]
    While a graph with symbolic sizes is traced, torch notes each fact that was relied on in the shape environment, and
    Dynamo turns these into guards. A cache hit traces nothing, so the facts travel with the entry, as trees of the
    language of sizes (see Note [Sizes as text]) over the inputs' symbols: trees, and not their text, since a hit
    evaluates them and would have to read the text first. On a lookup they are evaluated first for the sizes
    at hand: where one does not hold, the entry is for other sizes and the next one of the same key is looked at. Then
    they are evaluated on the symbols themselves, which notes them in the environment as tracing would have done.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from aotkit_cache import Uncacheable

from .._float_sizes import float_tree, rounded_float, under_whole_root
from .._size_text import OPERATIONS, Tree, evaluate_tree

__all__ = ["Names", "evaluate", "guards_hold", "guards_of", "install_guards", "ranges_of", "tree_of"]


@dataclass(slots=True)
class Names:
    """Symbols of a shape environment, numbered in the order in which the inputs show them.

    Attributes:
        numbers: name of a symbol to its number, ``{"s77": "d0"}``.
        values: number to the SymInt or SymFloat that is this symbol and nothing else, where an input shows one.
    """

    numbers: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def text(self, value: Any) -> str:
        """A canonical text of a symbolic size; symbols that are new get the next number."""
        expr = value.node.expr
        for symbol in sorted(getattr(expr, "free_symbols", ()), key=str):
            if not value.node.has_hint():
                raise Uncacheable("a size of an input depends on the data of a tensor")
            number = self.numbers.setdefault(str(symbol), f"d{len(self.numbers)}")
            if symbol is expr:
                self.values.setdefault(number, value)
        return _text(tree_of(expr, self.numbers))

    def json(self, value: Any) -> Any:
        """The tree of a size, symbolic or not, whose symbols are known."""
        return tree_of(value.node.expr, self.numbers) if isinstance(value, torch.SymInt) else int(value)

    def hints(self) -> dict[str, Any] | None:
        """The plain numbers that the symbols stand for right now; ``None`` if a symbol occurs in expressions only."""
        if len(self.values) < len(self.numbers):
            return None
        return {number: value.node.hint for number, value in self.values.items()}


_NUMBERS = frozenset(("Integer", "Zero", "One", "NegativeOne", "Half", "Rational"))
_PLAIN = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "Mod": "%", "PythonMod": "%", "CleanDiv": "//",
    "Max": "max", "Min": "min",
    "Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">",
    "GreaterThan": ">=", "Not": "not", "And": "and", "Or": "or",
}  # fmt: skip
_FLOATS = frozenset(("Add", "Mul", "ToFloat", "IntTrueDiv", "FloatTrueDiv", "FloatPow", "OpaqueUnaryFn_sqrt"))


def tree_of(expr: Any, names: Mapping[str, str]) -> Tree:
    """A sympy expression over known symbols as a tree. Raises :class:`Uncacheable` for any other."""
    kind = type(expr).__name__
    if getattr(expr, "is_Symbol", False):
        if expr.name not in names:
            raise Uncacheable(f"a size depends on the symbol {expr.name}, which is none of the graph's inputs")
        return names[expr.name]
    if kind in ("BooleanTrue", "BooleanFalse"):
        return bool(expr)
    if kind in _NUMBERS and getattr(expr, "is_Integer", False):
        return int(expr)
    if getattr(expr, "is_Float", False):
        return float(expr)
    if kind == "Pow" and getattr(expr.args[1], "is_Integer", False) and int(expr.args[1]) > 0:
        return ["*", *[tree_of(expr.args[0], names)] * int(expr.args[1])]
    square = under_whole_root(expr)
    if square is not None:
        return ["isqrt", tree_of(square, names)]
    with_floats = rounded_float(expr, lambda inside: tree_of(inside, names))
    if kind in _FLOATS and expr.is_integer is not True:
        with_floats = float_tree(expr, lambda inside: tree_of(inside, names))
    if with_floats is not None:
        return with_floats
    if kind not in _PLAIN or (kind in _FLOATS and expr.is_integer is not True):
        raise Uncacheable(f"a size is the expression {expr}, in which {kind} has no stored form")
    return [_PLAIN[kind], *(tree_of(arg, names) for arg in expr.args)]


def guards_of(shape_env: Any, names: Names, in_names: Callable[[Any], Any] | None = None) -> list[Any]:
    """Every fact noted about the symbols in ``names``. Raises :class:`Uncacheable` where one has no stored form.
    ``in_names``: writes other symbols with those.

    A symbol that torch has replaced by an expression, since two sizes were found equal, is none of an input's any more.
    What was noted about sizes that depend on data is no guard: the compiled graph checks it whenever it runs.
    """
    if shape_env is None or not names.numbers:
        return []
    found = []
    for guard in shape_env.guards:
        expr = guard.expr if in_names is None else in_names(shape_env.replace(guard.expr))
        symbols = {str(symbol) for symbol in expr.free_symbols}
        if not symbols & names.numbers.keys():
            continue
        if not symbols <= names.numbers.keys():
            expr = shape_env.replace(expr)
        found.append(tree_of(expr, names.numbers))
    return [json.loads(text) for text in dict.fromkeys(map(_text, found))]


def _text(expression: Any) -> str:
    return json.dumps(expression, separators=(",", ":"))


def ranges_of(shape_env: Any, names: Names) -> dict[str, tuple[str, str]]:
    """The ranges of the symbols in ``names`` as they are now, as text."""
    if shape_env is None or not names.numbers:
        return {}
    by_name = {str(symbol): bounds for symbol, bounds in shape_env.var_to_range.items()}
    return {
        number: (str(by_name[name].lower), str(by_name[name].upper))
        for name, number in names.numbers.items()
        if name in by_name
    }


def guards_hold(guards: Sequence[Any], values: Mapping[str, Any]) -> bool:
    """Whether the facts hold for these values of the symbols (plain numbers)."""
    try:
        return all(evaluate(guard, values) for guard in guards)
    except ZeroDivisionError:  # what divides by a size holds for sizes of which it can be computed
        return False


def install_guards(guards: Sequence[Any], symbols: Mapping[str, Any]) -> None:
    """Note the facts, which hold, about these symbols (SymInts) in their shape environment.

    Most of them Dynamo has noted already; to ask again would cost seconds where sizes are long expressions.
    """
    environment = next((value.node.shape_env for value in symbols.values()), None)
    names = {str(value.node.expr): number for number, value in symbols.items()}
    noted = {_text(known) for known in _noted(environment, names)}
    for guard in guards:
        if _text(guard) not in noted:
            bool(evaluate(guard, symbols))


def _noted(environment: Any, names: Mapping[str, str]) -> Iterator[Any]:
    """The facts in a shape environment that have a stored form."""
    for guard in environment.guards if environment is not None else ():
        try:
            yield tree_of(guard.expr, names)
        except Uncacheable:  # about symbols that the graph does not know
            continue


def _largest(*values: Any) -> Any:
    return reduce(torch.sym_max, values)


def _smallest(*values: Any) -> Any:
    return reduce(torch.sym_min, values)


def _whole_root(value: Any) -> Any:
    return math.isqrt(value) if isinstance(value, int) else torch.sym_int(value**0.5)


# As OPERATIONS, and of SymInts and SymFloats what gives the same expressions again.
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **OPERATIONS, "max": _largest, "min": _smallest, "isqrt": _whole_root,
    "float": torch.sym_float, "sqrt": torch.sym_sqrt, "pow": operator.pow, "trunc": torch.sym_int,
}  # fmt: skip


def evaluate(tree: Tree, values: Mapping[str, Any]) -> Any:
    """The value of a tree for plain numbers or for SymInts."""
    return evaluate_tree(tree, values, _OPERATIONS)
