"""What a function does to its inputs and outputs: functional tensors, mutation and alias questions, metadata.

:func:`analyze` runs a function once and gives its :class:`GraphMetadata`. A tracer that runs the function
itself makes :func:`function_inputs` inside :func:`functional_layer` and calls :func:`collect_metadata`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .__about__ import __version__

if TYPE_CHECKING:
    from .analysis import analyze
    from .collect import ForwardRecord, collect_metadata
    from .effects import finish_tokens
    from .errors import DataDependent, NeedsDispatcherLayer, OverlappingMutation, OverlappingWrite, Unsupported
    from .fakes import fake_arguments, fake_twin
    from .inputs import FunctionInput, function_inputs, is_autograd_identity, reentered_inputs
    from .metadata import GraphMetadata
    from .mutations import count_data_mutations, has_data_mutation
    from .overlap import overlapping_groups
    from .subclasses.arguments import SubclassArguments, subclass_arguments
    from .subclasses.context import SymbolicDim, encode_class, encode_context
    from .subclasses.keys import sizes_and_tensors, subclass_key
    from .subclasses.meta import SubclassBoundary, is_subclass, rebuild, tensors_inside
    from .view_methods import view_method
    from .wrap import (
        FunctionalLayer,
        below_functional_layer,
        from_functional,
        functional_layer,
        is_functional,
        renew,
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
    "encode_class",
    "encode_context",
    "fake_arguments",
    "fake_twin",
    "finish_tokens",
    "from_functional",
    "function_inputs",
    "functional_layer",
    "has_data_mutation",
    "is_autograd_identity",
    "is_functional",
    "is_subclass",
    "overlapping_groups",
    "rebuild",
    "reentered_inputs",
    "renew",
    "sizes_and_tensors",
    "subclass_arguments",
    "subclass_key",
    "tensors_inside",
    "to_functional",
    "view_method",
]

# Where each name is defined. It is imported when it is asked for: a process that only loads what was compiled before
# needs a small part of this package.
_HOMES = {
    name: home
    for home, names in {
        "analysis": ("analyze",),
        "collect": (
            "ForwardRecord",
            "collect_metadata",
        ),
        "effects": ("finish_tokens",),
        "errors": (
            "DataDependent",
            "NeedsDispatcherLayer",
            "OverlappingMutation",
            "OverlappingWrite",
            "Unsupported",
        ),
        "fakes": (
            "fake_arguments",
            "fake_twin",
        ),
        "inputs": (
            "FunctionInput",
            "function_inputs",
            "is_autograd_identity",
            "reentered_inputs",
        ),
        "metadata": ("GraphMetadata",),
        "mutations": (
            "count_data_mutations",
            "has_data_mutation",
        ),
        "subclasses.context": ("SymbolicDim", "encode_class", "encode_context"),
        "subclasses.meta": (
            "SubclassBoundary",
            "is_subclass",
            "rebuild",
            "tensors_inside",
        ),
        "overlap": ("overlapping_groups",),
        "subclasses.arguments": (
            "SubclassArguments",
            "subclass_arguments",
        ),
        "subclasses.keys": (
            "sizes_and_tensors",
            "subclass_key",
        ),
        "view_methods": ("view_method",),
        "wrap": (
            "FunctionalLayer",
            "below_functional_layer",
            "from_functional",
            "functional_layer",
            "is_functional",
            "renew",
            "to_functional",
        ),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
