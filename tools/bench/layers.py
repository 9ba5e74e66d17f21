"""Deep models: what more layers cost a compile, and what a step costs with layers that are compiled once.

    python -m tools.bench.layers                            a Llama of 4, 16, 32 and 64 layers, forward and backward
    python -m tools.bench.layers --steps                    steps of four models, layers compiled once and apart

Stages are processor seconds of aotkit's own (imports included, Dynamo left out) of a first training step in a fresh
process with empty caches; resident memory is the most of that process. Steps are processor milliseconds of one thread,
the least of many, both ways in turns and in random order.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import aotkit  # noqa: F401  # registers the backend
from tools.bench.compile_time import first_step
from tools.bench.memory import peak_resident_mb
from tools.workspace import ROOT

__all__ = ["main", "make", "stages", "steps"]

WORDS = 512
WAYS = ("once", "apart")
"""Values of the option ``repeated_layers``."""


def make(kind: str, layers: int, width: int) -> torch.nn.Module:
    """A small transformer of ``layers`` layers, with random weights. ``kind``: llama, gpt2 or bert."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(width // 64, 4)
    if kind == "gpt2":
        sizes = {"vocab_size": WORDS, "n_embd": width, "n_layer": layers, "n_head": heads, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    sizes = {"vocab_size": WORDS, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * width))
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=2 * width, use_cache=False))


def _batch(length: int) -> dict[str, torch.Tensor]:
    words = torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words, "labels": words}


def stages(layers: int, way: str, collect: bool = False) -> dict[str, float]:
    """Seconds of our stages and of the whole first step, and resident megabytes, in a process of its own. ``collect``:
    with garbage collected while graphs are compiled."""
    with tempfile.TemporaryDirectory(prefix="aotkit-layers-") as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_DIR": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has byte code
        command = [sys.executable, "-m", "tools.bench.layers", "--worker", str(layers), way, *["--collect"] * collect]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _worker(layers: int, way: str, collect: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    if collect:
        watching: Any = importlib.import_module("aotkit.driver.watched")
        watching.collections_put_off = lambda **_: nullcontext()
    importlib.import_module("torch._dynamo")
    model, batch = make("llama", layers, 64), _batch(32)
    taken = first_step(lambda run: lambda: run(model)(**batch).loss.backward(), {"repeated_layers": way})
    return {"own": taken["own_cpu"], "first": taken["first_cpu"], "resident": peak_resident_mb()}


def steps(kind: str, layers: int, width: int, length: int, training: bool, rounds: int) -> dict[str, float]:
    """Milliseconds of a step by way, and the ratio of the medians."""
    torch.set_num_threads(1)
    model, batch = make(kind, layers, width).train(training), _batch(length)
    torch._dynamo.reset()

    def way(name: str) -> Callable[[], None]:
        options: dict[str, Any] = {"repeated_layers": name, "cache": False, "fallback": "error"}
        run: Any = torch.compile(lambda **given: model(**given), backend="aotkit", options=options)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(training):
                loss = run(**batch).loss
            if training:
                loss.backward()

        return step

    calls = {name: way(name) for name in WAYS}
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 2):
        for name in random.sample(WAYS, 2):
            begin = time.thread_time()
            calls[name]()
            if turn > 1:
                taken[name].append(1000 * (time.thread_time() - begin))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {**{name: min(times) for name, times in taken.items()}, "ratio": medians["once"] / medians["apart"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.layers", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", action="store_true", help="measure steps instead of compiles")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--collect", action="store_true", help="collect garbage while graphs are compiled")
    parser.add_argument("--worker", nargs=2, metavar=("LAYERS", "WAY"), help="measure one compile, print JSON")
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(_worker(int(args.worker[0]), args.worker[1], args.collect)))
    elif args.steps:
        print("| model | once, ms | apart, ms | once / apart |\n|---|---:|---:|---:|")
        for kind, layers, width, length, training in MODELS:
            found = steps(kind, layers, width, length, training, args.rounds)
            what = f"{kind}, {layers} layers of {width}, 2 x {length}, {'training' if training else 'inference'}"
            print(f"| {what} | {found['once']:.2f} | {found['apart']:.2f} | {found['ratio']:.3f} |", flush=True)
    else:
        print("| layers | compiled | our stages, s | first step, s | resident, MB |\n|---:|---|---:|---:|---:|")
        for layers in args.layers:
            for way in args.ways:
                found = stages(layers, way, args.collect)
                row = f"{found['own']:.2f} | {found['first']:.2f} | {found['resident']:.0f}"
                print(f"| {layers} | {way} | {row} |", flush=True)
    return 0


MODELS = (
    ("llama", 16, 256, 128, True),
    ("llama", 16, 256, 128, False),
    ("bert", 12, 256, 128, True),
    ("gpt2", 12, 256, 128, True),
    ("llama", 8, 512, 128, True),
    ("llama", 16, 64, 32, True),
)

if __name__ == "__main__":
    raise SystemExit(main())
