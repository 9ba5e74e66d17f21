"""Integer index expressions and what can be proven about them."""

from .expr import Call, Expr, Symbol, SymbolKind, floordiv, mod, smax, smin, sym, to_expr

__all__ = ["Call", "Expr", "Symbol", "SymbolKind", "floordiv", "mod", "smax", "smin", "sym", "to_expr"]
