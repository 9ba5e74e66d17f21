"""A wrapper plan -> the source of one straight-line Python function.

Note [What emitted code looks like]
    No loop over metadata, no dictionary, no generic closure: each operation of the plan becomes a line or
    two over local variables of the same names. Names that start with an underscore are bound by
    :mod:`.bind`; anything that is no plain literal (dtypes, devices, view records) is one of the ``_k0``,
    ``_k1``, .. constants. A training graph gets two more functions, the forward and the backward of its
    ``torch.autograd.Function`` (see :mod:`.emit_autograd`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .contract import ViewSpec
from .dims import render, render_tuple
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
    Value,
)
from .plan import Return, WrapperPlan

__all__ = ["PROLOGUE_RANGE", "Source", "emit_call", "emit_profiled_call", "guarded_call"]


@dataclass
class Source:
    """Lines of Python being written, constants they refer to, and lists of version counters by the names in them."""

    lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, indent: int = 1) -> None:
        """Append one line."""
        self.lines.append("    " * indent + text)

    def constant(self, value: Any) -> str:
        """Name of a constant with this value."""
        for name, known in self.constants.items():
            if type(known) is type(value) and known == value:
                return name
        name = f"_k{len(self.constants)}"
        self.constants[name] = value
        return name

    @property
    def text(self) -> str:
        """The source so far."""
        return "\n".join(self.lines) + "\n"


PROLOGUE_RANGE = "aotkit: prologue"


def emit_call(plan: WrapperPlan, out: Source) -> None:
    """Write ``def call(args)``: the whole call of an inference graph, or what surrounds ``_apply`` in training."""
    out.add("def call(args):", 0)
    out.add("if _profiler._is_profiler_enabled:")
    out.add("return _profiled(args)", 2)
    box = _emit_prologue(plan, out, 1)
    _emit_after_prologue(plan, box, out)


def emit_profiled_call(plan: WrapperPlan, out: Source) -> None:
    """Write ``def profiled_call(args)``: the same with the prologue as a range of the profiler.

    What the prologue raises leaves the range as well.
    """
    out.add("def profiled_call(args):", 0)
    out.add(f"with _record_range({PROLOGUE_RANGE!r}):")
    box = _emit_prologue(plan, out, 2)
    _emit_after_prologue(plan, box, out)


def _emit_prologue(plan: WrapperPlan, out: Source, indent: int) -> str:
    """Everything before the call of compiled code. Returns the name of the list that it gets."""
    out.add(f"if len(args) != {plan.num_inputs}:", indent)
    out.add(f'_wrong_count("arguments", {plan.num_inputs}, len(args))', indent + 1)
    out.add("if _transforms_active():", indent)
    out.add("_refuse_transform()", indent + 1)
    for name in _arguments_needed(plan):
        out.add(f"{name} = args[{name[2:]}]", indent)
    _emit_operations(plan.prologue, out, indent)
    return _emit_box(plan, out, indent)


def _emit_after_prologue(plan: WrapperPlan, box: str, out: Source) -> None:
    (_emit_training_call if plan.call.training else _emit_inference_call)(plan, box, out)
    _emit_epilogue(plan.epilogue, out)
    out.add(f"return [{', '.join(_returned(value, out) for value in plan.returns)}]")


def _arguments_needed(plan: WrapperPlan) -> list[Value]:
    """Arguments that have to outlive the boxed list: read by an operation, returned, or handed to autograd."""
    needed: set[str] = set()
    for operation in (*plan.prologue, *plan.epilogue):
        needed |= _values_of(operation)
    needed |= {value.value for value in plan.returns if value.value is not None}
    if not _is_one_to_one(plan):
        needed |= set(plan.call.graph_inputs)
    return sorted((n for n in needed if n.startswith("in")), key=lambda n: int(n[2:]))


def _values_of(operation: Operation) -> set[Value]:
    match operation:
        case CheckDuplicate(value=value, first=first):
            return {value, first}
        case CheckAliases(mutated=mutated, others=others):
            return {*mutated, *others}
        case BuildBase(members=members) | AnnounceWrites(values=members):
            return set(members)
        case CopyBack(value=value, source=source) | SetStorage(value=value, source=source):
            return {value, source}
        case Regenerate(base=base, history=history):
            return {base} if history is None else {base, history}
        case SetGradMode():
            return set()
    return {operation.value}


def _is_one_to_one(plan: WrapperPlan) -> bool:
    return plan.call.graph_inputs == tuple(f"in{i}" for i in range(plan.num_inputs))


def _emit_box(plan: WrapperPlan, out: Source, indent: int) -> str:
    """The list for the compiled graph: the caller's own, where arguments are graph inputs one to one."""
    if _is_one_to_one(plan):
        return "args"
    out.add(f"box = [{', '.join(plan.call.graph_inputs)}]", indent)
    out.add("args.clear()", indent)
    return "box"


def guarded_call(function: str, box: str) -> str:
    """Expression that calls compiled code; see :func:`.runtime.without_autocast`."""
    return f"{function}({box}) if not _autocast_enabled() else _without_autocast({function}, {box})"


