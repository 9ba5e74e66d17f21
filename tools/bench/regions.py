"""What it saves that kernels which follow each other share a parallel region: a token of a Llama with and without.

python -m tools.bench.regions                           int4 and bfloat16, two threads
python -m tools.bench.regions --formats int8 --threads 1
python -m tools.bench.regions --large                   24 layers and 128 000 words

Both ways are compiled in one process and take the same words in turns, token by token; their logits must be equal. Wall
time. The ratio is the median of the ratios of neighbouring tokens. Needs transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aotkit_inductor_lower.targets.cpu import generate
from tools.bench.__main__ import machine
from tools.bench.decode import FORMATS, LENGTH, PROMPT, make_model, prompt_words, step

__all__ = ["main"]


@contextlib.contextmanager
def regions_left_out() -> Iterator[None]:
    """Context in which each kernel that several threads share enters a parallel region of its own."""
    module: Any = generate
    real = module.with_regions
    module.with_regions = lambda calls, nests, lives: list(calls)
    try:
        yield
    finally:
        module.with_regions = real


def compiled_step(name: str) -> Callable[..., torch.Tensor]:
    """The step, under a name of its own, since graphs of one code share what Dynamo keeps."""

    def own(model: Any, cache: Any, word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return step(model, cache, word, place)

    own.__code__ = own.__code__.replace(co_name=name)
    made: Callable[..., torch.Tensor] = torch.compile(own, backend="aotkit", options={"cache": False})
    return made


@torch.no_grad()
def measure(form: str, chosen: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each token: with kernels in regions of their own, and with shared ones."""
    from transformers import StaticCache

    torch._dynamo.reset()
    model = make_model(form, *((24, 128000) if chosen.large else ()))
    ways = []
    for name, context in (("apart", regions_left_out()), ("shared", contextlib.nullcontext())):
        call = compiled_step(name)
        cache, places = StaticCache(config=model.config, max_cache_len=LENGTH), torch.arange(PROMPT)
        model(torch.tensor([prompt_words()]), past_key_values=cache, cache_position=places)
        with context:
            call(model, cache, torch.tensor([[1]]), torch.tensor([PROMPT]))
        ways.append((call, cache))
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(chosen.tokens):
        word, place = torch.tensor([[turn * 7 % 1000]]), torch.tensor([PROMPT + 1 + turn])
        logits = []
        for (call, cache), seconds in zip(ways, taken, strict=True):
            start = time.perf_counter()
            logits.append(call(model, cache, word, place))
            seconds.append(time.perf_counter() - start)
        if not torch.equal(*logits):
            raise AssertionError(f"{form}: token {turn} is another one in a shared region")
    return taken


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.regions", description=__doc__)
    parser.add_argument("--formats", nargs="*", default=["int4", "bfloat16"], choices=list(FORMATS))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{machine()}; threads: {chosen.threads}\n")
    print("| weights | a region for each kernel: least ms, median | shared: least ms, median | ratio |")
    print("|---|---:|---:|---:|")
    for form in chosen.formats:
        apart, shared = measure(form, chosen)
        ratio = statistics.median(a / b for a, b in zip(apart, shared, strict=True))
        figures = (f"{min(t) * 1e3:.2f}, {statistics.median(t) * 1e3:.2f}" for t in (apart, shared))
        print(f"| {form} | {' | '.join(figures)} | {ratio:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
