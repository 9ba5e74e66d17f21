"""Sizes that no input tells: they depend on data, and are read off the forward outputs.

Note [Sizes that depend on data]
    ``x[x > 0]`` has a size that is known once the graph has run. In the records it is a symbol like any other
    (``u0``); its binding names a forward output of that size. A view may have sizes in which the symbol occurs
    although no forward output has just that size: then the number itself becomes one more forward output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .records import OutputInfo, SymbolBinding, TensorMeta
from .symbols import bind_symbols
from .wrap import from_functional

__all__ = ["bind_unbacked_symbols", "unbacked_symbols"]

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # not the exponent of 1e-05
_FUNCTIONS = {"min", "max", "isqrt", "float", "sqrt", "pow", "trunc", "floor", "ceil", "round"}


def unbacked_symbols(
    told: Iterable[SymbolBinding], outputs: Sequence[OutputInfo], others: Sequence[TensorMeta]
) -> set[str]:
    """Symbols in the records of outputs and other tensors (bases) that the inputs do not tell."""
    dims: list[Any] = []
    for meta in (*others, *(o.meta for o in outputs if o.meta is not None)):
        dims += [*meta.sizes, *meta.strides]
    for view in (o.view for o in outputs if o.view is not None):
        dims += [*view.sizes, *view.strides, view.offset_delta]
    names = {name for text in dims if isinstance(text, str) for name in _NAME.findall(text)}
    return names - _FUNCTIONS - {binding.name for binding in told}


def bind_unbacked_symbols(
    names: set[str], computed: Sequence[Any], bases: Sequence[Any], outputs: Sequence[Any]
) -> tuple[tuple[SymbolBinding, ...], list[torch.SymInt]]:
    """Bindings of unbacked symbols to forward outputs, and the numbers to put between ``computed`` and ``bases`` for
    those that none of these tell. ``outputs``: all of the function's, views of inputs included."""
    if not names:
        return (), []
    first, last = [_plain(v) for v in computed], [_plain(v) for v in bases]
    missing = names - {b.name for b in bind_symbols([*first, *last])}
    found = _numbers([_plain(v) for v in (*computed, *bases, *outputs)] if missing else [], missing)
    numbers = [found[name] for name in sorted(found)]
    bindings = bind_symbols([*first, *numbers, *last])
    return tuple(replace(b, of_output=True) for b in bindings if b.name in names), numbers


def _plain(value: Any) -> Any:
    return from_functional(value) if isinstance(value, torch.Tensor) else value


def _numbers(plain: Sequence[Any], names: set[str]) -> dict[str, torch.SymInt]:
    """The symbols themselves as SymInts, from the sizes they occur in."""
    found: dict[str, torch.SymInt] = {}
    tensors = [v for v in plain if isinstance(v, torch.Tensor)]
    for size in (s for t in tensors for s in (*t.shape, *t.stride(), t.storage_offset())):
        # A symbol may get another name between two records, as `bind_symbols` says.
        for expr in (size.node.expr, size.node._expr) if isinstance(size, torch.SymInt) else ():
            for symbol in expr.free_symbols:
                if str(symbol) in names and (expr is symbol or str(symbol) not in found):
                    whole = expr is symbol
                    found[str(symbol)] = size if whole else size.node.shape_env.create_symintnode(symbol, hint=None)
    return found
