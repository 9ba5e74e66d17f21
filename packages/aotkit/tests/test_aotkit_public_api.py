"""aot_function, aot_module and aot_module_simplified, with compilers and partitioners of torch's and of ours."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.compilers import nop as torchs_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition as torchs_min_cut
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

import aotkit
from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_partition import min_cut_rematerialization_partition


class Counting:
    """A pass-through compiler that remembers the graphs it was given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        self.names.append(aotkit.get_aot_graph_name())
        return graph


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.drop(F.gelu(self.norm(self.up(x))))
        return {"logits": self.down(hidden) * scale, "hidden": hidden}


class Tupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls.add_(1)
        return (self.linear(x).relu(),)


@pytest.mark.covers("F2.1")
def test_compilers_default_to_the_forwards_and_a_second_call_compiles_nothing() -> None:
    forward, backward, inference = Counting(), Counting(), Counting()

    def fn(args: dict[str, torch.Tensor], *, factor: int) -> tuple[list[torch.Tensor], None]:
        return [args["x"].sin() * factor, args["y"]], None

    inputs = {"x": torch.randn(3, requires_grad=True), "y": torch.randn(2)}
    only_one = aotkit.aot_function(fn, forward)
    for _ in range(2):
        (out, same), nothing = only_one(inputs, factor=2)
        assert nothing is None and same is inputs["y"]
        torch.testing.assert_close(out, inputs["x"].sin() * 2)
        out.sum().backward()
    assert [n.split("_")[-2] for n in forward.names] == ["forward", "backward"]
    with torch.no_grad():
        only_one(inputs, factor=2)
    assert forward.names[-1].split("_")[-2] == "inference"
    all_three = aotkit.aot_function(fn, forward, backward, inference_compiler=inference)
    all_three(inputs, factor=2)[0][0].sum().backward()
    with torch.no_grad():
        all_three(inputs, factor=2)
    assert len(backward.graphs) == len(inference.graphs) == 1 and len(set(forward.names)) == 4


