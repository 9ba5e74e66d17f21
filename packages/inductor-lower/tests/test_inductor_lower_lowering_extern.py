"""ATen calls: exact strides of arguments, order of random ops, mutation, refusals with reasons."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, lower_graph, schedule_program
from aotkit_inductor_lower.errors import FakeKernelError, UnsupportedGraphError
from aotkit_inductor_lower.ir import ExternCall
from aotkit_inductor_lower.launch_plan.layout import Layout
from aotkit_inductor_lower.runtime.externs import conform

aten = torch.ops.aten


def names(compiled):
    """What is left to ATen."""
    return {call.target.split(".")[1] for call in compiled.report().externs}


@pytest.mark.covers("F5c.2")
def test_an_op_without_a_rule_becomes_an_aten_call_with_a_reason(check):
    result = check(lambda x: torch.logcumsumexp(x + 1, 0) * 2, torch.randn(4, 5), aten=("logcumsumexp",))
    (extern,) = result.compiled.report().externs
    assert extern.target == "aten.logcumsumexp.default" and extern.reason


@pytest.mark.parametrize("captured, called", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_calls_make_floats_of_integers_in_the_default_type_of_the_capture(captured, called):
    """As a backward does that runs under another default type than its forward."""

    def f(n):
        special = torch.special
        return special.zeta(n + 1, n), special.airy_ai(n.flip(0)), torch.polygamma(2, n), special.zeta(2.5, n), n * 2j

    n = torch.arange(1, 5)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(captured)
        want, compiled = f(n), compile_graph(make_fx(f, tracing_mode="fake")(n))
        torch.set_default_dtype(called)
        found = compiled([n])
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(tuple(found), want, rtol=0, atol=0)


def test_library_ops_keep_their_reason(check):
    result = check(lambda a, b: (a @ b).relu(), torch.randn(4, 5), torch.randn(5, 6), tolerance=1e-5, aten=("mm",))
    assert "matrix products" in result.compiled.report().externs[0].reason


def test_several_results_and_list_arguments_pass_through_calls(check):
    def f(x):
        q, r = torch.linalg.qr(x * 2)
        pair = torch.cat([torch.complex(x, x), torch.complex(x + 1, x)], 1)
        return q.abs(), r.abs() + 1, torch.view_as_real(pair), torch.einsum("ij,kj->ik", x, x)

    check(f, torch.randn(4, 6), tolerance=1e-5, aten=("linalg_qr", "complex", "cat", "view_as_real", "mm"))


def test_complex_and_other_types_are_left_to_aten(check):
    left = ("complex", "mul", "view_as_real")
    result = check(lambda x: torch.view_as_real(torch.complex(x, x) * 2) + 1, torch.randn(5), aten=left)
    assert any("complex" in e.reason for e in result.compiled.report().externs)


@pytest.mark.covers("F5c.11")
def test_random_calls_keep_their_order_and_draw_eagers_numbers():
    def f(x):
        a = torch.rand_like(x)
        b = torch.bernoulli(torch.full_like(x, 0.5))
        return a * 2 + b, torch.randn_like(x).exp(), torch.rand_like(x) + a

    x = torch.randn(50)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x))
    assert names(compiled) == {"rand_like", "bernoulli", "randn_like"} and compiled.report().kernel_count
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    got = compiled([x])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_dropout_is_a_random_call_and_the_rest_a_kernel():
    def f(x):
        return torch.nn.functional.dropout(x + 1, 0.3, training=True) * 2

    x = torch.randn(64)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x))
    assert names(compiled) == {"bernoulli_", "div_"} and compiled.report().kernel_count
    torch.manual_seed(1)
    want = f(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled([x])[0], want)


def test_equal_random_calls_are_not_merged():
    compiled = compile_graph(
        make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x), tracing_mode="fake")(torch.ones(99))
    )
    assert compiled([torch.ones(99)])[0].abs().sum() > 0


def test_a_copy_into_an_input_writes_it_after_all_reads():
    def f(x, y):
        old = x * 2
        new = x + y
        aten.copy_.default(x, new)
        return old + 1, new.exp()

    x, y = torch.randn(4, 5), torch.randn(4, 5)
    want_x, compiled = x.clone(), compile_graph(make_fx(f, tracing_mode="fake")(x.clone(), y))
    assert not names(compiled)
    want = f(want_x, y)
    got_x = x.clone()
    got = compiled([got_x, y])
    torch.testing.assert_close(got_x, want_x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_an_input_overwritten_by_its_own_reversal_is_read_first():
    def f(x):
        aten.copy_.default(x, x.flip(0))
        return x + 0

    x = torch.randn(4, 4)
    want, compiled = x.clone(), compile_graph(make_fx(f, tracing_mode="fake")(x.clone()))
    assert not names(compiled)
    (wanted,) = (f(want),)
    got = x.clone()
    torch.testing.assert_close(compiled([got])[0], wanted)
    torch.testing.assert_close(got, want)


def test_a_mutating_op_of_a_temporary_is_called_in_order(check):
    def f(x):
        y = x * 2
        before = y + 1
        y.index_fill_(0, torch.tensor([1]), 5.0)
        return before, y * 3

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (x, 2))
    before = graph.call_function(aten.add.Tensor, (y, 1))
    i = graph.call_function(aten.arange.default, (1,), {"device": torch.device("cpu"), "pin_memory": False})
    written = graph.call_function(aten.index_fill_.int_Scalar, (y, 0, i, 5.0))
    graph.output(
        (before, graph.call_function(aten.mul.Tensor, (written, 3)), graph.call_function(aten.add.Tensor, (y, 0)))
    )
    module = torch.fx.GraphModule({}, graph)
    value = torch.randn(3, 2)
    compiled = compile_graph(module, [value])
    assert names(compiled) == {"index_fill_"} and compiled.report().kernel_count
    got = compiled([value])
    for g, w in zip(got, module(value), strict=True):
        torch.testing.assert_close(g, w)


def test_data_dependent_sizes_are_refused_with_a_reason():
    graph = make_fx(lambda x: x[x > 0] * 2, tracing_mode="symbolic")(torch.randn(5))
    with pytest.raises(UnsupportedGraphError, match="depends on data"):
        lower_graph(graph)


def test_dead_calls_are_dropped_and_random_ones_kept():
    unused = lambda x: (torch.logcumsumexp(x, 0), torch.rand_like(x), x + 1)[2]
    graph = make_fx(unused, tracing_mode="fake")(torch.ones(3))
    program, _ = schedule_program(lower_graph(graph))
    assert [s.target for s in program.steps if isinstance(s, ExternCall)] in ([], ["aten.rand_like.default"])


def test_the_users_line_is_kept():
    def f(x):
        return torch.logcumsumexp(x.exp(), 0)

    graph = make_fx(f, tracing_mode="fake", record_stack_traces=True)(torch.ones(3))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["stack_trace"] = '  File "model.py", line 12, in f\n    return torch.logcumsumexp(x.exp(), 0)\n'
    program = lower_graph(graph)
    assert [isinstance(step, ExternCall) for step in program.steps] == [False, True]
    assert {step.origin.line for step in program.steps} == {"model.py:12: return torch.logcumsumexp(x.exp(), 0)"}


@pytest.fixture
def attention():
    """An attention kernel on the CPU that returns more than its fake kernel says, as some on CUDA do."""
    seen = []

    def forward(query, key, value, bias, lse, dropout_p=0.0, is_causal=False, *, scale=None):
        seen.append((torch.ones(*query.shape[:3], 1), torch.full((2,), 7), torch.zeros(1)))
        return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value, *seen[-1]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    yield seen
    library._destroy()


def test_what_only_an_attention_s_backward_reads_may_have_another_shape_than_the_fake_kernel_said(attention):
    def f(q, k, v):
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q + 1, k, v, None, True)
        return out * 2, lse, seed, offset

    args = [torch.randn(2, 3, 8, 4) for _ in range(3)]
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(*args))
    got, (want, *_) = compiled(list(args)), f(*args)
    torch.testing.assert_close(got[0], want)
    assert all(ours is theirs for ours, theirs in zip(got[1:], attention[0], strict=True))


def test_where_a_kernel_reads_it_another_shape_is_an_error(attention):
    def f(q, k, v):
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[1] * 2

    args = [torch.randn(2, 3, 8, 4) for _ in range(3)]
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(*args))
    with pytest.raises(FakeKernelError, match=r"of shape \(2, 3, 8, 1\) where its fake kernel said"):
        compiled(list(args))


def test_a_result_of_another_shape_than_the_fake_kernel_said_is_an_error_of_its_own():
    with pytest.raises(FakeKernelError, match=r"shape \(0,\) where its fake kernel said \(\)"):
        conform(torch.empty(0), (), (), torch.float32)
    for given, told in (torch.float32, torch.int64), (torch.complex64, torch.float32):
        with pytest.raises(FakeKernelError, match=f"result of {given} where its fake kernel said {told}"):
            conform(torch.ones(2, dtype=given), (2,), (1,), told)
        assert conform(torch.ones(2, dtype=told), (2,), (1,), given).dtype is given
    with pytest.raises(FakeKernelError, match="int64 tensor of shape"):
        Layout.of(torch.empty(2)).conform(torch.empty(2, dtype=torch.int64))


@pytest.fixture(scope="module")
def shorter():
    """Operators whose results are shorter than their fake kernels say: by a known size, and behind an unknown one."""
    library = torch.library.Library("lowering_extern", "DEF")
    library.define("half(Tensor x) -> Tensor")
    library.define("some(Tensor x) -> Tensor")
    library.impl("half", lambda x: x[: len(x) // 2].clone(), "CPU")
    library.impl("some", lambda x: x[x[:, 0] > 0, :2].clone(), "CPU")
    torch.library.register_fake("lowering_extern::half", torch.empty_like, lib=library)

    def some(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(), 4)

    torch.library.register_fake("lowering_extern::some", some, lib=library)
    yield torch.ops.lowering_extern
    library._destroy()


@pytest.mark.parametrize("name", ["half", "some"])
def test_no_kernel_reads_behind_a_result_that_is_shorter_than_its_fake_kernel_said(shorter, name):
    """Strides are as said, so it was read as far as that."""
    x = torch.ones(8, 4)
    graph = make_fx(lambda x: getattr(shorter, name)(x).sin() * 2, tracing_mode="symbolic")(x)
    with pytest.raises(FakeKernelError, match="where its fake kernel said"):
        compile_graph(graph)([x])


def test_the_copy_of_a_tensor_that_overlaps_itself_may_do_so_too():
    x, part = torch.ones(40).as_strided((2, 5, 2), (15, 1, 1)), torch.zeros(2, 2)
    graph = make_fx(lambda x, part: torch.select_scatter(x, part, 1, -5), tracing_mode="fake")(x, part)
    (found,), wanted = compile_graph(graph)([x, part]), torch.select_scatter(x, part, 1, -5)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()


@pytest.fixture(scope="module")
def several():
    """An operator that gives a list of tensors between two tensors."""
    library = torch.library.Library("lowering_extern_lists", "DEF")
    library.define("several(Tensor x, int n) -> (Tensor, Tensor[], Tensor)")
    library.impl("several", lambda x, n: (x + 1, [(x * k).T.contiguous() for k in range(n)], x.sum(0)), "CPU")

    def fake(x, n):
        return torch.empty_like(x), [x.new_empty(x.shape[::-1]) for _ in range(n)], x.new_empty(x.shape[1:])

    torch.library.register_fake("lowering_extern_lists::several", fake, lib=library)
    yield torch.ops.lowering_extern_lists.several
    library._destroy()


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("processor", ["host", "interpreter"])
def test_a_list_among_the_results_of_a_call_is_taken_apart(several, n, processor):
    def f(x):
        first, between, last = several(x * 2, n)
        return [first.sin(), last + 1, *(part.cos() for part in between[:2]), *between[2:]]

    graph = make_fx(f, tracing_mode="symbolic")(torch.ones(3, 4))
    compiled = compile_graph(graph, options=LowerOptions(processor=processor))
    for x in (torch.randn(3, 4), torch.randn(5, 2)):
        torch.testing.assert_close(compiled([x]), f(x))


@pytest.mark.parametrize("weights", [True, False])
def test_attention_may_have_no_weights(weights: bool) -> None:
    """Of which torch's fake kernel makes an empty tensor, and ATen ``None``."""
    module = torch.nn.MultiheadAttention(4, 2).requires_grad_(False)
    held = [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]

    def f(x: torch.Tensor, *held: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten._native_multi_head_attention(x, x, x, 4, 2, *held, None, weights)[0].sin()]

    args = [torch.randn(2, 3, 4), *held]
    (want,) = f(*args)
    (got,) = compile_graph(make_fx(f, tracing_mode="fake")(*args))(list(args))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [None, torch.int64, torch.float64])
def test_a_range_between_bools(dtype: torch.dtype | None) -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + torch.linspace(False, True, 5, dtype=dtype)]

    x = torch.randn(5)
    (got,) = compile_graph(make_fx(f, tracing_mode="fake")(x))([x])
    torch.testing.assert_close(got, f(x)[0])
