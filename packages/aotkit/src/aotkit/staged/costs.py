"""What a stage costs: operations, kernels and bytes, as far as the stage knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._amounts import format_bytes
from .call import Argument

__all__ = ["GraphCost", "Memory", "kernel_cost", "memory_of", "tensor_bytes"]


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What one graph does in a call.

    ``operations`` of the FX graph; ``flops`` of matrix products, convolutions and attention, by torch's formulas. From
    the stage that is lowered on: ``kernels`` that are generated, the ``kernel_bytes`` that they read and write and
    their ``kernel_flops`` (``None`` where a size is not known), and ``aten_calls`` beside them.
    """

    operations: int
    flops: int
    kernels: int | None = None
    kernel_bytes: int | None = None
    kernel_flops: int | None = None
    aten_calls: int | None = None

    def __str__(self) -> str:
        text = f"{self.operations} operations, {_amount(self.flops)}flop in products"
        if self.kernels is not None:
            text += f"; {self.kernels} kernels"
            if self.kernel_bytes is not None:
                text += f" ({format_bytes(self.kernel_bytes)})"
            text += f", {self.aten_calls} ATen calls"
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a stage knows of.

    ``arguments`` (weights included, each tensor once) and ``results``; ``saved`` for the backward beyond the arguments
    and ``peak``, the most in use at once over forward, loss and backward with the arguments left out, from the stage
    that is partitioned on, for training; ``code`` is the size of the generated code.
    """

    arguments: int
    results: int
    saved: int | None = None
    peak: int | None = None
    code: int | None = None

    def __str__(self) -> str:
        named = {"saved": self.saved, "at the peak": self.peak, "of code": self.code}
        parts = [f"{format_bytes(self.arguments)} of arguments", f"{format_bytes(self.results)} of results"]
        parts += [f"{format_bytes(size)} {what}" for what, size in named.items() if size is not None]
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def kernel_cost(before: GraphCost, report: dict[str, Any]) -> GraphCost:
    """Of the same graph lowered; ``report`` is the lowering's, as data."""
    groups, externs = report["groups"], report["externs"]
    return GraphCost(
        before.operations,
        before.flops,
        report["kernel_count"],
        _total(group["bytes"] for group in groups),
        _total(group["flops"] for group in groups),
        sum(extern["count"] for extern in externs),
    )


def memory_of(
    arguments: Sequence[Argument], results: Iterable[Any], saved: int | None = None, peak: int | None = None
) -> Memory:
    """Of a graph that returns values like ``results``."""
    distinct = [argument for position, argument in enumerate(arguments) if argument.same == position]
    taken = sum(_argument_bytes(argument) for argument in distinct)
    return Memory(taken, sum(map(tensor_bytes, results)), saved, peak)


def tensor_bytes(value: Any) -> int:
    """Of its elements; 0 for what is no tensor."""
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _argument_bytes(argument: Argument) -> int:
    kind: torch.dtype = getattr(torch, argument.dtype.removeprefix("torch."))
    count = kind.itemsize
    for size in argument.shape:
        count *= size
    return count


def _total(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _amount(count: float) -> str:
    for unit in ("", "K", "M", "G"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} T"
