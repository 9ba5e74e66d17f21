"""Forms of the nests that attention consists of: what they compute, without memory.

A form says for each instruction what it does, and how far before it those are that it takes; so two nests have one form
if they compute the same, whatever their values, buffers and loops are called (Note [Attention as a nest]).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import CONTRACTIONS, Compute, DType, Instr, Load, Reduce, Store
from ..ir.walk import operands
from ..ops.dtypes import is_half
from .walk import PerfectNest

__all__ = ["CLEAR", "DIVISOR", "NO_KEY", "SCORES", "SUMS", "Score", "cast_line", "changes_form", "form_of"]
__all__ += ["weights_form", "written"]


def form_of(nest: PerfectNest) -> str:
    """What a nest computes, without memory: ops, with how far before them the instructions are that they take; ``^`` is
    a value from another nest."""
    found: list[str] = []
    place: dict[str, int] = {}
    for position, instr in enumerate(nest.body):
        given = ",".join(str(position - place[name]) if name in place else "^" for name in operands(instr))
        found.append(_word(instr, given))
        if not isinstance(instr, Store):
            place[instr.result] = position
    return " ".join(found)


def _word(instr: Instr, given: str) -> str:
    if isinstance(instr, Store):
        kind = "store" if instr.plain else "store+" if instr.mode == "add" and instr.mask is None else "other"
        return f"{kind}({given})"
    if isinstance(instr, Compute):
        return f"{'mul' if instr.op in CONTRACTIONS.values() else instr.op}({given})"
    if isinstance(instr, Reduce):
        return f"{instr.kind}({given})" if not instr.running else "other"
    plain = not (isinstance(instr, Load) and instr.mask is not None)
    return type(instr).__name__.lower() if plain else "other"


def written(text: str) -> str:
    """A form by lines as ``name = op name name``: what :func:`form_of` says of such a nest. Names that no line gives
    are of other nests."""
    found: list[str] = []
    place: dict[str, int] = {}
    for position, line in enumerate(filter(None, map(str.strip, text.split(";")))):
        name, _, what = line.rpartition("=")
        op, *given = what.split()
        distances = ",".join(str(position - place[each]) if each in place else "^" for each in given)
        found.append(f"{op}({distances})" if given else op)
        place[name.strip()] = position
    return " ".join(found)


CLEAR = written("zero = const; store zero")
SUMS = tuple(
    written(f"a = load; b = load {casts}; c = mul a b; store+ c") for casts in ("", "; a = cast a; b = cast b")
)
NO_KEY = written("zero = const; least = const; none = eq top least; top = where none zero top")
DIVISOR = "zero = const; one = const; none = eq total zero; divisor = where none one total;"


def cast_line(name: str, dtype: DType) -> str:
    """The line that rounds a value to a type."""
    return f"{name} = cast {name};" if is_half(dtype) else ""


@dataclass(frozen=True, slots=True)
class Score:
    """How scores are masked, in a form."""

    added: str = ""  # or "plain", or "cast"
    seen: str = ""  # or "adds", or "replaces"
    causal: bool = False
    window: bool = False
    capped: bool = False

    @property
    def text(self) -> str:
        lines = "score = load; scale = const; score = mul score scale;"
        if self.capped:
            lines += "share = const; score = mul score share; tangent = tanh score; cap = const;"
            lines += "score = mul tangent cap;"
        if self.added:
            lines += "bias = load;" + ("bias = cast bias;" if self.added == "cast" else "")
        if self.seen:
            lines += "seen = load;"
        if self.seen == "replaces":
            lines += "score = add score bias;" if self.added else ""
            lines += "hidden = const; score = where seen score hidden;"
        elif self.seen:
            lines += ("" if self.added else "bias = const;") + "hidden = const; bias = where seen bias hidden;"
        if self.seen == "adds" or (self.added and not self.seen):
            lines += "score = add score bias;"
        if self.causal:
            lines += "key = index; query = index; below = le key query; least = const;"
            lines += "score = where below score least;"
        if self.window:
            lines += "first = index; key = index; near = le first key; least = const; score = where near score least;"
        return lines


_ADDED, _SEEN = ("", "plain", "cast"), ("", "adds", "replaces")
_PLACES = ((False, False), (True, False), (True, True))
SCORES = {
    capped: [Score(added, seen, *places, capped) for added in _ADDED for seen in _SEEN for places in _PLACES]
    for capped in (False, True)
}
_KEPT = "kept = load; much = const; none = const; factor = where kept much none;"


def weights_form(dtype: DType, kept: bool) -> str:
    """The form of the forward's weights."""
    lines = "score = load; below = sub score top; weight = exp below;"
    lines += (_KEPT + "used = mul weight factor;") if kept else ""
    name = "used" if kept else "weight"
    rounded = f"stored = cast {name};" if is_half(dtype) else ""
    return written(f"{lines} {rounded} store {'stored' if rounded else name}; sum weight")


def changes_form(score: Score, dtype: DType, own: bool, kept: bool, stored: bool) -> str:
    """The form of the backward's weights and gradients of scores."""
    lines = score.text + "top = load; below = sub score top; weight = exp below;"
    lines += "total = load; weight = div weight total;" if own else ""
    lines += (_KEPT + "used = mul weight factor;") if kept else ""
    name = "used" if kept else "weight"
    rounded = f"rounded = cast {name};" if is_half(dtype) else ""
    lines += f"{rounded} store {'rounded' if rounded else name}; slope = load;"
    lines += "slope = mul slope factor;" if kept else ""
    lines += "delta = load; slope = sub slope delta; change = mul slope weight;"
    if score.seen == "replaces":
        lines += "nothing = const; change = where seen change nothing;"
    lines += "store change;" if stored else ""
    if score.capped:
        lines += "one = const; square = mul tangent tangent; rest = sub one square; change = mul change rest;"
    lines += "scale = const; change = mul change scale;"
    return written(f"{lines} {cast_line('change', dtype)} store change")
