"""Integer index expressions and what can be proven about them."""

from .computed import ComputedSizes, with_computed
from .expr import Call, Expr, Symbol, SymbolKind, build_call, floordiv, isqrt, mod, smax, smin, sym, to_expr
from .ranges import Bounds, Ranges, bounds, estimate, prove_le, prove_lt, prove_nonnegative
from .simplify import contiguous_strides, has_calls, product, reshape_indices, simplify, strides_of
from .sympy_bridge import UnsupportedExpression, from_symint
from .wide import largest_fitting_size, too_wide, wide_parts

__all__ = [
    "Bounds",
    "Call",
    "ComputedSizes",
    "Expr",
    "Ranges",
    "Symbol",
    "SymbolKind",
    "UnsupportedExpression",
    "bounds",
    "build_call",
    "contiguous_strides",
    "estimate",
    "floordiv",
    "from_symint",
    "has_calls",
    "isqrt",
    "largest_fitting_size",
    "mod",
    "product",
    "prove_le",
    "prove_lt",
    "prove_nonnegative",
    "reshape_indices",
    "simplify",
    "smax",
    "smin",
    "strides_of",
    "sym",
    "to_expr",
    "too_wide",
    "wide_parts",
    "with_computed",
]
