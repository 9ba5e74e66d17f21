"""Split joint forward-backward FX graphs: what to save for the backward, what to recompute, and why.

>>> partition(joint, num_fwd_outputs=1).report          # doctest: +SKIP
"""

from .__about__ import __version__
from .errors import (
    GraphFormatError,
    InfeasiblePartitionError,
    InvalidJointGraphError,
    InvalidOptionError,
    PartitionError,
    UnserializableGraphError,
)
from .graph_text import dump_graph, graph_constants, load_graph
from .options import PartitionOptions
from .partition import Partition, default_partition, min_cut_rematerialization_partition, partition
from .report import PartitionReport

__all__ = [
    "GraphFormatError",
    "InfeasiblePartitionError",
    "InvalidJointGraphError",
    "InvalidOptionError",
    "Partition",
    "PartitionError",
    "PartitionOptions",
    "PartitionReport",
    "UnserializableGraphError",
    "__version__",
    "default_partition",
    "dump_graph",
    "graph_constants",
    "load_graph",
    "min_cut_rematerialization_partition",
    "partition",
]
