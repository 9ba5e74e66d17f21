"""Rewrites of the graph before lowering: what becomes of the nodes, and that no bit of a result changes.

The exception are products that become another library call: libraries add in an order of their own for each call.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.driver import GRAPH_PASSES, run_graph_passes
from aotkit_inductor_lower.graph_passes.patterns import Rewrite, apply_rewrites, find_match

aten = torch.ops.aten
prims = torch.ops.prims
ODD = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, 3e38, -7.25]


def odd(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers with every special value among them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[: len(ODD)] = torch.tensor(ODD[: x.numel()])
    return x


def trace(f, *args):
    return make_fx(lambda *given: f(*given), tracing_mode="fake")(*args)


def bits(t: torch.Tensor) -> torch.Tensor:
    """What tells any two values apart, but not one NaN from another."""
    if not t.is_floating_point():
        return t
    t = torch.where(t.isnan(), math.nan, t.double())
    return t.contiguous().view(torch.int64)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(bits(got), bits(want))


def rewritten(f, *args, same=same_bits) -> list[str]:
    """The names of the operators left, once the graph with all passes was found to give the bits of the one without."""
    graph = trace(f, *args)
    passed = run_graph_passes(graph, LowerOptions())
    for got, other, want in zip(passed(*args), compile_graph(graph)(list(args)), graph(*args), strict=True):
        for found in (got, other):
            assert (found.dtype, found.shape, found.stride()) == (want.dtype, want.shape, want.stride())
            same(found, want)
    calls = (node for node in passed.graph.nodes if node.op == "call_function")
    return [node.target._schema.name.split("::")[1] if hasattr(node.target, "_schema") else "getitem" for node in calls]


def product_of(a: torch.Tensor, b: torch.Tensor):
    """A comparison with the product in float64: within the bound that holds for every order of adding the terms."""
    exact = (a.double() @ b.double()).to(a.dtype).double()  # too large for the type is infinite
    # One rounding for each term and each sum.
    bound = a.shape[-1] * torch.finfo(a.dtype).eps * (a.double().abs() @ b.double().abs())

    def check(found: torch.Tensor, want: torch.Tensor) -> None:
        for each in (found, want):
            off = (each.double() - exact).abs()
            assert ((off <= bound) | (each.double() == exact) | (each.isnan() & exact.isnan())).all()

    return check


X = odd(4, 6)
ROWS = [
    ("F5f.17", "views", lambda x: (x.view(6, 4).view(2, 12) + 1,), ["view", "add"]),
    ("F5f.17", "permutations", lambda x: (aten.permute(aten.permute(x, [1, 0]), [-1, 0]) * 2,), ["mul"]),
    ("F5f.17", "transposes", lambda x: (aten.t(aten.t(x)) * 2,), ["mul"]),
    ("F5f.17", "swaps", lambda x: (x.transpose(0, 1).transpose(0, 1) * 2,), ["mul"]),
    ("F5f.17", "added dimension", lambda x: (aten.squeeze.dim(aten.unsqueeze(x, 1), 1) * 2,), ["mul"]),
    ("F5f.17", "widened", lambda x: (x.double().float() * 2,), ["mul"]),
    ("F5f.17", "narrowed", lambda x: (x.bfloat16().float() * 2,), ["_to_copy", "_to_copy", "mul"]),
    ("F5f.17", "half to half", lambda x: (x.half().bfloat16().float() * 2,), ["_to_copy"] * 3 + ["mul"]),
    (
        "F5f.17",
        "primitive",
        lambda x: (prims.convert_element_type(prims.convert_element_type(x, torch.float64), torch.float32) * 2,),
        ["mul"],
    ),
    ("F5f.15", "power", lambda x: (x.pow(1) * 2,), ["mul"]),
    ("F5f.15", "factor", lambda x: (x * 1.0 * 2,), ["mul"]),
    ("F5f.15", "sum with zero stays", lambda x: ((x + 0.0) * 2,), ["add", "mul"]),
    ("F5f.15", "rounding", lambda x: (x.isnan().long().ceil() * 2,), ["isnan", "_to_copy", "mul"]),
    ("F5f.15", "repeats", lambda x: (x.repeat(1, 1) * 2,), ["mul"]),
    ("F5f.15", "pads", lambda x: (aten.constant_pad_nd(x, [0, 0, 0, 0], 1.0) * 2,), ["mul"]),
    ("F5f.15", "overwritten", lambda x: (aten.slice_scatter(x, x * 3, 0, 0, 4) * 2,), ["mul", "mul"]),
    (
        "F5f.15",
        "partly overwritten",
        lambda x: (aten.slice_scatter(x, x[:2], 0, 0, 2) * 2,),
        ["slice", "slice_scatter", "mul"],
    ),
    ("F5f.15", "one part", lambda x: (torch.cat([x]) * 2,), ["mul"]),
    ("F5f.28", "running sum", lambda x: (torch.full((4, 6), 3).cumsum(1) + x,), None),
    ("F5f.28", "running sum of floats", lambda x: (torch.full((4, 6), 3.0).cumsum(0) + x,), None),
    ("F5f.28", "inexact running sum", lambda x: (torch.full((4, 6), 0.1).cumsum(0) + x,), ["full", "cumsum", "add"]),
    ("F5f.30", "maxima", lambda x: (x.amax((0, 1)), x.amax(1)), ["amax", "amax"]),
    ("F5f.27", "halves", lambda x: (torch.cat([x[:2], x[2:]]) * 2,), ["mul"]),
    ("F5f.27", "chunks", lambda x: (torch.cat(x.chunk(3, 1), 1) * 2,), ["mul"]),
    ("F5f.27", "sizes", lambda x: (torch.cat(x.split([1, 2, 3], 1), 1) * 2,), ["mul"]),
    ("F5f.27", "other order", lambda x: (torch.cat([x[2:], x[:2]]) * 2,), ["slice", "slice", "cat", "mul"]),
    ("F5f.27", "incomplete", lambda x: (torch.cat([x[:2], x[2:3]]) * 2,), ["slice", "slice", "cat", "mul"]),
    ("F5f.27", "a part of a cat", lambda x: (torch.cat([x, x * 3], 1)[:, 6:] * 2,), ["mul", "mul"]),
    ("F5f.27", "across parts", lambda x: (torch.cat([x, x * 3], 1)[:, 5:] * 2,), ["mul", "cat", "slice", "mul"]),
    ("F5f.3", "one split", lambda x: (x.split(4)[0] * 2,), ["mul"]),
    ("F5f.4", "nested cats", lambda x: (torch.cat([torch.cat([x, x * 2]), x * 3]) * 2,), ["mul", "mul", "cat", "mul"]),
    (
        "F5f.4",
        "cat of parts of a cat",
        lambda x: (torch.cat(torch.cat([x, x * 3]).split(4)) * 2,),
        ["mul", "cat", "mul"],
    ),
    ("F5f.5", "stack of entries", lambda x: (torch.stack(x.unbind(1), 1) * 2,), ["mul"]),
    ("F5f.5", "entries of a stack", lambda x: (torch.stack([x, x * 3]).unbind()[1] * 2,), ["mul", "mul"]),
    ("F5f.5", "an entry of a stack", lambda x: (torch.stack([x, x * 3], 2)[:, :, 0] * 2,), None),
]


@pytest.mark.covers(
    "F5b.1", "F5b.4", "F5b.8", "F5f.3", "F5f.4", "F5f.5", "F5f.15", "F5f.17", "F5f.27", "F5f.28", "F5f.30"
)
@pytest.mark.parametrize("f, want", [row[2:] for row in ROWS], ids=[" ".join(row[:2]) for row in ROWS])
def test_a_rewrite_leaves_these_operators_and_every_bit(f, want):
    left = rewritten(f, X)
    assert want is None or left == want


PAIRS = {
    "numbers": (torch.randn(1, 3, 4), torch.randn(1, 4, 5)),
    "special values": (odd(1, 9, 4), odd(1, 4, 5, seed=1).nan_to_num(1, 1, 1)),
    "many terms": (torch.randn(1, 7, 300), torch.randn(1, 300, 17)),
    "transposed": (torch.randn(1, 40, 7).mT, torch.randn(1, 17, 40).mT),
    "doubles": (torch.randn(1, 3, 40).double(), torch.randn(1, 40, 5).double()),
}


@pytest.mark.covers("F5f.18")
@pytest.mark.parametrize("a, b", PAIRS.values(), ids=list(PAIRS))
def test_a_batch_of_one_is_a_matrix_product(a, b):
    calls = rewritten(lambda a, b: (torch.bmm(a, b),), a, b, same=product_of(a, b))
    assert calls == ["squeeze", "squeeze", "mm", "unsqueeze"]


def test_a_batch_of_two_and_a_batch_of_any_size_stay_batches():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert rewritten(lambda a, b: (torch.bmm(a, b),), a, b, same=product_of(a, b)) == ["bmm"]
    graph = make_fx(lambda a, b: (torch.bmm(a, b),), tracing_mode="symbolic")(a, b)
    assert run_graph_passes(graph, LowerOptions()).graph.find_nodes(op="call_function", target=aten.bmm.default)


def test_a_running_sum_of_one_number_is_not_a_scan():
    assert "cumsum" not in rewritten(lambda x: (torch.full((4, 6), 3).cumsum(1) + x,), X)


def test_the_larger_maximum_reads_the_smaller():
    passed = run_graph_passes(trace(lambda x: (x.amax(1, keepdim=True), x.amax((0, 1))), X), LowerOptions())
    small, large = passed.graph.find_nodes(op="call_function", target=aten.amax.default)
    assert large.args[0] is small
    rewritten(lambda x: (x.amax(1, keepdim=True), x.amax((0, 1), keepdim=True)), X)
    rewritten(lambda x: (x.amin(0), x.amin((0, 1), keepdim=True), x.amin()), X)


def test_what_leaves_the_graph_is_memory_of_its_own():
    x = odd(4, 6)
    graph = trace(lambda x: (torch.cat([x[:2], x[2:]]), x.pow(1), torch.cat([x, x])[:4]), x)
    for result in compile_graph(graph)([x]):
        assert result.data_ptr() != x.data_ptr()


@pytest.mark.covers("F5f.15")
@pytest.mark.parametrize("kept", [lambda x: x.clone(), lambda x: x * 1, lambda x: x.clone().view(6, 4)[:6].view(4, 6)])
def test_a_value_kept_before_a_write_stays_what_it_was(kept):
    def f(x, y):
        old, halves, wide = kept(x), (x[:2] * 1, x[2:] * 1), x.double()
        x.copy_(y)
        y.copy_(old)
        return x + y, torch.cat(halves), wide.float() * 2

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    graph = make_fx(f, tracing_mode="fake")(x, y)
    want, got = (x.clone(), y.clone()), (x.clone(), y.clone())
    expected = f(*want)
    for a, b in zip([*compile_graph(graph)([*got]), *got], [*expected, *want], strict=True):
        assert torch.equal(a, b)


def test_storage_offsets_keep_the_copies_they_count_in():
    def f(x):
        part = torch.cat([x, x * 2])[4:]
        return (part + 1, torch.as_strided(torch.cat([x, x * 2])[4:], (3,), (1,), 1) * 2)

    rewritten(f, X)


def test_a_pattern_binds_by_name_in_either_order_and_wants_its_inside_unused():
    def pattern(x, y):
        return aten.mul.Tensor(aten.sin.default(x), y)

    graph = trace(lambda a, b: (b * a.sin(), (a.cos().sin() * 3) + 1), torch.ones(2), torch.ones(2))
    first, second = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    found = find_match(pattern, first)
    assert found is not None and [found["x"].name, found["y"].name] == ["arg0_1", "arg1_1"]
    found = find_match(pattern, second)
    assert found is not None and found["y"] == 3
    shared = trace(lambda a: (a.sin() * 2, a.sin()), torch.ones(2))
    run = run_graph_passes(shared, LowerOptions(disable=("common-subexpressions",)))
    assert find_match(pattern, next(iter(run.graph.find_nodes(op="call_function", target=aten.mul.Tensor)))) is not None
    merged = trace(lambda a: (lambda s: (s * 2, s + 1))(a.sin()), torch.ones(2))
    assert find_match(pattern, next(iter(merged.graph.find_nodes(op="call_function", target=aten.mul.Tensor)))) is None


def test_a_replacement_that_does_not_fit_leaves_the_graph_as_it_was():
    row = Rewrite(lambda x: aten.sin.default(x), lambda x: aten.sum.default(x))
    broken = Rewrite(lambda x: aten.sin.default(x), lambda x: aten.view.default(x, [99]))
    graph = trace(lambda x: (x.sin(),), torch.ones(2))
    before = str(graph.graph)
    assert apply_rewrites(graph.graph, [row, broken], 9) == 0 and str(graph.graph) == before


@pytest.mark.covers("F5b.14")
def test_every_pass_alone_gives_the_bits_of_no_pass():
    def f(x):
        parts = torch.cat([x.view(6, 4).view(4, 6)[:2], x[2:]]).double().float()
        full = torch.full((4, 6), 2.0) * 3
        return parts + full, x.exp() + x.exp(), x.amax(1), x.amax((0, 1)), x.clone().pow(1) - 1

    graph = trace(f, X)
    names = [each.name for each in GRAPH_PASSES if not each.required]
    want = graph(X)
    for name in names:
        others = tuple(other for other in names if other != name)
        passed = run_graph_passes(graph, LowerOptions(disable=others, verify=True))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(passed(X), want, strict=True)), name


def test_views_of_views_become_one_where_their_sizes_are_known_at_run_time_only():
    def f(x):
        return (x.view(x.shape[1], x.shape[0]).view(-1, 2) + 1,)

    x = torch.randn(4, 6)
    graph = make_fx(f, tracing_mode="symbolic")(x)
    passed = run_graph_passes(graph, LowerOptions())
    assert [node.target for node in passed.graph.nodes if "view" in str(node.target)] == [aten.view.default]
    compiled = compile_graph(graph)
    for given in (x, torch.randn(8, 3)):
        assert torch.equal(compiled([given])[0], f(given)[0])
