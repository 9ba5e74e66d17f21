"""A stand-in for a compiler, so that wrappers are tested on any function without tracing one.

``EagerGraph`` serves a function as the compiled graph that its metadata describes: functional, because it runs on
copies of the inputs, with the copies saved for a backward that runs the function again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aotkit_functionalize import GraphMetadata, analyze, metadata
from aotkit_runtime_wrappers import (
    InputPlan,
    PreparedFunction,
    WrapperOptions,
    WrapperPlan,
    bind,
    build_plan,
    graph_inputs,
    interpret,
    plan_synthetic_bases,
    prepare_inputs,
)

FRESH, INTERMEDIATE = metadata.OutputKind.FRESH, metadata.OutputKind.ALIAS_OF_INTERMEDIATE


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


class EagerGraph:
    """Boxed forward and backward of ``function`` as its metadata describes them."""

    def __init__(self, function: Callable[..., Sequence[Any]], meta: GraphMetadata) -> None:
        self.function, self.meta = function, meta
        self.forward_calls = self.backward_calls = 0

    @property
    def num_saved(self) -> int:
        return sum(1 for i in self.meta.inputs if i.kind is metadata.InputKind.TENSOR) if self.meta.is_training else 0

    def _run(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        leaves, values = [], []
        for index, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                values.append(value)
                continue
            copy = copy_of(value)
            if index in self.meta.differentiable_inputs:
                leaves.append(copy.requires_grad_())
                copy = _identity(copy)
            values.append(copy)
        outputs = list(self.function(*values))
        forward: list[Any] = [None] * self.meta.num_forward_outputs
        for info in self.meta.inputs:
            if info.updated_output is not None:
                forward[info.updated_output] = values[info.index]
        for info in self.meta.outputs:
            if info.graph_output is not None:
                forward[info.graph_output] = outputs[info.index]
            if info.kind is INTERMEDIATE:
                first = self.meta.num_forward_outputs - len(self.meta.intermediate_bases)
                forward[first + info.base] = outputs[info.index]._base
        return leaves, forward

    def forward(self, args: list[Any]) -> list[Any]:
        self.forward_calls += 1
        inputs = list(args)
        args.clear()
        assert not torch.is_grad_enabled()
        with torch.set_grad_enabled(self.meta.is_training):
            _, outputs = self._run(inputs)
        outputs = [copy_of(o) if isinstance(o, torch.Tensor) else o for o in outputs]
        saved = [v for v in inputs if isinstance(v, torch.Tensor)] if self.meta.is_training else []
        return [*outputs, *saved]

    def backward(self, args: list[Any]) -> list[Any]:
        self.backward_calls += 1
        saved, tangents = args[: self.num_saved], args[self.num_saved :]
        args.clear()
        with torch.enable_grad():
            leaves, outputs = self._run(saved)
        wanted = [outputs[t.forward_output] for t in self.meta.tangents]
        for info, tangent in zip(self.meta.tangents, tangents, strict=True):
            assert tangent.stride() == tuple(info.meta.strides), "the tangent was not coerced"
        found = torch.autograd.grad(wanted, leaves, tangents, allow_unused=True)
        grads: list[Any] = [None] * len(self.meta.inputs)
        for index, grad in zip(self.meta.differentiable_inputs, found, strict=True):
            grads[index] = grad
        return grads


class _Identity(torch.autograd.Function):
    """A non-leaf with the strides of the leaf and memory of its own."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return copy_of(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _identity(leaf: torch.Tensor) -> torch.Tensor:
    return _Identity.apply(leaf)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True
    return run


@dataclass
class Compiled:
    call: Callable[[list[Any]], list[Any]]
    plan: WrapperPlan
    graph: EagerGraph
    inputs: InputPlan


def _compile_eagerly(
    function: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    *,
    how: Callable[..., Any] = bind,
    options: WrapperOptions | None = None,
) -> Compiled:
    """Analyze, plan, bind; every product goes through its text form."""
    inputs = prepare_inputs(args)
    prepared = PreparedFunction(function, inputs)
    try:
        meta = analyze(prepared, graph_inputs(inputs, args))
    except Exception as error:
        if not hasattr(error, "groups"):
            raise
        inputs = plan_synthetic_bases(inputs, args, error.groups)
        prepared = PreparedFunction(function, inputs)
        meta = analyze(prepared, graph_inputs(inputs, args))
    inputs = prepared.finish()
    assert InputPlan.from_json(inputs.to_json()) == inputs
    graph = EagerGraph(PreparedFunction(function, inputs), meta)
    plan = build_plan(meta, input_plan=inputs, num_saved_tensors=graph.num_saved, options=options)
    reloaded = WrapperPlan.from_json(plan.to_json())
    assert reloaded == plan
    backward = (lambda: boxed(graph.backward)) if plan.call.training else None
    return Compiled(how(reloaded, boxed(graph.forward), backward), plan, graph, inputs)


@pytest.fixture(params=[bind, interpret], ids=["bind", "interpret"])
def how(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.fixture
def compile_eagerly() -> Callable[..., Compiled]:
    return _compile_eagerly
