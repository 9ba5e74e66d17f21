"""The two parts of a compile, with a graph in between that its user may change.

joint = aot_export_joint_with_descriptors(stack, module, (x,))
rewrite(joint.graph_module)
compiled = aot_compile_joint_with_descriptors(joint, fw_compiler=compiler)
y = compiled(*module.parameters(), *module.buffers(), x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from aotkit_aot_trace import descriptors
from aotkit_aot_trace.callables import FunctionalCall, named_tensors
from aotkit_aot_trace.descriptors import describe_graph
from aotkit_functionalize import GraphMetadata
from aotkit_partition import default_partition
from aotkit_runtime_wrappers import InputPlan

from ..driver.boxed import nop
from ..driver.compile import capture_function
from ..driver.context import Captured, CompileContext
from ..driver.run import run_captured
from ..driver.specializations import example_fakes, flat_function, with_constants
from ..driver.stages import Compiler, Partitioner, custom_stages
from .aot_function import settings_of_compile

__all__ = ["JointWithDescriptors", "aot_compile_joint_with_descriptors", "aot_export_joint_with_descriptors"]


@dataclass(frozen=True, slots=True)
class JointWithDescriptors:
    """A module captured for one call, forward and backward in one graph if anything needs a gradient.

    Attributes:
        graph_module: its placeholders and its output have descriptors; may be changed in place before it is compiled.
        metadata: the contract of the graph with its wrappers, which a change must keep.
        input_plan: how parameters, buffers and flat arguments become the graph's inputs.
        params_spec: full names of parameters, in the order in which the compiled function takes them.
        buffers_spec: the same of buffers.
        in_spec: structure of ``(args, kwargs)``.
        out_spec: structure of the result.
    """

    graph_module: torch.fx.GraphModule
    metadata: GraphMetadata
    input_plan: InputPlan
    params_spec: tuple[str, ...]
    buffers_spec: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    variable: tuple[int, ...]
    settings: CompileContext


def aot_export_joint_with_descriptors(
    stack: ExitStack,
    mod: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
) -> JointWithDescriptors:
    """Capture ``mod(*args, **kwargs)``: aliases, mutations and tensor subclasses as in a compile, unlike other exports.

    What stands where is told by the descriptors, not by positions. Values that are no tensors are fixed. ``stack`` is
    torch's parameter; nothing has to stay open between the halves here. Raises what a compile raises.
    """
    named = named_tensors(mod)
    flat, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    full = [*named.values(), *flat]
    call = FunctionalCall(mod, list(named), strict_out_tuple=False, record_stack=True)
    function, out_spec = flat_function(call, in_spec, len(named))
    _, fakes = example_fakes(full, dynamic=False, num_static=len(named))
    function, variable = with_constants(function, full, fakes)
    stages = custom_stages(nop, None, None, default_partition, decompositions)
    ctx = settings_of_compile(stages, len(named), keep_inference_input_mutations)
    captured = capture_function(function, [fakes[i] for i in variable], [full[i] for i in variable], ctx)
    parameters = tuple(name for name, _ in mod.named_parameters(remove_duplicate=False))
    buffers = tuple(list(named)[len(parameters) :])
    describe_graph(
        captured.graph.graph, captured.metadata, _graph_inputs(captured.inputs, parameters, buffers, variable)
    )
    return JointWithDescriptors(
        captured.graph,
        captured.metadata,
        captured.inputs,
        parameters,
        buffers,
        in_spec,
        out_spec(),
        tuple(variable),
        ctx,
    )


def aot_compile_joint_with_descriptors(
    jd: JointWithDescriptors,
    *,
    partition_fn: Partitioner = default_partition,
    fw_compiler: Compiler = nop,
    bw_compiler: Compiler | None = nop,
) -> Callable[..., Any]:
    """Compile a captured graph, changed or not. Returns ``f(*parameters, *buffers, *args, **kwargs)``."""
    stages = custom_stages(fw_compiler, bw_compiler, None, partition_fn, None)
    captured = Captured(jd.graph_module, jd.metadata, jd.input_plan, None)
    run = run_captured(captured, replace(jd.settings, stages=stages))
    leading = len(jd.params_spec) + len(jd.buffers_spec)
    names = _keyword_order(jd.in_spec)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        ordered = {name: kwargs[name] for name in names if name in kwargs} | kwargs
        flat, spec = pytree.tree_flatten((args[leading:], ordered))
        if spec != jd.in_spec:
            raise TypeError(f"the arguments have the structure {spec}; this was captured for {jd.in_spec}")
        full = [*args[:leading], *flat]
        return pytree.tree_unflatten(run(*(full[i] for i in jd.variable)), jd.out_spec)

    return compiled


def _keyword_order(in_spec: pytree.TreeSpec) -> list[str]:
    return list(in_spec.children()[1].context)


def _graph_inputs(
    plan: InputPlan, parameters: Sequence[str], buffers: Sequence[str], variable: Sequence[int]
) -> list[descriptors.AOTInput]:
    """Descriptors of the graph's inputs: synthetic bases first, then the other distinct arguments."""
    leading = len(parameters) + len(buffers)
    named = [*map(descriptors.ParamAOTInput, parameters), *map(descriptors.BufferAOTInput, buffers)]
    arguments: list[descriptors.AOTInput] = [
        named[i] if i < leading else descriptors.PlainAOTInput(i - leading) for i in variable
    ]
    bases: list[descriptors.AOTInput] = []
    for base in plan.bases:
        kind = descriptors.SyntheticBaseAOTInput if base.flat else descriptors.ViewBaseAOTInput
        bases.append(kind(arguments[base.members[0]]))
    return [*bases, *(arguments[i] for i in plan.others)]
