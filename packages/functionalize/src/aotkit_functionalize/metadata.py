"""What a captured graph promises: the contract of its call, and what it has to do with tensor subclasses."""

from __future__ import annotations

from dataclasses import dataclass

from ._records import Format
from .records import CallContract
from .subclasses.meta import SubclassBoundary, SubclassType, TypeForm

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
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> GraphMetadata:
        """Rebuild from :meth:`to_json`. Raises ``ValueError`` on another version of the record."""
        return _FORMAT.from_text(text)

    def __str__(self) -> str:
        lines = [CallContract.__str__(self)]
        if self.subclasses is not None:
            inputs = enumerate(self.subclasses.inputs)
            lines += [f"  argument {index} is {subclass}" for index, subclass in inputs if subclass is not None]
            lines += ["  for the caller: " + str(self.subclasses.outer).replace("\n", "\n  ")]
        return "\n".join(lines)


_FORMAT = Format(GraphMetadata, "aotkit graph metadata", 5, own={SubclassType: TypeForm()})
