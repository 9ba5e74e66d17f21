"""The models of the table, at sizes that a GPU trains: fewer layers than the published ones, since those repeat.

Weights and inputs are fake CUDA tensors, so no size needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.bench.models import UNet, with_loss_type

__all__ = ["MODELS", "Model", "on_fake_device", "step"]

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """``sizes``: what is built and on how much, for the page."""

    sizes: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def _tokens(rows: int, length: int, words: int, mask: bool = False) -> Callable[[], Batch]:
    def make() -> Batch:
        ids = torch.randint(0, words, (rows, length), device="cuda")
        made = {"input_ids": ids, "labels": torch.randint(0, words, (rows, length), device="cuda")}
        return made | ({"attention_mask": torch.ones_like(ids)} if mask else {})

    return make


def _images(count: int, side: int, classes: int) -> Callable[[], Batch]:
    def make() -> Batch:
        pixels = torch.randn(count, 3, side, side, device="cuda")
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (count,), device="cuda")}

    return make


def _pixels(count: int, side: int, classes: int) -> Callable[[], Batch]:
    def make() -> Batch:
        labels = torch.randint(0, classes, (count, side, side), device="cuda")
        return {"pixel_values": torch.randn(count, 3, side, side, device="cuda"), "labels": labels}

    return make


def _speech() -> Batch:
    labels = torch.randint(0, 51865, (8, 128), device="cuda")
    return {"input_features": torch.randn(8, 80, 3000, device="cuda"), "labels": labels}


def _hugging(name: str, /, loss: bool = False, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of `transformers`, ``name`` being "Bert ForMaskedLM" and so on."""

    def build() -> nn.Module:
        import transformers

        family, head = name.split()
        model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**sizes))
        return with_loss_type(model) if loss else model  # type: ignore[no-any-return]

    return build


_ONE_LABEL: dict[str, Any] = {"num_labels": 1000, "problem_type": "single_label_classification"}
_DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, Model] = {
    "bert": Model(
        "width 768, 4 layers, 30522 words; 16 x 512",
        _hugging("Bert ForMaskedLM", num_hidden_layers=4, **_DRY),
        _tokens(16, 512, 30522, True),
    ),
    "gpt2": Model(
        "width 768, 4 layers, 50257 words; 8 x 1024",
        _hugging("GPT2 LMHeadModel", True, n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
        _tokens(8, 1024, 50257),
    ),
    "resnet": Model(
        "widths 256 to 2048, 2 blocks each; 64 x 224²",
        _hugging("ResNet ForImageClassification", depths=[2, 2, 2, 2], **_ONE_LABEL),
        _images(64, 224, 1000),
    ),
    "vit": Model(
        "width 768, 4 layers; 64 x 224²",
        _hugging("ViT ForImageClassification", num_hidden_layers=4, **_DRY, **_ONE_LABEL),
        _images(64, 224, 1000),
    ),
    "llama": Model(
        "width 2048, 4 of 16 heads for keys, 2 layers, 32000 words; 4 x 1024",
        _hugging(
            "Llama ForCausalLM",
            True,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=4,
            use_cache=False,
        ),
        _tokens(4, 1024, 32000),
    ),
    "t5": Model(
        "width 768, 2 + 2 layers, 32128 words; 8 x 512",
        _hugging(
            "T5 ForConditionalGeneration",
            d_model=768,
            d_ff=3072,
            num_layers=2,
            num_heads=12,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        _tokens(8, 512, 32128),
    ),
    "convnextv2": Model(
        "widths 96 to 768, 1, 1, 2 and 1 blocks; 64 x 224²",
        _hugging("ConvNextV2 ForImageClassification", depths=[1, 1, 2, 1], **_ONE_LABEL),
        _images(64, 224, 1000),
    ),
    "qwen2moe": Model(
        "width 1024, 8 experts of width 704, 2 for each word, 2 layers, 32000 words; 4 x 512",
        _hugging(
            "Qwen2Moe ForCausalLM",
            True,
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=704,
            shared_expert_intermediate_size=2816,
            use_cache=False,
            experts_implementation="batched_mm",
        ),
        _tokens(4, 512, 32000),
    ),
    "mamba": Model(
        "width 768, 2 layers, 50280 words, the scan written out as a loop; 8 x 32",
        _hugging("Mamba ForCausalLM", True, num_hidden_layers=2, use_cache=False, use_associative_scan=False),
        _tokens(8, 32, 50280),
    ),
    "whisper": Model(
        "width 512, 2 + 2 layers, 51865 words; 8 x 3000 frames, 128 words",
        _hugging(
            "Whisper ForConditionalGeneration",
            d_model=512,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            use_cache=False,
        ),
        _speech,
    ),
    "segformer": Model(
        "widths 32 to 256, 1 layer each, 150 classes; 8 x 512²",
        _hugging(
            "Segformer ForSemanticSegmentation",
            depths=[1, 1, 1, 1],
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
            num_labels=150,
        ),
        _pixels(8, 512, 150),
    ),
    "unet": Model("widths 64 to 512; 8 x 256²", lambda: UNet(64), _pixels(8, 256, 10)),
}


@contextmanager
def on_fake_device(name: str) -> Iterator[tuple[nn.Module, Batch]]:
    """The model and its inputs as fake CUDA tensors, while those are understood."""
    from transformers import PreTrainedModel

    model = MODELS[name].build().train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    module._parameters[key] = nn.Parameter(_moved(value), value.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = _moved(buffer)
        if isinstance(model, PreTrainedModel):
            model.tie_weights()
            _install_hooks(model)
        yield model, MODELS[name].batch()


def _install_hooks(model: nn.Module) -> None:
    """What `transformers` does under a lock in the first call, which Dynamo can't trace."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if hasattr(module, "tie_weights"):
            maybe_install_capturing_hooks(module)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def step(model: nn.Module, batch: Batch, backend: Any) -> None:
    """A training step with products in bfloat16."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(**batch).loss
    loss.backward()
