"""Smaller samples with the same outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tools.fuzz.shrink import smallest

from .program import Ref, Sample, refs_in
from .tensors import LAYOUTS

__all__ = ["shrink"]


def shrink(sample: Sample, failing: Callable[[Sample], bool], tries: int = 120) -> Sample:
    """A smaller sample for which ``failing`` still holds, by leaving out or simplifying one thing after another."""
    return _tidy(smallest(sample, lambda found: _smaller(_tidy(found)), lambda s: _holds(s, failing), tries))


def _holds(sample: Sample, failing: Callable[[Sample], bool]) -> bool:
    try:
        return failing(_tidy(sample))
    except (KeyError, IndexError, TypeError, RuntimeError, ValueError):
        return False  # something that was left out is needed


def _tidy(sample: Sample) -> Sample:
    """Without calls and arguments that nothing uses."""
    needed = {ref.name for ref in sample.outputs}
    kept: list[Any] = []
    for call in reversed(sample.calls):
        in_place = call.op.split(".")[1].endswith("_") and not call.op.split(".")[1].endswith("__")
        if call.result in needed or in_place:
            kept.append(call)
            needed |= {ref.name for arg in (*call.args, *(v for _, v in call.kwargs)) for ref in refs_in(arg)}
    tensors = tuple(t for t in sample.tensors if t.name in needed)
    return replace(sample, tensors=tensors, calls=tuple(reversed(kept)))


def _smaller(sample: Sample) -> Iterator[Sample]:
    outputs = sample.outputs
    if len(outputs) > 4:
        half = len(outputs) // 2
        yield replace(sample, outputs=outputs[:half])
        yield replace(sample, outputs=outputs[half:])
    if len(outputs) > 1:
        for index in range(len(outputs)):
            yield replace(sample, outputs=outputs[:index] + outputs[index + 1 :])
    for index in reversed(range(len(sample.calls))):
        without = sample.calls[:index] + sample.calls[index + 1 :]
        gone = sample.calls[index].result
        yield replace(sample, calls=without, outputs=tuple(o for o in outputs if o.name != gone))
        for operand in (a for a in sample.calls[index].args if isinstance(a, Ref)):
            calls = tuple(replace(c, args=_put(c.args, gone, operand)) for c in without)
            yield replace(sample, calls=calls, outputs=tuple(operand if o.name == gone else o for o in outputs))
    for index, tensor in enumerate(sample.tensors):
        for change in _plainer(tensor):
            yield replace(sample, tensors=(*sample.tensors[:index], change, *sample.tensors[index + 1 :]))
    sizes = sorted({n for t in sample.tensors for n in t.size if n > 1}, reverse=True)
    for size in sizes:
        for less in dict.fromkeys((1, 2, 3, size // 2, size - 1)):
            if 0 < less < size:
                yield replace(sample, tensors=tuple(_resized(t, size, less) for t in sample.tensors))
    for index, call in enumerate(sample.calls):
        for number in range(len(call.kwargs)):
            fewer = replace(call, kwargs=call.kwargs[:number] + call.kwargs[number + 1 :])
            yield replace(sample, calls=(*sample.calls[:index], fewer, *sample.calls[index + 1 :]))
    lazy = any(LAYOUTS[t.layout] == "lazy" for t in sample.tensors)
    if sample.entry in ("function", "training", "dynamic") and not lazy:
        without_grad = tuple(replace(t, grad=False) for t in sample.tensors)
        yield replace(sample, entry="direct", tensors=without_grad)


def _put(arg: Any, name: str, other: Ref) -> Any:
    if isinstance(arg, Ref):
        return other if arg.name == name else arg
    if isinstance(arg, tuple | list):
        return type(arg)(_put(item, name, other) for item in arg)
    return arg


def _plainer(tensor: Any) -> Iterator[Any]:
    if tensor.layout != "contiguous":
        yield replace(tensor, layout="contiguous")
    if tensor.fill[0] not in ("normal", "index", "constant"):
        yield replace(tensor, fill=("normal",))
    if tensor.grad:
        yield replace(tensor, grad=False)
    if tensor.fill == ("normal",) and tensor.dtype != "bool":
        yield replace(tensor, fill=("constant", 1))


def _resized(tensor: Any, size: int, less: int) -> Any:
    smaller = tuple(less if n == size else n for n in tensor.size)
    second = None if tensor.second is None else tuple(less if n == size else n for n in tensor.second)
    return replace(tensor, size=smaller, second=second)