@pytest.mark.covers("F2.1")
def test_other_arguments_compile_another_variant_instead_of_being_silently_wrong() -> None:
    compiler = Counting()

    def fn(x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
        return (x * n + y) if x.shape[0] < 4 else x - y

    compiled = aotkit.aot_function(fn, compiler)
    x = torch.randn(3)
    cases = [(x, x, 1), (x, torch.randn(3), 1), (x, x, True), (x, x, -0.0), (x, x, 0.0), (x.double(), x.double(), 1)]
    for case in [*cases, *cases, (torch.randn(6), torch.randn(6), 1)]:
        torch.testing.assert_close(compiled(*case), fn(*case))
    assert len(compiler.graphs) == len(cases) + 1


@pytest.mark.covers("F2.1", "F2.7")
def test_dynamic_sizes_and_integers_serve_other_values_and_what_was_assumed_is_checked() -> None:
    compiler = Counting()

    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.sum(0) * n if x.shape[0] < 10 else x.sum(0) * n + 1

    compiled = aotkit.aot_function(fn, compiler, dynamic=True)
    for rows in (3, 5, 12, 13, 1):
        for n in (4, 1, 0, -1):
            x = torch.randn(rows, 2)
            torch.testing.assert_close(compiled(x, n), fn(x, n))
    assert len(compiler.graphs) == 3  # below ten rows, above, and one row


@pytest.mark.covers("F2.1")
def test_a_graph_without_backward_writes_to_its_inputs_itself_if_asked() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        y.t_().mul_(2)
        with torch.no_grad():
            w.mul_(3)
        return x * 2, x[1:]

    def arguments() -> tuple[torch.Tensor, ...]:
        return torch.arange(3.0), torch.arange(6.0).view(2, 3), torch.arange(2.0).requires_grad_()

    compiler = Counting()
    compiled = aotkit.aot_function(fn, compiler, keep_inference_input_mutations=True)
    ours, theirs = arguments(), arguments()
    before = ours[0]._version
    with torch.no_grad():
        outputs, expected = compiled(*ours), fn(*theirs)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(ours, theirs)
    assert ours[0]._version > before and ours[1].stride() == theirs[1].stride()
    written = [n.args[0].name for n in compiler.graphs[0].graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert written == ["arg0_1", "arg2_1"]  # the second changes its sizes


@pytest.mark.covers("F2.2")
@pytest.mark.parametrize("compiler", [torchs_nop, compile_graph], ids=["nop", "ours"])
@pytest.mark.parametrize("partitioner", [min_cut_rematerialization_partition, torchs_min_cut], ids=["ours", "torchs"])
def test_a_compiled_module_behaves_as_the_module_whatever_compiles_it(compiler: Any, partitioner: Any) -> None:
    ours = Small().double()  # batch norm of six rows magnifies another order of additions
    theirs = copy.deepcopy(ours)
    table = decompositions() if compiler is compile_graph else None
    compiled = aotkit.aot_module(ours, compiler, partition_fn=partitioner, decompositions=table)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    for training in (True, True, False, True):
        compiled.train(training)
        theirs.train(training)
        x = torch.randn(6, 4, dtype=torch.float64)
        results = []
        for module in (compiled, theirs):
            torch.manual_seed(3)
            results.append(module(x, scale=2.0))
        torch.testing.assert_close(*results)
        for module, result, optimizer in zip((ours, theirs), results, optimizers, strict=True):
            result["logits"].sum().backward()
            assert all(p.grad is not None for p in module.parameters())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert set(compiled.state_dict()) == {f"orig_module.{name}" for name in theirs.state_dict()}


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("other", torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.bias + self.count * self.other


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m._buffers.update(count=m.bias.detach()),
        lambda m: m._buffers.update(count=m.other.view(3)),
        lambda m: setattr(m.count, "data", m.other),
    ],
    ids=["a view of a parameter", "a view of a buffer", "its memory"],
)
def test_a_written_buffer_may_be_given_memory_of_another_one(change: Callable[[Any], Any]) -> None:
    results = []
    for compiled in (True, False):
        model = _Counts()
        call = aotkit.aot_module(model, aotkit.nop) if compiled else model
        call(torch.zeros(3))
        change(model)
        results.append([call(torch.zeros(3)).detach(), *model.state_dict().values()])
    torch.testing.assert_close(*results)


@pytest.mark.covers("F2.2")
def test_a_replaced_parameter_and_a_tied_one_are_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    compiled = aotkit.aot_module(model, aotkit.nop)
    x = torch.randn(2, 3)
    compiled(x)
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    torch.testing.assert_close(compiled(x), model(x))
    model[1].weight = model[0].weight
    compiled(x).sum().backward()
    ours = model[0].weight.grad
    model[0].weight.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(ours, model[0].weight.grad)
    model[1] = nn.Linear(3, 3)
    torch.testing.assert_close(compiled(x), model(x))
    model[1].bias = None
    torch.testing.assert_close(compiled(x), model(x))
    model[0].bias = nn.Parameter(torch.ones(3))
    torch.testing.assert_close(compiled(x), model(x))
    model.append(nn.Tanh())
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.covers("F2.3")
@pytest.mark.parametrize("graph", [False, True], ids=["module", "graph"])
def test_the_simplified_form_takes_flat_arguments_after_the_parameters(graph: bool) -> None:
    module: nn.Module = Tupled()
    if graph:
        module = torch.fx.symbolic_trace(module)
    reference = copy.deepcopy(module)
    x = torch.randn(2, 4)
    forward = aotkit.aot_module_simplified(module, [x], torchs_nop)
    for _ in range(2):
        (ours,), (theirs,) = forward(x), reference(x)
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    assert dict(forward.named_parameters()).keys() == dict(reference.named_parameters()).keys()
    torch.testing.assert_close(dict(forward.named_buffers()), dict(reference.named_buffers()))
    for got, want in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    forward.zero_grad()
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.covers("F2.3")
def test_the_simplified_form_of_dynamos_wrapper_is_boxed() -> None:
    graph = torch.fx.symbolic_trace(lambda xs, y: (xs[0] * xs[1] + y,))
    x, y = torch.randn(3), torch.randn(3)

    def unflatten(flat: list[Any]) -> tuple[Any, ...]:
        return flat[:2], flat[2]

    wrapper = torch._dynamo.utils.GmWrapper(graph, unflatten)
    forward = aotkit.aot_module_simplified(wrapper, [x, y, y], torchs_nop)
    box = [x, y, y]
    torch.testing.assert_close(forward(box)[0], x * y + y)
    assert box == []


@pytest.mark.covers("F2.3", "F2.29")
def test_the_simplified_form_refuses_a_result_that_is_no_tuple() -> None:
    with pytest.raises(RuntimeError, match=r"Graph output must be a tuple\(\)\."):
        aotkit.aot_module_simplified(nn.Linear(2, 2), [torch.randn(1, 2)], torchs_nop)


@pytest.mark.covers("F2.6", "F2.7")
def test_fake_arguments_keep_their_mode_and_its_symbols() -> None:
    module = Tupled()
    mode = FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    compiler = Counting()
    with torch.no_grad():
        forward = aotkit.aot_module_simplified(module, [mode.from_tensor(torch.randn(6, 4))], compiler)
        torch.testing.assert_close(forward(torch.ones(9, 4))[0], module.linear(torch.ones(9, 4)).relu())
    value = compiler.graphs[0].graph.find_nodes(op="placeholder")[-1].meta["val"]
    assert value.fake_mode is mode and isinstance(value.shape[0], torch.SymInt)


@pytest.mark.covers("F2.4")
def test_sources_of_dynamo_are_complete_and_distinct() -> None:
    module = torch.fx.symbolic_trace(Tupled())
    names = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
    module._param_name_to_source = {name: f"source of {name}" for name in names}
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    placeholder._dynamo_source = "source of x"
    x = torch.randn(2, 4)
    aotkit.aot_module_simplified(module, [x], torchs_nop)
    placeholder._dynamo_source = f"source of {names[0]}"
    with pytest.raises(AssertionError, match=f"source of {names[0]}"):
        aotkit.aot_module_simplified(module, [x], torchs_nop)
    del module._param_name_to_source[names[1]]
    with pytest.raises(AssertionError, match=f"{names[1]} not found."):
        aotkit.aot_module_simplified(module, [x], torchs_nop)
    module._param_name_to_source = {}
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    del placeholder._dynamo_source
    with pytest.raises(AssertionError, match="not found"):
        aotkit.aot_module_simplified(module, [x], torchs_nop)


@pytest.mark.covers("F2.5")
def test_what_compilers_look_for_is_published_in_the_tracing_context() -> None:
    module, seen = Tupled(), {}

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        context = TracingContext.get()
        assert context.params_flat is not None and context.fw_metadata is not None
        assert context.output_strides == []
        context.output_strides.append((4, 1))
        seen.update(params=context.params_flat, metadata=context.fw_metadata)
        return graph

    with tracing(TracingContext(FakeTensorMode())), torch.no_grad():
        aotkit.aot_module_simplified(module, [torch.randn(2, 4)], compiler)
    assert [id(p) for p in seen["params"]] == [id(p) for p in (*module.parameters(), *module.buffers())]
    assert seen["metadata"].static_input_indices == [0, 1, 2]
    assert seen["metadata"].num_mutated_inp_runtime_indices == 1
    assert isinstance(seen["metadata"].contract, GraphMetadata)


@pytest.mark.covers("F2.9")
def test_the_users_decompositions_are_applied_and_nothing_else_is_decomposed() -> None:
    def mine(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return x * 2

    x = torch.randn(3)
    compiled = aotkit.aot_function(F.gelu, torchs_nop, decompositions={torch.ops.aten.gelu.default: mine})
    torch.testing.assert_close(compiled(x), x * 2)
    torch.testing.assert_close(aotkit.aot_function(F.gelu, torchs_nop)(x), F.gelu(x))


@pytest.mark.covers("F2.30")
def test_a_fake_parameter_that_leaked_into_a_module_is_found() -> None:
    module = Tupled()
    with FakeTensorMode() as mode:
        module.linear.weight = nn.Parameter(mode.from_tensor(torch.randn(4, 4)))
    with pytest.raises(AssertionError, match=r"linear\.weight of the module is a fake tensor"):
        aotkit.aot_module(module, torchs_nop)


@pytest.mark.covers("F2.49")
def test_every_stage_logs_its_graph_to_torchs_artifacts_under_one_name() -> None:
    messages: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.name.rpartition(".")[2], record.getMessage().splitlines()[0]))

    artifacts = ("aot_graphs", "aot_joint_graph")
    logs = [logging.getLogger(f"torch.aotkit.__{artifact}") for artifact in artifacts]
    keep, x = Keep(), torch.randn(3, requires_grad=True)
    levels = [log.level for log in logs]
    for log in logs:
        log.addHandler(keep)
        log.setLevel(logging.DEBUG)
    try:
        aotkit.aot_function(torch.sin, torchs_nop)(x).sum().backward()
        logged = list(messages)
        aotkit.aot_function(torch.sin, torchs_nop, enable_log=False)(x).sum().backward()
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.removeHandler(keep)
            log.setLevel(level)
    assert [(artifact, name.rpartition("-")[2]) for artifact, name in logged] == [
        ("__aot_joint_graph", "joint"),
        ("__aot_graphs", "forward"),
        ("__aot_graphs", "backward"),
    ]
    assert len({name.rpartition("-")[0] for _, name in logged}) == 1
    assert messages == logged


