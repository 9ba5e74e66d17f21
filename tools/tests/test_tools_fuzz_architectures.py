"""Architectures of transformers, made small and compared with eager."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from tools.fuzz import architectures
from tools.fuzz.architectures import Finding, Seen, differences
from tools.fuzz.small_configs import make_inputs, make_small_model, small


def test_configurations_become_small_and_keep_their_proportions() -> None:
    llama = small(transformers.CONFIG_MAPPING["llama"]())
    assert (llama.hidden_size, llama.num_hidden_layers, llama.vocab_size, llama.use_cache) == (32, 2, 99, False)
    assert llama.num_key_value_heads == llama.num_attention_heads == 4
    gemma = small(transformers.CONFIG_MAPPING["gemma3_text"]())
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"} and len(gemma.layer_types) == 2
    bert = small(transformers.CONFIG_MAPPING["bert"]())
    assert (bert.hidden_dropout_prob, bert.attention_probs_dropout_prob) == (0.0, 0.0)
    segformer = small(transformers.CONFIG_MAPPING["segformer"]())
    assert len(segformer.depths) == len(segformer.hidden_sizes) == 4 and max(segformer.depths) == 2
    inner = small(transformers.CONFIG_MAPPING["clip"]())
    assert inner.text_config.hidden_size == inner.vision_config.hidden_size == 32


def test_a_model_and_its_inputs_have_a_loss() -> None:
    model, config = make_small_model("gpt2", "GPT2LMHeadModel")
    inputs = make_inputs(model, config, "causal", 2, 12)
    assert inputs["attention_mask"].sum() == 21 and inputs["labels"].equal(inputs["input_ids"])
    assert torch.isfinite(model(**inputs).loss)


def seen(kind: str = "float32", **values: Any) -> Seen:
    arrays = {name.replace("_", ":"): numpy.asarray(value, dtype=float) for name, value in values.items()}
    return Seen(arrays, {name: kind for name in arrays if name.startswith("output")})


def test_what_differs_is_named() -> None:
    eager = seen(output_0=[1.0, 2.0], grad_w=[3.0, 4.0])
    exact = seen(output_0=[1.0, 2.000001], grad_w=[3.0, 4.000001])
    assert differences(eager, eager, exact) == []
    assert differences(seen(output_0=[1.0, 2.0]), eager, exact) == ["grad:w is missing"]
    (new,) = differences(seen(output_0=[1.0, 2.0], grad_w=[3.0, 4.0], grad_v=0.0), eager, exact)
    assert new == "grad:v is new"
    (off,) = differences(seen(output_0=[1.0, 2.0], grad_w=[3.0, 4.0002]), eager, exact)
    assert off.startswith("grad:w 4.0e-05, eager")
    assert differences(seen(output_0=[1.0, 2.0], grad_w=[3.0, 4.0002]), eager, None) == []  # within a thousandth
    (kind,) = differences(replace(eager, kinds={"output:0": "bfloat16"}), eager, exact)
    assert kind == "output:0 is bfloat16, eager's float32"
    (shape,) = differences(seen(output_0=[1.0, 2.0, 3.0], grad_w=[3.0, 4.0]), eager, exact)
    assert shape.startswith("output:0 inf")


def test_where_eager_is_not_finite_ours_has_the_same_elements() -> None:
    eager = seen(output_0=[1.0, float("nan"), float("inf")], grad_w=[3.0])
    assert differences(eager, eager, None) == []
    (found,) = differences(seen(output_0=[1.0, 2.0, float("inf")], grad_w=[3.0]), eager, None)
    assert found == "output:0 where eager is not finite"


def test_a_model_is_compared_in_a_process_of_its_own_and_a_changed_result_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal"
    arguments = ["--heads", "causal", "--only", "gpt2", "--modes", "inference", "--journal", str(journal)]
    assert architectures.main(arguments) == 0 and "1 ok" in capsys.readouterr().out
    assert architectures.main(arguments) == 0 and "gpt2" not in capsys.readouterr().out  # it is in the journal
    kept, eager = architectures.observe, list[Any]()

    def observe(*args: Any) -> Seen:
        found = kept(*args)
        eager.append(found)
        if len(eager) == 2:  # the compiled one
            found.values["output:1"][0, 0] += 0.01
        return found

    monkeypatch.setattr(architectures, "observe", observe)
    assert architectures.main(arguments[:-2]) == 1
    said = capsys.readouterr().out
    assert said.startswith("wrong") and "output:1" in said


def test_a_process_that_dies_or_takes_too_long_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("gpt2", "GPT2LMHeadModel", "causal", "training", False)
    monkeypatch.setattr(architectures, "check", lambda *_: os._exit(3))
    found = architectures.in_a_process(given, 60)
    assert replace(found, seconds=0.0) == Finding("gpt2", "causal", "training", "error", "the process died")
    monkeypatch.setattr(architectures, "check", lambda *_: time.sleep(60))
    assert architectures.in_a_process(given, 0.2).what == "too long"


def test_what_transformers_refuses_is_left_out() -> None:
    found = architectures.check("gpt2", "NoSuchModel", "causal", "training")
    assert found.what == "left out" and "NoSuchModel" in found.detail
