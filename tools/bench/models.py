"""The five architectures, and more networks of convolutions.

Small `transformers` configs, random weights, dropout 0, nothing downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture: how to build the model and a batch with labels.

    ``batch_size`` and ``length`` (tokens, or pixels on a side) are the sizes that are measured; ``--quick`` uses a
    quarter of the length.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], Batch]
    batch_size: int
    length: int
    quick_length: int


VOCABULARY = 8192
CLASSES = 10


def bert() -> nn.Module:
    """Masked language model, four layers of width 256."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def gpt2() -> nn.Module:
    """Causal language model, four layers of width 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return with_loss_type(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """Causal language model with rotary positions, grouped keys and RMS norm, four layers of width 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    return with_loss_type(LlamaForCausalLM(config))


def with_loss_type(model: nn.Module) -> nn.Module:
    """Name the loss, which otherwise logs a warning in the first call: Dynamo cannot trace that."""
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def resnet() -> nn.Module:
    """Bottleneck ResNet with four stages."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return ResNetForImageClassification(config)


def resnet18() -> nn.Module:
    """ResNet-18: basic blocks, the last of which have weights much larger than small images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return ResNetForImageClassification(config)


def vit() -> nn.Module:
    """Vision transformer, four layers of width 256, patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=224,
        patch_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return ViTForImageClassification(config)


def mobilenet() -> nn.Module:
    """MobileNetV2 of half the width: inverted residuals with depthwise convolutions, padded on two sides."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        depth_multiplier=0.5,
        image_size=128,
        classifier_dropout_prob=0.0,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return MobileNetV2ForImageClassification(config)


def convnext() -> nn.Module:
    """ConvNeXtV2 in four stages."""
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    config = ConvNextV2Config(
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
        image_size=128,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return ConvNextV2ForImageClassification(config)


def segformer() -> nn.Module:
    """SegFormer with one layer in each of its four stages."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[1, 1, 1, 1], drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=CLASSES)
    return SegformerForSemanticSegmentation(config)


def t5() -> nn.Module:
    """Encoder and decoder, two layers of width 256 each, with a learned bias of positions in attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def swin() -> nn.Module:
    """Swin transformer: attention in shifted windows of 7 by 7, in four stages."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        embed_dim=48,
        depths=[2, 2, 2, 2],
        num_heads=[2, 4, 8, 16],
        drop_path_rate=0.0,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return SwinForImageClassification(config)


def mamba() -> nn.Module:
    """Causal language model of state spaces, two layers of width 256."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=2, use_cache=False)
    return MambaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class Segmented:
    """What a model of `transformers` returns of it."""

    loss: torch.Tensor
    logits: torch.Tensor


class UNet(nn.Module):
    """Three halvings and doublings by transposed convolutions, with norms and what is joined across."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            self.block(*each) for each in ((3, width), *((width << k, 2 * width << k) for k in range(3)))
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width << k, width << k, 2, 2) for k in range(3))
        self.joined = nn.ModuleList(self.block(2 * width << k, width << k) for k in range(3))
        self.classes = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def block(channels: int, results: int) -> nn.Module:
        """Two convolutions with norms."""
        layers = [
            (nn.Conv2d(n, results, 3, padding=1), nn.BatchNorm2d(results), nn.ReLU()) for n in (channels, results)
        ]
        return nn.Sequential(*(layer for group in layers for layer in group))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Segmented:
        """Scores of every pixel."""
        found = [self.down[0](pixel_values)]
        for stage in self.down[1:]:
            found.append(stage(nn.functional.max_pool2d(found[-1], 2)))
        x = found.pop()
        for up, joined in zip(reversed(self.up), reversed(self.joined), strict=True):
            x = joined(torch.cat([up(x), found.pop()], 1))
        x = self.classes(x)
        return Segmented(nn.functional.cross_entropy(x, labels), x)


def token_batch(batch_size: int, length: int, generator: torch.Generator) -> Batch:
    """Token ids, a mask of ones, and labels for every position."""
    ids = torch.randint(0, VOCABULARY, (batch_size, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch_size, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def word_batch(batch_size: int, length: int, generator: torch.Generator) -> Batch:
    """Token ids and labels, for models that take no mask."""
    batch = token_batch(batch_size, length, generator)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def image_batch(batch_size: int, length: int, generator: torch.Generator) -> Batch:
    """Images of `length` x `length` pixels and class labels."""
    pixels = torch.randn(batch_size, 3, length, length, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (batch_size,), generator=generator)}


def pixel_batch(batch_size: int, length: int, generator: torch.Generator) -> Batch:
    """Images, and a label for each pixel."""
    pixels = torch.randn(batch_size, 3, length, length, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, CLASSES, (batch_size, length, length), generator=generator),
    }


MODELS: dict[str, Case] = {
    "bert": Case(bert, token_batch, 4, 128, 32),
    "gpt2": Case(gpt2, token_batch, 4, 128, 32),
    "resnet": Case(resnet, image_batch, 4, 224, 64),
    "vit": Case(vit, image_batch, 4, 224, 224),
    "llama": Case(llama, token_batch, 4, 128, 32),
}

#: More networks, measured where they are asked for.
MORE: dict[str, Case] = {
    "t5": Case(t5, token_batch, 4, 128, 32),
    "swin": Case(swin, image_batch, 4, 224, 224),
    "mamba": Case(mamba, word_batch, 2, 64, 16),
    "mobilenet": Case(mobilenet, image_batch, 8, 128, 64),
    "convnext": Case(convnext, image_batch, 4, 128, 64),
    "segformer": Case(segformer, pixel_batch, 2, 256, 64),
    "resnet18": Case(resnet18, image_batch, 2, 160, 64),
    "unet": Case(UNet, pixel_batch, 2, 128, 32),
}


def make_model(name: str) -> nn.Module:
    """The model with weights from a fixed seed: equal in every process."""
    torch.manual_seed(0)
    return (MODELS | MORE)[name].build()


def make_batch(name: str, quick: bool) -> Batch:
    """The inputs, equal in every process."""
    case = (MODELS | MORE)[name]
    length = case.quick_length if quick else case.length
    return case.inputs(case.batch_size, length, torch.Generator().manual_seed(1))
