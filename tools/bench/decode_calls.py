"""What lies between two tokens beside reading weights: guards, wrapper and launch plan, and what a first call takes.

python -m tools.bench.decode_calls               24 small layers, so that weights are read quickly
python -m tools.bench.decode_calls --layers 6

Each way has a cache of its own and gets the same words; turns are interleaved token by token. "eager's graph" is Dynamo
alone: the graph of `backend="eager"`, whose first call is Dynamo's part of the others'. The second of ours finds the
first in the cache (set AOTKIT_CACHE_DIR to an empty folder for a first one that is cold). "saved, kernels left out" is
the saved step whose native code returns at once: checks, wrapper and launch plan, which is all that lies between two
tokens. A second table has its parts, and the whole call as it is between tokens, when weights have filled the caches.
Processor time of one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import aotkit
from aotkit.saved import SavedFunction
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.launch_plan.loaded import Loaded
from aotkit_inductor_lower.targets.cpu import load as cpu_load
from tools.bench.__main__ import machine

__all__ = ["main"]

LENGTH = 512  # of the cache
PROMPT = 8
WORDS = 1000
OTHERS = 1 << 26  # bytes that are written between two calls: more than caches hold
EMPTY = "saved, kernels left out"

Step = Callable[..., torch.Tensor]


def make_model(layers: int) -> Any:
    """A Llama whose weights are 2.4 MB a layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "vocab_size": WORDS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def step(model: Any, cache: Any, word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The logits of the next word."""
    logits: torch.Tensor = model(word, past_key_values=cache, cache_position=place, position_ids=place[None]).logits
    return logits


def filled_cache(model: Any) -> Any:
    """A cache with a prompt in it."""
    from transformers import StaticCache

    cache, places = StaticCache(config=model.config, max_cache_len=LENGTH), torch.arange(PROMPT)
    model(places[None], past_key_values=cache, cache_position=places)
    return cache


def compiled_ways() -> dict[str, Step]:
    """The step, compiled with all guards, with some and with none."""
    unsafe = torch.compiler
    filters = {
        "guards but of modules": unsafe.skip_guard_on_inbuilt_nn_modules_unsafe,
        "no guards": unsafe.skip_all_guards_unsafe,
    }
    filtered = {name: _compiled("aotkit", guard_filter_fn=rule) for name, rule in filters.items()}
    return {"eager": step, "eager's graph": _compiled("eager"), "aotkit": _compiled("aotkit"), **filtered}


def _compiled(backend: str, **options: Any) -> Step:
    def own(model: Any, cache: Any, word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return step(model, cache, word, place)

    own.__code__ = own.__code__.replace(co_name=f"step_{backend}_{len(options)}")  # graphs of one code share a cache
    made: Step = torch.compile(own, backend=backend, options=options or None)
    return made


def saved_ways(model: Any) -> tuple[SavedFunction, float, SavedFunction]:
    """The step, saved and loaded, the seconds that loading took, and the step loaded without what its kernels do."""
    arguments = model, filled_cache(model), torch.tensor([[1]]), torch.tensor([PROMPT])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.aotkit"
        aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(step, arguments), path)
        start = time.process_time()
        loaded = aotkit.saved.load_compiled_function(path)
        seconds = time.process_time() - start
        with kernels_left_out():
            return loaded, seconds, aotkit.saved.load_compiled_function(path)


@contextlib.contextmanager
def kernels_left_out() -> Iterator[None]:
    """Context in which native code is loaded as functions that do nothing."""
    real = cpu_load.load

    def load(program: CompiledProgram) -> Loaded:
        loaded = real(program)
        return dataclasses.replace(loaded, segments=dict.fromkeys(loaded.segments, lambda frame, threads: 0))

    cpu_load.load = load
    try:
        yield
    finally:
        cpu_load.load = real


@torch.no_grad()
def measure(layers: int, tokens: int) -> Mapping[str, tuple[float, float]]:
    """(seconds of the first call, seconds of a token) of each way."""
    model, ways = make_model(layers), compiled_ways()
    caches = {name: filled_cache(model) for name in (*ways, "saved", EMPTY)}
    first = {name: timed(call, model, caches[name], 0) for name, call in ways.items()}
    ways["saved"], loading, ways[EMPTY] = saved_ways(model)
    first["saved"] = loading + timed(ways["saved"], model, caches["saved"], 0)
    first[EMPTY] = loading + timed(ways[EMPTY], model, caches[EMPTY], 0)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1, tokens + 1):
        for name, call in ways.items():
            taken[name].append(timed(call, model, caches[name], turn))
    return {name: (first[name], statistics.median(seconds)) for name, seconds in taken.items()}


@torch.no_grad()
def parts(layers: int) -> Iterator[tuple[str, float]]:
    """(part, seconds) of what lies between two tokens of the saved step."""
    model = make_model(layers)
    cache = filled_cache(model)
    _, _, call = saved_ways(model)
    arguments = model, cache, torch.tensor([[1]]), torch.tensor([PROMPT])
    inputs: tuple[Any, ...] = ()

    def keep(*given: Any) -> Any:
        nonlocal inputs
        inputs = given
        return [results]

    graph, names = call.graph, call._function.__globals__  # type: ignore[attr-defined]
    for _ in range(3):  # what is written out or compiled once for calls like the first
        results = call(*arguments)
    own, names[call._graph_name] = names[call._graph_name], keep
    call._function(*arguments)
    quick = call._quick
    if quick is None:
        yield "facts about model, cache and modes", _median(lambda: call.check(*arguments))
        yield "Dynamo's bytecode, which collects the inputs", _median(lambda: call._function(*arguments))
    else:
        yield "facts about model, cache and modes; the inputs", _median(lambda: quick.found(arguments))
    names[call._graph_name] = own
    yield f"types, sizes and addresses of {len(inputs)} inputs", _median(lambda: call._check_inputs(inputs))
    placement = call._check_inputs(inputs)
    yield "versions and launch plan", _median(lambda: graph.call_placed(inputs, placement))
    yield "the whole call", _median(lambda: call(*arguments))
    steps = (_arguments(model, cache, turn) for turn in itertools.count())
    yield "the whole call, word and place in new tensors", _median(lambda step: call(*step), steps)
    others, steps = torch.zeros(OTHERS // 4), (_arguments(model, cache, turn) for turn in itertools.count())
    read = (step for step in steps if others.add_(1) is others)
    yield f"the same after {OTHERS >> 20} MiB of other memory", _median(lambda step: call(*step), read)


def _arguments(model: Any, cache: Any, turn: int) -> tuple[Any, ...]:
    return model, cache, torch.tensor([[turn * 7 % WORDS]]), torch.tensor([PROMPT + turn % (LENGTH - PROMPT)])


def _median(call: Callable[..., object], arguments: Iterator[Any] | None = None) -> float:
    taken = []
    for _ in range(300):
        given = () if arguments is None else (next(arguments),)
        start = time.perf_counter()
        call(*given)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def timed(call: Step, model: Any, cache: Any, turn: int) -> float:
    """Seconds of one token."""
    word, place = torch.tensor([[turn * 7 % WORDS]]), torch.tensor([PROMPT + turn])
    start = time.process_time()
    call(model, cache, word, place)
    return time.process_time() - start


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.decode_calls", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--parts", action="store_true", help="the second table only")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {chosen.layers} layers\n")
    if not chosen.parts:
        _print_ways(chosen)
    print("| between two tokens of the saved step | us |")
    print("|---|---:|")
    for part, seconds in parts(chosen.layers):
        print(f"| {part} | {seconds * 1e6:.0f} |")
    return 0


def _print_ways(chosen: argparse.Namespace) -> None:
    print("| way | first call, s | us per token | more than without guards |")
    print("|---|---:|---:|---:|")
    found = measure(chosen.layers, chosen.tokens)
    least = found["no guards"][1]
    for name, (first, token) in found.items():
        print(f"| {name} | {first:.2f} | {token * 1e6:.0f} | {(token - least) * 1e6:+.0f} |")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
