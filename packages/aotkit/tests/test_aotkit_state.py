"""A compile that fails anywhere leaves the process as it was; threads that compile and run at once do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import aotkit
from aotkit.artifact.torch_state import default_dtype
from aotkit.driver.lower import run_with_aten
from aotkit_aot_trace.callables import TRACING_LOCK
from aotkit_inductor_lower import compile_graph, decompositions


class Injected(Exception):
    pass


class Failing(aotkit.Recorder):
    """Raises at the beginning or at the end of the ``number``-th run of a stage."""

    def __init__(self, stage: str, number: int, at_end: bool) -> None:
        super().__init__()
        self.wanted, self.number, self.at_end = stage, number, at_end

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.number -= name == self.wanted
        fails = name == self.wanted and self.number == 0
        if fails and not self.at_end:
            raise Injected(name)
        with super().stage(name):
            yield
        if fails:
            raise Injected(name)


def lock_is_free() -> bool:
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(TRACING_LOCK.acquire, timeout=5).result()
        if taken:
            pool.submit(TRACING_LOCK.release).result()
    return taken


def state() -> dict[str, Any]:
    return {
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": len(_get_current_function_mode_stack()),
        "included keys": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "excluded keys": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "tracing": torch.fx._symbolic_trace.is_fx_tracing(),
        "context": TracingContext.try_get(),
        "anomaly": torch.is_anomaly_enabled(),
        "hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "dtype": torch.get_default_dtype(),
        "lock": lock_is_free(),
    }


def program(x: torch.Tensor, w: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x @ w).float()
    with torch.no_grad():
        counter.add_(1)
    return F.dropout(F.gelu(y), 0.5).softmax(-1), y


def arguments() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.zeros(())


STAGES = [("prepare", 1), ("capture", 1), ("trace", 1), ("finish", 1), ("partition", 1), ("lower", 1)]
STAGES += [("graph-passes", 1), ("lowering", 1), ("schedule", 1), ("codegen", 1), ("llvm", 1), ("bind", 1), ("bind", 2)]
STAGES += [("lower", 2), ("graph-passes", 2), ("lowering", 2), ("schedule", 2), ("codegen", 2)]  # of the lazy backward


@pytest.mark.covers("F2.8")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("stage", "number"), STAGES)
def test_a_compile_that_fails_leaves_the_process_as_it_was(
    stage: str, number: int, at_end: bool, tmp_path: Path
) -> None:
    graph = torch.fx.symbolic_trace(program)
    recorder = Failing(stage, number, at_end)
    args = arguments()
    before = state()
    with pytest.raises(Exception) as failure:  # what a stage raises is wrapped by some of the others
        compiled = aotkit.make_backend(aotkit.Options(fallback="error", verify=True), recorder)(graph, args)
        torch.manual_seed(0)
        results = compiled(*args)
        before = state()  # the forward drew its numbers; from here on only the backward is compiled
        results[0].sum().backward()
    error: BaseException | None = failure.value
    while error is not None and not isinstance(error, Injected):
        error = error.__cause__
    assert error is not None, failure.value
    assert state() == before
    # Nothing half done is left behind: the same graph compiles afterwards and gives eager's results.
    args, twins = arguments(), arguments()
    for mine, theirs in zip(args, twins, strict=True):
        theirs.data.copy_(mine.data)
    again = aotkit.make_backend(aotkit.Options(fallback="error", rng="eager"), aotkit.Recorder())(graph, args)
    for run, given in ((again, args), (program, twins)):
        torch.manual_seed(0)
        run(*given)[0].sum().backward()
    torch.testing.assert_close(args[1].grad, twins[1].grad, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(args[2], twins[2])
    leftovers = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix in (".tmp", ".part")]
    assert not leftovers


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)
        raise Injected("backward")


def fails_in_forward(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    torch.rand(3)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
    raise Injected("forward")


def fails_in_branch(x: torch.Tensor) -> torch.Tensor:
    def branch(y: torch.Tensor) -> torch.Tensor:
        raise Injected("branch")

    return torch.cond(x.sum() > 0, branch, lambda y: y.cos(), (x,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "fn", [fails_in_forward, lambda x: FailsInBackward.apply(x), fails_in_branch], ids=["forward", "backward", "branch"]
)
def test_a_function_that_fails_while_it_is_traced_leaves_the_process_as_it_was(fn: Callable[..., Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    before = state()
    with pytest.raises((Injected, RuntimeError)):
        aotkit.aot_function(fn, lambda graph, _: graph)(x)
    assert state() == before
    torch.testing.assert_close(aotkit.aot_function(torch.sin, lambda graph, _: graph)(x), x.sin())


# -- threads -------------------------------------------------------------------------------------------


def make_program(number: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        for step in range(number % 4 + 1):
            y = F.gelu(y + number / 16) if step % 2 else torch.tanh(y) * (step + 1)
        if number % 3 == 0:
            y = F.layer_norm(y, (8,))
        return y.softmax(-1) if number % 2 else y.cumsum(0)

    return fn


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lower(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_graph(graph, inputs)

    return aotkit.aot_function(fn, lower, decompositions=decompositions())


def as_recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    return aotkit.aot_function(fn, lambda graph, _: graph)


def train(wrap: Callable[..., Any], number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    compiled = wrap(make_program(number))
    found = []
    for _ in range(4):
        x = torch.randn(5, 8, generator=generator)
        w = torch.randn(8, 8, generator=generator).requires_grad_()
        y = compiled(x, w)
        y.square().sum().backward()
        found += [y.detach(), w.grad]
    return found


@pytest.mark.covers("F4.44")
@pytest.mark.parametrize("wrap", [by_hand, as_recorded])
def test_eight_threads_that_compile_and_run_at_once_get_what_one_thread_gets(wrap: Callable[..., Any]) -> None:
    numbers = range(16)
    start = threading.Barrier(8)

    def run(number: int) -> list[torch.Tensor]:
        if number < 8:
            start.wait(timeout=60)
        return train(wrap, number)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, numbers))
    for number, found in zip(numbers, together, strict=True):
        alone = train(wrap, number)
        torch.testing.assert_close(found, alone, rtol=0, atol=0)
        torch.testing.assert_close(found, train(lambda fn: fn, number), rtol=1e-4, atol=1e-4)


@pytest.mark.covers("F4.44")
def test_threads_that_share_one_function_compile_it_once() -> None:
    compiles: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiles.append(str(graph.code))
        return graph

    compiled = aotkit.aot_function(make_program(3), keep)
    x, start = torch.randn(5, 8), threading.Barrier(8)

    def run(number: int) -> torch.Tensor:
        w = torch.full((8, 8), float(number), requires_grad=True)
        start.wait(timeout=60)
        compiled(x, w).sum().backward()
        return w.grad

    with ThreadPoolExecutor(8) as pool:
        gradients = list(pool.map(run, range(8)))
    assert len(compiles) == 2  # one forward, one backward
    for number, gradient in enumerate(gradients):
        w = torch.full((8, 8), float(number), requires_grad=True)
        make_program(3)(x, w).sum().backward()
        torch.testing.assert_close(gradient, w.grad)


def test_a_refusal_within_a_transform_leaves_the_transform() -> None:
    """The graph runs eagerly, Dynamo's guards hold, and hooks on saved tensors are allowed as before."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        shared = torch.zeros(1, 4)
        shared.unfold(1, 2, 1).add_(1)  # a write to overlapping views
        return (x * shared).sum()

    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: torch.func.grad(loss)(x), backend="aotkit")
    with pytest.warns(aotkit.EagerFallback):
        found = compiled(x)
    torch.testing.assert_close(found, torch.func.grad(loss)(x))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    with torch.autograd.graph.save_on_cpu():
        (x.requires_grad_() * x).sum().backward()


