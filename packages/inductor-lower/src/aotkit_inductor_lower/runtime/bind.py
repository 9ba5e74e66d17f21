"""A compiled program to a callable: its kernels are loaded by its target, ATen ops resolved, the emitted Python source
run. The same for all targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.autograd.profiler as _profiler

from ..errors import BindError
from ..launch_plan.loaded import Alignment, Loaded
from ..launch_plan.records import CallExtern, CompiledProgram, LaunchPlan
from ..ops.aten import in_a_row, resolve_target
from ..ops.fixups import FIX_UPS
from ..targets import LOADERS
from .arena import ArenaPool
from .constant_places import unwritten_constants
from .emit import emit_source, many_constants, wanted_tensors
from .externs import aligned_copy, conform
from .frame import FramePool
from .redzones import guarded_empty
from .traced import traced_functions

__all__ = ["BoundProgram", "bind_program"]

Boxed = Callable[[list[Any]], list[Any]]


class BoundProgram:
    """A compiled graph in the boxed calling convention: takes one list, empties it, returns a list.

    The caller guarantees that inputs have the types, sizes and strides compiled for (alignment does not
    matter). ``source`` is the Python code that runs. Concurrent and re-entrant calls are fine.
    """

    _boxed_call = True

    def __init__(
        self, call: Boxed, source: str, compiled: CompiledProgram, bind_traced: Callable[[], Boxed] | None = None
    ) -> None:
        self._call = call
        self.source = source
        self.compiled = compiled
        self._bind_traced = bind_traced
        self._traced: Boxed | None = None
        #: Kernels write to memory beside torch: no call of an operator moves a version counter.
        self.moves_no_versions = not any(isinstance(step, CallExtern) for step in compiled.plan.steps)

    def __call__(self, args: list[Any]) -> list[Any]:
        if _profiler._is_profiler_enabled:
            return self._call_traced(args)
        return self._call(args)

    def _call_traced(self, args: list[Any]) -> list[Any]:
        """See Note [Names in traces]."""
        if self._traced is None:
            self._traced = self._call if self._bind_traced is None else self._bind_traced()
        return self._traced(args)


def bind_program(
    compiled: CompiledProgram,
    constants: Mapping[str, torch.Tensor] | None = None,
    arenas: ArenaPool | None = None,
    *,
    redzones: bool = False,
    load: Callable[[CompiledProgram], Loaded] | None = None,
    label: str = "",
) -> BoundProgram:
    """Make a compiled program callable, in the boxed convention. ``constants``: the tensors of its constant buffers by
    name. ``arenas``: where its temporaries live, shared with other programs; its own by default (on a CUDA device
    torch's allocator). ``redzones``: watch the memory of every call on the CPU (Note [Redzones]); slow, for tests and
    bug hunts. ``load``: what loads the code, if not the program's target. ``label``: what the program is called in
    traces of a profiler, if not by its plan's name.

    Raises :class:`BindError` if a constant is missing, an ATen op does not exist in this torch, or the code is damaged
    or does not load here.
    """
    held = _checked_constants(compiled.plan, constants)
    if compiled.binary.damaged:
        raise BindError(f"the code of {compiled.plan.name} is damaged (its digest differs); compile again")
    load = load or import_module(LOADERS[compiled.binary.target]).load
    return _bound(compiled, load(compiled), held, arenas or ArenaPool(), redzones, label or compiled.plan.name)


def _checked_constants(plan: LaunchPlan, constants: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    held = dict(constants or {})
    missing = [b.name for b in plan.buffers if b.storage == "constant" and b.name not in held]
    if missing:
        raise BindError(f"{plan.name} needs the constant tensors {', '.join(missing)}, which were not given")
    return held


def _bound(
    compiled: CompiledProgram,
    loaded: Loaded,
    constants: Mapping[str, torch.Tensor],
    arenas: ArenaPool,
    redzones: bool,
    label: str,
) -> BoundProgram:
    plan, alignment = loaded.plan, loaded.alignment
    namespace = _externs(plan)
    pool = FramePool(plan, constants, wanted_tensors(plan), arenas, redzones, loaded.entries)
    source, tables = emit_source(loaded, pool.own, redzones)
    namespace.update(tables)
    namespace.update(loaded.segments)
    namespace.update(loaded.names)
    namespace.update({f"constant_{_safe(name)}": tensor for name, tensor in constants.items()})
    many = many_constants(plan) if alignment.nbytes == 1 else []
    namespace.update(
        unwritten_constants=unwritten_constants([constants[n] for n in many], [plan.slots.index(n) for n in many]),
        lease=pool.lease,
        lease_block=pool.lease_block,
        give_back=pool.give_back,
        **{name: getattr(math, name) for name in ("ceil", "floor", "isqrt", "pow", "sqrt", "trunc")},
        give_back_block=pool.arenas.give_back,
        empty=guarded_empty if redzones else loaded.empty,
        empty_large=guarded_empty if redzones else loaded.empty_large or loaded.empty,
        empty_strided=torch.empty_strided,
        aligned_copy=aligned_copy,
        conform=conform,
        in_a_row=in_a_row,
        data_ptr=torch.Tensor.data_ptr,
        place=_place,
        free=pool.free_list(),
        fail=loaded.fail,
        torch=torch,
        unsafe_view=torch.ops.aten._unsafe_view.default,
    )
    code = compile(source, f"<aotkit plan {plan.name}>", "exec")

    def run_source(names: dict[str, Any]) -> Boxed:
        exec(code, names)
        call: Boxed = names["call"]
        if alignment.inputs:
            names["realigned"] = _realigner(plan, alignment, call)
        return call if loaded.guard is None else _guarded(call, loaded.guard)

    def bind_traced() -> Boxed:
        return run_source({**namespace, **traced_functions(plan, namespace, label)})

    return BoundProgram(run_source(namespace), source, compiled, bind_traced)


def _guarded(call: Boxed, guard: Callable[[], Any]) -> Boxed:
    def guarded(args: list[Any]) -> list[Any]:
        entered = guard()
        if entered is None:
            return call(args)
        with entered:
            return call(args)

    return guarded


def _realigner(plan: LaunchPlan, alignment: Alignment, call: Boxed) -> Boxed:
    """Calls again with copies of the inputs that are not aligned; what the graph wrote is copied back, and where a copy
    comes back, or a view of one, the caller gets that of the input."""
    position = {name: k for k, name in enumerate(plan.inputs)}

    def realigned(args: list[Any]) -> list[Any]:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        back = []
        for name in alignment.inputs:
            given = args[position[name]]
            if given.data_ptr() % alignment.nbytes:
                args[position[name]] = copy = aligned_copy(given)
                copies[copy.untyped_storage()._cdata] = given, copy
                if name in alignment.written:
                    back.append((given, copy))
        results = call(args)
        for given, copy in back:
            given.copy_(copy)
        return [_of_the_original(result, copies) for result in results]

    return realigned


def _of_the_original(result: Any, copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    found = copies.get(result.untyped_storage()._cdata) if _has_storage(result) else None
    if found is None:
        return result
    given, copy = found
    if result is copy:
        return given
    offset = given.storage_offset() + result.storage_offset() - copy.storage_offset()
    return torch.as_strided(given, result.shape, result.stride(), offset)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _place(empty: torch.Tensor) -> int:
    """Where an empty tensor, which has no address, begins: ``as_strided`` may lead to elements of its storage."""
    return empty.untyped_storage().data_ptr() + int(empty.storage_offset()) * empty.element_size()


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _externs(plan: LaunchPlan) -> dict[str, Any]:
    targets = {t for s in plan.steps if isinstance(s, CallExtern) for t in (s.target, s.out) if t}
    try:
        return {f"op_{_safe(target)}": FIX_UPS.get(target) or resolve_target(target) for target in sorted(targets)}
    except LookupError as error:
        raise BindError(f"{plan.name} cannot be bound: {error}; compile again with this torch") from error
