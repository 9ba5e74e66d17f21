"""Small instances of the five benchmark architectures: configs with random weights, no download."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "LENGTHS", "make_batch", "make_model"]


def _bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
            problem_type="single_label_classification",
        )
    )


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=99,
        n_positions=64,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise the first call logs a warning, which Dynamo cannot trace
    return model


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
            problem_type="single_label_classification",
        )
    )


def _resnet(layers: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[layers, layers],
            layer_type="basic",
            num_labels=3,
            problem_type="single_label_classification",
        )
    )


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "resnet": _resnet,
    "vit": _vit,
}


def make_model(name: str, layers: int = 2) -> nn.Module:
    """The model with weights from a fixed seed; of a ResNet, ``layers`` is how many there are in each of two stages."""
    torch.manual_seed(0)
    return ARCHITECTURES[name](layers)


LENGTHS = {"resnet": (32, 48), "vit": (32, 32)}
"""Two sizes of images on a side (a ViT takes one), or of texts in tokens where a model is not named: 16 and 11."""


def make_batch(name: str, batch: int, *, second_length: bool = False) -> dict[str, torch.Tensor]:
    """Inputs with labels, so that the model returns a loss."""
    generator = torch.Generator().manual_seed(batch)
    length = LENGTHS.get(name, (16, 11))[second_length]
    if name in ("resnet", "vit"):
        labels = torch.randint(0, 3, (batch,), generator=generator)
        return {"pixel_values": torch.randn(batch, 3, length, length, generator=generator), "labels": labels}
    ids = torch.randint(0, 99, (batch, length), generator=generator)
    labels = torch.randint(0, 3, (batch,), generator=generator) if name == "bert" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
