"""The bench of mixtures of experts: all ways compute the same, and its bytes are those of chosen experts."""

from __future__ import annotations

import pytest
import torch

from tools.bench import decode_experts

pytest.importorskip("transformers")


@pytest.mark.parametrize("model", sorted(decode_experts.EXPERTS))
@torch.no_grad()
def test_all_ways_compute_the_same_with_the_same_weights(model: str) -> None:
    block, x = decode_experts.block_of(model, "eager", 32, 24), torch.randn(3, 1, 32)
    expected = block(x)
    for way in decode_experts.WAYS:
        other = decode_experts.in_way(block, way)
        assert other.experts.config._experts_implementation == way
        assert other.experts.gate_up_proj is block.experts.gate_up_proj
        torch.testing.assert_close(other(x), expected)
    assert block.experts.config._experts_implementation == "eager"


@torch.no_grad()
def test_bytes_are_those_of_the_experts_that_tokens_have() -> None:
    block = decode_experts.block_of("mixtral", "eager", 32, 24)
    one = 3 * 32 * 24 * 4  # an expert
    gate = 8 * 32 * 4
    assert decode_experts.bytes_read(block, torch.randn(1, 1, 32)) == 2 * one + gate
    assert decode_experts.bytes_read(block, torch.randn(1, 1, 32).expand(5, 1, 32)) == 2 * one + gate


def test_a_row_has_a_number_for_each_column() -> None:
    block = decode_experts.block_of("mixtral", "eager", 32, 24)
    row = decode_experts.measure(block, 2, torch.float32, 2, iter(range(1000)).__next__)
    assert row[0] == "2" and len(row) == 9 and row[1:6] == ["1000.00"] * 5 and row[7:] == ["1.00", "1.00"]
