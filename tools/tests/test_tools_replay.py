"""The tool that says whether a change of structure changed what is generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import decompositions
from aotkit_inductor_lower.errors import UnsupportedGraphError
from tools.replay.__main__ import report
from tools.replay.compare import differences, renamed
from tools.replay.corpus import Captured, Case, capture
from tools.replay.record import PROCESSORS, read, record, texts_of


def test_a_model_case_and_a_pair_are_captured_with_their_backward() -> None:
    graphs = capture(Case("pair", "nn.functional.gelu float32 gradient"))
    assert [graph.part for graph in graphs] == ["forward 0", "backward 1"]
    assert any("aten" in str(node.target) for node in graphs[0].module.graph.nodes)


def test_each_graph_has_loop_ir_and_kernels_for_both_processors() -> None:
    graph = make_fx(lambda x: torch.softmax(x + 1, -1), decompositions(), tracing_mode="fake")(torch.randn(4, 8))
    for processor, word in zip(PROCESSORS, ("define", "tl.program_id"), strict=True):
        texts = texts_of(Captured("forward 0", graph), processor)
        assert any(" ir " in name and text.startswith("aotkit-ir") for name, text in texts.items()), texts.keys()
        assert any(" kernels " in name and word in text for name, text in texts.items()), texts.keys()
        assert "refused" not in texts
        assert texts == texts_of(Captured("forward 0", graph), processor)


def test_a_refusal_is_kept_as_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedGraphError("this graph", "it is a test")

    monkeypatch.setattr("tools.replay.record.compile_graph", refuse)
    graph = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.randn(3))
    (message,) = texts_of(Captured("forward 0", graph), "host").values()
    assert message.startswith("UnsupportedGraphError: ") and "this graph" in message


def test_two_recordings_of_the_same_sources_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [Case("pair", "tril float32 gradient"), Case("pair", "cumsum int64 forward")]
    for name in ("one", "two"):
        record(pairs, tmp_path / name)
    assert report(tmp_path / "one", tmp_path / "two", {}, 5) == 0
    assert "0 of " in capsys.readouterr().out
    entries = [json.loads(line) for line in (tmp_path / "two").read_text().splitlines()]
    (texts,) = [entry["texts"] for entry in entries if entry.get("texts") and "cumsum" in entry["key"]]
    name = next(name for name in texts if " kernels " in name)
    texts[name] = texts[name].replace("add", "mul", 1)
    (tmp_path / "two").write_text("\n".join(map(json.dumps, entries)))
    assert report(tmp_path / "one", tmp_path / "two", {}, 5) == 1
    assert name in capsys.readouterr().out
    assert read(tmp_path / "one").keys() == {pair.key for pair in pairs}


def test_an_empty_recording_is_not_a_success(tmp_path: Path) -> None:
    (tmp_path / "nothing").touch()
    assert report(tmp_path / "nothing", tmp_path / "nothing", {}, 5) == 1


def test_renamed_words_are_whole_and_each_is_replaced_once() -> None:
    assert renamed("row rows row.x", {"row": "scratch"}) == "scratch rows scratch.x"
    assert renamed("a b", {"a": "b", "b": "a"}) == "b a"


def test_differences_name_what_is_missing_and_what_changed() -> None:
    before = {"gelu": {"ir": "row x\n1", "old": "text"}, "gone": {}}
    after = {"gelu": {"ir": "scratch x\n2", "new": "text"}}
    found = {(d.case, d.text): d for d in differences(before, after, {"row": "scratch"})}
    assert set(found) == {("gelu", "ir"), ("gelu", "old"), ("gelu", "new"), ("gone", "the whole case")}
    assert "-1\n+2" in found["gelu", "ir"].shown()
    assert not list(differences(before, {**before}, {}))
