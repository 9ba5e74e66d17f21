"""The graphs that are compiled: training steps of the five architectures, and operators of torch's table.

Graphs are captured by torch's own ``aot_autograd``, with the decompositions and the partition of the sources under
test: what is compared are compilers, and the capture of one graph must not depend on how another was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tools.bench.models import MODELS, make_batch, make_model
from tools.captured import captured
from tools.conformance.pairs import Absent, Pair, all_pairs, make_program, run

__all__ = ["Captured", "Case", "capture", "cases"]

#: Each operator once in a common type with its gradient, and once with integers.
PAIRS = (("float32", "gradient"), ("bfloat16", "forward"), ("int64", "forward"))


@dataclass(frozen=True, slots=True)
class Case:
    """A model or a pair of the table, by name; what :mod:`tools.conformance.journal` works through."""

    kind: str
    name: str

    @property
    def key(self) -> str:
        """The name in files."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Captured:
    """One FX graph and which part of the case it is."""

    part: str
    module: torch.fx.GraphModule


def cases(kinds: Sequence[str] = ("model", "pair"), every: int = 1) -> Iterator[Case]:
    """The corpus, or of its pairs every so many-th."""
    if "model" in kinds:
        yield from (Case("model", name) for name in MODELS)
    if "pair" in kinds:
        for dtype, direction in PAIRS:
            for pair in list(all_pairs([dtype], [direction]))[::every]:
                yield Case("pair", pair.key)


def capture(case: Case) -> list[Captured]:
    """The graphs of one call, with its backward where there is one; none where eager itself raises."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = _call_model if case.kind == "model" else _call_pair
    return [Captured(f"{part} {k}", graph) for k, (part, graph, _) in enumerate(captured(partial(call, case.name)))]


def _call_model(name: str, backend: Callable[..., Any]) -> None:
    model = torch.compile(make_model(name).train(), backend=backend, fullgraph=True)
    model(**make_batch(name, True)).loss.backward()


def _call_pair(key: str, backend: Callable[..., Any]) -> None:
    operator, dtype, direction = key.rsplit(" ", 2)
    try:
        program = make_program(Pair(operator, dtype, direction))
        run(program, torch.compile(program.fn, backend=backend, dynamic=False))
    except Absent:
        return
