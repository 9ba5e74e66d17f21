"""What differs between torch 2.11 and 2.15. Nothing else in this package asks for torch's version."""

from __future__ import annotations

import copyreg
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch._dynamo.config
import torch._dynamo.package
from torch._dynamo.source import ChainedSource, DefaultsSource, LocalSource
from torch._guards import Guard, GuardsSet, Source, TracingContext, tracing
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from .errors import PackageError

__all__ = [
    "asked_attribute",
    "lazy_graph_module",
    "offering_aot_compile",
    "parts_of_default",
    "read_guards",
    "remove_guards",
    "write_defaults_readably",
]


def read_guards(kept: bytes) -> Any:
    """What an artifact of torch's holds of Dynamo's guards. Sources in modules that traced code imports (torch's own
    ``cond`` does) note a guard in the present trace when they are made, so there is one, which nobody looks at.

    Raises:
        PackageError: for an artifact of tensors that had a gradient when it was compiled.
    """
    try:
        with tracing(TracingContext(None)):
            return torch._dynamo.package.load_guards_state(kept)
    except TypeError as error:
        if not all(words in str(error) for words in ("assigned grad", "type _Missing")):  # what torch did not write
            raise
        raise PackageError(
            "the compiled function can't be saved: a parameter or an argument has a gradient, and torch can't read "
            "back what it wrote of it. Set gradients to None (zero_grad) and compile again"
        ) from error


def write_defaults_readably() -> None:
    """Have torch read back what it writes into its own cache of guards on arguments that were left to their defaults.
    Before torch 2.12 their sources tell more parts than their class takes; what is registered here goes before what a
    class says. Entries and artifacts of ours have no objects in them, and need none of this."""
    source = DefaultsSource(LocalSource("function"), 0)
    if len(source.__reduce__()[1]) > sum(field.init for field in fields(DefaultsSource)):
        copyreg.pickle(DefaultsSource, parts_of_default)  # type: ignore[arg-type]


def parts_of_default(source: DefaultsSource) -> tuple[Any, ...]:
    """The source's class, and what it takes for this one."""
    return DefaultsSource, (source.base, source.idx_key, source.is_kw)


def asked_attribute(guard: Guard, path: list[list[Any]]) -> tuple[list[list[Any]], str] | None:
    """Which object a guard asks for an attribute, and for which. ``path``: the steps of the guard's source.

    Before torch 2.12 the last of them is the attribute itself. ``None`` where neither says it."""
    given = getattr(guard.create_fn, "keywords", None) or {}
    if "attr" in given:
        return path, given["attr"]
    kind, attribute = path[-1]
    return (path[:-1], attribute) if kind == "attr" else None


def lazy_graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A GraphModule that writes its Python code when it is first called; compilers never call it."""
    return _LazyGraphModule(root, graph)


def offering_aot_compile() -> AbstractContextManager[Any]:
    """Context in which what ``torch.compile`` gives has ``aot_compile``. Before torch 2.12 it does only under a setting
    of Dynamo's, which is off."""
    return torch._dynamo.config.patch(enable_aot_compile=True)


def remove_guards(guards: GuardsSet, source: Source) -> None:
    """Remove Dynamo's guards on what ``source`` names, and on what is reached from there; that two sources are one
    object is still guarded. Before torch 2.12 torch's own function finds only guards on whole arguments."""
    kept = [guard for guard in guards.inner if guard.create_fn_name() == "DUPLICATE_INPUT"]
    guards.remove_guards_with_source(source)
    for guard in [guard for guard in guards.inner if _is_from(guard.originating_source, source)]:
        guards.inner.discard(guard)
    for guard in kept:
        guards.add(guard, collect_debug_stack=False)


def _is_from(source: Any, wanted: Source) -> bool:
    while source != wanted and isinstance(source, ChainedSource):
        source = source.base
    return bool(source == wanted)
