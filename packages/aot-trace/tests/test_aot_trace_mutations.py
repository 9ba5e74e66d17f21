"""Mutations of inputs, each compared with eager in both functional layers, static and dynamic."""

from __future__ import annotations

import pytest
import torch

from aotkit_aot_trace import FunctionalLayer, OverlappingMutation, TraceOptions, Unsupported, capture
from aotkit_functionalize import OverlappingWrite
from aotkit_functionalize.records import MutationKind


def grad_and_plain():
    return [torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)]


def plain_and_grad():
    return [torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)]


def plain():
    return [torch.randn(2, 3), torch.randn(2, 3)]


def under_no_grad(x, y):
    with torch.no_grad():
        x.mul_(y)
    return [x.sin()]


def both_modes(x, y):
    with torch.no_grad():
        x.mul_(2)
    x.add_(y)
    return [x.cos() * y]


def through_data(x, y):
    x.data.mul_(2)
    return [x * y]


def through_detach(x, y):
    x.detach().mul_(2)
    return [x * y]


def transposed_in_place(x, y):
    x.t_()
    return [x.sin() @ y]


def transposed_twice(x, y):
    x.t_().t_()
    return [x.sin() * y]


def transposed_and_written(x, y):
    x.t_()
    x.mul_(y.t())
    return [x.cos(), x]


def written_through_view(x, y):
    x.view(-1)[1:4].mul_(3)
    x[0].add_(y[1])
    return [x.exp()]


def written_then_view_returned(x, y):
    x.add_(y)
    return [x.view(-1), x[1], x, y.t()]


def view_taken_before_the_write(x, y):
    v = x[0]
    x.mul_(y)
    return [v.sin(), v]


def both_written(x, y):
    x.add_(1)
    y.mul_(x)
    return [x * y]


