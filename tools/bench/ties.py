"""Which elements fell on the other side of a kink than in float64, and gradients in float64 as if they had there, too.

Note [Ties at kinks]
    A ``relu`` has no derivative at 0. Of an activation that lies nearer to 0 than float32 can tell, one order of a sum
    finds it above and another below, both rightly, and the gradients behind it differ by a whole element: 1e-2 of a
    tensor where roundings make 1e-5. So a comparison of gradients with float64 says nothing of a backend's arithmetic
    as long as both have such an element on different sides.

    What decides is which elements are near enough to the kink (:data:`NEAR` times the mean rounding error of eager's
    activations there), and which of these a backend had on the other side. The latter is seen in its gradients: each
    candidate is moved across in float64, alone, which changes the gradients by a direction of its own, and the
    backend's distance from the reference is a sum of such directions, each taken whole or not at all. (Least squares;
    a share that is not near 1 is not taken.) Then float64 runs once more with these on the backend's side, and the
    usual bound holds for what is left. Eager's own error, which the bound is made of, is found in the same way, so that
    elements which eager had on the other side widen no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from tools.bench.numerics import Values, kind_of

__all__ = ["Tie", "Watch", "candidates", "taken"]

NEAR = 4.0  # times the mean error, within which an element may be on either side
MOST = 48  # candidates, each of which takes a step in float64
SHARE = 0.1  # how far from 1 a share may be

Step = Callable[["Watch"], Values]


@dataclass(frozen=True, slots=True)
class Tie:
    """An element of the input of a function with a kink: the number of the call, the element's, the kink, and how far
    it lies from it in float64, in mean errors."""

    call: int
    element: int
    kink: float
    distance: float


def _kinks(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
    if function is F.relu:
        return (0.0,)
    if function is F.relu6:
        return (0.0, 6.0)
    given = dict(zip(("input", "min_val", "max_val"), args, strict=False)) | dict(kwargs)
    return (float(given.get("min_val", -1.0)), float(given.get("max_val", 1.0)))


@dataclass
class Watch(TorchFunctionMode):
    """Follows a forward: keeps what functions with kinks are given, and moves elements across."""

    moved: Sequence[Tie] = ()
    inputs: list[torch.Tensor] = field(default_factory=list)
    kinks: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, of moved inputs if it is one with kinks."""
        if func in (F.relu, F.relu6, F.hardtanh) and args:
            args = (self._followed(args[0], _kinks(func, args, kwargs or {})), *args[1:])
        return func(*args, **(kwargs or {}))

    def _followed(self, x: torch.Tensor, kinks: tuple[float, ...]) -> torch.Tensor:
        call = len(self.inputs)
        self.inputs.append(x.detach().clone())
        self.kinks.append(kinks)
        change = torch.zeros_like(x.detach())
        for tie in self.moved:
            if tie.call == call:
                offset = tie.kink - float(self.inputs[call].reshape(-1)[tie.element])
                beyond = 1e-13 if offset >= 0 else -1e-13
                change.view(-1)[tie.element] = offset + beyond
        return x + change if bool(change.any()) else x  # an addition, so that gradients pass


def candidates(reference: Watch, eager: Watch) -> list[Tie]:
    """Elements that float32 cannot place, the nearest first. Of forwards in float64 and in float32."""
    found = []
    for call, (x, rounded) in enumerate(zip(reference.inputs, eager.inputs, strict=True)):
        error = float((x - rounded.double()).square().mean().sqrt())
        for kink in reference.kinks[call]:
            far = (x - kink).abs().reshape(-1)
            near = (far < NEAR * error).nonzero().reshape(-1).tolist()
            found += [Tie(call, element, kink, float(far[element]) / error) for element in near]
    return sorted(found, key=lambda tie: tie.distance)[:MOST]


def taken(ties: Sequence[Tie], step: Step, reference: Values, backends: Mapping[str, Values]) -> dict[str, list[Tie]]:
    """The ties that each backend had on the other side than the reference. ``step``: one in float64, followed."""
    if not ties:
        return {name: [] for name in backends}
    names = sorted(name for name in reference if kind_of(name) == "grad")
    norms = {name: float(numpy.linalg.norm(reference[name])) for name in names}
    least = 1e-4 * sum(norm**2 for norm in norms.values()) ** 0.5

    def flat(values: Values) -> NDArray[numpy.float64]:
        parts = [values[name].astype(numpy.float64).ravel() / max(norms[name], least) for name in names]
        return numpy.concatenate(parts)

    start = flat(reference)
    directions = numpy.stack([flat(step(Watch([tie]))) - start for tie in ties])
    sizes = numpy.maximum(numpy.linalg.norm(directions, axis=1), 1e-300)
    directions /= sizes[:, None]
    products = directions @ directions.T
    found = {}
    for name, values in backends.items():
        shares = numpy.linalg.lstsq(products, directions @ (flat(values) - start), rcond=1e-9)[0] / sizes
        found[name] = [tie for tie, share in zip(ties, shares, strict=True) if abs(share - 1) < SHARE]
    return found
