"""A sample for a seed and a goal: the operator, the type and the layout that it is to cover."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from .chains import add_calls, add_twin, tensor_results
from .draw import Draw
from .program import DIRECT, Sample, overload
from .recipes import recipe_of
from .tensors import LAYOUTS, Tensor

__all__ = ["Goal", "Impossible", "generate", "misfit"]

Goal = tuple[str, str, str]


class Impossible(Exception):
    """No sample could be made for a seed and a goal."""


def generate(seed: int, goal: Goal, entry: str = "direct", calls: int = 1, fill: str = "") -> Sample:
    """The sample of a seed: always the same for the same arguments. ``fill``: how most of its tensors are filled.
    Raises :class:`Impossible`."""
    op, dtype, layout = goal
    if entry == "training" and "backward" in op:
        entry = "function"  # most have no derivative of their own
    rng = random.Random(f"{seed} {op} {dtype} {layout} {entry} {calls}")
    if entry in DIRECT and LAYOUTS[layout] == "lazy":
        layout = "offset"  # the wrappers settle lazy bits before kernels see a tensor
    d = Draw(rng, dtype, layout, grad=entry == "training", dynamic=entry == "dynamic")
    d.lazy = entry not in DIRECT
    d.fill = fill
    if entry == "triton":
        d.most = 300
    torch.manual_seed(seed)
    failed = False
    try:
        recipe_of(op)(d, op)
    except Exception as error:
        if not d.calls:
            raise Impossible(f"{op}: {type(error).__name__}: {error}") from error
        failed = True
    if "empty" in op:
        pass  # what it holds is nobody's: nothing is computed with it
    elif not failed and calls > 1:
        add_calls(d, calls - 1, functional=entry in DIRECT)
    elif not failed and rng.random() < 0.3:
        add_twin(d)
    outputs = tuple(ref for call in d.calls for ref in tensor_results(d, call))
    outputs = outputs[-4:] if entry == "training" else outputs[-8:]
    tensors = tuple(_second_sizes(d)) if entry == "dynamic" else tuple(d.tensors)
    return Sample(seed, tensors, tuple(d.calls), outputs, tuple(d.numbers), entry, goal)


def _second_sizes(d: Draw) -> list[Tensor]:
    """One or two sizes are others in the second call, wherever they occur."""
    sizes = sorted({n for t in d.tensors for n in t.size if n > 1})
    changed = {n: d.pick(n + 1, n + 3, 2 * n, max(n - 1, 2), 0, 1) for n in d.rng.sample(sizes, min(len(sizes), 2))}
    return [replace(t, second=tuple(changed.get(n, n) for n in t.size)) for t in d.tensors]


def misfit(sample: Sample) -> Sample:
    """The sample with one tensor of another size, which most operators refuse: what eager refuses must be refused."""
    results = [part.type for call in sample.calls for part in overload(call.op)._schema.returns]
    if not sample.tensors or any(isinstance(kind, torch.ListType) for kind in results):
        raise Impossible("no tensor, or a number of results that follows its size")
    rng = random.Random(f"misfit {sample.seed} {sample.goal}")
    place = rng.randrange(len(sample.tensors))
    tensor = sample.tensors[place]
    at = rng.randrange(len(tensor.size) + 1)
    if at == len(tensor.size):
        size = rng.choice(((1, *tensor.size), tensor.size[1:]))
    else:
        n = tensor.size[at]
        size = (*tensor.size[:at], rng.choice((1, n + 1, max(n - 1, 0), 2 * n)), *tensor.size[at + 1 :])
    return replace(sample, tensors=(*sample.tensors[:place], replace(tensor, size=size), *sample.tensors[place + 1 :]))
