"""A wrapper plan run one operation at a time: slow, obviously right, the oracle of the generated code.

Shares with :mod:`.emit` the plan and the small functions of :mod:`.runtime`, and nothing of the generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import advance_version, autocast_enabled, dtype_from_name, transforms_active, unsafe_view
from .around_forward import Around, RandomSource, interpret_around, read_value
from .bind import backward_of
from .boxed import BoxedCallable, ensure_boxed
from .checks import check_value
from .contract import with_lazy_bits
from .dims import evaluate, evaluate_all
from .donated import keep_donated, own_memory, storages
from .double_backward import Gradients, drop_values, gradients_with_history, histories, remember
from .lazy_backward import LazyBackward
from .observer import Observer
from .operations import (
    AnnounceWrites,
    BindSymbol,
    BuildBase,
    BumpVersion,
    CheckAliases,
    CheckDuplicate,
    CheckPlace,
    CheckStrides,
    CheckValue,
    CopyBack,
    MarkDynamic,
    NoteVersion,
    Operation,
    Regenerate,
    Resize,
    ResizeStorage,
    Restride,
    SetGradMode,
    SetLazyBits,
    SetRequiresGrad,
    SetStorage,
    SetVersion,
)
from .overlap import refuse_new_aliases, refuse_place
from .plan import CallSpec, WrapperPlan
from .runtime import (
    announce_writes,
    check_strides,
    coerce_tangent,
    keep_values,
    mark_dynamic,
    own_outputs,
    refuse_transform,
    regenerate,
    set_versions,
    versions_of,
    with_history,
    without_autocast,
    write_late,
    wrong_count,
    wrong_duplicate,
    zero_tangent,
)
from .subclass_interpret import interpret_subclasses
from .synthetic_base import base_of

__all__ = ["interpret"]


def interpret(
    plan: WrapperPlan,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    observer: Observer | None = None,
    gradients: Gradients | None = None,
    random: RandomSource | None = None,
) -> BoxedCallable:
    """What :func:`.bind` returns, without generated code. Same arguments, same results, same errors."""
    lazy = backward_of(backward, plan.call, observer) if plan.call.training else None
    code = interpret_around(plan.call, Around(ensure_boxed(forward), lazy), random)
    compiled, lazy = code.forward, code.backward
    if plan.call.subclasses is not None:
        compiled, lazy = interpret_subclasses(plan.call.subclasses, compiled, lazy)

    def call(args: list[Any]) -> list[Any]:
        if len(args) != plan.num_inputs:
            wrong_count("arguments", plan.num_inputs, len(args))
        if transforms_active():
            refuse_transform()
        values: dict[str, Any] = {f"in{i}": value for i, value in enumerate(args)}
        for operation in plan.prologue:
            _run(operation, values)
        box = [values[name] for name in plan.call.graph_inputs]
        args.clear()
        if lazy is not None:
            outputs = _run_training(plan.call, compiled, lazy, box, gradients)
        else:
            outputs = _run_inference(plan.call, compiled, box)
        values.update({f"fw{i}": value for i, value in enumerate(outputs)})
        for operation in plan.epilogue:
            _run(operation, values)
        return [r.constant if r.value is None else values[r.value] for r in plan.returns]

    call._boxed_call = True  # type: ignore[attr-defined]
    call.plan = plan  # type: ignore[attr-defined]
    return call


def _run_compiled(compiled: BoxedCallable, box: list[Any]) -> Any:
    return without_autocast(compiled, box) if autocast_enabled() else compiled(box)


def _run_inference(call: CallSpec, compiled: BoxedCallable, box: list[Any]) -> list[Any]:
    with torch.no_grad():
        outputs = list(_run_compiled(compiled, box))
        if len(outputs) != call.num_forward_outputs:
            wrong_count("forward results", call.num_forward_outputs, len(outputs))
        outputs = [unsafe_view(o) if i in call.repeated_outputs else o for i, o in enumerate(outputs)]
        return [unsafe_view(o) if i in call.own_outputs and o._is_view() else o for i, o in enumerate(outputs)]


def _run_training(
    call: CallSpec, compiled: BoxedCallable, lazy: LazyBackward, box: list[Any], gradients: Gradients | None
) -> list[Any]:
    plain: dict[int, Any] = {}
    differentiable = [box[i] for i in call.differentiable_inputs]
    with_history = gradients_with_history(call, lazy, gradients)
    with torch.set_grad_enabled(torch.is_grad_enabled() or call.enables_grad):
        results = _InterpretedGraph.apply(call, compiled, (lazy, with_history), box, plain, *differentiable)
    if call.kept_inputs and not call.keeps_values:
        drop_values(results[0].grad_fn, call.num_saved_tensors)
    outputs = dict(plain)
    outputs.update(zip(call.differentiable_outputs, results, strict=True))
    return [outputs[i] for i in range(call.num_forward_outputs)]


class _InterpretedGraph(torch.autograd.Function):
    """One class for every plan; the plan comes in as an argument."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CallSpec,
        compiled: BoxedCallable,
        backwards: tuple[LazyBackward, Callable[..., Any]],
        box: list[Any],
        plain: dict[int, Any],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call, (ctx.lazy, ctx.with_history) = call, backwards
        named = dict(zip(call.graph_inputs, box, strict=True))
        early = {b.symbol: read_value(b, named[b.value]) for b in call.backward_symbols if not b.of_output}
        ctx.unsaved = remember(box, call.unsaved_inputs)
        ctx.scalars = [box[i] for i in call.scalar_inputs]
        kept = [box[i] for i in call.kept_inputs] if call.keeps_values else histories(box, call.kept_inputs)
        ctx.late = [box[i] for i in call.late_inputs]
        written = [box[i] for i in call.written_inputs]
        given = storages(box) if call.donated else set()
        results = list(_run_compiled(compiled, box))
        first, end = call.num_forward_outputs, call.num_forward_outputs + call.num_saved_tensors
        if len(results) != end + call.num_saved_symints:
            wrong_count("forward results", end + call.num_saved_symints, len(results))
        results = own_outputs(results, call.own_outputs, first, end)
        early.update({b.symbol: read_value(b, results[int(b.value[2:])]) for b in call.backward_symbols if b.of_output})
        ctx.symbols = [early[b.symbol] for b in call.backward_symbols]
        for position in call.repeated_outputs:
            results[position] = unsafe_view(results[position])
        if call.donated:
            ctx.own = own_memory(given, results[:first], results[first:end], call.donated)
        ctx.save_for_backward(*keep_values(results[first:end], written), *kept)
        ctx.symints = results[end:]
        ctx.set_materialize_grads(False)
        plain.update({i: o for i, o in enumerate(results[:first]) if i not in call.differentiable_outputs})
        return tuple(results[i] for i in call.differentiable_outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        call: CallSpec = ctx.call
        nothing = (None,) * 5
        if all(tangent is None for tangent in incoming):
            return (*nothing, *(None for _ in call.differentiable_inputs))
        symbols = dict(zip((b.symbol for b in call.backward_symbols), ctx.symbols, strict=True))
        by_output = dict(zip(call.differentiable_outputs, incoming, strict=True))
        tangents: list[Any] = []
        for spec in call.tangents:
            sizes, strides = (evaluate_all(dims, symbols) for dims in (spec.meta.sizes, spec.meta.strides))
            tangent = by_output[spec.forward_output]
            if spec.nested or (tangent is None and torch.is_grad_enabled()):
                tangents.append(tangent)
            elif tangent is None:
                device = torch.device(spec.meta.device)
                tangents.append(zero_tangent(sizes, strides, dtype_from_name(spec.meta.dtype), device))
            else:
                tangents.append(coerce_tangent(tangent, spec.forward_output, sizes, strides))
        if torch.is_grad_enabled():
            return (*nothing, *ctx.with_history(ctx, tangents)[1:])
        run = ctx.lazy.get()
        box = [*ctx.symints, *ctx.saved_tensors[: call.num_saved_tensors], *tangents, *ctx.late]
        keep_donated(box, len(ctx.symints), call.donated, getattr(ctx, "own", ()))
        ctx.maybe_clear_saved_tensors()
        grads = _run_compiled(run, box)
        if len(grads) != len(call.graph_inputs):
            wrong_count("gradients", len(call.graph_inputs), len(grads))
        write_late(ctx.late, [grads[i] for i in call.late_inputs], call.late_steps)
        without = call.unreached([by_output[spec.forward_output] is None for spec in call.tangents])
        return (*nothing, *(None if i in without else grads[i] for i in call.differentiable_inputs))


def _run(operation: Operation, values: dict[str, Any]) -> None:
    match operation:
        case CheckDuplicate(value=value, first=first):
            if values[value] is not values[first]:
                wrong_duplicate(value, first)
        case CheckPlace(value=value, offset=offset, nbytes=nbytes):
            refuse_place(values[value], value, offset, nbytes)
        case CheckAliases(mutated=mutated, others=others, among=among):
            tensors = [[values[name] for name in names] for names in (mutated, others)]
            refuse_new_aliases(tensors[0], tensors[1], among, " ".join(mutated), " ".join(others))
        case BindSymbol(symbol=symbol, value=value):
            values[symbol] = read_value(operation, values[value])
        case BuildBase(base=base, members=members, views=views):
            symbols = {name: values[name] for name in operation.symbols}
            values[base] = base_of(
                [values[name] for name in members], views, " ".join(members), operation.flat, symbols
            )
        case CheckStrides(value=value, strides=strides):
            check_strides(values[value], value, evaluate_all(strides, values))
        case CheckValue(value=value, what=what, meta=meta):
            expected = evaluate_all(meta.strides, values) if operation.check_strides else None
            grad = meta.requires_grad if operation.check_requires_grad else None
            check_value(values[value], what, evaluate_all(meta.sizes, values), expected, meta.dtype, meta.device, grad)
        case NoteVersion(result=result, value=value):
            [values[result]] = versions_of([values[value]])
        case SetVersion(value=value, before=before, steps=steps):
            set_versions([values[value]], [values[before]], [steps])
        case AnnounceWrites(values=written, times=times):
            announce_writes([values[name] for name in written], times)
        case SetStorage() | Resize() | ResizeStorage():
            _change_storage(operation, values)
        case Restride() | CopyBack() | BumpVersion():
            _write_back(operation, values)
        case Regenerate():
            values[operation.result] = _regenerate(operation, values)
        case SetLazyBits(value=value, conj=conj, neg=neg):
            values[value] = with_lazy_bits(values[value], conj, neg)
        case SetRequiresGrad(value=value, required=required):
            values[value].requires_grad_() if required else values[value].detach_()
        case MarkDynamic(value=value, dims=dims):
            mark_dynamic(values[value], dims)
        case SetGradMode(enabled=enabled):
            torch.set_grad_enabled(enabled)


def _change_storage(operation: SetStorage | Resize | ResizeStorage, values: dict[str, Any]) -> None:
    target = values[operation.value]
    if isinstance(operation, Resize):
        target.resize_(evaluate_all(operation.sizes, values))
    elif isinstance(operation, ResizeStorage):
        target.untyped_storage().resize_(evaluate(operation.num_bytes, values))
    else:
        source, view = values[operation.source].detach(), operation.view
        if view is not None:
            offset = source.storage_offset() + evaluate(view.offset_delta, values)
            source = source.as_strided(evaluate_all(view.sizes, values), evaluate_all(view.strides, values), offset)
        target.data = source


def _write_back(operation: Restride | CopyBack | BumpVersion, values: dict[str, Any]) -> None:
    target = values[operation.value]
    if isinstance(operation, BumpVersion):
        advance_version(target, operation.times)
        return
    if isinstance(operation, Restride):
        view = operation.view
        offset = target.storage_offset() + evaluate(view.offset_delta, values)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not operation.no_grad):
            target.as_strided_(evaluate_all(view.sizes, values), evaluate_all(view.strides, values), offset)
        return
    if operation.mode == "hidden":
        target = target.data
    with torch.set_grad_enabled(torch.is_grad_enabled() and operation.mode != "no_grad"):
        target.copy_(values[operation.source])


def _regenerate(operation: Regenerate, values: dict[str, Any]) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not operation.view.under_no_grad):
        return _view(operation, values)


def _view(operation: Regenerate, values: dict[str, Any]) -> Tensor:
    base, view = values[operation.base], operation.view
    if operation.detach and not view.detached:
        base = base.detach()
    sizes, strides = evaluate_all(view.sizes, values), evaluate_all(view.strides, values)
    delta = evaluate(view.offset_delta, values)
    result: Tensor
    if operation.base_dtype != view.dtype:
        result = regenerate(base, view, sizes, strides, delta)
    elif operation.method == "view":
        result = base.view(sizes)
    elif operation.method == "expand":
        result = base.expand(sizes)
    elif operation.method == "permute":
        result = base.permute(operation.permutation)
    else:
        result = base.as_strided(sizes, strides, base.storage_offset() + delta)
    result = with_lazy_bits(result, view.conj, view.neg)
    if view.detached:
        result = result.data if view.own_version else result.detach()
    if operation.history is not None:
        result = with_history(values[operation.history], result)
    return result.requires_grad_(True) if operation.set_requires_grad else result
