"""One graph compiled for several patterns of memory that its arguments share.

Note [Other aliases at run time]
    A graph that writes to an argument is compiled for arguments that share memory in a certain way, and
    Dynamo does not guard on it. Its wrapper looks, before anything runs, whether they still do, and raises
    ``AliasingChangedError`` if not. The graph is then compiled again for the arguments at hand, with constant sizes.
    Which specialization holds is found out by asking each: they all look. A call of the first one costs nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotkit_runtime_wrappers import AliasingChangedError
from aotkit_runtime_wrappers.refinements import checks_aliases

__all__ = ["MOST_ALIAS_PATTERNS", "addressed_inputs", "with_alias_specializations"]

MOST_ALIAS_PATTERNS = 16
"""So many patterns are compiled for arguments of the same sizes; then the error is the caller's."""


def with_alias_specializations(
    first: Callable[..., Any], compile_for: Callable[[Sequence[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """``first``, and for arguments that share memory in another way ``compile_for(arguments)``.

    Args:
        first: from :func:`.compile_and_bind`.
        compile_for: the same for the real arguments of a later call.
    """
    boxed = getattr(first, "boxed", None)
    if boxed is None or not checks_aliases(boxed.plan):
        return first
    others = _Others(compile_for)

    def call(*args: Any) -> Any:
        try:
            return boxed(list(args))
        except AliasingChangedError as changed:
            return others.call(args, changed)

    call.boxed = boxed  # type: ignore[attr-defined]
    return call


def addressed_inputs(graph: torch.fx.GraphModule, count: int) -> dict[int, int]:
    """Those of the first ``count`` inputs from the start of whose storage a captured graph counts elements, as
    ``as_strided`` does if it is given an offset, and up to which byte. Of known numbers: others only a call tells."""
    inputs = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if i < count}
    found: dict[int, int] = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        sizes, strides, offset = (*node.args[1:], None)[:3]
        numbers = (*sizes, *strides, offset)
        source = node.args[0]
        while source not in inputs and source.args and _is_view(source):
            source = source.args[0]
        if source in inputs and all(type(number) is int for number in numbers):
            reach = offset + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            nbytes = reach * node.meta["val"].element_size() if 0 not in sizes else 0
            found[inputs[source]] = max(found.get(inputs[source], 0), nbytes)
    return found


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].alias_info is not None


@dataclass(slots=True)
class _Others:
    """Specializations by the geometry of the arguments that they were compiled for. Safe under threads."""

    compile_for: Callable[[Sequence[Any]], Callable[..., Any]]
    compiled: dict[Any, list[Callable[..., Any]]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def call(self, args: Sequence[Any], changed: AliasingChangedError) -> Any:
        key = tuple(_geometry(value) for value in args)
        tried: list[Callable[..., Any]] = []
        while len(tried) < MOST_ALIAS_PATTERNS:
            run = self._next(key, tried, args)
            try:
                return run(*args)
            except AliasingChangedError:
                tried.append(run)
        raise changed

    def _next(self, key: Any, tried: list[Callable[..., Any]], args: Sequence[Any]) -> Callable[..., Any]:
        with self.lock:
            known = self.compiled.setdefault(key, [])
            if len(known) == len(tried):
                known.append(self.compile_for(args))
            return known[len(tried)]


def _geometry(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, torch.is_grad_enabled()
