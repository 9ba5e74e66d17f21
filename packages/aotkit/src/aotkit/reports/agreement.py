"""Whether a compiled function computes what it should, measured by eager's own rounding error.

Note [Right or rounded]
    A compile may round elsewhere than eager does, and either may be nearer to the truth. So neither is asked to equal
    the other: both are compared with the same function in float64, and the compiled one may be a few times as far off
    as eager is. Integers and booleans are to be eager's, or what float64 gives. Where the function does not run in
    float64, eager itself is the measure, within ten times the tolerances of ``torch.testing``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..backend import BackendFn, make_backend
from ..environment import read_environment
from ..options import Options

__all__ = ["Agreement", "Comparison", "compare"]

_TIMES_EAGER = 4.0
_ROUNDINGS = 32.0
_WITHOUT_REFERENCE = 10.0
_DOUBLE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


@dataclass(frozen=True, slots=True)
class Agreement:
    """The answer of :func:`compare`.

    Attributes:
        right: nothing is farther from the truth than eager's own error, and rounding, explain.
        error: the largest absolute error of the compiled results.
        eager_error: the largest absolute error of the eager results.
        where: the first result that is wrong, or empty.
        reference: what errors are measured by: ``float64``, or ``eager`` where the function does not run in float64.
    """

    right: bool
    error: float
    eager_error: float
    where: str
    reference: str

    def __str__(self) -> str:
        errors = f"largest error {self.error:.3g}, eager's own {self.eager_error:.3g}, measured by {self.reference}"
        return f"right: {errors}" if self.right else f"wrong in {self.where}: {errors}"


def compare(fn: Callable[..., Any], *args: Any, options: Options | None = None, **kwargs: Any) -> Agreement:
    """Run ``fn`` eagerly, in float64 and compiled, with its backward, and compare results, gradients and arguments.

    Works on copies of the module and the arguments. ``options`` are those of the compile, which is not looked up in the
    cache. A function that draws random numbers is compiled to draw eager's.
    """
    chosen = (options or read_environment().options()).patch(cache=False)
    comparison = Comparison(fn, args, kwargs)
    return comparison.of(make_backend(chosen.patch(**comparison.needs)))


class Comparison:
    """Eager's results and the truth, computed once, for one backend after the other.

    ``needs``: options without which no compile can agree.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._given = (fn, _leaf_arguments((tuple(args), dict(kwargs))))
        self.eager = self._observe(lambda f: f)
        self.reference = "float64"
        try:
            self.truth = self._observe(lambda f: f, double=True)
        except Exception:  # noqa: BLE001  # whatever a function raises that is not made for float64
            self.reference, self.truth = "eager", self.eager
        if [name for name, _ in self.truth] != [name for name, _ in self.eager]:
            self.reference, self.truth = "eager", self.eager
        again = self._observe(lambda f: f, seed=1)
        random = any(not _equal(a, b) for (_, a), (_, b) in zip(self.eager, again, strict=False))
        self.needs: dict[str, Any] = {"rng": "eager"} if random else {}
        if random:  # other numbers are drawn in float64
            self.reference, self.truth = "eager", self.eager

    def of(self, backend: BackendFn) -> Agreement:
        """Compile with ``backend`` and compare. What the compile or the call raises is passed on."""
        torch._dynamo.reset()
        compiled = self._observe(lambda f: torch.compile(f, backend=backend))
        if [name for name, _ in compiled] != [name for name, _ in self.eager]:
            return Agreement(False, float("inf"), 0.0, "which results there are", self.reference)
        where, error, eager_error = "", 0.0, 0.0
        for (name, ours), (_, eager), (_, truth) in zip(compiled, self.eager, self.truth, strict=True):
            right, own, eagers = _judge(ours, eager, truth, self.reference)
            error, eager_error = max(error, own), max(eager_error, eagers)
            if not right and not where:
                where = name
        return Agreement(not where, error, eager_error, where, self.reference)

    def _observe(
        self, compiled: Callable[[Any], Any], *, double: bool = False, seed: int = 0
    ) -> list[tuple[str, torch.Tensor]]:
        """Named results, gradients, arguments and buffers after one call on copies."""
        fn, (args, kwargs) = copy.deepcopy(self._given)  # functions are not copied
        if double:
            fn = fn.double() if isinstance(fn, torch.nn.Module) else fn
            args, kwargs = pytree.tree_map_only(torch.Tensor, _in_double, (args, kwargs))
        leaves = {f"argument {i}": t for i, t in enumerate(_tensors((args, kwargs)))}
        if isinstance(fn, torch.nn.Module):
            leaves |= dict(fn.named_parameters()) | dict(fn.named_buffers())
        torch.manual_seed(seed)
        outputs = _tensors(compiled(fn)(*args, **kwargs))
        found = [(f"result {i}", t) for i, t in enumerate(outputs)]
        found += [(f"{name} after the call", t) for name, t in leaves.items()]
        found += _gradients(outputs, {n: t for n, t in leaves.items() if t.requires_grad and t.is_leaf})
        return [(name, t.detach().clone()) for name, t in found]


def _gradients(outputs: list[torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    outputs = [o for o in outputs if o.requires_grad]
    if not outputs or not leaves:
        return []
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    weights = [weight.to(device=o.device, dtype=o.dtype) for weight, o in zip(drawn, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    return [(f"gradient of {name}", g) for name, g in zip(leaves, found, strict=True) if g is not None]


def _judge(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, reference: str) -> tuple[bool, float, float]:
    """Whether a result is right, its largest error and eager's."""
    if ours.shape != eager.shape or ours.dtype != eager.dtype or truth.shape != eager.shape:
        return False, float("inf"), 0.0
    if not (eager.is_floating_point() or eager.is_complex()):
        right = bool(((ours == eager) | (ours == truth.to(eager.dtype))).all())
        return right, 0.0 if right else float("inf"), 0.0
    wide = torch.complex128 if eager.is_complex() else torch.float64
    a, b, c = (t.to(wide) for t in (ours, eager, truth))
    finite = torch.isfinite(b)
    same = torch.equal(torch.isfinite(a), finite) and _equal(a[~finite], b[~finite])
    a, b, c = a[finite], b[finite], c[finite]
    if not same or not a.numel():
        return same, 0.0 if same else float("inf"), 0.0
    own, eagers = (a - c).abs(), (b - c).abs()
    eps = torch.finfo(eager.dtype).eps
    if reference == "eager":
        allowed = _WITHOUT_REFERENCE * (1e-5 + max(1.3e-6, 8 * eps) * c.abs())
    else:
        size = torch.maximum(c.abs(), c.abs().square().mean().sqrt())
        allowed = _TIMES_EAGER * eagers.max() + _ROUNDINGS * eps * size
    return bool((own <= allowed).all()), float(own.max()), float(eagers.max())


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _leaf_arguments(values: Any) -> Any:
    """Arguments that can be copied: gradients are looked at of these, not of what they were computed from."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), values
    )


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if tensor.is_floating_point() else _DOUBLE.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
