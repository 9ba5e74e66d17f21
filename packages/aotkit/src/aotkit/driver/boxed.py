"""The boxed calling convention and the names of graphs, for compilers that are written for torch's own stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

__all__ = [
    "compiling_graph",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "nop",
]

# What the compiler that runs right now was given: it asks by a function without arguments, as torch's do.
_CURRENT: ContextVar[tuple[str, str, int] | None] = ContextVar("aotkit_graph", default=None)


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``f(*args)`` as a function of one list, which it empties; the result is ``f``'s own."""

    @wraps(f, updated=())
    def boxed(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return f(*values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def make_boxed_compiler(compiler: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[[list[Any]], Any]]:
    """``compiler`` with boxed results: for compilers that return a plain function of the graph's inputs."""

    @wraps(compiler)
    def boxed_compiler(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return make_boxed_func(compiler(graph, example_inputs))

    return boxed_compiler


def nop(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A compiler that runs the graph as it is, with ATen."""
    return make_boxed_func(graph)


@contextmanager
def compiling_graph(function: str, kind: str, number: int) -> Iterator[None]:
    """Context in which a compiler is called for graph ``number`` of ``function``; ``kind`` as in ``"forward"``."""
    token = _CURRENT.set((function, kind, number))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def get_aot_graph_name() -> str:
    """Name of the graph whose compiler is running: ``model__0_forward_0``; no two graphs of a process share one."""
    function, kind, number = _CURRENT.get() or ("model", "none", 0)
    return f"{function}_{kind}_{number}"


def get_graph_being_compiled() -> str:
    """Kind and number of the graph whose compiler is running: ``forward_0``. Raises outside of a compiler."""
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError("no graph is being compiled: this is asked from within a compiler")
    return f"{current[1]}_{current[2]}"
