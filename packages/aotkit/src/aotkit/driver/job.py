"""One graph of Dynamo: looked up, else compiled; bound; stored.

What a compile needs and a cache hit does not is imported where a compile begins; see Note [What is loaded].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aotkit_cache import Uncacheable
from aotkit_runtime_wrappers import unboxed
from aotkit_runtime_wrappers.refinements import refuse_memory_of_several_storages

from ..artifact.records import Artifact, RecordedGraph
from ..artifact.store import CachedObjects, open_graph_cache, store_of_ranks
from ..artifact.torch_state import settings
from ..errors import CompileError, notify_eager
from ..options import Options
from ..recorder import GraphRecord, Recorder
from .bound_recordings import tell_of_the_cpu
from .bugs import first_line, is_bug, is_refusal, note_bug, raise_bug
from .process import collections_put_off
from .shown import show_loaded

if TYPE_CHECKING:
    from ..artifact.collectives import Collective
    from ..artifact.frozen import FrozenArguments
    from ..artifact.lookup import Lookup
    from .context import CompileContext
    from .graph_compiler import GraphCompiler
    from .ranks import RankCheck
    from .user_passes import GraphPasses

__all__ = ["GraphJob", "run_eagerly", "run_in_spite_of"]


class GraphJob:
    """One graph of Dynamo, loaded or compiled for one kind of arguments after the other.

    A call of the result takes the graph's inputs and then the tensors that it holds.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        options: Options,
        recorder: Recorder,
        name: str,
        passes: GraphPasses | None = None,
    ) -> None:
        self.gm, self.options, self.recorder, self.name, self.passes = gm, options, recorder, name, passes
        ranks = store_of_ranks(options.rank_timeout) if options.cache and options.share_compiles else None
        self.cache = open_graph_cache(recorder, ranks) if options.cache else None
        self._shares = ranks is not None
        self.frozen: FrozenArguments | None = None
        self._static: frozenset[int] = frozenset()
        self._compiler: GraphCompiler | None = None
        self._collectives: tuple[Collective, ...] = ()

    def note_static(self, example_inputs: Sequence[Any], attributes: Sequence[Any]) -> None:
        """Look which arguments keep their address or their value, where that matters."""
        if self.options.cudagraphs:
            from ..frontend.sources import static_inputs

            self._static = static_inputs(example_inputs, attributes)
        if self.options.freezing:
            from .freezing import frozen_arguments

            self.frozen = frozen_arguments(example_inputs, attributes)

    def for_other_parameters(self) -> Callable[[Sequence[Any]], GraphJob]:
        """What makes the same job for a graph whose frozen parameters are among its arguments; it holds none itself."""
        from ..artifact.frozen import FrozenArguments

        assert self.frozen is not None
        given = (self.gm, self.options, self.recorder, self.name, self.passes)
        positions, static = [*self.frozen.tensors], self._static

        def make(args: Sequence[Any]) -> GraphJob:
            job = GraphJob(*given)
            job.frozen, job._static = FrozenArguments({index: args[index] for index in positions}), static
            return job

        return make

    def compile_or_fall_back(
        self, args: Sequence[Any], failure: str, ranks: RankCheck | None = None, *, aliases: bool = False
    ) -> Callable[..., Any]:
        """Load or compile for ``args``; a refusal raises :class:`CompileError`, or gives the graph itself.

        So does a bug of ours, see Note [Internal errors], which raises :class:`InternalError`. ``ranks``: compare with
        other ranks what became of it, which may raise :class:`RanksDisagree`. ``aliases``: for real arguments that
        share memory.
        """
        try:
            if aliases:
                refuse_memory_of_several_storages(args)
            run = self.compile(args)
        except Exception as refusal:
            if ranks is not None:
                told = is_bug(refusal) or is_refusal(refusal)
                why = f"{type(refusal).__name__}: {refusal}"
                ranks.failed(why, runs_eagerly=told and self.options.fallback == "eager")
            if is_bug(refusal):
                if self._compiler is not None:
                    return run_in_spite_of(refusal, self._compiler.graph, self.options, self.recorder)
                run, count = run_in_spite_of(refusal, self.gm, self.options, self.recorder), _count_inputs(self.gm)
                return lambda *values: run(*values[:count])
            if not is_refusal(refusal):
                raise
            if self.options.fallback == "error":
                raise CompileError(f"{self.name.replace('graph', 'graph ')} {failure}: {refusal}") from refusal
            return run_eagerly(self._graph_compiler().graph, str(refusal), self.recorder)
        if ranks is not None:
            ranks.compiled(self._collectives)
        return run

    def compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Load or compile for ``args``. Raises the packages' typed refusals."""
        lookup, found = self._look_up(args)
        if lookup is not None and found is not None:
            with collections_put_off():
                bound = self._load(found, lookup)
            if bound is not None:
                return bound
        if lookup is not None and self._shares:
            return self._compile_for_all(args, lookup)
        return self._compile(args, lookup)

    def complete(self, args: Sequence[Any]) -> Artifact:
        """All that a compile for ``args`` gives, the backward included, as data and not bound: loaded or compiled.

        Raises the packages' typed refusals.
        """
        lookup, found = self._look_up(args)
        if lookup is not None and found is not None and (found.kind == "inference" or found.backward is not None):
            lookup.loaded(found)
            return found
        return self._complete(args, lookup)[0]

    def _complete(self, args: Sequence[Any], lookup: Lookup | None) -> tuple[Artifact, CompileContext]:
        """Compile forward and backward, and store them."""
        artifact, ctx = self._graph_compiler().compile(args)
        store = None if lookup is None else _store_of(lookup, artifact)
        if artifact.kind == "training":
            from .later import CompileLater

            backward = CompileLater(lambda: ctx, ctx.recorder, ctx.name).backward(artifact, ())
            artifact = replace(artifact, backward=backward)
        if store is not None:
            store(artifact)
        return artifact, ctx

    def _look_up(self, args: Sequence[Any]) -> tuple[Lookup | None, Artifact | None]:
        """Where the artifact would be kept, if it can be, and the artifact, if it is there."""
        chosen = self.options
        if self.cache is None or chosen.verify or chosen.redzones or chosen.lowering == "none":
            return None, None
        try:
            with collections_put_off():
                lookup = self._lookup(args)
                return lookup, lookup.find()
        except Uncacheable as error:
            self.recorder.event("cache.bypass", {"graph": self.name, "reason": error.reason})
            return None, None

    def _lookup(self, args: Sequence[Any]) -> Lookup:
        from ..artifact.lookup import prepare_lookup
        from ..artifact.sources import sources_digest

        assert self.cache is not None
        with self.recorder.stage("cache-key"):
            more: dict[str, Any] = {} if self.passes is None else {"passes": self.passes.key()}
            if self.options.cudagraphs:  # what stays in place, and how graphs are cut
                more["recordings"] = [sorted(self._static), sources_digest(("aotkit_cudagraphs",))]
            return prepare_lookup(self.gm, args, self.options, self.cache, self.recorder, self.name, self.frozen, more)

    def _load(self, artifact: Artifact, lookup: Lookup) -> Callable[..., Any] | None:
        """A cache hit: bind what was found, or tell that it can't be used."""
        from .bind import bind
        from .later import CompileLater

        later = CompileLater(
            lambda: self._graph_compiler().context,
            self.recorder,
            self.name,
            function=lambda: self._graph_compiler().graph,
            specializes=not self.options.cudagraphs,
        )
        try:
            with self.recorder.stage("cache-bind"):
                frozen = None if self.frozen is None else self.frozen.tensors
                bound = bind(artifact, later, observer=self.recorder, arguments=frozen, name=self.name)
                lookup.loaded(artifact)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with it, the graph can be compiled
            lookup.unusable(error)
            return None
        kind = "inference" if artifact.kind == "inference" else "forward"
        for name, report in artifact.forward.reports(f"{self.name}-{kind}"):
            self.recorder.add_graph(GraphRecord(name, report, loaded=True))
        if self.options.cudagraphs and not isinstance(artifact.forward.code, RecordedGraph):
            tell_of_the_cpu(f"{self.name}-{kind}")
        show_loaded(artifact, kind, self.name, self.recorder)
        self.recorder.event("cache.loaded", {"graph": self.name, "specialization": lookup.slot})
        self._collectives = artifact.collectives()
        return unboxed(bound)

    def _compile(self, args: Sequence[Any], lookup: Lookup | None) -> Callable[..., Any]:
        """A cache miss: compile, bind, and store, a training graph when its backward is there."""
        from .run import bind_compiled

        artifact, ctx = self._graph_compiler().compile(args)
        store = None if lookup is None else _store_of(lookup, artifact)
        self._collectives = artifact.collectives()
        bound = bind_compiled(artifact, ctx, store if artifact.kind == "training" else None)
        if store is not None and artifact.kind == "inference":
            store(artifact)
        return bound

    def _compile_for_all(self, args: Sequence[Any], lookup: Lookup) -> Callable[..., Any]:
        """A cache miss where ranks share: the first that comes compiles, the others wait and load what it wrote.

        A backward is compiled here as well: the others could not wait for it, since the rank that compiles may need
        them to get there. Where nothing was written (the graph can't be stored, or its compile failed), those that
        waited compile side by side. After a refusal, which may be of the backward alone, this rank begins anew.
        """
        made = bound = None
        with lookup.computing() as waited:
            found = lookup.find()
            if found is None and not waited:
                try:
                    made = self._complete(args, lookup)
                except Exception as error:
                    if not is_refusal(error):
                        raise
        if made is not None:
            from .run import bind_compiled  # with all that compiles: those that wait do without

            self._collectives = made[0].collectives()
            return bind_compiled(*made)
        if found is not None:
            bound = self._load(found, lookup)
        return self._compile(args, lookup) if bound is None else bound

    def _graph_compiler(self) -> GraphCompiler:
        if self._compiler is None:
            from .graph_compiler import GraphCompiler

            # Object code is a part of what ranks share already.
            cache = open_graph_cache(self.recorder) if self._shares else self.cache
            store = None if cache is None else CachedObjects(cache)
            self._compiler = GraphCompiler(
                self.gm,
                self.options,
                self.recorder,
                self.name,
                store=store,
                static_inputs=self._static,
                frozen=self.frozen,
                passes=self.passes,
            )
        return self._compiler


