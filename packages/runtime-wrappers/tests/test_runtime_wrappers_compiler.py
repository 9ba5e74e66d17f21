"""Wrappers around a compiler, the profiler's range, and how much a call executes."""

from __future__ import annotations

import itertools
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from aotkit_functionalize import GraphMetadata, records
from aotkit_runtime_wrappers import AliasingChangedError, WrapperOptions, bind, build_plan, compile_wrapped, make_boxed
from aotkit_runtime_wrappers.compiler_wrapper import CompilerWrapper
from aotkit_runtime_wrappers.errors import CallingConventionError

RANGE = "aotkit: prologue"


# -- wrappers around a compiler ----------------------------------------------------------------------------


class Logged(CompilerWrapper):
    """Writes down when its halves run and when a call goes through it; state is its name and the arguments' count."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def pre_compile(self, fn: Any, flat_args: list[Any], /) -> tuple[Any, list[Any], Any]:
        self.log.append(f"pre {self.name}")
        return fn, [*flat_args, self.name], (self.name, len(flat_args))

    def post_compile(self, compiled: Callable[..., Any], state: Any, /) -> Callable[..., Any]:
        self.log.append(f"post {self.name} {state}")

        def run(*args: Any) -> Any:
            self.log.append(f"call {self.name}")
            return compiled(*args)

        return run


@pytest.mark.covers("F4.1")
def test_wrappers_prepare_in_order_and_wrap_in_reverse_with_the_state_that_they_returned() -> None:
    log: list[Any] = []

    def compiler(fn: Any, args: list[Any]) -> Any:
        log.append(("compile", args))
        return fn

    compiled = compile_wrapped(compiler, lambda x: x + 1, ["x"], [Logged(n, log) for n in "abc"])
    posts = ["post c ('c', 3)", "post b ('b', 2)", "post a ('a', 1)"]
    assert log == ["pre a", "pre b", "pre c", ("compile", ["x", "a", "b", "c"]), *posts]
    log.clear()
    assert compiled(1) == 2 and log == ["call a", "call b", "call c"]


class WithoutDuplicates(CompilerWrapper):
    """Compiles a function of the distinct arguments only: what one half changes the other makes up for."""

    def pre_compile(self, fn: Any, flat_args: list[Any], /) -> tuple[Any, list[Any], Any]:
        first = [next(j for j, other in enumerate(flat_args) if other is arg) for arg in flat_args]
        kept = sorted(set(first))
        places = [kept.index(i) for i in first]
        return lambda *distinct: fn(*(distinct[i] for i in places)), [flat_args[i] for i in kept], kept

    def post_compile(self, compiled: Callable[..., Any], kept: Any, /) -> Callable[..., Any]:
        return lambda *args: compiled(*(args[i] for i in kept))


@pytest.mark.covers("F4.1")
def test_one_wrapper_serves_several_compiles_at_once() -> None:
    wrapper, barrier, problems = WithoutDuplicates(), threading.Barrier(4, timeout=60), []

    def compile_and_compare(number: int) -> None:
        def compiler(fn: Any, args: list[Any]) -> Any:
            barrier.wait()  # every thread has prepared before any compiles
            assert len(args) == number + 1
            return fn

        distinct = [torch.randn(3) for _ in range(number + 1)]
        args = [*distinct, distinct[0], distinct[-1]]
        compiled = compile_wrapped(compiler, lambda *xs: sum(i * x for i, x in enumerate(xs)), args, [wrapper])
        if not torch.equal(compiled(*args), sum(i * x for i, x in enumerate(args))):
            problems.append(number)

    threads = [threading.Thread(target=compile_and_compare, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and not vars(wrapper) and not barrier.broken


@pytest.mark.covers("F4.1")
def test_a_wrapper_that_overrides_nothing_leaves_the_compiled_function_itself() -> None:
    def function() -> None:
        raise AssertionError("not called")

    assert compile_wrapped(lambda fn, args: fn, function, (), [CompilerWrapper()] * 2) is function


@pytest.mark.covers("F4.1")
def test_an_error_ends_the_compile_and_a_half_that_returns_nothing_is_named() -> None:
    log: list[Any] = []

    def fails(fn: Any, args: list[Any]) -> Any:
        raise ZeroDivisionError("from the compiler")

    with pytest.raises(ZeroDivisionError):
        compile_wrapped(fails, print, [], [Logged("a", log)])
    assert log == ["pre a"]

    class Forgets(CompilerWrapper):
        def pre_compile(self, fn: Any, flat_args: list[Any], /) -> Any:
            return fn, flat_args

    class Drops(CompilerWrapper):
        def post_compile(self, compiled: Any, state: Any, /) -> Any:
            return None

    with pytest.raises(CallingConventionError, match=r"Forgets\.pre_compile must return .* the state"):
        compile_wrapped(lambda fn, args: fn, print, [], [Forgets()])
    with pytest.raises(CallingConventionError, match=r"Drops\.post_compile must return a callable; .* a NoneType"):
        compile_wrapped(lambda fn, args: fn, print, [], [Drops()])
    with pytest.raises(CallingConventionError, match="the compiler must return a callable"):
        compile_wrapped(lambda fn, args: 3, print, [], [])


# -- the profiler's range ----------------------------------------------------------------------------------


def ranges(run: Callable[[], Any]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        run()
    return [event for event in recorded.events() if event.name in (RANGE, "aten::sin")]


@pytest.mark.covers("F4.10")
@pytest.mark.parametrize("training", [False, True])
def test_a_profiler_shows_the_prologue_of_every_call_before_the_compiled_code(compile_eagerly, training: bool) -> None:
    args = [torch.randn(3, requires_grad=training), torch.randn(3)]

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        y.mul_(2)
        return [x.sin() + y]

    call = compile_eagerly(fn, args).call
    expected, results = fn(args[0], args[1].clone())[0], []

    def twice() -> None:
        results.extend(call([args[0], args[1].clone()])[0] for _ in range(2))

    events = ranges(twice)
    assert [event.name for event in events] == [RANGE, "aten::sin"] * 2
    assert all(a.time_range.end <= b.time_range.start for a, b in itertools.pairwise(events))
    for result in results:
        torch.testing.assert_close(result, expected)
        if training:
            result.sum().backward()
    assert not training or torch.allclose(args[0].grad, 2 * args[0].cos())
    assert ranges(lambda: call([args[0], args[1].clone()]))[0].name == RANGE  # a second profiler sees it as well


@pytest.mark.covers("F4.10")
def test_a_prologue_that_refuses_ends_its_range(compile_eagerly) -> None:
    x = torch.randn(4)
    call = compile_eagerly(lambda a, b: [a.mul_(2) + b.sin()], [x.clone(), torch.randn(4)]).call

    def refused_then_sin() -> None:
        with pytest.raises(AliasingChangedError):
            call([x, x])
        with pytest.raises(CallingConventionError):
            call([x])
        x.sin()

    events = ranges(refused_then_sin)
    assert [event.name for event in events] == [RANGE, RANGE, "aten::sin"]
    assert events[-1].cpu_parent is None


@pytest.mark.covers("F4.10")
def test_without_a_profiler_nothing_of_the_range_is_executed() -> None:
    call = bind(build_plan(plain_metadata()), make_boxed(lambda x: [x + 1]))
    executed = called_by(lambda: call([torch.ones(3)]))
    assert not any("record" in name.lower() or "profile" in name.lower() for name in executed)
    assert "_record_range" not in call.source


# -- how much a call executes ------------------------------------------------------------------------------


def plain_metadata() -> GraphMetadata:
    meta = records.TensorMeta("float32", "cpu", (3,), (1,), 0, False)
    return GraphMetadata(
        inputs=(records.InputInfo(0, records.InputKind.TENSOR, meta),),
        outputs=(records.OutputInfo(0, records.OutputKind.FRESH, meta, graph_output=0),),
        num_forward_outputs=1,
    )


def called_by(run: Callable[[], Any]) -> list[str]:
    """Names of the Python and C functions that ``run`` calls, ``run`` itself left out."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(arg.__name__)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names[1:-1]  # without `run`, and `sys.setprofile` at the end


