"""Symbolic sizes as data: sympy expressions become nested JSON lists, and come back without any parser.

Note [Symbols by name]
Inside one compile the forward and backward graphs must keep talking about the very symbols of the compile's shape
environment, so with the original environment at hand a symbol is looked up by its name. In another process there is
no such environment: then every symbol is declared anew, under the same name, with its assumptions, range and hint.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from .._torch_compat import backed_hints, declare_symbol, known_symbols, symbolic_hint
from ..errors import GraphFormatError, UnserializableGraphError

_SYMPY_HEADS = (
    "Add Mul Pow Eq Ne Lt Le Gt Ge And Or Not Min Max Abs ITE Piecewise ExprCondPair Unequality Equality "
    "StrictLessThan LessThan StrictGreaterThan GreaterThan floor ceiling"
)
_TORCH_HEADS = (
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift Min Max "
    "PowByNatural FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt "
    "RoundToInt RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or "
    "BitwiseFn_bitwise_xor OpaqueUnaryFn_sqrt OpaqueUnaryFn_log2 OpaqueUnaryFn_exp OpaqueUnaryFn_log"
)
_HEADS: dict[str, Any] = {}
for _name in _SYMPY_HEADS.split():
    if _name not in ("ExprCondPair",):
        _HEADS[f"sympy.{_name}"] = getattr(sympy, _name)
_HEADS["sympy.ExprCondPair"] = sympy.functions.elementary.piecewise.ExprCondPair
for _name in _TORCH_HEADS.split():
    if hasattr(torch_functions, _name):
        _HEADS[f"torch.{_name}"] = getattr(torch_functions, _name)
_HEAD_NAMES: dict[Any, str] = {head: name for name, head in _HEADS.items()}
_CONSTANTS: dict[str, Any] = {
    "oo": sympy.oo,
    "-oo": -sympy.oo,
    "int_oo": int_oo,
    "-int_oo": -int_oo,
    "true": sympy.true,
    "false": sympy.false,
}

_KINDS: dict[type, str] = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}


class SymbolWriter:
    """Collects the symbols and expressions of one document; each distinct expression is written once."""

    def __init__(self) -> None:
        self._index: dict[tuple[str, Any], int] = {}
        self.rows: list[list[Any]] = []
        self.symbols: dict[str, dict[str, Any]] = {}

    def write_value(self, value: Any) -> Any:
        """A symbolic number as ``{"sym": row}``; a constant in symbolic clothes as the plain number it is."""
        expression = value.node.expr
        if isinstance(value, torch.SymInt) and isinstance(expression, sympy.Integer):
            return int(expression)
        return {"sym": self.write(value)}

    def write(self, value: Any) -> int:
        """Row number of a SymInt, SymFloat or SymBool."""
        kind = _KINDS[type(value)]
        expression = value.node.expr
        key = (kind, expression)
        found = self._index.get(key)
        if found is None:
            env = value.node.shape_env
            row = [kind, self._expression(expression, env), symbolic_hint(value)]
            found = self._index[key] = len(self.rows)
            self.rows.append(row)
        return found

    def symbol_name(self, symbol: Any, shape_env: Any) -> str:
        """Declare ``symbol`` and return its name."""
        if symbol.name not in self.symbols:
            bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
            hint = backed_hints(shape_env).get(symbol) if shape_env is not None else None
            self.symbols[symbol.name] = {
                "assumptions": dict(sorted(symbol._assumptions_orig.items())),
                "range": None if bounds is None else [self._plain(bounds.lower), self._plain(bounds.upper)],
                "hint": None if hint is None else self._plain(hint),
            }
        return str(symbol.name)

    def _plain(self, number: Any) -> Any:
        return number if isinstance(number, (int, float)) else self._expression(number, None)

    def _expression(self, expression: Any, shape_env: Any) -> Any:
        if isinstance(expression, sympy.Symbol):
            return self.symbol_name(expression, shape_env)
        if isinstance(expression, sympy.Integer):
            return int(expression)
        for name, constant in _CONSTANTS.items():
            if expression is constant:
                return [name]
        if isinstance(expression, sympy.Float):
            return ["float", float(expression).hex()]
        if isinstance(expression, sympy.Rational):
            return ["rational", int(expression.p), int(expression.q)]
        head = _HEAD_NAMES.get(expression.func)
        if head is None:
            raise UnserializableGraphError(
                f"the size expression {expression} uses {expression.func.__name__}, which the graph text has no name "
                "for. Please report it with this expression."
            )
        return [head, *(self._expression(argument, shape_env) for argument in expression.args)]


class SymbolReader:
    """Rebuilds the SymInts of one document in a fake mode's shape environment; see Note [Symbols by name]."""

    def __init__(self, symbols: dict[str, dict[str, Any]], rows: list[list[Any]], fake_mode: FakeTensorMode) -> None:
        self._rows = rows
        self._declared = symbols
        self._env = fake_mode.shape_env
        self._symbols: dict[str, Any] = {}
        self._built: dict[int, Any] = {}
        if (rows or symbols) and self._env is None:
            raise GraphFormatError(
                "the graph has symbolic sizes; pass a fake_mode that has a shape environment, or none."
            )
        known = known_symbols(self._env) if self._env is not None else {}
        for name in symbols:
            self._symbols[name] = known[name] if name in known else self._declare(name)

    def read(self, index: int) -> Any:
        """The SymInt, SymFloat or SymBool of row ``index``; the same object each time."""
        found = self._built.get(index)
        if found is None:
            kind, data, hint = self._rows[index]
            expression = self.expression(data)
            assert self._env is not None
            if kind == "int":
                found = self._env.create_symintnode(expression, hint=hint)
            elif kind == "float":
                found = self._env.create_symfloatnode(expression, hint=hint)
            else:
                found = self._env.create_symboolnode(expression)
            self._built[index] = found
        return found

    def symbol(self, name: str) -> Any:
        """The sympy symbol called ``name``."""
        return self._symbols[name]

    def _declare(self, name: str) -> Any:
        facts = self._declared[name]
        symbol = sympy.Symbol(name, **facts["assumptions"])
        bounds = facts["range"]
        value_range = ValueRanges.unknown() if bounds is None else ValueRanges(*map(self.expression, bounds))
        hint = facts["hint"]
        number = None if hint is None else (float.fromhex(hint[1]) if isinstance(hint, list) else hint)
        declare_symbol(self._env, symbol, number, value_range)  # type: ignore[arg-type]
        return symbol

    def expression(self, data: Any) -> Any:
        """The sympy expression written as ``data``."""
        if isinstance(data, str):
            return self._symbols[data]
        if isinstance(data, int):
            return sympy.Integer(data)
        if isinstance(data, float):
            return sympy.Float(data)
        head, *arguments = data
        if not arguments and head in _CONSTANTS:
            return _CONSTANTS[head]
        if head == "float":
            return sympy.Float(float.fromhex(arguments[0]))
        if head == "rational":
            return sympy.Rational(*arguments)
        if head not in _HEADS:
            raise GraphFormatError(f"this version of the package knows no size function '{head}'.")
        return _HEADS[head](*map(self.expression, arguments))