def swapped(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return []


def nothing_returned(x, y):
    x.add_(y)
    return []


def squeezed_in_place(x, y):
    x.unsqueeze_(0)
    return [x + y]


def read_then_written(x, y):
    z = (x + y).sin()
    x.mul_(2)
    return [z, x.cos()]


def transposed_clone_then_written(x, y):
    z = x.T.clone() * y.T
    x.add_(1)
    return [z]


PROGRAMS = [
    under_no_grad,
    both_modes,
    through_data,
    through_detach,
    transposed_in_place,
    transposed_twice,
    transposed_and_written,
    written_through_view,
    written_then_view_returned,
    view_taken_before_the_write,
    both_written,
    swapped,
    nothing_returned,
    squeezed_in_place,
    read_then_written,
    transposed_clone_then_written,
]


@pytest.mark.covers("F1.6", "F1.7", "F1.9", "F1.10", "F1.18", "F1.19", "F1.20", "F1.21")
@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("make", [grad_and_plain, plain_and_grad, plain])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_what_the_caller_sees_after_a_mutation_is_what_eager_shows(check, fn, make):
    # A change that cancels out leaves the caller's tensor alone; eager has moved its version counter twice.
    check(fn, make, versions=fn is not transposed_twice)


@pytest.mark.covers("F1.22")
def test_the_gradient_is_with_respect_to_the_value_before_the_mutation(check):
    def fn(x, y):
        x.mul_(y)
        return [x.sin()]

    captured = check(fn, grad_and_plain)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    *_, grad_x, grad_y = captured.graph(x, y, torch.zeros(2, 3), torch.ones(2, 3))
    torch.testing.assert_close(grad_x, (x * y).cos() * y)
    assert grad_y is None


@pytest.mark.covers("F1.6", "F1.7")
def test_the_record_names_the_kind_of_each_mutation():
    def fn(a, b, c, d):
        a.add_(1)
        b.t_()
        c.t_().mul_(2)
        return [d * 2]

    kinds = [i.mutation for i in capture(fn, [torch.ones(2, 3) for _ in range(4)]).metadata.inputs]
    assert kinds == [MutationKind.DATA, MutationKind.METADATA, MutationKind.DATA_AND_METADATA, MutationKind.NONE]


@pytest.mark.covers("F1.9", "F1.10")
def test_a_write_through_data_is_told_from_one_under_no_grad(layer):
    x = torch.ones(2, 3, requires_grad=True) * 1
    hidden = capture(through_data, [x, torch.ones(2, 3)]).metadata.inputs[0]
    seen = capture(under_no_grad, [x, torch.ones(2, 3)]).metadata.inputs[0]
    assert (hidden.mutation_hidden_from_autograd, hidden.mutation_under_no_grad) == (True, False)
    assert (seen.mutation_hidden_from_autograd, seen.mutation_under_no_grad) == (False, True)


def test_a_leaf_parameter_updated_under_no_grad_keeps_its_gradient(check):
    def make():
        return [torch.nn.Parameter(torch.randn(2, 3)), torch.randn(2, 3)]

    check(under_no_grad, make)


def test_a_leaf_that_requires_grad_changed_in_place_is_refused_as_eager_refuses_it():
    with pytest.raises(Unsupported, match="input 0 is a leaf"):
        capture(lambda x: [x.mul_(2)], [torch.ones(2, requires_grad=True)])


@pytest.mark.parametrize(
    ("fn", "storage"),
    [
        (lambda x: [x.set_(torch.ones(7))], {"output": 0}),
        (lambda x: [x.resize_(5, 5)], {"resized": True}),
        (lambda x: [setattr(x, "data", torch.ones(2, 3)), x + 1][1:], {"output": 0}),
    ],
)
def test_changes_of_an_inputs_storage_need_the_dispatchers_layer_which_records_them(layer, fn, storage):
    if layer is FunctionalLayer.MODE:
        with pytest.raises(Unsupported, match=r"FunctionalLayer\.DISPATCHER"):
            capture(fn, [torch.ones(2, 3)], options=TraceOptions(layer=layer))
    for options in (TraceOptions(layer=FunctionalLayer.DISPATCHER), None):
        change = capture(fn, [torch.ones(2, 3)], options=options).metadata.inputs[0].storage
        assert {name: getattr(change, name) for name in storage} == storage


@pytest.mark.covers("F1.46", "F1.68")
def test_overlapping_inputs_of_which_one_is_written_are_named():
    base = torch.ones(10)
    with pytest.raises(OverlappingMutation) as refusal:
        capture(lambda a, b, c: [a.add_(1), b * 2, c], [base[:6], base[4:], torch.ones(3)])
    assert refusal.value.groups == ((0, 1),) and refusal.value.mutated == (0,)
    assert "input 0, input 1" in str(refusal.value)


@pytest.mark.covers("F1.47")
def test_disjoint_parts_of_one_storage_may_be_written(compare):
    def make():
        base = torch.randn(4, 6)
        return [base[:2], base[2:]]

    compare(lambda a, b: [a.add_(1), b * a], make)

    def columns():
        base = torch.randn(4, 6)
        return [base[:, :3], base[:, 3:]]

    captured = capture(lambda a, b: [a.add_(1), b * 2], columns())
    assert captured.metadata.num_mutated == 1


def test_overlapping_inputs_that_are_only_read_are_captured(check):
    def make():
        base = torch.randn(10)
        return [base[:6], base[4:]]

    check(lambda a, b: [a.sum() + b.sum(), a[:2]], make)


@pytest.mark.covers("F1.55")
def test_a_change_of_grad_mode_is_recorded_and_does_not_leak(check):
    def fn(x, y):
        z = x * y
        torch.set_grad_enabled(False)
        return [z, x * 2]

    captured = check(fn, grad_and_plain)
    assert [(e.kind, e.value) for e in captured.metadata.effects] == [("grad_mode", False)]
    assert torch.is_grad_enabled()


def test_a_write_through_a_view_older_than_a_change_of_shape_is_refused(layer, run_graph):
    """Autograd under functionalization would take the view of the base as it is now: a wrong gradient."""

    def fn(x, y):
        v = x[:1]
        x.unsqueeze_(0)
        v.mul_(y[:1])
        return [x.sin()]

    x = torch.randn(2, 3, requires_grad=True) * 1
    with pytest.raises(Unsupported, match="older than that is used"):
        capture(fn, [x, torch.randn(2, 3)], options=TraceOptions(layer=layer))
    plain = [torch.randn(2, 3), torch.randn(2, 3)]
    captured = capture(fn, plain, options=TraceOptions(layer=layer))
    expected = fn(plain[0].clone(), plain[1])
    torch.testing.assert_close(run_graph(captured, plain), expected)


def no_write_between(x, y):
    v = x[:1]
    x.unsqueeze_(0)
    return [v * 2, x]


def write_before(x, y):
    x[0].mul_(y[0])
    x.t_()
    return [x.sin(), x]


def view_of_intermediate(x, y):
    z = x.sin()
    v = z[-1]
    z.transpose_(0, 1)
    return [v, z * 2]


def view_with_another_shape(x, y):
    v = x.view(3, 2)
    x.swapaxes_(0, 1)
    return [v]


def without_gradient(x, y):
    v = x.select(0, 1)
    with torch.no_grad():
        y.unsqueeze_(0)
    return [v * y[0, 0]]


@pytest.mark.covers("F1.7", "F1.19")
@pytest.mark.parametrize(
    "fn", [no_write_between, write_before, view_of_intermediate, view_with_another_shape, without_gradient]
)
def test_views_older_than_a_change_of_shape_keep_their_gradient(check, fn):
    check(fn, lambda: [torch.randn(2, 3, requires_grad=True) * 1, torch.randn(2, 3)])


def quiet_write(x):
    with torch.no_grad():
        x.fill_(0.5)
    x.t_()
    return [x * 1]


def hidden_write(x):
    x.detach().fill_(0.5)
    x.t_()
    return [x * 1]


@pytest.mark.covers("F1.10", "F1.20")
@pytest.mark.parametrize("fn", [quiet_write, hidden_write])
def test_a_change_of_shape_is_seen_by_autograd_though_the_write_was_not(check, fn):
    captured = check(fn, lambda: [torch.randn(2, 3, requires_grad=True) * 1])
    (info,) = captured.metadata.inputs
    assert info.mutation is MutationKind.DATA_AND_METADATA and info.mutation_under_no_grad
    assert not info.new_view.under_no_grad


def test_an_older_view_is_not_used_after_a_write_that_follows_a_change_of_shape(layer, check):
    def used(x):
        v = x[:1]
        x.t_()
        x.mul_(2)
        return [v.sin()]

    def only_returned(x):
        v = x[:1]
        x.t_()
        x.mul_(2)
        return [v, x[:1].sin()]

    def make():
        return [torch.randn(3, 3, requires_grad=True) * 1]

    with pytest.raises(Unsupported, match="older than that is used"):
        capture(used, make(), options=TraceOptions(layer=layer))
    check(only_returned, make)
    check(used, lambda: [torch.randn(3, 3)])


@pytest.mark.parametrize("compute", [torch.sin, lambda x: x * x.cos(), lambda x: torch.where(x > 0, x, 0) @ x])
def test_a_value_that_the_gradient_needs_does_not_change_its_shape(layer, check, compute):
    """Nor in eager mode, where the version counter moves; here it does not, and the gradient would be transposed."""

    def before(x):
        y = compute(x)
        x.t_()
        return [y]

    def after(x):
        x.t_()
        return [compute(x)]

    def make():
        return [torch.randn(3, 3, requires_grad=True) * 1]

    (x,) = make()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before(x)[0].sum().backward()
    with pytest.raises(Unsupported, match="changed in shape in place before the backward"):
        capture(before, make(), options=TraceOptions(layer=layer))
    check(before, lambda: [torch.randn(3, 3)])
    check(after, make)


USES_OF_STRIDES = {
    "flattened": lambda v: v.flatten().add_(1),
    "reshaped": lambda v: v.reshape(-1).add_(1),
    "contiguous": lambda v: v.contiguous().add_(1),
}


@pytest.mark.parametrize("use", USES_OF_STRIDES)
@pytest.mark.parametrize("view", [torch.t, lambda x: x[:, ::2]], ids=["transposed", "with gaps"])
def test_a_view_that_was_written_to_keeps_its_strides(check, view, use):
    """The functional form of the write is contiguous; what is a copy of the view in eager mode is one here."""

    def fn(x):
        y = x * 1
        v = view(y)
        v.masked_fill_(v > 0, 0.25)
        USES_OF_STRIDES[use](v)
        return [y]

    check(fn, lambda: [torch.randn(4, 6)])


def test_a_view_of_a_tensor_with_gaps_that_is_transposed_and_written_to(compare, layer):
    def fn(x):
        v = x.reshape(-1)
        x.transpose_(0, 1)
        x.masked_fill_(x > 0, 0.25)
        return [v, v * 2]

    def through_view(x):
        x.t().masked_fill_(x.t() > 0, 0.25)
        return [x + 1]

    compare(fn, lambda: [torch.randn(4, 8)[..., ::2]], options=TraceOptions(layer=layer))
    compare(through_view, lambda: [torch.randn(6, 4)[::2]], options=TraceOptions(layer=layer))


@pytest.mark.covers("F1.19")
def test_a_value_without_gradient_may_be_returned_beside_one_that_changed_its_shape(layer):
    def fn(x):
        x.t_()
        y = x * 2
        with torch.no_grad():
            quiet = y.squeeze()
        y.detach()[0] = 2  # from now on, eager mode refuses to differentiate through ``quiet``
        return [quiet, x * 2]

    captured = capture(fn, [torch.randn(3, 4, requires_grad=True) * 1], options=TraceOptions(layer=layer))
    assert captured.metadata.forward_requires_grad == (False, True)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3)])
