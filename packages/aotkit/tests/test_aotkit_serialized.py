"""A compiled function as bytes: plan, forward and backward of the real stack, in this process and in a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aotkit_aot_trace import capture
from aotkit_aot_trace.gradients import saved_values
from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_partition import PartitionOptions, dump_graph, load_graph, partition
from aotkit_runtime_wrappers import DoubleBackwardError, SerializableFunction, build_plan, prepare_inputs
from aotkit_runtime_wrappers.errors import PlanError


def load(data: bytes) -> Callable[..., Any]:
    return compile_graph(load_graph(data.decode()))


def compiled(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> SerializableFunction:
    inputs = prepare_inputs(args)
    assert not inputs.overlaps and len(inputs.kept) == len(args)
    found = capture(fn, args, decompositions=decompositions())
    metadata = found.metadata
    if not metadata.is_training:
        return SerializableFunction(build_plan(metadata), dump_graph(found.graph).encode(), None, load)
    parts = partition(found.graph, metadata.num_forward_outputs, PartitionOptions())
    tensors = len(parts.saved_names) - parts.num_saved_symints
    plan = build_plan(
        metadata,
        num_saved_tensors=tensors,
        num_saved_symints=parts.num_saved_symints,
        saved_inputs=saved_values(parts.forward, metadata.num_forward_outputs, tensors).inputs,
    )
    return SerializableFunction(plan, dump_graph(parts.forward).encode(), dump_graph(parts.backward).encode(), load)


def function(x: torch.Tensor, w: torch.Tensor, counter: torch.Tensor) -> list[Any]:
    """Results with a gradient, a view of one, a written input."""
    counter.add_(1)
    y = (x @ w).sin() * counter
    return [y, y.view(-1)[::2]]


def inputs(requires_grad: bool, rows: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, 3), torch.randn(3, 5, requires_grad=requires_grad), torch.zeros(5)]


def same_as_eager(call: SerializableFunction, requires_grad: bool) -> None:
    args, eager = inputs(requires_grad), inputs(requires_grad)
    found, expected = call(list(args)), function(*eager)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(args[2], eager[2])
    assert found[1]._base is found[0] or found[1]._base is found[0]._base
    if requires_grad:
        found[1].square().sum().backward()
        expected[1].square().sum().backward()
        torch.testing.assert_close(args[1].grad, eager[1].grad)


@pytest.mark.covers("F4.40")
@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_function_survives_its_bytes(training: bool) -> None:
    original = compiled(function, inputs(training))
    same_as_eager(original, training)
    data = original.serialize()
    again = SerializableFunction.deserialize(data, load)
    same_as_eager(again, training)
    assert again.serialize() == data and (again.plan, again.source) == (original.plan, original.source)


@pytest.mark.covers("F4.40")
def test_a_new_process_runs_the_bytes_without_the_function(tmp_path: Path, warm_python: Any) -> None:
    data = compiled(function, inputs(True)).serialize()
    (tmp_path / "function").write_bytes(data)
    args = inputs(True)
    results = function(*args)
    results[1].sum().backward()
    torch.save([args[0], args[1].detach(), torch.zeros(5), results[0].detach(), args[1].grad], tmp_path / "values")
    script = """
import sys, torch
from aotkit_inductor_lower import compile_graph
from aotkit_partition import load_graph
from aotkit_runtime_wrappers import SerializableFunction

with open("function", "rb") as file:
    call = SerializableFunction.deserialize(file.read(), lambda data: compile_graph(load_graph(data.decode())))
x, w, counter, expected, gradient = torch.load("values")
w.requires_grad_()
y, view = call([x, w, counter])
view.sum().backward()
torch.testing.assert_close([y.detach(), w.grad, counter], [expected, gradient, torch.ones(5)])
assert not any(name.split(".")[0] == "aotkit_aot_trace" for name in sys.modules)
print("same")
"""
    done = warm_python.run(["-c", script], cwd=tmp_path, only_torch=True)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


@pytest.mark.covers("F4.40")
def test_bytes_that_are_damaged_or_of_something_else_are_refused() -> None:
    data = compiled(function, inputs(True)).serialize()
    header, _, body = data.partition(b"\n")
    flipped = bytes([body[0] ^ 1]) + body[1:]
    for damaged in (data[:-1], data + b" ", header + b"\n" + flipped, header.replace(b"in0", b"in1", 1) + b"\n" + body):
        assert damaged != data
        with pytest.raises(PlanError, match="are damaged"):
            SerializableFunction.deserialize(damaged, load)
    for other in (b"", b"\x80\x04\n", b"[1]\n", b'{"format": "zip"}\n'):
        with pytest.raises(PlanError, match="no serialized compiled function"):
            SerializableFunction.deserialize(other, load)
    with pytest.raises(PlanError, match="version 99 cannot be read"):
        SerializableFunction.deserialize(data.replace(b'"version": 1}', b'"version": 99}', 1), load)


@pytest.mark.covers("F4.40")
def test_graphs_that_do_not_fit_the_plan_and_second_derivatives_are_refused() -> None:
    training, inference = compiled(function, inputs(True)), compiled(function, inputs(False))
    with pytest.raises(PlanError, match="a training plan came with no compiled backward"):
        SerializableFunction(training.plan, training.forward, None, load)
    with pytest.raises(PlanError, match="an inference plan came with a compiled backward"):
        SerializableFunction(inference.plan, inference.forward, training.backward, load)
    args = inputs(True)
    (gradient,) = torch.autograd.grad(training(list(args))[0].square().sum(), args[1], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        gradient.sum().backward()
