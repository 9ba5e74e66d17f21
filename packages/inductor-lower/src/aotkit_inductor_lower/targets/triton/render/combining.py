"""How the kinds of reductions are written in Triton: by functions of its own or ours, or by their row's ``combine``."""

from __future__ import annotations

from collections.abc import Callable

from ....ir import DType
from ....ops.reductions import REDUCTIONS, Reduction, identity
from ....ops.scalar import OP_TABLE, TypeRule, expansion
from .ops import TRITON_OPS, number_text

__all__ = ["combine_text", "function_name", "generated_functions", "identity_text"]


def identity_text(kind: str, dtype: DType) -> str:
    """The value that changes nothing."""
    return number_text(identity(kind, dtype))


def function_name(kind: str, dtype: DType) -> str:
    """What follows ``combine_``, ``reduce_`` and ``scan_`` in the names of the kind's functions."""
    return REDUCTIONS[kind].name_in("triton", dtype)


def combine_text(kind: str, a: str, b: str, dtype: DType) -> str:
    """Two partial results as one."""
    row = REDUCTIONS[kind]
    if "triton" not in row.native:
        return f"combine_{function_name(kind, dtype)}({a}, {b})"
    return row.join(lambda op, *args: TRITON_OPS[op]([str(arg) for arg in args], dtype), a, b, dtype)


def generated_functions() -> dict[str, str]:
    """The functions of the kinds that have none of ours: name to source."""
    found: dict[str, str] = {}
    for row in REDUCTIONS.values():
        for dtype in sorted(row.domain, key=lambda d: d.value) if "triton" not in row.native else ():
            name = function_name(row.kind, dtype)
            found[f"combine_{name}"] = _combine_source(row, dtype)
            found[f"reduce_{name}"] = (
                f"@jit\ndef reduce_{name}(x, axis: tl.constexpr):\n"
                f"    return tl.reduce(x, axis, combine_{name}, keep_dims=True)"
            )
            found[f"scan_{name}"] = (
                f"@jit\ndef scan_{name}(x, axis: tl.constexpr):\n"
                f"    return tl.associative_scan(x, axis, combine_{name})"
            )
    return found


def _combine_source(row: Reduction, dtype: DType) -> str:
    lines = ["@jit", f"def combine_{function_name(row.kind, dtype)}(a, b):"]
    bools: set[str] = set()

    def write(op: str, *args: str | float) -> str:
        texts = [arg if isinstance(arg, str) else f"tl.full(a.shape, {number_text(arg)}, a.dtype)" for arg in args]
        kind = DType.BOOL if texts[-1] in bools else dtype
        inner: Callable[..., str] | None = expansion(op, kind)
        if inner is not None:
            return inner(write, *args)
        name = f"v{len(lines) - 2}"
        lines.append(f"    {name} = {TRITON_OPS[op](texts, kind)}")
        if OP_TABLE[op].rule is TypeRule.PREDICATE or kind is DType.BOOL:
            bools.add(name)
        return name

    result = row.join(write, "a", "b", dtype)
    return "\n".join([*lines, f"    return {result}"])
