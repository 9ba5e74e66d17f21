"""The product of this package as data: what happens before, at and after the call of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ._records import Format
from .contract import Dim, SubclassBoundary, TensorMeta
from .errors import PlanError
from .operations import OPERATIONS, Operation, Value
from .operations.symbols import BindSymbol
from .subclasses.call import SubclassCall

__all__ = ["CallSpec", "FakeResults", "LazyInput", "RandomState", "Return", "TangentSpec", "WrapperOptions"]
__all__ += ["WrapperPlan", "checks_aliases"]


@dataclass(frozen=True, slots=True)
class WrapperOptions:
    """What to generate.

    Attributes:
        check_aliasing: look, at each call, whether a mutated input shares memory with another input although
            it did not when the graph was captured. Costs nothing for graphs that mutate no input.
        debug: compare inputs, compiled outputs and results with the metadata at each call.
        keep_inputs: training graphs hold on to all their inputs; for the graphs of second derivatives.
    """

    check_aliasing: bool = True
    debug: bool = False
    keep_inputs: bool = False


@dataclass(frozen=True, slots=True)
class TangentSpec:
    """One tangent of the compiled backward: its forward output, and the layout it was traced for.

    A ``nested`` one is a tensor subclass and is brought into form where it is taken apart.
    """

    forward_output: int
    meta: TensorMeta
    nested: bool = False


@dataclass(frozen=True, slots=True)
class RandomState:
    """The compiled code takes a seed and an offset behind its other inputs and returns the next offset.

    Attributes:
        forward_offset: position of the new offset among all results of the compiled forward.
        backward_offset: the same among the gradients; ``None``: the backward takes and returns nothing of it.
        returns_offset: the forward's new offset stays among the results, as a forward output that the metadata counts;
            else it is taken off, and nothing else of the plan knows of it.
    """

    forward_offset: int
    backward_offset: int | None = None
    returns_offset: bool = False


@dataclass(frozen=True, slots=True)
class FakeResults:
    """What a call with fake tensors gets from the compiled forward: tensors, integers over ``symbols``, or ``None``.

    Sizes and strides are those that the compiled code really produces. The symbols are read off graph inputs, which
    are named ``d0``, ``d1``, .. (dense ones, where there are subclasses).
    """

    results: tuple[TensorMeta | Dim | None, ...]
    symbols: tuple[BindSymbol, ...] = ()


@dataclass(frozen=True, slots=True)
class LazyInput:
    """Tensor number ``position`` of the compiled graph is lazily conjugated or negated; see Note [Lazy inputs]."""

    position: int
    conj: bool
    neg: bool

    def __str__(self) -> str:
        return f"{self.position} ({' and '.join(['conjugated'] * self.conj + ['negated'] * self.neg)})"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The compiled graph itself.

    Positions count graph inputs (``graph_inputs`` names them) and forward outputs. ``own_outputs`` are handed to the
    caller as tensors, so they must not be views of a buffer of the backend. ``written_inputs`` are written back after
    the call: see Note [Saved inputs that are written back]. ``backward_symbols`` are read in the forward for the
    backward. ``repeated_outputs`` come out of the graph as the tensor that an earlier output is, or as a view of an
    input that changes its shape before they are read.

    For second derivatives (see Note [Second derivatives]): ``saved_inputs`` says which input each saved tensor is, or
    -1; ``unsaved_inputs`` are remembered weakly; ``kept_inputs`` are saved behind the saved tensors, for their history
    or, if ``keeps_values``, with their values; ``scalar_inputs`` are no tensors.

    ``subclasses``: the graph is dense and the values here are not; see Note [Where subclasses are taken apart].
    ``donated``: saved tensors that the backward may overwrite; see Note [Donated buffers].
    ``backward_mutated_inputs`` are given to the backward behind the tangents, as they are by then; it returns their
    new values in the place of gradients, and their version counters move by ``backward_version_steps``.
    ``lazy_inputs``: which tensors that the graph takes (dense ones) are conjugated or negated; see Note [Lazy inputs].
    ``random``, ``fakes``: what stands directly around the compiled code; see the notes of :mod:`.forward_adapters`.
    ``reached_by``: per differentiable input, the numbers of the tangents that its gradient comes from; empty: all
    inputs get theirs from every tangent. ``enables_grad``: the call is part of autograd's graph in spite of grad mode.
    """

    graph_inputs: tuple[Value, ...]
    num_forward_outputs: int
    own_outputs: tuple[int, ...] = ()
    training: bool = False
    num_saved_tensors: int = 0
    num_saved_symints: int = 0
    written_inputs: tuple[int, ...] = ()
    differentiable_inputs: tuple[int, ...] = ()
    differentiable_outputs: tuple[int, ...] = ()
    tangents: tuple[TangentSpec, ...] = ()
    backward_symbols: tuple[BindSymbol, ...] = ()
    saved_inputs: tuple[int, ...] = ()
    unsaved_inputs: tuple[int, ...] = ()
    kept_inputs: tuple[int, ...] = ()
    keeps_values: bool = False
    scalar_inputs: tuple[int, ...] = ()
    subclasses: SubclassCall | None = None
    repeated_outputs: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    backward_mutated_inputs: tuple[int, ...] = ()
    backward_version_steps: tuple[int, ...] = ()
    random: RandomState | None = None
    fakes: FakeResults | None = None
    lazy_inputs: tuple[LazyInput, ...] = ()
    reached_by: tuple[tuple[int, ...], ...] = ()
    enables_grad: bool = False

    def unreached(self, missing: Sequence[bool]) -> tuple[int, ...]:
        """The graph inputs that have no gradient in a call in which these tangents are ``missing``."""
        if not self.reached_by or not any(missing):
            return ()
        rows = zip(self.differentiable_inputs, self.reached_by, strict=True)
        return tuple(index for index, numbers in rows if all(missing[number] for number in numbers))


