"""What a function does to its inputs and outputs: functional tensors, mutation and alias questions, metadata.

:func:`analyze` runs a function once and gives its :class:`GraphMetadata`. A tracer that runs the function
itself makes :func:`function_inputs` inside :func:`functional_layer` and calls :func:`collect_metadata`.
"""

from .__about__ import __version__
from .analyze import analyze
from .collect import ForwardRecord, collect_metadata
from .effects import finish_tokens
from .errors import DataDependent, NeedsDispatcherLayer, OverlappingMutation, OverlappingWrite, Unsupported
from .fakes import fake_arguments, fake_twin
from .inputs import FunctionInput, function_inputs, reentered_inputs
from .metadata import GraphMetadata
from .mutations import count_data_mutations, has_data_mutation
from .nest_context import SymbolicDim
from .nests import SubclassBoundary, is_subclass, rebuild, tensors_inside
from .subclass_inputs import SubclassArguments, subclass_arguments
from .subclass_keys import sizes_and_tensors, subclass_key
from .view_method import view_method
from .wrap import (
    FunctionalLayer,
    below_functional_layer,
    from_functional,
    functional_layer,
    is_functional,
    to_functional,
)

__all__ = [
    "DataDependent",
    "ForwardRecord",
    "FunctionInput",
    "FunctionalLayer",
    "GraphMetadata",
    "NeedsDispatcherLayer",
    "OverlappingMutation",
    "OverlappingWrite",
    "SubclassArguments",
    "SubclassBoundary",
    "SymbolicDim",
    "Unsupported",
    "__version__",
    "analyze",
    "below_functional_layer",
    "collect_metadata",
    "count_data_mutations",
    "fake_arguments",
    "fake_twin",
    "finish_tokens",
    "from_functional",
    "function_inputs",
    "functional_layer",
    "has_data_mutation",
    "is_functional",
    "is_subclass",
    "rebuild",
    "reentered_inputs",
    "sizes_and_tensors",
    "subclass_arguments",
    "subclass_key",
    "tensors_inside",
    "to_functional",
    "view_method",
]
