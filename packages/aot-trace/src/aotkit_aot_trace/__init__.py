"""One run of a PyTorch function, captured as an FX graph with the metadata of its calling contract.

:func:`capture` decides between an inference graph and a joint forward and backward graph during the run;
:func:`trace_inference` and :func:`trace_joint` insist. Public by name are also :mod:`.callables` (modules and graphs as
functions to capture), :mod:`.export`, :mod:`.gradients` (of gradients), :mod:`.descriptors` and :mod:`.graph_queries`.
"""

from aotkit_functionalize import DataDependent, FunctionalLayer, GraphMetadata, OverlappingMutation, Unsupported

from .__about__ import __version__
from ._observer import Observer
from .api import Capture, Origin, TraceOptions, capture, trace_inference, trace_joint
from .mutations_in_graph import mutations_in_graph

__all__ = [
    "Capture",
    "DataDependent",
    "FunctionalLayer",
    "GraphMetadata",
    "Observer",
    "Origin",
    "OverlappingMutation",
    "TraceOptions",
    "Unsupported",
    "__version__",
    "capture",
    "mutations_in_graph",
    "trace_inference",
    "trace_joint",
]
