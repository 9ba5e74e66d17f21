"""Bugs of ours, injected into every stage: the program runs on, right, after one notice that says whose bug it is."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import aotkit
from aotkit_cache import CacheWarning
from aotkit_runtime_wrappers import WrapperError

BEFORE_LOWERING = [
    "aotkit.backend.attribute_tensors",
    "aotkit.backend.unsupported_input",
    "aotkit.driver.job.open_graph_cache",
    "aotkit.backend.with_alias_specializations",
    "aotkit.artifact.lookup.prepare_lookup",
    "aotkit.driver.graph_compiler.lift_attributes",
    "aotkit.driver.graph_compiler.floats_as_tensors",
    "aotkit.driver.graph_compiler.fake_inputs",
    "aotkit.driver.graph_compiler.capture_function",
    "aotkit.driver.compile.prepare_inputs",
    "aotkit.driver.compile.capture",
    "aotkit_aot_trace.record.collect_metadata",
    "aotkit_aot_trace.record.reached_by",
    "aotkit_aot_trace.api.finish",
    "aotkit.driver.stages.partition",
    "aotkit.driver.compile.saved_values",
    "aotkit.driver.compile.build_plan",
    "aotkit.driver.bind.bind_plan",
]
LOWERING = [
    "aotkit.driver.lower.asks_for_history",
    "aotkit.driver.lower.compile_to_program",
    "aotkit_inductor_lower.driver.rewrite_graph",
    "aotkit_inductor_lower.driver.lower_for",
    "aotkit_inductor_lower.driver.schedule",
    "aotkit_inductor_lower.loop_passes.split_reductions.buffers_of",
    "aotkit_inductor_lower.loop_passes.choose_library_calls.choose_library_calls",
    "aotkit_inductor_lower.targets.cpu.generate.generate",
    "aotkit.driver.bind.bind_program",
    "aotkit_inductor_lower.driver.make_report",
]
ERRORS = [AssertionError, TypeError, ZeroDivisionError, KeyError, NotImplementedError, RecursionError, IndexError]


def program(x: Tensor, w: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    n.add_(1)
    hidden = (x @ w).sin()
    return hidden.sum(), hidden.exp() * n


def arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    return [x, w, torch.zeros(3, dtype=torch.float64)]


def step(call: Callable[..., Any], which: Sequence[int] = (0, 1), between: Callable[[], Any] = list) -> list[Any]:
    given = arguments()
    results = call(*given)
    between()
    gradients = torch.autograd.grad([results[n].sum() for n in which], given[:2])
    return [*(r.detach() for r in results), *gradients, given[2]]


def broken(target: str, patch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    module, _, name = target.rpartition(".")
    space: dict[str, Any] = {"kind": kind, "__name__": module}  # as if it stood there
    exec("def raising(*args, **kwargs):\n    raise kind('injected')", space)
    patch.setattr(importlib.import_module(module), name, space["raising"])


@contextmanager
def one_notice() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if issubclass(w.category, aotkit.EagerFallback)]
    assert len(messages) == 1, messages


def compiled(**options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="aotkit", options={"verify": False, **options})


# A RuntimeError of torch's while the run of the function is looked at is a refusal, not a bug.
STAGES = [
    (target, TypeError if "aotkit_aot_trace.record" in target else ERRORS[number % len(ERRORS)])
    for number, target in enumerate(BEFORE_LOWERING + LOWERING)
]


@pytest.mark.covers("F8.8")
@pytest.mark.parametrize(("target", "kind"), STAGES)
def test_a_bug_in_the_compile_of_a_forward_gives_eager_and_one_notice(
    target: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(target, monkeypatch, kind)
    call = compiled(cache=target.startswith(("aotkit.artifact.lookup", "aotkit.backend", "aotkit.driver.job")))
    with one_notice() as messages:
        got = step(call)
    torch.testing.assert_close(got, step(program))
    assert kind.__name__ in messages[0] and "injected" in messages[0]
    assert "a bug in aotkit and not in your program" in messages[0] and "aotkit doctor" in messages[0]
    if "unsupported_input" not in target:
        assert f"{__file__}:" in messages[0]  # the user's line


@pytest.mark.covers("F8.8")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("which", [(0, 1), (0,)])
@pytest.mark.parametrize(("target", "kind"), [s for s in STAGES if s[0] in LOWERING])
def test_a_bug_in_the_compile_of_a_backward_gives_eager_gradients_and_one_notice(
    target: str, kind: type[Exception], which: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = compiled(cache=False)
    with one_notice() as messages:
        got = step(call, which, lambda: broken(target, monkeypatch, kind))
    torch.testing.assert_close(got, step(program, which))
    assert kind.__name__ in messages[0] and "bug in aotkit" in messages[0] and f"{__file__}:" in messages[0]
    torch.testing.assert_close(step(call, which), step(program, which))  # and no second notice


@pytest.mark.covers("F8.8")
def test_a_refusal_in_the_compile_of_a_backward_gives_eager_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from aotkit_inductor_lower.errors import UnsupportedGraphError

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedGraphError("this", "it is not known")

    call = compiled(cache=False)
    with one_notice() as messages:
        got = step(call, between=lambda: monkeypatch.setattr("aotkit.driver.lower.compile_to_program", refuse))
    torch.testing.assert_close(got, step(program))
    assert "it is not known" in messages[0] and "bug" not in messages[0]


@pytest.mark.covers("F8.8")
@pytest.mark.parametrize("target", ["aotkit.driver.compile.capture", "aotkit_inductor_lower.driver.lower_for"])
def test_a_bug_is_raised_with_its_cause_when_that_is_asked_for(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(target, monkeypatch, KeyError)
    with pytest.raises(BackendCompilerFailed, match="bug in aotkit") as caught:
        step(compiled(fallback="error", cache=False))
    assert isinstance(caught.value.inner_exception, aotkit.InternalError)
    assert isinstance(caught.value.inner_exception.__cause__, KeyError)


@pytest.mark.covers("F8.8")
def test_a_bug_in_a_backward_is_raised_with_its_cause_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    call = compiled(fallback="error", cache=False)
    with pytest.raises(WrapperError, match="injected") as caught:
        step(call, between=lambda: broken(LOWERING[3], monkeypatch, KeyError))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.covers("F8.8", "F7.1")
def test_a_stored_backward_that_cannot_be_bound_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(program)
    torch.testing.assert_close(step(compiled()), expected)
    bound: list[Any] = []
    binding = importlib.import_module("aotkit.driver.bind")
    original = binding.bind_graph

    def second_fails(graph: Any, *args: Any) -> Any:
        bound.append(graph)
        if len(bound) == 2:
            raise OSError("cannot be loaded")
        return original(graph, *args)

    monkeypatch.setattr(binding, "bind_graph", second_fails)
    with pytest.warns(CacheWarning, match="cannot be loaded"):
        torch.testing.assert_close(step(compiled()), expected)
    assert len(bound) == 3  # forward and backward that were stored, and the backward that was compiled


OUR_STAGES = ("aotkit.driver.compile", "aotkit.driver.bind", "aotkit_aot_trace")
AOT_STAGES = [t for t in BEFORE_LOWERING if t.startswith(OUR_STAGES)]


@pytest.mark.covers("F8.8")
@pytest.mark.parametrize("target", AOT_STAGES)
def test_a_bug_behind_aot_function_gives_eager_and_one_notice(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(target, monkeypatch, TypeError)
    call = aotkit.aot_function(lambda x, w, n: {"two": program(x, w, n)}, aotkit.nop)
    with one_notice() as messages:
        got = step(lambda *args: call(*args)["two"])
        torch.testing.assert_close(step(lambda *args: call(*args)["two"]), got)
    torch.testing.assert_close(got, step(program))
    assert "bug in aotkit" in messages[0] and f"{__file__}:" in messages[0]


@pytest.mark.covers("F8.8")
def test_a_bug_behind_aot_module_simplified_gives_eager_and_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    x = torch.ones(2, 3)

    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.inner(x)]

    broken("aotkit.driver.compile.capture", monkeypatch, TypeError)
    with one_notice() as messages:
        call = aotkit.aot_module_simplified(Listed(), [x], aotkit.nop)
        (got,) = call(x)
    torch.testing.assert_close(got, module(x))
    assert "bug in aotkit" in messages[0] and f"{__file__}:" in messages[0]
    with warnings.catch_warnings(), pytest.raises(TypeError, match="injected"):
        warnings.simplefilter("error")
        aotkit.aot_module_simplified(Listed(), [torch.ones(2, 5)], aotkit.nop)  # an error of the module's own


@pytest.mark.covers("F8.8")
def test_aot_function_raises_a_bug_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broken("aotkit.driver.compile.capture", monkeypatch, TypeError)
    monkeypatch.setenv("AOTKIT_FALLBACK", "error")
    with pytest.raises(aotkit.InternalError, match="bug in aotkit") as caught:
        step(aotkit.aot_function(program, aotkit.nop))
    assert isinstance(caught.value.__cause__, TypeError)
    monkeypatch.setenv("AOTKIT_FALLBACK", "sometimes")
    with pytest.raises(aotkit.UnknownOption, match="AOTKIT_FALLBACK takes eager or error"):
        step(aotkit.aot_function(program, aotkit.nop))


def test_errors_of_the_users_own_stay_as_they_are() -> None:
    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise ZeroDivisionError("the user's")

    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the user's")

    def mismatch(x: Tensor) -> Tensor:
        return x.view(7)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (aotkit.aot_function(torch.sin, compiler), aotkit.aot_function(fails, aotkit.nop)):
            for _ in range(2):
                with pytest.raises(ZeroDivisionError, match="the user's"):
                    call(torch.ones(2))
        with pytest.raises(RuntimeError, match="invalid for input of size 2"):
            aotkit.aot_function(mismatch, aotkit.nop)(torch.ones(2))
        backend = aotkit.make_backend(passes=aotkit.GraphPasses(lowered=compiler))  # type: ignore[arg-type]
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed) as caught:
            torch.compile(torch.sin, backend=backend)(torch.ones(2))
        assert isinstance(caught.value.inner_exception, TypeError | ZeroDivisionError)


def test_a_function_that_fails_once_is_compiled_when_it_does_not() -> None:
    fails = [True]

    def sometimes(x: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("not now")
        return x * 2

    made: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        made.append(graph)
        return aotkit.nop(graph, inputs)

    call = aotkit.aot_function(sometimes, compiler)
    with pytest.raises(ValueError, match="not now"):
        call(torch.ones(2))
    fails[0] = False
    torch.testing.assert_close(call(torch.ones(2)), torch.full((2,), 2.0))
    assert len(made) == 1
