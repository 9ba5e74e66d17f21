"""The ``torch.compile`` backend.

What a compile needs and a cache hit does not is imported where a compile begins; see Note [What is loaded].
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext

from ._notices import warn_user
from .driver.alias_specializations import with_alias_specializations
from .driver.bugs import first_line, is_bug, is_refusal, raise_bug
from .driver.job import GraphJob, run_eagerly, run_in_spite_of
from .driver.process import put_full_collections_off_while_tracing
from .driver.ranks import RankCheck
from .driver.watched import watched
from .environment import read_environment
from .errors import CompileError
from .frontend.drawn_floats import take_drawn_floats
from .frontend.inputs import (
    accumulates_gradients,
    attribute_tensors,
    calls_flex_attention,
    fake_of_the_program,
    has_lists,
    unsupported_input,
)
from .frontend.masks import has_strided_masks, lay_out_masks
from .frontend.saving import has_gradient, is_saved_by_torch, name_in_torchs_cache, torch_keeps, write_guards_readably
from .frontend.structured_trace import TraceSink, is_tracing
from .frontend.version_counters import needs_version_counters
from .options import Options, resolve
from .recorder import Recorder

if TYPE_CHECKING:
    from .artifact.frozen import FrozenArguments
    from .driver.user_passes import GraphPasses

__all__ = ["aotkit", "make_backend"]

BackendFn = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def aotkit(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo; registered under the name ``"aotkit"``.

    ``mode`` is a name from :data:`aotkit.MODES`; ``options`` holds fields of :class:`aotkit.Options`, and optionally
    ``observer``, a :class:`aotkit.Recorder` that collects stage times and reports.
    Raises :class:`aotkit.UnknownOption`; with ``fallback="error"`` also :class:`aotkit.CompileError`.
    """
    given = dict(options or {})
    recorder = given.pop("observer", None)
    environment = read_environment()
    chosen = resolve(mode, given, environment.options())
    recorder = recorder or Recorder(log=environment.log, dump_dir=environment.dump_dir)
    return compile_graph_module(gm, example_inputs, chosen, recorder)


def make_backend(
    options: Options | None = None, recorder: Recorder | None = None, *, passes: GraphPasses | None = None
) -> BackendFn:
    """A backend with fixed options for ``torch.compile(backend=...)``; without options, the environment decides.

    ``passes`` are run over the graphs of every compile. ``torch._dynamo.reset()`` drops recordings of CUDA graphs.
    """
    kept = recorder or Recorder()
    chosen = options or read_environment().options()
    put_full_collections_off_while_tracing()
    if torch_keeps():
        write_guards_readably()

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph_module(gm, example_inputs, chosen, kept, passes)

    backend.reset = reset_recordings  # type: ignore[attr-defined]
    backend.get_compiler_config = lambda: asdict(chosen)  # type: ignore[attr-defined]
    return backend


def reset_recordings() -> None:
    """Drop the recordings of CUDA graphs that compiled graphs share; ``torch._dynamo.reset()`` calls this."""
    trees = sys.modules.get("aotkit_cudagraphs.trees")
    if trees is not None:
        trees.reset_shared_trees()


aotkit.reset = reset_recordings  # type: ignore[attr-defined]


def compile_graph_module(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None = None,
) -> Callable[..., Any]:
    """Load or compile, or fall back to Dynamo's graph with one notice, as ``options.fallback`` says."""
    if not options.capture:
        return gm
    put_full_collections_off_while_tracing()  # of the next graphs: `torch._dynamo.reset` forgets who asked before
    kept_as = name_in_torchs_cache(gm)
    saved = is_saved_by_torch(gm)
    gm, example_inputs = take_drawn_floats(gm, example_inputs)
    if saved:
        return _compile_to_save(_prepared(gm), example_inputs, options, recorder, passes)
    try:
        gm = _prepared(gm)
        if has_lists(example_inputs) or accumulates_gradients(gm):
            return _compile_backward_pass(gm, example_inputs, options, recorder, passes)
        if kept_as is not None:
            _keep_in_torchs_cache(kept_as, gm, example_inputs, options, recorder, passes)
        return _compile_plain(gm, example_inputs, options, recorder, passes)
    except Exception as error:
        if not is_bug(error):
            raise
        return run_in_spite_of(error, gm, options, recorder)


