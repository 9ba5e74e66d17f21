"""What the passes share that ask the target who computes a product, a convolution or an attention."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import ExternCall
from ..passes import NO_FUEL, Decision, PassContext
from ..symbolic import Expr
from ..target import Choice

__all__ = ["listed", "take_choice"]


def take_choice(ctx: PassContext, choice: Choice, name: str, call: ExternCall, what: str) -> bool:
    """Whether kernels take the place of ATen's ``call``, which takes fuel; with a record. ``what`` is computed."""
    generated = choice.form != "aten" and ctx.fuel.take()
    reason = choice.reason if generated or choice.form == "aten" else NO_FUEL
    ctx.decisions.append(Decision("contraction", name, call.target, generated, f"{what}: {reason}"))
    return generated


def listed(numbers: Sequence[Expr]) -> str:
    """Sizes or strides as records show them."""
    return f"[{', '.join(map(str, numbers))}]"
