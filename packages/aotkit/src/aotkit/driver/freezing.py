"""Frozen graphs: parameters and buffers become constants, and what happens when they change or are thrown away."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from .._torch_compat import remove_guards
from ..artifact.frozen import FrozenArguments
from ..errors import FrozenParameterError
from ..frontend.sources import static_inputs

__all__ = ["DiscardedParameter", "check_frozen", "discard_parameters", "frozen_arguments"]

_MARK = "_aotkit_frozen"  # on tensors whose values are constants of a compiled graph


class DiscardedParameter(torch.Tensor):
    """Stands for a parameter whose memory is gone; whatever uses it raises :class:`FrozenParameterError`."""

    what: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, what: str) -> DiscardedParameter:
        """The same sizes, strides and type, and no memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        self: DiscardedParameter = make(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )
        self.what = what
        return self

    def __init__(self, like: torch.Tensor, what: str) -> None: ...

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DiscardedParameter({self.what})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse."""
        found = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, cls)]
        raise FrozenParameterError(
            f"{found[0].what} was discarded after a frozen graph had taken its value, and {func} needs it; only the "
            "compiled model runs now. Load the parameters again, or do not discard them"
        )


def discard_parameters(model: torch.nn.Module) -> list[str]:
    """Release the parameters and buffers of ``model`` that compiled graphs froze (``options={"freezing": True}``).

    The compiled model runs on. Anything else that uses one of them raises :class:`FrozenParameterError`. Returns the
    names of what was discarded. Graphs compiled later need the parameters, so compile (call) all that is wanted first.
    """
    names: list[str] = []
    for path, module in model.named_modules():
        for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
            for name, value in list(table.items()):
                if value is not None and getattr(value, _MARK, False):
                    full = f"{path}.{name}" if path else name
                    entries: dict[str, Any] = table  # type: ignore[assignment]
                    entries[name] = DiscardedParameter(value, f"the {kind} {full}")
                    names.append(full)
    return names


def frozen_arguments(example_inputs: Sequence[Any], attributes: Sequence[Any]) -> FrozenArguments | None:
    """The parameters and buffers among the arguments, if gradients are off."""
    if torch.is_grad_enabled():
        return None
    tensors = [*example_inputs, *attributes]
    return FrozenArguments({index: tensors[index] for index in static_inputs(example_inputs, attributes)})


def check_frozen(run: Callable[..., Any], frozen: FrozenArguments, gm: GraphModule) -> Callable[..., Any]:
    """``run``, which refuses to run with other parameters than were frozen. Discarded ones are no others.

    Dynamo's own guards on them go, so that a discarded one does not compile again.
    """
    watched = [(index, weakref.ref(t), _version(t)) for index, t in frozen.tensors.items() if index in frozen.used]
    for index, _, _ in watched:
        setattr(frozen.tensors[index], _MARK, True)
        _forget_guards(gm, index)
    nothing = torch.empty(0)

    def checked(*args: Any) -> Any:
        discarded = False
        for index, tensor, version in watched:
            value: Any = args[index]
            same: bool = value is tensor()
            if same and (version is None or version == value._version):
                continue
            if not isinstance(value, DiscardedParameter):
                raise FrozenParameterError(
                    f"argument {index} of a frozen graph, a parameter or buffer of shape {tuple(value.shape)}, has "
                    "changed since it was compiled; call torch._dynamo.reset() to compile for the new values, or leave "
                    "the option 'freezing' out"
                )
            discarded = True
        if discarded:
            args = tuple(nothing if isinstance(value, DiscardedParameter) else value for value in args)
        return run(*args)

    return checked


def _forget_guards(gm: GraphModule, position: int) -> None:
    context = TracingContext.try_get()
    placeholders = gm.graph.find_nodes(op="placeholder")
    source = getattr(placeholders[position], "_dynamo_source", None) if position < len(placeholders) else None
    if context is not None and source is not None:
        remove_guards(context.guards_context.dynamo_guards, source)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
