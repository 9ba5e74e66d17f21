"""Spectra lie in memory as in eager mode, with every torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from aotkit_aot_trace import _torch_compat, capture
from aotkit_aot_trace.eager_spectra import spectrum_strides, with_eager_spectra

aten = torch.ops.aten
PERMUTED = [*itertools.permutations(range(3))]
DIMS = [[0], [1], [2], [0, 2], [2, 1], [1, 0], [2, 0, 1]]


@pytest.mark.parametrize("order", PERMUTED, ids=str)
def test_strides_are_eagers(order):
    x = torch.arange(210.0).view(5, 6, 7).sin().permute(order)
    z = torch.complex(x, x)
    for dims in DIMS:
        for given, result, last_stays in (
            (z, aten._fft_c2c.default(z, dims, 0, True), False),
            (x, aten._fft_r2c.default(x, dims, 0, True), True),
            (x, aten._fft_r2c.default(x, dims, 0, False), True),
        ):
            assert tuple(spectrum_strides(given, dims, result.shape, last_stays=last_stays)) == result.stride(), dims


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_what_is_captured_is_right(order, monkeypatch):
    monkeypatch.setattr(_torch_compat, "spectra_are_laid_out", lambda: False)  # as torch 2.11 has it
    x = torch.arange(210.0).view(5, 6, 7).sin().permute(order)

    def transformed(x):
        two = [aten._fft_c2c.default(torch.complex(x, x), dims, 0, True) for dims in DIMS]
        return [*two, *(aten._fft_r2c.default(x, dims, 0, half) for dims in DIMS for half in (True, False))]

    captured, wanted = capture(transformed, [x]), transformed(x)
    marked = [node.target for node in captured.graph.graph.nodes if node.target in with_eager_spectra({})]
    assert len(marked) == 3 * len(DIMS)
    told = [node.meta["val"].stride() for node in captured.graph.graph.output_node().args[0]]
    assert told == [value.stride() for value in wanted]
    for got, want in zip(captured.graph(x), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_table_that_has_them_keeps_them(monkeypatch):
    monkeypatch.setattr(_torch_compat, "spectra_are_laid_out", lambda: False)
    table = {aten._fft_c2c.default: None, aten._fft_r2c.default: None}
    assert with_eager_spectra({}).keys() == table.keys()
    assert with_eager_spectra(table) == table
