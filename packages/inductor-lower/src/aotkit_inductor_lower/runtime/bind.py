"""A compiled program to a callable: load the object code, resolve ATen ops, run the emitted Python source."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _torch_compat
from ..launch_plan.records import CallExtern, CallSegment, CompiledProgram
from ..ops.aten import resolve_target
from ..ops.fixups import FIX_UPS
from ..targets.cpu.load import LoadedObject, load_object
from .arena import ArenaPool
from .emit import emit_source, wanted_tensors
from .errors import BindError, raise_status
from .externs import conform
from .frame import FramePool
from .redzones import guarded_empty

__all__ = ["BoundProgram", "bind"]

_SEGMENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)


class BoundProgram:
    """A compiled graph in the boxed calling convention: takes one list, empties it, returns a list.

    The caller guarantees that inputs have the types, sizes and strides compiled for (alignment does not
    matter). ``source`` is the Python code that runs. Concurrent and re-entrant calls are fine.
    """

    _boxed_call = True

    def __init__(self, call: Callable[[list[Any]], list[Any]], source: str, compiled: CompiledProgram) -> None:
        self._call = call
        self.source = source
        self.compiled = compiled

    def __call__(self, args: list[Any]) -> list[Any]:
        return self._call(args)


def bind(
    compiled: CompiledProgram,
    constants: Mapping[str, torch.Tensor] | None = None,
    arenas: ArenaPool | None = None,
    *,
    redzones: bool = False,
) -> BoundProgram:
    """Make a compiled program callable. ``constants``: the tensors of its constant buffers by name. ``arenas``: where
    its temporaries live, shared with other programs; its own by default. ``redzones``: watch the memory of every call
    (Note [Redzones]); slow, for tests and bug hunts.

    Raises :class:`BindError` if a constant is missing, an ATen op does not exist in this torch, or the object
    code does not load.
    """
    plan, constants = compiled.plan, dict(constants or {})
    missing = [b.name for b in plan.buffers if b.storage == "constant" and b.name not in constants]
    if missing:
        raise BindError(f"{plan.name} needs the constant tensors {', '.join(missing)}, which were not given")
    namespace: dict[str, Any] = _externs(compiled)
    pool = FramePool(plan, constants, wanted_tensors(plan), arenas or ArenaPool(), redzones)
    source, tables = emit_source(plan, pool.own, redzones)
    namespace.update(tables)
    namespace.update(_segments(compiled))
    namespace.update({f"constant_{_safe(name)}": tensor for name, tensor in constants.items()})
    namespace.update(
        lease=pool.lease,
        lease_block=pool.lease_block,
        give_back=pool.give_back,
        give_back_block=pool.arenas.give_back,
        empty=guarded_empty if redzones else _torch_compat.empty_strided_cpu,
        empty_strided=torch.empty_strided,
        conform=conform,
        data_ptr=torch.Tensor.data_ptr,
        place=_place,
        free=pool.free_list(),
        threads=torch.get_num_threads,
        getpid=os.getpid,
        owner=os.getpid(),
        fail=_failure(compiled),
        torch=torch,
        unsafe_view=torch.ops.aten._unsafe_view.default,
    )
    exec(compile(source, f"<aotkit plan {plan.name}>", "exec"), namespace)
    return BoundProgram(namespace["call"], source, compiled)


def _place(empty: torch.Tensor) -> int:
    """Where an empty tensor, which has no address, begins: ``as_strided`` may lead to elements of its storage."""
    return empty.untyped_storage().data_ptr() + int(empty.storage_offset()) * empty.element_size()


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _segments(compiled: CompiledProgram) -> dict[str, Any]:
    names = [step.function for step in compiled.plan.steps if isinstance(step, CallSegment)]
    if not names:
        return {}
    if hashlib.sha256(compiled.code).hexdigest() != compiled.digest:
        raise BindError(f"the object code of {compiled.plan.name} is damaged (its digest differs); compile again")
    try:
        loaded: LoadedObject = load_object(compiled.code, compiled.imports, names)
    except (RuntimeError, LookupError) as error:
        raise BindError(
            f"the object code of {compiled.plan.name} does not load here: {error}; compile again"
        ) from error
    functions: dict[str, Any] = {}
    for name, address in loaded.addresses().items():
        functions[name] = _SEGMENT(address)
        functions[name].keep_alive = loaded
    return functions


def _externs(compiled: CompiledProgram) -> dict[str, Any]:
    targets = {t for s in compiled.plan.steps if isinstance(s, CallExtern) for t in (s.target, s.out) if t}
    try:
        return {f"op_{_safe(target)}": FIX_UPS.get(target) or resolve_target(target) for target in sorted(targets)}
    except LookupError as error:
        raise BindError(f"{compiled.plan.name} cannot be bound: {error}; compile again with this torch") from error


def _failure(compiled: CompiledProgram) -> Callable[[int, Sequence[str]], None]:
    lines = {record.name: record.origin.line for record in compiled.kernels}

    def fail(status: int, launches: Sequence[str]) -> None:
        raise_status(status, tuple(launches), lines)

    return fail
