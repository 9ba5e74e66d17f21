"""The inputs of a saved graph as data: what each has to be, and the check of a call against it.

Sizes are trees over symbols, as in guards: the first input that shows a symbol by itself tells its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from aotkit_inductor_lower.runtime import ArgumentReader, Placement

from .._tensors_alike import tensors_alike
from ..errors import GuardError
from .guards import evaluate
from .quick_checks import MOST_WRITTEN

__all__ = ["PLAIN", "GraphInput", "InputCheck", "InputContract"]

MANY_INPUTS = 32  # from here on the first call that passes makes a reader for all inputs, which is compiled
PLAIN: dict[type, str] = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input. ``kind``: tensor, parameter or number; ``number``: the tree of an integer, or of a float that is
    passed as a tensor: a symbol, or what it was found to be; ``source``: Dynamo's expression of it."""

    name: str
    kind: str
    dtype: str = ""
    shape: Sequence[Any] = ()
    stride: Sequence[Any] = ()
    device: str = ""
    requires_grad: bool = False
    lazy: tuple[bool, bool] = (False, False)
    number: Any = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class InputContract:
    """What a call of a saved graph has to be.

    Attributes:
        inputs: in the order of the graph.
        guards: trees that have to hold for the symbols.
        ranges: per symbol the least and the largest number, ``None`` for no bound.
    """

    inputs: Sequence[GraphInput]
    guards: Sequence[Any] = ()
    ranges: Mapping[str, Sequence[int | None]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"inputs": [asdict(i) for i in self.inputs], "guards": list(self.guards), "ranges": dict(self.ranges)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> InputContract:
        """The inverse of :meth:`to_json`."""
        inputs = [GraphInput(**{**row, "lazy": tuple(row["lazy"])}) for row in data["inputs"]]
        return InputContract(inputs, data["guards"], data["ranges"])

    def check(self, values: Sequence[Any]) -> None:
        """Raise :class:`GuardError`, which names the input, for values that the graph was not compiled for."""
        symbols: dict[str, Any] = {}
        seen: dict[int, str] = {}
        if len(values) != len(self.inputs):
            raise GuardError(f"the graph takes {len(self.inputs)} inputs, not {len(values)}")
        for wanted, value in zip(self.inputs, values, strict=True):
            _check_kind(wanted, value)
            if wanted.kind != "number":
                other = seen.setdefault(id(value), wanted.name)
                if other != wanted.name:
                    raise GuardError(f"{other} and {wanted.name} are one tensor, and were two when it was compiled")
            _note_symbols(wanted, value, symbols)
        for wanted, value in zip(self.inputs, values, strict=True):
            if wanted.kind != "number":
                _check_sizes(wanted, value, symbols)
            if wanted.number is not None:
                _check_number(wanted, value, symbols)
        self._check_symbols(symbols)

    def _check_symbols(self, symbols: Mapping[str, Any]) -> None:
        for symbol, (low, high) in self.ranges.items():
            number = symbols.get(symbol)
            if number is None or not ((low is None or low <= number) and (high is None or number <= high)):
                bounds = f"from {low}" + ("" if high is None else f" to {high}")
                raise GuardError(f"{self._place(symbol)} is {number}; it was compiled for numbers {bounds}")
        for guard in self.guards:
            if not evaluate(guard, symbols):
                names = [self._place(symbol) for symbol in sorted(symbols) if _mentions(guard, symbol)]
                numbers = {self._place(symbol): symbols[symbol] for symbol in symbols if _mentions(guard, symbol)}
                raise GuardError(f"what was assumed about {', '.join(names)} does not hold for {numbers}")

    def _place(self, symbol: str) -> str:
        for entry in self.inputs:
            if symbol in entry.shape:
                return f"the size of {entry.name} in dimension {list(entry.shape).index(symbol)}"
        return next((entry.name for entry in self.inputs if entry.number == symbol), "a stride of an input")


class InputCheck:
    """A contract that is asked in every call. Where all inputs are tensors of known sizes, as in a model's step with
    hundreds of weights, tensors like those of a call that passed are told in one native pass (our own where there are
    many, which tells their addresses as well, else torch's, :func:`.tensors_alike`), others are compared one by one
    with what was looked up once; what differs is then named by the contract. Safe under threads.

    Attributes:
        contract: what is asked for.
    """

    __slots__ = ("_alike", "_expected", "_reader", "_written", "contract")

    def __init__(self, contract: InputContract) -> None:
        self.contract = contract
        self._expected = [_expected(entry) for entry in contract.inputs]
        if contract.guards or contract.ranges or None in self._expected:
            self._expected = []
        self._alike: Callable[..., bool] | None = None
        self._reader: ArgumentReader | None = None
        self._written = 0

    def __call__(self, values: Sequence[Any]) -> Placement | None:
        """Raise :class:`GuardError` as :meth:`InputContract.check` does. Returns where the inputs lie, if that was seen
        on the way."""
        reader = self._reader
        if reader is not None:
            placement = reader.read(values if type(values) is tuple else tuple(values))
            if placement is not None:
                return placement
        alike = self._alike
        if alike is not None and len(values) == len(self._expected) and alike(*values):
            return None
        if not (self._expected and self._holds(values)):
            self.contract.check(values)
        elif self._written < MOST_WRITTEN:
            self._written += 1
            self._reader = ArgumentReader.of(values) if len(values) >= MANY_INPUTS else None
            self._alike = None if self._reader is not None else tensors_alike(values)
        return None

    def _holds(self, values: Sequence[Any]) -> bool:
        if len(values) != len(self._expected) or len({*map(id, values)}) != len(values):
            return False
        for value, expected in zip(values, self._expected, strict=True):
            if type(value) not in PLAIN or value.layout is not torch.strided:
                return False
            known = (value.dtype, value.device, value.shape, value.stride(), value.requires_grad)
            if known != expected or value.is_conj() or value.is_neg():
                return False
        return True


def _expected(entry: GraphInput) -> tuple[Any, ...] | None:
    """What a tensor of known sizes is compared with; ``None`` for other inputs, and for lazy ones."""
    numbers = (*entry.shape, *entry.stride)
    if entry.kind == "number" or entry.number is not None or any(entry.lazy):
        return None
    if any(type(number) is not int for number in numbers):
        return None
    dtype = getattr(torch, entry.dtype.removeprefix("torch."))
    return dtype, torch.device(entry.device), tuple(entry.shape), tuple(entry.stride), entry.requires_grad


def _mentions(tree: Any, symbol: str) -> bool:
    return tree == symbol or (isinstance(tree, list) and any(_mentions(part, symbol) for part in tree[1:]))


def _check_kind(wanted: GraphInput, value: Any) -> None:
    if wanted.kind == "number":
        if type(value) is not int:
            raise GuardError(f"{wanted.name} is a {type(value).__name__}, and was an integer when it was compiled")
        return
    found = PLAIN.get(type(value))
    if found is None:
        raise GuardError(f"{wanted.name} is a {type(value).__name__}, and was a {wanted.kind} when it was compiled")
    checks: tuple[tuple[str, Any, Any], ...] = (
        ("dtype", str(value.dtype), wanted.dtype),
        ("device", str(value.device), wanted.device),
        ("layout", value.layout, torch.strided),
        ("number of dimensions", value.dim(), len(wanted.shape)),
        ("requires_grad", value.requires_grad, wanted.requires_grad),
        ("pair of lazy conjugation and negation", (value.is_conj(), value.is_neg()), tuple(wanted.lazy)),
    )
    for what, is_now, was in checks:
        if is_now != was:
            raise GuardError(f"{wanted.name} has the {what} {is_now}, and had {was} when it was compiled")


def _note_symbols(wanted: GraphInput, value: Any, symbols: dict[str, Any]) -> None:
    if isinstance(wanted.number, str):
        number = value if wanted.kind == "number" else value.item()
        if isinstance(number, float) and math.isnan(number):
            raise GuardError(f"{wanted.name} is a NaN, and was a number when it was compiled")
        symbols.setdefault(wanted.number, number)
    for sizes, trees in ((value.shape, wanted.shape), (value.stride(), wanted.stride)) if wanted.shape else ():
        for size, tree in zip(sizes, trees, strict=True):
            if isinstance(tree, str):
                symbols.setdefault(tree, size)


def _check_number(wanted: GraphInput, value: Any, symbols: Mapping[str, Any]) -> None:
    """A number that the graph was compiled for, or that was found to be another one's, or computed from others."""
    number = value if wanted.kind == "number" else value.item()
    expected = evaluate(wanted.number, symbols)
    if number != expected or (isinstance(number, float) and math.copysign(1, number) != math.copysign(1, expected)):
        raise GuardError(f"{wanted.name} is {number}, and it was compiled for {expected}")


def _check_sizes(wanted: GraphInput, value: torch.Tensor, symbols: Mapping[str, Any]) -> None:
    for what, sizes, trees in (("size", value.shape, wanted.shape), ("stride", value.stride(), wanted.stride)):
        for dim, (size, tree) in enumerate(zip(sizes, trees, strict=True)):
            expected = tree if type(tree) is int else evaluate(tree, symbols)
            if size != expected:
                raise GuardError(
                    f"{wanted.name} has the {what} {size} in dimension {dim}, and it was compiled for {expected}"
                )
