"""What the run on a device measures: each item is a function that returns figures, in a process of its own.

``device`` is "cuda", or "cpu" in a dry run: there kernels run in Triton's interpreter, recordings on the simulated
driver, and models are tiny, so that every line of this file but for the profiler's runs where there is no device.
"""

from __future__ import annotations

import fcntl
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import aotkit  # noqa: F401  # registers the backend, which no entry point does where it is not installed

__all__ = ["BACKENDS", "ITEMS", "MODELS", "run_item"]

Figures = dict[str, Any]

BACKENDS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor graphs": {"mode": "reduce-overhead"},
    "aotkit": {"backend": "aotkit", "options": {"fallback": "error"}},
    "aotkit graphs": {"backend": "aotkit", "options": {"fallback": "error", "cudagraphs": True}},
}
TASKS = ("inference", "training", "one token")


# -- models --------------------------------------------------------------------------------------------------------


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(
        BertConfig(
            vocab_size=128 if tiny else 30522,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **(sizes if tiny else {}),
        )
    )


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _named_loss(GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=0, eos_token_id=0, use_cache=False)))


def _qwen2(tiny: bool) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        **(small if tiny else large),
        vocab_size=128 if tiny else 32000,
        num_key_value_heads=1 if tiny else 4,
        use_cache=False,
    )
    return _named_loss(Qwen2ForCausalLM(config))


def _convnext(tiny: bool) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32} if tiny else {}
    return ConvNextForImageClassification(
        ConvNextConfig(**sizes, num_labels=10, problem_type="single_label_classification")
    )


def _t5(tiny: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2} if tiny else {}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False, tie_word_embeddings=False)
    )


def _named_loss(model: nn.Module) -> nn.Module:
    """Without a name the loss logs a warning in the first call, which Dynamo can't trace."""
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "qwen2": _qwen2,
    "convnext": _convnext,
    "t5": _t5,
}


def make_inputs(model: nn.Module, task: str, device: str) -> dict[str, torch.Tensor]:
    """The same in every process."""
    tiny, generator = device == "cpu", torch.Generator().manual_seed(1)
    config: Any = model.config
    if config.model_type == "convnext":
        side = config.image_size
        pixels = torch.randn(2 if tiny else 32, 3, side, side, generator=generator)
        made = {"pixel_values": pixels.to(next(model.parameters()).dtype), "labels": torch.arange(len(pixels)) % 10}
    else:
        rows, length = (1, 1) if task == "one token" else (2, 16) if tiny else (16, 512)
        ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
        made = {"input_ids": ids, "labels": ids}
    if task != "training":
        made.pop("labels")
        if config.model_type == "t5":
            made["decoder_input_ids"] = made["input_ids"]
    return {name: value.to(device) for name, value in made.items()}


def settings_of(backend: str, device: str) -> dict[str, Any] | None:
    """What torch.compile gets. In a dry run there is no reduce-overhead, and our kernels are interpreted."""
    settings = BACKENDS[backend]
    ours = settings is not None and settings.get("backend") == "aotkit"
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    if ours and device == "cuda" and threads.isdecimal():  # both compile in as many processes
        assert settings is not None
        return settings | {"options": settings["options"] | {"compile_workers": int(threads)}}
    if settings is None or device == "cuda":
        return settings
    if ours:
        return {"backend": "aotkit", "options": {"fallback": "error", "processor": "triton-interpreter"}}
    return {"backend": "eager"}


@dataclass(frozen=True)
class Step:
    """One step of a task, what it left to compare, and the seconds that the first one took."""

    run: Callable[[], Any]
    result: Callable[[], torch.Tensor]
    first_seconds: float


def model_step(name: str, task: str, backend: str, device: str, dtype: torch.dtype | None = None) -> Step:
    """The step of a model, which has the same weights, of bfloat16, in every ``dtype``."""
    torch.manual_seed(0)
    low = torch.float32 if device == "cpu" else torch.bfloat16
    model = MODELS[name](device == "cpu").to(device, low).to(dtype or low).train(task == "training")
    inputs, settings = make_inputs(model, task, device), settings_of(backend, device)
    run = model if settings is None else torch.compile(model, **settings)
    kept: list[Any] = []

    def infer() -> None:
        kept.clear()
        with torch.no_grad():
            kept.append(run(**inputs).logits)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        run(**inputs).loss.backward()

    def result() -> torch.Tensor:
        found = kept if task != "training" else [p.grad for p in model.parameters() if p.grad is not None]
        return torch.cat([tensor.detach().flatten().float() for tensor in found])

    step = train if task == "training" else infer
    begin = time.perf_counter()
    step()
    wait(device)
    return Step(step, result, time.perf_counter() - begin)


def alone() -> AbstractContextManager[None]:
    """No other process uses the device, nor compiles for it: for taking times."""
    return _locked(fcntl.LOCK_EX)


def busy() -> AbstractContextManager[None]:
    """No process takes times; others may be busy as well."""
    return _locked(fcntl.LOCK_SH)


@contextmanager
def _locked(how: int) -> Iterator[None]:
    path = os.environ.get("DEVICE_RUN_LOCK")
    if path is None:
        yield
        return
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, how)
        yield


