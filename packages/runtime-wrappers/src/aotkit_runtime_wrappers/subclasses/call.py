"""What happens to tensor subclasses around the call of a dense graph, as data.

Note [Where subclasses are taken apart]
    The plan of a call is over the caller's values, subclass or not: autograd, write-backs and views work on the
    wrappers. The compiled graph is over dense tensors. Between the two sit two adapters, one around the compiled
    forward and one around the backward, which take wrappers apart and put them together. So nothing else in this
    package knows of subclasses, and a graph without them pays nothing.

Note [Witnesses]
    An in-place operation on a wrapper moves the wrapper's version counter, but not those of the tensors inside, which
    its ``__torch_dispatch__`` changes below autograd. A saved tensor that is one of these would not notice. So where
    one is saved, the wrapper is saved beside it: autograd then refuses the backward as it does in eager. The place of
    a wrapper of which nothing is saved holds ``None``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Opaque, SubclassBoundary, SubclassMeta
from ..operations.symbols import BindSymbol

__all__ = ["SubclassCall"]


@dataclass(frozen=True, slots=True)
class SubclassCall:
    """The dense graph inside a call over subclasses; see Note [Where subclasses are taken apart].

    Dense values have names: ``d3`` is dense input 3, ``fw2`` dense forward output 2.

    Attributes:
        boundary: how the caller's values and dense ones become each other.
        num_dense_inputs: of the dense graph.
        num_forward_outputs: of the dense graph.
        num_saved_tensors: of the dense graph.
        num_saved_symints: of the dense graph.
        own_outputs: dense forward outputs that must not be views of a buffer of the backend.
        mutated: dense inputs that are written back after the call.
        check_aliasing: look whether one of these shares memory with another dense input.
        symbols: what the forward reads from dense inputs, for sizes of the wrappers that it makes.
        kept_symbols: what the backward needs of these; saved behind the SymInts of the dense graph.
        kept_opaque: what it needs of attributes that are no tensors; saved behind the former.
        witnesses: arguments and forward outputs (of the caller's side) that are wrappers; see Note [Witnesses].
    """

    boundary: SubclassBoundary
    num_dense_inputs: int
    num_forward_outputs: int
    num_saved_tensors: int = 0
    num_saved_symints: int = 0
    own_outputs: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    check_aliasing: bool = True
    symbols: tuple[BindSymbol, ...] = ()
    kept_symbols: tuple[str, ...] = ()
    kept_opaque: tuple[Opaque, ...] = ()
    witnesses: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def class_conditions(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(argument, tangents): its gradient is of another class than itself because one of these tangents is there."""
        boundary = self.boundary
        rows = enumerate(zip(boundary.gradients, boundary.reached_by, boundary.inputs, strict=False))
        return tuple(
            (i, by) for i, (made, by, own) in rows if by and made is not None and _other_class(made.subclass, own)
        )

    @property
    def num_kept(self) -> int:
        """How many values that are no tensors the backward is given, those of the dense graph first."""
        return self.num_saved_symints + len(self.kept_symbols) + len(self.kept_opaque)

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return self.boundary.outer.is_training


def _other_class(gradient: SubclassMeta | None, argument: SubclassMeta | None) -> bool:
    return gradient is not None and (argument is None or gradient.type != argument.type)
