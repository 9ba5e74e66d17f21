"""Matrix products as contractions, each with ATen's call in it.

Note [Products of matrices]
    ``mm``, ``addmm``, ``bmm``, ``baddbmm`` and ``linear`` of floats, and ``_int_mm`` of bytes, become a
    :class:`~..ir.Contraction` in every graph, whatever it is compiled for: the pass ``choose-contractions`` decides
    who computes it. ATen's call in it is the one that there would be without, with the same arguments. Bias, ``alpha``
    and ``beta`` are in the epilogue, in the type that is summed in, and the result is rounded once; with a ``beta`` of
    0 the bias is not read, as eager says.

    A matrix times a column is a row times the matrix's transpose: so it is written on the CPU, where a product of few
    rows has a form of its own and one of few columns has none.

    What has no such form stays a call: other types, factors that are known when the graph runs only, an ``alpha`` of 0
    (BLAS and ATen's own loops do not agree on what becomes of a nan then), factors that are 0 or infinite in float32 if
    that is summed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float
from dataclasses import replace
from functools import lru_cache

import torch
from torch.fx import Node

from ..ir import (
    Arg,
    Buffer,
    BufferRef,
    Compute,
    Const,
    Contraction,
    DType,
    ExternCall,
    Instr,
    Literal,
    Load,
    Operand,
    Range,
    Store,
)
from ..ops.dtypes import FLOATS, dtype_from_torch_name
from ..symbolic import Expr, sym, to_expr
from .context import LoweringContext
from .extern import lower_extern
from .values import NodeValue

__all__ = ["PRODUCTS", "broadcast_indices", "contraction_of", "lower_product"]

_aten = torch.ops.aten
#: Where each has its factors, and what is added; ``linear`` has its second factor transposed.
_ARGUMENTS = {
    "aten.mm.default": (0, 1, None),
    "aten.bmm.default": (0, 1, None),
    "aten.addmm.default": (1, 2, 0),
    "aten.baddbmm.default": (1, 2, 0),
    "aten.linear.default": (0, 1, 2),
    "aten._int_mm.default": (0, 1, None),
}
_LINEAR, _INT = "aten.linear.default", "aten._int_mm.default"
_K = sym("k")  # the summed loop

PRODUCTS = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.linear.default, _aten._int_mm.default),
    }
)


def lower_product(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """ATen's call of one of :data:`PRODUCTS`, in a contraction where there is one for it. ``reason``: of the call."""
    value = lower_extern(ctx, node, reason)
    call = ctx.steps[-1]
    assert isinstance(call, ExternCall)
    found = contraction_of(call, ctx.buffers, ctx.capabilities.device)
    if found is not None and ctx.capabilities.host_memory:
        found = turned(found)
    if found is not None and found.accumulate is DType.I32 and not ctx.capabilities.tiles_products:
        return value  # other targets have no kernels for bytes
    if found is not None:
        ctx.steps[-1] = found
    return value


def contraction_of(call: ExternCall, buffers: Mapping[str, Buffer], device: str = "cpu") -> Contraction | None:
    """The contraction that an ATen call computes, see Note [Products of matrices], or ``None``. ``device``: where
    kernels take tensors."""
    places = _ARGUMENTS.get(call.target)
    result = call.results[0] if len(call.results) == 1 else None
    scales = _scales(call.kwargs)
    if places is None or result is None or scales is None:
        return None
    if buffers[result].dtype != "float64" and not all(map(_is_single, scales)):
        return None
    given = [_tensor(call.args, place, buffers) for place in places]
    left, right, bias = given
    out = buffers[result]
    dtype = dtype_from_torch_name(out.dtype)
    tensors = [t for t in given if t is not None]
    if left is None or right is None or len(tensors) + _absent(call.args) != len(call.args):
        return None
    whole = call.target == _INT
    factors = "int8" if whole else out.dtype
    if not (whole and dtype is DType.I32) and dtype not in FLOATS:
        return None
    if any(t.dtype != factors for t in tensors) or any(t.device != device for t in (*tensors, out)):
        return None
    return _Writer(call, dtype, left, right, bias, out).contraction(*scales)


def turned(product: Contraction) -> Contraction:
    """The product with its sides exchanged, if it has one column and more rows."""
    (column,), rows = product.columns, product.rows
    if column.size != 1 or len(rows) != 1 or rows[0].size == 1:
        return product
    return replace(product, rows=product.columns, columns=rows, left=product.right, right=product.left)


def _tensor(args: Sequence[Arg], place: int | None, buffers: Mapping[str, Buffer]) -> Buffer | None:
    arg = args[place] if place is not None and place < len(args) else None
    return buffers[arg.name] if isinstance(arg, BufferRef) and not arg.number else None


