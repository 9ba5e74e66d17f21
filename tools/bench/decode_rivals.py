"""The decode step of :mod:`tools.bench.decode` in OpenVINO, where it is installed: the same weights, cache and token.

The step is written with OpenVINO's own operators: weights are constants, those of int8 and int4 with a scale in a
product, as its compression writes them; keys and values are variables of the model, into which a token is scattered.
Attention reads the whole cache, of which 16 to 40 of 512 places are in use: 2 to 6 % of what a token reads.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["OpenVinoStep", "is_installed"]


def is_installed() -> bool:
    """Whether OpenVINO can be imported."""
    return importlib.util.find_spec("openvino") is not None


class OpenVinoStep:
    """A compiled step; called as the model is, it returns an object with ``logits``.

    Args:
        model: a Llama of :func:`tools.bench.decode.make_model` in float32, bfloat16, int8 or int4 weights.
        cache: with the prompt in it; it is copied.
        threads: of the processor.
        dynamic: let OpenVINO quantize activations on the way.
    """

    def __init__(self, model: Any, cache: Any, threads: int, *, dynamic: bool = False) -> None:
        if not is_installed():
            raise RuntimeError("OpenVINO's step needs the package openvino, which is not installed")
        import openvino

        precision = "bf16" if model.model.embed_tokens.weight.dtype is torch.bfloat16 else "f32"
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 64 if dynamic else 0
        compiled = openvino.Core().compile_model(_Builder(model, cache).model(), "CPU", settings)
        self._request: Any = compiled.create_infer_request()

    def __call__(self, word: torch.Tensor, *, cache_position: torch.Tensor, **others: Any) -> Any:
        """The logits of the token after ``word``."""
        found = self._request.infer([word.numpy(), cache_position.numpy()], share_inputs=True)
        return SimpleNamespace(logits=torch.from_numpy(found[0]))


class _Variable(NamedTuple):
    """Keys or values of a layer: what is in them, and what OpenVINO calls them."""

    start: torch.Tensor
    name: str


class _Seen(NamedTuple):
    """What attention reads beside a layer's weights: ``turn`` are the cosine and sine of the place."""

    place: Any
    turn: Any
    mask: Any
    keys: _Variable
    values: _Variable