def _emit_inference_call(plan: WrapperPlan, box: str, out: Source) -> None:
    call = plan.call
    out.add("grad = _is_grad_enabled()")
    out.add("if grad:")
    out.add("_set_grad_enabled(False)", 2)
    out.add("try:")
    out.add(f"result = {guarded_call('_forward', box)}", 2)
    emit_unpack(call.num_forward_outputs, call.num_forward_outputs, out, 2)
    for position in call.repeated_outputs:
        out.add(f"fw{position} = _unsafe_view(fw{position})", 2)
    for position in call.own_outputs:
        out.add(f"if fw{position}._is_view():", 2)
        out.add(f"fw{position} = _unsafe_view(fw{position})", 3)
    out.add("finally:")
    out.add("if grad:", 2)
    out.add("_set_grad_enabled(True)", 3)


def emit_unpack(expected: int, named: int, out: Source, indent: int) -> None:
    """Check the length of ``result`` and give names to the first ``named`` of its values."""
    out.add(f"if len(result) != {expected}:", indent)
    out.add(f'_wrong_count("forward results", {expected}, len(result))', indent + 1)
    if named:
        values = ", ".join(f"fw{i}" for i in range(named))
        out.add(f"[{values}] = result" + ("" if named == expected else f"[:{named}]"), indent)


def _emit_training_call(plan: WrapperPlan, box: str, out: Source) -> None:
    call = plan.call
    inputs = ", ".join(f"{box}[{i}]" for i in call.differentiable_inputs)
    results = ", ".join(f"fw{i}" for i in call.differentiable_outputs)
    drops = call.kept_inputs and not call.keeps_values
    if drops:
        out.add(f"leaves = {' and '.join(f'{box}[{i}].is_leaf' for i in call.kept_inputs)}")
    out.add(f"{results} = _apply({box}, {inputs})")
    if drops:
        out.add("if not leaves:")
        out.add(f"_drop_values(fw{call.differentiable_outputs[0]}.grad_fn, {call.num_saved_tensors})", 2)
    plain = [f"fw{i}" for i in range(call.num_forward_outputs) if i not in call.differentiable_outputs]
    if plain:
        out.add(f"[{', '.join(plain)}] = {box}")
        out.add(f"{box}.clear()")


def _emit_epilogue(operations: Sequence[Operation], out: Source) -> None:
    """Operations in order; those without grad mode that follow each other share one switch."""
    index = 0
    while index < len(operations):
        end = index
        while end < len(operations) and _needs_no_grad(operations[end]):
            end += 1
        if end == index:
            while end < len(operations) and not _needs_no_grad(operations[end]):
                end += 1
            _emit_operations(operations[index:end], out)
            index = end
            continue
        out.add("grad = _is_grad_enabled()")
        out.add("_set_grad_enabled(False)")
        out.add("try:")
        _emit_operations(operations[index:end], out, 2)
        out.add("finally:")
        out.add("_set_grad_enabled(grad)", 2)
        index = end


def _needs_no_grad(operation: Operation) -> bool:
    match operation:
        case CopyBack(mode=mode):
            return mode == "no_grad"
        case Restride(no_grad=no_grad):
            return no_grad
        case Regenerate(view=view):
            return view.under_no_grad
    return False


def _emit_operations(operations: Sequence[Operation], out: Source, indent: int = 1) -> None:
    """In order; version counters that follow each other are read or set in one call (an optimizer has hundreds)."""
    for kind, group in itertools.groupby(operations, type):
        run = list(group)
        if kind is NoteVersion:
            notes = [operation for operation in run if isinstance(operation, NoteVersion)]
            values, results = _tuple([n.value for n in notes]), _tuple([n.result for n in notes])
            out.versions[results] = f"versions{len(out.versions)}"  # one list, taken apart only where the sets differ
            out.add(f"{out.versions[results]} = _versions_of({values})", indent)
        elif kind is SetVersion:
            sets = [operation for operation in run if isinstance(operation, SetVersion)]
            values, before = _tuple([s.value for s in sets]), _tuple([s.before for s in sets])
            if before not in out.versions:
                for results, name in out.versions.items():
                    out.add(f"{results} = {name}", indent)
            out.add(
                f"_set_versions({values}, {out.versions.get(before, before)}, {tuple(s.steps for s in sets)})", indent
            )
        else:
            for operation in run:
                _emit_operation(operation, out, indent)


