"""A mixture of experts for the tokens of one step, against eager: only the experts that a router chose are read.

python -m tools.bench.decode_experts                          Qwen2-MoE's block: 4 of 60 experts for each token
python -m tools.bench.decode_experts --model mixtral          Mixtral's: 2 of 8
python -m tools.bench.decode_experts --tokens 1 32 128 --dtype bfloat16 --threads 2

All ways get the same tokens, others in each round, so that experts change; they take turns, and "x" is the median of
the ratios within rounds. Eager is measured with each of transformers' ways to compute experts, and its fastest one is
what ours are compared with. "least" is what the memory takes for the weights that the tokens of a round need, by the
sum of a large tensor in the same rounds. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools.bench.__main__ import machine
from tools.bench.chains import keep_freed_memory, median_ratio

__all__ = ["block_of", "main", "measure"]

WAYS = ("eager", "grouped_mm", "batched_mm")  # of transformers
HIDDEN, INNER = 1024, 704
EXPERTS = {"qwen2-moe": (60, 4), "mixtral": (8, 2)}  # how many there are, and how many a token has
READ = 1 << 28  # bytes of the tensor that is summed


def block_of(model: str, way: str, hidden: int = HIDDEN, inner: int = INNER) -> Any:
    """A block of a layer with random weights, whose experts are computed in one of transformers' ways."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    torch.manual_seed(0)
    number, active = EXPERTS[model]
    if model == "mixtral":
        config: Any = transformers.MixtralConfig(
            hidden_size=hidden, intermediate_size=inner, num_local_experts=number, num_experts_per_tok=active
        )
        block: Any = MixtralSparseMoeBlock(config)
    else:
        config = transformers.Qwen2MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=inner,
            shared_expert_intermediate_size=inner,
            num_experts=number,
            num_experts_per_tok=active,
        )
        block = Qwen2MoeSparseMoeBlock(config)
    config._experts_implementation = way
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.03)
    return block.eval()


def in_way(block: Any, way: str) -> Any:
    """The same block with the same weights, computed in another way."""
    shared = copy.copy(block)
    shared._modules = dict(block._modules)
    experts = copy.copy(block.experts)
    experts.config = copy.copy(block.experts.config)
    experts.config._experts_implementation = way
    shared._modules["experts"] = experts
    return shared


@torch.no_grad()
def measure(block: Any, tokens: int, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> list[str]:
    """A row: tokens, milliseconds of each way, and ours against eager's fastest."""
    hidden = block.gate.weight.shape[1]
    given = [torch.randn(tokens, 1, hidden).to(dtype) for _ in range(rounds + 2)]
    calls: dict[str, Callable[[torch.Tensor], object]] = {f"eager {way}": in_way(block, way) for way in WAYS}
    for way in WAYS[1:]:
        torch._dynamo.reset()
        compiled = torch.compile(in_way(block, way), backend="aotkit", fullgraph=True, options={"cache": False})
        compiled(given[0])
        calls[f"ours {way}"] = compiled
    summed = torch.ones(READ // 4)
    calls["memory"] = lambda _: summed.sum()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for x in given:
        for name, call in calls.items():
            start = clock()
            call(x)
            taken[name].append(clock() - start)
    times = {name: each[2:] for name, each in taken.items()}
    least = [bytes_read(block, x) / READ * each for x, each in zip(given[2:], times["memory"], strict=True)]
    fastest = min((name for name in times if name.startswith("eager")), key=lambda name: statistics.median(times[name]))
    ours = [times[f"ours {way}"] for way in WAYS[1:]]
    shown = [*(times[f"eager {way}"] for way in WAYS), *ours, least]
    row = [str(tokens), *(f"{statistics.median(each) * 1e3:.2f}" for each in shown)]
    return [*row, *(f"{median_ratio(times[fastest], each):.2f}" for each in ours)]


def bytes_read(block: Any, x: torch.Tensor) -> int:
    """The bytes of the weights that these tokens need."""
    _, _, chosen = block.gate(x.view(-1, x.shape[-1]))
    experts: int = sum(weight[0].nbytes for weight in block.experts.parameters()) * len(chosen.unique())
    others: int = sum(p.nbytes for name, p in block.named_parameters() if not name.startswith("experts."))
    return experts + others


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.decode_experts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(EXPERTS), default="qwen2-moe")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    dtype = getattr(torch, chosen.dtype)
    block = block_of(chosen.model, "eager").to(dtype)
    print(machine(), f"{chosen.model} {chosen.dtype}, {chosen.threads} threads")
    print("tokens | eager, grouped, batched ms | ours grouped, batched ms | least ms | x grouped, batched")
    for tokens in chosen.tokens:
        print(" | ".join(measure(block, tokens, dtype, chosen.rounds, clock)), flush=True)


if __name__ == "__main__":
    main()
