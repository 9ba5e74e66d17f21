"""The table of lowering rules: one rule per ATen overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from .values import NodeValue

__all__ = ["Rule", "RuleTable", "aten", "join_rules", "prims"]

aten = torch.ops.aten
prims = torch.ops.prims

Rule = Callable[..., NodeValue]
R = TypeVar("R", bound=Rule)


class RuleTable:
    """Rules by overload. A family's file makes one and fills it with :meth:`lowers`; the driver joins them."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._rules: dict[object, Rule] = {}

    @property
    def rules(self) -> Mapping[object, Rule]:
        """The rules so far."""
        return MappingProxyType(self._rules)

    def lowers(self, *overloads: Any) -> Callable[[R], R]:
        """Decorator: ``@table.lowers(aten.add.Tensor)``. The rule is called as ``rule(ctx, node, *args, **kwargs)``
        with tensors as :class:`~.values.View`, integer scalars of dynamic graphs as expressions, the rest as is."""

        def register(rule: R) -> R:
            for overload in overloads:
                self.add(overload, rule)
            return rule

        return register

    def add(self, overload: object, rule: Rule) -> None:
        """Enter one rule. Raises ``ValueError`` if the overload has one already."""
        if overload in self._rules:
            raise ValueError(f"{overload} has two lowering rules")
        self._rules[overload] = rule


def join_rules(*tables: RuleTable) -> Mapping[object, Rule]:
    """All rules. Raises ``ValueError`` if two families claim one overload."""
    joined: dict[object, Rule] = {}
    for table in tables:
        for overload, rule in table.rules.items():
            if overload in joined:
                raise ValueError(f"{overload} is lowered by two families, one is {table.family}")
            joined[overload] = rule
    return MappingProxyType(joined)
