"""The decode step of :mod:`tools.bench.decode` in llama.cpp, where llama-cpp-python and gguf are installed: the same
weights, prompt and tokens.

The model is written as a GGUF file and read back: float32 and bfloat16 as they are, int8 as Q8_0 and int4 as Q4_0,
quantized by gguf from the widened weights, since llama.cpp has no scale of a whole row. For both llama.cpp quantizes
activations on the way, in groups of 32. The package is built from source (``pip install llama-cpp-python gguf``), which
needs CMake and a C++ compiler and takes about a quarter of an hour.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

__all__ = ["TYPES", "LlamaCppStep", "is_installed", "turned_rows", "widened"]

#: What llama.cpp calls a format of :data:`tools.bench.decode.FORMATS`.
TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int8 dynamic": "Q8_0", "int4": "Q4_0"}


def is_installed() -> bool:
    """Whether both packages can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def widened(layer: Any) -> torch.Tensor:
    """The weight [columns, summed] of a linear layer of any format, in float32."""
    if hasattr(layer, "scales"):
        numbers, scales = layer.numbers_and_scales()
        return (numbers.float() * scales.float()).flatten(1)
    weight: torch.Tensor = layer.weight.detach().float()
    return weight * layer.scale.float()[:, None] if hasattr(layer, "scale") else weight


def turned_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection as llama.cpp wants them: the two numbers that rope turns are neighbours, where transformers
    has them half a head apart."""
    width = weight.shape[0] // heads
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(weight.shape)


class LlamaCppStep:
    """A step with the prompt in its cache; called as the model is, it returns an object with ``logits``.

    Args:
        model: a Llama of :func:`tools.bench.decode.make_model`.
        form: of its weights, one of :data:`TYPES`. Raises ``ValueError`` for any other.
        prompt: the words before the first token.
        length: places of the cache.
        threads: of the processor.
    """

    def __init__(self, model: Any, form: str, prompt: list[int], length: int, threads: int) -> None:
        if form not in TYPES:
            raise ValueError(f"llama.cpp has no weights like those of {form!r}; it has {', '.join(TYPES)}")
        if not is_installed():
            raise RuntimeError("llama.cpp's step needs llama-cpp-python and gguf, which are not installed")
        import llama_cpp

        self._lib: Any = llama_cpp
        self._words = model.config.vocab_size
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.gguf"
            _write(model, TYPES[form], path)
            settings = llama_cpp.llama_model_default_params()
            settings.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError("llama.cpp did not take the model that was written for it")
        chosen = llama_cpp.llama_context_default_params()
        chosen.n_ctx, chosen.n_threads, chosen.n_threads_batch = length, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, chosen)
        self._decode(prompt)

    def _decode(self, words: list[int]) -> None:
        tokens = (self._lib.llama_token * len(words))(*words)
        failed = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(words)))
        if failed:
            raise RuntimeError(f"llama_decode gives {failed}")

    def __call__(self, word: torch.Tensor, **others: Any) -> Any:
        """The logits of the token after ``word``, which comes after all words before."""
        self._decode(word.flatten().tolist())
        found = numpy.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape=(self._words,))
        return SimpleNamespace(logits=torch.from_numpy(found)[None, None])

    def close(self) -> None:
        """Give the weights' memory back."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _write(model: Any, kind: str, path: Path) -> None:
    import gguf

    config, llama = model.config, model.model
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])

    def add(name: str, tensor: torch.Tensor, type_name: str) -> None:
        type_ = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(tensor.detach().float().numpy(), type_), raw_dtype=type_)

    add("token_embd.weight", llama.embed_tokens.weight, "F16" if kind != "F32" else kind)
    add("output_norm.weight", llama.norm.weight, "F32")
    add("output.weight", widened(model.lm_head), kind)
    for number, layer in enumerate(llama.layers):
        part, heads = layer.self_attn, (config.num_attention_heads, config.num_key_value_heads)
        add(f"blk.{number}.attn_norm.weight", layer.input_layernorm.weight, "F32")
        add(f"blk.{number}.ffn_norm.weight", layer.post_attention_layernorm.weight, "F32")
        add(f"blk.{number}.attn_q.weight", turned_rows(widened(part.q_proj), heads[0]), kind)
        add(f"blk.{number}.attn_k.weight", turned_rows(widened(part.k_proj), heads[1]), kind)
        for name, linear in (
            ("attn_v", part.v_proj),
            ("attn_output", part.o_proj),
            ("ffn_gate", layer.mlp.gate_proj),
            ("ffn_up", layer.mlp.up_proj),
            ("ffn_down", layer.mlp.down_proj),
        ):
            add(f"blk.{number}.{name}.weight", widened(linear), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
