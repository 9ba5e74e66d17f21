"""Square roots of sizes that a program rounds down to integers.

This file is the same in every package that has it; the original is in tools/shared.

Note [Roots of sizes]
    ``int(n ** 0.5)`` and ``int(math.sqrt(n))``, the side of a square image of ``n`` patches, are computed with floats.
    For sizes below 2**50 they are ``math.isqrt(n)``: ``n`` is a float without rounding, the root of a square is exact,
    and that of ``k*k - 1`` is further below ``k`` than a float's root is off.
"""

from __future__ import annotations

from typing import Any

__all__ = ["under_whole_root"]


def under_whole_root(expr: Any) -> Any:
    """The sympy expression of ``n`` if ``expr`` is a shape environment's ``int(n ** 0.5)``, else ``None``."""
    if type(expr).__name__ not in ("TruncToInt", "FloorToInt"):
        return None
    root = expr.args[0]
    name = type(root).__name__
    if name != "OpaqueUnaryFn_sqrt" and not (name == "FloatPow" and root.args[1] == 0.5):
        return None
    below = root.args[0]
    return below.args[0] if type(below).__name__ == "ToFloat" else None
