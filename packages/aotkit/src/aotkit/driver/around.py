"""What stands directly around compiled code, whether it was compiled just now or loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotkit_runtime_wrappers import CompilerWrapper

from .custom_ops import checked_at_first_call

__all__ = ["WithoutHistory", "around_compiled", "asks_for_history"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def asks_for_history(graph: torch.fx.GraphModule) -> bool:
    """Whether an operator of ``graph`` asks whether its arguments require grad though autograd is off."""
    return bool(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default))


class WithoutHistory(CompilerWrapper):
    """Compiled code on detached arguments where an operator asks whether they require grad, though autograd is off."""

    def pre_compile(self, fn: torch.fx.GraphModule, flat_args: list[Any], /) -> tuple[Any, list[Any], Any]:
        """The graph as it is; it is the state, because what counts is what the compiler made of it."""
        return fn, flat_args, fn

    def post_compile(self, compiled: Callable[..., Any], state: torch.fx.GraphModule, /) -> Callable[..., Any]:
        """``compiled``, boxed, itself if there is no such operator."""
        return _detaching(compiled) if asks_for_history(state) else compiled


def around_compiled(compiled: Boxed, detaches: bool, checked: Sequence[str]) -> Boxed:
    """Loaded code with the wrappers that it had when it was compiled. ``checked`` are names of operators."""
    if detaches:
        compiled = _detaching(compiled)
    return checked_at_first_call(compiled, frozenset(map(_operator, checked))) if checked else compiled


def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _detaching(compiled: Boxed) -> Boxed:
    def run(args: list[Any]) -> Any:
        args[:] = [v.detach() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in args]
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
