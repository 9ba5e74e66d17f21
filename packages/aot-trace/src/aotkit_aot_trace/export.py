"""Graphs that leave this stack: of a module with its signature, or of a flat function, with or without a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aotkit_functionalize import GraphMetadata, OverlappingMutation, records
from aotkit_functionalize.tracing import fake_twin

from ._torch_compat import drop_dead_code
from .api import Capture, TraceOptions, capture
from .attributes import detect_attribute_assignment
from .exported import ExportRequest
from .functional_call import FunctionalCall, named_tensors
from .pre_dispatch import capture_pre_dispatch
from .signature import BackwardSignature, GraphSignature, graph_signature

__all__ = [
    "BackwardSignature",
    "ExportError",
    "GraphSignature",
    "aot_export_function",
    "aot_export_joint_simple",
    "aot_export_module",
]

Table = Mapping[Any, Callable[..., Any]] | None
_NO_MUTATION = records.MutationKind.NONE
_FRESH = (records.OutputKind.FRESH, records.OutputKind.CONSTANT, records.OutputKind.SYMINT)
_METADATA = (records.MutationKind.METADATA, records.MutationKind.DATA_AND_METADATA)


class ExportError(RuntimeError):
    """A function cannot be exported: what an exported graph returns could not express what the function does."""


def aot_export_module(
    mod: nn.Module,
    args: Iterable[Any],
    *,
    decompositions: Table = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[torch.fx.GraphModule, GraphSignature]:
    """Export ``mod`` called with ``args`` and ``kwargs`` as one functional graph; torch's function of the same name.

    The graph takes ``(*parameters, *buffers, *user inputs)``, all flat, and returns ``(*new values of mutated inputs,
    *user outputs)``, with ``trace_joint`` also one gradient per parameter and input that requires grad, of the scalar
    loss at ``output_loss_index``. The caller applies the new values. With ``pre_dispatch`` operators that autograd
    would take apart, and changes of grad mode and autocast, stay in the graph. ``dynamic_shapes``: sizes of inputs are
    symbolic; by default if they are fake tensors with symbols.

    Raises:
        ExportError: what the module does has no place in such a graph; says what to do.
        ValueError: the module stores a tensor on itself that is no buffer.
        Unsupported: the module cannot be captured at all.
    """
    if pre_dispatch and trace_joint:
        raise ExportError("pre_dispatch is not supported when trace_joint is True. Export the two graphs one by one")
    named = named_tensors(mod)
    parameters, buffers = _names(mod.named_parameters), _names(mod.named_buffers)
    call = FunctionalCall(mod, [*parameters, *buffers], strict_out_tuple=False, record_stack=True)
    wanted = _LossOutput(call, output_loss_index) if trace_joint else _TupleOutput(call)
    # Under no_grad, so that a graph without backward is traced; pre_dispatch keeps what the module does to grad mode.
    mode = nullcontext() if trace_joint or pre_dispatch else torch.no_grad()
    request = ExportRequest(loss=output_loss_index) if trace_joint else ExportRequest()
    full_args = (*named.values(), *args)
    how = _How(decompositions, request, pre_dispatch, dynamic_shapes, num_static=len(named))
    with mode, detect_attribute_assignment(mod) if not isinstance(mod, torch.fx.GraphModule) else nullcontext():
        captured, specs = _export(wanted, full_args, dict(kwargs or {}), how)
    _check_exportable(captured.metadata, joint=trace_joint)
    graph = captured.graph
    if trace_joint:
        _keep_gradients(graph, captured.metadata)
    loss = output_loss_index if trace_joint else None
    return graph, graph_signature(graph, captured.metadata, parameters, buffers, specs, loss)


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Table = None,
) -> torch.fx.GraphModule:
    """Export a flat function whose graph has the function's own calling convention; torch's of the same name.

    Without ``trace_joint`` the graph takes and returns what ``func`` does. With it, it takes the tangents of the
    differentiable outputs too, and returns one gradient or ``None`` per argument after the outputs.

    Raises :class:`ExportError` where that cannot be: mutated arguments, outputs that alias arguments or one another,
    nested arguments or outputs.
    """
    mode = nullcontext() if trace_joint else torch.no_grad()
    how = _How(decompositions, ExportRequest(tangents=trace_joint), num_static=num_params_buffers)
    with mode:
        captured, (in_spec, out_spec) = _export(func, args, {}, how)
    _check_exportable(captured.metadata, joint=trace_joint)
    _check_simple(captured.metadata, in_spec.children()[0], out_spec)
    return captured.graph


def aot_export_function(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    decompositions: Table = None,
    loss: int | None = None,
    tangents: bool = False,
    num_params_buffers: int = 0,
    dynamic_shapes: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[torch.fx.GraphModule, GraphMetadata, pytree.TreeSpec, pytree.TreeSpec]:
    """What the other exports are made of: ``(graph, metadata, in_spec, out_spec)``.

    ``in_spec`` is the structure of ``(args, kwargs)``. With ``loss`` (an index among the flat outputs) or ``tangents``
    the graph computes gradients, one or ``None`` per flat input after the outputs.
    """
    how = _How(decompositions, ExportRequest(loss, tangents), False, dynamic_shapes, num_params_buffers)
    captured, (in_spec, out_spec) = _export(func, args, dict(kwargs or {}), how)
    _check_exportable(captured.metadata, joint=captured.metadata.is_training)
    return captured.graph, captured.metadata, in_spec, out_spec


@dataclass(frozen=True, slots=True)
class _How:
    decompositions: Table
    request: ExportRequest
    pre_dispatch: bool = False
    dynamic_shapes: bool | None = None
    num_static: int = 0


def _export(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], how: _How
) -> tuple[Capture, tuple[pytree.TreeSpec, pytree.TreeSpec]]:
    flat, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    out_specs: list[pytree.TreeSpec] = []

    def flat_fn(*values: Any) -> list[Any]:
        given, named = pytree.tree_unflatten(list(values), in_spec)
        outputs, spec = pytree.tree_flatten(func(*given, **named))
        out_specs[:] = [spec]
        return outputs

    _refuse_subclasses(flat)
    mode, fakes = _fakes(_distinct(flat), how)
    if how.pre_dispatch:
        return capture_pre_dispatch(flat_fn, fakes, mode, how.decompositions or {}), (in_spec, out_specs[0])
    options = TraceOptions(
        training=None if how.request.loss is not None or how.request.tangents else False, export=how.request
    )
    try:
        captured = capture(flat_fn, fakes, decompositions=how.decompositions, fake_mode=mode, options=options)
    except OverlappingMutation as overlap:
        raise ExportError(
            "Encountered duplicated inputs that are mutated in the graph you are trying to export: "
            f"{overlap.what}. An exported graph has one input per argument; pass arguments that do not share memory"
        ) from overlap
    return captured, (in_spec, out_specs[0])


def _refuse_subclasses(flat: Sequence[Any]) -> None:
    for value in flat:
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            raise ExportError(
                "aot_export is not currently supported with traceable tensor subclass.\n"
                "If you need this feature, please comment on <CREATE_ISSUE_LINK>"
            )


def _distinct(flat: Sequence[Any]) -> list[Any]:
    """A tensor that is passed twice (a tied weight) becomes two inputs of the graph, over the same memory."""
    seen: set[int] = set()
    result = []
    for value in flat:
        if isinstance(value, torch.Tensor) and id(value) in seen:
            value = value.detach().requires_grad_(value.requires_grad)
        seen.add(id(value))
        result.append(value)
    return result


def _fakes(flat: Sequence[Any], how: _How) -> tuple[FakeTensorMode, list[Any]]:
    mode = next((v.fake_mode for v in flat if isinstance(v, FakeTensor)), None)
    dynamic = how.dynamic_shapes if how.dynamic_shapes is not None else False
    mode = mode or FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)

    def fake(value: Any, index: int) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return fake_twin(value, mode, static=not dynamic or index < how.num_static)

    return mode, [fake(value, index) for index, value in enumerate(flat)]


@dataclass(frozen=True, slots=True)
class _TupleOutput:
    run: Callable[..., Any]

    def __call__(self, *flat: Any, **kwargs: Any) -> Any:
        result = self.run(*flat, **kwargs)
        if not isinstance(result, tuple | list):
            raise ExportError(
                f"Graph output must be a tuple(). This module returns a {type(result).__name__}; return a tuple"
            )
        return result


@dataclass(frozen=True, slots=True)
class _LossOutput:
    """Runs the forward and checks that the loss is one. ``loss`` is its index among the outputs."""

    run: Callable[..., Any]
    loss: int | None

    def __call__(self, *flat: Any, **kwargs: Any) -> Any:
        result = self.run(*flat, **kwargs)
        if self.loss is None:
            raise ExportError(
                "If trace_joint=Trueit is required that one of your forward outputs must be a scalar loss.\n"
                "You must specify the which (index) output is the loss with output_loss_index."
            )
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        if not isinstance(outputs, tuple | list):
            raise ExportError(
                "Expected forward output to be either a tensor or a list/tuple of tensors. "
                f"found {type(outputs)}. Return the loss and what else is wanted as a tuple"
            )
        _check_index(outputs, self.loss)
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad and index != self.loss:
                raise ExportError(
                    "Found an output of the forward that requires gradients, that was not the scalar loss: the output "
                    f"at index {index}, while the loss is at index {self.loss}. Gradients are computed of the loss "
                    "alone; detach() the other outputs"
                )
        _check_loss(outputs[self.loss], self.loss)
        return outputs


def _check_index(outputs: Sequence[Any], index: int) -> None:
    if not 0 <= index < len(outputs) or not isinstance(outputs[index], torch.Tensor):
        raise ExportError(
            f"output_loss_index is {index}, and there is no tensor among the {len(outputs)} outputs there"
        )


def _check_loss(loss: torch.Tensor, index: int) -> None:
    if not loss.requires_grad:
        raise ExportError(
            f"The output at index {index} was marked as the loss, but it does not require gradients. "
            "Do parameters or inputs that require grad lead to it, and is grad mode on?"
        )
    if loss.numel() != 1:
        raise ExportError(
            f"We require the output marked as the loss (at index {index}) to be a scalar, but it has shape "
            f"{tuple(loss.shape)}. Reduce it, for example by mean()"
        )


def _check_exportable(metadata: GraphMetadata, *, joint: bool) -> None:
    for info in metadata.inputs:
        if info.mutation in _METADATA:
            raise ExportError(
                "Found an input that received a metadata mutation, through e.g. a call to `.resize_()` or "
                "`.transpose_()`.\nThis is currently banned in the aot_export workflow. If you need this "
                "functionality, please file a github issue."
            )
        if joint and info.mutation is not _NO_MUTATION and info.meta is not None and info.meta.requires_grad:
            raise ExportError(
                "Found a graph input that requires gradients, and received a mutation.\nThis is currently banned in "
                "the aot_export workflow. If you need this functionality, please file a github issue."
            )


def _check_simple(metadata: GraphMetadata, in_spec: pytree.TreeSpec, out_spec: pytree.TreeSpec) -> None:
    prefix = "aot_export_joint_simple"
    mutated = [info.index for info in metadata.inputs if info.mutation is not _NO_MUTATION]
    if mutated:
        raise ExportError(
            f"{prefix} does not support input mutations. Written to: arguments {mutated}; copy them first"
        )
    aliases = [info.index for info in metadata.outputs if info.kind not in _FRESH]
    if aliases:
        raise ExportError(
            f"{prefix} does not support outputs that alias inputs. Views, arguments or views of one another: outputs "
            f"{aliases}; clone them"
        )
    for spec, what, each in ((in_spec, "inputs", "inputs"), (out_spec, "outputs", "outputs")):
        if spec.is_leaf():
            raise ExportError(f"{prefix} requires {what} to be a single list/tuple. Their structure is {spec}")
        if not all(child.is_leaf() for child in spec.children()):
            raise ExportError(f"{prefix} requires individual {each} not to be pytrees. Their structure is {spec}")


def _keep_gradients(graph: torch.fx.GraphModule, metadata: GraphMetadata) -> None:
    """Leave the gradients of the inputs that have one as the last outputs of the graph."""
    (output,) = graph.graph.find_nodes(op="output")
    values = list(output.args[0])
    forward, gradients = values[: metadata.num_forward_outputs], values[metadata.num_forward_outputs :]
    kept = [gradients[index] for index in metadata.differentiable_inputs]
    missing = [i for i, gradient in zip(metadata.differentiable_inputs, kept, strict=True) if gradient is None]
    if missing:
        raise ExportError(
            f"Found a parameter that did not receive a gradient: inputs {missing} require grad without influence on "
            "the loss. Turn requires_grad off for them"
        )
    output.args = (type(output.args[0])([*forward, *kept]),)
    drop_dead_code(graph.graph)
    graph.recompile()


def _names(named: Callable[..., Any]) -> list[str]:
    return [name for name, _ in named(remove_duplicate=False)]
