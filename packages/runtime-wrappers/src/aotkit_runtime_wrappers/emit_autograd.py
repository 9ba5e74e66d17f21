"""A wrapper plan of a training graph -> the forward and backward of its ``torch.autograd.Function``.

Note [What goes through autograd]
    ``_apply`` is given the list of all graph inputs as one opaque argument, and after it only the inputs
    that get a gradient; of the forward outputs only the differentiable ones come back as its results, the
    others are left in the list. So autograd wraps and marks nothing that it has no use for, and no output
    has to be marked non-differentiable.

Note [Tangents]
    ``set_materialize_grads(False)``: an output that the loss does not depend on arrives as ``None``. It
    becomes zeros only where the compiled backward is run, and not at all if every tangent is ``None``, nor
    where there is a backward that does without it (:class:`.LazyBackward`). Inputs whose gradients come from
    such outputs only get ``None``, as in eager mode: an optimizer leaves them alone. A tangent is used as it comes if
    it has the strides that the backward was compiled for and is a plain tensor; else
    :func:`.runtime.coerce_tangent` takes care of it.
"""

from __future__ import annotations

from ._torch_compat import dtype_from_name
from .dims import render_tuple
from .emit import emit_unpack, guarded_call
from .plan import CallSpec, TangentSpec
from .source import Source

__all__ = ["emit_autograd"]


def emit_autograd(call: CallSpec, out: Source) -> None:
    """Write ``def forward(ctx, box, ..)`` and ``def backward(ctx, ..)``."""
    _emit_forward(call, out)
    out.lines.append("")
    _emit_backward(call, out)
    out.lines.append("")


def _emit_forward(call: CallSpec, out: Source) -> None:
    num_forward, num_tensors = call.num_forward_outputs, call.num_saved_tensors
    inputs = ", ".join(f"g{i}" for i in call.differentiable_inputs)
    out.add(f"def forward(ctx, box, {inputs}):", 0)
    for binding in call.backward_symbols:
        if not binding.of_output:
            position = call.graph_inputs.index(binding.value)
            out.add(f"{binding.symbol} = {binding.expression(f'box[{position}]')}")
    if call.unsaved_inputs:
        out.add(f"ctx.unsaved = _remember(box, {call.unsaved_inputs})")
    if call.scalar_inputs:
        out.add(f"ctx.scalars = [{', '.join(f'box[{i}]' for i in call.scalar_inputs)}]")
    if call.backward_mutated_inputs:
        out.add(f"ctx.late = [{', '.join(f'box[{i}]' for i in call.backward_mutated_inputs)}]")
    if call.kept_inputs:
        if call.keeps_values:
            out.add(f"kept = [{', '.join(f'box[{i}]' for i in call.kept_inputs)}]")
        else:
            out.add(f"kept = _histories(box, {call.kept_inputs})")
    if call.written_inputs and num_tensors:
        out.add(f"written = [{', '.join(f'box[{i}]' for i in call.written_inputs)}]")
    if call.donated:
        out.add("given = _storages(box)")
    out.add(f"result = {guarded_call('_forward', 'box')}")
    emit_unpack(num_forward + num_tensors + call.num_saved_symints, num_forward, out, 1)
    if call.own_outputs:
        out.add(f"if {' or '.join(f'fw{i}._is_view()' for i in call.own_outputs)}:")
        out.add(f"result = _own_outputs(result, {call.own_outputs}, {num_forward}, {num_forward + num_tensors})", 2)
        out.add(f"[{', '.join(f'fw{i}' for i in range(num_forward))}] = result[:{num_forward}]", 2)
    for position in call.repeated_outputs:
        out.add(f"fw{position} = _unsafe_view(fw{position})")
    if call.donated:
        saved = f"result[:{num_forward}], result[{num_forward}:{num_forward + num_tensors}]"
        out.add(f"ctx.own = _own_memory(given, {saved}, {call.donated})")
    if num_tensors or call.kept_inputs:
        out.add(f"ctx.save_for_backward({_saved_tensors(call)})")
        out.add(f"ctx.packed = _layouts_if_packed({_saved_tensors(call, copied=False)})")
    if not call.num_saved_symints:
        out.add("ctx.symints = ()")
    else:
        out.add(f"ctx.symints = result[{num_forward + num_tensors}:]")
    for binding in call.backward_symbols:
        if binding.of_output:
            out.add(f"{binding.symbol} = {binding.expression(binding.value)}")
    if call.backward_symbols:
        out.add(f"ctx.symbols = [{', '.join(b.symbol for b in call.backward_symbols)}]")
    out.add("ctx.set_materialize_grads(False)")
    plain = [f"fw{i}" for i in range(num_forward) if i not in call.differentiable_outputs]
    out.add(f"box[:] = [{', '.join(plain)}]")
    out.add(f"return {', '.join(f'fw{i}' for i in call.differentiable_outputs)}")


