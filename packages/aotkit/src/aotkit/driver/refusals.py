"""What a compile raises on purpose. It is imported when something was raised, since it needs all that can raise."""

from __future__ import annotations

from aotkit_aot_trace import Unsupported
from aotkit_functionalize import OverlappingMutation
from aotkit_inductor_lower import LoweringError
from aotkit_inductor_lower import errors as lowering_errors
from aotkit_partition import PartitionError
from aotkit_runtime_wrappers import WrapperError

__all__ = ["REFUSALS", "OptionErrors"]

REFUSALS = (Unsupported, OverlappingMutation, LoweringError, PartitionError, WrapperError)
"""What a compile refuses by; anything else is a bug."""

OptionErrors = lowering_errors.UnknownPassError
"""What it raises where an option means nothing."""
