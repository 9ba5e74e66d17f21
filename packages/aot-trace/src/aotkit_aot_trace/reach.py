"""Which gradients of a run come from which of its differentiable results.

Note [Gradients that are None]
    Eager mode gives an input no gradient (``None``, not zeros) where the loss depends on none of the results that lead
    to it; an optimizer leaves such a parameter alone. Which results those are is a matter of autograd's graph and
    not of the recorded one: the gradient of ``floor`` is zeros, of which the recording knows no tangent. So it is read
    off the backward functions of the run. Where one of them hands no gradient on, as a user's own may, the path ends.
    One that stands for a graph of several results says by an attribute ``gradients_from``, for each of its inputs, the
    numbers of the results that the gradient of that input comes from.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["backward_functions", "reached_by", "silent_edges"]

Edge = tuple[Any, int]
"""A backward function, and the number of one of the gradients that it gives."""


@contextmanager
def silent_edges(functions: Sequence[Any]) -> Iterator[set[Edge]]:
    """Context in which a backward runs. The edges over which ``functions`` gave no gradient are in the set then."""
    silent: set[Edge] = set()

    def watch(fn: Any) -> Any:
        def note(given: Sequence[Any], _: Any) -> None:
            silent.update((fn, number) for number, gradient in enumerate(given) if gradient is None)

        return fn.register_hook(note)

    hooks = [watch(fn) for fn in functions]
    try:
        yield silent
    finally:
        for hook in hooks:
            hook.remove()


def reached_by(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], functions: Sequence[Any], silent: Collection[Edge]
) -> list[tuple[int, ...]]:
    """Per leaf, the numbers of the ``outputs`` that give it a gradient; see Note [Gradients that are None].

    ``functions`` are all backward functions behind the outputs.
    """
    edges = {
        fn: [
            (number, to, slot)
            for number, (to, slot) in enumerate(fn.next_functions)
            if to is not None and (fn, number) not in silent
        ]
        for fn in functions
    }
    waiting = dict.fromkeys(functions, 0)
    for targets in edges.values():
        for _, target, _ in targets:
            waiting[target] += 1
    reached: dict[Any, Counter[int]] = {
        fn: Counter() for fn in functions
    }  # per gradient it is given; bit n: by output n
    for number, output in enumerate(outputs):
        if output.grad_fn is not None:
            reached[output.grad_fn][output.output_nr] |= 1 << number
    ready = [fn for fn, count in waiting.items() if count == 0]
    while ready:
        fn = ready.pop()
        given, told = reached[fn], getattr(fn, "gradients_from", None)
        every = _union(given.values())
        for number, target, slot in edges[fn]:
            reached[target][slot] |= every if told is None else _union(given[one] for one in told[number])
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    accumulating = {id(fn.variable): fn for fn in functions if hasattr(fn, "variable")}
    found = []
    for leaf in leaves:
        last = accumulating.get(id(leaf)) if leaf.grad_fn is None else leaf.grad_fn
        bits = _union(reached[last].values()) if last in reached else 0
        found.append(tuple(number for number in range(len(outputs)) if bits >> number & 1))
    return found


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def backward_functions(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """All backward functions behind ``outputs``."""
    seen: set[Any] = set()
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    found: list[Any] = []
    while waiting:
        fn = waiting.pop()
        if fn in seen:
            continue
        seen.add(fn)
        found.append(fn)
        waiting.extend(parent for parent, _ in fn.next_functions if parent is not None)
    return found
