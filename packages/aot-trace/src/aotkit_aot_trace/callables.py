"""Functions and modules as a capture takes them, and what a capture keeps as it was."""

from .attributes import detect_attribute_assignment
from .float_inputs import floats_as_tensors
from .functional_call import FunctionalCall, create_functional_call, named_tensors
from .graph_function import GraphFunction
from .state import TRACING_LOCK, AutocastState

__all__ = [
    "TRACING_LOCK",
    "AutocastState",
    "FunctionalCall",
    "GraphFunction",
    "create_functional_call",
    "detect_attribute_assignment",
    "floats_as_tensors",
    "named_tensors",
]
