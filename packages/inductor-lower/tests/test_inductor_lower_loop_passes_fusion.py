"""Fusion: how many kernels common shapes of code take, what is refused and why, and that it stays near linear."""

from __future__ import annotations

import time

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    compile_graph,
    decompositions,
    interpret_program,
    lower_graph,
    schedule_program,
)
from aotkit_inductor_lower.analysis.alignment import align_digits
from aotkit_inductor_lower.ir import BufferKind, ExternCall, Load, LoopNest, Store
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.symbolic import SymbolKind, sym, to_expr

F = torch.nn.functional
aten = torch.ops.aten


def scheduled(f, *args, options=None):
    graph = make_fx(lambda *given: f(*given), tracing_mode="fake")(*args)
    return schedule_program(lower_graph(graph), options)


def nests(program):
    return [step for step in program.steps if isinstance(step, LoopNest)]


@pytest.mark.covers("F5h.1")
def test_bias_and_gelu_are_one_kernel(check):
    assert check(lambda x, b: F.gelu(x + b), torch.randn(32, 48), torch.randn(48)).kernels == 1


@pytest.mark.covers("F5h.1")
def test_a_chain_of_thirty_ops_is_one_kernel_without_temporaries(check):
    def chain(x):
        for k in range(30):
            x = x.sin() * 0.9 + k / 100
        return x

    result = check(chain, torch.randn(100), tolerance=1e-5)
    assert result.kernels == 1
    assert all(b.kind is not BufferKind.TEMPORARY for b in result.compiled.program.buffers)


@pytest.mark.covers("F5h.2")
def test_results_that_share_inputs_share_a_kernel(check):
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    assert check(lambda x, y: (x.exp() + y, x * y), x, y).kernels == 1


@pytest.mark.covers("F5h.3")
@pytest.mark.parametrize(
    ("f", "kernels"),
    [
        (lambda x, y: F.layer_norm(F.gelu(x) + y, (32,)), 1),
        (lambda x, y: (x + y, F.layer_norm(x + y, (32,))), 1),
        (lambda x, y: F.gelu(F.layer_norm(x, (32,))) * y, 1),
        (lambda x, y: (x * y).softmax(-1) * 2, 1),
        (lambda x, y: (x.sum(1), x.amax(1), (x * y).mean(1)), 1),
        (lambda x, y: x / x.norm(dim=-1, keepdim=True), 1),
        (lambda x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * y, 1),
        (lambda x, y: ((x - y) ** 2).mean(), 1),
    ],
)
def test_rows_are_fused_with_what_comes_before_and_after(check, f, kernels):
    assert check(f, torch.randn(64, 32), torch.randn(64, 32), tolerance=1e-5).kernels == kernels


def test_rows_agree_through_reshapes(check):
    def f(x, y):
        flat = (x + y).view(24, 32)
        return F.layer_norm(flat, (32,)).view(4, 6, 32) + x, (x + y).view(4, 6, 4, 8)

    assert check(f, torch.randn(4, 6, 32), torch.randn(4, 6, 32)).kernels == 1


@pytest.mark.covers("F5h.12")
def test_a_transposed_reader_takes_its_producer_with_it(check):
    assert check(lambda x: (x * 2 + 1).t().contiguous(), torch.randn(40, 30)).kernels == 1


@pytest.mark.covers("F5h.5")
def test_a_column_reduction_takes_its_elementwise_producer(check):
    assert check(lambda g, x: (g * (x > 0)).sum(0), torch.randn(50, 24), torch.randn(50, 24)).kernels == 1


def test_rows_and_columns_are_not_forced_together():
    program, records = scheduled(lambda x: (x.exp().sum(0), x.exp().sum(1)), torch.randn(64, 64))
    assert len(nests(program)) == 2
    assert any(not r.fused and r.reason for r in records)


def test_a_softmax_keeps_its_exponentials_for_one_row_only():
    program, _ = scheduled(lambda x: x.softmax(-1), torch.randn(64, 128))
    (row,) = [b for b in program.buffers if b.kind is BufferKind.SCRATCH]
    assert [size.constant for size in row.sizes] == [128]
    assert sum(i.op == "exp" for s in nests(program)[0].stages for i in s.body if hasattr(i, "op")) == 1


def test_what_is_kept_for_one_row_has_one_dimension_for_each_loop_whatever_the_strides_are_sums_of():
    """A channel's stride of ``(h + 7) * (w + 3)`` is four terms, each of which was a dimension of its own: memory for
    the fourth power of the channels, which no machine has."""

    def padded(x):
        return F.pad(x, (1, 2, 3, 4)).softmax(1)

    x = torch.randn(2, 600, 4, 6)
    graph = make_fx(padded, tracing_mode="symbolic")(x)
    program, _ = schedule_program(lower_graph(graph))
    assert [len(b.sizes) for b in program.buffers if b.kind is BufferKind.SCRATCH] == [1]
    torch.testing.assert_close(compile_graph(graph)([x])[0], padded(x))


