"""At binding: compiled parts of a graph become nodes of a tree of CUDA graph recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._notices import warn_user
from ..artifact.records import RecordedGraph

if TYPE_CHECKING:
    from aotkit_cudagraphs import CudagraphTrees, TreeFunction

__all__ = ["BoundRecordings", "tell_of_the_cpu"]

Boxed = Callable[[list[Any]], Sequence[Any]]


class BoundRecordings:
    """What a forward and its backward share where they are recorded; of other graphs nothing.

    Args:
        trees: where recordings go; by default those that all compiled graphs of the device share.
    """

    def __init__(self, trees: CudagraphTrees | None = None) -> None:
        self._trees = trees
        self._forwards: list[TreeFunction] = []

    def bind(self, code: RecordedGraph, parts: Sequence[Boxed], held: Mapping[str, torch.Tensor], name: str) -> Boxed:
        """The boxed callable of a graph with these bound ``parts``; ``held``: tensors of its own among its results.

        A backward is recorded only where its forward is.
        """
        from aotkit_cudagraphs.plan import bind_plan

        if self._trees is None:
            self._trees = trees_of(torch.device(code.device), code.outputs)
        wrap = {"forward": self._wrap_forward, "backward": self._wrap_backward}.get(code.plan.name, self._trees.wrap)
        prefix = name.removesuffix(code.plan.name)
        return bind_plan(code.plan, parts, self._trees, wrap=wrap, attributes=held, prefix=prefix)

    def _wrap_forward(self, call: Boxed, **settings: Any) -> Callable[..., Any]:
        from aotkit_cudagraphs import TreeFunction

        assert self._trees is not None
        # The backward of several parts is awaited by the first.
        wrapped = self._trees.wrap(call, training=not self._forwards, **settings)
        if isinstance(wrapped, TreeFunction):
            self._forwards.append(wrapped)
        return wrapped

    def _wrap_backward(self, call: Boxed, **settings: Any) -> Callable[..., Any]:
        return self._forwards[0].backward(call, **settings) if self._forwards else call


def trees_of(device: torch.device, outputs: Literal["survive", "copy", "overwrite"]) -> CudagraphTrees:
    """The trees that all compiled graphs of a device share."""
    from aotkit_cudagraphs import TreeOptions, shared_trees

    return shared_trees(device, TreeOptions(outputs=outputs, check_static_layouts=False))  # Dynamo guards layouts


def tell_of_the_cpu(name: str) -> None:
    """The notice about a graph that can't be recorded because it runs on the CPU."""
    from aotkit_cudagraphs import CudagraphNotice, SkipKind, SkipReason

    warn_user(
        f"runs without a CUDA graph: {SkipReason(SkipKind.CPU_DEVICE, f'{name} runs on the CPU')}", CudagraphNotice
    )
