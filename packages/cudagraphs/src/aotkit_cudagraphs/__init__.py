"""CUDA graph capture and replay around any callable on tensors.

    fast = cudagraphify(fn, example_inputs, static_input_indices=(0, 1))
    fast(*inputs)

Results stay valid, random numbers stay random, and where nothing can be recorded the callable runs as it is and says
why. `SimulatedDriver` runs all of it without a GPU.
"""

from .__about__ import __version__ as __version__
from .api import CudagraphedFunction, CudagraphReport, cudagraphify
from .cuda_driver import CudaDriver
from .driver import DeviceDriver
from .eligibility import check_graph
from .options import CudagraphOptions, TreeOptions
from .overwritten import OverwrittenError
from .reasons import CaptureError, CudagraphNotice, CudagraphSkipped, SkipKind, SkipReason
from .simulated_driver import SimulatedDriver
from .split import Segment, SplitOptions, split_graph, wrap_graph
from .tree_report import TreeReport
from .trees import CudagraphTrees, TreeFunction, reset_shared_trees, shared_trees

__all__ = [
    "CaptureError",
    "CudaDriver",
    "CudagraphNotice",
    "CudagraphOptions",
    "CudagraphReport",
    "CudagraphSkipped",
    "CudagraphTrees",
    "CudagraphedFunction",
    "DeviceDriver",
    "OverwrittenError",
    "Segment",
    "SimulatedDriver",
    "SkipKind",
    "SkipReason",
    "SplitOptions",
    "TreeFunction",
    "TreeOptions",
    "TreeReport",
    "check_graph",
    "cudagraphify",
    "reset_shared_trees",
    "shared_trees",
    "split_graph",
    "wrap_graph",
]
