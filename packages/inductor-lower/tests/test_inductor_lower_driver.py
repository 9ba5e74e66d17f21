"""compile_graph as a whole: convention, dynamic sizes, passes, report, observer, object store, interop with torch."""

from __future__ import annotations

import importlib.machinery
import json
from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit_inductor_lower
from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.driver import (
    GRAPH_PASSES,
    KERNEL_PASSES,
    LOOP_PASSES,
    generate_program,
    pass_names,
    run_graph_passes,
    schedule_graph,
)
from aotkit_inductor_lower.launch_plan import store
from aotkit_inductor_lower.passes import Pass, check_order

F = torch.nn.functional
aten = torch.ops.aten


def trace(f, *args, mode="fake"):
    return make_fx(lambda *given: f(*given), decompositions(), tracing_mode=mode)(*args)


def count(graph, target):
    return sum(node.target is target for node in graph.graph.nodes)


def test_the_result_takes_a_list_and_empties_it():
    compiled = compile_graph(trace(lambda x: x + 1, torch.ones(3)))
    args = [torch.ones(3)]
    assert compiled._boxed_call and compiled(args)[0].tolist() == [2, 2, 2] and args == []


def mlp(x, w1, b1, w2, b2, target):
    h = F.gelu(torch.addmm(b1, x, w1))
    return ((torch.addmm(b2, h, w2) - target) ** 2).mean()


@pytest.mark.covers("F5c.9")
def test_one_compile_serves_every_batch_size():
    def f(x, w, b):
        h = F.layer_norm(F.gelu(x @ w + b), (w.shape[1],))
        return h.softmax(-1), h.sum(0), h.view(x.shape[0] * 2, -1).amax(1), torch.cat((h, h), 0)

    w, b = torch.randn(6, 8), torch.randn(8)
    graph = trace(f, torch.randn(5, 6), w, b, mode="symbolic")
    compiled = compile_graph(graph, options=LowerOptions(verify=True))
    for batch in (2, 3, 17, 64):
        x = torch.randn(batch, 6)
        for got, want in zip(compiled([x, w, b]), f(x, w, b), strict=True):
            assert got.shape == want.shape and got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.covers("F5c.9")
def test_sizes_are_values_and_outputs_too():
    def f(x):
        n = x.shape[0]
        return x * n, torch.arange(n), torch.full((n, 2), 1.5), x.sum() / n, n * 2

    compiled = compile_graph(trace(f, torch.randn(4, 3), mode="symbolic"))
    for n in (3, 9):
        x = torch.randn(n, 3)
        *got, doubled = compiled([x])
        for g, w in zip(got, f(x), strict=False):
            torch.testing.assert_close(g, w)
        assert doubled == 2 * n


def test_dynamic_views_of_two_unknown_sizes_agree():
    def f(x, y):
        b, s, h = x.shape
        heads = x.view(b, s, 4, h // 4).transpose(1, 2)
        return (heads * 2).transpose(1, 2).reshape(b * s, h) + y.view(b * s, h), x[:, 1:].sum(1)

    compiled = compile_graph(
        trace(f, torch.randn(3, 5, 16), torch.randn(3, 5, 16), mode="symbolic"), options=LowerOptions(verify=True)
    )
    for b, s in ((3, 5), (2, 7)):
        x, y = torch.randn(b, s, 16), torch.randn(b, s, 16)
        for got, want in zip(compiled([x, y]), f(x, y), strict=True):
            torch.testing.assert_close(got, want)


def test_an_mlp_trains_through_torchs_own_aot_function():
    from torch._functorch.aot_autograd import aot_function  # torch's own tool, as a user would combine it

    args = [torch.randn(5, 6), torch.randn(6, 8), torch.randn(8), torch.randn(8, 3), torch.randn(3), torch.randn(5, 3)]
    ours = [a.clone().requires_grad_() for a in args]
    theirs = [a.clone().requires_grad_() for a in args]
    compiled = aot_function(mlp, compile_graph, compile_graph, decompositions=decompositions())
    compiled(*ours).backward()
    mlp(*theirs).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_fake_values_are_computed_from_example_inputs():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.exp.default, (x,)),))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(ValueError, match="example_inputs"):
        compile_graph(module)
    value = torch.randn(4)
    torch.testing.assert_close(compile_graph(module, [value])([value])[0], value.exp())


def test_constants_of_the_graph_are_bound():
    table = torch.randn(3, 4)
    x = torch.randn(3, 4)
    graph = trace(lambda x: x + table, x, mode="real")
    torch.testing.assert_close(compile_graph(graph, [x])([x])[0], x + table)


@pytest.mark.covers("F5c.2")
def test_the_report_counts_kernels_calls_and_shares():
    graph = trace(lambda x, w: (F.gelu(x @ w).logcumsumexp(0) + 1).view(-1), torch.randn(4, 5), torch.randn(5, 6))
    report = compile_graph(graph).report()
    assert report.kernel_count == 2 and report.eligible_nodes == 3 and report.generated_nodes == 2
    text = str(report)
    assert "aten.logcumsumexp.default" in text and "matrix products" in text and "67 %" in text
    assert json.loads(json.dumps(report.to_json()))["kernel_count"] == 2