def wait(device: str) -> None:
    """For all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], Any], device: str, repeats: int = 30) -> Figures:
    """Median time of a step, and until it returned: what the processor needs, if the device's queue was not full."""
    times, returned = [], []
    for _ in range(repeats if device == "cuda" else 1):
        wait(device)
        begin = time.perf_counter()
        step()
        returned.append(1e3 * (time.perf_counter() - begin))
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return {"milliseconds": statistics.median(times), "launch_milliseconds": statistics.median(returned)}


def model_item(name: str, task: str, backend: str, device: str) -> Figures:
    """Time of a step and of the first, the distance from float32, memory, and the kernels that take longest."""
    with busy():
        exact = model_step(name, task, "eager", device, torch.float32).result().cpu()
        release(device)
        made = model_step(name, task, backend, device)
        for _ in range(3 if device == "cuda" else 0):
            made.run()
        got = made.result().cpu()
        figures: Figures = {"error": float((got - exact).norm() / exact.norm().clamp_min(1e-12))}
        release(device)
    with alone():
        figures |= milliseconds(made.run, device) | {"first_call_seconds": made.first_seconds}
        figures |= kernels_of_step(made.run, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            made.run()
            figures["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return figures


def release(device: str) -> None:
    """Give unused memory back to the device: other processes need it while this one waits for its turn."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def kernels_of_step(step: Callable[[], Any], device: str, count: int = 40) -> Figures:
    """How long and how many kernels run, and names, calls and microseconds of those that take longest."""
    if device != "cuda":
        return {"largest_kernels": []}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        wait(device)
    events = [event for event in found.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events) / 1e3
    largest = [[event.key[:120], event.count, event.device_time_total] for event in events[:count]]
    calls = sum(event.count for event in events)
    return {"device_milliseconds": total, "launches": calls, "largest_kernels": largest}


# -- kernels -------------------------------------------------------------------------------------------------------


def kernel_item(name: str, device: str) -> Figures:
    """What share of a copy's bandwidth a kernel has. In a dry run: whether it computes what eager does."""
    from tools.bench.triton_kernels import CASES, seconds

    function, moved = next((function, moved) for case, function, moved in CASES if case == name)
    size, dtype = (4096, torch.bfloat16) if device == "cuda" else (32, torch.float32)
    torch.manual_seed(0)
    x, bias = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, device=device, dtype=dtype)
    run = compiled(function, (x, bias), device)
    torch.testing.assert_close(run([x, bias])[0], function(x, bias), rtol=2e-2, atol=2e-2 * size**0.5)
    if device != "cuda":
        return {}
    target, nbytes = torch.empty_like(x), x.numel() * x.element_size()
    with alone():
        copied, took = seconds(lambda: target.copy_(x)), seconds(lambda: run([x, bias]))
    return {"microseconds": took * 1e6, "share_of_copy": moved * nbytes / took / (2 * nbytes / copied)}


def compiled(function: Callable[..., Any], args: tuple[torch.Tensor, ...], device: str) -> Callable[..., Any]:
    """``function`` with our kernels."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions

    options = LowerOptions() if device == "cuda" else LowerOptions(processor="triton-interpreter")
    graph = make_fx(lambda *a: (function(*a),), decompositions(), tracing_mode="fake")(*args)
    return compile_graph(graph, options=options)


# -- recordings ----------------------------------------------------------------------------------------------------


def recording_item(device: str) -> Figures:
    """A tree of recordings: replays, a capture that fails, and one after it, in the same pool."""
    from aotkit_cudagraphs import CudagraphTrees
    from aotkit_cudagraphs.drivers import CaptureError, CudaDriver, SimulatedDriver

    driver: Any = CudaDriver() if device == "cuda" else SimulatedDriver()
    trees = CudagraphTrees(driver)
    fast = trees.wrap(lambda x: torch.relu(x) * 2 + 1)
    x = torch.randn(1024, device=device)
    for _ in range(4):
        torch.testing.assert_close(fast(x), torch.relu(x) * 2 + 1)
    pool, stream, refused = driver.new_pool(), driver.new_stream(), 0
    for _ in range(2):
        try:
            driver.capture(lambda: x * x.sum().item(), pool=pool, stream=stream)
        except CaptureError:
            refused += 1
    recording, result = driver.capture(lambda: x + torch.rand_like(x), pool=pool, stream=stream)
    driver.replay(recording)
    assert refused == 2 and bool(((result >= x) & (result <= x + 1)).all())
    assert bool((torch.rand(8, device=device) >= 0).all()), "random numbers outside of recordings"
    return {"replays": sum(function.replays for function in trees.report().functions), "refused": refused}


# -- the machine ---------------------------------------------------------------------------------------------------


def versions_item(device: str) -> Figures:
    """What runs here."""
    import platform

    import triton

    found: Figures = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
    return found


def flex_item(name: str, backend: str, device: str) -> Figures:
    """``flex_attention`` in kernels."""
    from tools.device_flex import flex_item

    return flex_item(name, backend, device)


ITEMS: dict[str, Callable[..., Figures]] = {
    "flex": flex_item,
    "versions": versions_item,
    "recording": recording_item,
    "kernel": kernel_item,
    "model": model_item,
}


def run_item(path: str, device: str) -> Figures:
    """The figures of ``kind/argument/...``."""
    kind, *arguments = path.split("/")
    print(f"{path} on {device}", file=sys.stderr)
    return ITEMS[kind](*arguments, device)
