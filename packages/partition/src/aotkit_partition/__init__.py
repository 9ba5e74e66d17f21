"""Split joint forward-backward FX graphs: what to save for the backward, what to recompute, and why.

>>> partition(joint, num_fwd_outputs=1).report          # doctest: +SKIP
"""

from .__about__ import __version__
from .activation_offload import offload_activations, quantize_activations
from .errors import (
    GraphFormatError,
    InfeasiblePartitionError,
    InvalidJointGraphError,
    InvalidOptionError,
    PartitionError,
    UnserializableGraphError,
)
from .extensions import Extensions
from .graph_text import dump_graph, graph_constants, load_graph
from .measure import MeasuredPeak, measure_peak
from .missing_tangents import without_tangents
from .one_graph import merge, recompute_by_tags, split_backward
from .options import PartitionOptions
from .partition import Partition, default_partition, min_cut_rematerialization_partition, partition, partition_key
from .plots import cut_svg, front_svg, html_report, memory_svg
from .report import PartitionReport
from .runtime_estimate import (
    FlopsEstimator,
    MeasuredEstimator,
    RooflineEstimator,
    RuntimeEstimator,
    graph_flops,
)
from .timeline import Allocation, MemoryTimeline, simulate_modules

__all__ = [
    "Allocation",
    "Extensions",
    "FlopsEstimator",
    "GraphFormatError",
    "InfeasiblePartitionError",
    "InvalidJointGraphError",
    "InvalidOptionError",
    "MeasuredEstimator",
    "MeasuredPeak",
    "MemoryTimeline",
    "Partition",
    "PartitionError",
    "PartitionOptions",
    "PartitionReport",
    "RooflineEstimator",
    "RuntimeEstimator",
    "UnserializableGraphError",
    "__version__",
    "cut_svg",
    "default_partition",
    "dump_graph",
    "front_svg",
    "graph_constants",
    "graph_flops",
    "html_report",
    "load_graph",
    "measure_peak",
    "memory_svg",
    "merge",
    "min_cut_rematerialization_partition",
    "offload_activations",
    "partition",
    "partition_key",
    "quantize_activations",
    "recompute_by_tags",
    "simulate_modules",
    "split_backward",
    "without_tangents",
]
