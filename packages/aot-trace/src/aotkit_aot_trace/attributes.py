"""Tensors that a module stores on itself while it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

__all__ = ["detect_attribute_assignment"]

_STANDARD = frozenset(nn.Module().__dict__)
_REGISTER_BUFFER = "https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer"


@contextmanager
def detect_attribute_assignment(mod: nn.Module) -> Iterator[None]:
    """Refuse tensors that ``mod`` or a submodule assigns to an attribute (or an element of one) in here.

    What is assigned while a module is captured is a value of the recording, which means nothing afterwards. The
    attributes are put back as they were.

    Raises ``ValueError`` that names them, unless the module itself raised something.
    """
    before = {path: _attributes(inner) for path, inner in mod.named_modules()}
    copies = {path: pytree.tree_map(lambda v: v, attributes) for path, attributes in before.items()}
    try:
        yield
    finally:
        assigned = [
            name
            for path, inner in mod.named_modules()
            for name in _assigned(path, copies.get(path, {}), _attributes(inner))
        ]
        for path, inner in mod.named_modules():
            _restore(inner, copies.get(path, {}))
    if assigned:
        noun, verb = ("attributes", "were") if len(assigned) > 1 else ("attribute", "was")
        raise ValueError(
            f"The tensor {noun} {', '.join(assigned)} {verb} assigned during export. Such attributes must be "
            f"registered as buffers using the `register_buffer` API ({_REGISTER_BUFFER})."
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _STANDARD}


def _assigned(path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    prefix = f"self.{path}." if path else "self."
    known = {pytree.keystr(keys): value for keys, value in pytree.tree_flatten_with_path(before)[0]}
    for keys, value in pytree.tree_flatten_with_path(after)[0]:
        if isinstance(value, torch.Tensor) and known.get(pytree.keystr(keys)) is not value:
            attribute: Any = keys[0]
            yield f"{prefix}{attribute.key}{pytree.keystr(keys[1:])}"


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    for name in _attributes(module):
        if name not in before:
            del module.__dict__[name]
    module.__dict__.update(before)
