"""Arguments of nodes as JSON values.

Numbers, strings, booleans, None and lists stand for themselves; everything else is an object with one key that says
what it is: ``{"node": "mm"}``, ``{"tuple": [...]}``, ``{"slice": [a, b, c]}``, ``{"dtype": "float32"}``, ``{"sym": 3}``
(row 3 of the document's table of symbolic values), ``{"float": "inf"}``, ``{"op": "aten.mm.default"}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy

from .._user_kernels import KernelName, constants_from_json, find_kernel, table_of_kernels
from ..errors import GraphFormatError, UnserializableGraphError
from .symbols import SymbolReader, SymbolWriter
from .targets import find_target, target_name

_SYM_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TORCH_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


class ValueWriter:
    """Turns one argument after another into JSON values. ``node`` names the node at work, for errors."""

    def __init__(self, symbols: SymbolWriter, extra_targets: Mapping[str, Callable[..., Any]] | None) -> None:
        self._symbols = symbols
        self._extra_targets = extra_targets
        self.node = ""

    def write(self, value: Any) -> Any:
        """The JSON value of ``value``.

        Raises:
            UnserializableGraphError: there is none.
        """
        kind = type(value)
        if kind is torch.fx.Node:
            return {"node": value.name}
        if value is None or kind is int or kind is bool or kind is str:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, list):
            return [self.write(item) for item in value]
        if kind is tuple or kind is torch.Size:
            return {"tuple": [self.write(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.write(key), self.write(item)] for key, item in value.items()]}
        return self._write_rare(value)

    def _write_rare(self, value: Any) -> Any:
        if isinstance(value, slice):
            return {"slice": [self.write(value.start), self.write(value.stop), self.write(value.step)]}
        if isinstance(value, _SYM_TYPES):
            return self._symbols.write_value(value)
        if isinstance(value, torch.device):
            return {"device": str(value)}
        name = _TORCH_NAMED.get(type(value))
        if name is not None:
            return {name: str(value).removeprefix("torch.")}
        if isinstance(value, complex):
            return {"complex": [self.write(value.real), self.write(value.imag)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, CheckpointPolicy):
            return {"checkpoint_policy": value.name}
        if isinstance(value, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
            return {"op": target_name(value)}
        if callable(value) and not isinstance(value, (type, torch.nn.Module)):
            return {"op": target_name(value, self._extra_targets, self.node)}
        if isinstance(value, torch.fx.Node):  # subclasses of Node
            return {"node": value.name}
        raise UnserializableGraphError(
            f"can't write an argument of type {type(value).__module__}.{type(value).__qualname__} of node "
            f"'{self.node}' as text. Turn it into a graph input or an attribute of the module before dumping.",
            self.node,
        )


class ValueReader:
    """Turns JSON values back into arguments; ``nodes`` maps the names written so far to the new nodes."""

    def __init__(
        self,
        symbols: SymbolReader,
        extra_targets: Mapping[str, Callable[..., Any]] | None,
        nodes: dict[str, torch.fx.Node],
    ) -> None:
        self._symbols = symbols
        self._extra_targets = extra_targets
        self._nodes = nodes

    def read(self, data: Any) -> Any:
        """The argument written as ``data``."""
        if type(data) is list:
            return [self.read(item) for item in data]
        if type(data) is not dict:
            return data
        ((kind, body),) = data.items()
        if kind == "node":
            try:
                return self._nodes[body]
            except KeyError:
                raise GraphFormatError(f"node '{body}' is used before it is defined.") from None
        reader = _READERS.get(kind)
        if reader is None:
            raise GraphFormatError(f"this version of the package knows no argument of kind '{kind}'.")
        return reader(self, body)

    def _op(self, body: str) -> Any:
        return find_target(body, self._extra_targets)

    def _sym(self, body: int) -> Any:
        return self._symbols.read(body)


def _kernel(body: list[str]) -> int:
    try:
        return table_of_kernels().add_kernel(find_kernel(KernelName(*body)))  # type: ignore[no-any-return]
    except LookupError as error:
        raise GraphFormatError(f"{error}. Trace the graph again.") from error


def _kernel_constants(body: str) -> int:
    try:
        return table_of_kernels().add_constant_args(constants_from_json(body))  # type: ignore[no-any-return]
    except LookupError as error:
        raise GraphFormatError(f"{error}. Trace the graph again.") from error


def _torch_constant(body: str, kind: type) -> Any:
    found = getattr(torch, body, None)
    if not isinstance(found, kind):
        raise GraphFormatError(f"torch {torch.__version__} has no {kind.__name__} '{body}'.")
    return found


_READERS: Mapping[str, Callable[[ValueReader, Any], Any]] = {
    "tuple": lambda reader, body: tuple(map(reader.read, body)),
    "dict": lambda reader, body: {reader.read(key): reader.read(item) for key, item in body},
    "slice": lambda reader, body: slice(*map(reader.read, body)),
    "float": lambda reader, body: float(body),
    "sym": ValueReader._sym,
    "op": ValueReader._op,
    "dtype": lambda reader, body: _torch_constant(body, torch.dtype),
    "layout": lambda reader, body: _torch_constant(body, torch.layout),
    "memory_format": lambda reader, body: _torch_constant(body, torch.memory_format),
    "device": lambda reader, body: torch.device(body),
    "complex": lambda reader, body: complex(reader.read(body[0]), reader.read(body[1])),
    "kernel": lambda reader, body: _kernel(body),
    "kernel_constants": lambda reader, body: _kernel_constants(body),
    "ellipsis": lambda reader, body: Ellipsis,
    "checkpoint_policy": lambda reader, body: CheckpointPolicy[body],
}
