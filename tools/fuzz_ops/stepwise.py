"""Chains of calls, call by call: whether each is right for what the calls before it gave in the compiled program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .compare import Difference, near, settled
from .execute import Run, compiled, observe
from .known import excused
from .program import Call, Ref, Sample

__all__ = ["right_step_by_step"]

# Note [Differences that calls make larger]
#     ``acos(exp(x))`` of an x of 1e-14 for 0 is nan for 0, and a sort shows where equal numbers were: neither float64
#     nor small changes of the arguments tell whether the last call of such a chain is right. So all calls are looked
#     at one after the other: the program is compiled again with a copy of what each call gave among its results, and
#     eager mode is run with those as what the calls before gave. Each call is then judged as if it were alone.


def right_step_by_step(sample: Sample, run: Run, wrong: list[Difference], again: bool) -> bool:
    """Whether the wrong values of a chain are right, or known, call by call; only of a forward of several calls."""
    if len(sample.calls) < 2 or sample.merged or any(d.kind != "values" or _is_gradient(d) for d in wrong):
        return False
    watched = _watched(sample, again)
    ours = observe(watched, compiled(watched), again)
    if ours.error is not None or not all(_is_the_same(run, ours, sample, d.where) for d in wrong):
        return False
    given: dict[str, torch.Tensor] = {}
    for copies in _by_call(watched):
        program = replace(watched, given=tuple(given.items()))
        eager = observe(program, program.function(), again)
        if eager.error is not None:
            return False
        pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name in copies:
            want, got = eager.results.get(name), ours.results.get(name)
            if isinstance(want, torch.Tensor):
                if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
                    return False
                pairs.append((name, want, got))
        doubtful = [name for name, want, got in pairs if not near(want, got)]
        left = settled(program, eager, ours, doubtful, again)
        if any(excused(program, difference, again) is None for difference in left):
            return False
        given |= {name.removeprefix("copy_"): got for name, _, got in pairs}
    return True


def _is_gradient(difference: Difference) -> bool:
    return difference.where.startswith("gradient of ")


def _is_the_same(run: Run, ours: Run, sample: Sample, where: str) -> bool:
    """Whether the program with copies gives what the program gave: otherwise it tells nothing."""
    got, there = run.results.get(where), ours.results.get(where)
    return isinstance(got, torch.Tensor) and isinstance(there, torch.Tensor) and near(got, there)


def _watched(sample: Sample, again: bool) -> Sample:
    """The sample with a copy of the results of each call, made before the next call, without gradients."""
    every = replace(sample, outputs=tuple(ref for call in sample.calls for ref in call.outputs), entry="function")
    results = observe(every, every.function(), again).results  # not all are tensors
    calls: list[Call] = []
    copies: list[Ref] = []
    for call in sample.calls:
        calls.append(call)
        for ref in (r for r in call.outputs if isinstance(results.get(repr(r)), torch.Tensor)):
            calls.append(Call(f"copy_{ref!r}", "aten.clone.default", (ref,)))
            copies.append(Ref(calls[-1].result))
    tensors = tuple(replace(t, grad=False) for t in sample.tensors)
    entry = "function" if sample.entry == "training" else sample.entry
    return replace(sample, tensors=tensors, calls=tuple(calls), outputs=(*sample.outputs, *copies), entry=entry)


def _by_call(watched: Sample) -> Iterator[list[str]]:
    """The names of the copies of each call's results."""
    copies: list[str] = []
    for call in (*watched.calls, None):
        if call is not None and call.result.startswith("copy_"):
            copies.append(call.result)
        elif copies:
            yield copies
            copies = []
