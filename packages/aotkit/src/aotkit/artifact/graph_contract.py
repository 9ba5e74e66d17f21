"""The contract of a graph that is saved, made where it is compiled; :mod:`.graph_inputs` checks calls against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._guards import TracingContext

from aotkit_cache import Uncacheable

from ..frontend.inputs import symbolic_twins
from ..frontend.sources import named_sources
from .graph_inputs import PLAIN, GraphInput, InputContract
from .guards import Names, guards_of, ranges_of, tree_of

__all__ = ["contract_of"]


def contract_of(gm: torch.fx.GraphModule, args: Sequence[Any]) -> InputContract:
    """The contract of Dynamo's graph for its example inputs, within the context of its compile.

    Raises :class:`Uncacheable` for an input or a fact about sizes that has no stored form.
    """
    context = TracingContext.try_get()
    names = Names()
    placeholders = gm.graph.find_nodes(op="placeholder")
    twins = symbolic_twins(args, gm, context)
    inputs = [
        replace(_describe(name, value, twin, node.meta.get("example_value"), names), source=source)
        for (source, name), value, twin, node in zip(named_sources(gm), args, twins, placeholders, strict=True)
    ]
    if len(names.values) < len(names.numbers):
        raise Uncacheable("a symbol of the sizes is the size of no input by itself")
    mode = None if context is None else context.fake_mode
    shape_env = None if mode is None else mode.shape_env
    ranges = {name: (_bound(low), _bound(high)) for name, (low, high) in ranges_of(shape_env, names).items()}
    return InputContract(inputs, guards_of(shape_env, names), ranges)


def _describe(name: str, value: Any, twin: Any, seen: Any, names: Names) -> GraphInput:
    if isinstance(seen, torch.SymInt) or isinstance(value, torch.SymInt):
        symbolic = seen if isinstance(seen, torch.SymInt) else value
        names.text(symbolic)
        return GraphInput(name, "number", number=names.json(symbolic))
    kind = PLAIN.get(type(value))
    if kind is None or value.layout is not torch.strided:
        raise Uncacheable(f"{name} is a {type(value).__qualname__}; saved functions take plain dense tensors")
    sized = value if twin is None or twin.dim() != value.dim() else twin
    for size in (*sized.shape, *sized.stride()):
        if isinstance(size, torch.SymInt):
            names.text(size)
    memo = getattr(twin, "item_memo", None)
    number = None
    if isinstance(memo, torch.SymFloat):
        names.text(memo)
        number = tree_of(memo.node.expr, names.numbers)  # which is a number where the compile settled it
    shape, stride = [names.json(n) for n in sized.shape], [names.json(n) for n in sized.stride()]
    lazy = (value.is_conj(), value.is_neg())
    return GraphInput(name, kind, str(value.dtype), shape, stride, str(value.device), value.requires_grad, lazy, number)


def _bound(text: str) -> int | None:
    """A bound of a range; infinities and bounds of floats are no bounds."""
    digits = text.removeprefix("-")
    return int(text) if digits.isdigit() and len(digits) < 19 else None