@pytest.mark.parametrize("f", [
    lambda x: F.layer_norm(F.pad(x, (1, 0)).relu(), (x.shape[2] + 1,)),
    lambda x: torch.cat([x, x[:, :1]], 1).cos().sum(2).softmax(1),
], ids=["pad", "cat"])  # fmt: skip
def test_rows_whose_length_is_a_sum_are_fused_like_others(f):
    """A stride of ``h + 1`` is two terms, each of which was taken for a weight of its own."""
    x = torch.randn(4, 5, 7)
    known, unknown = (compile_graph(make_fx(f, tracing_mode=mode)(x)) for mode in ("fake", "symbolic"))
    assert unknown.report().kernel_count == known.report().kernel_count
    for sizes in ((4, 5, 7), (3, 2, 9), (2, 33, 3)):
        other = torch.randn(sizes)
        torch.testing.assert_close(unknown([other])[0], f(other))


def test_a_value_that_an_aten_call_needs_is_stored_and_still_fused():
    def f(x, w):
        h = x.exp() + 1
        return h @ w, F.layer_norm(h, (32,))

    program, _ = scheduled(f, torch.randn(64, 32), torch.randn(32, 8))
    assert len(nests(program)) == 1


def test_an_aten_call_between_two_kernels_keeps_them_apart(check):
    def f(x, w):
        h = x.exp()
        return (h @ w) + h

    result = check(f, torch.randn(8, 8), torch.randn(8, 8), tolerance=1e-4, aten=("mm",))
    assert result.kernels == 2


def test_kernels_do_not_wait_for_each_other(check):
    """a -> mm -> c and a -> c: fusing a with c would need the product before it is computed."""

    def f(x, w):
        a = x.sin()
        b = torch.mm(a, w)
        return a + b.cos(), torch.mm(b.cos(), a) * a

    check(f, torch.randn(16, 16), torch.randn(16, 16), tolerance=1e-4, aten=("mm",))


def test_a_dear_value_is_not_computed_again_for_every_reader():
    def f(x):
        e = x.exp().tanh()
        return e[:, None, :] + torch.ones(1, 50, 1), e.sum()

    program, _ = scheduled(f, torch.randn(20, 30))
    work = [i for n in nests(program) for s in n.stages for i in s.body if getattr(i, "op", "") == "exp"]
    assert len(work) == 1


@pytest.mark.covers("F5c.4")
def test_a_diamond_of_depth_fourteen_stays_linear(check):
    def diamond(x):
        for _ in range(14):
            x = x.sin() + x.cos()
        return x

    result = check(diamond, torch.randn(100), tolerance=1e-4)
    size = sum(len(s.body) for n in nests(result.compiled.program) for s in n.stages)
    assert result.kernels == 1 and size < 150


def test_a_diamond_through_reversals_does_not_explode():
    def diamond(x):
        for _ in range(14):
            x = x.sin() + x.flip(0).cos()
        return x

    program, _ = scheduled(diamond, torch.randn(100))
    assert sum(len(s.body) for n in nests(program) for s in n.stages) < 1500


def test_a_kernel_is_bounded_in_size():
    def long(x):
        for k in range(60):
            x = x.sin() + k
        return x

    program, records = scheduled(long, torch.randn(100), options=LowerOptions(max_fusion_instructions=40))
    assert len(nests(program)) > 1
    assert any("too large" in r.reason for r in records)


def test_big_graphs_are_scheduled_in_near_linear_time():
    def layers(count):
        def f(x, y):
            for _ in range(count):
                h = F.gelu(x * y + 1)
                x = F.layer_norm(h + x, (32,))
            return x

        graph = make_fx(f, tracing_mode="fake")(torch.randn(8, 32), torch.randn(8, 32))
        program = lower_graph(graph)
        begin = time.process_time()
        schedule_program(program)
        return time.process_time() - begin

    small, large = layers(20), layers(160)
    assert large < 8 * small * 3 + 0.5


@pytest.mark.covers("F5c.7")
def test_every_refusal_has_a_reason_that_prints():
    _, records = scheduled(lambda x: (x.exp().sum(0), x.exp().sum(1)), torch.randn(64, 64))
    assert records and all(r.reason for r in records)
    assert any("kept apart" in str(r) for r in records)


def test_without_fuel_nothing_is_fused():
    _, records = scheduled(lambda x: (x + 1).softmax(-1) * 2, torch.randn(64, 64), options=LowerOptions(fuel=0))
    assert not any(r.fused and r.kind != "inline" for r in records)


def test_fusion_can_be_turned_off(check):
    x = torch.randn(6, 8)
    graph = make_fx(lambda x: (x + 1).softmax(-1) * 2, tracing_mode="fake")(x)
    compiled = compile_graph(graph, options=LowerOptions(fuse=False))
    assert compiled.report().kernel_count == 3
    torch.testing.assert_close(compiled([x])[0], (x + 1).softmax(-1) * 2)


