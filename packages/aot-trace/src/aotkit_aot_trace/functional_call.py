"""A module as a function of its parameters, its buffers and its arguments, all flat.

Note [Module stacks without a proxy of the module]
    The frontend writes into each node which submodule it comes from. A module that is captured without the
    frontend has nobody to do it, so while it runs every submodule has a pair of hooks that push and pop its path on
    the recorder's own stack, from where it reaches ``node.meta["nn_module_stack"]``. A submodule that is shared
    appears under the path by which it is known first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from aotkit_functionalize import FunctionalLayer

from . import _torch_compat as compat
from .graph_function import GraphFunction

__all__ = ["FunctionalCall", "create_functional_call", "named_tensors"]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, by their full names; what is registered under two names appears twice.

    Raises ``AssertionError`` for a fake tensor among them, which has leaked out of some earlier capture.
    """
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    for name, value in named.items():
        if compat.is_fake(value):
            raise AssertionError(
                f"{name} of the module is a fake tensor: it has no values, and has leaked out of an earlier capture. "
                "Make the module again, or materialize its parameters and buffers"
            )
    return named


class FunctionalCall:
    """``module`` called with the tensors ``names`` replaced by the leading flat arguments.

    Args:
        module: any module; of a graph module the nodes' stack traces and tags are carried over.
        names: full names of parameters and buffers; so many leading arguments stand for them.
        unflatten: makes positional and keyword arguments of the other flat arguments; by default they are positional.
        strict_out_tuple: refuse what is not a tuple or list. Else the result is flattened, see ``out_spec``.
        record_stack: see Note [Module stacks without a proxy of the module].

    Attributes:
        out_spec: structure of the last result, if it was flattened.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        *,
        unflatten: Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]] | None = None,
        strict_out_tuple: bool = True,
        record_stack: bool = False,
    ) -> None:
        self.module = module
        self.names = tuple(names)
        self.out_spec: pytree.TreeSpec | None = None
        self._unflatten = unflatten
        self._strict = strict_out_tuple
        self._record_stack = record_stack
        self._graph = GraphFunction(module, lifted=True) if isinstance(module, torch.fx.GraphModule) else None

    def preferred_layer(self) -> FunctionalLayer:
        """That of the graph; for any other module the layer that copes with everything."""
        return FunctionalLayer.MODE if self._graph is None else self._graph.preferred_layer()

    def __call__(self, *flat: Any) -> Any:
        count = len(self.names)
        given = list(flat[count:])
        args, kwargs = (given, {}) if self._unflatten is None else self._unflatten(given)
        with ExitStack() as stack:
            stack.enter_context(compat.replaced_tensors(self.module, dict(zip(self.names, flat[:count], strict=True))))
            if self._record_stack:
                stack.enter_context(recorded_module_stack(self.module))
            if self._graph is not None:
                result = self._graph(*_positional(self._graph.graph, args, kwargs))
            else:
                result = self.module(*args, **kwargs)
        if not self._strict:
            leaves, self.out_spec = pytree.tree_flatten(result)
            return leaves
        if not isinstance(result, tuple | list):
            raise RuntimeError(
                f"Graph output must be a tuple(). This module returns a {type(result).__name__}, and its result is "
                "handed on without looking for tensors inside. Return a tuple, or use aot_module, which flattens"
            )
        return result


def create_functional_call(
    mod: nn.Module, names: Sequence[str] | None = None, *, strict_out_tuple: bool = True, record_stack: bool = False
) -> FunctionalCall:
    """:class:`FunctionalCall` over the named tensors of ``mod``: by default its parameters, then its buffers."""
    chosen = list(named_tensors(mod)) if names is None else names
    return FunctionalCall(mod, chosen, strict_out_tuple=strict_out_tuple, record_stack=record_stack)


def _positional(graph: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """A graph is run by position: keyword arguments are those of the placeholders with their names."""
    if not kwargs:
        return list(args)
    by_name = {str(node.target): node for node in graph.graph.find_nodes(op="placeholder")}
    unknown = [name for name in kwargs if name not in by_name]
    if unknown:
        raise TypeError(f"the graph has no input {unknown[0]!r}; it has {', '.join(by_name)}")
    left = list(by_name.values())[len(args) :]
    return [*args, *(kwargs[n.target] if n.target in kwargs else _default(n) for n in left)]


def _default(node: torch.fx.Node) -> Any:
    if not node.args:
        raise TypeError(f"input {node.target!r} of the graph is given no value")
    return node.args[0]


@contextmanager
def recorded_module_stack(module: nn.Module) -> Iterator[None]:
    """See Note [Module stacks without a proxy of the module]."""
    tracer = compat.current_tracer_or_none()
    if tracer is None:
        yield
        return
    stack, outer = tracer.module_stack, tracer.module_stack.copy()
    handles: list[Any] = []
    for path, inner in module.named_modules():
        handles.append(inner.register_forward_pre_hook(_pusher(stack, path), prepend=True))
        handles.append(inner.register_forward_hook(_popper(stack, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        stack.clear()
        stack.update(outer)


def _pusher(stack: dict[str, Any], path: str) -> Callable[..., None]:
    def push(module: nn.Module, _: Any) -> None:
        kind = type(module)
        stack[path] = (path, f"{kind.__module__}.{kind.__qualname__}")

    return push


def _popper(stack: dict[str, Any], path: str) -> Callable[..., None]:
    def pop(module: nn.Module, _: Any, result: Any) -> None:
        stack.pop(path, None)

    return pop
