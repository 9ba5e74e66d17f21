"""What a function does to its inputs and outputs: functional tensors, mutation and alias questions, metadata.

:func:`analyze` runs a function once and gives its :class:`GraphMetadata`. A tracer that runs the function
itself makes :func:`function_inputs` inside :func:`functional_layer` and calls :func:`collect_metadata`.
"""

from .__about__ import __version__
from .analyze import analyze
from .collect import ForwardRecord, collect_metadata
from .errors import NeedsDispatcherLayer, OverlappingMutation, Unsupported
from .fakes import fake_arguments
from .inputs import function_inputs, reentered_inputs
from .metadata import GraphMetadata
from .mutations import has_data_mutation
from .wrap import (
    FunctionalLayer,
    below_functional_layer,
    from_functional,
    functional_layer,
    is_functional,
    to_functional,
)

__all__ = [
    "ForwardRecord",
    "FunctionalLayer",
    "GraphMetadata",
    "NeedsDispatcherLayer",
    "OverlappingMutation",
    "Unsupported",
    "__version__",
    "analyze",
    "below_functional_layer",
    "collect_metadata",
    "fake_arguments",
    "from_functional",
    "function_inputs",
    "functional_layer",
    "has_data_mutation",
    "is_functional",
    "reentered_inputs",
    "to_functional",
]
