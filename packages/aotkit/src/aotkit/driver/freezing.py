"""Frozen graphs: parameters and buffers become constants, and what happens when they change or are thrown away.

Note [Frozen graphs of several modules]
    Dynamo keeps what it compiled by the code of a function. Another model of the same class runs the same code, and so
    do the layers of one model whose graph breaks in them; Dynamo calls the same graph with other parameters, since its
    guards on them are removed: a parameter that is discarded is another object. So a frozen graph looks itself whose
    parameters it got, and is compiled again for those of another module if they differ in values only. One that was
    written to is an error, as the caller said that it would not change.

    Whether two names are one tensor is in the graph (it has one input for both), so those guards stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from .._torch_compat import remove_guards
from ..artifact.frozen import FrozenArguments
from ..errors import FrozenParameterError
from ..frontend.inputs import has_symbols
from ..frontend.sources import static_inputs

__all__ = ["DiscardedParameter", "check_frozen", "discard_parameters", "frozen_arguments"]

_MARK = "_aotkit_frozen"  # on tensors whose values are constants of a compiled graph


class DiscardedParameter(torch.Tensor):
    """Stands for a parameter whose memory is gone; whatever uses it raises :class:`FrozenParameterError`."""

    what: str
    token: object

    @staticmethod
    def __new__(cls, like: torch.Tensor, what: str) -> DiscardedParameter:
        """The same sizes, strides and type, and no memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        self: DiscardedParameter = make(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )
        self.what, self.token = what, getattr(like, _MARK, None)
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
    stand_ins: dict[int, DiscardedParameter] = {}  # one for a tensor that has several names
    for path, module in model.named_modules():
        for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
            for name, value in list(table.items()):
                token = None if value is None else getattr(value, _MARK, None)
                if value is not None and token is not None:
                    full = f"{path}.{name}" if path else name
                    if id(token) not in stand_ins:
                        stand_ins[id(token)] = DiscardedParameter(value, f"the {kind} {full}")
                    token.stand_in = weakref.ref(stand_ins[id(token)])
                    entries: dict[str, Any] = table  # type: ignore[assignment]
                    entries[name] = stand_ins[id(token)]
                    names.append(full)
    return names


def frozen_arguments(example_inputs: Sequence[Any], attributes: Sequence[Any]) -> FrozenArguments | None:
    """The parameters and buffers among the arguments, if gradients are off."""
    if torch.is_grad_enabled():
        return None
    tensors = [*example_inputs, *attributes]
    return FrozenArguments({index: tensors[index] for index in static_inputs(example_inputs, attributes)})


def check_frozen(
    run: Callable[..., Any],
    frozen: FrozenArguments,
    gm: GraphModule,
    again: Callable[[Sequence[Any]], tuple[Callable[..., Any], FrozenArguments]],
) -> Callable[..., Any]:
    """``run`` for the parameters that were frozen, discarded ones included: Note [Frozen graphs of several modules].

    ``again`` compiles for the parameters among the arguments, and for the sizes of all. What raises
    :class:`FrozenParameterError`: a parameter that was written to, one that differs in more than its values, and one of
    another module where sizes vary.
    """
    for index in frozen.used:
        _forget_guards(gm, index)
    known, lock, sizes_vary = [_Frozen.of(run, frozen)], Lock(), has_symbols(gm)
    kinds = known[0].watched

    def checked(*args: Any) -> Any:
        for each in known:
            if (given := each.given(args)) is not None:
                return each.run(*given)
        with lock:
            if all(each.given(args) is None for each in known):
                _refuse_other_kinds(kinds, args)
                if sizes_vary:
                    raise kinds[0].refusal("is another module's, and the graph is for sizes that vary")
                known[:] = [*(each for each in known if each.is_alive()), _Frozen.of(*again(args))]
        return checked(*args)

    return checked


class _Token:
    """A tensor that was frozen, which may be gone, and what stands for it then."""

    def __init__(self) -> None:
        self.stand_in: weakref.ref[DiscardedParameter] | None = None

    def has_stand_in(self) -> bool:
        return self.stand_in is not None and self.stand_in() is not None


@dataclass(frozen=True)
class _Watched:
    """A tensor whose value is a constant of a graph, and its kind."""

    index: int
    tensor: weakref.ref[torch.Tensor]
    version: int | None
    address: int | None
    token: _Token
    kind: tuple[Any, ...]

    @staticmethod
    def of(index: int, tensor: torch.Tensor) -> _Watched:
        token = getattr(tensor, _MARK, None) or _Token()
        setattr(tensor, _MARK, token)
        return _Watched(index, weakref.ref(tensor), _version(tensor), _address(tensor), token, _kind(tensor))

    def is_discarded(self, value: Any) -> bool:
        return isinstance(value, DiscardedParameter) and value.token is self.token

    def refusal(self, what: str) -> FrozenParameterError:
        return FrozenParameterError(
            f"argument {self.index} of a frozen graph, a parameter or buffer of shape {self.kind[1]}, {what}; call "
            "torch._dynamo.reset() to compile for the new values, or leave the option 'freezing' out"
        )


@dataclass(frozen=True)
class _Frozen:
    """A graph for the parameters of one module."""

    run: Callable[..., Any]
    watched: tuple[_Watched, ...]

    @staticmethod
    def of(run: Callable[..., Any], frozen: FrozenArguments) -> _Frozen:
        return _Frozen(run, tuple(_Watched.of(index, frozen.tensors[index]) for index in sorted(frozen.used)))

    def is_alive(self) -> bool:
        return all(each.tensor() is not None or each.token.has_stand_in() for each in self.watched)

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What to run with, or nothing if these are the parameters of another module."""
        changed, discarded = None, False
        for each in self.watched:
            value, tensor = args[each.index], each.tensor()
            if tensor is not None and value is tensor:
                written = each.version is not None and each.version != tensor._version
                if written or (each.address is not None and each.address != tensor.data_ptr()):  # by `p.data = ..`
                    changed = each
            elif each.is_discarded(value):
                discarded = True
            else:
                return None
        if changed is not None:
            raise changed.refusal("has changed since it was compiled")
        return tuple(map(_without_memory, args)) if discarded else args


def _refuse_other_kinds(kinds: Sequence[_Watched], args: Sequence[Any]) -> None:
    """Dynamo's guards on these arguments are gone: the graph holds for such as it was made for."""
    for each in kinds:
        if _kind(args[each.index]) != each.kind:
            raise each.refusal("is now one of another shape, type or layout, or was discarded for another graph")


def _without_memory(value: Any) -> Any:
    """The graph does not read what is discarded."""
    return torch.empty(0) if isinstance(value, DiscardedParameter) else value


def _kind(value: Any) -> tuple[Any, ...]:
    """What Dynamo's guards had compared."""
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    form = () if value.layout is not torch.strided else (value.stride(), value.is_conj(), value.is_neg())
    return (type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad, value.layout, *form)


def _forget_guards(gm: GraphModule, position: int) -> None:
    """A discarded parameter does not compile again."""
    context = TracingContext.try_get()
    placeholders = gm.graph.find_nodes(op="placeholder")
    source = getattr(placeholders[position], "_dynamo_source", None) if position < len(placeholders) else None
    if context is not None and source is not None:
        remove_guards(context.guards_context.dynamo_guards, source)


def _address(tensor: torch.Tensor) -> int | None:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