def test_an_older_view_is_not_used_after_a_write_and_then_a_change_of_shape(layer, check, shape):
    def write_of_all(x):
        y = x.sin()
        v = y.view_as(y)
        y.mul_(2)
        y.t_()
        return [v * 1]

    def detached_write(x):
        y = x.sin()
        v = y[0]
        y.detach().mul_(2)
        y.t_()
        return [v[:]]

    def only_newer_views(x):
        y = x.sin()
        y[0].mul_(2)
        y.t_()
        return [y[0] * 1]

    def make():
        return [torch.randn(shape, requires_grad=True) * 1]

    for fn in (write_of_all, detached_write):
        with pytest.raises(Unsupported, match="older than that is used"):
            capture(fn, make(), options=TraceOptions(layer=layer))
    check(only_newer_views, make)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: [x.as_strided((3,), (1,), 1).neg_()], "of other elements"),
        (lambda x: [(x.as_strided((3,), (1,), 1), x.mul_(2))[0] * 1], "show other elements"),
        (lambda x: [(x.mul_(2), x.as_strided((3,), (1,), 1))[1] * 1], "show other elements"),
    ],
    ids=["gradient", "before", "after"],
)
def test_views_by_strides_that_would_show_other_elements_are_refused(layer, fn, what):
    base = torch.randn(5, 4, requires_grad=True).clone()
    x = base[1:] if what == "of other elements" else base[:, ::2].detach()
    with pytest.raises(Unsupported, match=what):
        capture(fn, [x], options=TraceOptions(layer=layer))


