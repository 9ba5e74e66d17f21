"""`python -m tools.fuzz.sizes`: random programs over sizes that depend on data, integers and floats of the caller's.

A program is a few lines of Python over a matrix, a number and three sizes in tensors, an integer and a float. It is
compiled whole, called several times with other sizes (0 and 1 among them) and numbers, and compared with eager:
results, strides, gradients, and whether a call raises. What Dynamo refuses by itself is counted apart.
"""

from __future__ import annotations

import argparse
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F

import aotkit

__all__ = ["Program", "main", "make_program", "outcome", "print_counts", "seen_strides"]

_SETTINGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True, "specialize_float": False}


@dataclass(frozen=True)
class Program:
    """``lines`` of the body of ``f(x, k, s, m, y)``; ``grad``: whether ``x`` requires grad."""

    lines: tuple[str, ...]
    grad: bool

    @property
    def source(self) -> str:
        """The function as Python text."""
        return "def f(x, k, s, m, y):\n" + "".join(f"    {line}\n" for line in self.lines)

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, "<program>", "exec"), names)
        found: Callable[..., Any] = names["f"]
        return found


@dataclass
class _Writer:
    """Names of what there is so far: matrices of 4 columns, vectors, sizes (not negative) and floats."""

    draw: random.Random
    lines: list[str] = field(default_factory=list)
    matrices: list[str] = field(default_factory=lambda: ["x"])
    vectors: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=lambda: ["x.shape[0]", "m"])
    floats: list[str] = field(default_factory=lambda: ["y", "0.75"])
    count: int = 0

    def name(self, letter: str) -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"

    def add(self, kind: list[str], letter: str, text: str) -> None:
        """A line that makes a value of a kind."""
        name = self.name(letter)
        self.lines.append(f"{name} = {text}")
        kind.append(name)

    def one(self, kind: Sequence[str]) -> str:
        """One of these, the newest ones more often."""
        return kind[max(self.draw.randrange(len(kind)), self.draw.randrange(len(kind)))]


def _item(w: _Writer) -> None:
    w.add(w.sizes, "n", "k.item()")
    w.lines.append(f"torch._check({w.sizes[-1]} >= 0)")


def _list(w: _Writer) -> None:
    names = [w.name("n") for _ in range(3)]
    w.lines.append(f"{', '.join(names)} = s.tolist()")
    w.lines += [f"torch._check({name} >= 0)" for name in names]
    w.sizes += [*names, f"({' + '.join(names)})"]


def _computed_size(w: _Writer) -> None:
    a, b = w.one(w.sizes), w.one(w.sizes)
    forms = (f"{a} + {b}", f"{a} * 2", f"{a} // 2", f"torch.sym_max({a}, 1)", f"{a} + 1", f"-(-{a} // 3)")
    w.add(w.sizes, "n", w.draw.choice(forms))


def _computed_float(w: _Writer) -> None:
    a, n = w.one(w.floats), w.one(w.sizes)
    w.add(
        w.floats, "y", w.draw.choice((f"{a} * 2 + 1", f"{a} / 4", f"({n} + 1) / 4", f"{a} * {n}", f"({n} + 1) ** 0.5"))
    )


def _split(w: _Writer) -> None:
    parts = [w.name("n") for _ in range(3)]
    w.lines += [f"{', '.join(parts)} = s.tolist()", *(f"torch._check({part} >= 0)" for part in parts)]
    source = f"torch.arange({' + '.join(parts)}, dtype=torch.float64).split([{', '.join(parts)}])"
    w.add(w.vectors, "v", f"{source}[{w.draw.randrange(3)}]")