def _store_of(lookup: Lookup, artifact: Artifact) -> Callable[[Artifact], None] | None:
    """What writes the artifact, once, when it is complete; ``None`` if it is known already that it can't be written.

    What is assumed about sizes is what is assumed now: a backward that is compiled later assumes nothing more. It is
    compiled by torch's settings of then, as eager's reads them; the key names those of now.
    """
    try:
        guards = lookup.guards()
        reason = artifact.unstorable()
    except Uncacheable as error:
        reason = error.reason
    if reason is not None:
        lookup.bypass(reason)
        return None
    waiting, begun = [True], settings()

    def store(complete: Artifact) -> None:
        if waiting:
            waiting.clear()
            if settings() != begun:
                lookup.bypass("its backward was compiled under other settings of torch than its forward")
                return
            lookup.save(replace(complete, guards=guards))

    return store


def run_in_spite_of(
    error: Exception, gm: torch.fx.GraphModule, options: Options, recorder: Recorder
) -> Callable[..., Any]:
    """The graph itself, after one notice, because of a bug of ours; or :class:`InternalError`, as the options say."""
    if options.fallback == "error":
        raise_bug(error, first_line(gm))
    note_bug(error, first_line(gm), recorder)
    return _without_regions(gm)


def run_eagerly(gm: torch.fx.GraphModule, reason: str, recorder: Recorder) -> Callable[..., Any]:
    """The graph itself, after one notice with the ``reason``."""
    recorder.add_fallback(reason)
    notify_eager(reason)
    return _without_regions(gm)


def _without_regions(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """What runs eagerly; see Note [Regions that are not run again]."""
    from ..frontend.inlined_regions import inline_regions

    return inline_regions(gm)


def _count_inputs(gm: torch.fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="placeholder"))