def test_a_value_with_a_history_that_changes_its_shape_under_no_grad_is_refused(layer):
    def fn(x):
        y = x * 2
        with torch.no_grad():
            y.t_()
        return [y]

    with pytest.raises(Unsupported, match="where grad mode is off"):
        capture(fn, [torch.randn(3, 3, requires_grad=True)], options=TraceOptions(layer=layer))
    with torch.no_grad():
        assert not capture(fn, [torch.randn(3, 3, requires_grad=True)]).metadata.is_training


def test_windows_of_a_scalar_are_written_to(check):
    check(lambda x: [x.unfold(-1, 1, 1).sin_(), x * 2], lambda: [torch.randn(())])


def test_a_view_that_eager_mode_forbids_to_differentiate_through_is_returned(layer):
    def fn(x, y):
        with torch.no_grad():
            v = y[:2]
        y.mul_(x.sum())
        return [v, y.sin()]

    inputs = [torch.randn(3, requires_grad=True), torch.randn(3)]
    record = capture(fn, inputs, options=TraceOptions(layer=layer)).metadata.outputs[0]
    assert record.view.under_no_grad and record.view.requires_grad


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_input_is_refused(layer):
    with pytest.raises(Unsupported, match=r"layout torch\.sparse_csr"):
        capture(lambda x: [x * 2], [torch.eye(3).to_sparse_csr()], options=TraceOptions(layer=layer))


def test_an_out_argument_with_views_is_not_resized(layer):
    def fn(x):
        kept = torch.ones(3, 4)
        view = kept.diagonal()
        torch.add(x, 1, out=kept)
        return [view * 1]

    with pytest.raises(Unsupported, match="has views"):
        capture(fn, [torch.randn(2, 3)], options=TraceOptions(layer=layer))


def test_a_view_that_changes_its_shape_in_place_is_refused_where_autograd_would_see_it(layer):
    with pytest.raises(Unsupported, match="is changed in shape in place"):
        capture(lambda x: [x[1:].t_() * 2], [torch.randn(3, 3, requires_grad=True)], options=TraceOptions(layer=layer))


