"""A wrapper plan run one operation at a time: slow, obviously right, the oracle of the generated code.

Shares with :mod:`.emit` the plan and the small functions of :mod:`.runtime`, and nothing of the generation: of each
operation it takes ``run``, and :mod:`.emit` takes ``emit``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._observer import SILENT, Observer
from ._torch_compat import autocast_enabled, dtype_from_name, forward_ad, transforms_active, unsafe_view
from .bind import backward_of
from .boxed import BoxedCallable, ensure_boxed
from .dims import evaluate_all
from .donated import keep_donated, own_memory, storages
from .double_backward import Gradients, drop_values, gradients_with_history, histories, remember
from .enabled_grad import with_grad_enabled
from .forward_adapters import Around, RandomSource, interpret_around
from .lazy_backward import LazyBackward
from .packed import layouts_if_packed, unpacked
from .plan import CallSpec, WrapperPlan
from .runtime import (
    coerce_tangent,
    keep_values,
    own_outputs,
    refuse_duals,
    refuse_transform,
    without_autocast,
    write_late,
    wrong_count,
    zero_tangent,
)
from .subclasses.interpret import interpret_subclasses

__all__ = ["interpret"]


def interpret(
    plan: WrapperPlan,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    observer: Observer = SILENT,
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
        if forward_ad._current_level >= 0:
            refuse_duals(args)
        values: dict[str, Any] = {f"in{i}": value for i, value in enumerate(args)}
        for operation in plan.prologue:
            operation.run(values)
        box = [values[name] for name in plan.call.graph_inputs]
        args.clear()
        if lazy is not None:
            outputs = _run_training(plan.call, compiled, lazy, box, gradients)
        else:
            outputs = _run_inference(plan.call, compiled, box)
        values.update({f"fw{i}": value for i, value in enumerate(outputs)})
        for operation in plan.epilogue:
            operation.run(values)
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
    apply: Callable[..., Any] = _InterpretedGraph.apply
    if call.enables_grad:
        apply = with_grad_enabled(apply, _InterpretedGraph.forward)
    results = apply(call, compiled, (lazy, with_history), box, plain, *differentiable)
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
        early = {b.symbol: b.read(named[b.value]) for b in call.backward_symbols if not b.of_output}
        ctx.unsaved = remember(box, call.unsaved_inputs)
        ctx.scalars = [box[i] for i in call.scalar_inputs]
        kept = [box[i] for i in call.kept_inputs] if call.keeps_values else histories(box, call.kept_inputs)
        ctx.late = [box[i] for i in call.backward_mutated_inputs]
        written = [box[i] for i in call.written_inputs]
        given = storages(box) if call.donated else set()
        results = list(_run_compiled(compiled, box))
        first, end = call.num_forward_outputs, call.num_forward_outputs + call.num_saved_tensors
        if len(results) != end + call.num_saved_symints:
            wrong_count("forward results", end + call.num_saved_symints, len(results))
        results = own_outputs(results, call.own_outputs, first, end)
        early.update({b.symbol: b.read(results[int(b.value[2:])]) for b in call.backward_symbols if b.of_output})
        ctx.symbols = [early[b.symbol] for b in call.backward_symbols]
        for position in call.repeated_outputs:
            results[position] = unsafe_view(results[position])
        if call.donated:
            ctx.own = own_memory(given, results[:first], results[first:end], call.donated)
        ctx.packed = layouts_if_packed([*results[first:end], *kept])
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
        if forward_ad._current_level >= 0:
            refuse_duals(incoming)
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
        box = [*ctx.symints, *unpacked(ctx)[: call.num_saved_tensors], *tangents, *ctx.late]
        keep_donated(box, len(ctx.symints), call.donated, getattr(ctx, "own", ()))
        ctx.maybe_clear_saved_tensors()
        grads = _run_compiled(run, box)
        if len(grads) != len(call.graph_inputs):
            wrong_count("gradients", len(call.graph_inputs), len(grads))
        write_late(ctx.late, [grads[i] for i in call.backward_mutated_inputs], call.backward_version_steps)
        without = call.unreached([by_output[spec.forward_output] is None for spec in call.tangents])
        return (*nothing, *(None if i in without else grads[i] for i in call.differentiable_inputs))
