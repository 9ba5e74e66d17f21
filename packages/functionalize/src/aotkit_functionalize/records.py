"""What a traced function does to its inputs and outputs, as plain data.

One small record per input, per output and per tangent; each runtime wrapper reads only the records it
needs. Everything here is frozen, compares by value, and round-trips through JSON without pickle.

Symbolic sizes are kept as text over the symbols of :attr:`CallContract.symbols` (``"s0*s1 + 1"``, with
``//``, ``%``, ``min`` and ``max`` as in Python), so that the records do not hold on to a ``ShapeEnv``.

Note [Order of graph inputs and outputs]
    A captured graph takes the (already prepared: deduplicated, unwrapped) flat inputs in order, called
    ``primals_1 ..`` in a joint graph and ``arg0_1 ..`` in an inference graph, then, in a joint graph,
    ``tangents_1 ..``. Its forward outputs are, in this order:

        new values of mutated inputs | user outputs that the graph computes | intermediate bases

    and a joint graph then returns one gradient (or ``None``) per input. ``InputInfo.updated_output``,
    ``OutputInfo.graph_output`` and ``TangentInfo.forward_output`` are positions in that list.

Note [Inputs that the backward writes to]
    A user's backward may write to an input that needs no gradient (a buffer of scales, a counter). What it reads there
    is what the memory holds by then, not what the forward saw. So a joint graph takes such inputs once more, behind
    the tangents, and returns the new value in the place of the input's gradient, which is free.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "BackwardWrite",
    "CallContract",
    "Dim",
    "EffectInfo",
    "InputInfo",
    "InputKind",
    "MutationKind",
    "OutputInfo",
    "OutputKind",
    "StorageChange",
    "SymbolBinding",
    "TangentInfo",
    "TensorMeta",
    "ViewSpec",
]

Dim = int | str
"""A size, stride or offset in elements: an int, or the text of an expression over the graph's symbols."""


class InputKind(enum.Enum):
    """What a flat graph input is."""

    TENSOR = "tensor"
    SYMINT = "symint"
    OTHER = "other"  # opaque Python value, passed through


class MutationKind(enum.Enum):
    """What the traced function did to an input, as the caller will see it."""

    NONE = "none"
    DATA = "data"
    METADATA = "metadata"  # sizes/strides/offset changed (``x.t_()``), same storage
    DATA_AND_METADATA = "data_and_metadata"
    STORAGE = "storage"  # another storage, or another size of it; see StorageChange


