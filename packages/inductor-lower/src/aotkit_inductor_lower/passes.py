"""One record for a pass of any level, the runner of a list of them, and what they share while they run.

Note [Fuel]
    Every optional rewrite asks for fuel before it is made, at every level, from one counter. So ``fuel=N`` gives the
    program in which the first N rewrites are made and no others, and a wrong rewrite is found by bisection. A pass that
    took no fuel gives back what it was given, but for required ones: what must be done takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from ._observer import Observer
from .errors import UnknownPassError
from .options import LowerOptions
from .target import NO_MACHINE, Measure, Race, Target

__all__ = [
    "NO_FUEL",
    "Decision",
    "DecisionKind",
    "Fuel",
    "Level",
    "Observer",
    "Pass",
    "PassContext",
    "check_disabled",
    "check_order",
    "coalesces",
    "fuses",
    "in_order",
    "optional",
    "run_passes",
    "stage",
]

T = TypeVar("T")
DecisionKind = Literal[
    "inline",
    "vertical",
    "horizontal",
    "mixed-order",
    "split",
    "concat",
    "contraction",
    "overlap",
    "gather",
    "pack",
    "layout",
]
NO_FUEL = "there is no fuel left for it"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. ``kind``: ``inline`` (a producer computed again where it is read), ``vertical`` (a producer and its
    reader in one kernel), ``horizontal`` (two kernels that read the same data), ``mixed-order`` (column sums in a
    kernel that walks over rows), ``split`` (a long reduction cut into chunks; not ``fused``), ``concat`` (a joined
    tensor computed where it is read, not stored), ``contraction`` (a matrix product, ``fused`` if kernels compute
    it), ``overlap`` (a collective and its wait, ``fused`` if more steps run in between than before), ``pack`` (a
    constant matrix, ``fused`` if it is laid out as a product reads it) or ``layout`` (a temporary that gets another
    one). ``first`` and ``second`` are nests' names, or ATen's. ``reason`` says why, in both cases."""

    kind: DecisionKind
    first: str
    second: str
    fused: bool
    reason: str

    def __str__(self) -> str:
        if self.kind in ("contraction", "overlap", "gather", "pack", "layout"):
            return f"{self.kind}: {self.first}: {self.reason}"
        verb = "fused" if self.fused else "kept apart"
        return f"{self.kind}: {self.first} and {self.second} {verb}: {self.reason}"


@contextmanager
def stage(observer: Observer | None, name: str) -> Iterator[None]:
    """Tell the observer, if there is one, about a stage."""
    if observer is None:
        yield
        return
    with observer.stage(name):
        yield


class Fuel:
    """How many optional rewrites may still be made, see Note [Fuel]. ``limit``: ``None`` for any number."""

    __slots__ = ("left", "used")

    def __init__(self, limit: int | None = None) -> None:
        self.left = limit if limit is not None else 1 << 62
        self.used = 0

    def take(self) -> bool:
        """Whether one more rewrite may be made."""
        if self.left < 1:
            return False
        self.spend(1)
        return True

    def spend(self, made: int) -> None:
        """Count rewrites that were made, of those that were ``left``."""
        self.left -= made
        self.used += made


@dataclass(frozen=True, slots=True)
class PassContext:
    """What passes are given beside the program. ``decisions`` is what they append to, and ``constants``: tensors of the
    program by the names of their buffers, of which a pass may add others.

    ``target``: what the program is compiled for, or :data:`.NO_MACHINE`. ``measure``: how long products of matrices
    take there, if that is measured, and ``race``: how long parts of the program do. ``released``: inputs that nobody
    but the call holds.
    """

    options: LowerOptions
    observer: Observer | None
    fuel: Fuel
    decisions: list[Decision] = field(default_factory=list)
    target: Target = NO_MACHINE
    measure: Measure | None = None
    race: Race | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    released: frozenset[str] = frozenset()

    @staticmethod
    def of(
        options: LowerOptions | None = None,
        observer: Observer | None = None,
        target: Target = NO_MACHINE,
        measure: Measure | None = None,
    ) -> PassContext:
        """The context of one graph: all the fuel that ``options`` give, and no decision yet."""
        options = options or LowerOptions()
        return PassContext(options, observer, Fuel(options.fuel), target=target, measure=measure)


def _always(_ctx: PassContext) -> bool:
    return True


def fuses(ctx: PassContext) -> bool:
    """``when`` of passes that are part of fusion."""
    return ctx.options.fuse


def coalesces(ctx: PassContext) -> bool:
    """``when`` of passes that are part of fusion where neighbouring threads should access neighbouring elements."""
    return fuses(ctx) and ctx.target.capabilities.coalesces


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """A named pass over a graph, a program or a kernel.

    ``run`` gives what the subject becomes; passes over graphs change the copy that they are given. ``why`` is one
    sentence. ``after`` names passes that must come earlier in the list, ``when`` tells whether the pass takes part.
    ``required``: it can't be left out, and takes fuel for nothing that must be; the others take some for each rewrite.
    """

    name: str
    run: Callable[[T, PassContext], T]
    why: str
    after: tuple[str, ...] = ()
    when: Callable[[PassContext], bool] = _always
    required: bool = False


@dataclass(frozen=True, slots=True)
class Level(Generic[T]):
    """What the runner asks about the subjects of passes: their text, and with the option ``verify``, whether they keep
    their rules (``check`` raises, and gives the subject as it reads back from its text)."""

    show: Callable[[T], str]
    check: Callable[[T], T]


def check_order(passes: Sequence[Pass[T]]) -> None:
    """Raises ``ValueError`` if a pass stands before one it must come after, or if a name is used twice."""
    seen: set[str] = set()
    for each in passes:
        missing = [name for name in each.after if name not in seen]
        if missing or each.name in seen:
            raise ValueError(f"pass {each.name} must come after {', '.join(missing) or 'nothing of its own name'}")
        seen.add(each.name)


def in_order(*passes: Pass[T]) -> tuple[Pass[T], ...]:
    """A list of passes, once :func:`check_order` has nothing against it."""
    check_order(passes)
    return passes


def optional(passes: Sequence[Pass[T]]) -> tuple[str, ...]:
    """The names of those that may be left out."""
    return tuple(each.name for each in passes if not each.required)


def check_disabled(disabled: Sequence[str], known: Sequence[str]) -> None:
    """Raises :class:`~.errors.UnknownPassError` for a name that is no optional pass."""
    unknown = sorted(set(disabled) - set(known))
    if unknown:
        raise UnknownPassError(
            f"there is no pass named {', '.join(unknown)} to leave out; the passes are {', '.join(known)}"
        )


def run_passes(passes: Sequence[Pass[T]], subject: T, ctx: PassContext, level: Level[T]) -> T:
    """The subject after all passes that take part and are not disabled. Each is timed, and what it made dumped if it
    changed something; with the option ``verify`` that is checked, and read back from its own text."""
    for each in passes:
        if not each.when(ctx) or (each.name in ctx.options.disable and not each.required):
            continue
        used = ctx.fuel.used
        with stage(ctx.observer, each.name):
            after = each.run(subject, ctx)
        if ctx.observer is not None or ctx.options.verify:  # else nobody asks what changed, and comparing costs
            changed = ctx.fuel.used != used or (each.required and after != subject)
            if ctx.observer is not None and changed:
                _dump(ctx.observer, each, after, level)
            if ctx.options.verify and (changed or after != subject):
                after = level.check(after)
        subject = after
    return subject


def _dump(observer: Observer, each: Pass[T], after: T, level: Level[T]) -> None:
    observer.dump(each.name, "passes", lambda: level.show(after))