def _emit_operation(operation: Operation, out: Source, indent: int = 1) -> None:
    match operation:
        case CheckDuplicate(value=value, first=first):
            out.add(f"if {value} is not {first}:", indent)
            out.add(f'_wrong_duplicate("{value}", "{first}")', indent + 1)
        case CheckPlace(value=value, offset=start, nbytes=nbytes):
            out.add(f'_refuse_place({value}, "{value}", {start}, {nbytes})', indent)
        case CheckAliases(mutated=mutated, others=others, among=among):
            names = f'{among}, "{" ".join(mutated)}", "{" ".join(others)}"'
            out.add(f"_refuse_new_aliases({_tuple(mutated)}, {_tuple(others)}, {names})", indent)
        case BindSymbol():
            out.add(f"{operation.symbol} = {read_symbol(operation, operation.value)}", indent)
        case BuildBase(base=base, members=members, views=views, flat=flat, symbols=symbols):
            values = ", ".join(f"{symbol!r}: {symbol}" for symbol in symbols)
            what = f"{_tuple(members)}, {out.constant(views)}, {' '.join(members)!r}, {flat}, {{{values}}}"
            out.add(f"{base} = _base_of({what})", indent)
        case CheckStrides(value=value, strides=strides):
            out.add(f"if {value}.stride() != {render_tuple(strides)}:", indent)
            out.add(f'_check_strides({value}, "{value}", {render_tuple(strides)})', indent + 1)
        case CheckValue():
            _emit_check_value(operation, out, indent)
        case Restride(value=value, view=view):
            offset = _offset(value, view.offset_delta)
            out.add(f"{value}.as_strided_({render_tuple(view.sizes)}, {render_tuple(view.strides)}, {offset})", indent)
        case CopyBack(value=value, source=source, mode=mode):
            out.add(f"{value}{'.data' if mode == 'hidden' else ''}.copy_({source})", indent)
        case SetStorage(value=value, source=source, view=view):
            out.add(f"{value}.data = {_stored(source, view)}", indent)
        case Resize(value=value, sizes=sizes):
            out.add(f"{value}.resize_({render_tuple(sizes)})", indent)
        case ResizeStorage(value=value, num_bytes=num_bytes):
            out.add(f"{value}.untyped_storage().resize_({render(num_bytes)})", indent)
        case AnnounceWrites(values=values, times=times):
            out.add(f"_announce_writes({_tuple(values)}, {times})", indent)
        case BumpVersion(value=value, times=times):
            out.add(f"_advance_version({value}, {times})", indent)
        case Regenerate():
            _emit_regenerate(operation, out, indent)
        case SetLazyBits(value=value, conj=conj, neg=neg):
            out.add(f"{value} = _with_lazy_bits({value}, {conj}, {neg})", indent)
        case SetRequiresGrad():
            out.add(str(operation), indent)
        case MarkDynamic(value=value, dims=dims):
            out.add(f"_mark_dynamic({value}, {dims})", indent)
        case SetGradMode(enabled=enabled):
            out.add(f"_set_grad_enabled({enabled})", indent)


def read_symbol(operation: BindSymbol, value: str) -> str:
    """Expression that reads a symbol from ``value``."""
    if operation.source == "int":
        return value
    return f"{value}.{operation.source}({'' if operation.dim is None else operation.dim})"


def _emit_check_value(operation: CheckValue, out: Source, indent: int) -> None:
    meta = operation.meta
    strides = render_tuple(meta.strides) if operation.check_strides else "None"
    requires_grad = meta.requires_grad if operation.check_requires_grad else None
    known = f"{render_tuple(meta.sizes)}, {strides}, {meta.dtype!r}, {meta.device!r}, {requires_grad}"
    out.add(f"_check_value({operation.value}, {operation.what!r}, {known})", indent)


def _emit_regenerate(operation: Regenerate, out: Source, indent: int) -> None:
    view = operation.view
    base = f"{operation.base}.detach()" if operation.detach and not view.detached else operation.base
    sizes, strides = render_tuple(view.sizes), render_tuple(view.strides)
    if operation.base_dtype != view.dtype:
        made = f"_regenerate({base}, {out.constant(view)}, {sizes}, {strides}, {render(view.offset_delta)})"
    elif operation.method in ("view", "expand"):
        made = f"{base}.{operation.method}({sizes})"
    elif operation.method == "permute":
        made = f"{base}.permute({operation.permutation})"
    else:
        made = f"{base}.as_strided({sizes}, {strides}, {_offset(operation.base, view.offset_delta)})"
    if operation.lazy and operation.base_dtype == view.dtype:
        made = f"_with_lazy_bits({made}, {view.conj}, {view.neg})"
    last = (".data" if view.own_version else ".detach()") if view.detached else ""
    out.add(f"{operation.result} = {made}{last}", indent)
    if operation.history is not None:
        out.add(f"{operation.result} = _with_history({operation.history}, {operation.result})", indent)
    if operation.set_requires_grad:
        out.add(f"{operation.result}.requires_grad_(True)", indent)


def _stored(source: Value, view: ViewSpec | None) -> str:
    """Expression of the tensor whose memory another one takes over."""
    if view is None:
        return f"{source}.detach()"
    offset = _offset(source, view.offset_delta)
    return f"{source}.detach().as_strided({render_tuple(view.sizes)}, {render_tuple(view.strides)}, {offset})"


def _offset(base: Value, delta: int | str) -> str:
    return f"{base}.storage_offset()" if delta == 0 else f"{base}.storage_offset() + {render(delta)}"


def _returned(value: Return, out: Source) -> str:
    if value.value is not None:
        return value.value
    constant = value.constant
    if isinstance(constant, float) and not math.isfinite(constant):
        return out.constant(constant)
    return repr(constant)


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"