@pytest.mark.covers("F2.49")
def test_a_compiler_knows_the_name_of_its_graph_and_nobody_else_does() -> None:
    with pytest.raises(RuntimeError, match="no graph is being compiled"):
        aotkit.get_graph_being_compiled()
    seen = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(aotkit.get_graph_being_compiled())
        return graph

    aotkit.aot_function(torch.sin, compiler)(torch.randn(3, requires_grad=True)).sum().backward()
    assert seen == ["forward_0", "backward_0"]


@pytest.mark.covers("F4.38")
def test_boxed_helpers_empty_their_list() -> None:
    box = [torch.ones(2), torch.ones(2)]
    boxed = aotkit.make_boxed_func(torch.add)
    torch.testing.assert_close(boxed(box), torch.full((2,), 2.0))
    assert box == [] and boxed._boxed_call
    compiler = aotkit.make_boxed_compiler(lambda graph, _: graph.forward)
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    box = [torch.zeros(2)]
    torch.testing.assert_close(compiler(graph, [])(box)[0], torch.ones(2))
    assert box == []


def test_threads_that_call_first_at_once_get_the_same_results() -> None:
    compiler = Counting()
    compiled = aotkit.aot_function(lambda x: x.sin().sum(), compiler)
    x, failures = torch.randn(5), []

    def run() -> None:
        try:
            torch.testing.assert_close(compiled(x), x.sin().sum())
        except Exception as error:  # noqa: BLE001  # any failure of a thread is a failure of the test
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(compiler.graphs) == 1


@pytest.mark.covers("F2.45")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("way", ["aot_function", "compile"])
def test_the_history_of_an_input_that_is_detached_inside_stays_usable(way: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.detach()

    compiled = aotkit.aot_function(fn, torchs_nop)
    if way == "compile":
        compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error"})
    w, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y = w.exp() * w
    for _ in range(2):
        compiled(x, y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach())
    assert w.grad is None
    y.sum().backward()
    torch.testing.assert_close(w.grad, (w.exp() * w + w.exp()).detach())
