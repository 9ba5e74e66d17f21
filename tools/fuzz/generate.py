"""Random programs. Every statement is tried in eager while it is generated, so that most programs are valid."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .program import Program, run_setup

__all__ = ["generate"]

LARGEST = 96  # elements of a value; views that repeat elements must not make programs slow
INVALID_SHARE = 0.02  # of programs keep a statement that eager refuses


def generate(seed: int) -> Program:
    """The program number ``seed``; the same one for the same number."""
    return _Generator(random.Random(seed)).program()


# --- inputs -----------------------------------------------------------------------------------------------------

#: How an input lies in its memory: the shape of the memory for a wanted shape, and the view that is taken of it.
_LAYOUTS: tuple[tuple[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], str] | None]], ...] = (
    ("contiguous", lambda s: (s, "")),
    ("transposed", lambda s: (s[::-1], ".t()") if len(s) == 2 else None),
    ("gaps", lambda s: ((*s[:-1], 2 * s[-1]), "[..., ::2]") if s else None),
    ("rows apart", lambda s: ((2 * s[0], *s[1:]), "[::2]") if len(s) > 1 else None),
    ("offset", lambda s: ((s[0] + 1, *s[1:]), "[1:]") if s else None),
    ("permuted", lambda s: ((s[1], s[2], s[0]), ".permute(2, 0, 1)") if len(s) == 3 else None),
    ("expanded", lambda s: ((1, *s[1:]), f".expand{s}") if len(s) > 1 else None),
)
_SHAPES = ((3, 4), (3, 4), (4, 4), (2, 6), (6,), (4,), (2, 3, 2), (1, 4), (), (4, 1), (3, 4), (4, 4), (0, 3))
_SHARED_VIEWS = ("[1:]", "[:2]", ".t()", ".detach()", ".view(-1)", "[0]", "[::2]", "", ".unsqueeze(0)", "[..., 1:]")


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.setup: list[str] = []
        self.inputs: list[str] = []
        self.body: list[str] = []
        self.count = 0

    def program(self) -> Program:
        self._make_inputs()
        scope = {"torch": torch, **run_setup(self.setup)}
        self.scope: dict[str, Any] = {name: scope[name] for name in ("torch", *dict.fromkeys(self.inputs))}
        keep_invalid = self.rng.random() < INVALID_SHARE
        wanted = self.rng.randint(1, 7)
        for _ in range(4 * wanted):
            if len(self.body) >= wanted:
                break
            statement = self._statement()
            if not self._works(statement) and not keep_invalid:
                continue
            self.body.append(statement)
            if keep_invalid and not self._is_valid():
                break
        outputs = self._outputs()
        ignored = tuple(i for i in range(len(outputs)) if self.rng.random() < 0.15)
        return Program(
            tuple(self.setup),
            tuple(self.inputs),
            tuple(self.body),
            tuple(outputs),
            self._afterwards(len(outputs)),
            dynamic=self.rng.random() < 0.15,
            ignored=ignored,
        )

    # --- inputs ---

    def _make_inputs(self) -> None:
        wanted = self.rng.choice((1, 1, 2, 2, 2, 3, 4))
        shape = self.rng.choice(_SHAPES)
        while len(self.inputs) < wanted:
            if self.rng.random() < 0.4:
                shape = self.rng.choice(_SHAPES)
            if self.inputs and self.rng.random() < 0.05:
                self.inputs.append(self.rng.choice(self.inputs))
            elif self.inputs and self.rng.random() < 0.25:
                self._shared_input()
            else:
                self._fresh_input(shape)

    def _fresh_input(self, shape: tuple[int, ...]) -> None:
        number = len(self.inputs)
        layouts = [chosen for _, layout in _LAYOUTS if (chosen := layout(shape)) is not None]
        memory, view = self.rng.choice([layouts[0], *layouts])
        dtype = self.rng.choice(("float32",) * 6 + ("float64", "int64"))
        made = f"values({memory}, {number}, torch.{dtype})"
        history = self.rng.choice(("none", "leaf", "computed", "view of leaf")) if dtype != "int64" else "none"
        match history:
            case "none":
                self.setup += [f"m{number} = {made}", f"a{number} = m{number}{view}"]
            case "leaf":
                self.setup += [f"m{number} = {made}", f"a{number} = m{number}{view}.detach().requires_grad_()"]
            case "computed":
                self.setup += [f"l{number} = {made}.requires_grad_()", f"m{number} = l{number}.clone()"]
                self.setup += [f"a{number} = m{number}{view}"]
            case _:
                self.setup += [f"m{number} = {made}.requires_grad_()", f"a{number} = m{number}{view}"]
        self.inputs.append(f"a{number}")

    def _shared_input(self) -> None:
        """Another view of the memory of an earlier input."""
        number = len(self.inputs)
        other = self.rng.choice(self.inputs)
        base = self.rng.choice((other, f"m{other.removeprefix('a')}"))
        if base not in "\n".join(self.setup):
            base = other
        for _ in range(5):
            line = f"a{number} = {base}{self.rng.choice(_SHARED_VIEWS)}"
            try:
                run_setup([*self.setup, line])
            except (RuntimeError, IndexError):
                continue
            self.setup.append(line)
            self.inputs.append(f"a{number}")
            return

    # --- statements ---

    def _statement(self) -> str:
        if self.rng.random() < 0.12:
            lines = [f"    {self._simple()}" for _ in range(self.rng.randint(1, 2))]
            return "\n".join(["with torch.no_grad():", *lines])
        return self._simple()

    def _simple(self) -> str:
        kind = self.rng.choices(("compute", "write", "view", "reshape in place"), (3, 4, 4, 0.5))[0]
        x, y = self._name(), self._name()
        match kind:
            case "compute":
                return f"{self._new()} = {self._fill(_COMPUTE, x, y)}"
            case "write":
                # What a write reads from the memory it writes to, eager reads in an order of its own.
                return self._fill(_WRITES, x, f"{y}.clone()" if self._share_memory(x, y) else y)
            case "view":
                return f"{self._new()} = {self._fill(_VIEWS, x, y)}"
        return self._fill(_RESHAPES, x, y)

    def _fill(self, templates: Sequence[str], x: str, y: str) -> str:
        return self.rng.choice(templates).replace("X", x).replace("Y", y)

    def _name(self) -> str:
        names = [n for n, v in self.scope.items() if isinstance(v, torch.Tensor)]
        return self.rng.choice([*names, *names[-3:]])

    def _share_memory(self, x: str, y: str) -> bool:
        first, second = self.scope[x], self.scope[y]
        return x != y and first.untyped_storage()._cdata == second.untyped_storage()._cdata

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def _works(self, statement: str) -> bool:
        """Whether eager takes it (on a copy of the names; a statement that fails has not written anything)."""
        trial = dict(self.scope)
        try:
            exec(statement, trial)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return False
        trial.pop("__builtins__", None)
        if any(isinstance(v, torch.Tensor) and v.numel() > LARGEST for v in trial.values()):
            return False
        self.scope = trial
        return True

    def _is_valid(self) -> bool:
        scope = {"torch": torch, **run_setup(self.setup)}
        try:
            exec("\n".join(self.body), scope)
        except (RuntimeError, IndexError, TypeError, NameError, NotImplementedError):
            return False
        return True

    # --- outputs ---

    def _outputs(self) -> list[str]:
        assigned = set(self.scope) - {"torch"}
        names = sorted(n for n in assigned if isinstance(self.scope[n], torch.Tensor))
        outputs: list[str] = []
        for _ in range(self.rng.choice((1, 1, 2, 2, 3, 4))):
            pick = self.rng.random()
            x = self.rng.choice([*names, *names[-2:]])
            if pick < 0.05:
                outputs.append(self.rng.choice(("None", "3", "2.5", "True")))
            elif pick < 0.1 and outputs:
                outputs.append(self.rng.choice(outputs))
            elif pick < 0.15 and self.scope[x].dim():
                outputs.append(f"{x}.size(0)")
            elif pick < 0.35:
                expression = self._fill(_VIEWS, x, x)
                outputs.append(expression if self._works(f"_ = {expression}") else x)
            else:
                outputs.append(x)
        return outputs

    def _afterwards(self, outputs: int) -> str | None:
        if self.rng.random() < 0.5:
            return None
        target = f"outputs[{self.rng.randrange(outputs)}]"
        if self.rng.random() < 0.35:
            target = f"inputs[{self.rng.randrange(len(self.inputs))}]"
        return f"{target}.{self.rng.choice(('mul_(2)', 'add_(1)', 'zero_()', 'detach().mul_(2)'))}"


_COMPUTE = (
    "X * 2", "X + 1", "X + Y", "X * Y", "X - Y", "X.sin()", "X.tanh()", "X.sum()", "X.clone()", "X.contiguous()",
    "torch.where(X > 0, X, Y)", "X.sum(0)", "X.to(torch.float64)", "X.to(torch.float32)", "torch.zeros(4)", "-X",
    "X.neg()", "torch.cat([X, Y])", "torch.stack([X, Y])", "X.flip(0)", "torch.empty_like(X).copy_(Y)", "X.clone().t()",
    "torch.ones(3, 4)", "X.matmul(Y)", "X.cumsum(0)", "X.clone().detach()", "X.abs()", "torch.zeros_like(X)",
)  # fmt: skip
_WRITES = (
    "X.add_(1)", "X.mul_(2)", "X.mul_(Y)", "X.add_(Y)", "X.copy_(Y)", "X.zero_()", "X.fill_(0.5)", "X.sin_()",
    "X[1:] = Y", "X[0] = 1", "X[0] = Y", "X[..., ::2] = 0.25", "X[..., 0] = Y", "X[:] = Y", "X[:2].add_(Y)",
    "X[1:].mul_(2)",
    "X.index_put_((torch.arange(2),), Y)", "X.index_fill_(0, torch.arange(1), 0.5)", "X.masked_fill_(X > 0, 0.25)",
    "X.clamp_(min=0)", "X.neg_()", "X.detach().mul_(2)", "X.t().mul_(2)", "X.view(-1)[0] = 2", "X.diagonal().zero_()",
    "X.addcmul_(X, Y)", "X.copy_(X.flip(0))", "X.t().copy_(Y)", "X.unbind(0)[0].add_(Y)", "X.swapaxes(0, 1).sin_()",
    "torch.add(X, 1, out=Y)", "X.sub_(Y)", "X.detach().copy_(Y)", "X.lerp_(Y, 0.5)", "X.flatten().add_(1)",
)  # fmt: skip
_VIEWS = (
    "X.view(-1)", "X.reshape(-1)", "X.t()", "X.select(0, 1)", "X[1:]", "X[0]", "X[:, 1:]", "X[..., ::2]", "X[:2]",
    "X.permute(1, 0)", "X.transpose(0, 1)", "X.unsqueeze(0)", "X.squeeze()", "X.expand(2, 4)", "X.unbind(0)[0]",
    "X.unbind(0)[-1]", "X.diagonal()", "X.as_strided((2, 2), (2, 1))", "X.as_strided((3,), (1,), 1)", "X.detach()",
    "X.view(2, -1)", "X.view_as(X)", "X.split(2)[0]", "X.chunk(2, -1)[-1]",
    "torch.view_as_real(torch.view_as_complex(X))",
    "X.view(torch.int32)", "X.unfold(0, 2, 1)", "X.flatten()", "X.narrow(0, 0, 2)", "X.permute(2, 0, 1)",
    "X.unsqueeze(-1).expand(3, 4, 2)", "X[None]", "X[:, None]", "X.reshape(2, -1)", "X.expand_as(Y)",
)  # fmt: skip
_RESHAPES = ("X.t_()", "X.unsqueeze_(0)", "X.squeeze_()", "X.transpose_(0, 1)", "X.unsqueeze_(-1)", "X.detach_()")
