"""Rarer elementwise functions, rounded where ATen's own kernels round."""

from __future__ import annotations

from torch.fx import Node

from .context import LoweringContext
from .nest_builder import Value, broadcast_index
from .pointwise import apply
from .promotion import compute_dtype
from .registry import RuleTable, aten
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("special")


@TABLE.lowers(aten.linalg_cross.default)
def linalg_cross(ctx: LoweringContext, node: Node, a: View, b: View, *, dim: int = -1) -> View:
    """``a[i+1] b[i+2] - a[i+2] b[i+1]`` along ``dim``; eager's kernel rounds the products of halves."""
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    dtype = compute_dtype(result.dtype)

    def element(x: View, step: int) -> Value:
        index = list(nest.index)
        index[dim] = (index[dim] + step) % 3
        return nest.cast(nest.load(x, broadcast_index(x.sizes, index)), dtype)

    def product(first: int, second: int) -> Value:
        return nest.round_to(apply(nest, "mul", element(a, first), element(b, second)), result.dtype)

    nest.store(result, nest.index, apply(nest, "sub", product(1, 2), product(2, 1)))
    ctx.add(nest)
    return result