class Watcher:
    def __init__(self):
        self.stages, self.dumps = [], {}

    @contextmanager
    def stage(self, name):
        self.stages.append(name)
        yield

    def dump(self, name, kind, text):
        self.dumps[name, kind] = text()


def test_an_observer_sees_every_stage_and_product():
    watcher = Watcher()
    compile_graph(trace(lambda x: x.exp() + 1, torch.ones(8)), observer=watcher)
    passes = {*pass_names(), *(each.name for each in (*GRAPH_PASSES, *LOOP_PASSES, *KERNEL_PASSES))}
    stages = ["graph-passes", "lowering", "schedule", "codegen", "linearize", "llvm", "bind"]
    assert [name for name in watcher.stages if name not in passes] == stages
    assert stages[0] in watcher.stages[: watcher.stages.index("simplify")]
    assert watcher.stages.index("schedule") < watcher.stages.index("fuse-kernels") < watcher.stages.index("codegen")
    kinds = {kind for _, kind in watcher.dumps}
    assert kinds == {"ir", "kernels", "passes"}
    changed = [name for name, kind in watcher.dumps if kind == "passes"]
    assert changed == ["inline-producers", "localize-temporaries"]  # of a graph of two ops
    assert any("define" in text for (_, kind), text in watcher.dumps.items() if kind == "kernels")


class Store(dict):
    def put(self, digest, data):
        self[digest] = data


@pytest.mark.covers("F5c.12")
def test_an_object_store_is_asked_first_and_gives_the_same_program():
    store = Store()
    graph = trace(lambda x: x.exp() + 1, torch.ones(8))
    first = compile_graph(graph, object_store=store)
    assert len(store) == 1
    second = compile_graph(graph, object_store=store)
    assert second.compiled == first.compiled and second([torch.zeros(8)])[0].tolist() == [2.0] * 8
    compile_graph(trace(lambda x: x.exp() + 2, torch.ones(8)), object_store=store)
    assert len(store) == 2


@pytest.mark.parametrize("newer", ["llvm", "triton"])
def test_what_another_compiler_made_is_not_taken_from_an_object_store(monkeypatch, tmp_path, newer):
    stored, graph = Store(), trace(lambda x: x.exp() + 1, torch.ones(8))
    compile_graph(graph, object_store=stored)
    if newer == "llvm":
        monkeypatch.setattr(store.code_generator.__globals__["llvm"], "llvm_version_info", (99, 1, 0))
    else:
        (tmp_path / "triton.py").write_text("__version__ = '99.1.0'\n")
        found = importlib.machinery.PathFinder.find_spec("triton", [str(tmp_path)])
        monkeypatch.setattr(store, "find_spec", lambda name: found)
    store.compilers.cache_clear()
    try:
        assert "99.1.0" in store.compilers()
        compile_graph(graph, object_store=stored)
    finally:
        monkeypatch.undo()
        store.compilers.cache_clear()
    assert len(stored) == 2


# -- graph passes ----------------------------------------------------------------------------------------


@pytest.mark.covers("F5f.15")
def test_pointless_ops_go_but_a_returned_clone_stays():
    def f(x):
        y = x.view(4, 5).clone().expand(4, 5)
        return (y.permute(0, 1) + 1, x.clone(), x.float())

    graph = trace(f, torch.randn(4, 5))
    passed = run_graph_passes(graph, LowerOptions())
    assert count(passed, aten.clone.default) == 1 and count(passed, aten.view.default) == 0
    x = torch.randn(4, 5)
    _, copy, _ = compile_graph(graph)([x])
    assert copy.data_ptr() != x.data_ptr()


@pytest.mark.covers("F5f.17")
def test_a_conversion_that_loses_bits_is_kept(check):
    check(lambda x: x.bfloat16().float() * 2, torch.randn(50))


@pytest.mark.covers("F5f.16")
def test_uniform_values_are_folded_with_eagers_rounding(check):
    def f(x):
        half = torch.full((3,), 0.1, dtype=torch.bfloat16) * 3
        return x + half + (torch.ones(3) / 0 - torch.ones(3) / 0)

    graph = run_graph_passes(trace(f, torch.randn(3)), LowerOptions())
    assert count(graph, aten.mul.Tensor) == 0 and count(graph, aten.div.Tensor) == 0
    check(f, torch.randn(3))


def test_equal_calls_are_computed_once_but_two_outputs_stay_two():
    graph = run_graph_passes(trace(lambda x: (x.exp() + 1, x.exp() * 2), torch.ones(3)), LowerOptions())
    assert count(graph, aten.exp.default) == 1
    x = torch.ones(3)
    a, b = compile_graph(trace(lambda x: (x.exp(), x.exp()), x))([x])
    assert a.data_ptr() != b.data_ptr() and torch.equal(a, b)


def test_calls_that_differ_in_type_of_a_number_are_not_equal():
    graph = trace(lambda x: (x + 1, x + 1.0, x + True), torch.ones(3, dtype=torch.int64))
    compiled = compile_graph(graph)
    assert [t.dtype for t in compiled([torch.ones(3, dtype=torch.int64)])] == [torch.int64, torch.float32, torch.int64]


