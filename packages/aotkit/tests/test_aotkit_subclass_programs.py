"""Random programs over wrapper subclasses, flat and nested, beside plain tensors, against eager.

Compared: values, which results and arguments share memory or are the same object, ``requires_grad``, version counters,
gradients (or that the backward fails), and what writing to a result changes afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotkit
from aotkit_functionalize import Unsupported
from aotkit_functionalize.subclasses import tensors_inside
from aotkit_runtime_wrappers import WrapperError

UNARY: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.sin(),
    lambda x: x * 2,
    lambda x: x.t(),
    lambda x: x[1:3],
    lambda x: x[:1],
    lambda x: x[:, 1],
    lambda x: x.detach(),
    lambda x: x.exp(),
    lambda x: x.sum(0),
    lambda x: x.clone(),
    lambda x: x.flatten(),
    lambda x: x.view_as(x),
)
IN_PLACE: tuple[Callable[[Any], Any], ...] = (lambda x: x.mul_(1.5), lambda x: x.zero_(), lambda x: x.sin_())


@dataclass(frozen=True)
class Program:
    """Kinds of arguments, how autograd knows them, steps (what, number, operands), numbers of the results."""

    kinds: tuple[str, ...]
    grads: tuple[str, ...]
    steps: tuple[tuple[str, int, int, int], ...]
    results: tuple[int, ...]

    @staticmethod
    def random(seed: int) -> Program:
        rng = random.Random(seed)
        subclass = rng.choice(["flat", "nested"])
        kinds = [subclass, *rng.choices([subclass, "plain"], k=rng.randint(0, 2))]
        steps, known = [], len(kinds)
        for _ in range(rng.randint(1, 6)):
            what = rng.choices(["unary", "no_grad", "product", "in_place", "in_place no_grad"], [5, 1, 2, 2, 1])[0]
            count = len(IN_PLACE if what.startswith("in_place") else UNARY)
            steps.append((what, rng.randrange(count), rng.randrange(known), rng.randrange(known)))
            known += not what.startswith("in_place")
        results = rng.choices(range(known), k=rng.randint(1, 4))
        grads = rng.choices(["none", "leaf", "computed"], k=len(kinds))
        return Program(tuple(kinds), tuple(grads), tuple(steps), tuple(results))

    def __call__(self, *args: Any) -> list[Any]:
        values = list(args)
        for what, number, a, b in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and "no_grad" not in what):
                if what.startswith("in_place"):
                    IN_PLACE[number](values[a])
                elif what == "product":
                    values.append(values[a] * values[b])
                else:
                    values.append(UNARY[number](values[a]))
        return [values[i] for i in self.results]

    def arguments(self, seed: int) -> tuple[list[Any], list[Any]]:
        """Leaves, and what is passed."""
        generator = torch.Generator().manual_seed(seed)

        def number() -> torch.Tensor:
            return torch.randn(4, 4, generator=generator, dtype=torch.float64)

        make = {
            "plain": number,
            "flat": lambda: TwoTensor(number(), number()),
            "nested": lambda: TwoTensor(TwoTensor(number(), number()), TwoTensor(number(), number())),
        }
        leaves = [
            make[kind]().requires_grad_(grad != "none") for kind, grad in zip(self.kinds, self.grads, strict=True)
        ]
        return leaves, [x * 1 if grad == "computed" else x for x, grad in zip(leaves, self.grads, strict=True)]


def flat(values: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for value in values for tensor in tensors_inside(value.detach())]


def observe(run: Callable[..., Any], program: Program, seed: int) -> dict[str, Any]:
    """Everything that a caller can see of a call and of its backward."""
    leaves, inputs = program.arguments(seed)
    versions = [value._version for value in inputs]
    results = list(run(*inputs))
    everything = [*inputs, *results]
    storages = [{tensor.untyped_storage()._cdata for tensor in tensors_inside(value)} for value in everything]
    seen: dict[str, Any] = {
        "classes": [type(value) for value in results],
        "values": flat(everything),
        "shared": [[bool(a & b) for b in storages] for a in storages],
        "same": [[a is b for b in everything] for a in everything],
        "grad": [(value.requires_grad, value.grad_fn is None) for value in results],
        "versions": [value._version - before for value, before in zip(inputs, versions, strict=True)],
    }
    losses = [(o * o).sum() for o in {id(o): o for o in results if o.requires_grad}.values()]
    try:
        torch.autograd.backward(losses)
    except WrapperError:
        raise
    except RuntimeError as error:
        seen["error"] = str(error).partition("[")[0]
    else:
        # A value that the loss does not depend on has no gradient in eager, and one of zeros here.
        own = [x for x in leaves if x.is_leaf]
        seen["gradients"] = [flat([x.grad if x.grad is not None else torch.zeros_like(x)]) for x in own]
    with torch.no_grad():
        for value in results:
            value.add_(1)
    seen["after"] = flat(everything)
    return seen


@pytest.mark.covers("F1.2", "F2.31", "F2.32", "F4.15")
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks, and hides it
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_programs_over_subclasses_cannot_be_told_from_eager(first: int) -> None:
    compared = 0
    for seed in range(first, first + 20):
        program = Program.random(seed)
        try:
            expected = observe(program, program, seed)
        except (RuntimeError, IndexError):
            continue  # not a valid program
        try:
            found = observe(aotkit.aot_function(program, lambda graph, inputs: graph), program, seed)
        except (Unsupported, WrapperError):
            continue
        compared += 1
        assert found.keys() == expected.keys(), (seed, program)
        for what, value in expected.items():
            if what in ("values", "gradients", "after"):
                torch.testing.assert_close(found[what], value, msg=lambda m, p=program: f"{m}\nin {p}")
            else:
                assert found[what] == value, (what, program)
    assert compared >= 10
