"""Frozen graphs: parameters and buffers become constants, and what happens when they change or are thrown away."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from aotkit_cache import Uncacheable
from aotkit_functionalize import GraphMetadata, records
from aotkit_inductor_lower import freeze
from aotkit_runtime_wrappers import InputPlan

from ..artifact.records import bytes_of
from ..errors import FrozenParameterError

__all__ = ["DiscardedParameter", "FrozenArguments", "check_frozen", "discard_parameters", "frozen_arguments"]

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


class FrozenArguments:
    """The arguments of a graph that may become constants, and those that did."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = tensors
        self.used: set[int] = set()

    def freeze(self, graph: GraphModule, metadata: GraphMetadata, inputs: InputPlan) -> GraphModule:
        """The graph of an inference with these arguments as constants, if they are inputs that it only reads."""
        before = graph.graph.find_nodes(op="placeholder")
        if metadata.subclasses is not None or len(metadata.inputs) != len(before):
            return graph
        first = len(before) - len(inputs.others)
        wanted = {
            first + place: index
            for place, index in enumerate(inputs.others)
            if index in self.tensors and _is_only_read(metadata.inputs[first + place])
        }
        frozen = freeze(graph, {position: self.tensors[index] for position, index in wanted.items()})
        after = frozen.graph.find_nodes(op="placeholder")
        self.used |= {
            index for position, index in wanted.items() if before[position].users and not after[position].users
        }
        return frozen

    def positions_of(self, constants: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Which of a graph's constants are arguments as they are: by name, the position."""
        known = {_memory(tensor): index for index, tensor in self.tensors.items()}
        return {name: known[_memory(value)] for name, value in constants.items() if _memory(value) in known}

    def digests(self) -> dict[str, str]:
        """For a key, a digest of the value of each argument. Raises :class:`Uncacheable` if one has none."""
        return {str(index): _digest(index, tensor) for index, tensor in sorted(self.tensors.items())}


def _is_only_read(info: records.InputInfo) -> bool:
    lazy = info.meta is not None and (info.meta.conj or info.meta.neg)  # the graph would take their memory
    return info.mutation.value == "none" and not lazy


def _memory(value: torch.Tensor) -> Any:
    if value.layout is not torch.strided or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()


def _digest(index: int, value: torch.Tensor) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise Uncacheable(f"the frozen argument {index} is no plain tensor")
    return hashlib.sha256(bytes_of(value.detach())).hexdigest()  # sizes and strides are parts of the key


def frozen_arguments(example_inputs: Sequence[Any], held: Sequence[Any]) -> FrozenArguments | None:
    """The parameters and buffers among the arguments, if gradients are off."""
    from .cudagraphs import fixed_arguments

    if torch.is_grad_enabled():
        return None
    tensors = [*example_inputs, *held]
    return FrozenArguments({index: tensors[index] for index in fixed_arguments(example_inputs, held)})


def check_frozen(run: Callable[..., Any], frozen: FrozenArguments, gm: GraphModule) -> Callable[..., Any]:
    """``run``, which refuses to run with other parameters than were frozen. Discarded ones are no others.

    The frontend's own guards on them go, so that a discarded one does not compile again.
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
        context.guards_context.dynamo_guards.remove_guards_with_source(source)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
