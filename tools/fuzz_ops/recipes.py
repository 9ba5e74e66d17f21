"""How the arguments of an operator are drawn where its schema does not say it all: a recipe per family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from aotkit_inductor_lower.lowering import RULES

from .draw import Draw
from .program import overload

__all__ = ["RECIPES", "recipe", "recipe_of", "targets"]

Recipe = Callable[[Draw, str], None]
RECIPES: dict[str, Recipe] = {}


def recipe(*ops: str) -> Callable[[Recipe], Recipe]:
    """Decorator: the arguments of these operators (``add.Tensor``, of aten if not told) are drawn so."""

    def register(function: Recipe) -> Recipe:
        for op in ops:
            name = op if op.startswith("prims.") else f"aten.{op}"
            RECIPES[name if name.count(".") == 2 else f"{name}.default"] = function
        return function

    return register


def by_schema(d: Draw, op: str) -> None:
    """One call with what the schema says."""
    args, kwargs = d.by_schema(op)
    d.call(op, args, kwargs)


def recipe_of(op: str) -> Recipe:
    """The recipe of an operator."""
    return RECIPES.get(op, by_schema)


_NOT_CALLED = {
    "aten.copysign.default",  # of two numbers, not of tensors
}
#: Arguments that depend on others in a way that no schema tells; eager trusts some of them with its memory.
_TOLD = frozenset(
    {
        *(
            "size",
            "padding",
            "output_size",
            "kernel_size",
            "indices",
            "index",
            "target",
            "input_size",
            "input_sizes",
            "N",
        ),
        *("tensors", "normalized_shape", "pad", "running_mean", "sizes", "shape", "repeats", "shifts", "split_sizes"),
        *("split_size", "chunks", "stride", "output_mask", "mean", "high", "from", "physical_layout", "length", "s"),
        *("fill_value", "end", "step", "m", "offset", "save_mean", "lambd", "p", "input_dtype", "half_to_float"),
    }
)


@cache
def targets() -> tuple[str, ...]:
    """All operators with a lowering rule that can be drawn."""
    from . import indexed, shaped, windowed  # noqa: F401 - they register their recipes

    found = []
    for rule in RULES:
        name = _name(rule)
        if name not in _NOT_CALLED and (name in RECIPES or _fits(name)):
            found.append(name)
    return tuple(found)


def _name(op: Any) -> str:
    return str(op)


def _fits(op: str) -> bool:
    schema = overload(op)._schema
    return not any(argument.name in _TOLD for argument in schema.arguments)
