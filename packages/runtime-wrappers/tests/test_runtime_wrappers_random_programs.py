"""Random programs, wrapped around a functional run of themselves, against eager: plain arguments, arguments that share
memory, tensors with lazy bits, and wrapper subclasses; at fixed sizes and at sizes that vary."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import Unsupported
from aotkit_runtime_wrappers import WrapperError

Check = Callable[..., int]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


# -- programs over tensors ---------------------------------------------------------------------------------


class _Thrice(torch.autograd.Function):
    """A view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().view(-1)[: x.numel() // 2 * 2].view(-1, 2))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t() if x.dim() == 2 else x.unsqueeze(0),
    "reshape": lambda x: x.reshape(-1),
    "first": lambda x: x[:1],
    "row": lambda x: x[-1],
    "step": lambda x: x[..., ::2],
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "negated": lambda x: torch._neg_view(x),
    "conj": lambda x: x.conj() if x.is_complex() else _complex(x * 2).conj(),
    "imag": lambda x: x.imag if x.is_complex() else x.view_as(x),
    "as complex": lambda x: x if x.is_complex() else _complex(x),
    "bytes": lambda x: x.detach().view(torch.int32),
}
INSIDE: dict[str, Callable[[Any], Any]] = {
    "inside": lambda x: x.a,
    "product of the inside": lambda x: x.a * 2,
    "part of the inside": lambda x: x.b[1:],
    "swapped": lambda x: TwoTensor(x.b, x.a),
    "half new": lambda x: TwoTensor(x.a.detach(), x.b * 3),
    "column": lambda x: x[:, 1],
    "view_as": lambda x: x.view_as(x),
    "of plain ones": lambda x: TwoTensor(x.detach() * 2, x.detach() + 1),
}
FRESH: dict[str, Callable[[Tensor], Any]] = {
    "double": lambda x: x * 2,
    "sin": lambda x: x.sin(),
    "sum": lambda x: x.sum(0),
    "number": lambda x: x.shape[0],
    "largest": lambda x: x.detach().abs().argmax(),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "fill_": lambda x: x.fill_(0.5),
    "masked_fill_": lambda x: x.masked_fill_(x.detach().abs() > 0.7, 0.25),
    "item": lambda x: x.__setitem__(0, 7.0),
    "detached": lambda x: x.detach().mul_(3),
    "data": lambda x: x.data.mul_(3),
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, -1),
}
FLAGS: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad_": lambda x: x.requires_grad_() if x.is_leaf and x.is_floating_point() else x,
    "detach_": lambda x: x.detach_(),
}
TABLES = {"view": VIEWS, "inside": INSIDE, "fresh": FRESH, "write": WRITES, "shape": SHAPES, "flag": FLAGS}
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda n: torch.randn(n, 6),
    "transposed": lambda n: torch.randn(6, n).t(),
    "gaps": lambda n: torch.randn(n, 12)[:, ::2],
    "offset": lambda n: torch.randn(6 * n + 16)[7 : 7 + 6 * n].view(n, 6),
    "row": lambda n: torch.randn(6),
    "negated": lambda n: torch._neg_view(torch.randn(n, 6)),
    "conjugated": lambda n: torch.randn(n, 6, dtype=torch.complex64).conj(),
}
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, :3],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1)[5:],
    "complex": lambda x: torch.view_as_complex(x.view(-1, 3, 2)),
    "numbers": lambda x: x.view(torch.int32)[2:],
    "halves": lambda x: x.view(torch.float16)[:, 2:6],
    "doubles": lambda x: x.view(torch.float64)[1:],
    "negated": lambda x: torch._neg_view(x[:2]),
}
WRAPPED: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda n: TwoTensor(torch.randn(n, 6), torch.randn(n, 6)),
    "nested": lambda n: TwoTensor(WRAPPED["flat"](n), WRAPPED["flat"](n)),
    "plain": lambda n: torch.randn(n, 6),
}
FAMILIES: dict[str, dict[str, Any]] = {"apart": LAYOUTS, "shared": SHARED, "wrapped": WRAPPED}