def _prepared(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Dynamo's graph, or a copy with its attention in a form that is compiled better."""
    if has_strided_masks(gm):
        gm = lay_out_masks(gm)
    if not calls_flex_attention(gm):
        return gm
    from .frontend.written_out import write_out_flex_attention

    return write_out_flex_attention(gm)


def _unsupported(gm: torch.fx.GraphModule, values: Sequence[Any], options: Options) -> str | None:
    """Why ``gm`` with these inputs, and the tensors that it holds, is not compiled, or ``None``."""
    return unsupported_input(values, kernels=options.lowering == "kernels") or needs_version_counters(gm)


def _compile_plain(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> Callable[..., Any]:
    attributes = attribute_tensors(gm)
    values = [*example_inputs, *attributes]
    ranks = RankCheck.of(gm, values, options)
    reason = _unsupported(gm, values, options)
    if reason is None and options.lowering == "kernels":
        reason = fake_of_the_program(values)
    if reason is not None:
        if ranks is not None:
            ranks.failed(reason, runs_eagerly=options.fallback == "eager")
        if options.fallback == "error":
            raise CompileError(f"the graph could not be compiled: {reason}")
        return run_eagerly(gm, reason, recorder)
    _tell_of_minifier()
    name, number = f"graph{next(_numbers)}", str(CompileContext.current_compile_id() or "")
    if is_tracing():
        recorder = recorder.shown_to(TraceSink(name))
    recorder = recorder.of_graph(name, lambda: {"compile id": number, "first line": first_line(gm)})
    job = GraphJob(gm, options, recorder, name, passes)
    recorder.event("compile.begin", {"graph": name, "compile_id": number})
    job.note_static(example_inputs, attributes)
    with watched(name, recorder):
        first = job.compile_or_fall_back(values, "could not be compiled", ranks)
    compiled = _with_other_aliases(job, first)
    recorder.dump(f"seconds per stage{number and f' of {number}'}", "timing", recorder.table)
    if job.frozen is not None and job.frozen.used:
        from .driver.freezing import check_frozen

        compiled = check_frozen(compiled, job.frozen, gm, partial(_compile_for_others, job.for_other_parameters()))
    return (lambda *args: compiled(*args, *attributes)) if attributes else compiled


_AGAIN = "could not be compiled again"


def _compile_for_others(
    make_job: Callable[[Sequence[Any]], GraphJob], args: Sequence[Any]
) -> tuple[Callable[..., Any], FrozenArguments]:
    """A frozen graph with the parameters of another module."""
    other = make_job(args)
    assert other.frozen is not None
    return _with_other_aliases(other, other.compile_or_fall_back(args, _AGAIN)), other.frozen


def _with_other_aliases(job: GraphJob, first: Callable[..., Any]) -> Callable[..., Any]:
    """What was compiled, and what will be for arguments that share memory in another way."""
    return with_alias_specializations(first, lambda args: job.compile_or_fall_back(args, _AGAIN, aliases=True))


def _keep_in_torchs_cache(
    kept_as: str,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> None:
    """Give torch's cache what a later process can load, where there is such a thing; see Note [Kept by torch]."""
    write_guards_readably()
    attributes = attribute_tensors(gm)
    values = [*example_inputs, *attributes]
    job = GraphJob(gm, options, recorder, f"graph{next(_numbers)}", passes)
    reason = _unsupported(gm, values, options)
    if job.cache is None:
        reason = "there is no cache, from which this process would load what is recorded"
    elif RankCheck.of(gm, values, options) is not None:
        reason = "ranks compare what they compile"
    elif any(has_gradient(value) for value in values):
        reason = "torch can't read back the guards of a tensor that has a gradient already"
    try:
        from .driver.kept_by_torch import keep
    except ImportError:
        reason = "this torch has another form for what its cache keeps"
    if reason is not None:
        recorder.event("precompile.bypass", {"graph": job.name, "reason": reason})
        return
    job.note_static(example_inputs, attributes)
    keep(job, gm, example_inputs, attributes, kept_as)


def _compile_to_save(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> Callable[..., Any]:
    """For ``aot_compile``: what torch can save, or :class:`CompileError`; a graph that runs eagerly can't be saved."""
    from .driver.saved_by_torch import SavedByTorch, complete_graph

    write_guards_readably()
    attributes = attribute_tensors(gm)
    reason = "an argument is a list" if has_lists(example_inputs) else None
    reason = reason or _unsupported(gm, [*example_inputs, *attributes], options)
    if reason is not None:
        raise CompileError(f"the graph could not be compiled: {reason}")
    name, number = f"graph{next(_numbers)}", str(CompileContext.current_compile_id() or "")
    recorder = recorder.of_graph(name, lambda: {"compile id": number, "first line": first_line(gm)})
    job = GraphJob(gm, options, recorder, name, passes)
    recorder.event("compile.begin", {"graph": name, "compile_id": number})
    try:
        with watched(name, recorder):
            job.note_static(example_inputs, attributes)
            return SavedByTorch(complete_graph(job, gm, example_inputs, attributes))
    except CompileError:
        raise
    except Exception as error:
        if is_refusal(error):
            raise CompileError(f"the graph could not be compiled: {error}") from error
        if is_bug(error):
            raise_bug(error, first_line(gm))
        raise


def _tell_of_minifier() -> None:
    """Dynamo's own minifier does nothing here (``aot``, which Inductor alone reads), or takes what a backend returns
    for a module (``dynamo``); whoever asks for it is told what does the same."""
    asked = getattr(sys.modules.get("torch._dynamo.config"), "repro_after", None)
    if asked is not None and not _told:
        _told.append(True)
        warn_user(
            f"TORCHDYNAMO_REPRO_AFTER={asked} does not work with aotkit: call aotkit.find_culprit(model, *inputs, "
            "repro='repro.py'), which finds the stage that is wrong and writes a small script",
            UserWarning,
        )


def _compile_backward_pass(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    recorder: Recorder,
    passes: GraphPasses | None,
) -> Callable[..., Any]:
    from .frontend.compiled_autograd import defer_accumulations, without_lists

    try:
        plain, flat, flatten = without_lists(gm, example_inputs)
    except CompileError as refusal:
        if options.fallback == "error":
            raise
        return run_eagerly(gm, str(refusal), recorder)
    accumulations = defer_accumulations(plain)
    run = _compile_plain(plain, flat, options, recorder, passes)
    return lambda *args: accumulations.finish(run(*flatten(args)))


_told: list[bool] = []  # of what a variable asks for in vain; a notice is given once
_numbers = itertools.count()  # names dumps and kernels only; a counter cannot change what is compiled