@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.masked_fill_(z > 0, 0.25),
        lambda z: z.t().masked_fill_(z.t() > 0, 0.25),
        lambda z: z.index_fill_(0, torch.tensor([1]), 2.0),
        lambda z: z.detach().masked_fill_(z > 0, 0.25),
        lambda z: z.t()[0].masked_fill_(z.t()[0] > 0, 0.25),
    ],
    ids=["whole", "through a view", "index_fill_", "detached", "part"],
)
def test_a_write_to_an_intermediate_keeps_its_strides(check, write):
    def fn(x):
        contiguous, transposed = x * 2, x.t() * 2
        write(contiguous)
        write(transposed)
        return [contiguous, transposed]

    check(fn, lambda: [torch.randn(3, 4)])


def test_an_input_with_gaps_is_written_to_several_times(check):
    def fn(x):
        x.mul_(2)
        x[0].add_(1)
        x.t().sin_()
        return [x[1]]

    check(fn, lambda: [torch.randn(3, 8)[:, ::2]])


STRIDE_DEPENDENT = {
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a transposed view": lambda x: x.transpose(0, 1).contiguous(),
    "contiguous of a row": lambda x: x[1].contiguous(),
    "channels last": lambda x: x.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    "reshape, a copy": lambda x: x.reshape(-1),
    "reshape, a view": lambda x: x.reshape(1, *x.shape),
    "reshape of a slice": lambda x: x[:, :1].reshape(-1),
    "flatten": lambda x: x.flatten(1),
    "reshape_as": lambda x: x.reshape_as(torch.ones(x.shape[0], x.shape[1] * x.shape[2])),
    "view": lambda x: x.view(x.shape[0], 1, *x.shape[1:]),
}
GAPPED = {
    "every second column": lambda: torch.randn(3, 4, 8)[..., ::2],
    "rows apart": lambda: torch.randn(3, 4, 8)[..., :4],
    "matrices apart": lambda: torch.randn(3, 8, 4)[:, :4],
    "transposed": lambda: torch.randn(4, 3, 8)[..., ::2].transpose(0, 1),
}


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("gapped", GAPPED)
@pytest.mark.parametrize("view", STRIDE_DEPENDENT)
def test_a_view_that_depends_on_strides_of_an_input_with_gaps_that_was_written_to(check, view, gapped):
    take = STRIDE_DEPENDENT[view]

    def fn(x):
        x.mul_(2)
        return [take(x), take(x.detach()).add_(1), x * 1]

    check(fn, lambda: [GAPPED[gapped]()])


def test_a_view_that_eager_mode_refuses_is_refused(layer):
    def fn(x):
        x.mul_(2)
        return [x.view(-1)]

    with pytest.raises(Unsupported, match=r"written to, and then view\(\) taken of it"):
        capture(fn, [torch.randn(3, 8)[:, :4]], options=TraceOptions(layer=layer))


def test_what_expand_leaves_as_it_is_may_be_written_to(check):
    def fn(x):
        x.expand(3, 4).add_(1)
        x.unsqueeze(0).expand(1, 3, 4)[0, 1].fill_(0.1)
        x.expand_as(x).mul_(3)
        return [x * 2]

    check(fn, lambda: [torch.full((3, 4), 1e30)])


@pytest.mark.covers("F1.67", "F1.71")
def test_writes_that_functionalization_gets_wrong_are_refused(layer, check):
    options = TraceOptions(layer=layer)
    for view, overlapping in (
        (r"as_strided\(\(2, 2\), \(1, 1\), None\)", lambda x: x.as_strided((2, 2), (1, 1))),
        (r"unfold\(", lambda x: x.unfold(1, 2, 1)),
        (r"expand\(\)", lambda x: x[:1].expand(3, 3)),
    ):
        with pytest.raises(OverlappingWrite, match=f"a view .*made by {view}.* several of its elements are the same"):
            capture(lambda x, view=overlapping: [view(x).mul_(2)], [torch.ones(3, 3)], options=options)
    with pytest.raises(Unsupported, match="leave gaps"):
        capture(lambda x: [x.detach().t().unfold(0, 2, 3).add_(1)], [torch.ones(12, 8)], options=options)
    check(lambda x: [x.unfold(0, 3, 3).add_(1), x.as_strided((2, 2), (4, 1)).mul_(2)], lambda: [torch.randn(12)])


