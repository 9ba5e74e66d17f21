"""A wrapper plan -> the source of one straight-line Python function.

Note [What emitted code looks like]
    No loop over metadata, no dictionary, no generic closure: each operation of the plan writes a line or
    two over local variables of the same names. Names that start with an underscore are bound by
    :mod:`.bind`; anything that is no plain literal (dtypes, devices, view records) is one of the ``_k0``,
    ``_k1``, .. constants. A training graph gets two more functions, the forward and the backward of its
    ``torch.autograd.Function`` (see :mod:`.emit_autograd`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .operations import Operation, Value
from .plan import Return, WrapperPlan
from .source import Source

if TYPE_CHECKING:
    from .operations.checks import CheckAliases

__all__ = ["PROLOGUE_RANGE", "emit_call", "emit_profiled_call", "emit_unpack", "guarded_call"]

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
    out.add("if _forward_ad._current_level >= 0:", indent)
    out.add("_refuse_duals(args)", indent + 1)
    placed = _looks_at_all_addresses(plan)
    for name in _arguments_needed(plan, placed):
        out.add(f"{name} = args[{name[2:]}]", indent)
    if placed:
        out.add("given, args = args, _placed(args)", indent)
        out.placed = "args"
    _emit_operations(plan.prologue, out, indent)
    if placed:  # nothing refuses the call any more
        out.add("if given is not args:", indent)
        out.add("given.clear()", indent + 1)
    return _emit_box(plan, out, indent)


def _emit_after_prologue(plan: WrapperPlan, box: str, out: Source) -> None:
    (_emit_training_call if plan.call.training else _emit_inference_call)(plan, box, out)
    _emit_epilogue(plan.epilogue, out)
    out.add(f"return [{', '.join(_returned(value, out) for value in plan.returns)}]")


def _arguments_needed(plan: WrapperPlan, placed: bool) -> list[Value]:
    """Arguments that have to outlive the boxed list: read by an operation, returned, or handed to autograd. ``placed``:
    aliases are looked for in the list itself."""
    needed: set[str] = set()
    elsewhere = _alias_checks(plan) if placed else []
    for operation in (*plan.prologue, *plan.epilogue):
        if operation not in elsewhere:
            needed.update(operation.reads)
    needed |= {value.value for value in plan.returns if value.value is not None}
    if not _is_one_to_one(plan):
        needed |= set(plan.call.graph_inputs)
    return sorted((n for n in needed if n.startswith("in")), key=lambda n: int(n[2:]))


def _looks_at_all_addresses(plan: WrapperPlan) -> bool:
    """Whether the addresses of all arguments are compared, which compiled code then need not ask for again."""
    checks = [check for check in _alias_checks(plan) if check.fixed]
    return len(checks) == 1 and _is_one_to_one(plan) and set(checks[0].reads) == set(plan.call.graph_inputs)


def _alias_checks(plan: WrapperPlan) -> list[CheckAliases]:
    if not plan.prologue:
        return []
    from .operations.checks import CheckAliases  # a plan without operations needs none of their modules

    return [operation for operation in plan.prologue if isinstance(operation, CheckAliases)]


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
        while end < len(operations) and operations[end].needs_no_grad:
            end += 1
        if end == index:
            while end < len(operations) and not operations[end].needs_no_grad:
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


def _emit_operations(operations: Sequence[Operation], out: Source, indent: int = 1) -> None:
    """In order; those of one kind that follow each other may become one call."""
    for _, group in itertools.groupby(operations, type):
        run = list(group)
        run[0].emit_all(run, out, indent)


def _returned(value: Return, out: Source) -> str:
    if value.value is not None:
        return value.value
    constant = value.constant
    if isinstance(constant, float) and not math.isfinite(constant):
        return out.constant(constant)
    return repr(constant)