def test_passes_leave_the_callers_graph_alone():
    graph = trace(lambda x: x.view(3).clone() + x.clone(), torch.ones(3))
    before = graph.code
    run_graph_passes(graph, LowerOptions())
    assert graph.code == before


def test_a_pass_can_be_disabled_and_fuel_limits_rewrites():
    graph = trace(lambda x: x.exp() + x.exp() * x.exp(), torch.ones(3))
    everything = count(run_graph_passes(graph, LowerOptions(disable=("common-subexpressions",))), aten.exp.default)
    assert everything == 3
    assert count(run_graph_passes(graph, LowerOptions(fuel=1)), aten.exp.default) == 2
    assert count(run_graph_passes(graph, LowerOptions()), aten.exp.default) == 1


def test_an_order_that_breaks_a_constraint_is_refused():
    check_order(GRAPH_PASSES)
    with pytest.raises(ValueError, match="must come after"):
        check_order(tuple(reversed(GRAPH_PASSES)))
    with pytest.raises(ValueError):
        check_order((*GRAPH_PASSES, Pass("remove-noops", lambda graph, ctx: graph, why="")))


@pytest.mark.parametrize("rest", [lambda length: length / 7, lambda length: 0], ids=["with a quotient", "alone"])
def test_a_float_of_sizes_that_kernels_cannot_compute_is_computed_outside_of_them(rest):
    def f(x):
        length = torch.sym_float(x.shape[0])
        return [x * torch._sym_sin(length) + rest(length)]

    compiled = compile_graph(make_fx(f, tracing_mode="symbolic")(torch.ones(5)))
    for n in (5, 9):
        torch.testing.assert_close(list(compiled([torch.ones(n)])), f(torch.ones(n)))


def test_a_float_that_a_tensor_holds_is_read_by_the_kernel():
    def f(x, s):
        scale = s.item()
        return x * scale + scale / 2

    s = torch.tensor(3.0, dtype=torch.float64)
    compiled = compile_graph(make_fx(f, tracing_mode="symbolic")(torch.ones(5), s))
    assert not compiled.report().externs
    for value in (3.0, -0.25):
        torch.testing.assert_close(compiled([torch.ones(5), s * 0 + value])[0], f(torch.ones(5), s * 0 + value))


def test_public_names_are_documented():
    for name in aotkit_inductor_lower.__all__:
        assert name.startswith("__") or getattr(aotkit_inductor_lower, name).__doc__


def test_an_op_that_counts_from_the_start_of_the_storage_gets_a_storage_of_its_own():
    def f(x):
        doubled, zeros = x * 2, aten.new_zeros(x, [12])
        scattered = aten.as_strided_scatter(zeros, (x * 3).t(), [2, 6], [1, 2], 0)
        return aten.as_strided_scatter(doubled, doubled[:1] * 0, [1, 2], [2, 1], 4) + scattered.view(6, 2)

    x = torch.randn(6, 2)
    graph = trace(f, x)
    torch.testing.assert_close(compile_graph(graph)([x])[0], graph(x))


def test_a_flip_of_a_scalar_is_the_scalar():
    graph = trace(lambda x: aten.flip(x, [0]) + 1, torch.tensor(2.0))
    assert compile_graph(graph)([torch.tensor(2.0)])[0].item() == 3


@pytest.mark.parametrize("fuel", [None, 0, 3, 9])
def test_the_two_halves_of_a_compile_make_what_the_whole_makes(fuel):
    def f(x, w):
        h = F.layer_norm(F.gelu(x @ w), (8,))
        return h.softmax(-1), h.sum(0), x.sin() + x.cos()

    graph, options = trace(f, torch.randn(5, 8), torch.randn(8, 8)), LowerOptions(fuel=fuel)
    whole = aotkit_inductor_lower.compile_to_program(graph, options=options)
    half = schedule_graph(graph, options)
    assert half.program == whole.scheduled and half.records == whole.records and half.report == whole.report
    assert generate_program(half, options) == whole.program


def test_a_graph_in_pieces_has_no_loops_as_a_whole():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    graph = make_fx(f, tracing_mode="real")(torch.ones(3))
    with pytest.raises(aotkit_inductor_lower.errors.UnsupportedGraphError, match=r"in pieces.*cond"):
        schedule_graph(graph)


def test_a_result_of_another_type_than_the_graph_promises_is_refused() -> None:
    """Whoever reads it is compiled for the promised type: float32 would be read where bfloat16 was written."""
    graph = make_fx(lambda x: torch.ops.aten.var_mean.correction(x, [0]), tracing_mode="fake")(torch.ones(4, 3))
    (both,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction)
    both.meta["val"] = tuple(value.to(torch.bfloat16) for value in both.meta["val"])  # a pass that is wrong
    message = "returns it as float32, and it is computed as bfloat16"
    with pytest.raises(aotkit_inductor_lower.errors.UnsupportedGraphError, match=message):
        compile_graph(graph)