def test_dead_stores_and_dead_nodes_are_gone():
    program, _ = scheduled(
        lambda x: (aten.native_layer_norm(x, [8], None, None, 1e-5)[0], x.logcumsumexp(0))[0], torch.randn(9, 8)
    )
    assert not [s for s in program.steps if isinstance(s, ExternCall)]
    stored = {i.buffer for n in nests(program) for s in n.stages for i in s.body if isinstance(i, Store)}
    assert len(stored) == 1


def test_loads_inlined_under_a_mask_read_nothing_outside(check):
    result = check(lambda x: F.pad(x.exp() * 2, (3, 1)) + 1, torch.randn(4, 5))
    assert result.kernels == 1
    loads = [i for n in nests(result.compiled.program) for s in n.stages for i in s.body if isinstance(i, Load)]
    assert loads and all(i.mask for i in loads)


def test_the_norm_of_a_pooling_is_computed_before_its_windows(check):
    def f(x, mean, scale, bias):
        y = (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
        return F.avg_pool2d(y.relu(), 3, 2, 1)

    bias = torch.tensor([0.5, -1.0, float("inf")])
    result = check(f, torch.randn(2, 3, 9, 9), torch.randn(3), torch.rand(3) + 0.5, bias)
    assert result.kernels == 1
    loads = [i for n in nests(result.compiled.program) for s in n.stages for i in s.body if isinstance(i, Load)]
    assert sorted(i.mask is not None for i in loads) == [False, False, False, True]


def test_what_is_added_up_in_memory_is_read_back_from_there():
    program = parse_program("""aotkit-ir 2
program added
input x
buffer x : float64[4] strides [1] input on cpu
buffer s : float64[4] strides [1] output on cpu
buffer o : float64[4] strides [1] output on cpu
loop ones(i0 < 4):
  stage():
    %z = const 1.0 : f64
    store s[i0] = %z
loop sums(i0 < 4):
  stage():
    %a = load x[i0] : f64
    store s[i0] += %a
    %b = load s[i0] : f64
    store o[i0] = %b
return s, o
""")
    scheduled, _ = schedule_program(program, LowerOptions(verify=True))
    x = torch.arange(4.0, dtype=torch.float64)
    for got in interpret_program(scheduled, [x]):
        assert torch.equal(got, x + 1)


def test_masks_within_masks_hold_both_borders(check):
    f = lambda x: F.pad(F.pad(x, (1, 2), value=2.0) * 3, (2, 1), value=5.0)
    assert check(f, torch.randn(4, 5)).kernels == 1
    assert check(f, torch.randn(4, 5).bfloat16()).kernels == 1


def test_group_norm_statistics_read_by_channel_agree_with_their_groups(check):
    def f(x, w):
        g = x.view(2, 4, 30)
        mean = g.mean(-1, keepdim=True)
        rstd = torch.rsqrt(((g - mean) ** 2).mean(-1, keepdim=True) + 1e-5)
        return ((g - mean) * rstd).view(2, 8, 15) * w[:, None]

    assert check(f, torch.randn(2, 8, 15), torch.randn(8)).kernels == 1


@pytest.mark.covers("F5h.3")
def test_a_loss_over_classes_reads_the_logits_without_a_copy_of_their_size():
    logits, target = torch.randn(64, 100), torch.randint(100, (64,))
    graph = make_fx(lambda x, t: F.cross_entropy(x, t), decompositions(), tracing_mode="fake")(logits, target)
    program, _ = schedule_program(lower_graph(graph))
    assert len(nests(program)) == 2
    sizes = [b.sizes for b in program.buffers if b.kind is BufferKind.TEMPORARY]
    assert sizes and all(len(s) == 2 and s[1] == 1 for s in sizes)  # one number per row
    torch.testing.assert_close(compile_graph(graph)([logits, target])[0], F.cross_entropy(logits, target))


def test_log_softmax_in_parts_is_one_kernel_again():
    graph = make_fx(lambda x: F.log_softmax(x, -1), decompositions(), tracing_mode="fake")(torch.randn(64, 100))
    assert len(nests(schedule_program(lower_graph(graph))[0])) == 1


ROWS = sym("s0", SymbolKind.SIZE)


@pytest.mark.parametrize(
    ("whole", "parts", "split"),
    [
        ([("i", 12)], [("b", 4), ("a", 3)], [3, 4]),
        ([("i", 4 * ROWS)], [("b", 4), ("a", ROWS)], [ROWS, 4]),
        ([("i", ROWS * 4)], [("b", ROWS), ("a", 4)], [4, ROWS]),
        ([("i", 12)], [("b", 5), ("a", 3)], None),
        ([("j", 3), ("i", 0)], [("b", 6), ("a", 0)], None),  # of no elements
        ([("i", 0)], [("b", 4), ("a", 0)], None),
    ],
)
def test_a_loop_is_split_into_those_of_another_nest_where_they_divide_it(whole, parts, split):
    first, second = ([(name, to_expr(size)) for name, size in digits] for digits in (whole, parts))
    for found in (align_digits(first, second, ["k0", "k1"]), align_digits(second, first, ["k0", "k1"])):
        loops = None if found is None else {**found.first, **found.second}["i"]
        assert (loops if loops is None else [loop.size for loop in loops]) == split
