"""Attention with functions of the scores, with the kernels of a CUDA device in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as of_torch

import aotkit
from aotkit.attention import flex_attention
from aotkit.frontend.inputs import calls_flex_attention
from aotkit.frontend.written_out import write_out_flex_attention

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

OPTIONS: dict[str, Any] = {"processor": "triton-interpreter", "fallback": "error"}
SLOPES, TABLE = torch.linspace(-1, 1, 4), torch.linspace(-2, 2, 140)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 20 + [2] * 30)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def turned_round(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 7)


def window_by_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - 9 < k) & (b * 0 + q >= b) & causal(b, h, q, k) & (k + 11 >= q)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & causal(b, h, q, k)


def with_empty_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q != 5)


def strictly_earlier(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q > k


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 7 + 3 * b) & (k != h)


def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return causal(b, h, q, k) | (k < 10 * b)


def distance(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES.to(s)[h] * (q - k).abs()


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE.to(s)[q - k + 69]


def softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * torch.tanh(s / 20)


def capped_and_near(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 0.5 * torch.tanh(s * 0.7) - SLOPES.to(s)[h] * (q - k)


def distance_and_table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return relative(distance(s, b, h, q, k), b, h, q, k) - 0.01 * b


def squared(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * s / 20


FORMS = [
    (None, causal),
    (None, turned_round),
    (None, window),
    (softcap, causal),
    (capped_and_near, window),
    (None, window_by_keys),
    (distance, documents),
    (relative, None),
    (None, with_empty_row),
    (relative, strictly_earlier),
    (distance, by_batch),
    (None, None),
]


def operands(dtype: torch.dtype, heads: int = 4, rows: int = 40, keys: int = 64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, h, n, 16, generator=g).to(dtype) for h, n in ((4, rows), (heads, keys), (heads, keys))]


def calling(score_mod: Any, mask_mod: Any, rows: int = 40, keys: int = 64) -> Callable[..., Any]:
    mask = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, rows, keys, device="cpu")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod, mask, scale=0.3, enable_gqa=True)

    return call


def computed(run: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The result and all gradients."""
    leaves = [each.clone().requires_grad_() for each in args]
    result = run(*leaves)
    gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).sin().reshape(result.shape)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def graphs_of(run: Callable[..., Any], args: list[Tensor], **given: Any) -> tuple[list[Tensor], list[str], str]:
    """The result and all gradients, which calls there are, and what the decisions say."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    compiled = torch.compile(run, backend="aotkit", options={**OPTIONS, "observer": recorder}, **given)
    found = computed(compiled, args)
    reports = [graph.report for graph in recorder.graphs]
    return found, [call.target for report in reports for call in report.externs], "\n".join(map(str, reports))


def check(got: list[Tensor], run: Callable[..., Any], args: list[Tensor], dtype: torch.dtype) -> None:
    want = computed(run, [each.double() for each in args])
    assert len(got) == len(want)
    for own, right in zip(got, want, strict=True):
        assert own.dtype == dtype and own.shape == right.shape
        assert (own.double() - right).norm() <= 3 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("score_mod", "mask_mod"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_never_in_memory(score_mod: Any, mask_mod: Any, dtype: torch.dtype) -> None:
    run, args = calling(score_mod, mask_mod), operands(dtype, heads=2)
    got, calls, said = graphs_of(run, args)
    assert calls == [] and said.count("scores are never in memory") == 2
    check(got, run, args, dtype)


@pytest.mark.parametrize("mask_mod", [causal, turned_round, window])
def test_later_keys_are_hidden_by_where_they_are(mask_mod: Any) -> None:
    """No mask is computed, and nothing but the operands is read."""
    _, _, said = graphs_of(calling(None, mask_mod), operands(torch.bfloat16))
    ahead, _ = said.split("our own 1x aotkit_lower.attention_backward")
    assert "arange" not in ahead and "where" not in ahead


@pytest.mark.parametrize(
    ("score_mod", "mask_mod"), [(distance_and_table, documents), (relative, by_batch), (None, prefix)]
)
def test_masks_and_biases_are_computed_in_the_kernels(score_mod: Any, mask_mod: Any) -> None:
    """Both ways: in memory, there is nothing of the size of scores."""
    run, args = calling(score_mod, mask_mod, 70, 70), operands(torch.bfloat16, heads=2, rows=70, keys=70)
    got, calls, said = graphs_of(run, args)
    kernels = [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  kernel ")]
    assert calls == [] and not [k for k in kernels if "attention" not in k and "clone" not in k]
    check(got, run, args, torch.bfloat16)


@pytest.mark.parametrize("score_mod", [squared])
def test_other_functions_of_scores_are_written_out_and_explain_says_so(score_mod: Any) -> None:
    run, args = calling(score_mod, causal), operands(torch.bfloat16)
    got, calls, said = graphs_of(run, args)
    assert "aten.bmm.default" in calls
    assert "bfloat16 with scores [2, 4, 40, 64]: scores are in memory" in said
    check(got, run, args, torch.bfloat16)


def at_least_200(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(k <= q, s, 200.0)


def test_queries_beyond_the_last_have_no_weight_whatever_hides_their_keys() -> None:
    """The blocks of the backward hold more queries than there are: exp(200) is inf, and 0 times inf nan."""
    run, args = calling(at_least_200, None), operands(torch.bfloat16, keys=40)
    got, calls, said = graphs_of(run, args)
    assert calls == [] and "attention_backward" in said
    check(got, run, args, torch.bfloat16)


class Biased(torch.nn.Module):
    """Scores that depend on parameters, under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.table = torch.nn.Parameter(SLOPES.clone()), torch.nn.Parameter(TABLE.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        def near(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.slopes[h] * (i - j)

        def looked_up(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - self.table[i - j + 69]

        return calling(looked_up, None)(calling(near, window)(q, k, v), k, v)


def test_what_scores_are_added_to_is_trained() -> None:
    layer, args = Biased(), operands(torch.bfloat16, heads=2)
    exact = Biased().double()
    got, calls, _ = graphs_of(layer, args)
    assert not any("bmm" in call for call in calls)
    check(got, exact, args, torch.bfloat16)
    for own, right in zip(layer.parameters(), exact.parameters(), strict=True):
        assert own.grad is not None and right.grad is not None
        assert (own.grad.double() - right.grad).norm() <= 2e-2 * right.grad.norm()


def test_one_token_has_its_keys_in_parts() -> None:
    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 150

    run, args = calling(relative_to_the_last, seen, 1, 200), operands(torch.bfloat16, heads=2, rows=1, keys=200)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(run, backend="aotkit", options=OPTIONS)(*args)
        want = run(*(each.double() for each in args))
    assert (got.double() - want).norm() <= 1e-2 * want.norm()


def relative_to_the_last(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + 0.01 * (q - k)


@pytest.mark.parametrize(("score_mod", "mask_mod"), [(softcap, causal), (relative_to_the_last, by_batch)])
def test_torchs_call_on_a_device_is_written_out(score_mod: Any, mask_mod: Any) -> None:
    """A graph of Dynamo's, as it is where tensors are on a device."""
    found: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.append(gm)
        return gm

    mask = create_block_mask(mask_mod, 2, 4, 40, 64, device="cpu")
    torch._dynamo.reset()
    torch.compile(lambda q, k, v: of_torch(q, k, v, score_mod, mask), backend=keep)(*operands(torch.bfloat16))
    (gm,) = found
    with FakeTensorMode() as mode:
        for node in gm.graph.nodes:
            held = node.meta.get("example_value")
            node.meta["example_value"] = pytree.tree_map_only(Tensor, lambda t: on_device(t, mode), held)
    made = write_out_flex_attention(gm)
    assert not calls_flex_attention(made)
    values = [node.meta.get("example_value") for node in made.graph.nodes]
    assert {str(t.device) for t in values if isinstance(t, Tensor)} == {"cuda:0"}
    enters = made.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)
    assert [node.args[0] for node in enters] == ["cuda"]


def on_device(value: Tensor, mode: FakeTensorMode) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