class OutputKind(enum.Enum):
    """Where a user-visible output comes from."""

    FRESH = "fresh"  # its own memory, computed by the graph
    INPUT = "input"  # the very object the caller passed in
    ALIAS_OF_INPUT = "alias_of_input"  # a view to be regenerated from input ``base``
    ALIAS_OF_INTERMEDIATE = "alias_of_intermediate"  # a view of intermediate base number ``base``
    ALIAS_OF_OUTPUT = "alias_of_output"  # a view of user output number ``base``
    SYMINT = "symint"
    CONSTANT = "constant"  # ``None``, bool, int, float, str known while tracing


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of one dense tensor. Strides and offset are in elements; ``conj``, ``neg``: see Note [Lazy bits]."""

    dtype: str
    device: str
    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    storage_offset: Dim
    requires_grad: bool
    conj: bool = False
    neg: bool = False

    def __repr__(self) -> str:
        return _brief(self)


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """How to regenerate an alias from its base.

    ``base.view(dtype)``/``view_as_real``/``view_as_complex`` first if ``dtype`` is not the base's, then
    ``as_strided(sizes, strides, base.storage_offset() + offset_delta)``, the delta counted in elements of
    the alias's dtype from the base's first element. Relative, because Dynamo does not guard on the
    storage offset of inputs. Autograd metadata follows the record, not the replay: ``requires_grad``.
    ``under_no_grad``: the view was taken while grad mode was off, so it has no history of its own.
    ``detached``: autograd knows it as no view (``detach()`` was the last step). ``own_version``: neither does a write
    to one of both count as one to the other (``.data``). ``conj``, ``neg``: the bits of the view, whatever those of
    the base are; see Note [Lazy bits].
    """

    dtype: str
    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset_delta: Dim
    requires_grad: bool
    under_no_grad: bool = False
    detached: bool = False
    own_version: bool = False
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class StorageChange:
    """What became of the storage of an input, to be carried out on the caller's tensor.

    At most one of: ``input``, the index of the input whose storage it looks at now, as ``view`` of that input says;
    ``output``, the position of the forward output that it becomes; ``resized``: ``resize_`` to the sizes of ``view``.
    ``num_bytes``: the size that its storage has in the end, if it was changed.
    """

    input: int | None = None
    output: int | None = None
    resized: bool = False
    view: ViewSpec | None = None
    num_bytes: Dim | None = None


@dataclass(frozen=True, slots=True)
class InputInfo:
    """One flat input of the graph.

    ``mutation_hidden_from_autograd``: only through ``detach()``/``.data``, so the version counter stays.
    ``mutation_under_no_grad``: only under ``no_grad``/``inference_mode``; the version counter moves.
    ``updated_output``: forward-output position of the new value when the caller must be given one (data
    mutation: copied back; metadata mutation: ``new_view`` says which strides the caller's tensor takes).
    ``storage``: a change of its storage. ``version_steps``: by how much its version counter moves in eager mode.
    ``sets_requires_grad``: the function calls ``requires_grad_()`` (true) or ``detach_()`` (false) of it.
    """

    index: int
    kind: InputKind
    meta: TensorMeta | None = None
    is_leaf: bool = True
    mutation: MutationKind = MutationKind.NONE
    mutation_hidden_from_autograd: bool = False
    mutation_under_no_grad: bool = False
    updated_output: int | None = None
    new_view: ViewSpec | None = None
    is_static: bool = False
    storage: StorageChange | None = None
    version_steps: int = 0
    sets_requires_grad: bool | None = None


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """One flat user-visible output.

    ``base`` is an input index (INPUT, ALIAS_OF_INPUT), a position in the list of intermediate bases
    (ALIAS_OF_INTERMEDIATE) or a user output index (ALIAS_OF_OUTPUT). ``graph_output`` is the forward-output
    position of FRESH and SYMINT outputs; of an alias, the forward output whose history it has where that is not the
    history of a view (a custom autograd function made it); else ``None``. ``same_as`` is the index of an earlier
    output that is the very same object, if there is one; the record is complete without it. ``is_new_leaf``: the
    function made a leaf of autograd of it (``requires_grad_()``).
    """

    index: int
    kind: OutputKind
    meta: TensorMeta | None = None
    base: int | None = None
    view: ViewSpec | None = None
    graph_output: int | None = None
    constant: bool | int | float | str | None = None
    dynamic_dims: tuple[int, ...] = ()
    same_as: int | None = None
    is_new_leaf: bool = False


@dataclass(frozen=True, slots=True)
class TangentInfo:
    """One tangent input of the joint graph: which forward output it belongs to, and the layout traced for."""

    forward_output: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class BackwardWrite:
    """The backward writes to ``input`` and moves its version counter by ``version_steps``.

    See Note [Inputs that the backward writes to].
    """

    input: int
    version_steps: int


@dataclass(frozen=True, slots=True)
class SymbolBinding:
    """Where a symbol's value is read at run time: a SymInt (``dim`` is None) or a size/stride of a tensor.

    ``input_index`` counts inputs, or forward outputs if ``of_output``: a size that depends on data is known only after
    the graph has run.
    """

    name: str
    input_index: int
    source: str  # "int" | "size" | "stride" | "storage_offset"
    dim: int | None = None
    of_output: bool = False


@dataclass(frozen=True, slots=True)
class EffectInfo:
    """A change of global state that the caller must see after the call, or the presence of ordered operations.

    ``grad_mode``: grad mode is left as ``value``. ``enables_grad``: it is off before the call, and the function turns
    it on for some of what it does. ``token``: operations with effects of the kind ``value`` occur; the
    graph keeps their order itself (tokens never are inputs or outputs).
    """

    kind: str
    value: bool | int | float | str


@dataclass(frozen=True, slots=True)
class CallContract:
    """How a graph over these inputs and outputs is called; see Note [Order of graph inputs and outputs].

    ``num_forward_outputs`` counts mutated-input values, user outputs and bases together;
    ``num_mutated`` and ``num_intermediate_bases`` say how many come first and last.
    ``differentiable_inputs`` are the inputs that get a gradient in the joint graph. ``reached_by``: per input, the
    numbers of the tangents that its gradient comes from; without one of them it gets none, not zeros. Empty: of all.
    """

    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    tangents: tuple[TangentInfo, ...] = ()
    symbols: tuple[SymbolBinding, ...] = ()
    effects: tuple[EffectInfo, ...] = ()
    num_forward_outputs: int = 0
    num_mutated: int = 0
    intermediate_bases: tuple[TensorMeta, ...] = ()
    forward_requires_grad: tuple[bool, ...] = ()  # per forward output: is it differentiable
    differentiable_inputs: tuple[int, ...] = ()
    is_training: bool = False
    repeated_outputs: tuple[int, ...] = ()  # forward outputs that are the same graph value as an earlier one
    backward_writes: tuple[BackwardWrite, ...] = ()
    reached_by: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        lines = [f"{type(self).__name__}({'training' if self.is_training else 'inference'})"]
        for group in (self.inputs, self.outputs, self.tangents, self.backward_writes, self.symbols, self.effects):
            lines += [f"  {_brief(record)}" for record in group]
        return "\n".join(lines)


def _brief(record: Any) -> str:
    """Fields that differ from their defaults, so that a printed record is short enough to read."""
    parts = []
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            parts.append(f"{field.name}={value.value if isinstance(value, enum.Enum) else value!r}")
    return f"{type(record).__name__}({', '.join(parts)})"
