"""The pairs of the conformance table: one operator of torch's ``op_db``, one dtype, forward or gradient.

A pair has one fixed sample. ``expected`` is what eager makes of it, ``compare`` the verdict on what a compiler does,
under the tolerances that the table itself states for the operator.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._comparison import default_tolerances
from torch.testing._internal import common_methods_invocations as table
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo, SampleInput

from .pair import Pair

__all__ = ["DIRECTIONS", "DTYPES", "Absent", "Pair", "Program", "Results"]
__all__ += ["all_pairs", "compare", "entries", "in_double", "make_program", "run"]

DTYPES = ("float32", "bfloat16", "int64", "bool", "float64", "int32", "float16")
DIRECTIONS = ("forward", "gradient")
_SEED = 42
# The table's tests that compare an operator with another way to compute the same; None stands for all its tests.
_COMPARING_TESTS = (None, "TestCommon", "TestInductorOpInfo", "TestDecomp", "TestJit", "TestDTypes")


class Absent(Exception):
    """There is nothing to compare: no sample for this dtype, or eager itself raises."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function of its own for one pair (its code object too), and the arguments for it."""

    pair: Pair
    fn: Callable[..., Any]
    sample: SampleInput
    values: bool  # False: the elements are not defined (``empty``)
    tolerance: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Results:
    """What a call leaves: outputs, inputs afterwards, gradients, and the gradients of the outputs it began with."""

    outputs: list[Any]
    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    seeds: tuple[torch.Tensor, ...]


# Note [Two ways to be right]
#     A result is right if it is within the table's tolerance of eager's. Eager's own results of float16 depend on where
#     an element lies (loops over whole vectors round less often than the few elements after them) and on partial sums
#     that are kept in float16. So an element of it is right, too, if it is within the tolerance of what eager
#     computes from the same numbers in float64, or no farther from that than eager's own is: "nearer".

_HALVES = (torch.float16, torch.bfloat16)


@cache
def entries() -> dict[str, OpInfo]:
    """The table by name and variant of the test: ``nn.functional.gelu``, ``norm(nuc)``."""
    return {f"{info.name}({name})" if (name := info.variant_test_name) else info.name: info for info in table.op_db}


def all_pairs(dtypes: Sequence[str] = DTYPES, directions: Sequence[str] = DIRECTIONS) -> Iterator[Pair]:
    """Every pair that the table declares, dtype by dtype, forward before gradient."""
    for dtype in dtypes:
        for direction in directions:
            for name, info in entries().items():
                if _declared(info, getattr(torch, dtype), direction):
                    yield Pair(name, dtype, direction)


def _declared(info: OpInfo, dtype: torch.dtype, direction: str) -> bool:
    if direction == "forward" or dtype not in info.dtypes:
        return dtype in info.dtypes
    return bool(dtype.is_floating_point and info.supports_autograd and dtype in info.backward_dtypes)


def make_program(pair: Pair, device: str = "cpu") -> Program:
    """Raises :class:`Absent` where the table has no sample. From then on the table's operators set no seed.

    The numbers of the sample are the same on every ``device``.
    """
    # Dynamo captures no seed that is set inside; run() sets the same one around the call.
    table.wrapper_set_seed = _call  # type: ignore[assignment]
    info, dtype = entries()[pair.operator], getattr(torch, pair.dtype)
    operator = info.op
    sample = _on(_sample(info, dtype, pair.direction == "gradient"), device)

    def fn(given: Any, args: Any, kwargs: Any) -> Any:
        return operator(given, *args, **kwargs)

    # Dynamo keeps what it compiled by code object, and must not meet another pair's.
    own = fn.__code__.replace(co_name=f"op_{pair.operator}_{pair.dtype}_{pair.direction}")
    function = types.FunctionType(own, globals(), fn.__name__, None, fn.__closure__)
    return Program(pair, function, sample, "empty" not in info.name, _tolerance(info, dtype, device))


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _sample(info: OpInfo, dtype: torch.dtype, gradient: bool) -> SampleInput:
    """The first sample with elements in every tensor of its input, and with something to differentiate."""
    torch.manual_seed(0)
    fallback = None
    for sample in info.sample_inputs("cpu", dtype, requires_grad=gradient):
        if gradient and not any(t.requires_grad for t in _tensors((sample.input, sample.args, sample.kwargs))):
            continue
        fallback = fallback or sample
        if all(t.numel() > 1 for t in _tensors(sample.input)):
            return sample
    if fallback is None:
        raise Absent("no sample for this dtype")
    return fallback


def _on(sample: SampleInput, device: str) -> SampleInput:
    """The sample with its tensors, and what it names as a device, on ``device``."""
    if device == "cpu":
        return sample

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(device).requires_grad_(value.requires_grad)
        return torch.device(device) if value == "cpu" or value == torch.device("cpu") else value

    given, args, kwargs = pytree.tree_map(moved, (sample.input, sample.args, sample.kwargs))
    return SampleInput(given, args=args, kwargs=kwargs)


