"""What a function does to its inputs and outputs: functional tensors, mutation and alias questions, metadata.

:func:`analyze` runs a function once and gives its :class:`GraphMetadata`. A tracer that runs the function
itself makes :func:`function_inputs` inside :func:`functional_layer` and calls :func:`collect_metadata`; what else
it needs is in :mod:`.tracing`. Public by name are also :mod:`.records`, :mod:`.subclasses`, :mod:`.symbols`,
:mod:`.lazy_bits` and :mod:`.view_methods`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .__about__ import __version__
from ._lazy import names_of, value_of

if TYPE_CHECKING:
    from .analysis import analyze
    from .collect import ForwardRecord, collect_metadata
    from .errors import DataDependent, NeedsDispatcherLayer, OverlappingMutation, OverlappingWrite, Unsupported
    from .fakes import fake_arguments
    from .inputs import FunctionInput, function_inputs
    from .metadata import GraphMetadata
    from .wrap import FunctionalLayer, functional_layer

__all__ = [
    "DataDependent",
    "ForwardRecord",
    "FunctionInput",
    "FunctionalLayer",
    "GraphMetadata",
    "NeedsDispatcherLayer",
    "OverlappingMutation",
    "OverlappingWrite",
    "Unsupported",
    "__version__",
    "analyze",
    "collect_metadata",
    "fake_arguments",
    "function_inputs",
    "functional_layer",
]

_HOMES = {
    name: home
    for home, names in {
        ".analysis": ("analyze",),
        ".collect": (
            "ForwardRecord",
            "collect_metadata",
        ),
        ".errors": (
            "DataDependent",
            "NeedsDispatcherLayer",
            "OverlappingMutation",
            "OverlappingWrite",
            "Unsupported",
        ),
        ".fakes": ("fake_arguments",),
        ".inputs": (
            "FunctionInput",
            "function_inputs",
        ),
        ".metadata": ("GraphMetadata",),
        ".wrap": (
            "FunctionalLayer",
            "functional_layer",
        ),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    return value_of(name, _HOMES, globals())


def __dir__() -> list[str]:
    return names_of(globals())
