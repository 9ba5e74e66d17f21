"""The straight-line Python function that runs a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from .._size_text import fold, parse_size, write_size
from ..ir.arguments import Arg, BufferRef, Literal, SymInput
from ..launch_plan.loaded import Loaded
from ..launch_plan.records import (
    Allocate,
    CallExtern,
    CallSegment,
    Free,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    ReuseBuffer,
    View,
)
from ..memory.huge_pages import LARGE
from ..ops.aten import is_opaque_result, returns_lists, returns_several
from ..ops.fixups import FIX_UPS
from ..symbolic import Call, Expr, Symbol, product, to_expr
from .constant_places import MANY_CONSTANTS
from .frame import arena_views, torch_dtype

__all__ = ["PlanEmitter", "emit_source", "many_constants", "wanted_tensors"]

MANY_INPUTS = 32  # from here on a plan remembers where its inputs lie


def emit_source(loaded: Loaded, own_frames: bool = True, redzones: bool = False) -> tuple[str, dict[str, Any]]:
    """``(source, tables)``: the text defining ``call(args)`` and objects its text names. ``own_frames``: whether
    frames come from the plan's own list or lie in blocks of memory shared with other plans (``FramePool.own``).
    ``redzones``: the memory is looked at after every step."""
    return PlanEmitter(loaded, own_frames, redzones).emit()


def many_constants(plan: LaunchPlan) -> list[str]:
    """The constants whose addresses a frame holds, if they are many and none of them may be empty."""
    held = {b.name: b for b in plan.buffers if b.storage == "constant"}
    named = [slot for slot in plan.slots if slot in held]
    filled = all(to_expr(size).constant not in (None, 0) for name in named for size in held[name].sizes)
    return named if filled and len(named) >= MANY_CONSTANTS else []


def wanted_tensors(plan: LaunchPlan) -> list[str]:
    """Arena buffers and views of them that the plan needs as tensors, in the order of ``Frame.tensors``."""
    framed = arena_views(plan)
    steps = [s for s in plan.steps if not (isinstance(s, View) and s.result in framed)]
    used = {name for step in steps for name in _tensor_uses(step)}
    return [name for name in (*(a.buffer for a in plan.arena), *framed) if name in used]


class PlanEmitter:
    """Writes the function, step by step."""

    def __init__(self, loaded: Loaded, own_frames: bool, redzones: bool) -> None:
        self.plan, self.own_frames, self.redzones = loaded.plan, own_frames, redzones
        self.context, self.alignment, plan = loaded.context, loaded.alignment, loaded.plan
        self.buffers = {b.name: b for b in plan.buffers}
        self.slot = {name: k for k, name in enumerate(plan.slots)}
        self.lines: list[str] = []
        self.tables: dict[str, Any] = {}
        self.sizes = ""
        self.uses_frame = redzones or bool(plan.arena) or any(isinstance(s, CallSegment) for s in plan.steps)
        self.wanted = wanted_tensors(plan)
        self.framed = arena_views(plan).keys()
        viewed = {step.base for step in plan.steps if isinstance(step, View | ReuseBuffer)}
        self.seen = viewed | self.slot.keys()  # by others than ATen
        self.tensor_names = {b.name: f"b_{_safe(b.name)}" for b in plan.buffers}
        self.tensor_names.update({b.name: f"constant_{_safe(b.name)}" for b in plan.buffers if b.storage == "constant"})
        self.tensor_names.update({name: f"tensors[{k}]" for k, name in enumerate(self.wanted)})
        self.remembers = self._remembers_inputs()
        named = self._named_inputs()
        self.held_together = self.remembers and not self._frees_inputs_early()
        self.unnamed = {name for name in plan.inputs if name not in named} if self.held_together else set[str]()
        self.made_as = self._made_as_their_views()

    def emit(self) -> tuple[str, dict[str, Any]]:
        self._prologue()
        for position, step in enumerate(self.plan.steps):
            if self.redzones and not isinstance(step, Return):
                self.lines.append(f"frame.guard.before({position})")
                self._step(step)
                status = isinstance(step, CallSegment)  # its last line looks at the status and may raise
                self.lines.insert(len(self.lines) - status, f"frame.guard.after({position})")
            else:
                self._step(step)
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def call(args):\n{body}\n", self.tables

    # -- prologue ------------------------------------------------------------------------------------------

    def _prologue(self) -> None:
        names = self._input_names()
        if self.remembers:
            self.lines += ['addresses = getattr(args, "addresses", None)', "given = args[:]"]
            self.lines.append("if addresses is None: addresses = tuple(map(data_ptr, given))")
            if self.held_together:
                self.lines += [
                    f"{n} = given[{k}]" for k, n in enumerate(names) if self.plan.inputs[k] not in self.unnamed
                ]
            else:
                self.lines += [f"{', '.join(names)} = given", "del given"]
            self.lines.append('before, moved = getattr(args, "before", None), getattr(args, "moved", ())')
        elif names:
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        self.lines.append("args.clear()")
        for symbol, position, kind, dim in self.plan.symbol_sources:
            if kind in ("above", "below"):
                sign = "" if kind == "above" else "-"
                self.lines.append(f"s_{_safe(symbol)} = max({sign}{names[position]}, 0)")
            elif kind != "int":
                self.lines.append(f"s_{_safe(symbol)} = {names[position]}.{kind}({dim})")
            elif names[position] != f"s_{_safe(symbol)}":
                self.lines.append(f"s_{_safe(symbol)} = {names[position]}")
        for symbol, text in self.plan.computed_sizes:
            tree = fold(parse_size(text), lambda name: f"s_{_safe(name[1:])}", lambda sign, operands: (sign, *operands))
            self.lines.append(f"s_{_safe(symbol)} = {write_size(tree)}")
        if not self.uses_frame:
            return
        self.sizes = ", ".join(f"s_{_safe(name)}" for name in self.plan.size_symbols)
        if not self.own_frames:
            self.lines.append(f"block, frame = lease_block({self.sizes})")
        elif self.sizes:
            self.lines.append(f"frame = lease({self.sizes})")
        else:  # one size only: the free list is taken from directly
            self.lines += ["try: frame = free.pop()", "except IndexError: frame = lease()"]
        if any(not s.startswith("$") and self.buffers[s].storage != "arena" for s in self.plan.slots):
            self.lines.append("slots = frame.slots")
        if self.wanted:
            self.lines.append("tensors = frame.tensors")
        self.lines.append("address = frame.address")
        if self.redzones:
            self.lines.append("frame.guard.begin()")
        self.lines += self.context
        if self.remembers:
            self.tables["places"] = tuple(self.slot[name] for name in self.plan.inputs)
            self.lines.append("if before and before is frame.inputs: frame.write_moved(places, addresses, moved)")
            self.lines.append("elif addresses != frame.inputs: frame.write_inputs(places, addresses)")
        elif self.alignment.nbytes > 1:
            self._write_aligned_inputs()
        else:
            self._write_addresses("input")
        self._write_constants()

    def _input_names(self) -> list[str]:
        tensors = self.tensor_names
        return [f"s_{_safe(name[1:])}" if name.startswith("$") else tensors[name] for name in self.plan.inputs]

    def _remembers_inputs(self) -> bool:
        """Whether a frame keeps the addresses of the last call and only those are written that differ: with hundreds of
        weights that stay where they are. Whoever calls may know the addresses, and tell them by an attribute
        ``addresses`` of the list of arguments."""
        inputs = self.plan.inputs
        if len(inputs) < MANY_INPUTS or self.alignment.nbytes > 1 or not self.uses_frame:
            return False
        return all(name in self.slot and not name.startswith("$") and not self._may_be_empty(name) for name in inputs)

    def _named_inputs(self) -> set[str]:
        """Inputs that the plan needs as tensors, not only as addresses."""
        return {*self._tensor_names_used(), *(self.plan.inputs[place] for _, place, *_ in self.plan.symbol_sources)}

    def _tensor_names_used(self) -> Iterator[str]:
        """Buffers that steps need as tensors, and those that are returned, as often as they are."""
        for step in self.plan.steps:
            yield from _tensor_uses(step)
            if isinstance(step, Return):
                yield from (output.name for output in step.outputs if isinstance(output, BufferRef))

    def _made_as_their_views(self) -> dict[str, str]:
        """Fresh buffers that are needed as tensors for views only, with one of the same memory: the tensor is made as
        that view, which saves taking it, and the caller a view of something that no one else has. Of several, the
        caller gets none: none would be a view of another one."""
        uses = Counter(self._tensor_names_used())
        views = [step for step in self.plan.steps if isinstance(step, View)]
        viewed = Counter(step.base for step in views)
        returned = {o.name for s in self.plan.steps if isinstance(s, Return) for o in s.outputs if type(o) is BufferRef}
        shown = {step.base for step in views if step.result in returned and viewed[step.base] > 1}
        found: dict[str, str] = {}
        for step in views:
            if uses[step.base] == viewed[step.base] and step.offset == 0 and step.base not in shown:
                base, view = self.buffers[step.base], self.buffers[step.result]
                if base.storage == "allocated" and base.dtype == view.dtype and _fills_as_much(base, view):
                    found.setdefault(step.base, step.result)
        return found

    def _frees_inputs_early(self) -> bool:
        """Whether an input is let go before the last launch, as what a backward has used up; else all of them are held
        until the call is over."""
        launches = [k for k, step in enumerate(self.plan.steps) if isinstance(step, CallSegment | CallExtern)]
        early = self.plan.steps[: launches[-1]] if launches else ()
        freed = {name for step in early if isinstance(step, Free) for name in step.buffers}
        return not freed.isdisjoint(self.plan.inputs)

    def _write_aligned_inputs(self) -> None:
        """Addresses of inputs; the call is made again with copies of those that do not begin where kernels take it."""
        slots = [s for s in self.plan.slots if not s.startswith("$") and self.buffers[s].storage == "input"]
        for slot in slots:
            self.lines.append(f"a_{_safe(slot)} = slots[{self.slot[slot]}] = {self.tensor_names[slot]}.data_ptr()")
        if self.alignment.inputs:
            every = " | ".join(f"a_{_safe(name)}" for name in self.alignment.inputs)
            again = f"return realigned([{', '.join(self._input_names())}])"
            self.lines.append(f"if ({every}) & {self.alignment.nbytes - 1}: {again}")

    def _write_constants(self) -> None:
        """Addresses of constants: ``.data = `` and ``set_`` give a tensor other memory, and its old one may be gone. A
        copy is made of one that does not begin where kernels take it. Many are asked in one native pass, and one by one
        where there is none."""
        if self.alignment.nbytes == 1:
            first, many = len(self.lines), many_constants(self.plan)
            if many:
                self.lines.append("if unwritten_constants(address):")
            self._write_addresses("constant")
            if many:
                self.lines[first + 1 :] = [f"    {line}" for line in self.lines[first + 1 :]]
            return
        for slot in (s for s in self.plan.slots if not s.startswith("$") and self.buffers[s].storage == "constant"):
            tensor, copy, place = self.tensor_names[slot], f"aligned_{_safe(slot)}", f"slots[{self.slot[slot]}]"
            self.lines.append(f"at = {place} = {tensor}.data_ptr()")
            if slot in self.alignment.buffers:
                again = f"{copy} = aligned_copy({tensor}); {place} = {copy}.data_ptr()"
                self.lines.append(f"if at & {self.alignment.nbytes - 1}: {again}")

    def _write_addresses(self, storage: str) -> None:
        """Addresses of inputs or constants, neighbours in the frame in one assignment."""
        run: list[tuple[int, str]] = []
        for position, slot in [*enumerate(self.plan.slots), (len(self.plan.slots), "$")]:
            if not slot.startswith("$") and self.buffers[slot].storage == storage:
                run.append((position, self.tensor_names[slot]))
                continue
            names = ", ".join(name for _, name in run)
            filled = not any(self._may_be_empty(self.plan.slots[place]) for place, _ in run)
            if len(run) == 1 and filled:
                self.lines.append(f"slots[{run[0][0]}] = {names}.data_ptr()")
            elif len(run) > 8 and filled:  # an optimizer's hundreds
                self.lines.append(f"slots[{run[0][0]}:{run[-1][0] + 1}] = tuple(map(data_ptr, ({names})))")
            elif run:
                values = ", ".join(
                    f"{name}.data_ptr()" + f" or place({name})" * self._may_be_empty(self.plan.slots[place])
                    for place, name in run
                ) + "," * (len(run) == 1)
                self.lines.append(f"slots[{run[0][0]}:{run[-1][0] + 1}] = ({values})")
            run = []

    def _may_be_empty(self, slot: str) -> bool:
        return any(to_expr(size).constant in (None, 0) for size in self.buffers[slot].sizes)

    # -- steps ---------------------------------------------------------------------------------------------

    def _step(self, step: PlanStep) -> None:
        if isinstance(step, Allocate):
            self._allocate(step)
        elif isinstance(step, CallSegment):
            self._segment(step)
        elif isinstance(step, CallExtern):
            self._extern(step)
        elif isinstance(step, View):
            if self.made_as.get(step.base) == step.result:
                self.lines.append(f"{self.tensor_names[step.result]} = {self.tensor_names[step.base]}")
            elif step.result not in self.framed:
                self._view(step, self.tensor_names[step.base])
        elif isinstance(step, ReuseBuffer):
            self._reuse_buffer(step)
        elif isinstance(step, Free):
            gone = (name for name in step.buffers if name not in self.framed and name not in self.unnamed)
            held = [self.tensor_names[name] for name in gone]
            if held:
                self.lines.append(f"del {', '.join(held)}")
        else:
            self._return(step)

    def _allocate(self, step: Allocate) -> None:
        buffer, name = self.buffers[step.buffer], self.tensor_names[step.buffer]
        made = self.buffers[self.made_as.get(step.buffer, step.buffer)]
        sizes, strides = _tuple(made.sizes), _tuple(made.strides)
        size = product(map(to_expr, buffer.sizes)).constant
        small = size is not None and size * torch_dtype(buffer.dtype).itemsize < LARGE
        empty = "empty" if small else "empty_large"
        self.lines.append(f"{name} = {empty}({sizes}, {strides}, {self._dtype(buffer.dtype)})")
        if self.redzones:
            self.lines.append(f"frame.guard.fresh({step.buffer!r}, {name})")
        self._write_slot(step.buffer)

    def _write_slot(self, name: str) -> None:
        if name not in self.slot:
            return
        slot, tensor = f"slots[{self.slot[name]}]", self.tensor_names[name]
        if name not in self.alignment.buffers or self.buffers[name].storage != "call result":
            self.lines.append(f"{slot} = {tensor}.data_ptr()")
            return
        self.lines.append(f"at = {slot} = {tensor}.data_ptr()")
        aligned = f"{tensor} = aligned_copy({tensor}); {slot} = {tensor}.data_ptr()"
        self.lines.append(f"if at & {self.alignment.nbytes - 1}: {aligned}")

    def _dtype(self, name: str) -> str:
        return str(torch_dtype(name))

    def _segment(self, step: CallSegment) -> None:
        self.tables[f"launches_of_{step.function}"] = step.launches
        shown = ", ".join(step.launches[:6]) + (" ..." if len(step.launches) > 6 else "")
        self.lines.append(f"status = {step.function}(address, n)  # {shown}")
        self.lines.append(f"if status: fail(status, launches_of_{step.function})")

    def _extern(self, step: CallExtern) -> None:
        args = [self._arg(a) for a in step.args] + [f"{k}={self._arg(v)}" for k, v in step.kwargs]
        if step.out is not None:
            assert step.results[0] is not None
            args.append(f"out={self.tensor_names[step.results[0]]}")
            self.lines.append(f"op_{_safe(step.out)}({', '.join(args)})")
            return
        call = f"op_{_safe(step.target)}({', '.join(args)})"
        names = ["_" if r is None else self.tensor_names[r] for r in step.results]
        if not any(r is not None for r in step.results):
            guard = next(_refs(step.args)) if step.target in FIX_UPS else None
            self.lines.append(f"if {self.tensor_names[guard]}.item(): {call}" if guard is not None else call)
        elif returns_several(step.target):
            call = f"in_a_row({call})" if returns_lists(step.target) else call
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
        else:
            self.lines.append(f"{names[0]} = {call}")
        for position, result in enumerate(step.results):
            if result is None or (result not in self.seen and is_opaque_result(step.target, position)):
                continue
            self._conform(result, step.target)
            self._write_slot(result)

    def _conform(self, result: str, target: str) -> None:
        """Generated code reads memory by the sizes, strides and type of the fake value, so the real one must have them,
        and no lazy bits (which ``linalg_lu_solve`` and custom operators may return). ATen's sizes are right."""
        buffer, name = self.buffers[result], self.tensor_names[result]
        sizes, strides, dtype = _tuple(buffer.sizes), _tuple(buffer.strides), self._dtype(buffer.dtype)
        differs = f"{name}.stride() != {strides} or {name}.dtype is not {dtype}"
        differs += f" or {name}.is_conj()" if buffer.dtype.startswith("complex") else ""
        differs += "" if target.startswith("aten.") else f" or {name}.shape != {sizes} or {name}.is_neg()"
        self.lines.append(f"if {differs}: {name} = conform({name}, {sizes}, {strides}, {dtype})")

    def _view(self, step: View, base: str) -> None:
        buffer, name = self.buffers[step.result], self.tensor_names[step.result]
        sizes, strides = _tuple(buffer.sizes), _tuple(buffer.strides)
        quick = _quick_view(self.buffers[self.made_as.get(step.base, step.base)], buffer) if step.offset == 0 else ""
        if quick:
            self.lines.append(f"{name} = {base}.{quick}")
            return
        if buffer.dtype != self.buffers[step.base].dtype:
            base = f"{base}.view({self._dtype(buffer.dtype)})"
        offset = f"{base}.storage_offset() + {_text(step.offset)}" if step.offset != 0 else f"{base}.storage_offset()"
        if self.buffers[step.base].storage == "allocated" and buffer.dtype == self.buffers[step.base].dtype:
            offset = _text(step.offset)  # a fresh tensor starts its storage
        self.lines.append(f"{name} = torch.as_strided({base}, {sizes}, {strides}, {offset})")

    def _reuse_buffer(self, step: ReuseBuffer) -> None:
        base, made = self.buffers[step.base], self.buffers[self.made_as.get(step.result, step.result)]
        names = self.tensor_names[step.result], self.tensor_names[step.base]
        same = base.sizes == made.sizes
        self.lines.append(f"{names[0]} = {names[1] if same else f'unsafe_view({names[1]}, {_tuple(made.sizes)})'}")
        self._write_slot(step.result)

    def _return(self, step: Return) -> None:
        if self.redzones:
            self.lines.append("frame.guard.end()")
        if self.uses_frame and not self.own_frames:
            self.lines.append("give_back_block(block)")
        elif self.uses_frame:
            self.lines.append(f"give_back(frame, {self.sizes})" if self.sizes else "free.append(frame)")
        outputs = []
        for output in step.outputs:
            if output is None:
                outputs.append("None")
            elif isinstance(output, BufferRef):
                outputs.append(self.tensor_names[output.name])
            else:
                outputs.append(_text(output.expr))
        self.lines.append(f"return [{', '.join(outputs)}]")

    # -- arguments -----------------------------------------------------------------------------------------

    def _arg(self, arg: Arg) -> str:
        if isinstance(arg, BufferRef):
            return f"{self.tensor_names[arg.name]}.item()" if arg.number else self.tensor_names[arg.name]
        if isinstance(arg, SymInput):
            return _text(arg.expr)
        if isinstance(arg, tuple):
            return f"[{', '.join(self._arg(a) for a in arg)}]"
        return self._literal(arg)

    def _literal(self, literal: Literal) -> str:
        value = literal.value
        if literal.kind in ("dtype", "layout", "memory_format") and value is not None:
            return str(value)
        if literal.kind == "device" and value is not None:
            name = f"device_{_safe(str(value))}"
            self.tables[name] = torch.device(str(value))
            return name
        if literal.kind == "complex":
            return f"complex({str(value)!r})"
        if isinstance(value, float) and value not in (value + 1,) and value == value:
            return repr(value)
        if isinstance(value, float):
            return f"float({str(value)!r})"
        return repr(value)


