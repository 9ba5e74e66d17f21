"""What a tracer needs that runs the function itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._lazy import names_of, value_of

if TYPE_CHECKING:
    from .custom_writes import refuse_shared_memory
    from .effects import finish_tokens
    from .fakes import fake_twin
    from .inputs import is_autograd_identity, overlapping_groups, reentered_inputs
    from .mutations import count_data_mutations, has_data_mutation
    from .wrap import below_functional_layer, from_functional, is_functional, renew, to_functional

__all__ = [
    "below_functional_layer",
    "count_data_mutations",
    "fake_twin",
    "finish_tokens",
    "from_functional",
    "has_data_mutation",
    "is_autograd_identity",
    "is_functional",
    "overlapping_groups",
    "reentered_inputs",
    "refuse_shared_memory",
    "renew",
    "to_functional",
]

_HOMES = {
    name: home
    for home, names in {
        ".custom_writes": ("refuse_shared_memory",),
        ".effects": ("finish_tokens",),
        ".fakes": ("fake_twin",),
        ".inputs": (
            "is_autograd_identity",
            "overlapping_groups",
            "reentered_inputs",
        ),
        ".mutations": (
            "count_data_mutations",
            "has_data_mutation",
        ),
        ".wrap": (
            "below_functional_layer",
            "from_functional",
            "is_functional",
            "renew",
            "to_functional",
        ),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    return value_of(name, _HOMES, globals())


def __dir__() -> list[str]:
    return names_of(globals())
