"""Whether a compiled run is right: equal to eager's, or no farther from what float64 gives."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .execute import Run, observe
from .program import Call, Ref, Sample, overload, refs_in

__all__ = ["Difference", "Wrong", "differences", "near", "needed", "settled"]

# Note [What is right]
#     A result is right if it is eager's to within a few units in the last place. Otherwise both are compared with the
#     same calls of the same numbers in float64: right is what is at most three times as far from that as eager is, or
#     as far as the result moves when the arguments, and what is computed between them and it, do so by a few units in
#     the last place (nobody can ask for more accuracy than that; sums of opposite terms show it). Where a result is not
#     finite, eager's or float64's counts, unless the compiled one is as near to float64's as any finite result must be.
#     How far eager is off is measured for other arguments a few units away, too: at one place it may be right by
#     chance. What eager gives for the same numbers when they lie in memory in another way is right as well: its vectors
#     and the loop for what is left over do not always agree at nan and infinities. Integers in which eager contradicts
#     itself so have no right value (ATen sorts for a median of an expanded tensor in the memory that elements share).
#     Nor has what shows which bits a nan has (``view(dtype)``): eager's vectors make other ones than its loops.

_UNITS = 4
_MOVED = 8  # runs that show how far results move
_EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_EPS |= {torch.complex64: 2.0**-23, torch.complex128: 2.0**-52}
_TINY = {torch.float32: 1.5e-45, torch.float64: 5e-324, torch.bfloat16: 1e-40, torch.float16: 6e-8}
_TINY |= {torch.complex64: 1.5e-45, torch.complex128: 5e-324}


@dataclass(frozen=True, slots=True)
class Wrong:
    """All elements of one result that are wrong: eager's, the compiled ones, and those in float64, if it has any."""

    want: torch.Tensor
    got: torch.Tensor
    true: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Difference:
    """``where`` is the name of a result or argument, ``kind`` one of type, shape, strides, alias, values, ..."""

    where: str
    kind: str
    detail: str
    wrong: Wrong | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.detail}"


def differences(sample: Sample, eager: Run, other: Run, again: bool = False) -> list[Difference]:
    """All in which ``other`` departs from ``eager``; see Note [What is right]."""
    found: list[Difference] = []
    doubtful: list[str] = []
    undefined = {call.result for call in sample.calls if "empty" in call.op or _of_nothing(call, eager)}
    for call in filter(_is_fresh, sample.calls):
        undefined |= {repr(ref) for ref in call.outputs if _overlaps(eager, ref) or _overlaps(other, ref)}
    for name, want in eager.results.items():
        got = other.results.get(name)
        if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
            if type(want) is not type(got) or str(want) != str(got):
                found.append(Difference(name, "value", f"{want!r} in eager, {got!r} compiled"))
            continue
        layout = _layout(name, want, got)
        if layout is not None:
            found.append(layout)
        if (
            (layout is None or layout.kind in ("strides", "strides of ones", "is_neg", "is_conj"))
            and name not in undefined
            and not near(want, got)
        ):
            doubtful.append(name)
        if eager.aliases.get(name) != other.aliases.get(name):
            found.append(Difference(name, "alias", f"{eager.aliases.get(name)} in eager, {other.aliases.get(name)}"))
    return found + settled(sample, eager, other, doubtful, again)


def _of_nothing(call: Call, eager: Run) -> bool:
    """Gradients of pads of nothing: eager leaves them as memory is."""
    grad = eager.results.get(repr(call.args[0])) if call.args else None
    padded = re.search(r"_pad\dd_backward", call.op) is not None
    return padded and isinstance(grad, torch.Tensor) and grad.numel() == 0


def _is_fresh(call: Call) -> bool:
    """Whether an operator's results are no views."""
    return all(returned.alias_info is None for returned in overload(call.op)._schema.returns)


def _overlaps(run: Run, ref: Ref) -> bool:
    """Whether several elements of a result are in one place: which of them stays is not defined. (That only one of two
    runs does so is a difference in strides.)"""
    result = run.results.get(repr(ref))
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or not result.numel():
        return False
    last = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
    return last + 1 < result.numel() or _places(result, last + 1) < result.numel()


def _places(result: torch.Tensor, size: int) -> int:
    return int(torch.arange(size).as_strided(result.shape, result.stride()).unique().numel())


