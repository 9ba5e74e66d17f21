"""The pipeline as a function of an FX graph: torch's ``compile_fx``, with options as arguments.

Note [Call styles]
    A graph of flat tensors that returns a tuple is compiled as it is. Another one (nested inputs, as exporters leave
    them on the graph or as they are passed; a result that is no tuple) is compiled as a function of its flat inputs,
    and called in the way it was written for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._guards import TracingContext
from torch.fx.graph import _PyTreeCodeGen

from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import compile_graph

from ..artifact.records import CompiledGraph
from ..driver.boxed import make_boxed_func
from ..driver.bugs import first_line, is_bug, note_bug, of_the_user, raise_bug
from ..driver.context import Boxed, CompileContext, Kind, Split, Stages
from ..driver.lower import live_graph
from ..driver.process import deep_recursion
from ..driver.run import compile_and_bind
from ..driver.specializations import compile_variable, flat_function, rebuilder
from ..driver.stages import own_stages
from ..environment import read_environment
from ..errors import CompileError
from ..frontend.drawn_floats import take_drawn_floats
from ..frontend.inputs import fake_inputs
from ..options import MODES, Options, resolve
from ..recorder import Recorder

__all__ = ["compile_fx", "compile_fx_aot", "compile_fx_inner", "list_mode_options", "list_options"]

InnerCompile = Callable[..., Callable[..., Any]]


def compile_fx(
    model: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: InnerCompile | None = None,
    config_patches: Mapping[str, Any] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    *,
    options: Options | None = None,
    recorder: Recorder | None = None,
) -> Callable[..., Any]:
    """Compile a graph for these inputs; see Note [Call styles]. Works as a backend of ``torch.compile``.

    Args:
        model: its parameters and buffers may be attributes; gradients reach those that are inputs only.
        inner_compile: compiles each functional ATen graph: ``inner_compile(graph, example_inputs, **facts)`` returns a
            callable, boxed or not. Facts: ``static_input_idxs``, ``is_backward``, ``is_inference``, ``graph_id``.
        config_patches: fields of :class:`Options` by name, for this compile.
        decompositions: operators to replace while tracing, instead of our own table.

    Raises what a compile raises: the packages' refusals are not caught here. After a bug of ours the graph itself is
    what is returned, see Note [Internal errors].
    """
    chosen = (options or read_environment().options()).patch(**dict(config_patches or {}))
    model, example_inputs = take_drawn_floats(model, example_inputs)
    stages = own_stages()
    if decompositions is not None:
        stages = replace(stages, decompositions=dict(decompositions))
    if inner_compile is not None:
        stages = _with_inner(stages, inner_compile)
    static = frozenset(i for i, value in enumerate(example_inputs) if isinstance(value, torch.nn.Parameter))
    kept = (recorder or Recorder()).of_graph("fx")
    ctx = CompileContext(chosen, kept, stages, "fx", keep_input_mutations=True, static_inputs=static)
    try:
        with deep_recursion():
            if _is_plain(model, example_inputs):
                return _compile_plain(model, example_inputs, ctx)
            return _compile_nested(model, example_inputs, ctx)
    except Exception as error:
        if not is_bug(error):
            raise
        if chosen.fallback == "error":
            raise_bug(error, first_line(model))
        note_bug(error, first_line(model), kept)
        return model


def compile_fx_inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **facts: Any) -> Boxed:
    """What :func:`compile_fx` compiles single functional graphs with; ``facts`` are ignored here.

    Raises :class:`CompileError` if the graph returns something else than a tuple or list.
    """
    (output,) = graph.graph.find_nodes(op="output")
    if not isinstance(output.args[0], tuple | list):
        raise CompileError(
            f"a graph to compile has to return a tuple or list; this one returns {output.args[0]!r}: put it into one"
        )
    if not any(node.op.startswith("call_") for node in graph.graph.nodes):
        return make_boxed_func(graph.forward)  # nothing to generate code for
    return compile_graph(graph, example_inputs)


def compile_fx_aot(
    model: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    config_patches: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
) -> str:
    """Compile a graph for inference into a package for :func:`aotkit.load`; see :func:`aotkit.aot_compile`.

    Raises ``ValueError`` if an example is on another device than the graph was traced for.
    """
    from .aot_compile import aot_compile

    seen = [node.meta.get("val", node.meta.get("example_value")) for node in model.graph.find_nodes(op="placeholder")]
    for position, (fake, example) in enumerate(zip(seen, example_inputs, strict=False)):
        if isinstance(fake, torch.Tensor) and isinstance(example, torch.Tensor) and fake.device != example.device:
            raise ValueError(
                f"example input {position} is on device {example.device}, and the graph was traced for {fake.device}; "
                "pass inputs on the device that the package is for"
            )
    chosen = (options or read_environment().options()).patch(**dict(config_patches or {}))
    return aot_compile(model, example_inputs, path, options=chosen)


def list_options() -> dict[str, Any]:
    """The fields of :class:`Options` and their defaults: keys of ``torch.compile(..., options={...})``."""
    defaults = Options()
    return {field.name: getattr(defaults, field.name) for field in fields(Options)}


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """What each mode sets, or what ``mode`` sets. Raises :class:`UnknownOption` for an unknown one."""
    if mode is None:
        return {name: dict(settings) for name, settings in MODES.items()}
    resolve(mode, None, Options())
    return dict(MODES[mode])


def _with_inner(stages: Stages, inner: InnerCompile) -> Stages:
    numbers = itertools.count()
    saved = [0]

    def split(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
        parts = stages.split(joint, metadata, ctx)
        saved[0] = parts.num_saved_tensors + parts.num_saved_symints
        return parts

    def lower(graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
        ctx.dump_graph(name, graph)
        examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        facts = {"is_inference": kind == "inference", "is_backward": kind == "backward", "graph_id": next(numbers)}
        # What the forward saved stays where it is until the backward; tangents are any tensors.
        static = range(saved[0]) if kind == "backward" else sorted(ctx.static_inputs)
        with of_the_user():
            compiled = inner(graph, examples, static_input_idxs=list(static), **facts)
        call = compiled if getattr(compiled, "_boxed_call", False) else make_boxed_func(compiled)
        return live_graph(graph, call, "a compiler of the caller's made its code")

    return replace(stages, split=split, lower=lower)


def _is_plain(model: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    if isinstance(model.graph._codegen, _PyTreeCodeGen):
        return False
    (output,) = model.graph.find_nodes(op="output")
    flat = not any(isinstance(value, list | tuple | dict) for value in example_inputs)
    return flat and isinstance(output.args[0], tuple | list)


def _compile_plain(
    model: torch.fx.GraphModule, example_inputs: Sequence[Any], ctx: CompileContext
) -> Callable[..., Any]:
    if TracingContext.try_get() is not None:
        mode, fakes = fake_inputs(example_inputs, model)
        return compile_and_bind(model, fakes, example_inputs, replace(ctx, fake_mode=mode))
    run, _ = compile_variable(model, list(example_inputs), ctx, dynamic=False, num_static=0)
    return lambda *args: run(list(args))


def _compile_nested(
    model: torch.fx.GraphModule, example_inputs: Sequence[Any], ctx: CompileContext
) -> Callable[..., Any]:
    flat, spec = pytree.tree_flatten((tuple(example_inputs), {}))
    function, out_spec = flat_function(model, spec)
    run, _ = compile_variable(function, flat, ctx, dynamic=False, num_static=0)
    rebuild = rebuilder(out_spec())

    def call(*args: Any) -> Any:
        values, given = pytree.tree_flatten((args, {}))
        if given != spec:
            raise TypeError(f"the arguments have the structure {given}; this was compiled for {spec}")
        return rebuild(run(values))

    return call
