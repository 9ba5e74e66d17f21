"""Which inputs share memory, and which certainly do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import fake_arguments, function_inputs, functional_layer, overlapping_groups
from aotkit_functionalize.overlap import definitely_disjoint
from aotkit_functionalize.wrap import FunctionalLayer

M = 6  # the matrix is M by M
PAIRS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], bool]] = {
    "rows": (lambda m: (m[:2], m[2:]), True),
    "rows the other way round": (lambda m: (m[2:], m[:2]), True),
    "rows that touch": (lambda m: (m[:3], m[2:]), False),
    "columns": (lambda m: (m[:, :2], m[:, 2:]), True),
    "columns the other way round": (lambda m: (m[:, 2:], m[:, :2]), True),
    "columns that touch": (lambda m: (m[:, :3], m[:, 2:]), False),
    "one column": (lambda m: (m[:, 2:3], m[:, 3:4]), True),
    "the same": (lambda m: (m, m.view(-1)), False),
    "empty": (lambda m: (m[:0], m), True),
    "the other empty": (lambda m: (m, m[3:3]), True),
    "rows and a column": (lambda m: (m[:2], m[:, 1]), False),
    "transposed columns": (lambda m: (m.t()[:2], m.t()[2:]), False),
    "windows over the end of a row": (lambda m: (m.as_strided((4, 4), (6, 1), 4), m[:, :2]), False),
    "another type": (lambda m: (m[:, :2], m.view(torch.int32)[:, 2:]), False),
    "last element": (lambda m: (m.view(-1)[:35], m.view(-1)[35:]), True),
    "one element in common": (lambda m: (m.view(-1)[:36], m.view(-1)[35:]), False),
    "larger elements": (lambda m: (m.view(-1)[:4], m.view(torch.float64).view(-1)[2:]), True),
    "larger elements in common": (lambda m: (m.view(-1)[:5], m.view(torch.float64).view(-1)[2:]), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_called_disjoint_is(name: str) -> None:
    make, known = PAIRS[name]
    a, b = make(torch.zeros(M, M))
    assert definitely_disjoint(a, b) is known and definitely_disjoint(b, a) is known
    if known and a.numel() and b.numel():
        a.fill_(1)
        assert not b.view(torch.uint8).any() if b.is_contiguous() else not b.any()


def test_nothing_is_known_of_symbolic_sizes() -> None:
    base = torch.zeros(8)
    _, (a, b) = fake_arguments([base[:4], base[4:]], dynamic=True)
    assert not definitely_disjoint(a, b)


def test_groups_hold_who_may_overlap_a_written_input() -> None:
    base, other = torch.zeros(10), torch.zeros(4)
    args = [base[:4], base[4:8], base[3:6], other, other[1:], 3]
    mode, plain = fake_arguments(args)
    with mode, functional_layer(FunctionalLayer.DISPATCHER):
        inputs = function_inputs(plain, args)
    assert overlapping_groups(inputs, []) == ()
    assert overlapping_groups(inputs, [0]) == ((0, 2),)
    assert overlapping_groups(inputs, [1]) == ((1, 2),)
    assert overlapping_groups(inputs, [2]) == ((0, 1, 2),)
    assert overlapping_groups(inputs, [2, 3]) == ((0, 1, 2), (3, 4))
