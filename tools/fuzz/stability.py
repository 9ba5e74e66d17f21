"""Whether a program shows more of its numbers than their accuracy: the last bits as integers, or what is left of a sum
of opposite terms. Then no two correct implementations of ``sin`` agree about it, and a comparison says nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .compare import Run, differences, observe, weighted
from .program import Program

__all__ = ["is_unstable", "rounds_as_well"]

#: Operations whose result the order of additions, a fused multiply-add or another polynomial moves.
_ROUNDED = re.compile(r"aten::(sin|tanh|sum|mean|mm|bmm|mv|dot|addmm|addcmul|lerp|cumsum|logcumsumexp)_?$")
_UNITS = 4  # of the last place
_TIMES = 3  # eager's error, as in the fuzzer over arguments
_MARGIN = 16  # may a compiled result be further from eager's than the moved one is: sums of several roundings


def is_unstable(program: Program, eager: Run, run: Run, shift: float) -> bool:
    """Whether eager's own results move about as far as ``run`` is away from them, in every fact in which the two
    differ, when each rounded operation is off by some units in the last place."""
    wrong = _facts(differences(eager, run))
    for direction in (1.0, -1.0):
        moved = observe(program, _moved(program.function(), direction), shift)
        far = _facts(differences(eager, moved))
        reached = {fact for fact in far if _distance(eager, run, fact) <= _MARGIN * _distance(eager, moved, fact)}
        wrong -= reached
    return not wrong


def rounds_as_well(program: Program, eager: Run, run: Run, shift: float) -> bool:
    """Whether ``run`` departs from eager in gradients of half precision alone, and is about as near to those of the
    same program in single precision as eager is, or as the sum of eager's gradients of one output after the other:
    in which order the gradients of views are added to one another is not settled."""
    wrong = _facts(differences(eager, run))
    if "bfloat16" not in program.script() or not all(fact.endswith(" gradient") for fact in wrong):
        return False
    wide = replace(
        program,
        setup=tuple(_in_single(text) for text in program.setup),
        body=tuple(_in_single(text) for text in program.body),
        outputs=tuple(_in_single(text) for text in program.outputs),
        afterwards=None,
    )
    exact, apart = observe(wide, wide.function(), shift), _one_after_the_other(program, shift)
    return all(
        _distance(exact, run, fact) <= _TIMES * max(_distance(exact, eager, fact), _distance(exact, apart, fact))
        for fact in wrong
    )


def _one_after_the_other(program: Program, shift: float) -> Run:
    """The gradients of each output by itself, added up in their own type."""
    named = program.make(shift)
    inputs = [named[name] for name in program.inputs]
    outputs = program.function()(*inputs)
    starts = [o for i, o in enumerate(outputs) if i not in program.ignored]
    run = Run()
    for name, leaf in named.items():
        if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf):
            continue
        total = torch.zeros_like(leaf).detach()
        for term in weighted([*starts, *inputs]):
            (found,) = torch.autograd.grad(term, leaf, retain_graph=True, allow_unused=True)
            total = total if found is None else total + found
        run.facts[f"{name} gradient"] = total
    return run


def _in_single(text: str) -> str:
    return text.replace("torch.bfloat16", "torch.float32")


def _facts(sentences: list[str]) -> set[str]:
    return {sentence.partition(": ")[0] for sentence in sentences}


def _distance(eager: Run, other: Run, fact: str) -> float:
    expected, got = eager.facts.get(fact), other.facts.get(fact)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor) or expected.shape != got.shape:
        return float("inf")
    apart = (expected.to(torch.complex128) - got.to(torch.complex128)).abs().nan_to_num(nan=0.0)
    return float(apart.max()) if apart.numel() else 0.0


def _moved(function: Callable[..., Any], direction: float) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        with _Moved(direction):
            return function(*inputs)

    return call


class _Moved(TorchDispatchMode):
    """Rounded operations give results that are some units in the last place larger (or smaller), and a nan with other
    bits."""

    def __init__(self, direction: float) -> None:
        super().__init__()
        self.direction = direction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, self._move, result) if _ROUNDED.match(func._schema.name) else result

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            parts = torch.view_as_real(value) if value.is_complex() else value
            parts.mul_(1 + self.direction * _UNITS * torch.finfo(value.dtype).eps)
            parts.masked_fill_(parts.isnan(), math.nan)
        return value
