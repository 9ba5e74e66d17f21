"""Random programs over views, mutations and grad modes, compared with eager in everything the caller can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from aotkit_aot_trace import FunctionalLayer, TraceOptions, Unsupported

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x.t() if x.dim() == 2 else x.unsqueeze(0),
    "flat": lambda x: x.reshape(-1),
    "first": lambda x: x[:1],
    "rest": lambda x: x[1:] if x.shape[0] > 1 else x,
    "step": lambda x: x[..., ::2],
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape)[1],
    "chunk": lambda x: x.chunk(2)[-1],
}
FRESH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "double": lambda x: x * 2,
    "clone": torch.clone,
    "sum": lambda x: x.sum().reshape(1, 1) + torch.zeros(2, 2),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(1),
    "fill_": lambda x: x.fill_(0.5),
    "tanh_": lambda x: x.tanh_(),
}
RESHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda x: x.t_() if x.dim() == 2 else x,
    "unsqueeze_": lambda x: x.unsqueeze_(0) if x.dim() < 3 else x,
}


@dataclass(frozen=True)
class Step:
    """One line of a program: an operation applied to value ``source`` (modulo the number of values)."""

    kind: str
    name: str
    source: int
    no_grad: bool = False


@dataclass(frozen=True)
class Program:
    """Lines, outputs (value numbers), and which of the two inputs require grad."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    grads: tuple[bool, bool]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for step in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not step.no_grad):
                target = values[step.source % len(values)]
                match step.kind:
                    case "view":
                        values.append(VIEWS[step.name](target))
                    case "fresh":
                        values.append(FRESH[step.name](target))
                    case "write":
                        WRITES[step.name](target)
                    case "reshape":
                        RESHAPES[step.name](values[step.source % len(inputs)])
        return [values[o % len(values)] for o in self.outputs]

    def make(self) -> list[torch.Tensor]:
        return [torch.randn(4, 6, requires_grad=self.grads[0]), torch.randn(3, 4, requires_grad=self.grads[1])]


def _steps(kind: str, names: Any) -> st.SearchStrategy[Step]:
    rare = st.sampled_from([False, False, False, True])
    return st.builds(Step, st.just(kind), st.sampled_from(sorted(names)), st.integers(0, 7), rare)


PROGRAMS = st.builds(
    Program,
    st.lists(
        st.one_of(_steps("view", VIEWS), _steps("fresh", FRESH), _steps("write", WRITES), _steps("reshape", RESHAPES)),
        min_size=1,
        max_size=5,
    ).map(tuple),
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    st.tuples(st.booleans(), st.booleans()),
)


def _eager_works(program: Program) -> bool:
    """Eager refuses some programs, or the gradient of their results: then there is nothing to compare with."""
    torch.manual_seed(0)
    leaves = program.make()
    args = [torch.empty_strided(x.shape, x.stride()).copy_(x) if x.requires_grad else x for x in leaves]
    try:
        outputs = program(*args)
        total = sum((o.sum() for o in [*args, *outputs] if o.requires_grad), torch.zeros(()))
        if total.requires_grad:
            torch.autograd.grad(total, [x for x in leaves if x.requires_grad and x.is_leaf], allow_unused=True)
    except (RuntimeError, IndexError):
        return False
    return True


@pytest.mark.covers("F1.72")
@pytest.mark.parametrize("layer", list(FunctionalLayer), ids=lambda layer: layer.value)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_random_programs_equal_eager_or_are_refused(compare, layer, dynamic):
    counts = {"equal": 0, "refused": 0}

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS)
    def run(program: Program) -> None:
        if not _eager_works(program):
            return
        try:
            compare(program, program.make, options=TraceOptions(layer=layer, dynamic=dynamic), versions=False)
        except Unsupported:
            counts["refused"] += 1
        else:
            counts["equal"] += 1

    run()
    assert counts["equal"] >= 15 and counts["refused"] <= counts["equal"] // 10, counts
