"""Passes over frozen graphs: what is done to the channels of a convolution becomes part of its weights.

Before ``batch_norm(convolution(x, W, b))``, ``convolution(x, W, b) * c`` with constants. After ``convolution(x, V, d)``
with weights computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

__all__ = ["add_constant", "fold_norms", "value_of"]

aten = torch.ops.aten
_CONVOLUTION = aten.convolution.default
_NORMS = (aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default)
_Folded = tuple[torch.Tensor, torch.Tensor]  # factor and offset per channel, float64


def value_of(gm: GraphModule, node: object) -> torch.Tensor | None:
    """The constant that a node stands for, or ``None``."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = getattr(gm, str(node.target), None)  # what is nested in other modules is no tensor of ours
    return value if isinstance(value, torch.Tensor) else None


def add_constant(gm: GraphModule, before: Node, name: str, value: torch.Tensor) -> Node:
    """A node for a new constant of the graph, with a fake value like those around."""
    taken = name
    while hasattr(gm, taken):
        taken += "_"
    gm.register_buffer(taken, value, persistent=False)
    with gm.graph.inserting_before(before):
        node = gm.graph.get_attr(taken)
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    return node


def fold_norms(gm: GraphModule) -> int:
    """Fold norms, products and sums with constants into the convolutions before them; how many."""
    folded = 0
    for node in list(gm.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        convolution = node.args[0] if rule is not None else None
        if rule is None or not isinstance(convolution, Node) or not _foldable(convolution, node):
            continue
        change = rule(gm, node, convolution.meta["val"].shape[1])
        if change is not None and _fold(gm, convolution, change):
            for reader in list(node.users) if node.target in _NORMS else []:
                reader.replace_all_uses_with(convolution)
                gm.graph.erase_node(reader)
            node.replace_all_uses_with(convolution)
            gm.graph.erase_node(node)
            folded += 1
    return folded


def _foldable(convolution: Node, reader: Node) -> bool:
    if convolution.target is not _CONVOLUTION or convolution.args[6] or list(convolution.users) != [reader]:
        return False
    if reader.target in _NORMS:  # of its results, only the first may be read
        return [user.args[1] for user in reader.users] == [0]
    return bool(reader.meta["val"].shape == convolution.meta["val"].shape)


def _fold(gm: GraphModule, convolution: Node, change: _Folded) -> bool:
    """Give the convolution new weights, unless one of them would be no finite number."""
    weight, given = value_of(gm, convolution.args[1]), convolution.args[2]
    bias = value_of(gm, given) if given is not None else None
    if weight is None or (given is not None and bias is None):
        return False
    factor, offset = change
    new_weight = (weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
    new_bias = (offset if bias is None else bias.double() * factor + offset).to(weight.dtype)
    if not (new_weight.isfinite().all() and new_bias.isfinite().all()):
        return False
    convolution.update_arg(1, add_constant(gm, convolution, f"{convolution.name}_weight", new_weight))
    convolution.update_arg(2, add_constant(gm, convolution, f"{convolution.name}_bias", new_bias))
    return True


def _norm(gm: GraphModule, node: Node, channels: int) -> _Folded | None:
    _, weight, bias, mean, variance, *training, _, eps = node.args
    if any(training):
        return None
    known = [value_of(gm, arg) for arg in (weight, bias, mean, variance)]
    if any(v is None and arg is not None for v, arg in zip(known, (weight, bias, mean, variance), strict=True)):
        return None
    if known[2] is None or known[3] is None or not isinstance(eps, float):
        return None
    factor = (known[3].double() + eps).rsqrt()
    if known[0] is not None:
        factor = factor * known[0].double()
    return factor, (0 if known[1] is None else known[1].double()) - known[2].double() * factor


def _per_channel(gm: GraphModule, node: Node, channels: int) -> torch.Tensor | None:
    """The second operand as one number per channel."""
    given = node.args[1]
    if isinstance(given, int | float) and not isinstance(given, bool):
        return torch.full((channels,), float(given), dtype=torch.float64)
    value = value_of(gm, given)
    if value is None or "alpha" in node.kwargs or value.dtype != node.meta["val"].dtype:
        return None
    shape = [1] * (4 - value.dim()) + list(value.shape)
    if len(shape) != 4 or shape[0] != 1 or shape[2:] != [1, 1] or shape[1] not in (1, channels):
        return None
    return value.double().reshape(-1).expand(channels)


def _with_constant(change: Callable[[torch.Tensor], _Folded]) -> Callable[[GraphModule, Node, int], _Folded | None]:
    def rule(gm: GraphModule, node: Node, channels: int) -> _Folded | None:
        constant = _per_channel(gm, node, channels) if node.meta["val"].dim() == 4 else None
        return None if constant is None or node.kwargs else change(constant)

    return rule


def _ones(c: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(c)


_RULES: dict[object, Callable[[GraphModule, Node, int], _Folded | None]] = {
    **dict.fromkeys(_NORMS, _norm),
    aten.mul.Tensor: _with_constant(lambda c: (c, 0 * c)),
    aten.div.Tensor: _with_constant(lambda c: (1 / c, 0 * c)),
    aten.add.Tensor: _with_constant(lambda c: (_ones(c), c)),
    aten.sub.Tensor: _with_constant(lambda c: (_ones(c), -c)),
}
