"""The benchmark of convolutions: one small shape in every direction, and its command."""

from __future__ import annotations

import time

import pytest
import torch

from aotkit_inductor_lower import LowerOptions
from tools.bench.convolutions import DIRECTIONS, SHAPES, Shape, main, measure


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("contractions", ["generated", "aten"])
def test_every_direction_is_measured_beside_atens(direction: str, contractions: str) -> None:
    shape = Shape("tiny", 1, 16, 16, 8, 3, 1, 1, 16)
    options = LowerOptions(contractions=contractions)  # type: ignore[arg-type]
    row = measure(shape, direction, 1, time.thread_time, options, torch.contiguous_format)
    assert row.own == (contractions == "generated")
    assert shape.operations == 2 * 16 * 8 * 8 * 9
    assert row.aten > 0 and row.ours > 0 and row.ratio > 0 and max(row.errors) < 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sequences_have_one_dimension(direction: str) -> None:
    shape = Shape("tiny", 2, 16, 16, 20, 4, 1, 3, 16, line=True)
    row = measure(shape, direction, 1, time.thread_time, LowerOptions(contractions="generated"))
    assert row.own and max(row.errors) < 1e-5 and str(shape) == "tiny: depthwise 4/1, 16 to 16, 2x20"


def test_the_command_prints_a_row_for_each_direction(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--only", "960 to 960", "--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert all(f"| {direction} |" in printed for direction in DIRECTIONS) and "geometric mean" in printed
    networks = {"resnet", "mobilenet", "convnext", "segformer", "unet", "mamba", "sequence", "swin", "vit", "many"}
    assert {shape.network for shape in SHAPES} == networks
