"""One run of a PyTorch function, captured as an FX graph with the metadata of its calling contract.

:func:`capture` decides between an inference graph and a joint forward and backward graph during the run;
:func:`trace_inference` and :func:`trace_joint` insist.
"""

from aotkit_functionalize import DataDependent, FunctionalLayer, GraphMetadata, OverlappingMutation, Unsupported

from . import descriptors, graph_queries
from .__about__ import __version__
from .api import Capture, Origin, TraceOptions, capture, trace_inference, trace_joint
from .attributes import detect_attribute_assignment
from .descriptors import describe_graph
from .export import ExportError, aot_export_function, aot_export_joint_simple, aot_export_module
from .float_inputs import floats_as_tensors
from .functional_call import FunctionalCall, create_functional_call, named_tensors
from .gradients import GradientInputs, capture_gradients
from .graph_function import GraphFunction
from .mutations_in_graph import mutations_in_graph
from .observer import Observer
from .saved_activations import SavedValues, saved_values
from .signature import BackwardSignature, GraphSignature
from .state import TRACING_LOCK, AutocastState

__all__ = [
    "TRACING_LOCK",
    "AutocastState",
    "BackwardSignature",
    "Capture",
    "DataDependent",
    "ExportError",
    "FunctionalCall",
    "FunctionalLayer",
    "GradientInputs",
    "GraphFunction",
    "GraphMetadata",
    "GraphSignature",
    "Observer",
    "Origin",
    "OverlappingMutation",
    "SavedValues",
    "TraceOptions",
    "Unsupported",
    "__version__",
    "aot_export_function",
    "aot_export_joint_simple",
    "aot_export_module",
    "capture",
    "capture_gradients",
    "create_functional_call",
    "describe_graph",
    "descriptors",
    "detect_attribute_assignment",
    "floats_as_tensors",
    "graph_queries",
    "mutations_in_graph",
    "named_tensors",
    "saved_values",
    "trace_inference",
    "trace_joint",
]
