"""The bench of sampling: what it measures is transformers' sampling."""

from __future__ import annotations

import pytest
import torch

from tools.bench import sampling


def test_samplers_keep_the_most_probable_words() -> None:
    pytest.importorskip("transformers")
    scores = torch.tensor([[0.0, 3.0, 2.9, -1.0, 2.8]])
    assert (sampling.sampler("top-p", draws=False)(scores) > 0).tolist() == [[False, True, True, False, True]]
    assert sampling.sampler("top-p", draws=True)(scores).item() in (1, 2, 4)