def instructions_of(run: Callable[[], Any]) -> int:
    """Bytecode instructions of Python that ``run`` executes, in all frames."""
    if sys.version_info >= (3, 12):
        return _monitored_instructions_of(run)
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


def _monitored_instructions_of(run: Callable[[], Any]) -> int:
    """From Python 3.13 on a trace function misses instructions of a frame that it hears of for the first time."""
    count = 0

    def executed(code: CodeType, offset: int) -> None:
        nonlocal count
        count += 1

    monitoring = sys.monitoring
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    monitoring.use_tool_id(tool, "instructions")
    try:
        monitoring.register_callback(tool, event, executed)
        monitoring.set_events(tool, event)
        run()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
    return count


@pytest.mark.covers("F4.43")
def test_a_call_that_uses_no_feature_executes_one_function_and_four_checks() -> None:
    def forward(args: list[Any]) -> list[Any]:
        return args

    forward._boxed_call = True
    call = bind(build_plan(plain_metadata()), forward)
    args = [torch.ones(3)]
    checks = ["len", "_are_functorch_transforms_active", "is_grad_enabled", "_is_any_autocast_enabled"]
    with torch.no_grad():
        assert called_by(lambda: call(args)) == ["call", *checks[:3], checks[3], "forward", "len", "_is_view"]
    assert instructions_of(lambda: call(args)) < 150


@pytest.mark.covers("F4.43")
@pytest.mark.parametrize("training", [False, True])
def test_a_call_executes_at_most_half_of_what_torchs_own_wrapper_does(training: bool) -> None:
    """Around the same compiled graphs, whose own work is taken off; counted, so that it does not depend on the load."""
    calls = runpy.run_path(str(Path(__file__).parent / "measure_overhead.py"))["capture"](training)
    for pair in [("aotkit", "torch")] + ([("aotkit step", "torch step")] if training else []):
        for run in pair:
            calls[run]()  # what is done once
        bare = instructions_of(calls["bare"])
        ours, theirs = (instructions_of(calls[run]) - bare for run in pair)
        assert 0 < ours <= theirs / 2, pair


@pytest.mark.covers("F4.43")
def test_an_option_or_a_feature_adds_lines_only_where_it_is_used() -> None:
    plain = build_plan(plain_metadata())
    source = bind(plain, make_boxed(lambda x: [x])).source
    checked = bind(build_plan(plain_metadata(), options=WrapperOptions(debug=True)), make_boxed(lambda x: [x])).source
    assert "_check_value" in checked and set(source.splitlines()) < set(checked.splitlines())
    for feature in (
        "_refuse_new_aliases",
        "_check",
        "copy_",
        "_replay_view",
        "_set_version",
        "_mark_dynamic",
        "_apply",
    ):
        assert feature not in source
