"""What a compiled training step has taken as constants of a model's modules: their settings, and how many hooks they
have.

Note [Settings of modules]
    A step is captured once, and the numbers that its modules hold (the probability of a dropout, ``training``) are
    constants of it, as is what their hooks did. So each call compares them with what they were. Between models only
    numbers are compared, texts of torch's own modules (a name or a path of a model says nothing about it), and how many
    hooks there are; of the modules that passed once, also which. What a module did not have then was not read either.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from ..errors import GuardError
from .values import same_json, value_to_json

__all__ = ["ModuleSettings", "settings_of"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NESTED = (tuple, list)
_MOST_ITEMS = 16  # of a tuple or list that is a setting


def settings_of(model: nn.Module) -> list[list[Any]]:
    """Per module its path, the number of its hooks, and its settings by name, as plain data."""
    return [
        [path, len(_hooks_of(module)), {name: value_to_json(value) for name, value in _held(module).items()}]
        for path, module in model.named_modules()
    ]


def _hooks_of(module: nn.Module) -> list[int]:
    """By the numbers that torch gives them, each once."""
    return [number for name in _HOOKS for number in module.__dict__[name]]


def _held(module: nn.Module) -> dict[str, Any]:
    texts = type(module).__module__.startswith("torch.")
    return {name: value for name, value in vars(module).items() if name[:1] != "_" and _is_setting(value, texts)}


def _is_setting(value: Any, texts: bool) -> bool:
    if type(value) in (tuple, list):
        return len(value) <= _MOST_ITEMS and all(_is_setting(item, texts) for item in value)
    return value is None or type(value) in (bool, int, float) or (texts and type(value) is str)


_Passed = tuple[nn.Module, list[int], Any, Any, tuple[list[type], list[tuple[int, Any]]]]
"""A module that passed: its hooks, what reads its settings, and their values and types."""


class ModuleSettings:
    """The settings that a step was compiled for, which each call compares. A check that passed once is quick."""

    def __init__(self, wanted: Sequence[Any]) -> None:
        self._wanted = wanted
        self._passed: list[_Passed] = []

    def check(self, model: nn.Module) -> None:
        """Raise :class:`GuardError`, which names the module, where something differs."""
        modules = list(model.modules())
        if len(modules) == len(self._passed) and all(map(_is_as_it_was, modules, self._passed)):
            return
        for module, passed in zip(modules, self._passed, strict=False):
            if module is passed[0] and _hooks_of(module) != passed[1]:
                raise GuardError(f"a {type(module).__name__} of the model has other hooks than when the step was bound")
        found = settings_of(model)
        if [path for path, _, _ in found] != [path for path, _, _ in self._wanted]:
            raise GuardError("the model is not such a one as the step was compiled for: it has other modules")
        for (path, hooks, held), (_, hooks_before, held_before) in zip(found, self._wanted, strict=True):
            _compare(f"the module {path}" if path else "the model", (hooks, held), (hooks_before, held_before))
        self._passed = [_as_it_is(module) for module in modules]


def _compare(path: str, now: tuple[int, Any], before: tuple[int, Any]) -> None:
    if now[0] != before[0]:
        raise GuardError(f"{path} has another number of hooks ({now[0]}) than when the step was compiled ({before[0]})")
    for name, value in before[1].items():
        if name not in now[1] or not same_json(now[1][name], value):
            if name == "training":
                raise GuardError(f"{path} is in another training mode than when the step was compiled")
            raise GuardError(
                f"{path} has another {name} than when the step was compiled, of which it is a constant: compile it "
                "again, or keep what changes in a buffer"
            )


def _as_it_is(module: nn.Module) -> _Passed:
    held = _held(module)
    read = itemgetter("training", "training", *held)
    values = [list(value) if type(value) is list else value for value in read(vars(module))]
    return module, _hooks_of(module), read, tuple(values), _types_of(values)


def _is_as_it_was(module: nn.Module, passed: _Passed) -> bool:
    before, hooks, read, values, types = passed
    if module is not before or _hooks_of(module) != hooks:
        return False
    try:
        found = read(vars(module))
    except KeyError:
        return False
    # 1 is equal to 1.0 and to True.
    return (
        bool(found == values) and [*map(type, found)] == types[0] and all(_types_of(found[i]) == t for i, t in types[1])
    )


def _types_of(values: Sequence[Any]) -> tuple[list[type], list[tuple[int, Any]]]:
    """The types of values, and by their place the types in those that are tuples or lists."""
    kinds = [*map(type, values)]
    return kinds, [(place, _types_of(values[place])) for place, kind in enumerate(kinds) if kind in _NESTED]
