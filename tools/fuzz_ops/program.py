"""One sample: tensors, a few calls of operators on them, and how it is to be compiled; runs, and prints as a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .tensors import Tensor

__all__ = ["DIRECT", "ENTRIES", "Call", "Number", "Ref", "Sample", "overload", "values_of"]

#: direct: the calls are the graph that is lowered; function: captured without, training: with gradients; dynamic:
#: captured with symbols for sizes and integers, called a second time; dynamo: through torch.compile; triton: direct,
#: in Triton's interpreter.
ENTRIES = ("direct", "function", "training", "dynamic", "dynamo", "triton")

DIRECT = ("direct", "triton")


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor, the result of a call, or (``part``) one of its results."""

    name: str
    part: int | None = None

    def __repr__(self) -> str:
        return self.name if self.part is None else f"{self.name}[{self.part}]"


@dataclass(frozen=True, slots=True)
class Number:
    """An integer that is an argument of the program; ``second`` for another call."""

    name: str
    first: int
    second: int

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """``result = op(*args, **kwargs)``; ``parts``: how many results a sequence of them has, ``None`` for a tensor."""

    result: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    parts: int | None = None

    def text(self) -> str:
        """The statement."""
        given = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs]
        return f"{self.result} = {self.op}({', '.join(given)})"

    @property
    def outputs(self) -> tuple[Ref, ...]:
        """All its results."""
        return (Ref(self.result),) if self.parts is None else tuple(Ref(self.result, i) for i in range(self.parts))


@dataclass(frozen=True, slots=True)
class Sample:
    """``goal`` is the cell that it was drawn for: operator, dtype, layout."""

    seed: int
    tensors: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Ref, ...]
    numbers: tuple[Number, ...] = ()
    entry: str = "direct"
    goal: tuple[str, str, str] = ("", "", "")
    given: tuple[tuple[str, torch.Tensor], ...] = ()  # what a call is to give, by the name of its result

    def arguments(self, again: bool = False) -> list[Any]:
        """New arguments; ``again``: those of the second call."""
        return [*(t.make(again) for t in self.tensors), *(n.second if again else n.first for n in self.numbers)]

    def function(self) -> Callable[..., list[Any]]:
        """The calls as a function of :meth:`arguments` that returns the list of outputs."""
        names = [*(t.name for t in self.tensors), *(n.name for n in self.numbers)]
        replaced = dict(self.given)

        def run(*given: Any) -> list[Any]:
            values: dict[str, Any] = dict(zip(names, given, strict=True))
            for call in self.calls:
                values[call.result] = invoke(call, values)
                for ref in call.outputs if replaced else ():
                    if repr(ref) in replaced:
                        value_of(values, ref).copy_(replaced[repr(ref)])
            return [value_of(values, ref) for ref in self.outputs]

        return run

    @property
    def grads(self) -> bool:
        """Whether anything requires grad."""
        return any(t.grad for t in self.tensors)

    @property
    def merged(self) -> bool:
        """Whether this is several samples in one."""
        return any(call.result.startswith("s1_") for call in self.calls)

    def script(self) -> str:
        """A program that shows eager's results and the compiled ones."""
        lines = [
            "import torch, aotkit",
            "aten, prims, inf, nan = torch.ops.aten, torch.ops.prims, float('inf'), float('nan')",
        ]
        setup = [f"{t.name} = {t.text()}" for t in self.tensors]
        if any("fill(" in line for line in setup):
            lines.append("from tools.fuzz_ops.tensors import fill")
        names = ", ".join([*(t.name for t in self.tensors), *(n.name for n in self.numbers)])
        body = [f"    {call.text()}" for call in self.calls]
        lines += [*setup, f"def f({names}):", *body, f"    return [{', '.join(map(repr, self.outputs))}]"]
        lines.append(f"# seed {self.seed}, goal {self.goal}, entry {self.entry}")
        for again in (False, True) if self.entry == "dynamic" else (False,):
            for n in self.numbers:
                lines.append(f"{n.name} = {n.second if again else n.first}")
            for t in self.tensors:
                if again and t.second not in (None, t.size):
                    lines.append(f"{t.name} = {replace(t, size=t.second, second=None, seed=t.seed).text()}")
        return "\n".join(lines)


def overload(name: str) -> Any:
    """The function of a name such as ``aten.add.Tensor``."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def invoke(call: Call, values: dict[str, Any]) -> Any:
    """Make one call."""
    args = [values_of(a, values) for a in call.args]
    return overload(call.op)(*args, **{k: values_of(v, values) for k, v in call.kwargs})


def value_of(values: dict[str, Any], ref: Ref) -> Any:
    """What a reference stands for."""
    value = values[ref.name]
    return value if ref.part is None else value[ref.part]


def values_of(arg: Any, values: dict[str, Any]) -> Any:
    """An argument with its references replaced by values."""
    if isinstance(arg, Ref):
        return value_of(values, arg)
    if isinstance(arg, Number):
        return values.get(arg.name, arg.first)
    if isinstance(arg, list):
        return [values_of(item, values) for item in arg]
    return arg


def refs_in(arg: Any) -> Sequence[Ref]:
    """The references of an argument."""
    if isinstance(arg, Ref):
        return (arg,)
    if isinstance(arg, list):
        return [ref for item in arg for ref in refs_in(item)]
    return ()


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)
