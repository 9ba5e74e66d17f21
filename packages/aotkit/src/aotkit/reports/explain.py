"""What became of a function: graphs, kernels, extern calls with reasons, stage seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..backend import make_backend
from ..environment import read_environment
from ..options import Options
from ..recorder import GraphRecord, Recorder

__all__ = ["Explanation", "explain", "run_once"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of :func:`explain`; ``str()`` is the readable report.

    ``graphs``: one record per compiled graph (inference, forward, backward), its ``report`` the lowering's.
    ``stage_seconds``: wall-clock seconds per compile stage. ``fallbacks``: why graphs run eagerly, if any do.
    """

    graphs: tuple[GraphRecord, ...]
    stage_seconds: dict[str, float]
    fallbacks: tuple[str, ...]
    stage_table: str

    @property
    def kernel_count(self) -> int:
        """Generated kernels over all graphs."""
        return sum(g.report.kernel_count for g in self.graphs)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        parts = [f"{_counted(len(self.graphs), 'compiled graph')}, {_counted(self.kernel_count, 'kernel')}"]
        parts += [f"runs eagerly: {reason}" for reason in self.fallbacks]
        parts += [f"== {graph.name}\n{graph.report}" for graph in self.graphs]
        parts.append(f"== seconds per stage\n{self.stage_table}")
        return "\n\n".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def explain(fn: Callable[..., Any], *args: Any, options: Options | None = None, **kwargs: Any) -> Explanation:
    """Compile ``fn`` for these arguments, run it once (and its backward, if an output requires grad), and report.

    Gradients are computed but not accumulated into ``.grad``; anything else ``fn`` does to its arguments happens.
    Raises ``TypeError`` if ``fn`` can't be called.
    """
    if not callable(fn):
        raise TypeError(f"explain takes a function or a module, and its arguments; {fn!r} can't be called")
    recorder = Recorder()
    compiled = torch.compile(
        fn, backend=make_backend(options or read_environment().options().patch(cache=False), recorder)
    )
    run_once(compiled, args, kwargs)
    seconds = recorder.stage_seconds()
    return Explanation(tuple(recorder.graphs), seconds, tuple(recorder.fallbacks), recorder.table())


def run_once(compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call it, and its backward if an output requires grad; no gradient is accumulated."""
    outputs = [
        o for o in pytree.tree_leaves(compiled(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad
    ]
    if outputs:
        torch.autograd.grad(outputs, _leaves_of(outputs), [torch.ones_like(o) for o in outputs], allow_unused=True)


def _leaves_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every leaf that the outputs' autograd graph would accumulate a gradient into."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = []
    for output in outputs:
        if output.grad_fn is None:
            found[id(output)] = output
        else:
            stack.append(output.grad_fn)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        stack.extend(parent for parent, _ in node.next_functions)
    return list(found.values())
