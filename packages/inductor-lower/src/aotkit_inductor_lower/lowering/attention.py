"""Attention as loop nests: what ATen's fused attention for the CPU computes, and the operators of ours, both ways.

Note [Attention as a nest]
    The nest of the forward has the queries for its outer loops: the scores of one query are a row of scratch memory, a
    sum of products over the head; a maximum and a sum over that row make weights of them; and these times the values
    are summed into a second row, the result. The nest of the backward has the heads of keys and values for its outer
    loops, since these collect gradients from all queries of all heads that share them: it computes weights again from
    the scores and what was saved of them. Weights, and the gradients of scores, are rounded to the type of the operands
    before they are multiplied, as eager rounds them.

    A target renders such nests whole, blocks of queries by blocks of keys, so that the scores of a head are never all
    in memory (:mod:`..kernel_ir.attention_site` knows them by their shape). As they stand, any backend can run them.
    On a device, masks that follow from positions are computed in them (Note [Masks that are computed] in
    :mod:`..loop_passes.compute_masks`).

    A query whose scores are all -inf has no key to attend to. Its result is 0, as in eager mode, where the logarithm
    that is saved for it is 0, too; or nan, for operators of ours that say so (Note [Attention as an operator]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import CONTRACTIONS, Arg, Buffer, BufferKind, BufferRef, DType, ExternCall, Literal, LoopNest, Precision
from ..ir.builder import NestBuilder, Value, loops
from ..ops.attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_SCORES
from ..ops.dtypes import torch_name
from ..symbolic import Expr, floordiv, to_expr
from .contractions import broadcast_indices

__all__ = ["ATTENTIONS", "BACKWARD", "FORWARD", "Attention", "attention_of"]

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
_OWN = {str(ATTENTION): 3, str(ATTENTION_BACKWARD): 7, str(ATTENTION_BACKWARD_WITH_SCORES): 7}
_OPERANDS = {FORWARD: 3, BACKWARD: 6} | _OWN
_RESULTS = dict(zip(_OPERANDS, (2, 3, 3, 3, 4), strict=True))
_BACKWARDS = (BACKWARD, str(ATTENTION_BACKWARD), str(ATTENTION_BACKWARD_WITH_SCORES))
ATTENTIONS = frozenset(_OPERANDS)
_TYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of fused attention that nests can compute. ``operands``: query, key and value; in the backward the
    gradient of the result before them, and behind them the result and the logarithms of the sums, or the largest scores
    and the sums. ``results``: result and what is saved, or the gradients of query, key and value, and of the scores.
    The others are as Note [Attention as an operator] has them; ``slope`` is what gradients of scores are multiplied by
    for query and key."""

    call: ExternCall
    operands: tuple[Buffer, ...]
    results: tuple[Buffer | None, ...]
    dtype: DType
    scale: float
    causal: bool
    added: Buffer | None = None
    seen: Buffer | None = None
    kept: Buffer | None = None
    hidden: float = -math.inf
    replaces: bool = False
    kept_scale: float = 1.0
    slope: float = 0.0
    zero_empty: bool = True
    window: int = 0
    cap: float = 0.0

    @property
    def backward(self) -> bool:
        """Whether it computes gradients."""
        return self.call.target in _BACKWARDS

    @property
    def own(self) -> bool:
        """Whether it is an operator of ours."""
        return self.call.target in _OWN

    @property
    def factors(self) -> tuple[Buffer, Buffer, Buffer]:
        """Query, key and value."""
        query, key, value = self.operands[self.backward :][:3]
        return query, key, value

    @property
    def shared_by(self) -> int:
        """How many heads of queries share one of keys and values."""
        query, key, _ = self.factors
        return 1 if query.sizes[1] == key.sizes[1] else (query.sizes[1].constant or 0) // (key.sizes[1].constant or 1)

    @property
    def score_sizes(self) -> tuple[Expr, ...]:
        """Of all scores."""
        query, key, _ = self.factors
        return (*query.sizes[:3], key.sizes[2])

    @property
    def form(self) -> object:
        """What calls have in common that are computed the same way: all but where their operands are."""
        masks = (self.added, self.seen, self.kept)
        tensors = [b and (b.dtype, b.sizes, b.strides) for b in (*self.operands, *masks, *self.results)]
        numbers = (
            self.scale,
            self.causal,
            self.hidden,
            self.replaces,
            self.kept_scale,
            self.slope,
            self.zero_empty,
            self.window,
            self.cap,
        )
        return self.call.target, tuple(tensors), repr(numbers)

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
    known = [buffer for buffer in operands if buffer is not None]
    results = tuple(None if name is None else buffers[name] for name in call.results)
    if len(known) < count or len(results) != _RESULTS[call.target] or results[0] is None:
        return None
    if call.target in _BACKWARDS and None in results:
        return None
    query = known[call.target in _BACKWARDS]
    dtype = _TYPES.get(query.dtype)
    settings = _own_settings(call, buffers) if call.target in _OWN else _atens_settings(call, buffers, query)
    if dtype is None or settings is None:
        return None
    found = Attention(call, tuple(known), results, dtype, **settings)  # type: ignore[arg-type]
    return found if _fits(found, device) else None


