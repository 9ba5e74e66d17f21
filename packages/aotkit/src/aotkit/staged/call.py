"""The call that a stage was captured for, as data: structures, tensors, and the state of torch that it ran in.

Note [Exactly that call]
    A stage is made for one call: a graph has baked in the structure of its arguments, the values of everything in them
    that is no tensor, types, sizes, strides and who is whom among the tensors, the training flags of a module, and
    whether gradients were on. Another call is refused by :class:`CallError`, for a stage has no function any more of
    which it could compile another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..artifact.structure import describe_structure, flatten_like
from ..artifact.torch_state import CALL_STATE, state_of_call
from ..errors import CompileError, PackageError

__all__ = ["Argument", "Call", "CallError", "describe_call", "describe_results"]

_PLAIN = (torch.Tensor, nn.Parameter)


class CallError(ValueError):
    """A stage was called in another way than it was captured for. Says what differs."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor that the graph takes. ``same``: the position of the first argument that is this very tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    same: int

    def __str__(self) -> str:
        kind = self.dtype.removeprefix("torch.")
        place = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name}: {kind}[{', '.join(map(str, self.shape))}]{place}{' with grad' * self.requires_grad}"


@dataclass(frozen=True, slots=True)
class Call:
    """See Note [Exactly that call].

    Attributes:
        arguments: the tensors of a module (``weights``: so many), then those of the call.
        inputs: structure of ``[args, kwargs]``, as JSON.
        outputs: structure of the result, as JSON.
        training: of each submodule whether it was in training; empty for a function.
        state: of torch.
    """

    arguments: tuple[Argument, ...]
    weights: int
    inputs: Any
    outputs: Any
    training: tuple[bool, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Full names of the module's parameters and buffers, in order."""
        return tuple(argument.name for argument in self.arguments[: self.weights])

    @property
    def device(self) -> str:
        """The only CUDA device among the arguments', or the CPU."""
        return next((argument.device for argument in self.arguments if argument.device != "cpu"), "cpu")

    def __str__(self) -> str:
        rows = [str(argument) for argument in self.arguments[self.weights :]]
        if self.weights:
            rows.append(f"{self.weights} parameters and buffers")
        return "\n".join(f"  {row}" for row in rows)

    def flatten(self, weights: Sequence[torch.Tensor], args: Any, kwargs: Any) -> list[Any]:
        """The graph's tensors for a call. Raises :class:`CallError` for one that the stage was not captured for."""
        leaves: list[Any] = []
        try:
            flatten_like(self.inputs, [list(args), kwargs], leaves)
        except TypeError as error:
            raise CallError(str(error).replace("the package", "the stage")) from None
        flat = [*weights, *leaves]
        here = state_of_call()
        for name, what in CALL_STATE.items():
            if here[name] != self.state[name]:
                raise CallError(f"the stage was captured with another state of torch: {what} differs")
        first: dict[int, int] = {}
        for position, (wanted, value) in enumerate(zip(self.arguments, flat, strict=True)):
            _check(wanted, value, first.setdefault(id(value), position))
        return flat

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {**asdict(self), "arguments": [asdict(argument) for argument in self.arguments]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Call:
        """The inverse of :meth:`to_json`."""
        arguments = tuple(
            Argument(**{**row, "shape": tuple(row["shape"]), "stride": tuple(row["stride"])})
            for row in data["arguments"]
        )
        return Call(**{**data, "arguments": arguments, "training": tuple(data["training"])})


def describe_call(names: Sequence[str], weights: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, list[Any], Any]:
    """The structure of a call, its tensors and what stands for them in a :class:`Call`.

    Raises :class:`CompileError` for arguments that are no plain tensors, numbers, texts, lists, tuples or dicts.
    """
    for value in (*args, *kwargs.values()):
        _refuse_other_containers(value)
    leaves: list[Any] = []
    try:
        structure = describe_structure([list(args), dict(kwargs)], _is_tensor, leaves)
    except PackageError as error:
        raise CompileError(str(error).replace("a package can't hold", "stages can't take")) from None
    flat = [*weights, *leaves]
    called = [*names, *(f"argument {number}" for number in range(len(leaves)))]
    first: dict[int, int] = {}
    found = [
        _describe(name, value, first.setdefault(id(value), position))
        for position, (name, value) in enumerate(zip(called, flat, strict=True))
    ]
    return structure, leaves, tuple(found)


def describe_results(result: Any) -> tuple[Any, list[Any]]:
    """The structure of what a function returned, and the tensors in it. Raises :class:`CompileError`."""
    leaves: list[Any] = []
    try:
        return describe_structure(result, _is_tensor, leaves), leaves
    except PackageError as error:
        raise CompileError(str(error).replace("a package can't hold", "stages can't return")) from None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _refuse_other_containers(value: Any) -> None:
    """A function would be called with a plain dict, list or tuple in place of one that is more than that."""
    kind = type(value)
    if isinstance(value, tuple | list | dict):
        if kind not in (tuple, list, dict):
            raise CompileError(f"stages take plain tuples, lists and dicts, not a {kind.__qualname__}")
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_other_containers(item)
    elif not isinstance(value, torch.Tensor | bool | int | float | str | None):
        raise CompileError(f"stages can't take a {kind.__module__}.{kind.__qualname__} among their arguments")


def _describe(name: str, value: Any, same: int) -> Argument:
    if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise CompileError(
            f"stages take plain dense tensors; {name} is a {type(value).__name__} of layout {value.layout}"
            f"{', conjugated' * value.is_conj()}{', negated' * value.is_neg()}"
        )
    return Argument(
        name, str(value.dtype), tuple(value.shape), tuple(value.stride()), str(value.device), value.requires_grad, same
    )


def _check(wanted: Argument, value: Any, same: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{wanted.name} has to be a tensor, not a {type(value).__name__}")
    try:
        found = _describe(wanted.name, value, same)
    except CompileError as error:
        raise CallError(str(error)) from None
    if found == wanted:
        return
    if found.same != wanted.same:
        raise CallError(
            f"{wanted.name} and another argument are one tensor, or are two, where it was the other way round when the "
            "stage was captured"
        )
    detail = f"with strides {found.stride} in place of {wanted.stride}" if str(found) == str(wanted) else str(found)
    raise CallError(f"the stage was captured for {wanted}, and was called with {detail}")