@dataclass(frozen=True)
class Program:
    """Steps (kind, name, operands, whether under ``no_grad``), and the numbers of what is returned."""

    layouts: tuple[str, ...]
    grads: tuple[str, ...]
    steps: tuple[tuple[str, str, int, int, bool], ...]
    results: tuple[int, ...]
    family: str

    @staticmethod
    def random(seed: int, family: str) -> Program:
        rng, shared, table = random.Random(seed), family == "shared", FAMILIES[family]
        kinds = rng.choices(["view", "fresh", "write", "product", "shape", "flag", "grad", "inside"],
                            [8, 4, 6, 2, 1, 0.3, 0.3, 0], k=rng.randint(1, 6))  # fmt: skip
        if family == "wrapped":
            kinds = [{"shape": "inside", "view": rng.choice(["view", "inside"])}.get(k, k) for k in kinds]
        steps = []
        for kind in kinds:
            name = rng.choice(sorted(TABLES[kind])) if kind in TABLES else kind
            steps.append((kind, name, rng.randrange(8), rng.randrange(8), rng.random() < 0.15))
        number = rng.choice([2, 3] if shared else [1, 2])
        layouts = tuple(rng.choices(sorted(table), k=number))
        grads = tuple(rng.choices(["none", "leaf", "computed"], k=1 if shared else number))
        return Program(layouts, grads, tuple(steps), tuple(rng.randrange(8) for _ in range(rng.randint(0, 4))), family)

    @property
    def moves_versions(self) -> bool:
        """Whether version counters are compared: a change of shape of what shares memory is counted with the writes."""
        return self.family != "shared" or all(step[0] != "shape" for step in self.steps)

    def make(self, n: int = 4) -> list[Tensor]:
        torch.manual_seed(1)
        if self.family == "shared":
            (grad,) = self.grads
            base = torch.randn(n, 6).requires_grad_(grad != "none")
            base = base * 1 if grad == "computed" else base
            views = [SHARED[name](base if name not in ("numbers", "halves", "doubles") else base.detach())
                     for name in self.layouts]  # fmt: skip
            return [*views, torch.randn(n, 6)]
        made = [FAMILIES[self.family][name](n).detach().requires_grad_(g != "none")
                for name, g in zip(self.layouts, self.grads, strict=True)]  # fmt: skip
        return [x * 1 if grad == "computed" else x for x, grad in zip(made, self.grads, strict=True)]

    def __call__(self, *args: Tensor) -> list[Any]:
        values: list[Any] = list(args)
        for kind, name, first, second, no_grad in self.steps:
            tensors = [v for v in values if isinstance(v, Tensor)]
            x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
                match kind:
                    case "product":
                        values.append(x.sum() * y)
                    case "view" | "fresh" | "inside":
                        values.append(TABLES[kind][name](x))
                    case "write" | "shape" | "flag":
                        TABLES[kind][name](x)
            if kind == "grad":
                torch.set_grad_enabled(not torch.is_grad_enabled())
        return [values[-1 - r % len(values)] for r in self.results]


# What torch's functionalization refuses, and its autograd.
TORCHS_OWN = ("for tensors with negative bit", "for tensors with conjugate bit", "as_strided() is non-compositional",
              "needed for gradient computation has been modified", "must have a last dimension of size 2")  # fmt: skip


def _valid(program: Any, calls: Sequence[int]) -> bool:
    before = torch.is_grad_enabled()
    try:
        for n in calls or (4,):
            program(*program.make(n))
            torch.set_grad_enabled(before)
    except (RuntimeError, IndexError, AssertionError, AttributeError, ValueError, TypeError):
        return False
    finally:
        torch.set_grad_enabled(before)
    return True


def _check(programs: Sequence[Any], same_as_eager: Check, calls: Sequence[int] = ()) -> tuple[int, int]:
    compared = refused = 0
    for program in programs:
        if not _valid(program, calls):
            continue
        try:
            compared += same_as_eager(program, program.make, program.moves_versions, calls)
        except (Unsupported, WrapperError):
            refused += 1
        except Exception as error:
            if not any(text in str(error) for text in TORCHS_OWN):
                raise AssertionError(f"{error}\nin {program}") from error
            refused += 1
    return compared, refused


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", range(0, 90, 30))
def test_random_programs_cannot_be_told_from_eager(same_as_eager: Check, family: str, first: int) -> None:
    compared, refused = _check([Program.random(seed, family) for seed in range(first, first + 30)], same_as_eager)
    assert compared >= 20 and refused <= compared, (compared, refused)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [0, 15])
def test_random_programs_of_varying_sizes_cannot_be_told_from_eager(
    same_as_eager: Check, family: str, first: int
) -> None:
    programs = [Program.random(seed, family) for seed in range(first, first + 15)]
    compared, refused = _check(programs, same_as_eager, calls=(4, 7, 5))
    assert compared >= 8 and refused <= compared, (compared, refused)