@pytest.mark.covers("F1.7", "F1.28")
def test_a_write_to_a_transposed_input_keeps_its_strides(layer, check, compare):
    def make():
        return [torch.randn(6, 4).t(), torch.rand(4, 6) > 0.5]

    captured = check(lambda x, m: [x.masked_fill_(m, 0.5), x[1:], x.t()], make)
    assert captured.metadata.inputs[0].mutation is MutationKind.DATA
    for fn in (
        lambda x, m: [x.masked_fill_(m, 0.5).reshape(-1)],
        lambda x, m: [x.masked_fill_(m, 0.5).reshape(-1).add_(1) * 2],
    ):
        compare(fn, make, options=TraceOptions(layer=layer))


def test_a_change_of_shape_under_no_grad_is_told_from_one_that_autograd_sees(layer):
    def fn(a, b):
        with torch.no_grad():
            a.unsqueeze_(0)
        b.unsqueeze_(0)
        return []

    leaf, plain = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    records = capture(fn, [leaf, plain], options=TraceOptions(layer=layer)).metadata.inputs
    assert [r.mutation for r in records] == [MutationKind.METADATA] * 2
    assert [r.new_view.under_no_grad for r in records] == [True, False]
    with pytest.raises(Unsupported, match="its gradient keeps the old ones"):
        capture(lambda a, b: [*fn(a, b), a * b], [leaf, plain], options=TraceOptions(layer=layer))


@pytest.mark.parametrize("older", [lambda x: x.unfold(0, 2, 1), lambda x: x[:2], lambda x: x * 2])
@pytest.mark.parametrize("returned", [lambda x, v: x.diagonal(), lambda x, v: v])
def test_views_of_a_leaf_that_changes_its_shape_under_no_grad_are_refused(layer, older, returned):
    def fn(x):
        v = older(x)
        with torch.no_grad():
            x.unsqueeze_(0)
        return [returned(x, v)]

    leaf = torch.randn(6, requires_grad=True)
    with pytest.raises(Unsupported, match=r"input 0 requires grad and changes its sizes .*keeps the old ones"):
        capture(fn, [leaf], options=TraceOptions(layer=layer))
    if older(leaf)._is_view():
        with torch.no_grad():
            assert not capture(fn, [leaf], options=TraceOptions(layer=layer)).metadata.is_training
        computed = (leaf * 2,)
        assert not capture(fn, computed, options=TraceOptions(layer=layer)).metadata.is_training


def test_a_change_of_shape_under_no_grad_is_remembered_after_a_write_that_autograd_sees(layer):
    def fn(x):
        w = x.diagonal()
        with torch.no_grad():
            x.t_()
        x.mul_(2)
        return [x, w]

    with pytest.raises(Unsupported, match=r"input 0 requires grad and changes its sizes .*keeps the old ones"):
        capture(fn, [(torch.randn(4, 3, requires_grad=True) * 2)[1:]], options=TraceOptions(layer=layer))
    assert not capture(fn, [torch.randn(3, 3)], options=TraceOptions(layer=layer)).metadata.is_training


def test_views_older_than_a_change_of_shape_are_written_to_where_no_gradient_is_wanted(layer, compare):
    def fn(x):
        w = x[:2]
        x.unsqueeze_(0)
        w.mul_(2)
        x.add_(1)
        return [w, x[0]]

    def make():
        return [torch.randn(3, 3, requires_grad=True) * 2]

    with torch.no_grad():
        compare(fn, make, options=TraceOptions(layer=layer))
    with pytest.raises(Unsupported, match="older than that is used"):
        capture(fn, make(), options=TraceOptions(layer=layer))


def test_detached_windows_that_would_change_strides_are_refused(layer, compare):
    def fn(x):
        y = x.clone().detach()
        y.unfold(-1, 1, 1).detach()[0] = 2
        return [y]

    compare(fn, lambda: [torch.randn(2, 3, 2)], options=TraceOptions(layer=layer))
    with pytest.raises(Unsupported, match="windows made by unfold"):
        capture(fn, [torch.randn(3, 2, 2).permute(2, 0, 1)], options=TraceOptions(layer=layer))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad[:1]


