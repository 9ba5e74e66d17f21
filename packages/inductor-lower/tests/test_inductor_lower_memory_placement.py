"""Places in an arena: those that a search through all buffers finds, however they are found."""

from __future__ import annotations

import random

import pytest

from aotkit_inductor_lower.memory.placement import ALIGNMENT, place_buffers

Life = tuple[str, int, int]


def searched(lives: list[Life], nbytes: dict[str, int]) -> tuple[dict[str, int], int]:
    """The lowest free place of each buffer, the largest first, by a look at all that were placed before."""
    placed: list[tuple[int, int, int, int]] = []
    offsets: dict[str, int] = {}
    for name, first, last in sorted(lives, key=lambda life: (-nbytes[life[0]], life[1])):
        size = -(-max(nbytes[name], 1) // ALIGNMENT) * ALIGNMENT
        taken = sorted((start, end) for start, end, born, dies in placed if born <= last and first <= dies)
        offset = 0
        for start, end in taken:
            if start >= offset + size:
                break
            offset = max(offset, end)
        placed.append((offset, offset + size, first, last))
        offsets[name] = offset
    return offsets, max(end for _, end, _, _ in placed)


@pytest.mark.parametrize("seed", range(150))
def test_buffers_lie_where_a_search_through_all_of_them_puts_them(seed: int) -> None:
    generator = random.Random(seed)
    steps, lives = generator.choice([5, 40, 400]), list[Life]()
    for number in range(generator.randint(1, 60)):
        first = generator.randrange(steps)
        last = min(steps, first + int(generator.expovariate(1 / generator.choice([2, 30, 200]))))
        lives.append((f"b{number}", first, last))
    nbytes = {name: generator.choice([0, 1, 64, 100, 640, generator.randrange(10_000)]) for name, _, _ in lives}
    assert place_buffers(lives, nbytes) == searched(lives, nbytes)
