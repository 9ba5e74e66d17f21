"""Which kernels wait for each other, while nests are brought together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from aotkit_inductor_lower.analysis.alignment import align_digits, digits_of_part
from aotkit_inductor_lower.loop_passes.fuse_kernels import _Groups
from aotkit_inductor_lower.symbolic import Symbol, sym, to_expr


def closure(needs: dict[int, set[int]]) -> dict[int, int]:
    """By group, as bits, all that it waits for; ``needs`` has no circle."""
    found: dict[int, int] = {}

    def of(group: int) -> int:
        if group not in found:
            found[group] = 0
            for need in needs[group]:
                found[group] |= of(need) | (1 << need)
        return found[group]

    return {group: of(group) for group in needs}


@pytest.mark.parametrize("seed", range(60))
def test_what_groups_wait_for_stays_closed_when_they_are_joined(seed: int) -> None:
    """Also where a group is joined to one that is older, younger or has others behind it."""
    generator = random.Random(seed)
    count, dense = generator.choice([6, 12, 30]), generator.choice([0.1, 0.3, 0.6])
    before = [{p for p in range(at) if generator.random() < dense / (1 + (at - p) / 4)} for at in range(count)]
    steps: Any = [object() for _ in range(count)]
    groups = _Groups(steps, SimpleNamespace(before=before))  # type: ignore[arg-type]
    member, joins = {at: at for at in range(count)}, 0
    for position in range(count):
        groups.add(position, steps[position])
        for _ in range(2):
            if len(groups.steps) < 2 or generator.random() < 0.4:
                continue
            first, second = generator.sample(sorted(groups.steps), 2)
            if groups.blocks(first, second) or groups.blocks(second, first):
                continue
            groups.join(first, second, SimpleNamespace(nest=object()))  # type: ignore[arg-type]
            member = {at: first if group == second else group for at, group in member.items()}
            joins += 1
        present = range(position + 1)
        needs: dict[int, set[int]] = {member[at]: set() for at in present}
        for at in present:
            needs[member[at]] |= {member[p] for p in before[at]} - {member[at]}
        assert groups.needs == needs and groups.ancestors == closure(needs)
        assert {at: groups.find(at) for at in present} == {at: member[at] for at in present}
    assert joins or count < 12


@pytest.mark.parametrize("seed", range(20))
def test_loops_through_one_part_of_a_buffer_are_digits_that_pass_it_once(seed):
    """Those of another part, with another start, or in another number, are none."""
    draw = random.Random(seed)
    sizes = [draw.choice([2, 3, 4, 6]) for _ in range(4)]
    steps, step = [], draw.choice([1, 1, 2])
    for size in sizes:
        steps.append(step)
        step *= size + draw.choice([0, 0, 1])
    names = [f"i{k}" for k in range(4)]
    start = draw.randrange(5)
    flat = sum((sym(name) * step for name, step in zip(names, steps)), to_expr(start))
    given = dict(zip(names, map(to_expr, sizes)))
    split = draw.randrange(4)  # the other side counts this loop in two
    inner = next(d for d in range(2, 7) if sizes[split] % d == 0)
    other = flat.substitute({Symbol(names[split]): sym("a") * inner + sym("b")})
    with_split = {**given, "a": to_expr(sizes[split] // inner), "b": to_expr(inner)}
    del with_split[names[split]]
    first, second = digits_of_part([flat, other], [given, with_split])
    assert [name for name, _ in first] == names and {name for name, _ in second} == set(with_split)
    assert align_digits(first, second, [f"k{n}" for n in range(20)]) is not None
    assert digits_of_part([flat, other + 1], [given, with_split]) is None
    longer = {**with_split, names[(split + 1) % 4]: to_expr(sizes[(split + 1) % 4] - 1)}
    assert digits_of_part([flat, other], [given, longer]) is None
    again = flat + sym("z") * steps[0]  # windows that overlap
    assert digits_of_part([again, again], [{**given, "z": to_expr(2)}] * 2) is None
