"""Split joint forward-backward FX graphs: what to save for the backward, what to recompute, and why.

::

    from aotkit_partition import partition

    print(partition(joint, num_fwd_outputs=1).report)

Modules that are public by name, too: ``activation_offload``, ``chunk_losses``, ``donated_buffers``, ``errors``,
``graph_text``, ``measure``, ``missing_tangents``, ``one_graph``, ``plots``, ``runtime_estimate``, ``timeline`` and
``transfers``.
"""

from .__about__ import __version__
from .errors import PartitionError
from .extensions import Extensions
from .graph_text import dump_graph, load_graph
from .options import PartitionOptions
from .partition import Partition, default_partition, min_cut_rematerialization_partition, partition, partition_key
from .report import PartitionReport

__all__ = [
    "Extensions",
    "Partition",
    "PartitionError",
    "PartitionOptions",
    "PartitionReport",
    "__version__",
    "default_partition",
    "dump_graph",
    "load_graph",
    "min_cut_rematerialization_partition",
    "partition",
    "partition_key",
]
