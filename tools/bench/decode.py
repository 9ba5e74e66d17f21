"""Language models one token at a time: what a token takes, against eager and against what the memory gives.

python -m tools.bench.decode                        a Llama of 104 M parameters, all formats of its weights
python -m tools.bench.decode --large                24 layers and 128 000 words: the weights fit no cache
python -m tools.bench.decode --huge-pages           weights, and the tensor that is summed, in huge pages
python -m tools.bench.decode --formats int8 --inductor
python -m tools.bench.decode --saved                the saved step as well, which runs without Dynamo's guards
python -m tools.bench.decode --openvino             OpenVINO's time as well, where it is installed
python -m tools.bench.decode --llama-cpp            llama.cpp's time as well, where it and gguf are installed
python -m tools.bench.decode --products --rows 1 16 products of few rows alone, against ATen's
python -m tools.bench.decode --attention            attention of few queries alone, against ATen's
python -m tools.bench.decode --prefill              512 tokens at once, and the perplexity of a random text
python -m tools.bench.decode --resident             memory of a process that has written 24 tokens, against its weights
python -m tools.bench.decode --threads 2            wall time of two threads (else processor time of one)

Every way has a cache of fixed length and gets the same tokens; turns are interleaved token by token. "of the memory" is
the weights' bytes per second over those of a sum of a large tensor, which is measured in the same turns. Needs
transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit
from aotkit import huge_pages
from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.memory.huge_pages import move_to_huge_pages
from tools.bench import decode_llama_cpp
from tools.bench.__main__ import machine
from tools.bench.chains import keep_freed_memory, median_ratio
from tools.bench.decode_rivals import OpenVinoStep, is_installed
from tools.bench.memory import resident_mb

__all__ = ["FORMATS", "Int4Linear", "Int8DynamicLinear", "Int8Linear", "main", "make_model", "quantize"]

GROUP = 64  # weights of 4 bits that share a scale
PROMPT = 16
LENGTH = 512  # of the cache
PREFILL = 512  # words that are read at once
READ = 1 << 28  # bytes of the tensor that is summed to see what the memory gives

Clock = Callable[[], float]


class Int8Linear(nn.Module):
    """A linear layer whose weight is kept in int8 with a scale per row, as weight-only quantisation writes it."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.flatten().to(linear.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the widened weight, scaled afterwards."""
        rows = x.reshape(-1, x.shape[-1])
        return (torch.mm(rows, self.weight.t().to(x.dtype)) * self.scale).reshape(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """A linear layer whose weight is kept in 4 bits, as ATen packs it, with a scale and a zero per group: what
    torchao's weight-only configuration for CPUs calls."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.detach().float().view(linear.out_features, -1, GROUP)
        scale = groups.abs().amax(2, keepdim=True) / 7
        numbers = (groups / scale).round().clamp(-8, 7).view(linear.out_features, -1).int() + 8
        scales = torch.stack([scale.squeeze(2).t(), torch.zeros_like(scale.squeeze(2).t())], -1)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 2))
        self.register_buffer("scales", scales.to(linear.weight.dtype).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """ATen's product."""
        rows = x.reshape(-1, x.shape[-1])
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        return product.reshape(*x.shape[:-1], -1)

    def numbers_and_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight as numbers from -8 to 7 [columns, groups, numbers of a group], and the scales [.., 1]."""
        groups, columns = self.scales.shape[:2]
        ones = torch.stack([torch.ones(groups, columns), torch.zeros(groups, columns)], -1).bfloat16()
        rows = torch.eye(groups * GROUP, dtype=torch.bfloat16)
        numbers = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, ones).t()
        return numbers.to(torch.int8).view(columns, groups, GROUP), self.scales[..., 0].t()[..., None]


class Int8DynamicLinear(Int8Linear):
    """The same weight, and activations that are quantized row by row on the way: what torchao's dynamic int8
    configuration leaves in a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product of bytes, scaled twice."""
        rows = x.reshape(-1, x.shape[-1])
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = (torch.maximum(-low, high).clamp(min=0).float() / 127.5).clamp(min=1e-5)
        numbers = (rows / scale).round().clamp(-128, 127).to(torch.int8)
        product = torch._int_mm(numbers, self.weight.t()) * scale * self.scale
        return product.to(x.dtype).reshape(*x.shape[:-1], -1)


FORMATS: dict[str, tuple[torch.dtype, type[nn.Module] | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, Int8Linear),
    "int8, float32": (torch.float32, Int8Linear),
    "int8 dynamic": (torch.bfloat16, Int8DynamicLinear),
    "int4": (torch.bfloat16, Int4Linear),
}


def quantize(model: nn.Module, layer: Callable[[nn.Linear], nn.Module] = Int8Linear) -> nn.Module:
    """Every linear layer as another one."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, layer(child))
    return model


def make_model(form: str, layers: int = 6, words: int = 16000) -> nn.Module:
    """A Llama with random weights in one of :data:`FORMATS`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, vocab_size=words, **heads)
    dtype, layer = FORMATS[form]
    model = LlamaForCausalLM(config).eval().to(dtype)
    return model if layer is None else quantize(model, layer)


def prompt_words() -> list[int]:
    """What every way has read before the first token."""
    return [place * 37 % 1000 for place in range(PROMPT)]


@dataclass(slots=True)
class Decoder:
    """One way to run a model, its cache, and the seconds that each token took."""

    model: nn.Module
    call: Callable[..., Any]
    clock: Clock
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cache: Any = None

    def prefill(self) -> None:
        """Fill the cache with the prompt, in eager mode."""
        from transformers import StaticCache

        self.cache = StaticCache(config=self.model.config, max_cache_len=LENGTH)
        places, words = torch.arange(PROMPT), torch.tensor([prompt_words()])
        logits = self.model(words, past_key_values=self.cache, cache_position=places).logits
        self.tokens.append(int(logits[0, -1].argmax()))

    def token(self) -> None:
        """The next token."""
        place = torch.tensor([PROMPT + len(self.tokens) - 1])
        word = torch.tensor([[self.tokens[-1]]])
        start = self.clock()
        logits = self.call(word, past_key_values=self.cache, cache_position=place, position_ids=place[None]).logits
        self.seconds.append(self.clock() - start)
        self.tokens.append(int(logits[0, -1].argmax()))


def step(model: nn.Module, cache: Any, word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The logits of the next word."""
    logits: torch.Tensor = model(word, past_key_values=cache, cache_position=place, position_ids=place[None]).logits
    return logits


class SavedStep:
    """The step, saved and loaded, called as the model is."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self._model = model
        compiled = aotkit.saved.compile_to_save(step, (model, cache, torch.tensor([[1]]), torch.tensor([PROMPT])))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.aotkit"
            aotkit.saved.save_compiled_function(compiled, path)
            self._loaded = aotkit.saved.load_compiled_function(path)

    def __call__(self, word: torch.Tensor, *, past_key_values: Any, cache_position: torch.Tensor, **others: Any) -> Any:
        """An object with ``logits``."""
        return SimpleNamespace(logits=self._loaded(self._model, past_key_values, word, cache_position))


def weight_bytes(model: nn.Module) -> int:
    """What is read for one token: all parameters and buffers but the embedding's other rows."""
    tensors = {
        id(t): t for name, t in (*model.named_parameters(), *model.named_buffers()) if "embed_tokens" not in name
    }
    return sum(t.nbytes for t in tensors.values())


def read_seconds(memory: torch.Tensor, clock: Clock) -> float:
    """How long it takes to read a large tensor once."""
    start = clock()
    memory.sum()
    return clock() - start


@torch.no_grad()
def measure(form: str, chosen: argparse.Namespace, clock: Clock) -> Iterator[tuple[str, float, float, bool]]:
    """(way, ms, share of the memory's speed, tokens as eager's) of each way to run a model."""
    torch._dynamo.reset()
    model = make_model(form, *((24, 128000) if chosen.large else ()))
    calls: dict[str, Any] = {"eager": model, "aotkit": _compiled(model)}
    if chosen.inductor:
        calls["inductor"] = torch.compile(model)
    if chosen.saved:
        calls["aotkit, saved"] = model
    if chosen.openvino:
        calls["OpenVINO"] = model  # until there is a cache with the prompt in it
    if chosen.llama_cpp and form in decode_llama_cpp.TYPES:
        calls["llama.cpp"] = model
    ways = {name: Decoder(model, call, clock) for name, call in calls.items()}
    memory, reading = torch.ones(READ // 4), []
    if chosen.huge_pages:
        move_to_huge_pages([(memory.data_ptr(), memory.nbytes)])
        huge_pages.move_weights(model)
    for way in ways.values():
        way.prefill()
        if way is ways.get("aotkit, saved"):
            way.call = SavedStep(model, way.cache)
        elif way is ways.get("llama.cpp"):
            way.call = decode_llama_cpp.LlamaCppStep(model, form, prompt_words(), LENGTH, chosen.threads)
        elif way is ways.get("OpenVINO"):
            way.call = OpenVinoStep(model, way.cache, chosen.threads, dynamic=form == "int8 dynamic")
        for _ in range(2):
            way.token()  # compiles
        way.seconds.clear()
    for _ in range(chosen.tokens):
        for way in ways.values():
            way.token()
        reading.append(read_seconds(memory, clock))
    bandwidth = READ / statistics.median(reading)
    for name, way in ways.items():
        seconds = statistics.median(way.seconds)
        yield name, seconds * 1e3, weight_bytes(model) / seconds / bandwidth, way.tokens == ways["eager"].tokens


@torch.no_grad()
def prefill(chosen: argparse.Namespace, clock: Clock) -> None:
    """A table of a text of 512 words at once: what it takes, and how far its perplexity is from eager's."""
    print("| weights | eager ms | aotkit ms | x eager | perplexity, over eager's - 1 |")
    print("|---|---:|---:|---:|---:|")
    for form in chosen.formats:
        torch._dynamo.reset()
        model = make_model(form, *((24, 128000) if chosen.large else ()))
        words = torch.randint(1000, (1, PREFILL), generator=torch.Generator().manual_seed(1))
        ways = [functools.partial(call, words, use_cache=False) for call in (model, _compiled(model))]
        perplexities = [_perplexity(way().logits, words) for way in ways]
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(chosen.rounds):
            for way, taken in zip(ways, times, strict=True):
                start = clock()
                way()
                taken.append(clock() - start)
        eager, own = (statistics.median(taken) * 1e3 for taken in times)
        apart = perplexities[1] / perplexities[0] - 1
        print(f"| {form} | {eager:.0f} | {own:.0f} | {median_ratio(*times):.2f} | {apart:+.1e} |", flush=True)


def resident(chosen: argparse.Namespace, clock: Clock) -> None:
    """A table of the memory that a model takes beside its weights, each format in a process of its own, which has
    compiled another model before."""
    print("| weights | MiB of them | MiB with the model | after tokens in eager mode | after ours | ours, of weights |")
    print("|---|---:|---:|---:|---:|---:|")
    for form in chosen.formats:
        command = [sys.executable, "-m", "tools.bench.decode", "--resident-row", form, "--tokens", str(chosen.tokens)]
        command += ["--threads", str(chosen.threads), *(["--large"] if chosen.large else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        print(done.stdout.splitlines()[-1], flush=True)


@torch.no_grad()
def resident_row(chosen: argparse.Namespace, clock: Clock) -> None:
    """A row of that table, measured in this process."""
    form, sizes = chosen.resident_row, (24, 128000) if chosen.large else (6, 16000)
    _resident_in(form, (1, 1024), chosen.tokens, clock)
    torch._dynamo.reset()  # which holds the model
    before = _trimmed_mb()
    marks = [mark - before for mark in _resident_in(form, sizes, chosen.tokens, clock)]
    weights = _all_bytes(make_model(form, *sizes)) / 2**20
    shown = " | ".join(f"{mark:.0f}" for mark in marks)
    print(f"| {form} | {weights:.0f} | {shown} | {marks[-1] / weights:.2f} |", flush=True)


def _all_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _resident_in(form: str, sizes: tuple[int, int], tokens: int, clock: Clock) -> list[float]:
    """MiB that are resident with the model, after tokens of eager mode, and after ours, cache included."""
    torch._dynamo.reset()
    model = make_model(form, *sizes)
    marks = [_trimmed_mb()]
    for call in (model, _compiled(model)):
        way = Decoder(model, call, clock)
        way.prefill()
        for _ in range(tokens):
            way.token()
        del way
        marks.append(_trimmed_mb())
    return marks


def _trimmed_mb() -> float:
    """What is resident once freed memory went back to the system: making a model leaves much of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # of glibc
        trim(0)
    return resident_mb()


def _compiled(model: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend="aotkit")
    return compiled


def _perplexity(logits: torch.Tensor, words: torch.Tensor) -> float:
    return float(F.cross_entropy(logits[0, :-1].double(), words[0, 1:]).exp())


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w.t()": lambda x, w: F.linear(x, w),
    "x @ w": lambda x, w: x @ w,
    "x @ int8.t()": lambda x, w: x @ w.t().to(x.dtype),
}
SIZES = ((1024, 1024), (1024, 2816), (2816, 1024), (2048, 8192), (1024, 16000))  # summed, columns


def _called(compiled: Callable[[list[torch.Tensor]], object], x: torch.Tensor, weight: torch.Tensor) -> object:
    return compiled([x, weight])


def product_ratios(rows: int, way: str, dtype: torch.dtype, clock: Clock, rounds: int) -> list[float]:
    """ATen's time over ours for each size, with more weights than the caches hold."""
    ratios = []
    for summed, columns in SIZES:
        size = (summed, columns) if way == "x @ w" else (columns, summed)
        kept = torch.int8 if "int8" in way else dtype
        count = max(2, (1 << 27) // (summed * columns * kept.itemsize))
        weights = [torch.randn(size).mul(50).to(kept) for _ in range(count)]
        x = torch.randn(rows, summed, dtype=dtype)
        graph = make_fx(PRODUCTS[way], tracing_mode="fake")(x, weights[0])
        own = compile_graph(graph, options=LowerOptions(check_inputs=False))
        aten, ours = functools.partial(PRODUCTS[way], x), functools.partial(_called, own, x)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds * 2 + 2):
            for kind, call in ((0, aten), (1, ours)):
                weight = weights[(turn + kind * (count // 2)) % count]
                start = clock()
                call(weight)
                if turn > 1:
                    times[kind].append(clock() - start)
        ratios.append(median_ratio(*times))
    return ratios


def products(chosen: argparse.Namespace, clock: Clock) -> None:
    """A table of the products of few rows."""
    print("| rows | product | type | x ATen, geometric mean | least |")
    print("|---:|---|---|---:|---:|")
    for rows in chosen.rows:
        for way in PRODUCTS:
            for dtype in (torch.float32, torch.bfloat16):
                ratios = product_ratios(rows, way, dtype, clock, chosen.rounds)
                name = str(dtype).removeprefix("torch.")
                mean = statistics.geometric_mean(ratios)
                print(f"| {rows} | `{way}` | {name} | {mean:.2f} | {min(ratios):.2f} |", flush=True)


def attention(chosen: argparse.Namespace, clock: Clock) -> None:
    """A table of attention of few queries: 16 heads of width 64."""
    print("| queries | keys | float32: x ATen | bfloat16 |")
    print("|---:|---:|---:|---:|")
    for queries in (1, 2, 4, 8):
        for keys in (128, 1024):
            ratios = [attention_ratio(queries, keys, dtype, clock, chosen.rounds) for dtype in _ATTENTION_TYPES]
            print(f"| {queries} | {keys} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |", flush=True)


_ATTENTION_TYPES = (torch.float32, torch.bfloat16)


def attention_ratio(queries: int, keys: int, dtype: torch.dtype, clock: Clock, rounds: int) -> float:
    """ATen's time over ours."""
    args = [torch.randn(1, 16, length, 64, dtype=dtype) for length in (queries, keys, keys)]

    def flash(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given)[0]
        return result

    graph = make_fx(flash, tracing_mode="fake")(*args)
    own = compile_graph(graph, options=LowerOptions(check_inputs=False))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds * 10):
        start = clock()
        flash(*args)
        between = clock()
        own(list(args))
        times[0].append(between - start)
        times[1].append(clock() - between)
    return median_ratio(*times)


def main() -> int:
    """Returns 1 if a token of a format takes longer than eager's."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.decode", description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16], help="of --products")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--openvino", action="store_true")
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--saved", action="store_true")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--resident-row", choices=list(FORMATS), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.openvino and not is_installed():
        parser.error("OpenVINO is not installed")
    if chosen.llama_cpp and not decode_llama_cpp.is_installed():
        parser.error("llama-cpp-python and gguf are not installed")
    torch.set_num_threads(chosen.threads)
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    if not (chosen.resident or chosen.resident_row):
        keep_freed_memory()
    print(f"{machine()}; threads: {chosen.threads}\n")
    tables = {"products": products, "attention": attention, "prefill": prefill, "resident": resident}
    tables["resident_row"] = resident_row
    for name in (name for name in tables if getattr(chosen, name)):
        tables[name](chosen, clock)
        return 0
    print("| weights | way | ms per token | x eager | x float32 eager | of the memory | tokens as eager's |")
    print("|---|---|---:|---:|---:|---:|---|")
    first, slower = 0.0, False
    for form in chosen.formats:
        eager = 0.0
        for way, ms, share, same in measure(form, chosen, clock):
            eager = eager or ms
            first = first or ms
            slower |= way == "aotkit" and ms > eager
            figures = f"{ms:.1f} | {eager / ms:.2f} | {first / ms:.2f} | {share:.2f}"
            print(f"| {form} | {way} | {figures} | {'yes' if same else 'no'} |", flush=True)
    return int(slower)


if __name__ == "__main__":
    raise SystemExit(main())
