"""One run of a PyTorch function, captured as an FX graph with the metadata of its calling contract.

:func:`capture` decides between an inference graph and a joint forward and backward graph during the run;
:func:`trace_inference` and :func:`trace_joint` insist.
"""

from aotkit_functionalize import FunctionalLayer, GraphMetadata, OverlappingMutation, Unsupported

from .__about__ import __version__
from .api import Capture, Origin, TraceOptions, capture, trace_inference, trace_joint
from .functional_call import FunctionalCall, create_functional_call, named_tensors
from .gradients import GradientInputs, capture_gradients
from .graph_function import GraphFunction
from .known_values import SavedValues, saved_values
from .mutations_in_graph import mutations_in_graph
from .observer import Observer
from .state import TRACING_LOCK

__all__ = [
    "TRACING_LOCK",
    "Capture",
    "FunctionalCall",
    "FunctionalLayer",
    "GradientInputs",
    "GraphFunction",
    "GraphMetadata",
    "Observer",
    "Origin",
    "OverlappingMutation",
    "SavedValues",
    "TraceOptions",
    "Unsupported",
    "__version__",
    "capture",
    "capture_gradients",
    "create_functional_call",
    "mutations_in_graph",
    "named_tensors",
    "saved_values",
    "trace_inference",
    "trace_joint",
]