def _tolerance(info: OpInfo, dtype: torch.dtype, device: str) -> tuple[float, float] | None:
    """The widest (relative, absolute) that the table states for a comparison on ``device``, or torch's defaults."""
    found = default_tolerances(dtype)
    stated = False
    for decorator in info.decorators:
        overrides = decorator.decorators if isinstance(decorator, DecorateInfo) else [decorator]
        if isinstance(decorator, DecorateInfo) and not (
            decorator.cls_name in _COMPARING_TESTS
            and decorator.device_type in (None, device)
            and (decorator.dtypes is None or dtype in decorator.dtypes)
        ):
            continue
        for override in overrides:
            if isinstance(override, toleranceOverride) and dtype in override.d:
                wide = override.d[dtype]
                found, stated = (max(found[0], wide.rtol), max(found[1], wide.atol)), True
    return found if stated else None


def run(program: Program, call: Callable[..., Any], seeds: Sequence[torch.Tensor] = ()) -> Results:
    """One call, with its backward for a gradient. ``seeds``: gradients of the outputs, instead of random ones."""
    return _run(program.pair, program.sample, call, seeds)


def _run(pair: Pair, sample: Any, call: Callable[..., Any], seeds: Sequence[torch.Tensor]) -> Results:
    given, args, kwargs = _cloned((sample.input, sample.args, sample.kwargs))
    torch.manual_seed(_SEED)
    result = call(given, args, kwargs)
    leaves = pytree.tree_leaves(result)
    tensors = _tensors((given, args, kwargs))
    gradients: list[Any] = []
    if pair.direction == "gradient":
        starts = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        if not starts:
            raise Absent("no output requires grad")
        torch.manual_seed(7)
        seeds = seeds or [torch.randn_like(t) for t in starts]
        found = torch.autograd.grad(starts, wanted, seeds, allow_unused=True)
        # No gradient and one of zeros mean the same.
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Results(outputs, [t.detach() for t in tensors], gradients, tuple(seeds))


def in_double(program: Program, eager: Results) -> Results:
    """The same function of the same numbers in float64, for the error of float16. Raises what eager raises."""

    def wider(value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in _HALVES:
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    sample = program.sample
    given, args, kwargs = pytree.tree_map_only(torch.Tensor, wider, (sample.input, sample.args, sample.kwargs))
    wide = SampleInput(given, args=args, kwargs=kwargs)
    return _run(program.pair, wide, program.fn, [wider(seed) for seed in eager.seeds])


def compare(program: Program, eager: Results, found: Results) -> tuple[str, str]:
    """``equal``, ``nearer`` or ``different``, and the first difference. See Note [Two ways to be right]."""
    difference = _compare(program, eager, found, None)
    if not difference:
        return "equal", ""
    if getattr(torch, program.pair.dtype) in _HALVES:
        try:
            exact = in_double(program, eager)
        except Exception:  # noqa: BLE001  # there is no float64 form of it: the difference stands
            return "different", difference
        if not _compare(program, eager, found, exact):
            return "nearer", difference
    return "different", difference


def _compare(program: Program, eager: Results, found: Results, exact: Results | None) -> str:
    for what in ("outputs", "inputs", "gradients"):
        gots, wants = getattr(found, what), getattr(eager, what)
        exacts = getattr(exact, what) if exact else [None] * len(wants)
        if not len(gots) == len(wants) == len(exacts):
            return f"{what}: {len(gots)} instead of {len(wants)}"
        for got, want, double in zip(gots, wants, exacts, strict=True):
            if not program.values and what != "inputs":
                difference = "" if _described(got) == _described(want) else "another shape or dtype"
            else:
                difference = _difference(got, want, double, program)
            if difference:
                return f"{what}: {difference}"
    return ""


def _difference(got: Any, want: Any, exact: Any, program: Program) -> str:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if str(got) == str(want) else f"{str(got)[:80]} instead of {str(want)[:80]}"
    if _described(got) != _described(want):
        return f"{_described(got)} instead of {_described(want)}"
    options: dict[str, Any] = {}
    if program.tolerance and (want.is_floating_point() or want.is_complex()):
        default = default_tolerances(want.dtype)
        options = {"rtol": max(default[0], program.tolerance[0]), "atol": max(default[1], program.tolerance[1])}
    if isinstance(exact, torch.Tensor) and want.dtype in _HALVES and exact.shape == want.shape:
        want = _nearest_right(got, want, exact, options)
    try:
        torch.testing.assert_close(got, want, equal_nan=True, **options)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return "; ".join(lines[1:4]) or lines[0]
    except (TypeError, ValueError):
        return "" if str(got) == str(want) else f"{str(got)[:80]} instead of {str(want)[:80]}"
    return ""


def _nearest_right(
    got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, options: dict[str, float]
) -> torch.Tensor:
    """``want`` with the elements of ``got`` that are right by the second way of Note [Two ways to be right]."""
    rtol, atol = (options["rtol"], options["atol"]) if options else default_tolerances(want.dtype)
    error, eagers = (got.double() - exact).abs(), (want.double() - exact).abs()
    right = (error <= eagers) | (error <= atol + rtol * exact.abs())
    return torch.where(right, got, want)


def _described(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _cloned(values: Any) -> Any:
    def clone(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, clone, values)
