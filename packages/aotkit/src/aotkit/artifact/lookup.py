"""A graph that was compiled before, here or elsewhere: looked up, bound, and written after a compile.

Note [A hit]
    A hit runs no stage of a compile. The key is made from the frontend's graph (Note [What is part of the key]), the
    entry is read and checked, its guards are evaluated and installed, and what it holds is bound. Graphs with symbolic
    sizes may have several entries under one key, one per set of guards; they are looked at in order.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext

from aotkit_cache import ArtifactCache, CacheKey, CacheWarning, Uncacheable, environment_parts, make_key
from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import host_target
from aotkit_runtime_wrappers import unboxed

from ..frontend.inputs import symbolic_twins
from ..frontend.tracing_context import publish_metadata
from ..options import Options
from ..recorder import GraphRecord, Recorder
from .guards import Names, guards_hold, guards_of, install_guards, ranges_of
from .key import describe_inputs, graph_lines
from .records import ARTIFACT_FORMAT, Artifact, StoredReport, bind_artifact
from .torch_state import cuda_capabilities, torch_state

if TYPE_CHECKING:
    from ..driver.freezing import FrozenArguments
    from ..driver.user_passes import GraphPasses

__all__ = ["Later", "Lookup", "graph_key", "prepare_lookup"]

MOST_VARIANTS = 8
"""So many entries with other guards are kept under one key."""

_OUR_PACKAGES = [
    "aotkit",
    "aotkit_functionalize",
    "aotkit_aot_trace",
    "aotkit_partition",
    "aotkit_runtime_wrappers",
    "aotkit_inductor_lower",
]
_NOT_OUTPUT = frozenset({"cache", "fallback", "verify"})  # options that change no product


@dataclass(frozen=True, slots=True)
class Later:
    """Compiles what an artifact may lack when it is asked for: second derivatives of one, a backward graph."""

    gradients: Callable[[Artifact], Callable[[Any], Any]]
    backward: Callable[[torch.fx.GraphModule], Any]


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

    def find(self, later: Later) -> Callable[..., Any] | None:
        """The compiled function, bound, if an entry fits; else None, and :meth:`save` knows where to write."""
        hints = self.names.hints()
        if hints is None:
            raise Uncacheable("a symbol of the sizes is the size of no input by itself")
        for slot in range(MOST_VARIANTS if hints else 1):
            with self.recorder.stage("cache-read"):
                entry = self.cache.get(self._key(slot))
            if entry is None:
                self.slot = slot
                return None
            try:
                with self.recorder.stage("cache-bind"):
                    artifact = Artifact.from_sections(entry.sections, entry.meta)
                    if not guards_hold(artifact.guards, hints):
                        continue
                    bound = self._bind(artifact, later)
            except Exception as error:  # noqa: BLE001  # whatever is wrong with it, the graph can be compiled
                warnings.warn(
                    f"a cache entry can't be used ({type(error).__name__}: {error}); {self.name} is compiled again",
                    CacheWarning,
                    stacklevel=4,
                )
                self.slot = slot
                return None
            self.recorder.event("cache.loaded", {"graph": self.name, "variant": slot})
            return bound
        return None

    def _bind(self, artifact: Artifact, later: Later) -> Callable[..., Any]:
        kind = "inference" if artifact.backward is None else "forward"

        def on_backward() -> None:
            assert artifact.backward is not None
            self.recorder.add_graph(GraphRecord(f"{self.name}-backward", StoredReport(artifact.backward.report)))

        bound = bind_artifact(
            artifact,
            observer=self.recorder,
            gradients=later.gradients,
            on_backward=on_backward,
            arguments=None if self.frozen is None else self.frozen.tensors,
            whole_backward=later.backward,
        )
        install_guards(artifact.guards, self.names.values)
        if self.frozen is not None:
            self.frozen.used |= set(artifact.frozen)
        self.recorder.add_graph(GraphRecord(f"{self.name}-{kind}", StoredReport(artifact.forward.report)))
        if TracingContext.try_get() is not None:
            publish_metadata(GraphMetadata.from_json(artifact.metadata))
        return unboxed(bound)

    def guards(self) -> list[Any]:
        """What has been assumed about the sizes by now."""
        return guards_of(self.shape_env, self.names)

    def save(self, artifact: Artifact) -> None:
        """Write the entry that was not found."""
        if self.slot is None:
            return
        key = self._key(self.slot)
        sections, meta = artifact.to_sections()
        sections["key"] = zlib.compress(json.dumps(key.to_json()).encode(), 1)
        meta["kind"] = "inference" if artifact.backward is None else "training"
        with self.recorder.stage("cache-write"):
            self.cache.put(key, sections, meta)

    def bypass(self, reason: str) -> None:
        """Tell that there will be no entry, and why."""
        self.recorder.event("cache.bypass", {"graph": self.name, "reason": reason})

    def _key(self, slot: int) -> CacheKey:
        return make_key(**self.parts, variant=slot)


def prepare_lookup(
    gm: torch.fx.GraphModule,
    args: Sequence[Any],
    options: Options,
    cache: ArtifactCache,
    recorder: Recorder,
    name: str,
    frozen: FrozenArguments | None = None,
    passes: GraphPasses | None = None,
) -> Lookup:
    """The key of ``gm`` for ``args``: the graph's inputs and then the tensors that it holds.

    Raises :class:`Uncacheable` if there is none.
    """
    context = TracingContext.try_get()
    if context is not None and (context.fakify_first_call or context.output_strides is not None):
        raise Uncacheable("the frontend asks for fake results or strides of the compiled graph")
    if options.cudagraphs:
        raise Uncacheable("recordings of CUDA graphs belong to one process")
    names = Names()
    twins = symbolic_twins(args, gm, context)
    parts = graph_key(gm, args, twins, options, names)
    if frozen is not None:
        parts["frozen"] = frozen.digests()
    if passes is not None:
        parts["passes"] = passes.key()
    shape_env = None
    if names.numbers:
        shape_env = next(iter(names.values.values())).node.shape_env if names.values else None
        parts["ranges"] = ranges_of(shape_env, names)
    return Lookup(parts, names, shape_env, cache, recorder, name, frozen)


def graph_key(
    gm: torch.fx.GraphModule, args: Sequence[Any], twins: Sequence[Any], options: Options, names: Names
) -> dict[str, Any]:
    """All parts of the key but the ranges of symbols. Raises :class:`Uncacheable`."""
    allowed = dict(entry.partition("@")[::2] for entry in options.cacheable)
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_OUTPUT}
    graph = "\n".join(graph_lines(gm, allowed))
    return {
        "inputs": describe_inputs(args, twins, names, allowed),
        "graph": graph,
        "options": chosen,
        **{f"state.{name}": value for name, value in torch_state().items()},
        **environment_parts(),
        "env.target": str(host_target()),
        "env.cuda": cuda_capabilities("device cuda" in graph),
        "env.sources": sources_digest(),
        "format": ARTIFACT_FORMAT,
    }


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Digest of the sources of everything that decides what a graph becomes; see ``generator_digest`` for why."""
    digest = hashlib.sha256()
    for name in _OUR_PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations is not None
        for folder, below, files in os.walk(next(iter(found.submodule_search_locations))):
            below.sort()
            for file in sorted(files):
                if file.endswith(".py"):
                    with open(os.path.join(folder, file), "rb", buffering=0) as source:
                        digest.update(file.encode() + b"\0" + source.read())
    return digest.hexdigest()
