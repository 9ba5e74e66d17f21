"""Attention as loop nests: what ATen's fused attention for the CPU computes, forward and backward.

Note [Attention as a nest]
    The nest of the forward has the queries for its outer loops: the scores of one query are a row of scratch memory, a
    sum of products over the head; a maximum and a sum over that row make weights of them; and these times the values
    are summed into a second row, the result. The nest of the backward has the heads for its outer loops, since keys and
    values collect gradients from all queries: it computes weights again from the scores and the saved logarithms of
    their sums, as eager's does. Weights, and the gradients of scores, are rounded to the type of the operands before
    they are multiplied, as eager rounds them.

    A target renders such nests whole, blocks of queries by blocks of keys, so that the scores of a head are never all
    in memory (:mod:`..kernel_ir.attention_site` knows them by their shape). As they stand, any backend can run them.

    A query whose scores are all -inf has no key to attend to. Its result is 0, as in eager mode, where the logarithm
    that is saved for it is 0, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import CONTRACTIONS, Arg, Buffer, BufferKind, BufferRef, DType, ExternCall, Literal, LoopNest, Precision
from ..ir.builder import NestBuilder, Value, loops
from ..symbolic import Expr, to_expr
from .contractions import broadcast_indices

__all__ = ["BACKWARD", "FORWARD", "Attention", "attention_of"]

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
_OPERANDS = {FORWARD: 3, BACKWARD: 6}
_TYPES = {"float32": DType.F32, "bfloat16": DType.BF16}


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of ATen's fused attention that nests can compute. ``operands``: query, key and value; in the backward the
    gradient of the result before them, and behind them the result and the logarithms of the sums. ``results``: result
    and logarithms, or the gradients of query, key and value."""

    call: ExternCall
    operands: tuple[Buffer, ...]
    mask: Buffer | None
    results: tuple[Buffer | None, ...]
    dtype: DType
    scale: float
    causal: bool

    @property
    def backward(self) -> bool:
        """Whether it computes gradients."""
        return self.call.target == BACKWARD

    @property
    def factors(self) -> tuple[Buffer, Buffer, Buffer]:
        """Query, key and value."""
        query, key, value = self.operands[self.backward :][:3]
        return query, key, value

    def nest(self, precision: Precision) -> tuple[LoopNest, tuple[Buffer, ...]]:
        """What it means, with the scratch rows that it needs. ``precision``: of products of float32."""
        writer = _Writer(self, CONTRACTIONS[precision])
        return (writer.backward() if self.backward else writer.forward()), tuple(writer.scratch.values())


def attention_of(call: ExternCall, buffers: Mapping[str, Buffer], device: str) -> Attention | None:
    """The attention that a call is, unless it draws random numbers or has operands that no kernel reads."""
    count = _OPERANDS.get(call.target)
    if count is None:
        return None
    operands = [_tensor(arg, buffers) for arg in call.args[:count]]
    given = dict(zip(("dropout", "causal"), (_value(arg) for arg in call.args[count:]), strict=False))
    named = dict(call.kwargs)
    given |= {name: _value(named[name]) for name in ("scale",) if name in named}
    mask = _tensor(named["attn_mask"], buffers) if "attn_mask" in named else None
    if _value(named.get("attn_mask", Literal("none", None))) is not None and mask is None:
        return None
    results = tuple(None if name is None else buffers[name] for name in call.results)
    known = [buffer for buffer in operands if buffer is not None]
    if len(known) < count or given.get("dropout", 0.0) != 0 or {*named} - {"attn_mask", "scale"}:
        return None
    query, key, value = known[count == _OPERANDS[BACKWARD] :][:3]
    dtype = _TYPES.get(query.dtype)
    tensors = [*known[:5], *(r for r in results if r is not None), *([mask] if mask is not None else [])]
    if dtype is None or any(t.device != device for t in tensors) or any(t.dtype != query.dtype for t in known[:5]):
        return None
    if any(len(t.sizes) != 4 for t in (query, key, value)) or key.sizes != value.sizes:
        return None
    if query.sizes[:2] != key.sizes[:2] or query.sizes[3] != key.sizes[3] or query.sizes[3].constant is None:
        return None
    if mask is not None and _TYPES.get(mask.dtype) is None:
        return None
    scale = given.get("scale")
    scale = float(scale) if isinstance(scale, int | float) else 1 / math.sqrt(query.sizes[3].constant or 1)
    if "scale" in named and given["scale"] is None and not isinstance(named["scale"], Literal):
        return None
    if len(results) != (2 if count == _OPERANDS[FORWARD] else 3) or results[0] is None or not math.isfinite(scale):
        return None
    if count == _OPERANDS[BACKWARD] and None in results:
        return None
    found = Attention(call, tuple(known), mask, results, dtype, scale, bool(given.get("causal", False)))
    if mask is not None and broadcast_indices(mask.sizes, _score_sizes(found), _score_sizes(found)) is None:
        return None
    return found


