"""A graph that was compiled before, here or elsewhere: looked up, and written after a compile.

Note [A cache hit]
    A cache hit compiles nothing. The key is made from Dynamo's graph (Note [What is part of the key]), the entry is
    read and checked, its guards are evaluated and installed, and what it holds is bound. Graphs with symbolic sizes may
    have several entries under one key, one per set of guards; they are looked at in order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext

from aotkit_cache import ArtifactCache, CacheKey, CacheWarning, Uncacheable, make_key
from aotkit_functionalize import Unsupported

from .._notices import warn_user
from ..frontend.inputs import symbolic_twins
from ..frontend.tracing_context import publish_metadata
from ..options import Options
from ..recorder import Recorder
from .guards import Names, guards_hold, guards_of, install_guards, ranges_of
from .key import graph_key
from .records import Artifact, guards_of_sections
from .sources import replaced_sources
from .torch_artifacts import record_entry

if TYPE_CHECKING:
    from .frozen import FrozenArguments

__all__ = ["Lookup", "prepare_lookup"]

MOST_SPECIALIZATIONS = 8
"""So many entries with other guards are kept under one key."""


@dataclass
class Lookup:
    """One graph with its inputs, as far as the cache is concerned."""

    parts: Mapping[str, Any]
    names: Names
    shape_env: Any
    cache: ArtifactCache
    recorder: Recorder
    name: str
    frozen: FrozenArguments | None = None
    slot: int | None = None
    keys: dict[int, CacheKey] = field(default_factory=dict)  # by slot: of a large graph one takes milliseconds

    def find(self) -> Artifact | None:
        """The compiled function, if an entry fits; else None, and :meth:`save` knows where to write."""
        hints = self.names.hints()
        if hints is None:
            raise Uncacheable("a symbol of the sizes is the size of no input by itself")
        for slot in range(MOST_SPECIALIZATIONS if hints else 1):
            with self.recorder.stage("cache-read"):
                entry = self.cache.get(self._key(slot))
            self.slot = slot
            if entry is None:
                return None
            try:
                with self.recorder.stage("cache-bind"):
                    if guards_hold(guards_of_sections(entry.meta), hints):
                        return Artifact.from_sections(entry.sections, entry.meta)
            except Exception as error:  # noqa: BLE001  # whatever is wrong with it, the graph can be compiled
                self.unusable(error)
                return None
        self.slot = None
        return None

    def unusable(self, error: Exception) -> None:
        """Tell that the entry that was found can't be used; it is written again."""
        what = f"a cache entry can't be used ({type(error).__name__}: {error})"
        warn_user(f"{what}; {self.name} is compiled again", CacheWarning)

    def loaded(self, artifact: Artifact) -> None:
        """The entry that was found is used: what it assumes about the sizes is assumed here too."""
        install_guards(artifact.guards, self.names.values)
        if self.slot is not None:
            record_entry(self.cache, self._key(self.slot))
        if self.frozen is not None:
            self.frozen.used |= set(artifact.frozen)
        if TracingContext.try_get() is not None:
            publish_metadata(artifact.metadata)

    def guards(self) -> list[Any]:
        """What has been assumed about the sizes by now."""
        return guards_of(self.shape_env, self.names)

    def save(self, artifact: Artifact) -> None:
        """Write the entry that was not found, or tell why it can't be written."""
        if self.slot is None:
            return
        reason = artifact.unstorable() or replaced_sources(again=True)
        if reason:
            self.bypass(reason)
            return
        key = self._key(self.slot)
        try:
            sections, meta = artifact.to_sections()
        except Uncacheable as error:
            self.bypass(error.reason)
            return
        except Unsupported as error:  # a tensor subclass that can't be written down
            self.bypass(str(error))
            return
        sections["key"] = zlib.compress(json.dumps(key.to_json()).encode(), 1)
        meta["kind"] = artifact.kind
        with self.recorder.stage("cache-write"):
            if self.cache.put(key, sections, meta):
                record_entry(self.cache, key)

    def bypass(self, reason: str) -> None:
        """Tell that there will be no entry, and why."""
        self.recorder.event("cache.bypass", {"graph": self.name, "reason": reason})

    def computing(self) -> AbstractContextManager[bool]:
        """Hold the right to make the entry that :meth:`find` did not find, among all that share the store; gives
        whether another had it before, and so may have written it."""
        return nullcontext(False) if self.slot is None else self.cache.computing(self._key(self.slot))

    def _key(self, slot: int) -> CacheKey:
        if slot not in self.keys:
            self.keys[slot] = make_key(**self.parts, specialization=slot)
        return self.keys[slot]


def prepare_lookup(
    gm: torch.fx.GraphModule,
    args: Sequence[Any],
    options: Options,
    cache: ArtifactCache,
    recorder: Recorder,
    name: str,
    frozen: FrozenArguments | None = None,
    more: Mapping[str, Any] | None = None,
) -> Lookup:
    """The key of ``gm`` for ``args``: the graph's inputs and then the tensors that it holds. ``more``: of the key.

    Raises :class:`Uncacheable` if there is none.
    """
    context = TracingContext.try_get()
    if context is not None and (context.fakify_first_call or context.output_strides is not None):
        raise Uncacheable("Dynamo asks for fake results or strides of the compiled graph")
    names = Names()
    twins = symbolic_twins(args, gm, context)
    parts = graph_key(gm, args, twins, options, names)
    if frozen is not None:
        parts["frozen"] = frozen.digests()
    parts.update(more or {})
    shape_env = None
    if names.numbers:
        shape_env = next(iter(names.values.values())).node.shape_env if names.values else None
        parts["ranges"] = ranges_of(shape_env, names)
    return Lookup(parts, names, shape_env, cache, recorder, name, frozen)
