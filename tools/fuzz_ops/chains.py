"""More calls behind the first: on its results, through views, in place, once more with a number that looks alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .draw import Draw
from .program import Call, Ref, overload
from .recipes import recipe_of, targets

__all__ = ["add_calls", "add_twin"]

_VIEWS = """
view reshape permute transpose.int t slice.Tensor select.int diagonal expand unsqueeze squeeze squeeze.dim
flatten.using_ints as_strided unfold split.Tensor unbind.int narrow alias detach
"""
_LEFT_OUT = (
    "empty",
    "rand",
    "bernoulli",
    "dropout",
    "exponential",
    "uniform",
    "normal_functional",
    "backward",
    "prims.",
)


@cache
def _views() -> tuple[str, ...]:
    names = [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _VIEWS.split()]
    return tuple(name for name in names if name in set(targets()))


@cache
def _others() -> tuple[str, ...]:
    return tuple(op for op in targets() if not any(word in op for word in _LEFT_OUT) and op not in _views())


@cache
def _in_place() -> tuple[str, ...]:
    """Operators that write to their first argument, whose functional form is a target."""
    found = []
    for op in _others():
        space, name, kind = op.split(".")
        try:
            schema = overload(f"{space}.{name}_.{kind}")._schema
        except AttributeError:
            continue
        if str(schema.arguments[0].real_type) == "Tensor":
            found.append(op)
    return tuple(found)


def add_calls(d: Draw, number: int, functional: bool) -> None:
    """Up to ``number`` more calls; what eager refuses is left out again."""
    d.reuse = 0.85
    for _ in range(number):
        kind = d.rng.random()
        known = len(d.calls), len(d.tensors), len(d.numbers)
        try:
            if kind < 0.3:
                op = d.rng.choice(_views())
                recipe_of(op)(d, op)
            elif kind < 0.55 and not functional:
                _write(d)
            else:
                op = d.rng.choice(_others())
                recipe_of(op)(d, op)
        except Exception:  # noqa: BLE001 - the draw does not fit what there is
            _take_back(d, known)


def _take_back(d: Draw, known: tuple[int, int, int]) -> None:
    for call in d.calls[known[0] :]:
        d.values.pop(call.result, None)
    for tensor in d.tensors[known[1] :]:
        d.values.pop(tensor.name, None)
    del d.calls[known[0] :], d.tensors[known[1] :], d.numbers[known[2] :]


def _write(d: Draw) -> None:
    """One call in place, on a result or on an argument."""
    op = d.rng.choice(_in_place())
    recipe_of(op)(d, op)
    made = d.calls.pop()
    d.values.pop(made.result)
    space, name, kind = op.split(".")
    d.call(f"{space}.{name}_.{kind}", made.args, dict(made.kwargs))


_ALIKE = ((0.0, -0.0), (0, 0.0), (0, False), (1, 1.0), (1, True), (1.0, True), (2, 2.0), (0.5, 0.5), (-1, -1.0))


def add_twin(d: Draw) -> None:
    """The last call again, on the same tensors, with a number that compares equal to that of the first."""
    if not d.calls:
        return
    last = d.calls[-1]
    for place, arg in enumerate(last.args):
        others = [b for pair in _ALIKE for a, b in (pair, pair[::-1]) if repr(a) == repr(arg)]
        if others and not isinstance(arg, Ref):
            args = [*last.args[:place], d.rng.choice(others), *last.args[place + 1 :]]
            known = len(d.calls), len(d.tensors), len(d.numbers)
            try:
                d.call(last.op, args, dict(last.kwargs))
            except Exception:  # noqa: BLE001 - eager takes the one number and not the other
                _take_back(d, known)
            return


def tensor_results(d: Draw, call: Call) -> list[Ref]:
    """The results of a call that are tensors, or all where it failed."""
    value: Any = d.values.get(call.result)
    if value is None:
        return list(call.outputs)
    parts = value if isinstance(value, list | tuple) else [value]
    return [ref for ref, part in zip(call.outputs, parts, strict=True) if isinstance(part, torch.Tensor)]
