"""transformers' Trainer and generate, and accelerate, with this backend: the same losses and tokens as without it."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit
from aotkit.hugging_face import accept_in_accelerate, generation_settings
from aotkit_inductor_lower.targets.cpu import host_machine

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def losses(folder: Path, trained: Any, **settings: Any) -> list[float]:
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 31).repeat(2).view(4, 14)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(trained, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it and hides the warning
def test_the_trainer_trains_with_this_backend_by_its_name_and_compiled_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aotkit")
    expected = losses(tmp_path, model())
    accept_in_accelerate()
    accept_in_accelerate()
    assert losses(tmp_path, model(), torch_compile_backend="aotkit") == pytest.approx(expected, rel=1e-4)
    assert "-backward compiled: " in caplog.text
    caplog.clear()
    torch._dynamo.reset()
    trained = model()
    trained.compile(backend="aotkit", options={"cache": False})
    assert losses(tmp_path, trained) == pytest.approx(expected, rel=1e-4)
    assert "-backward compiled: " in caplog.text


def test_accelerate_passes_the_name_on() -> None:
    accept_in_accelerate()
    names = accelerate.utils.DynamoBackend
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aotkit")
    assert plugin.to_dict()["backend"] == "aotkit" and names("AOTKIT") is plugin.backend
    assert plugin.backend != names.NO and "AOTKIT" in names and copy.deepcopy(plugin.backend) is plugin.backend
    assert names("inductor".upper()) is names.INDUCTOR and "NOTHING" not in names
    with pytest.raises(ValueError, match="'NOTHING' is not a valid DynamoBackend"):
        names("NOTHING")


def test_generate_compiles_its_step_and_gives_the_same_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aotkit")
    generator = model().eval()
    prompt = torch.tensor([[1, 5, 7, 11], [1, 4, 3, 9]])
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    expected = generator.generate(prompt, **given)
    assert "compiled" not in caplog.text
    assert torch.equal(generator.generate(prompt, **given, **generation_settings(fallback="error")), expected)
    assert "-inference compiled: " in caplog.text
    with pytest.raises(aotkit.UnknownOption, match="there is no option 'fallbac'"):
        generator.generate(prompt, **given, **generation_settings(fallbac="error"))


def test_an_output_of_a_model_comes_back_from_a_package_as_its_class(tmp_path: Path) -> None:
    record = transformers.modeling_outputs.BaseModelOutput

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return record(last_hidden_state=x + 1)

    path, x = tmp_path / "model", torch.randn(3)
    aotkit.aot_compile(Model(), (x,), path)
    found = aotkit.load(path, classes=(record,))(x)
    assert type(found) is record
    for result in (found, aotkit.load(path)(x)):
        torch.testing.assert_close(result.last_hidden_state, x + 1)
        torch.testing.assert_close(result["last_hidden_state"], x + 1)


@pytest.mark.sample(ways=1)
@pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_step_of_a_mixture_of_experts_reads_chosen_experts_where_they_lie(
    way: str, dtype: torch.dtype, tokens: int
) -> None:
    """transformers' two ways to compute experts in a graph: gathered weights, and groups of sorted rows."""
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        hidden_size=64,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
    )
    config._experts_implementation = way
    block = Qwen2MoeSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    block, x = block.to(dtype), torch.randn(tokens, 1, 64).to(dtype)
    with torch.no_grad():
        expected = block(x)
        compiled = torch.compile(block, backend="aotkit", fullgraph=True, options={"contractions": "generated"})
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(compiled(x), expected, rtol=tolerance, atol=tolerance)
        torch._dynamo.reset()
        options = aotkit.Options(contractions="generated", cache=False)
        report = str(aotkit.explain(block, x, options=options)).splitlines()
    calls = [line for line in report if line.strip().startswith("ATen ")]
    assert not any("grouped" in line or "bmm" in line for line in calls)
    ours = [line for line in report if "our own" in line and ("grouped" in line or "bmm" in line)]
    assert len(ours) == 2
