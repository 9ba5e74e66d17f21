"""Compile a graph in parts; see Note [Compiled in parts]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import lazy_graph_module
from ..errors import LoweringError
from ..launch_plan.functions import CALLERS
from ..launch_plan.layout import Layout
from ..report import ExternCount, LoweringReport, merge_reports
from ..targets.select import as_present_device, kernel_device
from .modules import BodyModule, Boxed, CompiledOne, CompiledParts, PartModule
from .region_calls import bodies_of_known_layouts
from .split import Part, split
from .split_ops import split_ops
from .write import NoText, write_program

__all__ = ["CompiledParts", "PartitionedGraph", "compile_parts"]


class PartitionedGraph:
    """A graph compiled in parts, in the boxed convention, and what it was made of."""

    _boxed_call = True

    def __init__(self, call: Boxed, compiled: CompiledParts) -> None:
        self._call = call
        self.compiled = compiled

    def __call__(self, args: list[Any]) -> list[Any]:
        return list(self._call(args))

    def report(self) -> LoweringReport:
        """That of :class:`CompiledParts`."""
        return self.compiled.report


def compile_parts(
    gm: GraphModule, compile_one: Callable[[GraphModule], CompiledOne], bind_one: Callable[[Any], Boxed]
) -> CompiledParts:
    """Compile the stretches of ``gm`` between the calls that stay, and the branches and bodies those call.

    ``compile_one`` compiles an ordinary graph. A part that it refuses runs with ATen as it was recorded. ``bind_one``
    makes what it gives callable, where the outer graph has no text.
    """
    return _Pieces(compile_one, bind_one).compile(gm)


class _Pieces:
    def __init__(self, compile_one: Callable[[GraphModule], CompiledOne], bind_one: Callable[[Any], Boxed]) -> None:
        self.compile_one, self.bind_one = compile_one, bind_one
        self.reports: list[LoweringReport] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bodies: dict[int, torch.nn.Module] = {}

    def compile(self, gm: GraphModule) -> CompiledParts:
        staying = split_ops(gm)
        for node, reason in staying.items():
            if node.op == "call_function" and not reason.startswith("belongs"):
                self.counts[str(node.target), reason] += 1
        outer = split(gm, staying, self._part)
        _return_a_sequence(outer.graph)
        root: dict[str, Any] = dict(outer.modules)
        for node in outer.graph.nodes:
            if node.op == "get_attr":
                root[str(node.target)] = attrgetter(str(node.target))(gm)
        root.update(self._compiled_bodies(outer.graph, root))
        module = lazy_graph_module(_holder(root), outer.graph)
        calls = tuple(ExternCount(target, count, reason) for (target, reason), count in self.counts.items())
        report, device = merge_reports(self.reports, calls), kernel_device(gm)
        try:
            program, constants = write_program(module, "outer", device)
        except NoText as found:
            return CompiledParts(None, {}, report, self._live(module, device), str(found))
        return CompiledParts(program, constants, report)

    def _live(self, module: GraphModule, device: torch.device) -> Boxed:
        """The outer graph itself, with its parts bound."""
        for part in module.modules():
            if isinstance(part, PartModule | BodyModule):
                part.call = self.bind_one(part.compiled)

        def call(args: list[Any]) -> Any:
            values = list(args)
            args.clear()
            with as_present_device(device):
                return module(*values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _part(self, part: Part) -> torch.nn.Module | None:
        placeholders = [n for n in part.graph.graph.nodes if n.op == "placeholder"]
        layouts = _layouts({i: placeholders[i] for i in part.checked})
        compiled = None if layouts is None else self._compiled(part.graph)
        return None if compiled is None or layouts is None else PartModule(compiled, layouts)

    def _compiled(self, graph: GraphModule) -> CompiledOne | None:
        try:
            compiled = self.compile_one(graph)
        except LoweringError as refusal:
            for node in graph.graph.nodes:
                if node.op == "call_function":
                    self.counts[str(node.target), str(refusal)] += 1
            return None
        self.reports.append(compiled.report)
        return compiled

    def _compiled_bodies(self, graph: Graph, root: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        """Compiled forms of the graphs that only operators in ``CALLERS`` take."""
        made: dict[str, torch.nn.Module] = {}
        for node in graph.nodes:
            recorded = root.get(str(node.target)) if node.op == "get_attr" else None
            if not isinstance(recorded, GraphModule) or not all(_only_calls(user) for user in node.users):
                continue
            if id(recorded) not in self.bodies:
                self.bodies[id(recorded)] = self._body(recorded) or recorded
            made[str(node.target)] = self.bodies[id(recorded)]
        for body in bodies_of_known_layouts(graph, {**root, **made}):
            body.layouts = ()
        return made

    def _body(self, recorded: GraphModule) -> torch.nn.Module | None:
        placeholders = [n for n in recorded.graph.nodes if n.op == "placeholder"]
        layouts = _layouts(dict(enumerate(placeholders)))
        if layouts is None or any("val" not in n.meta for n in placeholders):
            return None
        compiled = self._compiled(recorded)
        return None if compiled is None else BodyModule(compiled, layouts, recorded)


def _return_a_sequence(graph: Graph) -> None:
    """A condition of a loop returns one value; what is compiled gives a sequence, as kernels do."""
    output = graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        output.args = ((output.args[0],),)


def _only_calls(user: Node) -> bool:
    return isinstance(user.target, torch._ops.HigherOrderOperator) and user.target.name() in CALLERS


def _layouts(nodes: Mapping[int, Node]) -> dict[int, Layout] | None:
    """The layouts of tensor nodes, or ``None`` if one has none that can be checked."""
    layouts: dict[int, Layout] = {}
    for position, node in nodes.items():
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            layout = Layout.of(val)
            if layout is None:
                return None
            layouts[position] = layout
    return layouts


def _holder(root: Mapping[str, Any]) -> torch.nn.Module:
    """A module with these attributes, dotted names nested."""
    top = torch.nn.Module()
    for name, value in root.items():
        owner = top
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, torch.nn.Module())
            owner = getattr(owner, part)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            owner.register_buffer(last, value)
        else:
            setattr(owner, last, value)
    return top
