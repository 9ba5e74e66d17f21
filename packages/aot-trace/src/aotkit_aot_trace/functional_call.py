"""A module as a function of its parameters, its buffers and its arguments, all flat.

Note [Module stacks without a proxy of the module]
    Dynamo writes into each node which submodule it comes from. A module that is captured without
    Dynamo has nobody to do it, so while it runs every submodule has a pair of hooks that push and pop its path on
    the recorder's own stack, from where it reaches ``node.meta["nn_module_stack"]``. A submodule that is shared
    appears under the path by which it is known first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.graph import CodeGen

from aotkit_functionalize import Unsupported

from . import _torch_compat as compat
from .batch_norm import averages_without_numbers
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
    """``module`` called with the tensors ``names`` replaced by the leading arguments; the others are its own.

    Args:
        module: any module; of a graph module the nodes' stack traces and tags are carried over.
        names: full names of parameters and buffers; so many leading arguments stand for them.
        strict_out_tuple: refuse a result that is not a tuple or list.
        record_stack: see Note [Module stacks without a proxy of the module].
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], *, strict_out_tuple: bool = True, record_stack: bool = False
    ) -> None:
        self.module = module
        self.names = tuple(names)
        self._places = _last_names(module, self.names)
        self._strict = strict_out_tuple
        self._record_stack = record_stack
        self._graph: GraphFunction | None = None
        if isinstance(module, torch.fx.GraphModule):
            self._graph = GraphFunction(module, lifted=True)
            self.preferred_layer = self._graph.preferred_layer  # as of any graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = len(self.names)
        named, given = dict(zip(self.names, args[:count], strict=True)), args[count:]
        tensors = {name: named[name] for name in self._places}
        with ExitStack() as stack:
            stack.enter_context(compat.replaced_tensors(self.module, tensors))
            stack.enter_context(averages_without_numbers(self.module))
            if self._record_stack:
                stack.enter_context(recorded_module_stack(self.module))
            if self._graph is not None:
                result = self._graph(*_positional(self._graph.graph, given, kwargs))
            else:
                result = self.module(*given, **kwargs)
            _write_assigned_buffers(self.module, tensors)
        if self._strict and not isinstance(result, tuple | list):
            raise RuntimeError(
                f"Graph output must be a tuple(). This module returns a {type(result).__name__}, and its result is "
                "handed on without looking for tensors inside. Return a tuple, or use aot_module, which flattens"
            )
        return result


def _last_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The names, but of several for one attribute of one module (which is registered under two names) only the last: an
    attribute is replaced, and put back, once."""
    places: dict[tuple[int, str], str] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        places[id(module.get_submodule(path)), attribute] = name
    return list(places.values())


def _write_assigned_buffers(module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """``self.buffer = new`` while the module ran: the new value is written to the old one, which the caller holds."""
    for name, old in given.items():
        path, _, attribute = name.rpartition(".")
        new = getattr(module.get_submodule(path), attribute, None)
        if new is old:
            continue
        if not isinstance(new, torch.Tensor) or isinstance(new, nn.Parameter) or _layout(new) != _layout(old):
            raise Unsupported(
                f"{name} of the module is assigned another kind of value while it runs",
                "only a buffer can be given a new value, of the same sizes and dtype",
                "Write to it in place, or return the value",
            )
        old.copy_(new)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device


def create_functional_call(
    mod: nn.Module, names: Sequence[str] | None = None, *, strict_out_tuple: bool = True, record_stack: bool = False
) -> FunctionalCall:
    """:class:`FunctionalCall` over the named tensors of ``mod``: by default its parameters, then its buffers."""
    chosen = list(named_tensors(mod)) if names is None else names
    return FunctionalCall(mod, chosen, strict_out_tuple=strict_out_tuple, record_stack=record_stack)


def _positional(graph: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """A graph is run by position: keyword arguments are those of the placeholders with their names.

    A graph that takes its arguments apart itself, as those of ``torch.export`` and Dynamo's capture for it do, has the
    names in its signature, and other placeholders.
    """
    if not kwargs:
        return list(args)
    if type(graph.graph._codegen) is not CodeGen:
        bound = inspect.signature(graph.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return [*bound.args, *bound.kwargs.values()]
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
