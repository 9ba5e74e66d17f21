"""What became of a sample, or of many that are compiled as one program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotkit_inductor_lower.errors import FakeKernelError
from tools.fuzz.refusals import refusal
from tools.fuzz.tally import FAILURES

from .compare import Difference, differences, needed
from .execute import Run, compiled, fakes_agree, merged, observe
from .known import excused
from .program import DIRECT, Sample
from .stepwise import right_step_by_step

__all__ = ["Outcome", "check", "check_many"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``kind``: equal, refused (a typed error), raises (as eager does), fake (torch's own fake kernel raises what eager
    does not, or says another type, size or stride), known (:mod:`.known` has the reason); or a failure: different,
    crash (an untyped error), silent (only eager raises), died (the process did)."""

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this has to be looked at."""
        return self.kind in FAILURES

    @property
    def family(self) -> str:
        """The outcome without numbers and names."""
        text = self.detail.partition(" in eager")[0]
        text = re.sub(r"\b(s\d+_)?[xvn]\d+(\[\d+\])?", "#", text)
        return f"{self.kind}: {re.sub(r'-?[0-9][0-9.e+-]*|inf|nan|True|False', '#', text)[:100]}"


def check(sample: Sample) -> Outcome:
    """Compile and compare; a dynamic sample is called twice."""
    call = _Lazy(sample)
    outcome = Outcome("equal")
    for again in (False, True) if sample.entry == "dynamic" else (False,):
        outcome = _judged(sample, observe(sample, sample.function(), again), call, again)
        if outcome.kind != "equal":
            return outcome
    return outcome


def check_many(samples: Sequence[Sample]) -> list[tuple[Sample, Outcome]]:
    """The outcome of each; those that eager runs are one program, unless something is wrong with it.

    A failure that only the common program shows is the outcome of that, which takes the place of its first sample.
    """
    settled = {}
    ready = []
    for sample in samples:
        eager = observe(sample, sample.function())
        if eager.error is None and sample.entry not in ("dynamic", "dynamo"):
            ready.append(sample)
        else:
            settled[sample.seed] = (sample, check(sample))
    if len(ready) > 1:
        _check_together(ready, settled)
    for sample in ready:
        if sample.seed not in settled:
            settled[sample.seed] = (sample, check(sample))
    return [settled[sample.seed] for sample in samples]


def _check_together(ready: Sequence[Sample], settled: dict[int, tuple[Sample, Outcome]]) -> None:
    together = merged(ready)
    common = check(together)
    if common.kind == "equal":
        settled.update({sample.seed: (sample, common) for sample in ready})
        return
    for sample in ready:
        settled[sample.seed] = (sample, check(sample))
    alone = all(settled[s.seed][1].kind in ("equal", "raises", "known") for s in ready)
    if common.failed and alone and not _each_right(ready, together):
        settled[ready[0].seed] = (together, common)


def _each_right(ready: Sequence[Sample], together: Sample) -> bool:
    """Whether the results of the common program are right as those of each sample: only alone can all be computed in
    float64."""
    eager, run = observe(together, together.function()), observe(together, _Lazy(together))
    if eager.error is not None or run.error is not None:
        return False
    parts = [(_part(eager, f"s{i}_"), _part(run, f"s{i}_")) for i in range(len(ready))]
    return not any(_compared(sample, *part, again=False).failed for sample, part in zip(ready, parts, strict=True))


def _part(run: Run, prefix: str) -> Run:
    """What belongs to one sample of a common program."""
    names = {
        name: name.replace(prefix, "", 1)
        for name in run.results
        if name.removeprefix("gradient of ").startswith(prefix)
    }
    aliases = {names[name]: where.replace(prefix, "") for name, where in run.aliases.items() if name in names}
    return Run({short: run.results[name] for name, short in names.items()}, aliases)


class _Lazy:
    """Compiles in the first call, so that what compiling raises is seen like what running raises."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.call: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.call is None:
            self.call = compiled(self.sample)
        return self.call(*args)


def _judged(sample: Sample, eager: Run, call: _Lazy, again: bool) -> Outcome:
    run = observe(sample, call, again)
    if eager.error is not None:
        if run.error is not None:
            return Outcome("raises", f"{type(eager.error).__name__}: {_line(eager.error)}")
        reason = excused(sample, Difference("it", "error", f"only eager raises: {eager.error}"), again)
        reason = reason or _unused(sample, run, again)
        return Outcome("known", reason) if reason else Outcome("silent", _line(eager.error))
    if run.error is not None:
        reason = excused(sample, Difference("it", "error", f"only compiled raises: {_line(run.error)}"), again)
        if reason is not None:
            return Outcome("known", reason)
        refused = refusal(run.error)
        if refused is not None:
            return Outcome("fake" if isinstance(run.error, FakeKernelError) else "refused", refused)
        detail = f"{type(run.error).__name__}: {_line(run.error)}"
        fakes = fakes_agree(sample, again)
        misled = isinstance(fakes, Exception) or (sample.entry in DIRECT and any(map(_overlapping, fakes)))
        misled = misled or _DYNAMOS.search(detail) is not None or not _sizes_agree(sample, eager, fakes)
        misled = misled or _types_misjudged(sample, again)
        return Outcome("fake" if misled else "crash", detail)
    return _compared(sample, eager, run, again)