def _saved_tensors(call: CallSpec, *, copied: bool = True) -> str:
    """What is saved, as arguments; not ``copied``: as one list, whose tensors may be those that are copied for it."""
    first, end = call.num_forward_outputs, call.num_forward_outputs + call.num_saved_tensors
    everything = f"result[{first}:]" if not call.num_saved_symints else f"result[{first}:{end}]"
    if not copied:
        kept = call.kept_inputs
        return f"[*{everything}, *kept]" if kept and call.num_saved_tensors else "kept" if kept else everything
    saved = f"*_keep_values({everything}, written)" if call.written_inputs else f"*{everything}"
    return ", ".join(([saved] if call.num_saved_tensors else []) + (["*kept"] if call.kept_inputs else []))


def _emit_backward(call: CallSpec, out: Source) -> None:
    count = len(call.differentiable_inputs)
    tangents = [f"tg{i}" for i in call.differentiable_outputs]
    out.add(f"def backward(ctx, {', '.join(tangents)}):", 0)
    out.add(f"if {' and '.join(f'{t} is None' for t in tangents)}:")
    out.add(f"return {', '.join(['None'] * (count + 1))}", 2)
    out.add("if _forward_ad._current_level >= 0:")
    out.add(f"_refuse_duals([{', '.join(tangents)}])", 2)
    if call.backward_symbols:
        out.add(f"[{', '.join(b.symbol for b in call.backward_symbols)}] = ctx.symbols")
    in_order = [f"tg{t.forward_output}" for t in call.tangents]
    several = len(in_order) > 1
    if several:
        out.add(f"missing = ({', '.join(f'{t} is None' for t in in_order)})")
    foreign = f"return _with_foreign_tangents(ctx, [{', '.join(in_order)}], {'missing' if several else '()'})"
    out.add(f"if {' or '.join(f'_is_transformed({t})' for t in tangents)}:")
    out.add(foreign, 2)
    if several:
        out.add("grad = _is_grad_enabled()")
        out.add("run, fills = (None, False) if grad else _backward.runs.get(missing) or _backward.choose(missing)")
    for tangent in call.tangents:
        if not tangent.nested:
            _emit_tangent(tangent, several, out)
            out.add(f"if _is_foreign(tg{tangent.forward_output}):", 2)
            out.add(foreign, 3)
    out.add("if grad:" if several else "if _is_grad_enabled():")
    out.add(f"return _gradients_with_history(ctx, [{', '.join(in_order)}])", 2)
    if not several:
        out.add("run = _backward.compiled or _backward.get()")
    parts = ["*ctx.symints"] if call.num_saved_symints else []
    only = f"[:{call.num_saved_tensors}]" if call.kept_inputs else ""
    saved = f"*(ctx.saved_tensors if ctx.packed is None else _unpacked(ctx)){only}"
    parts += [saved] if call.num_saved_tensors else []
    late = ["*ctx.late"] if call.backward_mutated_inputs else []
    out.add(f"box = [{', '.join(parts + in_order + late)}]")
    if call.donated:
        out.add(f"_keep_donated(box, {call.num_saved_symints}, {call.donated}, ctx.own)")
    if call.num_saved_tensors or call.kept_inputs:
        out.add("ctx.maybe_clear_saved_tensors()")
    out.add(f"del {', '.join(tangents)}")
    out.add(f"grads = {guarded_call('run', 'box')}")
    out.add(f"if len(grads) != {len(call.graph_inputs)}:")
    out.add(f'_wrong_count("gradients", {len(call.graph_inputs)}, len(grads))', 2)
    if call.backward_mutated_inputs:
        values = ", ".join(f"grads[{i}]" for i in call.backward_mutated_inputs)
        out.add(f"_write_late(ctx.late, [{values}], {call.backward_version_steps})")
    out.add(f"return None, {', '.join(f'grads[{i}]' for i in call.differentiable_inputs)}")


def _emit_tangent(tangent: TangentSpec, may_be_none: bool, out: Source) -> None:
    position, meta = tangent.forward_output, tangent.meta
    name, sizes, strides = f"tg{position}", render_tuple(meta.sizes), render_tuple(meta.strides)
    traced = dtype_from_name(meta.dtype)
    dtype = out.constant(traced) if may_be_none else ""
    unusual = f"{name}.stride() != {strides} or type({name}) is not _Tensor or {name}.is_neg()"
    unusual += f" or {name}._is_zerotensor()" + (f" or {name}.is_conj()" if traced.is_complex else "")
    if may_be_none:
        out.add(f"if {name} is None:")
        out.add(f"{name} = _zero_tangent({sizes}, {strides}, {dtype}, {meta.device!r}) if fills else None", 2)
    out.add(f"{'elif' if may_be_none else 'if'} {unusual}:")
    out.add(f"{name} = _coerce_tangent({name}, {position}, {sizes}, {strides})", 2)
