"""Writing by computed indices: every mode, collisions, negatives, errors, and what is fused around it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions, parse_program, print_program, schedule_program
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.lowering import lower_graph
from aotkit_inductor_lower.targets.cpu.machine import host_machine
from aotkit_inductor_lower.targets.cpu.map_loops import map_loops
from aotkit_inductor_lower.targets.cpu.render.kernel import emit_kernel

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)  # slices of these that are scaled and added stay with ATen
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]


def numbers(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(*shape) * 4).to(dtype)


@pytest.mark.covers("F5g.13")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_index_put_sets_and_adds_as_eager(check, dtype):
    x, rows = numbers(5, 7, dtype=dtype), torch.tensor([3, -1, 0])
    columns = torch.tensor([6, -7, 2])
    result = check(
        lambda x, r, c, v, w: (
            aten.index_put(x, [r], v),
            aten.index_put(x, [None, c], w),
            aten.index_put(x, [r, c], v[:, 0]),
            aten.index_put(x, [r[:, None], c], v[:, :3]),
            aten.index_put(x, [r], v[0, 0]),
        ),
        *(x, rows, columns, numbers(3, 7, dtype=dtype), numbers(5, 3, dtype=dtype)),
    )
    assert not result.externs
    if dtype is not torch.bool:
        collide = torch.tensor([2, 2, 0, 2])
        check(lambda x, i, v: aten.index_put(x, [i], v, True), x, collide, numbers(4, 7, dtype=dtype))


def test_a_mask_with_one_value_is_a_selection(check):
    x = numbers(5, 7)
    result = check(lambda x, v: aten.index_put(x, [x > 0], v).exp(), x, torch.tensor(2.0))
    assert result.kernels == 1
    mask = torch.tensor([True, False, True, True, False])
    check(lambda x, m, v: aten.index_put(x, [m], v), x, mask, torch.tensor([9.0]))


@pytest.mark.covers("F5g.13")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatters_of_every_kind_equal_eager(check, dtype, dim):
    x, source = numbers(4, 6, dtype=dtype), numbers(3, 5, dtype=dtype)
    torch.manual_seed(1)
    index = torch.randint(0, 4, (3, 5))
    unique = (
        torch.stack([torch.randperm(4)[:3] for _ in range(5)], 1)
        if dim == 0
        else torch.stack([torch.randperm(6)[:5] for _ in range(3)])
    )
    result = check(
        lambda x, i, u, s: (
            aten.scatter.src(x, dim, u, s),
            aten.scatter.value(x, dim, i, 3),
            aten.scatter_add(x, dim, i, s),
            aten.scatter.reduce(x, dim, i, s, reduce="multiply"),
            aten.scatter.reduce(x, dim, i, s, reduce="add"),
        ),
        *(x, index, unique, source),
    )
    assert not result.externs


@pytest.mark.covers("F5g.13")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce_and_index_reduce_equal_eager(check, reduce, include_self):
    x, source, index = numbers(4, 6), numbers(3, 6), torch.tensor([[0, 1, 1, 3, 2, 0]] * 3)
    source[0, 1] = float("nan")
    x[3, 3] = float("nan")
    result = check(
        lambda x, i, s: aten.scatter_reduce.two(x, 0, i, s, reduce, include_self=include_self), x, index, source
    )
    assert not result.externs
    check(
        lambda x, i, s: aten.scatter_reduce.two(x, 0, i, s, reduce, include_self=include_self),
        *(numbers(4, 6, dtype=torch.int64), index, numbers(3, 6, dtype=torch.int64)),
        aten=() if include_self and reduce != "mean" else ("scatter_reduce",),
    )
    if reduce != "sum":
        rows = torch.tensor([2, 0, 2])
        check(
            lambda x, i, s: aten.index_reduce(x, 0, i, s, reduce, include_self=include_self),
            *(x, rows, source),
        )


@pytest.mark.covers("F5g.13")
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_are_filled_copied_and_added_as_eager(check, dtype):
    x, source = numbers(5, 7, dtype=dtype), numbers(5, 3, dtype=dtype)
    index, unique = torch.tensor([6, 0, 6]), torch.tensor([6, 0, 3])
    check(
        lambda x, i, u, s: (
            aten.index_fill.int_Scalar(x, 1, u - 7, 2),
            aten.index_copy(x, -1, u, s),
            aten.index_add(x, 1, i, s),
            aten.index_add(x, 1, i, s, alpha=2),
        ),
        *(x, index, unique, source),
        aten=("index_add",) if dtype in HALVES else (),  # the one with alpha
    )
    check(lambda x, i, s: aten.index_add(x, 1, i, s), x, index, source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_added_to_a_scalar_is_its_only_slice(check, dtype):
    x = torch.tensor(1.5).to(dtype)
    f = lambda x, i: (aten.index_add(x, 0, i, x), aten.index_add(x, -1, i, x * 3))
    check(f, x, torch.tensor([0]), aten=("index_add",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_one_number_added_many_times_in_one_place_counts_each_time(check, dtype):
    index, source = torch.ones(1, dtype=torch.int64), torch.full((1,), 9, dtype=dtype)
    check(
        lambda x, i, s: (
            aten.scatter_add(x, 1, i.expand(7, 17, 31), s.expand(7, 17, 31)),
            aten.index_add(x, 1, i.expand(17), s.expand(7, 17, 31)),
            aten.index_put(x, [None, i.expand(17)], s.expand(7, 17, 31), True),
        ),
        *(torch.zeros(7, 2, 31, dtype=dtype), index, source),
    )


@pytest.mark.covers("F5g.13")
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_embeddings_gradient_sums_equal_rows_and_leaves_the_padding_out(check, padding, dtype):
    indices = torch.tensor([[2, 4, 4], [0, 2, 2]])
    grad = numbers(2, 3, 9, dtype=dtype)
    result = check(lambda g, i: aten.embedding_dense_backward(g, i, 6, padding, False), grad, indices)
    assert not result.externs


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_that_are_added_in_place_have_eagers_bits(dtype):
    grad, index = numbers(64, 16, dtype=dtype), torch.arange(64) % 5
    pooled = numbers(2, 8, 9, 9, dtype=dtype)
    largest, places = torch.nn.functional.max_pool2d(pooled, 5, 1, 2, return_indices=True)

    def f(g, i, x, y, p):
        return (
            aten.embedding_dense_backward(g, i, 5, -1, False),
            aten.index_put(g[:5], [i], g, True),
            aten.index_reduce(g[:5], 0, i, g, "mean"),
            aten.max_pool2d_with_indices_backward(y, x, [5, 5], [1, 1], [2, 2], [1, 1], False, p),
        )

    args = (grad, index, pooled, largest, places)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(*args))
    assert not compiled.report().externs
    for got, want in zip(compiled(list(args)), f(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("columns", [1, 6])
@pytest.mark.parametrize("dim", [1, -1])
def test_one_element_of_each_row_of_a_constant_is_chosen_in_one_kernel(check, columns, dim):
    index, source = torch.tensor([[0], [columns - 1], [0], [columns // 2]]), numbers(4, 1)
    for f in (
        lambda i, s: torch.zeros(4, columns).scatter(dim, i, 2.5),
        lambda i, s: torch.full((4, columns), 7.0, dtype=s.dtype).scatter(dim, i, s),
        lambda i, s: torch.full((4, columns), 3, dtype=torch.int32).scatter(dim, i, 9),
        lambda i, s: torch.ones(columns, 4).scatter(dim - 1, i.t(), -1.0),
    ):
        assert check(f, index, source).kernels == 1
    wide = torch.cat([index, index], 1)
    assert check(lambda i: torch.zeros(4, columns).scatter(dim, i, 2.5), wide).kernels == 2
    assert check(lambda i: torch.zeros(6, columns).scatter(dim, i, 2.5), index).kernels == 2
    outside = compile_graph(make_fx(lambda i: torch.zeros(4, columns).scatter(dim, i, 2.5), tracing_mode="fake")(index))
    with pytest.raises((IndexError, RuntimeError)):
        outside([index + columns])


def test_take_and_put_use_the_flattened_tensor(check):
    x, index = numbers(3, 4), torch.tensor([[0, -1], [5, 11]])
    result = check(
        lambda x, i, v: (
            aten.take(x, i),
            aten.put(x, i.clamp(min=0), v),
            aten.put(x, i * 0, v, True),
            aten.put(x.t(), i.clamp(min=0), v.view(4)),
            aten.put(x, i.view(4).clamp(min=0), v.t()),
            aten.diagonal_scatter(x, v.view(-1)[:3], 1),
            aten.diagonal_scatter(x, v.view(-1)[:2], -1),
        ),
        *(x, index, numbers(2, 2)),
    )
    assert not result.externs


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: aten.index_put(x, [i], x[0]),
        lambda x, i: aten.scatter.value(x, 0, i[:, None], 1.0),
        lambda x, i: aten.scatter_add(x, 0, i[:, None], x),
        lambda x, i: aten.index_add(x, 0, i, x[: len(i)]),
        lambda x, i: aten.index_copy(x, 0, i, x[: len(i)]),
        lambda x, i: aten.index_fill.int_Scalar(x, 0, i, 2.0),
        lambda x, i: aten.take(x, i * 3),
    ],
)
def test_an_index_out_of_range_is_an_error_and_not_a_write(f):
    x, good, bad = numbers(4, 3), torch.tensor([0, 1]), torch.tensor([0, 4])
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x, good))
    assert not compiled.report().externs
    torch.testing.assert_close(compiled([x, good])[0], f(x, good))
    with pytest.raises(IndexError):
        compiled([x, bad])


def test_updates_between_two_scatters_keep_their_order(check):
    def f(x, i, v):
        a = aten.index_put(x, [i], v)
        b = aten.index_put(a * 2, [i], v, True)
        return a, b, aten.scatter_add(b, 0, i[:, None].expand(3, 5), a[:3])

    assert not check(f, numbers(6, 5), torch.tensor([1, 4, 1]), numbers(3, 5)).externs


def _reduced(reduce, x, i):
    return aten.scatter_reduce.two(x, 0, i, x[:3], reduce)


def test_stores_of_every_mode_survive_printing_and_parsing():
    x, i = numbers(4, 6), torch.zeros(3, 6, dtype=torch.int64)
    for reduce, sign in (("sum", "+="), ("prod", "*="), ("amax", "max="), ("amin", "min=")):
        graph = make_fx(functools.partial(_reduced, reduce), tracing_mode="fake")(x, i)
        program = lower_graph(graph)
        text = print_program(program)
        assert f"] {sign} %" in text
        assert parse_program(text) == program


def test_gradients_of_reflected_and_repeated_borders_equal_eager(check):
    for name, pads, shape in (
        ("reflection_pad1d", [2, 3], (2, 5)),
        ("reflection_pad2d", [2, 1, 0, 3], (2, 3, 5, 6)),
        ("reflection_pad3d", [1, 1, 2, 0, 1, 2], (1, 2, 4, 3, 5)),
        ("replication_pad1d", [3, 1], (2, 5)),
        ("replication_pad2d", [4, 0, 1, 2], (2, 3, 5, 6)),
        ("replication_pad2d", [-1, 2, 1, -2], (2, 3, 5, 6)),
    ):
        x = numbers(*shape)
        grad = numbers(*getattr(aten, name)(x, pads).shape)
        result = check(lambda g, x, n=name, p=pads: getattr(aten, f"{n}_backward")(g, x, p), grad, x)
        assert not result.externs


LAST = torch.channels_last
ADDED: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "nearest": (lambda g: aten.upsample_nearest2d_backward(g, [7, 9], [2, 70, 5, 6]), (2, 70, 7, 9)),
    "bilinear": (lambda g: aten.upsample_bilinear2d_backward(g, [10, 9], [2, 70, 5, 6], False), (2, 70, 10, 9)),
    "reflected": (
        lambda g: aten.reflection_pad2d_backward(g, g[..., 1:-1, 2:].to(memory_format=LAST), [2, 0, 1, 1]),
        (2, 70, 7, 9),
    ),
    "repeated": (
        lambda g: aten.replication_pad2d_backward(g, g[..., 3:, 2:-1].to(memory_format=LAST), [2, 1, 3, 0]),
        (2, 70, 7, 9),
    ),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ADDED)
def test_channels_that_lie_side_by_side_are_added_as_vectors(check, name, dtype):
    fn, sizes = ADDED[name]
    grad = numbers(*sizes, dtype=dtype).to(memory_format=LAST)
    graph = make_fx(fn, tracing_mode="fake")(grad)
    compiled = compile_graph(graph)
    assert not compiled.report().externs
    program = schedule_program(lower_graph(graph))[0]
    (adding,) = (kernel for kernel in normalize(linearize(program)).kernels if kernel.ordered)
    lanes = [loop for loop in map_loops(adding, host_machine()).grid if loop.map.kind == "lanes"]
    assert [loop.extent for loop in lanes] == [70]
    assert emit_kernel(adding, host_machine(), {}).parallel  # over images
    torch.testing.assert_close(compiled([grad])[0], fn(grad), rtol=2e-2 if dtype is torch.bfloat16 else 2e-5, atol=2e-4)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("exact", ["", "_exact"])
@pytest.mark.parametrize("size", [(10, 6), (15, 18), (5, 60), (205, 246), (11, 6), (7, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_of_repeated_pixels_is_a_sum_over_the_copies(check, exact, size, dtype):
    op = getattr(aten, f"{'_' if exact else ''}upsample_nearest{exact}2d_backward")
    grad = numbers(1, 3, *size, dtype=dtype)
    result = check(lambda g: op(g, size, [1, 3, 5, 6]), grad, tolerance=2e-2 if dtype is torch.bfloat16 else 1e-4)
    assert not result.externs
    text = print_program(lower_graph(make_fx(lambda g: op(g, size, [1, 3, 5, 6]), tracing_mode="fake")(grad)))
    whole = size[0] % 5 == 0 and size[1] % 6 == 0
    rounded = size[0] == 205 and not exact  # 41 times 1/41 is below 1 in single precision, in which eager finds places
    assert ("+=" not in text) == (whole and not rounded)


@pytest.mark.sample(ways=1)
@pytest.mark.covers("F5g.14")
@pytest.mark.parametrize("size", [(7, 9), (3, 2), (5, 6), (1, 1)])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_upsampling_and_its_gradient_equal_eager(check, mode, corners, size):
    if mode.startswith("nearest") and corners:
        corners = None
    x, grad = numbers(2, 3, 5, 6), numbers(2, 3, *size)
    keep = {} if mode.startswith("nearest") else {"align_corners": corners}
    if size != (1, 1):  # rows' gradients are ATen's
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))

    def f(x, g):
        x = x.detach().requires_grad_()
        y = torch.nn.functional.interpolate(x, size=size, mode=mode, **keep)
        return y, torch.autograd.grad(y, x, g)[0]

    left = (f"upsample_{mode}2d_backward",) if keep and size == (1, 1) else ()
    check(f, x, grad, table=decompositions(), tolerance=2e-5, aten=left)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_gradients_of_upsampled_rows_are_left_to_aten(check, mode):
    """It adds up rows faster; with channels side by side, generated code does."""

    def f(x, g):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.interpolate(x, scale_factor=2, mode=mode), x, g)[0]

    for layout, left in ((torch.contiguous_format, (f"upsample_{mode}2d_backward",)), (torch.channels_last, ())):
        x, grad = (numbers(2, 3, *size).contiguous(memory_format=layout) for size in ((5, 6), (10, 12)))
        check(f, x, grad, table=decompositions(), tolerance=2e-5, aten=left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_that_lie_side_by_side_are_added_up_side_by_side(check, dtype):
    """Eager gives the gradient of bicubic upsampling with contiguous rows, whatever it is the gradient of."""
    grad = numbers(2, 20, 10, 12).to(dtype).contiguous(memory_format=torch.channels_last)

    def f(g):
        return aten.upsample_bicubic2d_backward(g, [10, 12], [2, 20, 5, 6], False, 2.0, 2.0)

    program = lower_graph(make_fx(f, tracing_mode="fake")(grad))
    (sums,) = [b for b in program.buffers if b.name.endswith("_sum")]
    assert [stride.constant for stride in sums.strides] == [600, 1, 120, 20]
    check(f, grad, tolerance=2e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.covers("F5g.14")
@pytest.mark.parametrize("mode", ["nearest", "linear", "trilinear"])
def test_upsampling_by_a_factor_in_other_ranks_equals_eager(check, mode):
    x = numbers(2, 3, 5) if mode == "linear" else numbers(1, 2, 3, 4, 2)

    def f(x):
        x = x.detach().requires_grad_()
        y = torch.nn.functional.interpolate(x, scale_factor=1.7, mode=mode)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    assert not check(f, x, table=decompositions(), tolerance=1e-4).externs


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("factors", [(), (1.5, 1.5)], ids=["sizes", "factors"])
@pytest.mark.parametrize("size", [(5, 4), (5, 9), (7, 6), (3, 2)])
@pytest.mark.parametrize("corners", [False, True])
def test_infinities_next_to_an_upsampled_place_make_it_what_they_make_it_in_eager(check, corners, size, factors):
    x, grad = numbers(2, 3, 5, 4), numbers(2, 3, *size)
    for y in (x, grad):
        y.view(-1)[::7], y.view(-1)[3::11] = float("inf"), -float("inf")
    x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))

    def f(x, g):
        back = aten.upsample_bilinear2d_backward(g, size, x.shape, corners, *factors)
        return aten.upsample_bilinear2d(x, size, corners, *factors), back

    assert not check(f, x, grad, table=decompositions(), tolerance=1e-4).externs


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(5, 8), (9, 16), (3, 32)])
@pytest.mark.parametrize("given", [False, True], ids=["size", "factor"])
def test_columns_that_become_several_are_as_eagers_and_loaded_as_they_lie(check, given, size, dtype):
    """Also next to infinities, and at both ends."""
    x = numbers(2, 3, 5, 4).to(dtype)
    endless = x.clone()
    endless.view(-1)[::7], endless.view(-1)[3::11] = float("inf"), -float("inf")
    factors = (size[0] / 5, size[1] / 4) if given else ()

    def f(x, y):
        return tuple(aten.upsample_bilinear2d(each.relu(), size, False, *factors) for each in (x, y))

    traced = make_fx(f, decompositions())(x, endless)
    loaded = [len(node.args[1]) for node in traced.graph.nodes if node.target is aten._unsafe_index.Tensor]
    assert loaded == [3] * 4  # of rows only
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert not check(f, x, endless, table=decompositions(), tolerance=tolerance).externs


@pytest.mark.parametrize("place", ["volumes", "one column", "thrice", "corners", "another factor", "last"])
def test_columns_that_become_others_are_as_eagers(check, place):
    x, size, more = numbers(2, 3, 5, 4), (7, 8), (False,)
    if place == "volumes":
        volumes = numbers(2, 3, 2, 5, 4)
        report = check(lambda x: (aten.upsample_trilinear3d(x, (3, 7, 8), False),), volumes, table=decompositions())
        assert not report.externs
        return
    x, size, more = {
        "one column": (x[..., :1].contiguous(), (7, 2), (False,)),
        "thrice": (x, (7, 12), (False,)),
        "corners": (x, size, (True,)),
        "another factor": (x, size, (False, 1.4, 2.1)),
        "last": (x.contiguous(memory_format=torch.channels_last), size, more),
    }[place]

    def f(x):
        return (aten.upsample_bilinear2d(x, size, *more),)

    traced = make_fx(f, decompositions())(x)
    loaded = [len(node.args[1]) for node in traced.graph.nodes if node.target is aten._unsafe_index.Tensor]
    assert loaded == [4] * 4
    assert not check(f, x, table=decompositions(), tolerance=1e-5).externs


ADDITIONS = {
    "embedding_dense_backward": lambda x, i: aten.embedding_dense_backward(x, i[:, :, 0], 3, -1, False),
    "index_put": lambda x, i: aten.index_put(x.new_zeros(3, 6), [i[:, :, 0]], x, True),
    "scatter_add": lambda x, i: aten.scatter_add(x.new_zeros(9, 3, 6), 1, i, x),
    "scatter_reduce": lambda x, i: aten.scatter_reduce.two(x.new_ones(3, 5, 6), 0, i, x, "prod"),
    "index_add": lambda x, i: aten.index_add(x.new_zeros(9, 5, 3), 2, i[0, 0], x),
    "index_add of rows": lambda x, i: aten.index_add(x.new_zeros(3, 5, 6), 0, i[:, 0, 0], x),
    "reflection_pad": lambda x, i: aten.reflection_pad2d_backward(x, x.new_zeros(9, 3, 4), [1, 1, 1, 1]),
    "upsampling": lambda x, i: aten.upsample_nearest2d_backward(x[None], [5, 6], [1, 9, 2, 3]),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", ADDITIONS)
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)], ids=str)
def test_where_numbers_lie_does_not_change_the_order_in_which_they_are_added_up(name, order):
    x, i = torch.randn(9, 5, 6), torch.randint(3, (9, 5, 6))
    turned = x.permute(order).contiguous().permute([order.index(dim) for dim in range(3)])

    def f(x, i):
        return (ADDITIONS[name](x, i),)

    found = []
    for given in (x, turned):
        compiled = compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(given, i))
        assert not compiled.report().externs
        found.append(compiled([given, i])[0])
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], f(x, i)[0])


def test_lanes_add_to_rows_in_the_order_of_the_indices():
    values = (torch.rand(11, 4, 2) - 0.5) * 6e38  # some sums overflow on the way, in this order or in another
    rows, grad = torch.zeros(11, 4, dtype=torch.int64), values.transpose(0, 1).contiguous().transpose(0, 1)

    def f(grad, rows):
        return (aten.embedding_dense_backward(grad, rows, 1, -1, False),)

    want = torch.zeros(2)
    for value in values.reshape(-1, 2):
        want = want + value
    got = compile_graph(make_fx(f, tracing_mode="fake")(grad, rows))([grad, rows])[0]
    torch.testing.assert_close(got[0], want, rtol=0, atol=0, equal_nan=True)


def one_slice(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As a static cache gets the keys of a token."""
    cache.index_copy_(2, at, new * 2)
    return cache.sum(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_slice_of_an_input_is_replaced_where_it_lies(dtype, turned):
    cache, new = numbers(2, 4, 7, 32, dtype=dtype), numbers(2, 4, 1, 32, dtype=dtype)
    cache = cache.transpose(1, 3).contiguous().transpose(1, 3) if turned else cache
    for at in (torch.tensor([3]), torch.tensor(3)):
        made = compile_graph(make_fx(one_slice, tracing_mode="fake")(cache.clone(), at, new))
        assert not made.report().externs
        for place in (0, 3, 6):
            mine, theirs, where = cache.clone(), cache.clone(), torch.full_like(at, place)
            torch.testing.assert_close(made([mine, where, new])[0], one_slice(theirs, where, new))
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("place", [7, -1, 1 << 40])
def test_a_cache_that_is_full_is_an_error_and_stays_as_it_is(place):
    cache, new, at = numbers(2, 4, 7, 32), numbers(2, 4, 1, 32), torch.tensor([place])
    made = compile_graph(make_fx(one_slice, tracing_mode="fake")(cache.clone(), torch.tensor([0]), new))
    mine = cache.clone()
    with pytest.raises(IndexError, match="out of range"):
        made([mine, at, new])
    assert torch.equal(mine, cache)


def test_several_slices_in_place_are_left_to_aten():
    """Of two that are the same one, ATen writes the last."""
    cache, new, at = numbers(2, 4, 7, 32), numbers(2, 4, 2, 32), torch.tensor([3, 3])
    made = compile_graph(make_fx(one_slice, tracing_mode="fake")(cache.clone(), at, new))
    assert [call.target for call in made.report().externs] == ["aten.index_copy_.default"]
    mine, theirs = cache.clone(), cache.clone()
    assert torch.equal(made([mine, at, new])[0], one_slice(theirs, at, new)) and torch.equal(mine, theirs)
