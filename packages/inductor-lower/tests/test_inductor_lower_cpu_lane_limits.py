"""Places that are compared with a limit in vectors, by the numbers of lanes: what whole numbers compare as."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch

from aotkit_inductor_lower import parse_program
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host_machine().vector_bits]
COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "lt": operator.lt, "le": operator.le}
FAR = (-(1 << 63), -(1 << 62), (1 << 62) - 1, (1 << 62), (1 << 63) - 1)
ROWS, COLUMNS = 3, 41


def program(place: str, limits: Sequence[int | str]) -> str:
    """The elements of ``x`` whose places fulfil a comparison, and 0 for others, for every limit and comparison."""
    sizes = f"float32[{ROWS}, {COLUMNS}] strides [{COLUMNS}, 1]"
    names = [f"{op}_{n}" for n in range(len(limits)) for op in COMPARISONS]
    lines = ["aotkit-ir 2", "program graph", "input x", f"buffer x : {sizes} input on cpu"]
    lines += [f"buffer {name} : {sizes} output on cpu" for name in names]
    lines += [f"loop compared(r < {ROWS}, y < {COLUMNS}):", "  stage():", f"    %place = index {place} : i64"]
    lines += ["    %value = load x[r, y] : f32", "    %none = const 0.0 : f32"]
    for n, limit in enumerate(limits):
        lines.append(f"    %c{n} = {'index' if isinstance(limit, str) else 'const'} {limit} : i64")
        for op in COMPARISONS:
            args = f"%c{n}, %place" if n % 2 else f"%place, %c{n}"
            lines += [
                f"    %is_{op}_{n} = {op} {args} : bool",
                f"    %{op}_{n} = where %is_{op}_{n}, %value, %none : f32",
            ]
            lines.append(f"    store {op}_{n}[r, y] = %{op}_{n}")
    return "\n".join([*lines, "return " + ", ".join(names)]) + "\n"


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("place", "limits"),
    [
        ("y - 3", (-3, -4, 0, 5, 13, 37, 38, "r", "r + 11")),  # with and without lanes on either side
        ("y + 7*r", ("13*r", 16, 7, 20, 40)),
        ("2*y", (16, 33, "r")),  # every other place
        ("y", FAR),
    ],
)
def test_places_compare_with_limits_as_numbers_do(bits: int, place: str, limits: Sequence[int | str]) -> None:
    x = torch.rand(ROWS, COLUMNS) + 1
    made = generate(parse_program(program(place, limits)), generic_machine(bits), keep_text=True)
    got = bind_program(made)([x])
    r, y = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    places = eval(place, {"r": r, "y": y}) + 0 * r
    wanted = []
    for n, limit in enumerate(limits):
        end = eval(str(limit), {"r": r})
        for compare in COMPARISONS.values():
            wanted.append(torch.where(compare(end, places) if n % 2 else compare(places, end), x, 0.0))
    for result, want in zip(got, wanted, strict=True):
        assert torch.equal(result, want)
    narrow = f"<{bits // 32} x i8>" in made.text
    assert narrow == (place != "2*y")