def test_another_state_of_torch_is_another_specialization() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        made = torch.ones(4)
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x.to(made.device) + made

    compiled, x = aotkit.aot_function(fn, lambda graph, _: graph), torch.ones(4)
    assert compiled(x).tolist() == [2] * 4
    with torch.device("meta"):
        assert compiled(x).device.type == "meta"
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.full((4,), 3.0)
        assert compiled(x).tolist() == fn(x).tolist() == [6] * 4
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiled(x).tolist() == [4] * 4


@pytest.mark.parametrize("lowering", ["kernels", "none"])
def test_a_backward_under_another_default_dtype_is_of_the_forwards(lowering: str) -> None:
    """Integers and numbers have the types that they had when the forward ran, also where they are computed again."""

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return (x.sin() * (n / 3) * torch.full((8,), 0.1)).square().sum()

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
        torch.set_default_dtype(torch.float64)
        try:
            loss = call(x, torch.arange(1, 9))
        finally:
            torch.set_default_dtype(torch.float32)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.get_default_dtype() is torch.float32
        return [loss.detach(), first.detach(), second]

    options = {"fallback": "error", "cache": False, "lowering": lowering}
    found = gradients(torch.compile(fn, backend="aotkit", options=options))
    torch.testing.assert_close(found, gradients(fn), rtol=1e-14, atol=1e-14)


def test_a_graph_that_aten_runs_says_its_types_and_leaves_torchs_default_alone() -> None:
    """There is one for all threads: other backwards, and whatever else runs, would see it."""

    def fn(n: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        compared, bits = (n + 2**24).gt(2**24 + 1.5), n.view(torch.float64)
        made = torch.full((2,), 0.1), torch.arange(0, 1, 0.3), torch.pow(0.3, n), n * 2j
        return n / 3, torch.special.zeta(n + 1, n), compared, bits, like / 3, n.to(torch.float32), *made

    given = torch.arange(1, 5), torch.ones(2)
    torch.set_default_dtype(torch.float64)
    try:
        want, run = fn(*given), run_with_aten(make_fx(fn, tracing_mode="fake")(*given))
    finally:
        torch.set_default_dtype(torch.float32)
    with mock.patch.object(torch, "set_default_dtype", side_effect=AssertionError("it was set")):
        found = run(list(given))
    torch.testing.assert_close(tuple(found), want, rtol=0, atol=0)


def test_two_threads_that_set_the_default_dtype_leave_what_was_there() -> None:
    inside, left = threading.Event(), threading.Event()

    def other() -> None:
        with default_dtype(torch.float16):
            inside.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with default_dtype(torch.float64):
        thread.start()
        inside.wait(0.05)  # which it is not before this thread has left
    left.set()
    thread.join()
    try:
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