def _from_data(w: _Writer) -> None:
    a = w.one(w.matrices)
    matrix = w.draw.choice(
        (f"{a}[{a}[:, 0] > 0]", f"{a}[{a}.sum(1) < 0.5] * 2", f"torch.nonzero({a} > 0).repeat(1, 2).double()")
    )
    forms = (
        f"{a}.masked_select({a} > 0)",
        f"{a}[{a} > 0.1]",
        f"torch.where({a} > 0)[0].double()",
        "torch.unique(s).double()",
        "torch.repeat_interleave(torch.arange(3), s).double()",
    )
    if w.draw.random() < 0.5:
        w.add(w.matrices, "x", matrix)
    else:
        w.add(w.vectors, "v", w.draw.choice(forms))


def _made(w: _Writer) -> None:
    n, y = w.one(w.sizes), w.one(w.floats)
    forms = (
        f"x.new_zeros({n}) + {y}",
        f"torch.arange({n}, dtype=torch.float64)",
        f"torch.arange({n} * 2, {n} * -1, -2).double()",
        f"torch.full(({n},), {y}, dtype=torch.float64)",
        f"torch.linspace(0, 1, {n} + 1, dtype=torch.float64)",
        f"torch.ones({n}).double().cumsum(0)",
    )
    if w.draw.random() < 0.4:
        w.add(
            w.matrices,
            "x",
            w.draw.choice((f"x.new_ones({n}, 4) * {y}", f"torch.full(({n}, 4), {y}, dtype=torch.float64)")),
        )
    else:
        w.add(w.vectors, "v", w.draw.choice(forms))


def _joined(w: _Writer) -> None:
    kind, letter = (w.vectors, "v") if w.vectors and w.draw.random() < 0.5 else (w.matrices, "x")
    w.add(kind, letter, f"torch.cat([{w.one(kind)}, {w.one(kind)}])")


def _cut(w: _Writer) -> None:
    kind, letter = (w.vectors, "v") if w.vectors and w.draw.random() < 0.5 else (w.matrices, "x")
    a, n = w.one(kind), w.one(w.sizes)
    w.add(kind, letter, w.draw.choice((f"{a}[:{n}]", f"{a}[{n}:]", f"{a}[1:]", f"{a}[::2]")))


def _scaled_image(w: _Writer) -> None:
    a = w.one(w.matrices)
    how = w.draw.choice(("scale_factor=2", "scale_factor=1.5", "scale_factor=(2, 1)"))
    w.add(w.matrices, "x", f"F.interpolate(torch.cat([{a}, x.new_ones(1, 4)])[None, None], {how})[0, 0][:, :4]")


def _element_by_element(w: _Writer) -> None:
    kind, letter = (w.vectors, "v") if w.vectors and w.draw.random() < 0.5 else (w.matrices, "x")
    a, y, n = w.one(kind), w.one(w.floats), w.one(w.sizes)
    forms = (
        f"{a}.sin() * {y}",
        f"{a} + {n}",
        f"F.softshrink({a}, 0.25) - {y}",
        f"torch.softmax({a}, 0)",
        f"{a} * {a}.sum()",
        f"{a}.cumsum(0) / ({n} + 1)",
        f"F.leaky_relu({a}, {y})",
        f"{a}.clone().mul_({y})",
        f"{a}.flip(0)",
    )
    w.add(kind, letter, w.draw.choice(forms))


_STEPS = (
    _item,
    _list,
    _computed_size,
    _computed_float,
    _split,
    _from_data,
    _from_data,
    _made,
    _made,
    _joined,
    _cut,
    _scaled_image,
    _element_by_element,
    _element_by_element,
    _element_by_element,
)


def make_program(number: int) -> Program:
    """The program of this number."""
    writer = _Writer(random.Random(number))
    for _ in range(writer.draw.randint(2, 7)):
        writer.draw.choice(_STEPS)(writer)
    values = [*writer.matrices[1:], *writer.vectors]
    returned = writer.draw.sample(values, min(len(values), 3)) + writer.draw.sample(writer.sizes, 1)
    writer.lines.append(f"return [{', '.join(returned)}]")
    return Program(tuple(writer.lines), writer.draw.random() < 0.6)