def _own_settings(call: ExternCall, buffers: Mapping[str, Buffer]) -> dict[str, object] | None:
    names = ("added", "seen", "kept", "scale", "hidden", "replaces", "kept_scale", "causal", "last", "window", "cap")
    given: dict[str, object] = dict(zip(names, call.args[_OPERANDS[call.target] :], strict=False))
    for name in ("added", "seen", "kept"):
        given[name] = _tensor(call.args[_OPERANDS[call.target] + names.index(name)], buffers)
    plain = {name: value.value if isinstance(value, Literal) else value for name, value in given.items()}
    last = plain.pop("last")
    plain |= {"slope": last} if call.target in _BACKWARDS else {"zero_empty": last}
    return plain


def _atens_settings(call: ExternCall, buffers: Mapping[str, Buffer], query: Buffer) -> dict[str, object] | None:
    plain = dict(zip(("dropout", "causal"), (_value(arg) for arg in call.args[_OPERANDS[call.target] :]), strict=False))
    named = dict(call.kwargs)
    scale = _value(named.get("scale", Literal("none", None)))
    mask = _tensor(named["attn_mask"], buffers) if "attn_mask" in named else None
    if _value(named.get("attn_mask", Literal("none", None))) is not None and mask is None:
        return None
    if plain.get("dropout", 0.0) != 0 or {*named} - {"attn_mask", "scale"} or len(query.sizes) != 4:
        return None
    if scale is not None and not isinstance(scale, int | float):
        return None
    scale = float(scale) if scale is not None else 1 / math.sqrt(query.sizes[3].constant or 1)
    return {"scale": scale, "slope": scale, "added": mask, "causal": bool(plain.get("causal", False))}


def _fits(attention: Attention, device: str) -> bool:
    """Whether kernels can read the operands."""
    query, key, value = attention.factors
    same = attention.operands[:5]  # what has the type of the query, and what is behind that
    masks = [mask for mask in (attention.added, attention.seen, attention.kept) if mask is not None]
    tensors = [*same, *masks, *(r for r in attention.results if r is not None)]
    if any(t.device != device for t in tensors) or any(t.dtype != query.dtype for t in same):
        return False
    if any(len(t.sizes) != 4 for t in (query, key, value)) or key.sizes != value.sizes:
        return False
    if query.sizes[0] != key.sizes[0] or query.sizes[3] != key.sizes[3] or query.sizes[3].constant is None:
        return False
    heads, shared = query.sizes[1].constant, key.sizes[1].constant
    if query.sizes[1] != key.sizes[1] and (not heads or not shared or heads % shared):
        return False
    if attention.added is not None and attention.added.dtype not in _TYPES:
        return False
    if any(mask.dtype != "bool" for mask in (attention.seen, attention.kept) if mask is not None):
        return False
    whole = attention.score_sizes
    if any(broadcast_indices(mask.sizes, whole, whole) is None for mask in masks):
        return False
    return math.isfinite(attention.scale) and math.isfinite(attention.slope)


def _tensor(arg: Arg, buffers: Mapping[str, Buffer]) -> Buffer | None:
    return buffers[arg.name] if isinstance(arg, BufferRef) and not arg.number else None


def _value(arg: Arg) -> object:
    """What a plain argument is; the argument itself where it is none."""
    return arg.value if isinstance(arg, Literal) else arg


