"""Which inputs share memory, and which certainly do not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import collect_metadata, fake_arguments, function_inputs, functional_layer
from aotkit_functionalize.overlap import definitely_disjoint, in_disjoint_windows, repeats_memory
from aotkit_functionalize.tracing import overlapping_groups
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


WINDOWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "projections": lambda x: x.view(2, 3, 12).chunk(3, -1),
    "every second column": lambda x: (x.view(6, 12)[:, ::2], x.view(6, 12)[:, 1::2]),
    "halves of heads": lambda x: x.view(2, 3, 3, 4).transpose(1, 2).chunk(2, -1),
    "rows": lambda x: x.view(6, 12).split(2),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_any_rank_are_told_apart(name: str) -> None:
    for a, b in itertools.permutations(WINDOWS[name](torch.arange(72)), 2):
        assert in_disjoint_windows(a, b)


def test_no_windows_that_overlap_are_told_apart() -> None:
    """Against the elements themselves, of 2000 pairs of windows."""
    draw, elements, apart = random.Random(0), torch.arange(400), 0

    def window() -> Tensor:
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        return elements.as_strided(sizes, [draw.choice((1, 2, 3, 4, 6, 12, 24)) for _ in sizes], draw.randint(0, 30))

    for _ in range(2000):
        a, b = window(), window()
        if in_disjoint_windows(a, b):
            apart += 1
            assert set(a.flatten().tolist()).isdisjoint(b.flatten().tolist()), (a, b)
    assert apart > 200


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


LAYOUTS = {
    "row-major": ((2, 3, 4), (12, 4, 1)),
    "transposed": ((4, 3, 2), (1, 4, 12)),
    "with gaps": ((2, 3), (9, 2)),
    "expanded": ((2, 3), (0, 1)),
    "expanded once": ((1, 3), (0, 1)),
    "expanded, empty": ((2, 0), (0, 1)),
    "windows": ((4, 3), (1, 1)),
    "rows that touch": ((2, 3), (3, 1)),
    "planes that overlap": ((2, 3, 4), (9, 4, 1)),
    "one element": ((), ()),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["known sizes", "symbols"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_repeats_memory_if_two_places_lead_to_one_element(name: str, dynamic: bool) -> None:
    sizes, strides = LAYOUTS[name]
    places = [_place(index, strides) for index in itertools.product(*map(range, sizes))]
    tensor = torch.zeros(40).as_strided(sizes, strides, 1)
    mode, (fake,) = fake_arguments([tensor], dynamic=dynamic)
    with mode:
        assert repeats_memory(fake) is (len(set(places)) < len(places))


def _place(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def test_a_view_of_what_repeats_memory_has_the_gradient_of_the_graph(layer: FunctionalLayer) -> None:
    for base, own in ((torch.rand(4, 1).expand(4, 6), True), (torch.rand(4, 6), False)):
        args = [base.detach().requires_grad_()]
        mode, plain = fake_arguments(args)
        with mode, functional_layer(layer):
            inputs = function_inputs(plain, args)
            (info,) = collect_metadata(inputs, [inputs[0].value[1:]], grad_mode=(True, True)).metadata.outputs
        assert (info.graph_output is not None) is own and info.view is not None


def test_that_a_dense_tensor_repeats_no_memory_is_asked_of_no_size() -> None:
    mode, fakes = fake_arguments([torch.zeros(3, 4, 5), torch.zeros(6, 7, 8).permute(2, 0, 1)], dynamic=True)
    with mode:
        assert not any(map(repeats_memory, fakes))
    assert mode.shape_env is not None and not mode.shape_env.guards
