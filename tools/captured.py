"""The graphs of a call: captured by torch's own ``aot_autograd``, with our decompositions and our partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotkit_inductor_lower import LowerOptions, decompositions
from aotkit_inductor_lower.driver import prepare_joint_graph
from aotkit_partition import min_cut_rematerialization_partition

__all__ = ["captured"]

Graphs = list[tuple[str, torch.fx.GraphModule, list[Any]]]


def captured(call: Callable[[Callable[..., Any]], object], options: LowerOptions | None = None) -> Graphs:
    """``forward`` or ``backward``, the graph and its inputs, of each graph that runs in ``call(backend)``, in order.
    With ``options`` after what our code generation does to a forward and its backward together."""
    from torch._dynamo.backends.common import aot_autograd

    found: Graphs = []

    def keeper(part: str) -> Callable[..., Any]:
        def keep(module: torch.fx.GraphModule, _examples: Any) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                found.append((part, module, [a.clone() if isinstance(a, torch.Tensor) else a for a in args]))
                return module(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return keep

    def split(joint: torch.fx.GraphModule, inputs: Any, **named: Any) -> Any:
        prepared = joint if options is None else prepare_joint_graph(joint, options, where_faster=True)
        return min_cut_rematerialization_partition(prepared, inputs, **named)

    call(
        aot_autograd(
            fw_compiler=keeper("forward"),
            bw_compiler=keeper("backward"),
            partition_fn=split,
            decompositions=decompositions(),
        )
    )
    return found
