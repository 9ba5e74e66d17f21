"""Random operations that are run again from a random state of before give the value they gave then.

Note [Random state while tracing]
    Activation checkpointing remembers the state of the random generator, and runs its region again in the backward from
    that state, so that dropout has the same mask. While a function is traced nothing is drawn: all states would be
    the same, and the second run would be recorded as one with a mask of its own. So each random operation
    moves the process's generator to a state of its own (it is put back after the trace), and an operation that meets a
    state which it has met before is the earlier one: it is given the value recorded then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotkit_functionalize import Unsupported

from .random_layouts import drawn_as_in_eager

__all__ = ["with_replay"]

_NAMES = """
    bernoulli binomial cauchy exponential geometric log_normal multinomial native_dropout normal normal_functional
    poisson rand rand_like randint randint_like randn randn_like random randperm rrelu_with_noise
    rrelu_with_noise_functional uniform _standard_gamma _sample_dirichlet _fused_dropout
"""
_FACTOR, _STEP = 6364136223846793005, 1442695040888963407  # a linear congruence, so that seeds do not meet by chance


@functools.cache
def _random_operators() -> tuple[torch._ops.OpOverload, ...]:
    found = []
    for name in _NAMES.split():
        packet = getattr(torch.ops.aten, name, None)
        overloads = () if packet is None else tuple(getattr(packet, o) for o in packet.overloads())
        found += [o for o in overloads if torch.Tag.nondeterministic_seeded in o.tags and not o._schema.is_mutable]
    return tuple(found)


def with_replay(
    table: Mapping[Any, Callable[..., Any]], in_forward: Callable[[], bool], *, by_memory: bool = True
) -> dict[Any, Callable[..., Any]]:
    """``table`` for one trace, with the random operators that it leaves as they are."""
    replay = _Replay(in_forward, by_memory)
    random: dict[Any, Callable[..., Any]] = {op: functools.partial(replay.call, op) for op in _random_operators()}
    return random | dict(table)


class _Replay:
    def __init__(self, in_forward: Callable[[], bool], by_memory: bool) -> None:
        self.in_forward, self.by_memory = in_forward, by_memory
        self.known: dict[Any, Any] = {}
        self.running = False
        self.expected = torch.default_generator.initial_seed()

    def _draw(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        return drawn_as_in_eager(op, args, kwargs) if self.by_memory else op(*args, **kwargs)

    def call(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """In the backward the value of the run from the same state, else a new one. ``NotImplemented``: as usual."""
        if self.running:
            return NotImplemented
        if kwargs.get("generator") is not None:
            self.running = True
            try:
                return self._draw(op, args, kwargs)
            finally:
                self.running = False
        seed = torch.default_generator.initial_seed()
        if self.in_forward() and seed != self.expected:
            raise Unsupported(
                "the function sets the state of the random generator (torch.manual_seed, torch.set_rng_state)",
                "that would happen once, while the function is captured, and not at each call",
                "Set it outside of the compiled region, or pass a torch.Generator to the random operations",
            )
        self.expected = (seed * _FACTOR + _STEP) % (1 << 63)
        torch.default_generator.manual_seed(self.expected)
        key = (seed, op, _description((args, tuple(sorted(kwargs.items())))))
        if self.in_forward() or key not in self.known:
            self.running = True
            try:
                self.known[key] = self._draw(op, args, kwargs)
            finally:
                self.running = False
        return self.known[key]


def _description(value: Any) -> Any:
    """What a random operation depends on, as something to look up: sizes, types and numbers, not elements."""
    if isinstance(value, torch.Tensor):
        return ("tensor", *(str(s) for s in value.shape), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(_description(v) for v in value)
    return str(value)
