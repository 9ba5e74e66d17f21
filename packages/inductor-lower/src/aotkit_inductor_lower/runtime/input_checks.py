"""Whether the arguments of a call are those that a graph was compiled for: for callers whom no guards protect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import InputMismatchError
from ..launch_plan import CompiledProgram, LaunchPlan
from ..symbolic import Expr, Symbol, SymbolKind, with_computed

__all__ = ["input_check"]

Numbers = tuple[int | None, ...]


def input_check(compiled: CompiledProgram) -> Callable[[list[Any]], None]:
    """A function that raises :class:`InputMismatchError` for arguments of another type, size or stride: kernels compute
    addresses from those that they were compiled for. Sizes that are symbols may be any, but each symbol stands for one
    number. Nor may kernels be given arguments that are lazily negated or conjugated."""
    plan = compiled.plan
    varying = _varying(plan)
    expected: list[tuple[str, torch.dtype, Numbers, Numbers] | None] = []
    for name in plan.inputs:
        if name.startswith("$"):
            expected.append(None)
            continue
        buffer = plan.buffer(name)
        sizes, strides = (tuple(e.constant for e in exprs) for exprs in (buffer.sizes, buffer.strides))
        expected.append((name, getattr(torch, buffer.dtype), sizes, strides))

    def check(args: list[Any]) -> None:
        if len(args) != len(expected):
            raise InputMismatchError(f"{plan.name} takes {len(expected)} arguments, not {len(args)}")
        for arg, wanted in zip(args, expected, strict=True):
            if wanted is None or not isinstance(arg, torch.Tensor):
                continue
            if plan.slots and (arg.is_neg() or arg.is_conj()):  # kernels read memory, where the bit is not
                raise InputMismatchError(
                    f"the argument {wanted[0]} is lazily negated or conjugated; give resolve_neg().resolve_conj() of it"
                )
            if not _fits(arg, *wanted[1:]):
                name, dtype, sizes, strides = wanted
                raise InputMismatchError(
                    f"the argument {name} is a tensor of {arg.dtype}, sizes {tuple(arg.shape)} and strides "
                    f"{arg.stride()}, and the graph was compiled for {dtype}, sizes {_text(sizes)} and strides "
                    f"{_text(strides)}"
                )
        if varying:
            _check_varying(plan, args, varying)

    return check


_Varying = tuple[int, str, tuple[Expr, ...], tuple[Expr, ...]]


def _varying(plan: LaunchPlan) -> list[_Varying]:
    """Position, name, sizes and strides of the inputs whose sizes or strides are no constants."""
    found = []
    for position, name in enumerate(plan.inputs):
        if not name.startswith("$"):
            buffer = plan.buffer(name)
            if any(e.constant is None for e in (*buffer.sizes, *buffer.strides)):
                found.append((position, name, tuple(buffer.sizes), tuple(buffer.strides)))
    return found


def _check_varying(plan: LaunchPlan, args: list[Any], varying: list[_Varying]) -> None:
    """The same for what symbols stand for, which the first argument that has one tells."""
    env: dict[Symbol, int] = {}
    for symbol, position, kind, dim in plan.symbol_sources:
        arg = args[position]
        if kind in ("size", "stride"):
            value = arg.shape[dim] if kind == "size" else arg.stride(dim)
        else:
            value = arg if kind == "int" else max(arg if kind == "above" else -arg, 0)
        env[Symbol(symbol, SymbolKind.SIZE)] = value
    env = with_computed(plan.computed_sizes, env)
    for position, name, *exprs in varying:
        arg = args[position]
        if not isinstance(arg, torch.Tensor):
            continue
        sizes, strides = (tuple(int(e.evaluate(env)) for e in each) for each in exprs)
        if not _fits(arg, arg.dtype, sizes, strides):
            raise InputMismatchError(
                f"the argument {name} has sizes {tuple(arg.shape)} and strides {arg.stride()}; by those of the other "
                f"arguments they are {sizes} and {strides}"
            )


def _fits(arg: torch.Tensor, dtype: torch.dtype, sizes: Numbers, strides: Numbers) -> bool:
    if arg.dtype is not dtype or arg.dim() != len(sizes):
        return False
    if any(want is not None and n != want for n, want in zip(arg.shape, sizes, strict=True)):
        return False
    if arg.numel() == 0 or arg.layout is not torch.strided:
        return True
    places = zip(arg.shape, arg.stride(), strides, strict=True)
    return all(want is None or n == 1 or step == want for n, step, want in places)


def _text(numbers: Numbers) -> str:
    return str(tuple("any" if n is None else n for n in numbers)).replace("'any'", "any")
