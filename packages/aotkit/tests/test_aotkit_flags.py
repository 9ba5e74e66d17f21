"""What autograd says of arguments and results (flags, bases, gradients), for generated programs over grad modes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotkit
from aotkit_aot_trace import Unsupported

STEPS = [
    "{new} = {old}.detach()",
    "{new} = {old}[0:2]",
    "{new} = {old}.view(-1)",
    "{new} = {old} * 2",
    "{new} = {old}.t()",
    "{new} = {old}.clone()",
    "{new} = {old}.unsqueeze(0)",
    "{new} = {old}.expand(2, *{old}.shape)",
    "{new} = {old}.data",
    "{new} = {old}.unbind(0)[0]",
    "{new} = {old}.split(1)[0]",
    "{new} = torch.zeros(3).requires_grad_()",
    "{new} = {old}.data.requires_grad_()",
    "{old}.mul_(2)",
    "{old}.detach_()",
    "{old}.requires_grad_()",
]
MODES = ["", "", "", "with torch.no_grad(): ", "with torch.enable_grad(): "]


#: Ours, and eager's, of a view of a view taken under ``no_grad``: a row of docs/limits.md.
VIEW_OF_A_VIEW = ((True, True, True), (True, False, False))


def source(seed: int) -> str:
    """A function of a leaf, a tensor with a history and a tensor without."""
    draw = random.Random(seed)
    known, lines = ["x", "y", "z"], []
    for number in range(draw.randint(1, 4)):
        step, new = draw.choice(STEPS), f"v{number}"
        lines.append(draw.choice(MODES) + step.format(old=draw.choice(known), new=new))
        if "{new}" in step:
            known.append(new)
    returned = [known[-1], *(draw.choice(known) for _ in range(draw.randint(0, 2)))]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def program(x, y, z):\n{body}    return {', '.join(returned)},\n"


def observe(call: Callable[..., Any], grad_mode: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, before, z = (torch.randn(2, 3, generator=generator) for _ in range(3))
    leaves = [x.requires_grad_(), before.requires_grad_(), z]
    arguments = [x, before * 1, z]
    with torch.set_grad_enabled(grad_mode), warnings.catch_warnings():
        warnings.simplefilter("error", aotkit.EagerFallback)
        results = list(call(*arguments))
    everything = [*arguments, *results]
    flags = [(t.requires_grad, t.is_leaf, t.grad_fn is None) for t in everything]
    wanted = [t.sum() * 3 for t in everything if t.requires_grad]
    if wanted:
        torch.stack(wanted).sum().backward()
    return {
        "flags": flags,
        "bases": [next((n for n, t in enumerate(everything) if t is r._base), r._base) for r in everything],
        "values": [t.detach() for t in everything],
        "gradients": [leaf.grad for leaf in leaves],
        "made": {n: r.grad for n, r in enumerate(results) if r.is_leaf and r.requires_grad and not r._is_view()},
    }


def is_known_base(base: Any) -> bool:
    """Whether the caller has it, as an argument or (a view of a detached argument) a result; see docs/limits.md."""
    return base is None or (isinstance(base, int) and base < 3)


def compare(program: Callable[..., Any], compiled: Callable[..., Any], grad_mode: bool) -> bool:
    """Whether there was something to compare: not if eager refuses the program, or if we do."""
    try:
        expected = observe(program, grad_mode)
    except RuntimeError:
        return False
    try:
        got = observe(compiled, grad_mode)
    except Unsupported:
        return False
    if any(pair == VIEW_OF_A_VIEW for pair in zip(got["flags"], expected["flags"], strict=True)):
        return False
    assert got["flags"] == expected["flags"]
    for mine, eager in zip(got["bases"], expected["bases"], strict=True):
        assert not (is_known_base(mine) and is_known_base(eager)) or mine == eager
    torch.testing.assert_close(got["values"], expected["values"])
    assert [g is None for g in got["gradients"]] == [g is None for g in expected["gradients"]]
    for mine, eager in zip(got["gradients"], expected["gradients"], strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, eager)
    for number in got["made"].keys() & expected["made"].keys():
        torch.testing.assert_close(got["made"][number], expected["made"][number])
    return True


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")
@pytest.mark.parametrize("first", range(0, 240, 30))
def test_generated_programs_have_the_flags_of_eager(first: int) -> None:
    compared = 0
    for seed in range(first, first + 30):
        text = source(seed)
        space: dict[str, Any] = {"torch": torch}
        exec(text, space)
        compiled = aotkit.aot_function(space["program"], aotkit.nop)
        for grad_mode in (True, False):
            try:
                compared += compare(space["program"], compiled, grad_mode)
            except AssertionError as difference:
                difference.add_note(f"seed {seed}, grad mode {grad_mode}\n{text}")
                raise
    assert compared >= 30  # of 60


def enabled_inside(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        product = x * y
        row = x[0]
    return product, row, x + 1, y.view(-1)


def written_where_it_is_enabled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    hidden = x * 1
    with torch.enable_grad():
        y.mul_(x)
    return hidden, y + 1


@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")
@pytest.mark.parametrize("program", [enabled_inside, written_where_it_is_enabled])
@pytest.mark.parametrize("compiled", ["frontend", "aot_function"])
def test_what_is_computed_under_enable_grad_within_no_grad_has_gradients(program: Any, compiled: str) -> None:
    if compiled == "frontend":
        call = torch.compile(program, backend="aotkit", options={"fallback": "error"})
    else:
        call = aotkit.aot_function(program, aotkit.nop)

    def observed(run: Callable[..., Any]) -> list[Any]:
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        leaf = torch.ones(2, 3).requires_grad_()
        y = leaf * 2
        with torch.no_grad():
            results = run(x, y)
            assert not torch.is_grad_enabled()
        flags = [(r.requires_grad, r.is_leaf) for r in (*results, y)]
        torch.stack([r.sum() for r in (*results, y) if r.grad_fn is not None]).sum().backward()
        return [flags, x.grad, leaf.grad]

    got, expected = observed(call), observed(program)
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1:], expected[1:])


@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor.*:UserWarning")
@pytest.mark.parametrize("program", [enabled_inside, written_where_it_is_enabled])
def test_enable_grad_records_nothing_in_inference_mode(program: Any) -> None:
    call = torch.compile(program, backend="aotkit", options={"fallback": "error"})

    def observed(run: Callable[..., Any], inside: bool) -> list[Any]:
        x = torch.arange(6.0).view(2, 3).requires_grad_() * 1  # with a history, which nothing may look for
        y = torch.ones(2, 3)
        with torch.inference_mode():
            y = y * 2 if inside else y
            results = [*run(x, y), y]
            assert not torch.is_grad_enabled()
            return [(r.requires_grad, r.is_inference()) for r in results] + [r.clone() for r in results]

    for inside in (True, False, True):
        got, expected = observed(call, inside), observed(program, inside)
        assert got[: len(got) // 2] == expected[: len(got) // 2]
        torch.testing.assert_close(got[len(got) // 2 :], expected[len(got) // 2 :])


def test_what_comes_from_a_leaf_that_the_function_made_is_refused() -> None:
    def from_new(x: Tensor) -> tuple[Tensor, ...]:
        leaf = torch.zeros(3).requires_grad_()
        return leaf, leaf * x

    def from_changed(x: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        return (x * 2,)

    def view_of_changed(x: Tensor) -> tuple[Tensor, ...]:
        view = x[1:]
        x.requires_grad_()
        return (view,)

    for program in (from_new, from_changed, view_of_changed):
        with pytest.raises(Unsupported, match="requires_grad"):
            aotkit.aot_function(program, aotkit.nop)(torch.ones(3))
