"""Layout helpers against brute force."""

import itertools

import pytest
import torch

from aotkit_cudagraphs.static_inputs import buffer_like, copy_into_buffer, expanded_dims, overlaps_itself, span

LAYOUTS = [
    (shape, stride)
    for shape in itertools.product((0, 1, 2, 3), repeat=2)
    for stride in itertools.product((0, 1, 2, 3, 5), repeat=2)
]


def addresses(shape, stride):
    return [sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))]


@pytest.mark.covers("F6.2")
@pytest.mark.parametrize("shape, stride", LAYOUTS)
def test_every_small_layout_is_measured_and_copied_right(shape, stride):
    source = torch.randn(64).as_strided(shape, stride)
    reached = addresses(shape, stride)
    assert span(source) == (max(reached) + 1 if reached else 0)
    if len(set(reached)) < len(reached):
        assert overlaps_itself(source), "an overlap must never be missed"
    assert expanded_dims(source) == tuple(d for d in range(2) if stride[d] == 0 and shape[d] > 1)
    buffer = buffer_like(source)
    assert buffer.stride() == source.stride() and buffer.storage_offset() == 0
    copy_into_buffer(buffer, source, expanded_dims(source))
    assert torch.equal(buffer, source)


def test_usual_layouts_are_not_taken_for_overlapping():
    for tensor in (torch.ones(3, 4), torch.ones(3, 4).t(), torch.ones(8, 8)[::2, 1::3], torch.ones(())):
        assert not overlaps_itself(tensor)
