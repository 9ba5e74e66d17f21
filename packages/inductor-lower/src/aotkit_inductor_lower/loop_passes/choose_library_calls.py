"""Pass: where ATen has two kernels for the same product, call the one that is faster on this processor.

Note [Which product]
    ``aten.mm`` is MKL's product. On AMD's processors with 512-bit vectors oneDNN's linear layer, which ATen has too, is
    faster where the first operand has its rows together: by 3 to 9 % for a transformer's layers, by a fifth where
    rows of the result are a large power of two (measured on a Zen 4 core; for a transposed first operand it is slower).
    Both sum in float32. It has no overload that writes into given memory and costs more to enter, so small products
    stay. On Zen 3 (AVX2) it ran at 0.90 of the speed of MKL's product, of factors like those of `g @ w` at 0.83 (least
    0.54; `python -m tools.bench.products --contractions auto --only w` with it), so MKL's stays.

    For each number of rows that it has not seen oneDNN writes code, which takes a third of a millisecond and some
    hundred KiB (`ONEDNN_VERBOSE=profile_create` prints the first), and it keeps the last 1024. So products of rows
    whose number is known at run time only stay with MKL (`python -m tools.bench.dynamic --new-lengths 40`).

    Products of bfloat16 are oneDNN's in both. ``aten.addmm`` copies the bias into every row of the result before, which
    takes long beside the product where little is summed; the linear layer adds it in float32, as the other does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..analysis.nests import hint
from ..ir import Alias, Buffer, BufferKind, BufferRef, ExternCall, Literal, Program, Step
from ..ir.walk import buffers_of
from ..passes import Pass, PassContext
from ..symbolic import to_expr

__all__ = ["PASS", "choose_library_calls"]

LINEAR = "mkldnn._linear_pointwise.default"
_LEAST_WORK = {"float32": 1 << 23, "bfloat16": 1 << 26}  # multiplications


def choose_library_calls(program: Program, ctx: PassContext) -> Program:
    """The program with products that oneDNN computes faster, as the target says, given to oneDNN."""
    buffers = buffers_of(program)
    bases = {step.result: step for step in program.steps if isinstance(step, Alias)}
    steps: list[Step] = []
    for step in program.steps:
        parts = _operands(step, buffers) if isinstance(step, ExternCall) else None
        if not isinstance(step, ExternCall) or parts is None:
            steps.append(step)
            continue
        choice = ctx.target.choose_library(step, buffers)
        if choice.form != "onednn" or not ctx.fuel.take():
            steps.append(step)
            continue
        first, second, bias = parts
        weight = _transposed(second, buffers, bases)
        if weight is None:  # a new view of it
            matrix = buffers[second]
            weight = f"{step.name}_transposed"
            transposed = replace(matrix, name=weight, sizes=matrix.sizes[::-1], strides=matrix.strides[::-1])
            buffers[weight] = replace(transposed, kind=BufferKind.TEMPORARY)
            steps.append(Alias(weight, weight, second, to_expr(0), step.origin))
        literals = (Literal("str", "none"), (), Literal("str", ""))
        given = BufferRef(bias) if bias is not None else Literal("none", None)
        args = (BufferRef(first), BufferRef(weight), given, *literals)
        steps.append(replace(step, target=LINEAR, args=args, kwargs=(), reason=choice.reason))
    return replace(program, steps=tuple(steps), buffers=tuple(buffers.values()))


def _operands(call: ExternCall, buffers: Mapping[str, Buffer]) -> tuple[str, str, str | None] | None:
    """(first, second, bias) of a product that the rule is for."""
    names = [arg.name for arg in call.args if isinstance(arg, BufferRef)]
    if len(names) != len(call.args) or call.kwargs or len(call.results) != 1 or call.results[0] is None:
        return None
    if call.target == "aten.addmm.default" and len(names) == 3:
        bias, first, second = names
    elif call.target == "aten.mm.default" and len(names) == 2:
        first, second, bias = names[0], names[1], None
    else:
        return None
    a, b, result = buffers[first], buffers[second], buffers[call.results[0]]
    rows, inner, columns = a.sizes[0], a.sizes[1], b.sizes[1]
    if not inner.constant or not columns.constant or a.strides[1] != 1 or a.strides[0] != inner:
        return None
    least = _LEAST_WORK.get(result.dtype)
    if least is None or any(x.dtype != result.dtype for x in (a, b)):
        return None
    if result.dtype == "bfloat16" and bias is None:
        return None
    if rows.constant is None and result.dtype == "float32":
        return None  # oneDNN would write code for each number of rows
    if rows == 1:
        return None  # oneDNN reorders the whole matrix first, which takes longer than to multiply by it once
    if result.strides != (columns, to_expr(1)) or hint(rows) * inner.constant * columns.constant < least:
        return None
    if bias is not None:
        added = buffers[bias]
        if added.dtype != result.dtype or (added.sizes, added.strides) != ((columns,), (to_expr(1),)):
            return None
    return first, second, bias


def _transposed(name: str, buffers: Mapping[str, Buffer], bases: Mapping[str, Alias]) -> str | None:
    """The buffer of which ``name`` is the transpose."""
    view = bases.get(name)
    if view is None or view.offset != 0:
        return None
    base, matrix = buffers[view.base], buffers[name]
    transposed = (
        base.sizes == matrix.sizes[::-1] and base.strides == matrix.strides[::-1] and base.dtype == matrix.dtype
    )
    return view.base if transposed else None


def _run(program: Program, ctx: PassContext) -> Program:
    return choose_library_calls(program, ctx)


PASS = Pass(
    "choose-library-calls",
    _run,
    why="ATen has two kernels for the same product, and which is faster depends on the processor",
)