@dataclass(frozen=True, slots=True)
class Return:
    """One value that the caller gets: a named one, or a constant."""

    value: Value | None = None
    constant: bool | int | float | str | None = None

    def __str__(self) -> str:
        return self.value if self.value is not None else repr(self.constant)


def checks_aliases(plan: WrapperPlan) -> bool:
    """Whether a call may raise :class:`.AliasingChangedError`: the plan relies on who shares memory with whom."""
    return any(operation.checks_memory for operation in plan.prologue)


@dataclass(frozen=True, slots=True)
class WrapperPlan:
    """Everything about a call but the compiled code; see Note [A plan is a small register program].

    ``num_inputs`` counts the caller's flat arguments, duplicates included. Compares by value, prints as a
    program, and round-trips through JSON.
    """

    num_inputs: int
    prologue: tuple[Operation, ...]
    call: CallSpec
    epilogue: tuple[Operation, ...]
    returns: tuple[Return, ...]

    def to_json(self) -> str:
        """Canonical JSON text; ``WrapperPlan.from_json(p.to_json()) == p``."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> WrapperPlan:
        """Rebuild from :meth:`to_json`. Raises :class:`PlanError` on another version or an unknown record."""
        return _FORMAT.from_text(text)

    def __str__(self) -> str:
        call = self.call
        outputs = [f"fw{i}" for i in range(call.num_forward_outputs)]
        lines = [f"wrapper({', '.join(f'in{i}' for i in range(self.num_inputs))}):"]
        lines += [f"  {operation}" for operation in self.prologue]
        kind = "training" if call.training else "inference"
        lines.append(f"  {', '.join(outputs) or '()'} = {kind} call({', '.join(call.graph_inputs)})")
        if call.training:
            lines.append(f"    saves {call.num_saved_tensors} tensors, {call.num_saved_symints} symints")
            if call.donated:
                lines.append(f"    the backward may overwrite saved tensors {call.donated}")
            if call.backward_mutated_inputs:
                lines.append(f"    the backward writes to inputs {call.backward_mutated_inputs}")
            gradients = f"inputs {call.differentiable_inputs}, outputs {call.differentiable_outputs}"
            lines.append(f"    differentiable: {gradients}")
        if call.subclasses is not None:
            lines.append(f"    over {call.subclasses.num_dense_inputs} dense inputs, with subclasses")
        if call.random is not None:
            lines.append(
                f"    draws with a seed and an offset; the next offset is forward result {call.random.forward_offset}"
            )
        if call.lazy_inputs:
            lines.append(f"    lazily: inputs {', '.join(map(str, call.lazy_inputs))}")
        if call.fakes is not None:
            lines.append("    fake calls get fake results")
        lines += [f"  {operation}" for operation in self.epilogue]
        lines.append(f"  return [{', '.join(map(str, self.returns))}]")
        return "\n".join(lines)


class _BoundaryForm:
    """A boundary has a format of its own."""

    def to_raw(self, boundary: SubclassBoundary, /) -> Any:
        return boundary.to_raw()

    def from_raw(self, raw: Any, /) -> SubclassBoundary:
        return SubclassBoundary.from_raw(raw)


class _OperationForm:
    """An operation is told by the name of its class, which is imported when there is one."""

    def to_raw(self, operation: Operation, /) -> Any:
        name = type(operation).__name__
        if name not in OPERATIONS:
            raise PlanError(f"the aotkit wrapper plan can't be written: a {name} is no operation of plans")
        return {"record": name, **_format_of(name).to_raw(operation)["record"]}

    def from_raw(self, raw: Any, /) -> Operation:
        fields = dict(raw) if isinstance(raw, dict) else {}
        name = fields.pop("record", None)
        if not isinstance(name, str) or name not in OPERATIONS:
            known = ", ".join(sorted(OPERATIONS))
            raise PlanError(f"the aotkit wrapper plan can't be read: the operation {name!r} is none of {known}")
        read = _format_of(name)
        return read.from_raw({"format": read.name, "version": read.version, "record": fields})


@cache
def _format_of(operation: str) -> Format[Operation]:
    return Format(OPERATIONS[operation], f"{operation} of an aotkit wrapper plan", 1, error=PlanError)


_FORMAT = Format(
    WrapperPlan,
    "aotkit wrapper plan",
    5,
    error=PlanError,
    own={SubclassBoundary: _BoundaryForm(), Operation: _OperationForm()},
)
