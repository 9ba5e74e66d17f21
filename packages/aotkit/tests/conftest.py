"""A sixth of the tests of the assembled stack run in the verify mode, in which each stage's result is serialized and
reloaded, and the others as users run it; with `--whole`, as in `nox -s sweeps`, all verify."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit


@pytest.fixture(autouse=True)
def _verify_mode(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    guards_are_not_timed: None,
    equal_kernels_are_compiled_once: None,
    quick_interpreter: None,
) -> Iterator[None]:
    verify = request.config.getoption("--whole") or zlib.crc32(request.node.nodeid.encode()) % 6 == 0
    monkeypatch.setenv("AOTKIT_VERIFY", str(int(verify)))
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After a call of it, entering any stage of a compile fails the test."""
    import aotkit_aot_trace.record
    import aotkit_inductor_lower.driver
    from aotkit.driver import compile as pipeline
    from aotkit.driver import graph_compiler, lower, stages
    from aotkit_inductor_lower.targets.cpu.target import CpuTarget

    def forbid() -> None:
        def entered(*args: Any, **kwargs: Any) -> Any:
            pytest.fail("a stage of a compile was entered")

        for module, name in (
            (graph_compiler, "compile_captured"),
            (pipeline, "capture"),
            (stages, "partition"),
            (lower, "compile_to_program"),
            (aotkit_aot_trace.record, "record"),
            (aotkit_inductor_lower.driver, "compile_parts"),
            (aotkit_inductor_lower.driver, "lower_for"),
            (aotkit_inductor_lower.driver, "schedule"),
            (CpuTarget, "generate"),
        ):
            monkeypatch.setattr(module, name, entered)

    return forbid


@pytest.fixture
def damaged() -> Callable[..., bytes]:
    """``damaged(data, chance)``: the bytes of a file, damaged by chance."""
    return _damaged


def _damaged(data: bytes, chance: random.Random, at: int | None = None) -> bytes:
    """Other bytes: a bit, a run of bytes, a cut, an insertion, two parts exchanged; ``at``: where."""
    at = chance.randrange(len(data)) if at is None else at
    length = min(chance.choice((1, 4, 64, 4096)), len(data) - at)
    match chance.randrange(5):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + chance.randbytes(length) + data[at + length :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + chance.randbytes(length) + data[at:]
        case _:
            other = chance.randrange(len(data))
            low, high = sorted((at, other))
            return data[:low] + data[high:] + data[low:high]


Make = Callable[[], Sequence[torch.Tensor]]


@pytest.fixture(params=["aot_function", "torch.compile"])
def same_as_eager(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``check(fn, make)``: compiled, ``fn`` does to ``make()`` what it does in eager mode, as far as a caller can see.

    Values, geometry, storage sizes and version counters of inputs and outputs, who shares memory with whom, who is
    whom, gradients of the leaves among ``make()`` and of what they were made from; ``with_inputs``: also as they flow
    through the inputs after the call.
    """
    return partial(_check, request.param)


@pytest.fixture
def captured_same_as_eager() -> Callable[..., None]:
    """The same for ``aot_function`` alone, where Dynamo would run part of the function itself."""
    return partial(_check, "aot_function")


def _check(
    how: str,
    fn: Callable[..., Any],
    make: Make,
    *,
    calls: int = 1,
    lone_view: bool = False,
    with_inputs: bool = False,
) -> None:
    torch._dynamo.reset()
    if how == "aot_function":
        compiled = aotkit.aot_function(fn, lambda graph, inputs: graph)
    else:
        compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error"})
    for _ in range(calls):
        _compare(_observe(fn, make, with_inputs), _observe(compiled, make, with_inputs), lone_view)


def _observe(call: Callable[..., Any], make: Make, with_inputs: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = list(make())
    leaves = [leaf for t in inputs for leaf in _leaves(t)]
    versions = [_version(t) for t in inputs]
    results = call(*inputs)
    outputs = [o for o in (results if isinstance(results, list | tuple) else [results]) if isinstance(o, torch.Tensor)]
    facts: dict[str, Any] = {}
    for name, tensors in (("input", inputs), ("output", outputs)):
        for index, t in enumerate(tensors):
            storage = t.untyped_storage().nbytes()
            facts[f"{name} {index} geometry"] = (t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad)
            facts[f"{name} {index} storage"] = storage if name == "input" else None
            facts[f"{name} {index} bits"] = (t.is_conj(), t.is_neg())
            facts[f"{name} {index} value"] = t.detach().clone() if storage or not t.numel() else None
    facts["versions"] = [None if v is None else _version(t) - v for v, t in zip(versions, inputs, strict=True)]
    everything = [*inputs, *outputs]
    storages = [t.untyped_storage()._cdata for t in everything]
    facts["shared memory"] = [storages.index(s) for s in storages]
    facts["identity"] = [next(i for i, other in enumerate(everything) if other is t) for t in everything]
    facts["views"] = [t._is_view() for t in outputs]
    facts.update(_gradients(leaves, [*outputs, *inputs] if with_inputs else outputs))
    return facts


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaf itself, or what a view or product of one was made of."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        function = waiting.pop()
        if hasattr(function, "variable"):
            found.append(function.variable)
        waiting += [parent for parent, _ in getattr(function, "next_functions", ()) if parent is not None]
    return found


def _gradients(leaves: list[torch.Tensor], outputs: list[torch.Tensor]) -> dict[str, Any]:
    leaves = list({id(leaf): leaf for leaf in leaves}.values())
    terms = [torch.view_as_real(o.resolve_conj()) if o.is_complex() else o for o in outputs if o.requires_grad]
    if not leaves or not terms:
        return {}
    weights = [torch.arange(1.0, t.numel() + 1).reshape(t.shape) for t in terms]
    try:
        loss = sum((t * w).sum() for t, w in zip(terms, weights, strict=True))
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        return {"backward": "in-place" if "inplace operation" in str(error) else str(error)}
    return {f"gradient {i}": g for i, g in enumerate(gradients)}


def _compare(eager: dict[str, Any], ours: dict[str, Any], lone_view: bool) -> None:
    for name, want in eager.items():
        if name == "views" and lone_view:  # see docs/limits.md
            continue
        got = ours[name]
        if isinstance(want, torch.Tensor):
            assert isinstance(got, torch.Tensor), name
            torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert got == want, f"{name}: {want} in eager mode, {got} compiled"
    assert ours.keys() == eager.keys()


class NoDevice:
    """Stands for the driver of a device, as far as compiling for it asks."""

    def get_current_target(self) -> Any:
        """A Hopper device."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Runs a candidate once; the last one wins."""
        seconds = itertools.count(1e6, -1)

        def measure(call: Callable[[], None], quantiles: Any = None) -> list[float]:
            call()
            return [next(seconds)] * 3

        return measure


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], dict[str, Any]]]]:
    """Triton's interpreter runs what would be launched on a device; what was launched: kernel, grid, and settings given
    by name."""
    triton = pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    import torch.utils._triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **settings: Any) -> None:
        named = {**dict(zip(self.arg_names, args, strict=False)), **settings}
        count = grid(named) if callable(grid) else grid
        found.append((self.__name__, tuple(int(n) for n in count), settings))
        own = {name: value for name, value in settings.items() if name in self.arg_names}
        InterpretedFunction(self.fn)[count](*args, **own)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return InterpretedFunction(self.fn)(*args, **named)

    monkeypatch.delenv("AOTKIT_VERIFY", raising=False)  # kernels live in this process only
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(JITFunction, "__call__", call)
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda **_: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice())
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()