def _fills_as_much(base: PlannedBuffer, view: PlannedBuffer) -> bool:
    """Whether both are contiguous and of one known number of elements."""
    counts = [_contiguous_count(buffer) for buffer in (base, view)]
    return counts[0] == counts[1] and counts[0] is not None


def _quick_view(base: PlannedBuffer, view: PlannedBuffer) -> str:
    """A method that gives the same view, in half the time that ``as_strided`` takes; ``""`` if there is none. Where a
    dimension has one element, its stride may be another one than the plan's: so there is none."""
    sizes = [to_expr(size).constant for size in (*base.sizes, *view.sizes)]
    if base.dtype != view.dtype or any(size is None or size < 2 for size in sizes):
        return ""
    turned = tuple(base.sizes[::-1]), tuple(base.strides[::-1])
    if len(base.sizes) == 2 and (tuple(view.sizes), tuple(view.strides)) == turned:
        return "t()"
    return f"view{_tuple(view.sizes)}" if _fills_as_much(base, view) else ""


def _contiguous_count(buffer: PlannedBuffer) -> int | None:
    """How many elements a contiguous buffer has, if there are some and their number is known."""
    sizes, strides = ([to_expr(n).constant for n in numbers] for numbers in (buffer.sizes, buffer.strides))
    known = [size for size in sizes if size]
    dense = [math.prod(known[k + 1 :]) for k in range(len(known))]
    return math.prod(known) if len(known) == len(sizes) and strides == dense else None