def _absent(args: Sequence[Arg]) -> int:
    """How many arguments are ``None``: the bias of ``linear``."""
    return sum(isinstance(arg, Literal) and arg.value is None for arg in args)


def _scales(kwargs: Sequence[tuple[str, Arg]]) -> tuple[float, float] | None:
    """(alpha, beta), if they are numbers and nothing else is given."""
    if not kwargs:
        return 1.0, 1.0
    found = {"alpha": 1.0, "beta": 1.0}
    for name, arg in kwargs:
        if name not in found or not isinstance(arg, Literal) or not isinstance(arg.value, int | float):
            return None
        found[name] = float(arg.value)
    usual = found["alpha"] != 0 and all(map(math.isfinite, found.values()))
    return (found["alpha"], found["beta"]) if usual else None


def _is_single(factor: float) -> bool:
    """Whether a factor stays a finite number in float32, and 0 only if it was. ATen refuses what is too large there,
    and takes what is too small for the 0 with which nothing is read."""
    held = c_float(factor).value
    return math.isfinite(held) and (held != 0 or factor == 0)


@lru_cache(maxsize=64)
def _axes(rank: int, batches: bool) -> tuple[tuple[str, ...], tuple[Expr, ...]]:
    """The loops of a result, by name and as expressions."""
    rows = rank - 1 - batches
    names = ("b",) * batches + (("i",) if rows == 1 else tuple(f"i{k}" for k in range(rows))) + ("j",)
    return names, tuple(map(sym, names))


class _Writer:
    """Writes one contraction: ``out = beta * bias + alpha * (left @ right)``."""

    def __init__(
        self, call: ExternCall, dtype: DType, left: Buffer, right: Buffer, bias: Buffer | None, out: Buffer
    ) -> None:
        self.call, self.dtype = call, dtype
        self.left, self.right, self.bias, self.out = left, right, bias, out
        self.accumulate = dtype if dtype in (DType.F64, DType.I32) else DType.F32
        self.factors = DType.I8 if dtype is DType.I32 else dtype
        self.epilogue: list[Instr] = []

    def contraction(self, alpha: float, beta: float) -> Contraction | None:
        """The whole; ``None`` for a bias that does not broadcast to the result as far as can be seen."""
        sizes = self.out.sizes
        transposed = self.call.target == _LINEAR
        batches = len(sizes) == 3 and not transposed
        names, at = _axes(len(sizes), batches)
        loops = tuple(map(Range, names, sizes))
        left = Load("left", self.left.name, (*at[:-1], _K), self.factors)
        across = (at[-1], _K) if transposed else (_K, at[-1])
        right = Load("right", self.right.name, (*at[:batches], *across), self.factors)
        if not self.write_epilogue(at, alpha, beta):
            return None
        return Contraction(
            self.call.name,
            loops[:batches],
            loops[batches:-1],
            loops[-1:],
            (Range("k", self.left.sizes[-1]),),
            Operand((left,), "left"),
            Operand((right,), "right"),
            self.accumulate,
            "highest",
            "total",
            tuple(self.epilogue),
            self.call,
            self.call.origin,
        )

    def write_epilogue(self, at: tuple[Expr, ...], alpha: float, beta: float) -> bool:
        value = self.scaled("total", alpha, "alpha")
        if self.bias is not None and beta != 0:
            indices = broadcast_indices(self.bias.sizes, self.out.sizes, at)
            if indices is None:
                return False
            self.epilogue.append(Load("bias", self.bias.name, indices, self.dtype))
            added = self.scaled(self.cast("bias", self.accumulate, self.dtype), beta, "beta")
            self.epilogue.append(Compute("with_bias", "add", (added, value), self.accumulate))
            value = "with_bias"
        self.epilogue.append(Store(self.out.name, at, self.cast(value, self.dtype, self.accumulate)))
        return True

    def scaled(self, value: str, factor: float, name: str) -> str:
        if factor == 1:
            return value
        self.epilogue.append(Const(name, factor, self.accumulate))
        self.epilogue.append(Compute(f"{value}_scaled", "mul", (value, name), self.accumulate))
        return f"{value}_scaled"

    def cast(self, value: str, to: DType, held: DType) -> str:
        if to is held:
            return value
        self.epilogue.append(Compute(f"{value}_{to.value}", "cast", (value,), to))
        return f"{value}_{to.value}"


def broadcast_indices(sizes: Sequence[Expr], to: Sequence[Expr], at: Sequence[Expr]) -> tuple[Expr, ...] | None:
    """The element of a smaller tensor at a place of a larger one; ``None`` where that is not known."""
    last = len(to) - len(sizes)
    if last < 0:
        return None
    found: list[Expr] = []
    for size, whole, index in zip(sizes, to[last:], at[last:], strict=True):
        if size != whole and size != 1:
            return None
        found.append(index if size == whole else to_expr(0))
    return tuple(found)
