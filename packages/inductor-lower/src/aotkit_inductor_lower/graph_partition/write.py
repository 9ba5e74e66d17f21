"""From the outer graph to an outer plan, which is data; see Note [The outer plan]."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._user_kernels import NoKernelText, constants_to_json, kernel_name, table_of_kernels
from ..launch_plan.functions import LAUNCHERS, function_name
from ..launch_plan.parts import (
    Argument,
    Body,
    BodyOf,
    CallFunction,
    CallPart,
    Complex,
    ConstantOf,
    KernelConstants,
    KernelOf,
    Named,
    OuterPlan,
    Pairs,
    Part,
    PartitionedProgram,
    Plain,
    Several,
    Step,
    ValueOf,
)
from .modules import BodyModule, CompiledParts, PartModule

__all__ = ["NoText", "write_program"]

_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


class NoText(Exception):
    """What an outer graph has that no plan can hold."""


def write_program(
    module: GraphModule, name: str, device: torch.device
) -> tuple[PartitionedProgram, dict[str, torch.Tensor]]:
    """The program of an outer graph, and the tensors of it and of its parts. Raises :class:`NoText`."""
    writer = _Writer()
    plan = writer.plan(module)
    constants = writer.constants
    program = PartitionedProgram(name, str(device), plan, tuple(writer.parts), tuple(writer.bodies), tuple(constants))
    return program, constants


class _Writer:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.bodies: list[Body] = []
        self.constants: dict[str, torch.Tensor] = {}
        self._constant_names: dict[int, str] = {}
        self._body_numbers: dict[int, int] = {}

    def plan(self, module: GraphModule) -> OuterPlan:
        """The plan of one graph, outer or recorded."""
        graph: Graph = module.graph
        values: dict[Node, Argument] = {}
        steps: list[Step] = []
        inputs = 0
        for node in graph.nodes:
            if node.op == "output":
                return OuterPlan(inputs, tuple(steps), self._argument(node.args[0], values))
            if node.op == "get_attr":
                values[node] = self._attribute(module, str(node.target))
                continue
            if node.op == "placeholder":
                inputs += 1
            elif node.op == "call_module":
                steps.append(self._part_call(attrgetter(str(node.target))(module), node, values))
            else:
                steps.append(self._call(node, values))
            values[node] = ValueOf(inputs + len(steps) - 1)
        raise NoText("a graph without an output")

    def _part_call(self, part: Any, node: Node, values: dict[Node, Argument]) -> CallPart:
        if not isinstance(part, PartModule):
            raise NoText(f"{node.name} calls a module")
        return CallPart(self._part(part), tuple(self._argument(a, values) for a in node.args))

    def _call(self, node: Node, values: dict[Node, Argument]) -> CallFunction:
        target = function_name(node.target) if node.op == "call_function" else None
        if target is None:
            shown = getattr(node.target, "__qualname__", None) or node.target
            raise NoText(f"{node.name} calls {shown}, which no other process finds by its name")
        given = dict(node.kwargs)
        launched = _launch(node) if isinstance(node.target, torch._ops.HigherOrderOperator) else {}
        kwargs = tuple((name, launched.get(name) or self._argument(value, values)) for name, value in given.items())
        return CallFunction(target, tuple(self._argument(a, values) for a in node.args), kwargs)

    def _argument(self, value: Any, values: dict[Node, Argument]) -> Argument:
        kind = type(value)
        if kind is Node:
            return values[value]
        if value is None or kind in (bool, int, float, str):
            return Plain(value)
        if kind is complex:
            return Complex(value.real, value.imag)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return Plain(_number(value))
        if kind in _NAMED:
            return Named(_NAMED[kind], str(value).removeprefix("torch."))  # type: ignore[arg-type]
        if kind is torch.device:
            return Named("device", str(value))
        if isinstance(value, torch._ops.OpOverload):
            return Named("operator", str(value))
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return Several("slice", tuple(self._argument(part, values) for part in parts))
        if isinstance(value, tuple | list):
            sort: Any = "tuple" if isinstance(value, tuple) else "list"
            return Several(sort, tuple(self._argument(item, values) for item in value))
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return Pairs(tuple((key, self._argument(item, values)) for key, item in value.items()))
        raise NoText(f"an argument is a {kind.__module__}.{kind.__qualname__}")

    def _attribute(self, module: GraphModule, target: str) -> Argument:
        value = attrgetter(target)(module)
        if isinstance(value, torch.Tensor):
            return ConstantOf(self._constant(target, value))
        if isinstance(value, GraphModule | BodyModule):
            return BodyOf(self._body(value))
        raise NoText(f"the graph holds {target}, a {type(value).__module__}.{type(value).__qualname__}")

    def _part(self, part: PartModule | BodyModule) -> int:
        compiled = part.compiled
        if compiled.program is None:
            raise NoText(compiled.reason if isinstance(compiled, CompiledParts) else "a part is no data")
        names = tuple((own, self._constant(own, tensor)) for own, tensor in compiled.constants.items())
        self.parts.append(Part(compiled.program, names, part.layouts))
        return len(self.parts) - 1

    def _body(self, body: GraphModule | BodyModule) -> int:
        number = self._body_numbers.get(id(body))
        if number is None:
            recorded = self.plan(body if isinstance(body, GraphModule) else body.recorded)
            part = self._part(body) if isinstance(body, BodyModule) else None
            self.bodies.append(Body(recorded, part))
            number = self._body_numbers[id(body)] = len(self.bodies) - 1
        return number

    def _constant(self, wanted: str, tensor: torch.Tensor) -> str:
        """The name of a tensor, which has one name however many parts hold it."""
        known = self._constant_names.get(id(tensor))
        if known is None:
            known, number = wanted, 0
            while known in self.constants:
                number += 1
                known = f"{wanted}_{number}"
            self.constants[known] = tensor
            self._constant_names[id(tensor)] = known
        return known


def _launch(node: Node) -> dict[str, Argument]:
    """What stands for the places in torch's table of kernels that a call which launches one takes."""
    target: Any = node.target
    if target.name() not in LAUNCHERS:
        return {}
    table, given = table_of_kernels(), dict(node.kwargs)
    try:
        kernel = kernel_name(table.get_kernel(given["kernel_idx"]))
        constants = constants_to_json(table.get_constant_args(given["constant_args_idx"]))
    except NoKernelText as error:
        raise NoText(f"{node.name}: {error}") from error
    return {"kernel_idx": KernelOf(kernel), "constant_args_idx": KernelConstants(constants)}


def _number(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool | int | float:
    expr = value.node.expr
    if not getattr(expr, "is_number", False) and expr not in (True, False):
        raise NoText(f"an argument is the size {expr}, of which no node tells the value")
    return value.node.pytype(expr)  # type: ignore[no-any-return]