def _tensor_uses(step: PlanStep) -> Iterator[str]:
    """Buffers that a step needs as tensors, not only as addresses."""
    if isinstance(step, CallExtern):
        yield from _refs(step.args)
        yield from _refs(tuple(v for _, v in step.kwargs))
        if step.out is not None:
            yield from (r for r in step.results if r is not None)
    elif isinstance(step, View | ReuseBuffer):
        yield step.base


def _refs(args: tuple[Arg, ...]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, BufferRef):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _tuple(exprs: tuple[Expr, ...]) -> str:
    return f"({', '.join(map(_text, exprs))}{',' if len(exprs) == 1 else ''})"


def _text(expr: Expr) -> str:
    """An expression over size symbols as Python text."""
    terms = []
    for monomial, factor in expr.terms:
        atoms = [_atom(atom) for atom in monomial]
        if factor != 1 or not atoms:
            atoms.insert(0, str(factor))
        terms.append("*".join(atoms))
    return " + ".join(terms) if terms else "0"


def _atom(atom: Symbol | Call) -> str:
    if isinstance(atom, Symbol):
        return f"s_{_safe(atom.name)}"
    args = [_text(arg) for arg in atom.args]
    if atom.fn in ("floordiv", "mod"):
        return f"(({args[0]}) {'//' if atom.fn == 'floordiv' else '%'} ({args[1]}))"
    return f"{atom.fn}({', '.join(args)})"
