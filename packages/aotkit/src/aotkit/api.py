"""Compile a plain function with compilers and a partitioner of one's choice, without the Dynamo frontend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_functionalize import GraphMetadata
from aotkit_partition import default_partition

from ._environment import read_environment
from ._observe import Recorder
from .errors import CompileError
from .pipeline import Boxed, CompileContext, Split, Stages, compile_flat

__all__ = ["aot_function"]

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = default_partition,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool | None = None,
    enable_log: bool = True,
) -> Callable[..., Any]:
    """Compile ``fn`` (any pytree of tensors in and out) on its first call; torch's ``aot_function`` signature.

    ``fw_compiler(graph, example_inputs)`` and ``bw_compiler`` get functional ATen graphs and return a callable,
    boxed (``_boxed_call = True``: one list that it empties) or not. ``partition_fn(joint, joint_inputs,
    num_fwd_outputs=n)`` is ours or torch's own. ``inference_compiler`` (default: ``fw_compiler``) gets graphs that
    need no backward. ``decompositions`` are applied while tracing; none by default. ``dynamic=True`` makes sizes
    symbolic. The compiled result is kept for later calls, which must have inputs of the same structure, dtypes
    and (unless dynamic) sizes; others raise :class:`CompileError`. ``num_params_buffers`` (how many leading inputs
    keep their addresses), ``keep_inference_input_mutations`` and ``enable_log`` are accepted for compatibility:
    mutations are always applied by the epilogue.

    Idea: AOTAutograd (the PyTorch 2 paper, ASPLOS 2024).
    """
    state: dict[str, Any] = {}
    lock = threading.Lock()
    stages = _stages(
        fw_compiler, bw_compiler or fw_compiler, inference_compiler or fw_compiler, partition_fn, decompositions
    )

    def compiled(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        with lock:
            if not state:
                state.update(_first_call(fn, flat, spec, stages, bool(dynamic)))
        if spec != state["in_spec"] or _signature(flat, bool(dynamic)) != state["signature"]:
            raise CompileError(
                "this function was compiled for inputs of another structure, dtype or size; "
                "call aot_function again for these, or pass dynamic=True if only sizes differ"
            )
        return pytree.tree_unflatten(state["run"](*flat), state["out_spec"][0])

    return compiled


def _first_call(
    fn: Callable[..., Any], flat: list[Any], spec: pytree.TreeSpec, stages: Stages, dynamic: bool
) -> dict[str, Any]:
    out_spec: list[pytree.TreeSpec] = []

    def flat_fn(*values: Any) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(list(values), spec)
        outputs, structure = pytree.tree_flatten(fn(*args, **kwargs))
        out_spec[:] = [structure]
        return outputs

    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    fakes = [mode.from_tensor(v, static_shapes=not dynamic) if isinstance(v, torch.Tensor) else v for v in flat]
    run = compile_flat(
        flat_fn, fakes, flat, CompileContext(read_environment().options(), Recorder(), "aot_function"), stages
    )
    return {"run": run, "in_spec": spec, "out_spec": out_spec, "signature": _signature(flat, dynamic)}


def _stages(
    forward: Compiler, backward: Compiler, inference: Compiler, partition_fn: Callable[..., Any], table: Any
) -> Stages:
    def split(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
        inputs = [node.meta.get("val") for node in joint.graph.nodes if node.op == "placeholder"]
        count = len(metadata.tangents)
        primals, tangents = (inputs[:-count], inputs[-count:]) if count else (inputs, [])
        parts = partition_fn(joint, (primals, tangents), num_fwd_outputs=metadata.num_forward_outputs)
        saved = _outputs(parts[0])[metadata.num_forward_outputs :]
        symints = sum(not isinstance(node.meta.get("val"), torch.Tensor) for node in saved)
        return Split(parts[0], parts[1], len(saved) - symints, symints)

    def adapt(compiler: Compiler) -> Callable[[torch.fx.GraphModule, str, CompileContext], Boxed]:
        def compile_one(graph: torch.fx.GraphModule, name: str, ctx: CompileContext) -> Boxed:
            inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
            return _boxed(compiler(graph, inputs))

        return compile_one

    return Stages(dict(table or {}), split, adapt(inference), adapt(forward), adapt(backward))


def _outputs(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _boxed(compiled: Callable[..., Any]) -> Boxed:
    if getattr(compiled, "_boxed_call", False):
        return compiled

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return compiled(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _signature(flat: Sequence[Any], dynamic: bool) -> tuple[Any, ...]:
    """What a compiled function is specialised to, so that a call with other inputs cannot be silently wrong."""
    parts: list[Any] = [torch.is_grad_enabled()]
    for value in flat:
        if isinstance(value, torch.Tensor):
            layout = (value.dim(),) if dynamic else (tuple(value.shape), value.stride())
            parts.append((value.dtype, value.device, value.requires_grad, *layout))
        else:
            parts.append(value)
    return tuple(parts)
