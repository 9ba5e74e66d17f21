"""Which node metadata travels: a table of fields, each with how it is written.

Kept: every entry that is a plain number, string, boolean or None (``seq_nr``, ``stack_trace``, ``partitioner_tag``,
``ac_graph_id``, ...), JSON-like containers of those (``custom``), ``recompute`` (a ``CheckpointPolicy``),
``original_aten`` (an operator), the module stacks as (path, type name), ``unbacked_bindings``. ``val`` is written by
``tensors.py``. The rest is dropped, ``tensor_meta`` too: it says nothing that ``val`` does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx
from torch._ops import OpOverload
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import GraphFormatError
from .symbols import SymbolReader, SymbolWriter
from .targets import find_target, target_name

_MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_INTERNED = ("stack_trace",)
_KEY_TYPES: dict[str, Any] = {
    "SequenceKey": pytree.SequenceKey,
    "ConvertIntKey": symbolic_shapes.ConvertIntKey,
    "CallMethodKey": symbolic_shapes.CallMethodKey,
    "InnerTensorKey": symbolic_shapes.InnerTensorKey,
    "DivideByKey": symbolic_shapes.DivideByKey,
}
_KEY_FIELDS = {"SequenceKey": "idx", "CallMethodKey": "name", "InnerTensorKey": "inner_name", "DivideByKey": "divisor"}


def _is_plain(value: Any, depth: int = 0) -> bool:
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if depth > 4:
        return False
    if type(value) is list:
        return all(_is_plain(item, depth + 1) for item in value)
    return type(value) is dict and all(type(key) is str and _is_plain(v, depth + 1) for key, v in value.items())


class MetaWriter:
    """Writes ``node.meta``; long strings go into one table for the document."""

    def __init__(self, symbols: SymbolWriter) -> None:
        self.strings: list[str] = []
        self._symbols = symbols
        self._string_index: dict[str, int] = {}

    def write(self, node: torch.fx.Node) -> dict[str, Any]:
        """The kept part of ``node.meta`` as JSON data."""
        kept: dict[str, Any] = {}
        for key, value in node.meta.items():
            if key == "val":
                continue
            if key in _INTERNED and isinstance(value, str):
                kept[key] = self._intern(value)
            elif key == "recompute" and isinstance(value, CheckpointPolicy):
                kept[key] = value.name
            elif key == "original_aten" and isinstance(value, OpOverload):
                kept[key] = target_name(value)
            elif key in _MODULE_STACKS and isinstance(value, dict):
                kept[key] = self._module_stack(value)
            elif key == "unbacked_bindings" and value:
                kept[key] = self._bindings(value, node)
            elif isinstance(key, str) and key not in _READ_SPECIALLY and _is_plain(value):
                kept[key] = value
        return kept

    def _intern(self, text: str) -> int:
        found = self._string_index.get(text)
        if found is None:
            found = self._string_index[text] = len(self.strings)
            self.strings.append(text)
        return found

    def _module_stack(self, stack: dict[Any, Any]) -> list[Any]:
        rows = []
        for key, value in stack.items():
            path, kind = value if isinstance(value, tuple) and len(value) == 2 else (str(value), "")
            type_name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
            rows.append([self._intern(str(key)), self._intern(str(path)), self._intern(type_name)])
        return rows

    def _bindings(self, bindings: dict[Any, Any], node: torch.fx.Node) -> list[Any]:
        shape_env = getattr(getattr(node.meta.get("val"), "node", None), "shape_env", None)
        rows = []
        for symbol, path in bindings.items():
            keys = []
            for key in path:
                kind = type(key).__name__
                field: Any = getattr(key, _KEY_FIELDS[kind]) if kind in _KEY_FIELDS else None
                keys.append([kind, field if _is_plain(field) else int(field)])
            rows.append([self._symbols.symbol_name(symbol, shape_env), keys])
        return rows


class MetaReader:
    """Restores what :class:`MetaWriter` wrote."""

    def __init__(self, strings: list[str], symbols: SymbolReader) -> None:
        self._strings = strings
        self._symbols = symbols
        self._operators: dict[str, Any] = {}

    def read(self, kept: dict[str, Any], node: torch.fx.Node) -> None:
        """Fill ``node.meta``; call it after ``val`` is there."""
        for key, data in kept.items():
            special = _READ_SPECIALLY.get(key)
            node.meta[key] = data if special is None else special(self, data, node)

    def _string(self, data: int, node: torch.fx.Node) -> str:
        return self._strings[data]

    def _policy(self, data: str, node: torch.fx.Node) -> CheckpointPolicy:
        return CheckpointPolicy[data]

    def _operator(self, data: str, node: torch.fx.Node) -> Any:
        found = self._operators.get(data)
        if found is None:
            found = self._operators[data] = find_target(data)
        return found

    def _module_stack(self, data: list[Any], node: torch.fx.Node) -> dict[str, tuple[str, str]]:
        return {self._strings[k]: (self._strings[path], self._strings[kind]) for k, path, kind in data}

    def _bindings(self, data: list[Any], node: torch.fx.Node) -> dict[Any, Any]:
        bindings = {}
        for name, keys in data:
            path = []
            for kind, field in keys:
                if kind not in _KEY_TYPES:
                    raise GraphFormatError(f"this version of the package knows no symbol path of kind '{kind}'.")
                path.append(_KEY_TYPES[kind](field) if kind in _KEY_FIELDS else _KEY_TYPES[kind]())
            bindings[self._symbols.symbol(name)] = tuple(path)
        return bindings


_READ_SPECIALLY: dict[str, Any] = {
    "stack_trace": MetaReader._string,
    "recompute": MetaReader._policy,
    "original_aten": MetaReader._operator,
    "nn_module_stack": MetaReader._module_stack,
    "fwd_nn_module_stack": MetaReader._module_stack,
    "unbacked_bindings": MetaReader._bindings,
}
