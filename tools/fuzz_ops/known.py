"""Departures from eager that are meant: each with its reason, which docs/limits.md gives users too."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .program import Sample

__all__ = ["KNOWN", "Departure", "excused"]


@dataclass(frozen=True, slots=True)
class Departure:
    """``ops``, ``what`` and ``entry`` are patterns: of an operator that the sample must call, of the difference, and of
    the way to compile."""

    ops: str
    what: str
    reason: str
    entry: str = ""


KNOWN = (
    Departure(
        r"aten\.\S*batch_norm",
        r"\S+: values: \S+ in eager, (nan|-?inf) compiled",
        "the weight over the standard deviation overflows; eager multiplies in another order where strides have gaps",
    ),
    Departure(
        r"aten\.(elu|celu|selu|elu_backward)",
        r"\S+: values: \S+ in eager, nan compiled",
        "gradients at nan are those of eager's vectors, not of its last few elements",
    ),
    Departure(
        r"aten\.(fmod|remainder)",
        r"\S+: values: nan in eager, \S*\d compiled",
        "remainders are exact where eager's vectors give nan for huge quotients",
    ),
    Departure(
        r"aten\.(native_)?(layer|group)_norm\.",
        r"(gradient of )?\S+: values: nan in eager, (-?0\.0|-?inf) compiled",
        "squares overflow, and eager subtracts one infinite sum from another",
    ),
    Departure(
        ".*",
        "only eager raises: .*(not (yet )?(implemented|supported|currently supported)|Unsupported input type)",
        "eager lacks a kernel for the type",
    ),
    Departure(
        r"aten\.",
        r"only eager raises: (grad_input must be contiguous|tensor does not have a device|Found dtype \w+ but)",
        "eager's own derivative fails for the layout, without a weight or for a mixture of types",
    ),
    Departure(
        r"aten\.(ne|eq|lt|le|gt|ge|logical_\w+)_\.",
        r"only eager raises: isDifferentiableType\(grad.scalar_type\(\)\) INTERNAL ASSERT",
        "eager writes a comparison in place into integers and asks for its gradient",
    ),
    Departure(r"aten\.signbit", r"\S+: values: (True|False) in eager", "the sign of a nan"),
    Departure(
        r"aten\.(std|var)_mean",
        r"\S+: values: nan in eager, -?inf compiled",
        "the mean of infinities of one sign is infinite; eager's, which is made of differences, is nan",
    ),
    Departure(r"aten\._safe_softmax", "only eager raises: expected scalar type", "eager's gradient forgets the cast"),
    Departure(".*", "only eager raises: ZeroDivisionError", "devices divide integers by zero to any result", "triton"),
    Departure(".*", "only eager raises: could not create a primitive", "oneDNN does not take these strides"),
    Departure(".*", r"\S+: strides of ones: ", "no element is addressed with the stride of a dimension of size one"),
)


def excused(sample: Sample, difference: str) -> str | None:
    """The reason why a difference is no failure, or ``None``."""
    for departure in KNOWN:
        fits = re.match(departure.what, difference) and re.match(departure.entry, sample.entry)
        if fits and any(re.match(departure.ops, c.op) for c in sample.calls):
            return departure.reason
    return None