def arguments(draw: random.Random, grad: bool) -> list[tuple[Any, ...]]:
    """Three calls: ordinary sizes, others, and small ones."""
    calls = []
    for rows, most in ((draw.randint(3, 6), 4), (draw.randint(2, 9), 4), (draw.randint(0, 1), 1)):
        x = torch.tensor([draw.uniform(-1, 1) for _ in range(rows * 4)], dtype=torch.float64).view(rows, 4)
        k, s = torch.tensor(draw.randint(0, most)), torch.tensor([draw.randint(0, most) for _ in range(3)])
        calls.append((x.requires_grad_(grad), k, s, draw.randint(2, 5), draw.choice((0.5, -1.25, 2.0, 0.0, 3.5))))
    return calls


def _observed(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    results = [torch.as_tensor(value) for value in run(*args)]
    losses = [(r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in results if r.requires_grad]
    gradient = torch.autograd.grad(torch.stack(losses).sum(), args[0])[0] if losses else None
    return [r.detach() for r in results], gradient, [seen_strides(r) for r in results]


def seen_strides(result: torch.Tensor) -> list[int]:
    """Those that are seen: of more than one element."""
    return [stride for size, stride in zip(result.shape, result.stride(), strict=True) if size > 1 and result.numel()]


def outcome(program: Program, calls: Sequence[tuple[Any, ...]], backend: Any = None) -> tuple[str, str]:
    """What became of it (``equal``, ``frontend``, ``refused``, ``mismatch`` or ``crash``), and a text on that."""
    fn = program.function()
    torch._dynamo.reset()
    backend = backend or aotkit.make_backend(aotkit.Options(fallback="error", rng="eager", cache=False))
    with torch._dynamo.config.patch(_SETTINGS):
        compiled = torch.compile(fn, backend=backend, fullgraph=True)
        for number, args in enumerate(calls):
            want: Any
            try:
                want = _observed(fn, args)
            except (RuntimeError, ValueError, IndexError) as error:
                want = error
            try:
                got = _observed(compiled, args)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                kind = "refused" if isinstance(error.inner_exception, aotkit.CompileError) else "crash"
                return kind, f"call {number}: {error.inner_exception}"
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch.fx.experimental.symbolic_shapes.ConstraintViolationError,
            ) as error:
                return "frontend", str(error).partition("\n")[0]
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
                if isinstance(want, Exception):
                    continue
                return "crash", f"call {number}: {''.join(traceback.format_exception(error)[-2:])}"
            if isinstance(want, Exception):
                return "mismatch", f"call {number}: eager raises {want}"
            try:
                torch.testing.assert_close(got[:2], want[:2], equal_nan=True)
            except AssertionError as error:
                return "mismatch", f"call {number}: {error}"
            if got[2] != want[2]:
                return "mismatch", f"call {number}: strides {got[2]} for {want[2]}"
    return "equal", ""


def print_counts(kinds: Counter[str]) -> int:
    """What became of how many programs; 1 if some are wrong, as a process ends with."""
    print(f"{kinds.total()} programs: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    failed = kinds["mismatch"] + kinds["crash"]
    print(f"{failed} failed")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a program mismatched or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.sizes", description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--inductor", action="store_true", help="say of failures whether torch's own backend is right")
    chosen = parser.parse_args(argv)
    kinds: Counter[str] = Counter()
    for number in range(chosen.seed, chosen.seed + chosen.programs):
        program, draw = make_program(number), random.Random(number)
        calls = arguments(draw, program.grad)
        kind, text = outcome(program, calls)
        kinds[kind] += 1
        if kind in ("equal", "frontend"):
            continue
        print(f"-- program {number}: {kind}: {text[:600]}\n{program.source}")
        if chosen.inductor:
            print("inductor:", outcome(program, calls, "inductor")[0])
    return print_counts(kinds)


if __name__ == "__main__":
    raise SystemExit(main())