def _layout(name: str, want: torch.Tensor, got: torch.Tensor) -> Difference | None:
    if want.dtype != got.dtype:
        return Difference(name, "dtype", f"{want.dtype} in eager, {got.dtype} compiled")
    if want.shape != got.shape:
        return Difference(name, "shape", f"{tuple(want.shape)} in eager, {tuple(got.shape)} compiled")
    if want.numel() and want.stride() != got.stride():
        kept = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1] for t in (want, got)]
        kind = "strides" if kept[0] != kept[1] else "strides of ones"
        return Difference(name, kind, f"{want.stride()} in eager, {got.stride()} compiled for {tuple(want.shape)}")
    for bit in ("is_neg", "is_conj") if not name.startswith("gradient") else ():
        if getattr(want, bit)() != getattr(got, bit)():
            return Difference(name, bit, f"{getattr(want, bit)()} in eager")
    return None


def near(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether two results are equal to within a few units in the last place."""
    if want.dtype is torch.complex32:  # eager has no comparison of these
        want, got = want.to(torch.complex64), got.to(torch.complex64)
        return bool(torch.allclose(got, want, rtol=_UNITS * 2.0**-10, atol=6e-8, equal_nan=True))
    eps = _EPS.get(want.dtype)
    if eps is None or not want.numel():
        return bool(torch.equal(want, got))
    tiny = _TINY.get(want.dtype, 0.0)
    return bool(torch.allclose(got, want, rtol=_UNITS * eps, atol=_UNITS * tiny, equal_nan=True))


def settled(sample: Sample, eager: Run, other: Run, names: Sequence[str], again: bool) -> list[Difference]:
    """Those results, of ``names``, that float64 does not show to be right."""
    if not names:
        return []
    exact = _in_double(sample, again)
    if exact.error is not None:  # because of a call that may have nothing to do with these
        sample = needed(sample, names)
        exact = _in_double(sample, again)
    moved = [_in_double(sample, again, seed) for seed in range(1, _MOVED + 1)] if exact.error is None else []
    nearby = [_beside(sample, again, seed) for seed in range(1, _MOVED + 1)] if exact.error is None else []
    elsewhere: list[Run] | None = None
    found = []
    for name in names:
        want, got, true = eager.results[name], other.results[name], exact.results.get(name)
        right = _same(want, got)
        if isinstance(true, torch.Tensor) and true.shape == want.shape and want.dtype in _EPS:
            off = [(run.results.get(name), there.results.get(name)) for run, there in nearby]
            right |= _accurate(want, got, true, [run.results.get(name) for run in moved], off)
        elif isinstance(true, torch.Tensor) and true.shape == want.shape and true.dtype == want.dtype:
            right |= got == true  # a comparison, or a place, that hangs on the last bit
            for run in moved:
                there = run.results.get(name)
                right |= there != true if isinstance(there, torch.Tensor) and there.shape == true.shape else False
        if not bool(right.all()):
            elsewhere = [_laid_out(sample, again, step) for step in (1, 2)] if elsewhere is None else elsewhere
            for there in (run.results.get(name) for run in elsewhere):
                if isinstance(there, torch.Tensor) and there.shape == got.shape and there.dtype == got.dtype:
                    right |= _same(there, got)
                    if want.dtype not in _EPS and want.dtype is not torch.complex32:
                        right |= there != want
        if not bool(right.all()):
            for there in (_with_other_nans(sample, again, nan).results.get(name) for nan in (math.nan, -math.nan)):
                if isinstance(there, torch.Tensor) and there.shape == want.shape and there.dtype == want.dtype:
                    right |= ~_same(there, want)
        if not bool(right.all()):
            known = true[~right] if isinstance(true, torch.Tensor) and true.shape == want.shape else None
            wrong = Wrong(want[~right], got[~right], known)
            found.append(Difference(name, "values", _first(right, want, got, true), wrong))
    return found


def needed(sample: Sample, names: Sequence[str]) -> Sample:
    """The sample without outputs other than ``names``, and without calls that they do not need."""
    outputs = tuple(ref for ref in sample.outputs if repr(ref) in names or names[0].startswith("gradient of "))
    needed = {ref.name for ref in outputs}
    calls = []
    for call in reversed(sample.calls):
        if call.result in needed or overload(call.op)._schema.is_mutable:
            needed |= {ref.name for arg in (*call.args, *dict(call.kwargs).values()) for ref in refs_in(arg)}
            calls.append(call)
    return replace(sample, outputs=outputs, calls=tuple(reversed(calls)))


def _same(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    if want.dtype is torch.complex32:
        want, got = want.to(torch.complex64), got.to(torch.complex64)
    if want.dtype not in _EPS:
        return want == got
    return torch.isclose(got, want, rtol=_UNITS * _EPS[want.dtype], atol=_UNITS * _TINY[want.dtype], equal_nan=True)


def _accurate(
    want: torch.Tensor, got: torch.Tensor, true: torch.Tensor, moved: Sequence[Any], nearby: Sequence[tuple[Any, Any]]
) -> torch.Tensor:
    """Which elements are as good as eager's, measured with ``true``; ``nearby``: results of eager for other arguments,
    with the same in float64."""
    eps = _EPS[want.dtype]
    wide = torch.complex128 if want.is_complex() else torch.float64
    w, g, t = want.to(wide), got.to(wide), true.to(wide)
    spread = torch.zeros(t.shape, dtype=torch.float64)
    unsettled = torch.zeros(t.shape, dtype=torch.bool)  # a unit decides whether it is a number
    for there in moved:
        if isinstance(there, torch.Tensor) and there.shape == t.shape:
            unsettled |= t.isfinite() & ~there.isfinite() & ~g.isfinite()
            spread = torch.maximum(spread, (there.to(wide) - t).abs().nan_to_num(nan=0.0, posinf=0.0))
    size = t.abs().nan_to_num(nan=0.0, posinf=0.0)
    floor = _UNITS * (eps * size + _TINY[want.dtype]) + 2 * spread
    if wide == want.dtype:  # nothing is more exact than eager: what is rounded inside shows in no comparison
        floor += 2 * spread + (2 * _UNITS * eps * size.amax() if t.numel() else 0.0)
    ours, eagers = (g - t).abs(), (w - t).abs().nan_to_num(nan=0.0, posinf=0.0)
    for near, there in nearby:
        if isinstance(near, torch.Tensor) and isinstance(there, torch.Tensor) and near.shape == there.shape == t.shape:
            eagers = torch.maximum(eagers, (near.to(wide) - there.to(wide)).abs().nan_to_num(nan=0.0, posinf=0.0))
    overflown = (t.abs() >= torch.finfo(want.dtype).max * (1 - _UNITS * eps)) & (g.abs() == float("inf"))
    if not want.is_complex():
        overflown &= g.signbit() == t.signbit()
    return (ours <= 3 * eagers + floor) | overflown | unsettled | (g.isnan() & t.isnan()) | (g == t)


def _in_double(sample: Sample, again: bool, moved: int = 0) -> Run:
    """The same calls of the same numbers in float64; ``moved``: with arguments some units in the last place off."""
    generator = torch.Generator().manual_seed(moved)
    given = sample.arguments(again)
    eps = _roughness(sample, again) if moved else 0.0
    wide = [_wider(v, generator if moved else None) if isinstance(v, torch.Tensor) else v for v in given]
    inner = moved and (len(sample.calls) > 1 or sample.entry == "training")
    with _Moved(_UNITS * eps, generator) if inner else nullcontext():
        return _observed_in_double(sample, again, wide)


def _beside(sample: Sample, again: bool, seed: int) -> tuple[Run, Run]:
    """Eager mode with arguments some units in the last place off, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    given = sample.arguments(again)
    near = [
        _wider(v, generator).detach().to(v.dtype).requires_grad_(v.requires_grad)
        if isinstance(v, torch.Tensor) and v.dtype in _EPS
        else v
        for v in given
    ]
    wide = [_wider(v, None) if isinstance(v, torch.Tensor) else v for v in near]
    return observe(sample, sample.function(), again, near), _observed_in_double(sample, again, wide)


def _laid_out(sample: Sample, again: bool, step: int) -> Run:
    """Eager mode with the same numbers in other places: one behind the other, with gaps if ``step`` is not 1."""
    given = [_copied(v, step) if isinstance(v, torch.Tensor) else v for v in sample.arguments(again)]
    return observe(sample, sample.function(), again, given)


def _with_other_nans(sample: Sample, again: bool, nan: float) -> Run:
    """Eager mode where each nan that is computed has the bits of ``nan``."""
    with _Nans(nan):
        return observe(sample, sample.function(), again)


class _Nans(TorchDispatchMode):
    """What operators compute has the bits of one nan wherever it is nan."""

    def __init__(self, nan: float) -> None:
        super().__init__()
        self.nan = nan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return result if views else tree_map_only(torch.Tensor, self._replace, result)

    def _replace(self, value: torch.Tensor) -> torch.Tensor:
        if (value.is_floating_point() or value.is_complex()) and not value._is_zerotensor():
            parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            if torch._debug_has_internal_overlap(parts) != 1:  # then it cannot be written to
                parts.masked_fill_(parts.isnan(), self.nan)
        return value


def _copied(value: torch.Tensor, step: int) -> torch.Tensor:
    room = torch.empty(value.numel() * step, dtype=value.dtype)[::step].view(value.shape)
    return room.copy_(value.detach()).requires_grad_(value.requires_grad)


def _wider(value: torch.Tensor, noise: torch.Generator | None) -> torch.Tensor:
    """In double precision, laid out as it is, and off by a little if there is noise."""
    eps = _EPS.get(value.dtype)
    if eps is None:
        return value
    memory = value.detach()
    if not (value.is_conj() or value.is_neg()):  # all of it: views of a copy are other views, if there are any
        memory = memory.as_strided((memory.untyped_storage().nbytes() // memory.itemsize,), (1,), 0)
    made = memory.to(torch.complex128 if value.is_complex() else torch.float64)
    if noise is not None:
        made = made * (1 + (torch.rand(made.shape, generator=noise, dtype=torch.float64) - 0.5) * _UNITS * eps)
    if made.shape != value.shape or made.stride() != value.stride():
        made = made.as_strided(value.shape, value.stride(), value.storage_offset()).detach()
    return made.requires_grad_(value.requires_grad)


def _observed_in_double(sample: Sample, again: bool, given: Sequence[Any]) -> Run:
    calls = tuple(replace(c, args=_doubled(c.args), kwargs=_doubled(c.kwargs)) for c in sample.calls)
    wide = replace(sample, calls=calls)
    drawn = _Drawn()
    if any(_is_random(overload(call.op)) for call in sample.calls):
        arguments = sample.arguments(again)  # which are random, too
        with drawn:
            observe(sample, sample.function(), again, arguments)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # integers become doubles, too
    try:
        with _Drawn(drawn.numbers) if drawn.numbers else nullcontext():
            return observe(wide, wide.function(), again, given)
    finally:
        torch.set_default_dtype(usual)


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


class _Drawn(TorchDispatchMode):
    """Notes what random operators give; or puts what was noted in place of what they give, in the same order: in
    another type they draw other numbers."""

    def __init__(self, given: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
        super().__init__()
        self.numbers: list[Sequence[torch.Tensor]] = []
        self.given = None if given is None else iter(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func):
            results = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
            if self.given is None:
                self.numbers.append([value.detach().clone() for value in results])
            for value, noted in zip(results, next(self.given, ()) if self.given is not None else (), strict=False):
                value.copy_(noted)
        return result


def _roughness(sample: Sample, again: bool) -> float:
    """The coarsest unit among the types of arguments and of what is computed between them and the results.

    In a program of several samples the finest: where that is too little each is looked at by itself.
    """
    every = replace(sample, outputs=tuple(ref for call in sample.calls for ref in call.outputs), entry="function")
    values = observe(every, every.function(), again).results.values()
    found = {_EPS[v.dtype] for v in values if isinstance(v, torch.Tensor) and v.dtype in _EPS}
    return (min if sample.merged else max)(found, default=2.0**-23)


class _Moved(TorchDispatchMode):
    """What operators compute is a little larger or smaller."""

    def __init__(self, share: float, generator: torch.Generator) -> None:
        super().__init__()
        self.share, self.generator = share, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = all(returned.alias_info is None for returned in func._schema.returns)
        return tree_map_only(torch.Tensor, self._move, result) if fresh else result

    def _move(self, value: torch.Tensor) -> torch.Tensor:
        if not (value.is_floating_point() or value.is_complex()) or value._is_zerotensor():  # has no memory
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float64) - 0.5
        return value.mul_(1 + noise.to(value.dtype) * self.share)


def _doubled(arg: Any) -> Any:
    if isinstance(arg, tuple | list):
        return type(arg)(_doubled(item) for item in arg)
    return torch.float64 if isinstance(arg, torch.dtype) and arg.is_floating_point else arg


def _first(right: torch.Tensor, want: torch.Tensor, got: torch.Tensor, true: Any) -> str:
    """The first wrong element, and how many there are."""
    place = tuple((~right).nonzero()[0].tolist())
    third = (
        f", {true[place].item()!r} in float64" if isinstance(true, torch.Tensor) and true.shape == want.shape else ""
    )
    count = f"{int((~right).sum())} of {right.numel()}"
    return f"{want[place].item()!r} in eager, {got[place].item()!r} compiled{third} at {place}; {count} of {want.dtype}"
