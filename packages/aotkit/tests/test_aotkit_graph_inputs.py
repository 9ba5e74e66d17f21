"""Inputs of a saved graph: what is compared in every call tells the same as the contract that names what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotkit import GuardError
from aotkit.artifact import graph_inputs
from aotkit.artifact.graph_inputs import GraphInput, InputCheck, InputContract


def entry(name: str, value: torch.Tensor) -> GraphInput:
    """What a tensor was when a graph was compiled for it."""
    kind = graph_inputs.PLAIN[type(value)]
    sizes = list(value.shape), list(value.stride())
    lazy = value.is_conj(), value.is_neg()
    return GraphInput(name, kind, str(value.dtype), *sizes, str(value.device), value.requires_grad, lazy)


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(4)), torch.zeros(2, dtype=torch.complex64)]


def message(check: Callable[[list[Any]], None], values: list[Any]) -> str | None:
    try:
        check(values)
    except GuardError as error:
        return str(error)
    return None


CHANGED: dict[str, Callable[[list[Any]], object]] = {
    "nothing": lambda v: None,
    "other objects": lambda v: v.__setitem__(slice(None), tensors()),
    "another type": lambda v: v.__setitem__(0, v[0].double()),
    "another size": lambda v: v.__setitem__(0, torch.zeros(3, 5)),
    "other strides": lambda v: v.__setitem__(0, torch.zeros(4, 3).t()),
    "more dimensions": lambda v: v.__setitem__(0, torch.zeros(3, 4, 1)),
    "another device": lambda v: v.__setitem__(0, v[0].to("meta")),
    "sparse": lambda v: v.__setitem__(0, torch.zeros(3, 4).to_sparse()),
    "a gradient": lambda v: v[0].requires_grad_(),
    "none": lambda v: v[1].requires_grad_(False),
    "conjugated": lambda v: v.__setitem__(2, v[2].conj()),
    "negated": lambda v: v.__setitem__(2, torch._neg_view(v[2])),
    "one twice": lambda v: v.__setitem__(0, v[1]),
    "a number": lambda v: v.__setitem__(1, 4),
    "a subclass": lambda v: v.__setitem__(0, v[0].as_subclass(type("Own", (torch.Tensor,), {}))),
    "one less": lambda v: v.pop(),
    "resized in place": lambda v: v[0].resize_(4, 3),
}


@pytest.mark.filterwarnings("ignore:.*resize")
@pytest.mark.parametrize("changed", CHANGED, ids=lambda name: name.replace(" ", "_"))
def test_a_comparison_refuses_what_the_contract_refuses(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tensors()
    contract = InputContract([entry(f"x{k}", value) for k, value in enumerate(values)])
    check = InputCheck(contract)
    check(values)
    CHANGED[changed](values)
    expected = message(contract.check, values)
    assert (expected is None) is (changed in ("nothing", "other objects"))
    asked: list[int] = []
    whole = InputContract.check
    monkeypatch.setattr(InputContract, "check", lambda self, given: (asked.append(1), whole(self, given)))
    assert message(check, values) == expected
    assert bool(asked) is (expected is not None), "the contract is asked where something differs, and only there"


@pytest.mark.parametrize("what", ["a size", "a number", "a guard", "a range", "lazy"])
def test_what_is_known_in_the_call_only_is_left_to_the_contract(what: str) -> None:
    x = torch.zeros(3, 4)
    inputs = [GraphInput("x", "tensor", "torch.float32", ["s0" if what == "a size" else 3, 4], [4, 1], "cpu")]
    values: list[Any] = [x]
    if what == "a number":
        inputs.append(GraphInput("n", "number", number="s1"))
        values.append(7)
    if what == "lazy":
        inputs = [entry("x", torch._neg_view(x))]
        values = [torch._neg_view(x)]
    guards = [False] if what == "a guard" else []
    ranges = {"s9": (0, 2)} if what == "a range" else {}
    contract = InputContract(inputs, guards, ranges)
    check = InputCheck(contract)
    assert message(check, values) == message(contract.check, values)
    assert (message(check, values) is None) is (what in ("a size", "a number", "lazy"))


@pytest.mark.parametrize(
    ("wanted", "passes", "refused"),
    [
        (["d0", "d0"], (2.5, 2.5), (2.5, 3.0)),
        (["d0", 0.5], (1.0, 0.5), (1.0, 0.25)),
        (["d0", -0.0], (1.0, -0.0), (1.0, 0.0)),
        (["d0", "d0"], (0.0, 0.0), (0.0, -0.0)),
        (["d0", ["*", 2, "d0"]], (1.5, 3.0), (1.5, 1.5)),
    ],
    ids=str,
)
def test_floats_that_are_passed_as_tensors_are_compared_with_what_they_were_found_to_be(
    wanted: list[Any], passes: tuple[float, float], refused: tuple[float, float]
) -> None:
    inputs = [GraphInput(f"x{k}", "tensor", "torch.float64", [], [], "cpu", number=w) for k, w in enumerate(wanted)]
    contract = InputContract.from_json(json.loads(json.dumps(InputContract(inputs).to_json())))
    for check in (contract.check, InputCheck(contract)):
        check([torch.tensor(number, dtype=torch.float64) for number in passes])
        with pytest.raises(GuardError, match=r"x1 is .*, and it was compiled for"):
            check([torch.tensor(number, dtype=torch.float64) for number in refused])
