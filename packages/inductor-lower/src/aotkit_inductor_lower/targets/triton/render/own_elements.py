"""Which loads a value is computed from, element by element, whatever Triton makes of the instructions.

Note [What a thread overwrites]
    Triton gives each load and each store a layout of its own: how many neighbours a thread has, and so which elements.
    A float32 load has eight a thread where a half is loaded beside it, and a store at the same place four. That another
    thread has done its load is certain only where what is stored is computed from what that thread loaded: the number
    then goes from the one to the other, through registers or through shared memory behind a barrier of Triton's.

    "Computed from" has to outlive Triton's rewriting. ``x * 0`` is 0 for integers, and a comparison or one side of a
    ``where`` may turn out to be constant. So only values that are floats all the way count, and integers that constants
    are added to; of a ``where`` the loads that both sides are computed from, and those of a float that is compared with
    a number to choose between a constant and what is none (relu).

    An element has to be one thread's besides: with fewer elements than threads several load the same one, and only one
    of them stores it. And its place must be no other element's: of an index like ``i0 // 2`` two of them have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ....ir import Compute, Const, DType, Instr, Load
from ....ir.walk import value_types
from ....ops.dtypes import is_float
from ....symbolic import Expr, Symbol, SymbolKind

__all__ = ["loads_of_elements", "one_place_each"]

_NOTHING: frozenset[str] = frozenset()
_ORDER = frozenset({"lt", "le", "gt", "ge"})


def loads_of_elements(body: Sequence[Instr]) -> dict[str, frozenset[str]]:
    """For each value the loads that its elements are certain to be computed from, each from one element."""
    types = value_types(body)
    numbers = {i.result for i in body if isinstance(i, Const) and i.value == i.value}
    found: dict[str, frozenset[str]] = {}
    for i in body:
        if isinstance(i, Load):
            found[i.result] = frozenset({i.result})
        elif isinstance(i, Compute):
            found[i.result] = _loads_of_result(i, types, numbers, found)
    return found


def _loads_of_result(
    i: Compute, types: Mapping[str, DType], numbers: Set[str], found: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    args = [found.get(a, _NOTHING) for a in i.args]
    if i.op == "where":
        condition, yes, no = args
        to_number = not numbers.isdisjoint(i.args[1:]) and (yes or no)
        return condition if to_number else yes & no
    with_number = not numbers.isdisjoint(i.args)
    compared = i.op in _ORDER and is_float(types.get(i.args[0], DType.I64))
    outlives = is_float(i.dtype) or (with_number and (compared or i.op in ("add", "sub")))
    return _NOTHING.union(*args) if outlives else _NOTHING


def one_place_each(index: Expr) -> bool:
    """Whether an index is a sum of multiples of loop variables."""
    for monomial, _ in index.terms:
        loops = [atom for atom in monomial if not (isinstance(atom, Symbol) and atom.kind is SymbolKind.SIZE)]
        if len(loops) > 1 or not all(isinstance(a, Symbol) and a.kind is not SymbolKind.VALUE for a in loops):
            return False
    return True
