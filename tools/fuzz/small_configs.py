"""Small configurations and inputs for architectures of transformers, made from their default configurations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["HEADS", "architectures", "make_inputs", "make_small_model", "small"]

#: Mappings of transformers from types of models to classes, by what the models are given.
HEADS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "masked_image": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}

#: More parameters than this take too long, or more memory than there is.
MOST_PARAMETERS = 30_000_000
_WORDS = 99

#: Numbers for fields by what their whole name matches; the first that matches holds.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?|.*_vocab_size|n_words|n_vocab|text_vocab_size", _WORDS),
    (r"(encoder_|decoder_|text_|vision_)?(num_hidden_layers|layers|num_layers|n_layers?)|num_decoder_layers", 2),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_global_key_value_heads|swa_num_key_value_heads", 2),
    (r"(\w+_)?(num_attention_heads|num_heads|attention_heads|n_heads?)|num_attention_heads_\w+", 4),
    (r"mamba_n_heads|mamba_num_heads|linear_num_value_heads|linear_num_key_heads|lightning_nope_heads", 4),
    (r"mamba_d_head|mamba_head_dim|linear_key_head_dim|linear_value_head_dim|attention_head_size|index_head_dim", 16),
    (r"hidden_size_per_layer_input", 8),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|global_head_dim|swa_head_dim|d_kv|kv_channels", 8),
    (r"kv_lora_rank|q_lora_rank|\w+_lora_rank|laurel_rank|time_step_rank|o_lora_rank|mamba_dt_rank", 8),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|emb_dim|encoder_hidden_size", 32),
    (r"decoder_hidden_size|neck_hidden_size\w*|fusion_hidden_size|projection_dim|hidden_dim|attention_hidden_size", 32),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|inner_dim|hidden_size_mlp|ff_dim)|n_inner|d_ff|dim_ff\w*", 48),
    (r"moe_intermediate_size|shared_expert_intermediate_size|lru_width|intermediate_size_mlp", 32),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k)", 2),
    (r"rotary_dim", 8),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"num_kv_shared_layers", 0),
    (r"first_k_dense_replace|n_shared_experts|moe_layer_start_index", 1),
    (r"state_size|mamba_d_state|ssm_state_size|d_state", 8),
    (r"mamba_n_groups|n_groups|mamba_ngroups", 2),
    (r"(mamba_)?chunk_size|chunk_length", 4),
    (r"max_position_embeddings|n_positions|max_seq_len|max_source_positions|max_target_positions|n_ctx", 64),
    (r"sliding_window|attention_window_size|local_attention|window", 6),
    (r"image_size", 64),
    (r"num_mel_bins|feature_size|input_feat_per_channel", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
    (r"conv_dim\w*|tdnn_dim", 32),
)
_PATTERNS = tuple((re.compile(pattern), number) for pattern, number in _NUMBERS)
_TOKEN = re.compile(r"\w*_token_id|\w*_token_index")
_RANDOM = re.compile(r".*(drop|mask_time_prob|mask_feature_prob|jitter|noise).*")


def architectures(head: str) -> dict[str, str]:
    """Types of models with the class that has this head."""
    from transformers.models.auto import modeling_auto

    found = dict[str, str]()
    for kind, name in getattr(modeling_auto, HEADS[head]).items():
        found[kind] = name if isinstance(name, str) else name[0]
    return found


def _smaller(name: str, value: Any) -> Any:
    """The value of a field in a small configuration."""
    if isinstance(value, bool) or value is None:
        return False if name == "use_cache" else value
    if isinstance(value, float):
        return 0.0 if _RANDOM.fullmatch(name) else value
    if isinstance(value, int):
        if _TOKEN.fullmatch(name):
            return value if value < _WORDS else 3
        for pattern, number in _PATTERNS:
            if pattern.fullmatch(name):
                return min(number, value) if value > 0 else value
        return value
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return type(value)(_smaller_list(name, list(value)))
    return value


def _smaller_list(name: str, values: list[int]) -> list[int]:
    """Widths and depths of stages: fewer, with the same proportions."""
    if "depth" in name or name in ("layers", "num_blocks", "layer_depths"):
        return [min(value, 2 if number == 0 else 1) for number, value in enumerate(values)]
    if re.search(r"hidden_sizes|embed_dims?|neck|widths|channels|conv_dim", name) and min(values) >= 32:
        return [max(16, value // 8 // 16 * 16) for value in values]
    return values


def small(config: Any) -> Any:
    """A configuration of the same class with small sizes and nothing random; nested ones become small as well."""
    given, later = dict[str, Any](), dict[str, Any]()
    fields = config.to_dict()
    for name, value in fields.items():
        if hasattr(type(config), name) and isinstance(getattr(type(config), name), property):
            continue
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            given[name] = small(inner)
            continue
        if (changed := _smaller_beside(name, value, fields)) != value:
            (given if _is_parameter(type(config), name) else later)[name] = changed
    made = type(config)(**given)
    for name, value in later.items():
        try:
            setattr(made, name, value)
        except (AttributeError, NotImplementedError):  # computed from others
            continue
    return made


def _smaller_beside(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """As :func:`_smaller`, for fields that others say something of."""
    if name == "num_key_value_heads" and value == fields.get("num_attention_heads"):
        return _smaller("num_attention_heads", value)
    if isinstance(value, (list, tuple)) and len(value) == fields.get("num_hidden_layers"):
        return _two_layers(value)
    if name == "num_layers" and "depths" in fields:
        return value
    if name == "head_dim" and "expand" in fields and "num_heads" in fields:
        return 16  # all heads together are as wide as `expand` times the model
    return _smaller(name, value)


def _two_layers(values: Sequence[Any]) -> list[Any]:
    """What is said of layers: of the first one, and of the first that differs from it."""
    others = [value for value in values if value != values[0]]
    return [values[0], others[0] if others else values[0]]


def _is_parameter(kind: type, name: str) -> bool:
    found = inspect.signature(kind).parameters
    return name in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


def make_small_model(kind: str, class_name: str) -> tuple[nn.Module, Any]:
    """A model with random weights and its configuration; raises whatever transformers raises."""
    import transformers

    config = small(transformers.CONFIG_MAPPING[kind]())
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{count} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():  # zeros at the start of training would hide gradients
        if parameter.is_floating_point() and parameter.numel() and float(parameter.detach().abs().max()) == 0.0:
            nn.init.normal_(parameter, std=0.1)
    return model.float(), config


def make_inputs(model: nn.Module, config: Any, head: str, batch: int, length: int) -> dict[str, Any]:
    """Arguments for a model's call, with labels where its head takes some."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    text = getattr(config, "get_text_config", lambda: config)()
    words = int(getattr(text, "vocab_size", None) or _WORDS)
    accepted = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    inputs = dict[str, Any](_MAIN.get(main, _words)(config, words, batch, length, generator))
    if main == "input_ids" and "attention_mask" in accepted:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, -3:] = 0
        inputs["attention_mask"] = mask
    if "labels" in accepted:
        inputs |= _labels(config, head, inputs, words, generator)
    if head == "base" and "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(4, words, (batch, length - 2), generator=generator)
    return inputs


