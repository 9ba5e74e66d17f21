"""Three small models of `transformers` in float64, their batches, their blocks, and how tensor parallel splits them.

What these models compute in float32 whatever their parameters are (Llama's norms and rotary positions, its loss) is put
in float64 as well, or steps could not be compared to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Model"]

_VOCABULARY, _CLASSES = 40, 6


@dataclass(frozen=True, slots=True)
class Model:
    """``build`` gives the model, whose weights depend on torch's seed; ``batch`` takes a batch size and a length
    (tokens, or pixels on a side) and gives the input and labels; ``loss`` takes what the model returns, and labels;
    ``blocks`` are the modules that are sharded, and checkpointed, each by itself; ``plan`` is for
    ``parallelize_module``, and so is ``sequence_plan``, where what stands between attentions and products is spread by
    positions: none for images."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    blocks: Callable[[nn.Module], list[tuple[nn.Module, str]]]
    plan: Callable[[], Mapping[str, Any]]
    sequence_plan: Callable[[], Mapping[str, Any]] | None = None


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(
        BertConfig(vocab_size=_VOCABULARY, max_position_embeddings=32, **sizes, **no_dropout)
    ).double()


class _Rotary(nn.Module):
    """Cosines and sines of Llama's positions, computed in float64."""

    frequencies: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        self.register_buffer("frequencies", 1e4**-exponents, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LlamaRotaryEmbedding`."""
        half = position_ids[..., None].to(torch.float64) * self.frequencies
        angles = torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=_VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, use_cache=False, **sizes
    )
    model = LlamaForCausalLM(config).double()
    model.model.rotary_emb = _Rotary(config.hidden_size // config.num_attention_heads)
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float64))
    model.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float64)
    return model


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=_CLASSES
    )
    return ResNetForImageClassification(config).double()


def _tokens(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(_VOCABULARY, (count, length)), torch.randint(_VOCABULARY, (count, length))


def _images(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 2 * length, 2 * length, dtype=torch.float64), torch.randint(_CLASSES, (count,))


def _cross_entropy(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def _bert_plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    layer = "bert.encoder.layer.*."
    columns = [f"{layer}attention.self.{name}" for name in ("query", "key", "value")] + [f"{layer}intermediate.dense"]
    rows = [f"{layer}attention.output.dense", f"{layer}output.dense"]
    return {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}


def _llama_plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    layer = "model.layers.*."
    columns = [f"{layer}self_attn.{name}_proj" for name in "qkv"] + [
        f"{layer}mlp.{name}_proj" for name in ("gate", "up")
    ]
    rows = [f"{layer}self_attn.o_proj", f"{layer}mlp.down_proj"]
    return {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}


def _bert_sequence_plan() -> dict[str, Any]:
    """Embeddings and the head are whole on every rank: the embeddings tell the attention masks their length."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel, SequenceParallel

    layer, plan = "bert.encoder.layer.*.", _bert_plan()
    for name in ("attention.output", "output"):
        plan[f"{layer}{name}.dense"] = RowwiseParallel(output_layouts=Shard(1))
        plan[f"{layer}{name}.LayerNorm"] = SequenceParallel(use_local_output=True)
    for name in (f"{layer}attention.self", f"{layer}intermediate", "cls"):
        plan[name] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
    begin = PrepareModuleInput(  # two arguments that are no hidden states follow
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Shard(1), None, None), use_local_output=True
    )
    return {"bert.encoder.layer.0": begin, **plan}


def _llama_sequence_plan() -> dict[str, Any]:
    """Embeddings are whole on every rank: they tell the positions their number."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    layer, plan = "model.layers.*.", _llama_plan()
    plan |= {
        f"{layer}{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    plan |= {name: SequenceParallel(use_local_output=True) for name in ("model.norm", *(layer + n for n in norms))}
    plan[f"{layer}self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    )
    plan[f"{layer}mlp"] = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    begin = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    return {"model.layers.0": begin, **plan}


def _resnet_plan() -> dict[str, Any]:
    """Its last layer: torch splits no convolutions."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"classifier.1": ColwiseParallel(output_layouts=Replicate())}


def _in(path: str) -> Callable[[nn.Module], list[tuple[nn.Module, str]]]:
    """Of each module of the list at ``path``: what holds it and its name there."""

    def blocks(model: nn.Module) -> list[tuple[nn.Module, str]]:
        holder = model.get_submodule(path)
        return [(holder, name) for name, _ in holder.named_children()]

    return blocks


MODELS: Mapping[str, Model] = {
    "bert": Model(_bert, _tokens, _cross_entropy, _in("bert.encoder.layer"), _bert_plan, _bert_sequence_plan),
    "llama": Model(_llama, _tokens, _cross_entropy, _in("model.layers"), _llama_plan, _llama_sequence_plan),
    "resnet": Model(_resnet, _images, _cross_entropy, _in("resnet.encoder.stages"), _resnet_plan),
}
