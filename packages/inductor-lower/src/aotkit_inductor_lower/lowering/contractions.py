"""Matrix products as loop nests.

Note [A matrix product is a nest]
    ``mm``, ``addmm`` and ``bmm`` can be written as loop IR: a stage over ``k`` sums products, and a stage adds
    the bias and rounds. So what comes before and after a product is fused into it by the ordinary passes, and the
    interpreter can run the result. Targets that have instructions for products know such a nest by its form.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Buffer, BufferRef, DType, ExternCall, Literal, LoopNest
from ..ir.builder import NestBuilder, loops
from ..ops.dtypes import dtype_from_torch_name

__all__ = ["matmul_nest"]

MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
FLOATS = (DType.F32, DType.F16, DType.BF16)


def matmul_nest(call: ExternCall, buffers: Mapping[str, Buffer]) -> LoopNest | None:
    """The nest that computes a matrix product, or ``None`` for one that has no such form here: other types than f32,
    f16 and bf16, factors of a bias or of the product, a bias of another shape than a row's or the result's."""
    result = call.results[0] if len(call.results) == 1 else None
    refs = [a for a in call.args if isinstance(a, BufferRef)]
    if call.target not in MATMULS or result is None or len(refs) != len(call.args):
        return None
    if any(not (isinstance(v, Literal) and v.value == 1) for _, v in call.kwargs):
        return None
    out = buffers[result]
    tensors = [buffers[r.name] for r in refs]
    dtype = dtype_from_torch_name(out.dtype)
    if dtype not in FLOATS or any(t.dtype != out.dtype for t in tensors):
        return None
    *bias, a, b = tensors
    batch = len(out.sizes) == 3
    if bias and bias[0].sizes not in (out.sizes, out.sizes[-1:]):
        return None
    names = ["b", "i", "j"] if batch else ["i", "j"]
    nest = NestBuilder(result, loops(dict(zip(names, out.sizes, strict=True))), call.origin, share=False)
    outer = [nest[n] for n in names]
    first = outer[:1] if batch else []
    nest.begin_stage(loops({"k": a.sizes[-1]}))
    left = nest.cast(nest.load_from(a, [*first, nest["i"], nest["k"]]), DType.F32)
    right = nest.cast(nest.load_from(b, [*first, nest["k"], nest["j"]]), DType.F32)
    total = nest.reduce("sum", nest.op("mul", left, right))
    nest.begin_stage()
    if bias:
        at = outer if len(bias[0].sizes) == len(out.sizes) else outer[-1:]
        total = nest.op("add", nest.cast(nest.load_from(bias[0], at), DType.F32), total)
    nest.store_to(out, outer, total)
    return nest.finish()