def _compared(sample: Sample, eager: Run, run: Run, again: bool) -> Outcome:
    """What becomes of two runs that raised nothing."""
    found = differences(sample, eager, run, again)
    if not found:
        return Outcome("equal")
    reasons = [excused(sample, difference, again) for difference in found]
    left = [difference for difference, reason in zip(found, reasons, strict=True) if reason is None]
    if not left:
        return Outcome("known", str(reasons[0]))
    claimed = _claimed(sample, again) if any(d.kind in LAYOUT for d in left) else {}
    free = [
        d for d in left if _is_free(d) or (d.kind in LAYOUT and claimed.get(d.where) == _layout(run.results[d.where]))
    ]
    otherwise = any(d.kind in ("dtype", "strides") for d in free)  # then offsets in bytes, or copies, are others too
    wrong = [d for d in left if d not in free and not (otherwise and d.kind == "alias")]
    layouts_only = all(d.kind in LAYOUT for d in wrong)
    if wrong and right_step_by_step(sample, run, wrong, again):
        return Outcome("known", "each call is right for what the calls before it gave")
    real = wrong and not _types_misjudged(sample, again, layouts_only)
    return Outcome("different" if real else "fake", "; ".join(map(str, (wrong or left)[:3])))


def _unused(sample: Sample, run: Run, again: bool) -> str | None:
    """The reason, where eager raises in a call that no result needs: that is not computed."""
    used = needed(sample, [repr(ref) for ref in sample.outputs])
    eager = observe(used, used.function(), again)
    wrong = eager.error is not None or any(
        excused(used, d, again) is None for d in differences(used, eager, run, again)
    )
    return None if wrong else "what nobody uses is not computed and raises nothing"


LAYOUT = ("dtype", "shape", "strides", "strides of ones")


def _is_free(difference: Difference) -> bool:
    """Whether nobody is promised what differs: a ``.grad`` has the layout of its leaf, or is contiguous; only
    ``torch.autograd.grad`` shows how the last operation of the backward left it."""
    return difference.where.startswith("gradient of ") and difference.kind in ("strides", "strides of ones", "is_conj")


#: What torch itself says when its fake kernels fail: in Dynamo, for a written argument with a lazy bit, or for
#: dropout of integers without elements whose sizes are symbolic.
_DYNAMOS = re.compile(
    r"TorchRuntimeError: RuntimeError when making fake tensor call|MathBitsFallback\.h"
    r"|result type Float can't be cast to the desired output type Long"
)


def _sizes_agree(sample: Sample, eager: Run, fakes: Any) -> bool:
    """Whether torch's fake kernels say the sizes that eager's results have."""
    if isinstance(fakes, Exception):
        return False
    pairs = [(eager.results.get(repr(ref)), fake) for ref, fake in zip(sample.outputs, fakes, strict=True)]
    return all(a.shape == b.shape for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _types_misjudged(sample: Sample, again: bool, layouts_only: bool = False) -> bool:
    """Whether torch's fake kernel says another type for what one of the calls gives: the next ones then get that; or
    none, where no more than layouts differ."""
    every = replace(sample, outputs=tuple(ref for call in sample.calls for ref in call.outputs), entry="function")
    eager, fakes = observe(every, every.function(), again), fakes_agree(every, again)
    if eager.error is not None or isinstance(fakes, Exception):
        return layouts_only and eager.error is None
    pairs = [(eager.results[repr(ref)], fake) for ref, fake in zip(every.outputs, fakes, strict=True)]
    return any(isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype is not b.dtype for a, b in pairs)


def _overlapping(fake: Any) -> bool:
    """Whether a fake kernel says that a result has several elements in one place: it took the argument for it."""
    return isinstance(fake, torch.Tensor) and any(
        step == 0 and size > 1 for size, step in zip(fake.shape, fake.stride(), strict=True)
    )


def _claimed(sample: Sample, again: bool) -> dict[str, Any]:
    """Types, sizes and strides that torch's fake kernels say the results have."""
    fakes = fakes_agree(sample, again)
    if isinstance(fakes, Exception):
        return {}
    return {repr(ref): _layout(fake) for ref, fake in zip(sample.outputs, fakes, strict=True)}


def _layout(value: Any) -> Any:
    """Type, sizes and strides, but for strides of dimensions of size one, with which nothing is addressed."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, value.shape, [s for s, n in zip(value.stride(), value.shape, strict=True) if n != 1]


def _line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:300]
