"""What a captured graph promises: the contract of its call, and what it has to do with tensor subclasses."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .records import CallContract, contract_fields
from .subclasses.meta import SubclassBoundary

__all__ = ["GraphMetadata"]


@dataclass(frozen=True, slots=True)
class GraphMetadata(CallContract):
    """The calling contract of one captured graph; see :class:`.CallContract` for its records.

    ``subclasses``: the caller's side, where a tensor subclass goes in or comes out. All other records are then
    those of the dense graph: its inputs are the tensors inside, its results after the forward outputs are those of
    which ``subclasses.gradients`` are made, and a tangent's ``forward_output`` is -1 if it is a part of one.
    """

    subclasses: SubclassBoundary | None = None

    def to_json(self) -> str:
        """Canonical JSON text; ``GraphMetadata.from_json(m.to_json()) == m``.

        Raises :class:`Unsupported` for a tensor subclass that has no JSON form.
        """
        subclasses = None if self.subclasses is None else self.subclasses.to_raw()
        return json.dumps({**self.to_raw(), "subclasses": subclasses}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> GraphMetadata:
        """Rebuild from :meth:`to_json`. Raises ``ValueError`` on another version of the record."""
        raw = json.loads(text)
        subclasses = raw.pop("subclasses", None)
        known = contract_fields(raw)
        return GraphMetadata(**known, subclasses=None if subclasses is None else SubclassBoundary.from_raw(subclasses))

    def __str__(self) -> str:
        lines = [CallContract.__str__(self)]
        if self.subclasses is not None:
            inputs = enumerate(self.subclasses.inputs)
            lines += [f"  argument {index} is {subclass}" for index, subclass in inputs if subclass is not None]
            lines += ["  for the caller: " + str(self.subclasses.outer).replace("\n", "\n  ")]
        return "\n".join(lines)
