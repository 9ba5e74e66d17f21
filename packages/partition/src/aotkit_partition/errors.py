"""What this package refuses, and how it says so.

Every message answers four questions: what was asked, why it can't be done, which user line it concerns (if the
node knows), and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "GraphFormatError",
    "InfeasiblePartitionError",
    "InvalidJointGraphError",
    "InvalidOptionError",
    "PartitionError",
    "UnserializableGraphError",
]


class PartitionError(Exception):
    """Base of every refusal of this package."""


class InvalidOptionError(PartitionError, ValueError):
    """An option has a value outside its stated range."""


class InvalidJointGraphError(PartitionError):
    """The graph handed in is no joint forward-backward graph as the package expects it."""


class InfeasiblePartitionError(PartitionError):
    """No choice of saved values satisfies all constraints.

    Attributes:
        chain: names of the nodes from the one that must stay in the forward to the one the backward needs; no node
            on the way may be saved.
    """

    def __init__(self, message: str, chain: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.chain = tuple(chain)


class GraphFormatError(PartitionError):
    """A text is no graph of a version this package can read."""


class UnserializableGraphError(PartitionError):
    """A graph holds something that has no pickle-free text.

    Attributes:
        node: name of the node concerned, or "" for the graph as a whole.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node