class _Writer:
    """Writes the nest of one attention. ``multiply``: the op that a product's factors are multiplied by. Loops: batch
    ``b``, heads ``h``, heads that share keys ``r``, queries ``i``, numbers of a head ``d``, keys ``j``."""

    def __init__(self, attention: Attention, multiply: str) -> None:
        self.attention, self.multiply, self.dtype = attention, multiply, attention.dtype
        query, key, self.value = attention.factors
        self.query, self.key = query, key
        self.shared = attention.shared_by
        self.sizes = dict(zip("bhidj", (*query.sizes, key.sizes[2]), strict=True)) | {"r": to_expr(self.shared)}
        if attention.backward:
            self.sizes["h"] = key.sizes[1]
        self.queries = "ri" if attention.backward and self.shared > 1 else "i"
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
        kind, device = BufferKind.SCRATCH, self.query.device
        made = self.scratch[whole] = Buffer(whole, torch_name(dtype), sizes, tuple(strides), kind, device)
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

    def head(self, at: Mapping[str, Expr]) -> Expr:
        """The head of queries."""
        return at["h"] * self.shared + at["r"] if "r" in at else at["h"]

    def head_of_keys(self, at: Mapping[str, Expr]) -> Expr:
        return at["h"] if self.attention.backward or self.shared == 1 else floordiv(at["h"], to_expr(self.shared))

    def place(self, at: Mapping[str, Expr], line: str) -> list[Expr]:
        """Where an element of a query, a key or the like is: ``line`` names the loop along its third dimension."""
        return [at["b"], self.head(at) if line == "i" else self.head_of_keys(at), at[line], at["d"]]

    def operand(self, buffer: Buffer, at: Mapping[str, Expr], line: str) -> Value:
        """An element of a query, a key or the like."""
        return self.nest.load_from(buffer, self.place(at, line))

    def masked(self, mask: Buffer, at: Mapping[str, Expr]) -> Value:
        """An element of a mask."""
        place = [at["b"], self.head(at), at["i"], at["j"]]
        indices = broadcast_indices(mask.sizes, self.attention.score_sizes, place)
        assert indices is not None
        return self.nest.load_from(mask, indices)

    def score(self, score: Value, at: Mapping[str, Expr]) -> tuple[Value, Value | None, Value | None]:
        """What becomes of the product of a query and a key: its scale, its cap and its mask. And where it counts at
        all, if not everywhere, and the tangent of its cap."""
        nest, attention = self.nest, self.attention
        made = nest.op("mul", score, self.number(attention.scale))
        added = shown = tangent = None
        if attention.cap:
            tangent = nest.op("tanh", nest.op("mul", made, self.number(1 / attention.cap)))
            made = nest.op("mul", tangent, self.number(attention.cap))
        if attention.added is not None:
            added = self.wide(self.masked(attention.added, at))
        if attention.seen is not None:
            seen = self.masked(attention.seen, at)
            if attention.replaces:
                made = made if added is None else nest.op("add", made, added)
                made, added, shown = nest.where(seen, made, self.number(attention.hidden)), None, seen
            else:
                added = nest.where(seen, self.number(0.0) if added is None else added, self.number(attention.hidden))
        if added is not None:
            made = nest.op("add", made, added)
        if attention.causal:
            seen = nest.op("le", nest.index_value(at["j"]), nest.index_value(at["i"]))
            made = nest.where(seen, made, self.number(-math.inf))
        if attention.window:
            seen = nest.op("le", nest.index_value(at["i"] - (attention.window - 1)), nest.index_value(at["j"]))
            made = nest.where(seen, made, self.number(-math.inf))
        return made, shown, tangent

    def factor(self, at: Mapping[str, Expr]) -> Value | None:
        """What dropout multiplies a weight by."""
        if self.attention.kept is None:
            return None
        kept = self.masked(self.attention.kept, at)
        return self.nest.where(kept, self.number(self.attention.kept_scale), self.number(0.0))

    def times(self, value: Value, factor: Value | None) -> Value:
        return value if factor is None else self.nest.op("mul", value, factor)

    # -- the forward -------------------------------------------------------------------------------------

    def forward(self) -> LoopNest:
        nest, attention = self.nest, self.attention
        out = attention.results[0]
        assert out is not None
        scores = self.room("scores", "j")
        weights, sums = self.room("weights", "j", self.dtype), self.room("sums", "d")
        self.clear(scores, "j")
        at = self.begin("jd")
        self.add(scores, "j", self.operand(self.query, at, "i"), self.operand(self.key, at, "j"), at)
        at = self.begin("j")
        score, _, _ = self.score(nest.load_from(scores, [at["j"]]), at)
        nest.store_to(scores, [at["j"]], score)
        top = nest.reduce("max", score)
        if attention.zero_empty:
            self.begin("")
            zero = self.number(0.0)
            top = nest.where(nest.op("eq", top, self.number(-math.inf)), zero, top)
        at = self.begin("j")
        weight = nest.op("exp", nest.op("sub", nest.load_from(scores, [at["j"]]), top))
        nest.store_to(weights, [at["j"]], self.times(weight, self.factor(at)))
        total = nest.reduce("sum", weight)
        self.clear(sums, "d")
        at = self.begin("jd")
        self.add(sums, "d", nest.load_from(weights, [at["j"]]), self.operand(self.value, at, "j"), at)
        divisor = self.end_of_row(top, total)
        at = self.begin("d")
        result = nest.op("div", nest.load_from(sums, [at["d"]]), divisor)
        nest.store_to(out, [at[name] for name in "bhid"], result)
        return nest.finish()

    def end_of_row(self, top: Value, total: Value) -> Value:
        """Keep what the backward needs of a query, and give what its sums are divided by."""
        nest, results = self.nest, self.attention.results
        at = self.begin("")
        place = [at[name] for name in "bhi"]
        divisor = total
        if self.attention.zero_empty:
            zero, one = self.number(0.0), self.number(1.0)
            divisor = nest.where(nest.op("eq", total, zero), one, total)
        if self.attention.own:
            for kept, value in zip(results[1:], (top, divisor), strict=True):
                if kept is not None:
                    nest.store_to(kept, place, value)
        elif results[1] is not None:
            nest.store_to(results[1], place, nest.op("add", top, nest.op("log", divisor)))
        return divisor

    # -- the backward ------------------------------------------------------------------------------------

    def backward(self) -> LoopNest:
        nest, queries = self.nest, self.queries
        gradient, result = self.attention.operands[0], self.attention.operands[4]
        scores, slopes = self.room("scores", queries + "j"), self.room("slopes", queries + "j")
        weights, changes = (self.room(name, queries + "j", self.dtype) for name in ("weights", "changes"))
        delta = self.room("delta", queries)
        for room, over in ((scores, queries + "j"), (slopes, queries + "j"), (delta, queries)):
            self.clear(room, over)
        at = self.begin(queries + "d")
        part = nest.op("mul", *(self.wide(self.operand(buffer, at, "i")) for buffer in (result, gradient)))
        nest.store_to(delta, self.at(at, queries), part, "add")
        for room, left, right in ((scores, self.query, self.key), (slopes, gradient, self.value)):
            at = self.begin(queries + "jd")
            self.add(room, queries + "j", self.operand(left, at, "i"), self.operand(right, at, "j"), at)
        self.changes(scores, slopes, delta, weights, changes)
        of = (("query", queries, changes, self.key, "j"), ("key", "j", changes, self.query, "i"))
        made = [self.gradient(*each) for each in (*of, ("value", "j", weights, gradient, "i"))]
        for (sums, line), out in zip(made, self.attention.results, strict=False):
            assert out is not None
            at = self.begin(line + "d")
            nest.store_to(out, self.place(at, line[-1]), nest.load_from(sums, self.at(at, line + "d")))
        return nest.finish()

    def changes(self, scores: Buffer, slopes: Buffer, delta: Buffer, weights: Buffer, changes: Buffer) -> None:
        """Weights, and the gradients of the products of queries and keys."""
        nest, attention = self.nest, self.attention
        at = self.begin(self.queries + "j")
        place = self.at(at, self.queries + "j")
        row = [at["b"], self.head(at), at["i"]]
        score, shown, tangent = self.score(nest.load_from(scores, place), at)
        weight = nest.op("exp", nest.op("sub", score, nest.load_from(attention.operands[5], row)))
        if attention.own:
            weight = nest.op("div", weight, nest.load_from(attention.operands[6], row))
        factor = self.factor(at)
        nest.store_to(weights, place, self.times(weight, factor))
        slope = self.times(nest.load_from(slopes, place), factor)
        slope = nest.op("sub", slope, nest.load_from(delta, self.at(at, self.queries)))
        change = nest.op("mul", slope, weight)
        if shown is not None:
            change = nest.where(shown, change, self.number(0.0))
        if len(attention.results) == 4:
            of_scores = attention.results[3]
            assert of_scores is not None
            nest.store_to(of_scores, [at["b"], self.head(at), at["i"], at["j"]], change)
        if tangent is not None:
            change = nest.op("mul", change, nest.op("sub", self.number(1.0), nest.op("mul", tangent, tangent)))
        nest.store_to(changes, place, nest.op("mul", change, self.number(attention.slope)))

    def gradient(self, name: str, line: str, left: Buffer, right: Buffer, summed: str) -> tuple[Buffer, str]:
        """Sums of products over the keys or the queries."""
        sums = self.room(name, line + "d")
        self.clear(sums, line + "d")
        at = self.begin(self.queries + "jd")
        factor = self.nest.load_from(left, self.at(at, self.queries + "j"))
        self.add(sums, line + "d", factor, self.operand(right, at, summed), at)
        return sums, line
