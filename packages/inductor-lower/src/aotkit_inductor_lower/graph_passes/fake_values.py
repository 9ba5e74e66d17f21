"""Fake values of a graph's nodes, and the tensors that it holds itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from .._torch_compat import scattered_strides

__all__ = ["describe_constants", "graph_constants", "with_fake_values"]

aten = torch.ops.aten
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default)


def with_fake_values(gm: GraphModule, example_inputs: Sequence[Any] | None) -> GraphModule:
    """The graph with a fake value on every tensor node. Raises ``ValueError`` if nothing gives them."""
    missing = (node for node in gm.graph.nodes if "val" not in node.meta and node.op not in ("output", "get_attr"))
    if not any(node.users and not isinstance(node.target, type) for node in missing):
        return gm
    if example_inputs is None:
        raise ValueError("the graph's nodes have no fake values; pass example_inputs, or trace it with make_fx")
    inputs = [node.meta.get("val", value) for node, value in zip(_placeholders(gm), example_inputs, strict=True)]
    _FakeValues(gm).propagate(*inputs)
    return gm


class _FakeValues(FakeTensorProp):
    """torch's, but for strides that are not eager's."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Compute the fake value of a node."""
        result = super().run_node(n)
        written: Any = n.args[0] if n.target in SCATTERS else None
        if written is not None:
            with self._mode:
                wanted = scattered_strides(self.env[written], result)
                if result.stride() != wanted:
                    result = result.new_empty_strided(result.shape, wanted)
            n.meta["val"] = result
        return result


def _placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def graph_constants(gm: GraphModule) -> dict[str, torch.Tensor]:
    """The tensors of the graph's attributes, by the names of their buffers."""
    constants: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            constants[node.name] = value
    return constants


def describe_constants(gm: GraphModule) -> None:
    """Give the graph's attributes fake values: their devices count."""
    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    for node, tensor in zip(gm.graph.find_nodes(op="get_attr"), graph_constants(gm).values(), strict=True):
        if "val" not in node.meta:
            node.meta["val"] = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