def test_errors_of_torch_while_recording_are_refusals(layer):
    def fn(x):
        return [_WrongGradient.apply(x * 2)]

    with pytest.raises(Unsupported, match=r"the gradient cannot be recorded: .*invalid gradient"):
        capture(fn, [torch.ones(2, 3, requires_grad=True)], options=TraceOptions(layer=layer))


def detached_then_written(x):
    v = x.detach()
    v.mul_(x)
    return [v]


def saved_then_written(x):
    y = (x * 1).sin_()
    return [y.mul_(y), y.add_(1)]


def repeated(x):
    x[:, :1].expand(2, 3).zero_()
    return []


def resized(x):
    torch.add(x, 1, out=x.t()[1:])
    return []


def between(x):
    x.as_strided((3,), (1,), 0).mul_(2)
    return []


def outside(x):
    x.as_strided((3,), (1,), 0).mul_(2)
    return []


@pytest.mark.parametrize(
    ("fn", "make", "what"),
    [
        (detached_then_written, lambda: torch.ones(2, 3, requires_grad=True), "but not its gradient"),
        (saved_then_written, lambda: torch.ones(2, 3, requires_grad=True), "written to in place before the backward"),
        (lambda x: [x.fill_(2)], lambda: torch.ones(1, 3).expand(2, 3), "are the same memory"),
        (repeated, lambda: torch.ones(2, 3), "several of its elements are the same memory"),
        (resized, lambda: torch.ones(4, 4), "the out argument of add is a view"),
        (between, lambda: torch.ones(3, 4)[:, ::2], "reaches beyond"),
        (outside, lambda: torch.ones(3, 3)[1:], "reaches beyond"),
        (lambda x: [x.requires_grad_() * 2], lambda: torch.ones(2, 3), "itself called requires_grad_"),
    ],
    ids=[
        "detached",
        "saved",
        "expanded",
        "repeated",
        "resized",
        "between",
        "outside",
        "requires_grad_",
    ],
)
def test_writes_whose_result_or_gradient_cannot_be_told_are_refused(layer, fn, make, what):
    with pytest.raises(Unsupported, match=what):
        capture(fn, [make()], options=TraceOptions(layer=layer))


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze_(0), lambda x: x.t_()])
def test_a_strided_view_into_gaps_before_a_change_of_shape_is_refused_where_a_gradient_is_wanted(layer, check, change):
    def fn(x):
        view = x.as_strided((2, 2), (2, 1))  # of its gradient, eager mode gives the gaps a part, which it else does not
        change(x)
        return [view]

    with pytest.raises(
        Unsupported, match=r"changed in shape in place .* after a view of it was taken by as_strided\(\)"
    ):
        capture(fn, [torch.ones(3, 8, requires_grad=True).clone()[:, ::2]], options=TraceOptions(layer=layer))
    check(fn, lambda: [torch.randn(3, 8)[:, ::2]])


class Sine(torch.autograd.Function):
    """A user's backward: with one in the graph, inputs may be written to behind the forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("before", [lambda b: b, lambda b: b.mul_(2)], ids=["as it came", "changed before"])
@pytest.mark.parametrize("own", [lambda x: x, Sine.apply], ids=["torch's backward", "user's backward"])
@pytest.mark.parametrize("gaps", [False, True])
def test_views_in_the_backward_lie_where_the_value_that_they_look_at_does(before, own, gaps):
    def fn(a, b):
        return [own(a) @ before(b)]

    wide = torch.arange(1.0, 20.0)[3:13].view(2, 5)
    b = wide[:, :2] if gaps else wide[0, :4].view(2, 2)
    graph = capture(fn, [torch.ones(2, 2, requires_grad=True), b]).graph
    views = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is torch.ops.aten.t.default]
    assert views
    for node in views:
        found, seen = node.meta["val"], node.args[0].meta["val"]
        assert found.untyped_storage()._cdata == seen.untyped_storage()._cdata
        assert (found.stride(), found.storage_offset()) == (seen.t().stride(), seen.storage_offset())


@pytest.mark.parametrize("view", [lambda x: x.as_strided((2, 2), (2, 1)), lambda x: x.narrow(0, 0, 2).unsqueeze(0)])
def test_a_write_through_a_view_with_another_write_pending_is_recorded(check, view):
    def program(x, y):
        taken = view(x)
        x.neg_()
        taken.mul_(3)
        x.detach().add_(y)
        view(x).add_(1)
        return [x * 2]

    check(program, plain)
