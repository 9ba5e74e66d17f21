"""The metadata of a function, from one run of it under fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from .collect import collect_metadata
from .fakes import fake_arguments
from .inputs import function_inputs
from .metadata import GraphMetadata
from .subclasses.arguments import subclass_arguments
from .wrap import FunctionalLayer, functional_layer

__all__ = ["analyze"]


def analyze(
    fn: Callable[..., Any],
    flat_args: Sequence[Any],
    *,
    fake_mode: FakeTensorMode | None = None,
    dynamic: bool = False,
    training: bool | None = None,
    layer: FunctionalLayer = FunctionalLayer.MODE,
) -> GraphMetadata:
    """Run ``fn(*flat_args)`` once on fake tensors and describe what it does to its inputs and outputs.

    Args:
        fn: takes flat arguments, returns a flat list or tuple.
        flat_args: distinct tensors (real or fake), ints, SymInts, other values.
        fake_mode: mode for real tensors; by default a new one.
        dynamic: give real tensors symbolic sizes.
        training: see :func:`collect_metadata`.
        layer: see Note [Two functional layers].

    Raises:
        Unsupported: the function does something that the records cannot express.
        OverlappingMutation: inputs that share memory are mutated.
    """
    mode, plain = fake_arguments(flat_args, fake_mode=fake_mode, dynamic=dynamic)
    before = torch.is_grad_enabled()
    # Not in inference mode: its tensors know no base, from which outputs that share memory are regenerated.
    with torch.inference_mode(False), torch.set_grad_enabled(before), mode, functional_layer(layer) as storages:
        apart = subclass_arguments(plain)
        inputs = function_inputs(plain, flat_args) if apart is None else apart.enter(apart.dense, flat_args)
        outputs = fn(*(i.value for i in inputs))
        return collect_metadata(
            inputs,
            list(outputs),
            grad_mode=(before, torch.is_grad_enabled()),
            training=training,
            storages=storages,
            sizes=() if apart is None else apart.sizes,
        ).metadata
