"""Where the memory of each buffer comes from.

Note [What may live in the arena]
    A temporary on the CPU, written by generated kernels or by an ATen op's ``out=`` overload, that is neither
    returned (nor any view of it), nor passed to an ATen op that may hand its argument back or keep it: one whose
    schema says so, one made of other ops, or one outside aten. Nor to an op that counts elements from the start of
    the storage, which in the arena is not the buffer's.

Note [Large temporaries of a training step]
    The arena has the size that its fullest moment needs, and keeps it. A step of training holds most where the forward
    ends and the backward begins, and its temporaries are largest elsewhere: at the first layers, whose gradients come
    when most of what was saved is gone. So in a step of training large temporaries are tensors of torch's, allocated
    before the first kernel that writes them and given back behind the last that reads them, and the arena is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..analysis.nests import buffer_bytes
from ..errors import CodegenError
from ..ir import Buffer, BufferKind, BufferRef, ExternCall, Program
from ..ir.in_place import row_major
from ..ir.walk import buffers_of, nests, step_reads
from ..kernel_passes.linearize import Placement, placements
from ..launch_plan.records import StorageClass
from ..ops.aten import addresses_storage, may_alias_arguments, out_overload
from ..ops.dtypes import dtype_from_torch_name

__all__ = ["Storage", "Workspace", "assign_storage", "check_on_cpu"]


@dataclass(frozen=True, slots=True)
class Storage:
    """``classes``: the storage class of each buffer but scratch, in the order of their declarations. ``placements``:
    the memory that each alias views, and the offset there. ``large``: allocated temporaries that the arena could hold,
    see Note [Large temporaries of a training step]. ``together``: nests whose kernels share a launch, each with the
    number of that."""

    classes: Mapping[str, StorageClass]
    placements: Mapping[str, Placement]
    large: frozenset[str] = frozenset()
    together: Mapping[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """The classes, with ``"large"`` for large temporaries."""
        return {**self.classes, **dict.fromkeys(self.large, "large")}

    def root(self, name: str) -> str:
        """The buffer that owns the memory of ``name``."""
        place = self.placements.get(name)
        return place.root if place else name


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory beside the program's own that the kernel of the nest ``step`` needs: allocated before its segment runs,
    and freed behind it."""

    step: str
    buffer: Buffer


def assign_storage(program: Program, *, arena: bool = True, arena_bytes: int | None = None) -> Storage:
    """Where the buffers of a scheduled program live. Without an ``arena``, torch's allocator gives temporaries.
    ``arena_bytes``: as of :class:`~.options.LowerOptions`."""
    where = placements(program)
    storage = Storage({}, where)
    calls = {r: step for step in program.steps if isinstance(step, ExternCall) for r in step.results if r is not None}
    barred = _barred_from_arena(program, storage) if arena else {b.name for b in program.buffers}
    classes = {
        buffer.name: _storage_class(buffer, buffer.name in where, calls.get(buffer.name), buffer.name in barred)
        for buffer in program.buffers
        if buffer.kind is not BufferKind.SCRATCH
    }
    if arena_bytes is None:
        return Storage(classes, where)
    large = frozenset(
        b.name for b in program.buffers if classes.get(b.name) == "arena" and buffer_bytes(b) > arena_bytes
    )
    return Storage(classes | dict.fromkeys(large, "allocated"), where, large)


def _storage_class(buffer: Buffer, aliased: bool, call: ExternCall | None, barred: bool) -> StorageClass:
    """``call`` is the one whose result the buffer is."""
    if buffer.kind is BufferKind.INPUT:
        return "input"
    if buffer.kind is BufferKind.CONSTANT:
        return "constant"
    if aliased:
        return "view"
    fits = (
        buffer.kind is BufferKind.TEMPORARY
        and not barred
        and buffer.device.startswith("cpu")
        and dtype_from_torch_name(buffer.dtype) is not None
    )
    if call is None:
        return "arena" if fits else "allocated"
    planned = fits and len(call.results) == 1 and not call.mutates and row_major(buffer)
    return "arena" if planned and out_overload(call.target) is not None else "call result"


def _barred_from_arena(program: Program, storage: Storage) -> set[str]:
    barred = {storage.root(o.name) for o in program.outputs if isinstance(o, BufferRef)}
    for step in program.steps:
        if isinstance(step, ExternCall) and (may_alias_arguments(step.target) or addresses_storage(step.target)):
            barred.update(map(storage.root, step_reads(step)))
    return barred


def check_on_cpu(program: Program) -> None:
    """Raise :class:`~.errors.CodegenError` for a nest over a buffer that is not on the CPU."""
    buffers = buffers_of(program)
    for nest in nests(program):
        for name in (*nest.reads, *nest.writes):
            if not buffers[name].device.startswith("cpu"):
                raise CodegenError(
                    f"nest {nest.name} uses {name} on {buffers[name].device}; only CPU kernels are generated here"
                )
