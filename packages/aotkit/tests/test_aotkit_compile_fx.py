"""The pipeline as a function of an FX graph, options with modes, errors with the stage they come from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

import aotkit
from aotkit import CompileError, UnknownOption


class Spy:
    """An inner compiler that notes what it is told and runs the graph as it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        assert all(isinstance(i, torch.Tensor) for i in inputs)
        self.calls.append(([n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"], facts))
        return graph.forward


def traced(function: Any) -> fx.GraphModule:
    return fx.symbolic_trace(function)


@pytest.mark.covers("F5a.1", "F5a.5", "F5a.8")
def test_the_inner_compiler_gets_each_graph_with_what_is_known_of_it() -> None:
    gm = traced(lambda x, w: ((x @ w).sin(),))
    x, w = torch.randn(3, 4), nn.Parameter(torch.randn(4, 2))
    spy = Spy()
    (y,) = aotkit.compile_fx(gm, [x, w], spy)(x, w)
    y.sum().backward()
    torch.testing.assert_close(w.grad, torch.autograd.grad((x @ w).sin().sum(), w)[0])
    (forward, told), (_, backward) = spy.calls
    assert "mm.default" in forward or "mm_default" in forward or any("mm" in name for name in forward)
    assert told == {"static_input_idxs": [1], "graph_id": 0, "is_inference": False, "is_backward": False}
    assert backward["is_backward"] and backward["graph_id"] == 1
    assert len(backward["static_input_idxs"]) >= 1  # what was saved; the tangent is not
    spy = Spy()
    with torch.no_grad():
        compiled = aotkit.compile_fx(gm, [x, w], spy)
        torch.testing.assert_close(compiled(x, w)[0], (x @ w).sin())
    assert [facts["is_inference"] for _, facts in spy.calls] == [True]


@pytest.mark.covers("F5a.1")
def test_patches_and_decompositions_are_those_of_one_compile() -> None:
    gm = traced(lambda x: (torch.nn.functional.gelu(x), x.exp()))
    x = torch.randn(5)
    seen: dict[str, list[str]] = {}
    for name, patches, table in (
        ("ours", {}, None),
        ("none", {"numerics": "fast"}, {}),
    ):
        spy = Spy()
        torch.testing.assert_close(aotkit.compile_fx(gm, [x], spy, patches, table)(x), gm(x))
        seen[name] = spy.calls[0][0]
    assert any("gelu" in name for name in seen["none"])
    with pytest.raises(UnknownOption, match="did you mean 'numerics'"):
        aotkit.compile_fx(gm, [x], config_patches={"numeric": "fast"})
    assert aotkit.Options().numerics == "eager"


@pytest.mark.covers("F5a.2")
def test_nested_inputs_results_that_are_no_tuple_and_exported_graphs_are_called_as_they_are() -> None:
    class Nested(nn.Module):
        def forward(self, pair: Any, named: dict[str, torch.Tensor]) -> Any:
            return {"sum": pair[0] + named["y"], "both": [pair[1] * 2, pair[0]]}

    pair, named = (torch.randn(3), torch.randn(3)), {"y": torch.randn(3)}
    exported = torch.export.export(Nested(), (pair, named)).module()
    compiled = aotkit.compile_fx(exported, [pair, named])
    torch.testing.assert_close(compiled(pair, named), Nested()(pair, named))
    with pytest.raises(TypeError, match="this was compiled for"):
        compiled(list(pair), named)
    single = traced(lambda x: x.sin() + 1)  # returns a tensor
    x = torch.randn(4)
    result = aotkit.compile_fx(single, [x])(x)
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, x.sin() + 1)


@pytest.mark.covers("F5a.3", "F5a.4")
def test_an_empty_graph_needs_no_code_and_a_graph_has_to_return_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    from aotkit.torch_api import compile_fx as _compile_fx

    monkeypatch.setattr(_compile_fx, "compile_graph", lambda *args: pytest.fail("code was generated"))
    x = torch.randn(3)
    args = [x]
    assert aotkit.compile_fx_inner(traced(lambda x: (x, 3)), [x])(args) == (x, 3) and args == []
    with pytest.raises(CompileError, match="has to return a tuple or list"):
        aotkit.compile_fx_inner(traced(lambda x: x.sin()), [x])


@pytest.mark.covers("F5a.6", "F5a.7", "F5a.24")
def test_results_have_eagers_strides_and_these_are_published() -> None:
    gm = traced(lambda x: (x.relu() * 2, x.permute(0, 2, 1) + 1, x.sum(0).t()))
    x = torch.randn(2, 5, 3).to(torch.float32)
    with tracing(TracingContext(FakeTensorMode())), TracingContext.report_output_strides() as strides:
        compiled = aotkit.compile_fx(gm, [x])
    got, want = compiled(x), gm(x)
    assert [r.stride() for r in got] == [r.stride() for r in want]
    assert strides == [r.stride() for r in want]


@pytest.mark.covers("F5a.14")
def test_a_chain_of_two_thousand_operations_compiles_and_no_state_changes() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for number in range(2000):
        value = graph.call_function(torch.sin if number % 2 else torch.neg, (value,))
    graph.output((value,))
    gm = fx.GraphModule(nn.Module(), graph)
    x = torch.randn(3)
    state, limit = torch.get_rng_state(), sys.getrecursionlimit()
    compiled = aotkit.compile_fx(gm, [x], options=aotkit.Options(lowering="none"))
    assert torch.equal(torch.get_rng_state(), state) and sys.getrecursionlimit() == limit
    torch.testing.assert_close(compiled(x), gm(x))


@pytest.mark.covers("F5a.20", "F5a.21")
def test_compile_fx_aot_writes_a_package_and_names_an_input_on_another_device(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            self.count.add_(1)
            return (x + self.count,)

    model = Counts()
    x = torch.randn(3)
    gm = torch.export.export(model, (x,)).module()
    path = aotkit.compile_fx_aot(gm, [x], tmp_path / "p")
    assert model.count.item() == 0  # the buffer of the model is another
    loaded = aotkit.load(path)
    torch.testing.assert_close(loaded(x)[0], x + 1)
    torch.testing.assert_close(loaded(x)[0], x + 2)
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match="example input 0 is on device cpu, and the graph was traced for meta"):
        aotkit.compile_fx_aot(gm, [x], tmp_path / "q")


@pytest.mark.covers("F5a.25", "F8.2")
def test_options_and_modes_are_listed_and_a_mode_may_stand_among_options() -> None:
    assert aotkit.list_options()["numerics"] == "eager" and "memory_budget" in aotkit.list_options()
    assert aotkit.list_mode_options("reduce-overhead") == {"cudagraphs": True}
    assert set(aotkit.list_mode_options()) == set(aotkit.MODES)
    with pytest.raises(UnknownOption, match="there is no mode 'fastest'"):
        aotkit.list_mode_options("fastest")
    recorder = aotkit.Recorder()
    options = {"mode": "aot-eager", "fallback": "error", "observer": recorder}
    x = torch.randn(3)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="aotkit", options=options)
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    assert recorder.graphs == []  # no kernels were made
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="there is no mode 'fastest'"):
        torch.compile(lambda x: x + 1, backend="aotkit", options={"mode": "fastest"})(x)


@pytest.mark.covers("F8.8")
def test_an_internal_error_names_its_stage_and_is_suppressed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import aotkit_inductor_lower.driver as lower

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(lower, "schedule", broken)
    x = torch.randn(3)
    options = {"fallback": "error"}
    with pytest.raises(BackendCompilerFailed, match=r"in the stage 'schedule'.*a bug") as failed:
        torch.compile(lambda x: x.sin() + 1, backend="aotkit", options=options)(x)
    assert isinstance(failed.value.inner_exception, aotkit.InternalError)
    cause = failed.value.inner_exception.__cause__
    assert cause is not None and cause.__notes__ == ["aotkit: raised in the stage 'schedule' of a compile"]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True):
        torch.testing.assert_close(
            torch.compile(lambda x: x.sin() + 1, backend="aotkit", options=options)(x), x.sin() + 1
        )
    torch._dynamo.reset()
    with pytest.warns(aotkit.EagerFallback, match="a bug in aotkit"):
        torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend=aotkit.compile_fx)(x), x.sin() + 1)