def _score_sizes(attention: Attention) -> tuple[Expr, ...]:
    query, key, _ = attention.factors
    return (*query.sizes[:3], key.sizes[2])


def _tensor(arg: Arg, buffers: Mapping[str, Buffer]) -> Buffer | None:
    return buffers[arg.name] if isinstance(arg, BufferRef) and not arg.number else None


def _value(arg: Arg) -> object:
    """What a plain argument is; the argument itself where it is none."""
    return arg.value if isinstance(arg, Literal) else arg


class _Writer:
    """Writes the nest of one attention. ``multiply``: the op that a product's factors are multiplied by."""

    def __init__(self, attention: Attention, multiply: str) -> None:
        self.attention, self.multiply, self.dtype = attention, multiply, attention.dtype
        query, key, self.value = attention.factors
        self.query, self.key = query, key
        self.sizes = dict(zip("bhidj", (*query.sizes, key.sizes[2]), strict=True))
        self.scratch: dict[str, Buffer] = {}
        outer = "bh" if attention.backward else "bhi"
        call = attention.call
        self.nest = NestBuilder(call.name, loops({n: self.sizes[n] for n in outer}), call.origin, share=False)
        self.outer = outer

    # -- parts -------------------------------------------------------------------------------------------

    def begin(self, names: str) -> dict[str, Expr]:
        """The next stage, over the loops of these names that are not outer ones. Gives the loop variables."""
        ranges = {f"{name}_{len(self.nest._stages)}": self.sizes[name] for name in names if name not in self.outer}
        self.nest.begin_stage(loops(ranges))
        own = {name.split("_")[0]: self.nest[name] for name in ranges}
        return {name: self.nest[name] for name in self.outer} | own

    def room(self, name: str, over: str, dtype: DType = DType.F32) -> Buffer:
        """Scratch memory with an element for each iteration of some loops that are not outer ones."""
        sizes = tuple(self.sizes[n] for n in over if n not in self.outer)
        strides: list[Expr] = []
        step = to_expr(1)
        for size in reversed(sizes):
            strides.insert(0, step)
            step = step * size
        whole = f"{self.attention.call.name}_{name}"
        torch_name = {DType.F32: "float32", DType.BF16: "bfloat16"}[dtype]
        made = self.scratch[whole] = Buffer(whole, torch_name, sizes, tuple(strides), BufferKind.SCRATCH)
        return made

    def at(self, at: Mapping[str, Expr], over: str) -> list[Expr]:
        return [at[name] for name in over if name not in self.outer]

    def wide(self, value: Value) -> Value:
        return self.nest.cast(value, DType.F32)

    def number(self, value: float) -> Value:
        return self.nest.const(value, DType.F32)

    def clear(self, room: Buffer, over: str) -> None:
        """Zeros, which sums begin with."""
        at = self.begin(over)
        self.nest.store_to(room, self.at(at, over), self.number(0.0))

    def add(self, room: Buffer, over: str, left: Value, right: Value, at: Mapping[str, Expr]) -> None:
        """Add a product to a sum."""
        product = self.nest.op(self.multiply, self.wide(left), self.wide(right))
        self.nest.store_to(room, self.at(at, over), product, "add")

    def operand(self, buffer: Buffer, at: Mapping[str, Expr], line: str) -> Value:
        """An element of a query, a key or the like: ``line`` names the loop along its third dimension."""
        return self.nest.load_from(buffer, [at["b"], at["h"], at[line], at["d"]])

    def score(self, score: Value, at: Mapping[str, Expr]) -> Value:
        """What becomes of the product of a query and a key: its scale and its mask."""
        nest, attention = self.nest, self.attention
        made = nest.op("mul", score, self.number(attention.scale))
        if attention.mask is not None:
            place = [at[name] for name in "bhij"]
            indices = broadcast_indices(attention.mask.sizes, _score_sizes(attention), place)
            assert indices is not None
            made = nest.op("add", made, self.wide(nest.load_from(attention.mask, indices)))
        if attention.causal:
            seen = nest.op("le", nest.index_value(at["j"]), nest.index_value(at["i"]))
            made = nest.where(seen, made, self.number(-math.inf))
        return made

    # -- the forward -------------------------------------------------------------------------------------

    def forward(self) -> LoopNest:
        nest = self.nest
        out, logarithms = self.attention.results
        assert out is not None
        scores = self.room("scores", "j")
        weights, sums = self.room("weights", "j", self.dtype), self.room("sums", "d")
        self.clear(scores, "j")
        at = self.begin("jd")
        self.add(scores, "j", self.operand(self.query, at, "i"), self.operand(self.key, at, "j"), at)
        at = self.begin("j")
        score = self.score(nest.load_from(scores, [at["j"]]), at)
        nest.store_to(scores, [at["j"]], score)
        top = nest.reduce("max", score)
        self.begin("")
        zero = self.number(0.0)
        top = nest.where(nest.op("eq", top, self.number(-math.inf)), zero, top)
        at = self.begin("j")
        weight = nest.op("exp", nest.op("sub", nest.load_from(scores, [at["j"]]), top))
        nest.store_to(weights, [at["j"]], weight)
        total = nest.reduce("sum", weight)
        self.clear(sums, "d")
        at = self.begin("jd")
        self.add(sums, "d", nest.load_from(weights, [at["j"]]), self.operand(self.value, at, "j"), at)
        at = self.begin("")
        zero, one = self.number(0.0), self.number(1.0)
        empty = nest.op("eq", total, zero)
        divisor = nest.where(empty, one, total)
        if logarithms is not None:
            nest.store_to(logarithms, [at[name] for name in "bhi"], nest.op("add", top, nest.op("log", divisor)))
        at = self.begin("d")
        result = nest.op("div", nest.load_from(sums, [at["d"]]), divisor)
        nest.store_to(out, [at[name] for name in "bhid"], result)
        return nest.finish()

    # -- the backward ------------------------------------------------------------------------------------

    def backward(self) -> LoopNest:
        nest = self.nest
        gradient, *_, result, logarithms = self.attention.operands
        scores, slopes = self.room("scores", "ij"), self.room("slopes", "ij")
        weights, changes = self.room("weights", "ij", self.dtype), self.room("changes", "ij", self.dtype)
        delta = self.room("delta", "i")
        for room, over in ((scores, "ij"), (slopes, "ij"), (delta, "i")):
            self.clear(room, over)
        at = self.begin("id")
        part = nest.op("mul", *(self.wide(self.operand(buffer, at, "i")) for buffer in (result, gradient)))
        nest.store_to(delta, [at["i"]], part, "add")
        for room, left, right in ((scores, self.query, self.key), (slopes, gradient, self.value)):
            at = self.begin("ijd")
            self.add(room, "ij", self.operand(left, at, "i"), self.operand(right, at, "j"), at)
        at = self.begin("ij")
        score = self.score(nest.load_from(scores, [at["i"], at["j"]]), at)
        total = nest.load_from(logarithms, [at["b"], at["h"], at["i"]])
        weight = nest.op("exp", nest.op("sub", score, total))
        nest.store_to(weights, [at["i"], at["j"]], weight)
        slope = nest.op("sub", nest.load_from(slopes, [at["i"], at["j"]]), nest.load_from(delta, [at["i"]]))
        change = nest.op("mul", nest.op("mul", slope, weight), self.number(self.attention.scale))
        nest.store_to(changes, [at["i"], at["j"]], change)
        of = (("query", "i", changes, self.key, "j"), ("key", "j", changes, self.query, "i"))
        made = [self._gradient(*each) for each in (*of, ("value", "j", weights, gradient, "i"))]
        for (sums, line), out in zip(made, self.attention.results, strict=True):
            assert out is not None
            at = self.begin(line + "d")
            nest.store_to(out, [at["b"], at["h"], at[line], at["d"]], nest.load_from(sums, [at[line], at["d"]]))
        return nest.finish()

    def _gradient(self, name: str, line: str, left: Buffer, right: Buffer, summed: str) -> tuple[Buffer, str]:
        """Sums of products over the keys or the queries."""
        sums = self.room(name, line + "d")
        self.clear(sums, line + "d")
        at = self.begin("ijd")
        self.add(sums, line + "d", self.nest.load_from(left, [at["i"], at["j"]]), self.operand(right, at, summed), at)
        return sums, line