class _Builder:
    def __init__(self, model: Any, cache: Any) -> None:
        from openvino import opset13

        self._ops: Any = opset13
        self._llama, self._cache, self._sinks = model, cache, list[Any]()
        self._config = model.config

    def model(self) -> Any:
        """The step as an OpenVINO model of a word [1, 1] and a place [1]."""
        import openvino

        ops, llama, length = self._ops, self._llama.model, self._cache.layers[0].keys.shape[2]
        word, place = (
            ops.parameter([1, 1], openvino.Type.i64, name="word"),
            ops.parameter([1], openvino.Type.i64, name="place"),
        )
        x = ops.gather(self._constant(llama.embed_tokens.weight), word, ops.constant(0))
        positions = torch.arange(length)[None]
        cos, sin = llama.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        turn = [ops.gather(self._constant(table[0]), place, ops.constant(0)) for table in (cos, sin)]
        reached = ops.less_equal(ops.constant(torch.arange(length).numpy()), place)
        mask = ops.select(reached, ops.constant(0.0, openvino.Type.f32), ops.constant(float("-inf"), openvino.Type.f32))
        for number, layer in enumerate(llama.layers):
            held = self._cache.layers[number]
            keys, values = _Variable(held.keys, f"keys{number}"), _Variable(held.values, f"values{number}")
            seen = _Seen(place, turn, mask, keys, values)
            x = ops.add(x, self._attention(layer.self_attn, self._norm(layer.input_layernorm, x), seen))
            inner = self._norm(layer.post_attention_layernorm, x)
            gate = ops.swish(self._linear(layer.mlp.gate_proj, inner))
            wide = ops.multiply(gate, self._linear(layer.mlp.up_proj, inner))
            x = ops.add(x, self._linear(layer.mlp.down_proj, wide))
        logits = self._linear(self._llama.lm_head, self._norm(llama.norm, x))
        return openvino.Model([ops.result(logits)], self._sinks, [word, place], "step")

    def _constant(self, value: torch.Tensor) -> Any:
        return self._ops.constant(value.detach().float().contiguous().numpy())

    def _norm(self, norm: Any, x: Any) -> Any:
        ops = self._ops
        mean = ops.reduce_mean(ops.multiply(x, x), ops.constant([-1]), True)
        scale = ops.sqrt(ops.add(mean, self._constant(torch.tensor(norm.variance_epsilon))))
        return ops.multiply(ops.divide(x, scale), self._constant(norm.weight))

    def _attention(self, layer: Any, x: Any, seen: _Seen) -> Any:
        ops, width = self._ops, layer.head_dim
        heads, groups = self._config.num_key_value_heads, layer.num_key_value_groups
        query, key, value = (self._linear(part, x) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        query = self._turned(ops.reshape(query, ops.constant([1, heads, groups, width]), False), seen.turn)
        key = self._turned(ops.reshape(key, ops.constant([1, heads, 1, width]), False), seen.turn)
        value = ops.reshape(value, ops.constant([1, heads, 1, width]), False)
        keys, values = (self._kept(kept, new, seen.place) for kept, new in ((seen.keys, key), (seen.values, value)))
        scores = ops.multiply(ops.matmul(query, keys, False, True), self._constant(torch.tensor(layer.scaling)))
        summed = ops.matmul(ops.softmax(ops.add(scores, seen.mask), 3), values, False, False)
        return self._linear(layer.o_proj, ops.reshape(summed, ops.constant([1, 1, heads * groups * width]), False))

    def _turned(self, x: Any, turn: Any) -> Any:
        ops, (cos, sin) = self._ops, turn
        low, high = ops.split(x, ops.constant(3), 2).outputs()
        crossed = ops.concat([ops.negative(high), low], 3)
        return ops.add(ops.multiply(x, cos), ops.multiply(crossed, sin))

    def _kept(self, kept: _Variable, new: Any, place: Any) -> Any:
        """The variable with this token's row in it."""
        import openvino

        ops = self._ops
        info = openvino.op.util.VariableInfo()
        info.data_shape = openvino.PartialShape(list(kept.start.shape))
        info.data_type, info.variable_id = openvino.Type.f32, kept.name
        variable = openvino.op.util.Variable(info)
        held = ops.read_value(self._constant(kept.start), variable)
        written = ops.scatter_update(held, place, new, ops.constant(2))
        self._sinks.append(ops.assign(written, variable))
        return written

    def _linear(self, layer: nn.Module, x: Any) -> Any:
        return self._ops.matmul(x, self._weight(layer), False, True)

    def _weight(self, layer: Any) -> Any:
        """The matrix [columns, summed], widened where it is one of few bits."""
        import openvino

        ops, weight = self._ops, layer.weight
        if hasattr(layer, "scales"):
            numbers, scales = layer.numbers_and_scales()
            low, high = numbers[..., ::2].to(torch.uint8), numbers[..., 1::2].to(torch.uint8)
            packed = ((low & 15) | ((high & 15) << 4)).contiguous().numpy()
            held = openvino.Tensor(packed, openvino.Shape(list(numbers.shape)), openvino.Type.i4)
            wide = ops.multiply(
                ops.convert(openvino.op.Constant(held, shared_memory=False), "f32"), self._constant(scales)
            )
            return ops.reshape(wide, ops.constant([numbers.shape[0], -1]), False)
        if weight.dtype is torch.int8:
            return ops.multiply(ops.convert(ops.constant(weight.numpy()), "f32"), self._constant(layer.scale[:, None]))
        return self._constant(weight)
