"""Masks of attention that kernels compute of where a score is: of batch and head, query and key.

Note [Masks in a nest of attention]
    In the nest whose scores have masks, what is computed without scores is a mask: the condition of a choice between a
    score and something else, and what is added to a score. A choice between a number and what is added stays, with a
    mask for its condition and one for the other. What only compares a position of a key with one of a query, as causal
    masks and windows are written, is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import Compute, Const, DType, Index, Instr, Load, Reduce, Store
from ..ir.walk import definitions, loads, operands, substitute, value_types
from ..symbolic import Expr, Symbol, SymbolKind, sym, to_expr
from .walk import PerfectNest

__all__ = ["HEAD", "KEY", "QUERY", "Places", "with_places"]

QUERY, KEY, HEAD = "the query", "the key", "the shared head"


@dataclass(frozen=True, slots=True)
class Places:
    """A mask that is computed. ``body``: elementwise instructions that make ``value``, with index expressions of the
    loops of the grid, of :data:`QUERY` and :data:`KEY`, and where several heads of queries share keys in a backward, of
    :data:`HEAD`, which of these it is."""

    body: tuple[Instr, ...]
    value: str
    dtype: DType

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it is made of."""
        return tuple(dict.fromkeys(load.buffer for load in loads(self.body)))

    def at(self, symbols: Mapping[Symbol, Expr]) -> Places:
        """The same with loops named otherwise."""
        return replace(self, body=tuple(substitute(instr, symbols) for instr in self.body))


def with_places(nest: PerfectNest, scratch: Iterable[str]) -> tuple[PerfectNest, dict[str, Places]]:
    """The nest with loads in the place of masks that it computes, and these by the loads' results."""
    known, own = definitions(nest.body), set(scratch)
    scores = _of_scores(nest.body, own)
    found: dict[str, Places] = {}
    dropped: set[int] = set()
    for instr in nest.body:
        for name in _masks(instr, scores, known):
            part = _made_of(name, nest.body)
            if name not in found and _is_elementwise(part, own):
                found[name] = Places(part, name, value_types(part)[name])
                dropped |= {id(each) for each in part}
    body: list[Instr] = []
    for instr in nest.body:
        if not isinstance(instr, Store) and instr.result in found:
            body.append(Load(instr.result, "", (to_expr(0),), found[instr.result].dtype))
        elif id(instr) not in dropped:
            body.append(instr)
    return PerfectNest(nest.loops, tuple(body)), found


def _of_scores(body: Sequence[Instr], scratch: set[str]) -> set[str]:
    """Values that scores, or what else is in scratch memory, are part of."""
    found: set[str] = set()
    for instr in body:
        if isinstance(instr, Store):
            continue
        loaded = isinstance(instr, Load) and instr.buffer in scratch
        if loaded or any(name in found for name in operands(instr)):
            found.add(instr.result)
    return found


def _masks(instr: Instr, scores: set[str], known: Mapping[str, Instr]) -> list[str]:
    """The values that an instruction changes scores by, which it computes."""
    if not isinstance(instr, Compute) or instr.result not in scores:
        return []
    if instr.op == "where" and instr.args[0] not in scores:
        found = [instr.args[0]]
    elif instr.op == "add":
        found = [name for name in instr.args if name not in scores]
        choice = known.get(found[0]) if len(found) == 1 else None
        if isinstance(choice, Compute) and choice.op == "where" and isinstance(known.get(choice.args[2]), Const):
            found = list(choice.args[:2])
    else:
        return []
    return [name for name in found if _is_computed(known.get(name), known)]


def _is_computed(instr: Instr | None, known: Mapping[str, Instr]) -> bool:
    """Whether a value is no number, is not read, maybe in another type, and compares no two positions alone."""
    if isinstance(instr, Compute) and instr.op == "cast":
        return not isinstance(known.get(instr.args[0]), Load)
    if isinstance(instr, Compute) and instr.op == "le":
        first, second = (known.get(name) for name in instr.args)
        return not (isinstance(first, Index) and isinstance(second, Index) and _is_in_form(first.expr, second.expr))
    return instr is not None and not isinstance(instr, Load | Const)


def _is_in_form(first: Expr, second: Expr) -> bool:
    """Whether a comparison of positions is written as that of a causal mask, or of a window."""
    back = [(first - sym(s.name)).constant for s in first.symbols]
    return second.symbol is not None and len(back) == 1 and back[0] is not None and back[0] <= 0


def _made_of(name: str, body: Sequence[Instr]) -> tuple[Instr, ...]:
    """The instructions that a value is made of."""
    wanted, found = {name}, list[Instr]()
    for instr in reversed(body):
        if not isinstance(instr, Store) and instr.result in wanted:
            found.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(found))


def _is_elementwise(part: Sequence[Instr], scratch: set[str]) -> bool:
    """Whether instructions read memory of others only, at places that loops say."""
    if any(isinstance(instr, Reduce) or not isinstance(instr, Load | Const | Index | Compute) for instr in part):
        return False
    if any(load.buffer in scratch or load.mask is not None for load in loads(part)):
        return False
    exprs = [e for i in part if isinstance(i, Load | Index) for e in (i.indices if isinstance(i, Load) else (i.expr,))]
    return not any(symbol.kind is SymbolKind.VALUE for e in exprs for symbol in e.symbols)
