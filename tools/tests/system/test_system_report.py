"""Reports in a real browser: of a BERT that trains, of 24 layers, of a compile that fails; and of partition.

They are looked at by boxes.html, which finds words that lie over others, are cut off or hard to read, and pages that
are wider than their window.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import aotkit

pytestmark = pytest.mark.system

MOST_BYTES = 3_000_000
Look = Callable[..., dict[str, Any]]


class Loss(nn.Module):
    """A BERT of six layers with its loss, as it trains."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        self.bert = BertForMaskedLM(BertConfig(vocab_size=512, num_hidden_layers=6, **sizes)).train()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=words, labels=words).loss  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages by what they are of."""
    folder = tmp_path_factory.mktemp("reports")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    deep = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).train()
    made = {
        "bert": aotkit.report(Loss(), torch.randint(0, 512, (2, 32)), path=folder / "bert.html", calls=1),
        "deep": aotkit.report(deep, torch.randn(2, 8, 32), path=folder / "deep.html", calls=1),
    }
    options = aotkit.Options(fallback="error")
    nowhere = torch.empty(4, 8, device="meta")
    made["failing"] = aotkit.report(torch.sin, nowhere, path=folder / "failing.html", calls=1, options=options)
    return made


def complaints(looked: dict[str, Any]) -> str:
    return "\n".join(f"{f['page']} at {f['width']}: {f['what']}" for f in looked["found"])


@pytest.mark.parametrize("dark", [False, True])
def test_no_words_overlap_or_are_cut_off(pages: dict[str, Path], boxes: Look, dark: bool) -> None:
    looked = boxes(list(pages.values()), dark)
    assert not looked["found"], complaints(looked)
    assert looked["looked"] == (1 if dark else 6) * len(pages) and looked["words"] > (5_000 if dark else 15_000)


def test_the_pages_are_small_whole_and_load_nothing(pages: dict[str, Path], browse: Callable[..., str]) -> None:
    for name, path in pages.items():
        text = path.read_text()
        assert len(text.encode()) < MOST_BYTES, (name, len(text))
        assert not re.search(r"<(script|img|iframe|object)|@import|url\(|<link[^>]+href=\"(?!data:,)", text), name
    dom = browse(pages["deep"].as_uri())
    assert all(f'title="layers.{number}"' in dom for number in range(24))
    assert "The compile failed" in browse(pages["failing"].as_uri())


def test_what_is_ugly_is_found(tmp_path: Path, boxes: Look) -> None:
    words = {
        "over": '<p>one line</p><p style="margin-top:-38px">another line</p>',
        "cut": '<div style="width:60px;overflow:hidden;white-space:nowrap">words that are cut off</div>',
        "wide": '<p style="width:1700px">a paragraph wider than any window</p>',
        "pale": '<p style="color:#ccc;background:#fff">hardly to be read</p>',
        "hidden": "<details><summary>more</summary><p style='margin-top:-30px'>lies over it</p></details>",
        "picture": '<div style="width:300px;overflow:auto"><svg width="600"><text y="20">a word</text></svg></div>',
        "right": "<p>one line</p><p>another line</p>",
    }
    for name, body in words.items():
        (tmp_path / f"{name}-page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{body}</body>")
    looked = boxes([tmp_path / f"{name}-page.html" for name in words])
    found = {(f["page"].partition("-")[0], f["what"].partition(":")[0].partition(" (")[0]) for f in looked["found"]}
    assert {name for name, _ in found} == words.keys() - {"right"}, complaints(looked)
    states = {f["what"].rpartition("(")[2] for f in looked["found"] if f["page"].startswith("hidden")}
    assert states == {"all parts open)"}
