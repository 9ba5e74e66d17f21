"""Random programs. Every statement is tried in eager while it is generated, so that most programs are valid."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .cells import CELLS, VIEWS, Cell, Event, cells_of
from .compare import observe
from .overlap import last_element, overlaps
from .program import Program, run_setup
from .statements import (
    COMPUTE,
    DETACHED_WRITES,
    RANDOM,
    RANDOM_WRITES,
    RARE_WRITES,
    RESHAPES,
    VIEW_WRITES,
    VIEWS_BY_KIND,
    WRITES,
    Statement,
)

__all__ = ["Generated", "generate"]

LARGEST = 96  # elements of a value; views that repeat elements must not make programs slow
CANDIDATES = 12  # programs made for one number, of which the one that covers most is taken
DYNAMIC_SHARE = 0.08  # of programs are compiled for any size, which takes five times as long
INVALID_SHARE = 0.01  # of programs keep a statement that eager refuses
_EAGER_ERRORS = (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError)


@dataclass(frozen=True, slots=True)
class Generated:
    """A program and the cells that it covers."""

    program: Program
    cells: frozenset[Cell]

    def reached(self, goals: Sequence[Cell]) -> int:
        """How many of ``goals`` the program covers."""
        return len(self.cells.intersection(goals))


def generate(seed: int, goals: Sequence[Cell] | None = None) -> Generated:
    """The program number ``seed``, the same one for the same number and goals.

    ``goals``: cells to try to cover, all of one grad mode as far as the caller's mode goes; default: two by number.
    Most programs are such that eager runs them, and their backward, without an error.
    """
    if goals is None:
        goals = (CELLS[seed * 7919 % len(CELLS)], CELLS[(seed * 104729 + 11) % len(CELLS)])
    rng = random.Random(seed)
    best: Generated | None = None
    for _ in range(CANDIDATES):
        made = _Generator(rng, goals).generated()
        if not (rng.random() < INVALID_SHARE or _is_valid(made.program)):
            continue
        if best is None or made.reached(goals) > best.reached(goals):
            best = made
        if best.reached(goals) == len(goals):
            break
    return best or made


def _is_valid(program: Program) -> bool:
    program = replace(program, ignored=())  # a gradient that eager refuses may be refused although nobody asks for it
    with torch.set_grad_enabled(program.training):
        run = observe(program, program.function())
    return run.error is None and not run.gradients_raise


# --- inputs -----------------------------------------------------------------------------------------------------

#: How an input lies in its memory: the shape of the memory for a wanted shape, and the view that is taken of it.
_LAYOUTS: tuple[Callable[[tuple[int, ...]], tuple[tuple[int, ...], str] | None], ...] = (
    lambda s: (s, ""),  # contiguous
    lambda s: (s[::-1], ".t()") if len(s) == 2 else None,  # transposed
    lambda s: ((*s[:-1], 2 * s[-1]), "[..., ::2]") if s else None,  # with gaps
    lambda s: ((2 * s[0], *s[1:]), "[::2]") if len(s) > 1 else None,  # rows apart
    lambda s: ((s[0] + 1, *s[1:]), "[1:]") if s else None,  # at an offset
    lambda s: ((s[1], s[2], s[0]), ".permute(2, 0, 1)") if len(s) == 3 else None,
    lambda s: ((s[0] + 4, *s[1:]), f"[2:{s[0] + 2}]") if s else None,  # with neighbours that nobody may touch
    lambda s: ((*s[:-1], s[-1] + 5), f"[..., 3:{s[-1] + 3}]") if s else None,
)
_LAZY_SHARE = 0.04  # of inputs are negated or conjugated when they are read
_EXPANDED_SHARE = 0.005
_READS_WHAT_IT_WRITES = re.compile(r"X(\.detach\(\)|\.data)?\.\w+_\(Y")  # element by element, if X is Y
_UNDEFINED_SHARE = 0.003  # of the statements that are refused by design are kept; each goal tries several
_SHAPES = ((3, 4), (3, 4), (4, 4), (2, 6), (6,), (4,), (2, 3, 2), (1, 4), (), (4, 1), (3, 4), (4, 4), (0, 3))
_GOAL_SHAPES = ((3, 4), (4, 4), (2, 6), (3, 4), (4, 2), (2, 3, 2), (6,), (4,))
_SHARED_VIEWS = ("[1:]", "[:2]", ".t()", ".view(-1)", "[0]", "[::2]", "", ".unsqueeze(0)", "[..., 1:]") * 12 + (
    ".detach()",
)
_DTYPES = ("float32",) * 10 + ("float64", "float64", "int64", "bfloat16", "complex64", "complex64")


@dataclass
class _Generator:
    rng: random.Random
    goals: Sequence[Cell]
    setup: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    wanted_outputs: list[str] = field(default_factory=list)
    views: list[Event] = field(default_factory=list)
    writes: list[Event] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)  # of each name: own, view, detached
    scope: dict[str, Any] = field(default_factory=dict)
    reshaped: dict[int, bool] = field(default_factory=dict)  # per memory: did its owner require grad then
    settled: set[int] = field(default_factory=set)  # memories of which no more is to be returned
    count: int = 0
    training: bool = True

    def generated(self) -> Generated:
        rng = self.rng
        self.training = self.goals[0].mode != "inference" if self.goals else rng.random() < 0.65
        self._make_inputs()
        scope = {"torch": torch, **run_setup(self.setup)}
        self.scope = {name: scope[name] for name in ("torch", *dict.fromkeys(self.inputs))}
        self.origin = dict.fromkeys(self.inputs, "own")
        owned = {self._storage(name) for name in self.inputs}
        with torch.set_grad_enabled(self.training):
            self._statements()
            outputs = self._outputs()
        ignored = tuple(i for i in range(len(outputs)) if rng.random() < 0.1)
        program = Program(
            tuple(self.setup),
            tuple(self.inputs),
            tuple(self.body),
            tuple(outputs),
            self._afterwards(len(outputs)),
            dynamic=rng.random() < DYNAMIC_SHARE,
            ignored=ignored,
            training=self.training,
            entry=rng.choice(("graph", "function")),
        )
        return Generated(program, cells_of(self.views, self.writes, self._aliases(outputs, owned), self.training))

    def _statements(self) -> None:
        keep_invalid = self.rng.random() < INVALID_SHARE
        for goal in self.goals:
            if (goal.mode != "inference") is self.training:
                self._reach(goal)
        wanted = len(self.body) + (self.rng.choice((0, 0, 0, 1, 1, 2)) if self.goals else self.rng.randint(1, 3))
        for _ in range(3 * wanted):
            if len(self.body) >= wanted:
                break
            statement = self._random_statement()
            if self._try(statement):
                continue
            if keep_invalid:
                self.body.append(statement.text)
                break

    # --- inputs ---

    def _make_inputs(self) -> None:
        wanted = self.rng.choice((2, 3, 3, 4, 4) if self.goals else (1, 1, 2, 2, 2, 3, 4))
        shape: tuple[int, ...] = self.rng.choice(_GOAL_SHAPES)
        while len(self.inputs) < wanted:
            if self.rng.random() < 0.4:
                shape = self.rng.choice(_SHAPES)
            if self.inputs and self.rng.random() < 0.05:
                self.inputs.append(self.rng.choice(self.inputs))
            elif self.inputs and self.rng.random() < 0.15:
                self._shared_input()
            else:
                self._fresh_input(shape)

    def _fresh_input(self, shape: tuple[int, ...], history: str | None = None) -> None:
        number = len(self.inputs)
        layouts = [chosen for layout in _LAYOUTS if (chosen := layout(shape)) is not None]
        memory, view = self.rng.choice([layouts[0], layouts[0], *layouts])
        if len(shape) > 1 and self.rng.random() < _EXPANDED_SHARE:
            memory, view = (1, *shape[1:]), f".expand{shape}"
        dtype = self.rng.choice(_DTYPES)
        seen = f"m{number}{view}"
        if self.rng.random() < _LAZY_SHARE:
            seen = f"{seen}.conj()" if dtype.startswith("complex") else f"torch._neg_view({seen})"
        made = f"values({memory}, {number}, torch.{dtype})"
        history = history or self.rng.choice(("none", "leaf", "computed", "view of leaf"))
        match history if dtype != "int64" else "none":
            case "none":
                self.setup += [f"m{number} = {made}", f"a{number} = {seen}"]
            case "leaf":
                self.setup += [f"m{number} = {made}", f"a{number} = {seen}.detach().requires_grad_()"]
            case "computed":
                self.setup += [f"l{number} = {made}.requires_grad_()", f"m{number} = l{number}.clone()"]
                self.setup += [f"a{number} = {seen}"]
            case _:
                self.setup += [f"m{number} = {made}.requires_grad_()", f"a{number} = {seen}"]
        self.inputs.append(f"a{number}")

    def _shared_input(self) -> None:
        """Another view of the memory of an earlier input."""
        number = len(self.inputs)
        other = self.rng.choice(self.inputs)
        base = self.rng.choice((other, f"m{other.removeprefix('a')}"))
        known = "\n".join(self.setup)
        # What shares memory with a tensor that requires grad, and is no view of it, is refused by design.
        if base not in known or (f"{other} = {base}" in known and ".detach()" in known):
            base = other
        for _ in range(5):
            line = f"a{number} = {base}{self.rng.choice(_SHARED_VIEWS)}"
            try:
                run_setup([*self.setup, line])
            except _EAGER_ERRORS:
                continue
            self.setup.append(line)
            self.inputs.append(f"a{number}")
            return

    # --- a goal ---

    def _reach(self, goal: Cell) -> None:
        """Statements and outputs that cover ``goal``, if chance finds them."""
        quiet = goal.mode == "no_grad inside"
        for _ in range(8):
            source = self._goal_source(goal)
            view = Statement(f"{self._new()} = {self._fill(VIEWS_BY_KIND[goal.view], source)}", "view", goal.view)
            view_name = f"v{self.count}"
            through = goal.mutation == "through view" and goal.view != "detach"  # that would be a detached write
            target = view_name if through else source
            write = self._goal_write(goal, target)
            view_quiet = quiet and (write is None or self.rng.random() < 0.5)
            steps = [(view, view_quiet)]
            if write is not None:
                first = target == source and self.rng.random() < 0.3
                steps.insert(0 if first else 1, (write, quiet and (not view_quiet or self.rng.random() < 0.3)))
            saved = self._saved()
            if all(self._try(statement.under_no_grad() if off else statement) for statement, off in steps):
                self.wanted_outputs += self._goal_outputs(goal.alias, source, view_name)
                self.settled.add(self._storage(source))
                return
            self._restore(saved)

    def _goal_source(self, goal: Cell) -> str:
        names = [n for n in dict.fromkeys(self.inputs) if self.scope[n].dim()]
        touched = {event.storage for event in (*self.views, *self.writes)}
        fresh = [n for n in names if self._storage(n) not in touched]  # or several goals become another one
        source = self.rng.choice(fresh or names or self.inputs[:1])
        if goal.alias.endswith("intermediate"):
            name = self._new()
            made = self.rng.choice(("X * 2", "X + 1", "X.clone()", "X.sin()", "torch.ones(3, 4)", "X.clone().detach()"))
            self._try(Statement(f"{name} = {made.replace('X', source)}"))
            return name if name in self.scope else source
        return source

    def _goal_write(self, goal: Cell, target: str) -> Statement | None:
        other = self._name()
        if goal.mutation == "through view" and goal.view == "detach":
            return Statement(self._fill(VIEW_WRITES, target, other), "write", "through view", target)
        match goal.mutation:
            case "whole" | "through view":
                return Statement(self._fill(WRITES, target, other), "write", target=target)
            case "detached":
                return Statement(self._fill(DETACHED_WRITES, target, other), "write", "detached", target)
            case "shape":
                return Statement(self._fill(RESHAPES, target), "write", "shape", target)
        return None

    def _goal_outputs(self, alias: str, source: str, view: str) -> list[str]:
        if alias.startswith("none"):
            return []
        if alias.startswith("several"):
            return [view, self.rng.choice((source, source, f"{view}[:]", f"{source}.view_as({source})"))]
        return [view if alias.startswith("view") else source]

    def _saved(self) -> tuple[Any, ...]:
        kept = dict(self.scope), dict(self.origin), dict(self.reshaped)
        return len(self.body), *kept, len(self.views), len(self.writes)

    def _restore(self, saved: tuple[Any, ...]) -> None:
        """Forget statements. What they wrote stays written, which only makes values odd while generating."""
        body, self.scope, self.origin, self.reshaped, views, writes = saved
        replayed = any(event.kind == "shape" for event in self.writes[writes:])
        del self.body[body:], self.views[views:], self.writes[writes:]
        if replayed:
            self._replay(self.body)

    def _replay(self, body: Sequence[str]) -> None:
        scope = {"torch": torch, **run_setup(self.setup)}
        exec("\n".join(body), scope)
        tensors = [n for n, v in self.scope.items() if isinstance(v, torch.Tensor)]
        before = {name: self._storage(name) for name in tensors}
        self.scope = {name: scope[name] for name in self.scope}
        now = {before[name]: self._storage(name) for name in tensors}
        self.reshaped = {now.get(storage, storage): wanted for storage, wanted in self.reshaped.items()}
        for events in (self.views, self.writes):
            events[:] = [replace(event, storage=now.get(event.storage, event.storage)) for event in events]

    # --- statements ---

    def _random_statement(self) -> Statement:
        statement = self._simple()
        return statement.under_no_grad() if self.rng.random() < 0.1 else statement

    def _simple(self) -> Statement:
        kinds = ("compute", "write", "view write", "detached", "view", "shape", "random", "random write")
        (kind,) = self.rng.choices(kinds, (3, 2, 2, 1, 3, 0.4, 0.5, 0.5))
        x, y = self._name(), self._name()
        match kind:
            case "compute":
                return Statement(f"{self._new()} = {self._fill(COMPUTE, x, y)}")
            case "random":
                return Statement(f"{self._new()} = {self._fill(RANDOM, x, y)}")
            case "random write":
                return Statement(self._fill(RANDOM_WRITES, x, y), "write", target=x)
            case "write":
                rare = self.rng.random() < 0.005
                return Statement(self._fill(RARE_WRITES if rare else WRITES, x, y), "write", target=x)
            case "view write":
                return Statement(self._fill(VIEW_WRITES, x, y), "write", "through view", x)
            case "detached":
                return Statement(self._fill(DETACHED_WRITES, x, y), "write", "detached", x)
            case "view":
                view = self.rng.choice(VIEWS)
                return Statement(f"{self._new()} = {self._fill(VIEWS_BY_KIND[view], x, y)}", "view", view)
        return Statement(self._fill(RESHAPES, x, y), "write", "shape", x)

    def _fill(self, templates: Sequence[str], x: str, y: str | None = None) -> str:
        """What a write reads from the memory it writes to, eager reads in an order of its own: a copy is read."""
        y = y or self._name()
        template = self.rng.choice(templates)
        shared = x not in self.scope or self._storage(x) == self._storage(y)
        shared = shared and not (x == y and _READS_WHAT_IT_WRITES.match(template)) and "out=" not in template
        return template.replace("X", x).replace("Y", f"{y}.clone()" if shared else y)

    def _name(self) -> str:
        names = [n for n, v in self.scope.items() if isinstance(v, torch.Tensor)]
        return self.rng.choice([*names, *names[-3:]])

    def _storage(self, name: str) -> int:
        return int(self.scope[name].untyped_storage()._cdata)

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def _try(self, statement: Statement) -> bool:
        """Add the statement if eager takes it (a statement that fails has not written anything)."""
        trial = dict(self.scope)
        written = trial.get(statement.target)
        if written is not None and overlaps(written) and self.rng.random() > _UNDEFINED_SHARE:
            return False
        if written is not None and (self._is_refused_shape(statement, written) or self._is_stale(statement, written)):
            return False
        storage = self._storage(statement.target) if written is not None else 0
        try:
            exec(statement.text, trial)
            self._note(statement, trial, storage)
        except _EAGER_ERRORS:
            return False
        trial.pop("__builtins__", None)
        if "as_strided(" in statement.text and not self._stays_inside(statement.text, trial):
            return False
        if (
            statement.kind == "shape"
            and written is not None
            and any(self._storage(n) == storage for n in self._others(statement.target))
        ):
            self.reshaped[storage] = bool(written.requires_grad)
        if any(isinstance(v, torch.Tensor) and v.numel() > LARGEST for v in trial.values()):
            return False
        self.scope = trial
        self.body.append(statement.text)
        return True

    def _is_refused_shape(self, statement: Statement, target: torch.Tensor) -> bool:
        """Whether autograd cannot follow a change of shape, so that it is refused by design; a few are kept."""
        if statement.kind != "shape" or not (self.training and target.requires_grad):
            return False
        quiet = statement.text.startswith("with ")
        followed = not quiet and (self.origin[statement.target] == "own" or not target._is_view())
        storage = self._storage(statement.target)
        written = any(event.storage == storage for event in self.writes)
        parts = any(event.storage == storage and event.kind == "multi" for event in self.views)
        shared = sum(self._storage(name) == storage for name in dict.fromkeys(self.inputs)) > 1
        followed = followed and not (written and parts) and not shared
        return not followed and self.rng.random() > _UNDEFINED_SHARE

    def _others(self, name: str) -> list[str]:
        """The other tensors in scope."""
        return [n for n, v in self.scope.items() if isinstance(v, torch.Tensor) and v is not self.scope[name]]

    def _is_stale(self, statement: Statement, target: torch.Tensor) -> bool:
        """Whether memory is written to that changed its shape while there were views of it, and a gradient is wanted.

        Views that are older than the change are then refused by design, wherever they are used; a few are kept.
        """
        storage = self._storage(statement.target)
        if statement.kind == "shape":
            return False
        if storage not in self.reshaped:
            return self._has_doubtful_gaps(storage) and self.rng.random() > _UNDEFINED_SHARE
        wanted = self.training and (self.reshaped[storage] or target.requires_grad)
        return wanted and self.rng.random() > _UNDEFINED_SHARE

    def _has_doubtful_gaps(self, storage: int) -> bool:
        """Whether memory with gaps was written to and viewed in another shape, which forbids a second write."""
        dense = torch.ops.aten.is_non_overlapping_and_dense
        return (
            any(event.storage == storage for event in self.writes)
            and any(event.storage == storage and event.kind in ("flatten", "as_strided") for event in self.views)
            and not all(dense(self.scope[n]) for n in self.inputs if self._storage(n) == storage)
        )

    def _stays_inside(self, text: str, trial: dict[str, Any]) -> bool:
        """Whether the view lies within the tensor it is taken of, and whether that fills its memory from the start and
        is no view itself; a few others are kept, of which much is refused by design.
        """
        result, _, expression = _plain(text).partition(" = ")
        view, source = trial[result], trial[expression.partition(".")[0]]
        plain = source.storage_offset() == 0 and source.is_contiguous() and not overlaps(view)
        plain = plain and not self._shares(expression.partition(".")[0])
        inside = view.storage_offset() >= source.storage_offset() and last_element(view) <= last_element(source)
        return (inside and plain) or self.rng.random() < _UNDEFINED_SHARE

    def _shares(self, name: str) -> bool:
        """Whether a tensor is a view of another one that the program knows, or was detached."""
        made = next((text for text in self.body if _plain(text).startswith(f"{name} = ")), "")
        if self.origin[name] != "own" or "detach()" in made:
            return True
        return name in self.inputs and sum(self._storage(n) == self._storage(name) for n in set(self.inputs)) > 1

    def _note(self, statement: Statement, trial: dict[str, Any], storage: int) -> None:
        quiet = statement.text.startswith("with ")
        result, assigned, expression = (
            statement.text.strip().removeprefix("with torch.no_grad():\n    ").partition(" = ")
        )
        if statement.role == "view":
            (name,) = re.findall(r"\b[av]\d+\b", expression)[:1]
            memory = int(trial[result].untyped_storage()._cdata)
            if memory == self._storage(name):  # reshape may copy
                self.views.append(Event(memory, statement.kind, quiet))
                detached = statement.kind == "detach" or self.origin[name] == "detached"
                self.origin[result] = "detached" if detached else "view"
            else:
                self.origin[result] = "own"
        elif statement.role == "write":
            by_origin = {"own": "whole", "view": "through view", "detached": "detached"}
            self.writes.append(Event(storage, statement.kind or by_origin[self.origin[statement.target]], quiet))
        elif assigned and result in trial:
            same = next(
                (n for n in self.origin if self.scope.get(n) is trial[result]), None
            )  # contiguous() of such a one
            made = "view" if trial[result]._is_view() else "own"
            self.origin[result] = made if same is None else self.origin[same]

    # --- outputs ---

    def _outputs(self) -> list[str]:
        names = sorted(n for n, v in self.scope.items() if isinstance(v, torch.Tensor))
        names = [n for n in names if self._storage(n) not in self.settled] or names
        outputs = list(self.wanted_outputs)
        for _ in range(self.rng.choice((0, 0, 0, 1)) if self.goals else self.rng.choice((1, 1, 2, 3))):
            pick = self.rng.random()
            x = self.rng.choice([*names, *names[-2:]])
            if pick < 0.05:
                outputs.append(self.rng.choice(("None", "3", "2.5", "True")))
            elif pick < 0.1 and outputs:
                outputs.append(self.rng.choice(outputs))
            elif pick < 0.15 and self.scope[x].dim():
                outputs.append(f"{x}.size(0)")
            elif pick < 0.35:
                expression = self._fill(VIEWS_BY_KIND[self.rng.choice(VIEWS)], x, x)
                usable = "as_strided(" not in expression and self._evaluates(expression)
                outputs.append(expression if usable else x)
            else:
                outputs.append(x)
        kept = [o for o in outputs if self._evaluates(o)]
        self.rng.shuffle(kept)
        return kept

    def _evaluates(self, expression: str) -> bool:
        try:
            eval(expression, dict(self.scope))
        except _EAGER_ERRORS:
            return False
        return True

    def _aliases(self, outputs: Sequence[str], owned: set[int]) -> dict[int, str]:
        """Per storage, what of it is returned; see :data:`.cells.ALIASES`."""
        returned: dict[int, list[str]] = {storage: [] for storage in owned}
        with torch.set_grad_enabled(self.training):
            for output in outputs:
                value = eval(output, dict(self.scope))
                if isinstance(value, torch.Tensor):
                    returned.setdefault(int(value.untyped_storage()._cdata), []).append(output)
        found: dict[int, str] = {}
        for storage, names in returned.items():
            owner = "input" if storage in owned else "intermediate"
            if len(names) > 1:
                found[storage] = f"several of {owner}"
            elif names:
                found[storage] = owner if self.origin.get(names[0]) == "own" else f"view of {owner}"
            elif storage in owned:
                found[storage] = "none of an input"
        return found

    def _afterwards(self, outputs: int) -> str | None:
        if self.rng.random() < 0.5:
            return None
        target = f"outputs[{self.rng.randrange(outputs)}]" if outputs else "inputs[0]"
        if self.rng.random() < 0.35:
            target = f"inputs[{self.rng.randrange(len(self.inputs))}]"
        return f"{target}.{self.rng.choice(('mul_(2)', 'add_(1)', 'zero_()', 'detach().mul_(2)'))}"


def _plain(text: str) -> str:
    """A statement without the block around it."""
    return text.strip().removeprefix("with torch.no_grad():\n    ")
