"""The error of outputs and gradients against a float64 run, beside eager float32's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

Values = Mapping[str, NDArray[numpy.floating]]

#: A backend is as exact as eager where err <= FACTOR * (err of eager + SLACK).
FACTOR = 3.0
SLACK = 2e-6


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Errors of one backend: per kind (output, grad) the largest, eager's largest, and the tensors out of bounds.
    ``ties``: elements at a kink that the reference has on the backend's side, see Note [Ties at kinks]."""

    largest: dict[str, float]
    largest_eager: dict[str, float]
    out_of_bounds: tuple[str, ...]
    tensors: int
    ties: int = 0

    @property
    def ok(self) -> bool:
        """Whether every tensor is within the bound."""
        return not self.out_of_bounds

    def to_json(self) -> dict[str, object]:
        """Plain data for the results file."""
        return {
            "largest": self.largest,
            "largest_eager": self.largest_eager,
            "out_of_bounds": list(self.out_of_bounds),
            "tensors": self.tensors,
            "ties": self.ties,
            "ok": self.ok,
        }


def relative_errors(values: Values, reference: Values) -> dict[str, float]:
    """err = ||x - x64|| / max(||x64||, 1e-4 * ||all||) per tensor; `all` are the tensors of its kind together.

    A tensor that is missing, has another shape, or is not finite where the reference is has an infinite error.
    """
    totals: dict[str, float] = {}
    for name, x64 in reference.items():
        totals[kind_of(name)] = totals.get(kind_of(name), 0.0) + float(numpy.square(x64, dtype=numpy.float64).sum())
    errors = {}
    for name, x64 in reference.items():
        x = values.get(name)
        if x is None or x.shape != x64.shape:
            errors[name] = float("inf")
            continue
        scale = max(float(numpy.linalg.norm(x64)), 1e-4 * totals[kind_of(name)] ** 0.5)
        distance = float(numpy.linalg.norm(x.astype(numpy.float64) - x64))
        error = 0.0 if distance == 0.0 else (distance / scale if scale > 0.0 else float("inf"))
        errors[name] = error if numpy.isfinite(error) else float("inf")
    return errors


def kind_of(name: str) -> str:
    """`grad:encoder.weight` -> `grad`."""
    return name.partition(":")[0]


def save(path: str, values: Values) -> None:
    """Write named arrays to an .npz file."""
    arrays: dict[str, Any] = dict(values)
    numpy.savez(path, **arrays)


def load(path: str | Path) -> dict[str, Any]:
    """Named arrays of an .npz file."""
    with numpy.load(path, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def compare(
    values: Values, eager: Values, reference: Values, eager_reference: Values | None = None, ties: int = 0
) -> ErrorReport:
    """Errors of a backend and of eager against the float64 reference, or eager's against one of its own. ``ties``: the
    number of elements that ``reference`` has on the backend's side of a kink."""
    own, base = relative_errors(values, reference), relative_errors(eager, eager_reference or reference)
    unexpected = sorted(set(values) - set(reference))
    beyond = [name for name, error in own.items() if not error <= FACTOR * (base[name] + SLACK)]
    return ErrorReport(
        largest=largest_by_kind(own),
        largest_eager=largest_by_kind(base),
        out_of_bounds=tuple(beyond + unexpected),
        tensors=len(own),
        ties=ties,
    )


def largest_by_kind(errors: Mapping[str, float]) -> dict[str, float]:
    """The largest error of each kind."""
    found: dict[str, float] = {}
    for name, error in errors.items():
        found[kind_of(name)] = max(error, found.get(kind_of(name), 0.0))
    return found
