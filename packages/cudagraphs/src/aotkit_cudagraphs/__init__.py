"""CUDA graph capture and replay around any callable on tensors.

    fast = cudagraphify(fn, example_inputs, static_input_indices=(0, 1))
    fast(*inputs)

Results stay valid, random numbers stay random, and where nothing can be recorded the callable runs as it is and says
why. `drivers.SimulatedDriver` runs all of it without a GPU. Public by name are also the modules `drivers`, `plan`,
`split` and `trees`.
"""

from .__about__ import __version__ as __version__
from .api import CudagraphedFunction, CudagraphReport, cudagraphify
from .eligibility import check_graph
from .options import CudagraphOptions, TreeOptions
from .overwritten import OverwrittenError
from .plan import wrap_graph
from .reasons import CudagraphNotice, CudagraphSkipped, SkipKind, SkipReason
from .trees import CudagraphTrees, TreeFunction, shared_trees

__all__ = [
    "CudagraphNotice",
    "CudagraphOptions",
    "CudagraphReport",
    "CudagraphSkipped",
    "CudagraphTrees",
    "CudagraphedFunction",
    "OverwrittenError",
    "SkipKind",
    "SkipReason",
    "TreeFunction",
    "TreeOptions",
    "check_graph",
    "cudagraphify",
    "shared_trees",
    "wrap_graph",
]