def _labels(
    config: Any, head: str, inputs: Mapping[str, Any], words: int, generator: torch.Generator
) -> dict[str, Any]:
    first = next(iter(inputs.values()))
    batch = first.shape[0]
    if head in ("causal", "masked"):
        return {"labels": inputs["input_ids"].clone()}
    if head in ("seq2seq", "speech", "ctc"):
        return {"labels": torch.randint(4, words, (batch, 6), generator=generator)}
    if head in ("sequence", "image", "video", "audio"):
        return {"labels": torch.arange(batch) % int(getattr(config, "num_labels", 2))}
    if head == "segmentation":
        return {"labels": torch.randint(0, 2, (batch, *first.shape[-2:]), generator=generator)}
    return {}


def _words(config: Any, words: int, batch: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": torch.randint(4, words, (batch, length), generator=generator)}


def _pixels(config: Any, words: int, batch: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    inner = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    size = getattr(config, "image_size", None) or getattr(inner, "image_size", None) or 64
    rows, columns = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(inner, "num_channels", None) or 3
    frames = getattr(config, "num_frames", None)
    shape = (batch, frames, channels, rows, columns) if frames else (batch, channels, rows, columns)
    return {"pixel_values": torch.randn(shape, generator=generator)}


def _features(config: Any, words: int, batch: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 16
    frames = 2 * (getattr(config, "max_source_positions", None) or 32)
    if getattr(config, "model_type", "") in ("whisper", "moonshine"):
        return {"input_features": torch.randn(batch, bins, frames, generator=generator)}
    return {"input_features": torch.randn(batch, frames, bins, generator=generator)}


def _values(config: Any, words: int, batch: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 1600, generator=generator)}


_MAIN: dict[str, Callable[..., dict[str, Any]]] = {
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _values,
}
