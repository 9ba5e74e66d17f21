"""Where outputs come from, each compared with eager in both functional layers, static and dynamic."""

from __future__ import annotations

import pytest
import torch

from aotkit_aot_trace import TraceOptions, Unsupported, capture
from aotkit_functionalize.records import OutputKind


def one_grad():
    return [torch.randn(4, 6, requires_grad=True)]


def one_plain():
    return [torch.randn(4, 6)]


def _program(name, fn, *kinds):
    return pytest.param(fn, [OutputKind(k) for k in kinds], id=name)


def chunks(x):
    return list(x.sin().chunk(2))


def unbound(x):
    return list(x.sin().unbind(0))


_PARTS = (chunks, unbound)

PROGRAMS = [
    _program("fresh", lambda x: [x * 2], "fresh"),
    _program("input itself", lambda x: [x], "input"),
    _program("input twice", lambda x: [x, x], "input", "input"),
    _program("view of input", lambda x: [x.view(-1)], "alias_of_input"),
    _program("offset view of input", lambda x: [x[1:, 2:]], "alias_of_input"),
    _program("strided view of input", lambda x: [x[::2, 1::3].t()], "alias_of_input"),
    _program("expanded input", lambda x: [x[0].expand(3, 6)], "alias_of_input"),
    _program("detached input", lambda x: [x.detach()], "alias_of_input"),
    _program("no-op contiguous", lambda x: [x.contiguous()], "input"),
    _program("view of an intermediate", lambda x: [(x * 2).t()], "fresh"),
    _program("part of an intermediate", lambda x: [(x * 2)[1:, ::2]], "fresh"),
    _program("output and its view", lambda x: (lambda y: [y, y.view(-1)])(x.sin()), "fresh", "alias_of_output"),
    _program("view and its base", lambda x: (lambda y: [y.view(-1), y])(x.sin()), "alias_of_output", "fresh"),
    _program("output twice", lambda x: [x.sin()] * 2, "fresh", "fresh"),
    _program("output and detached", lambda x: (lambda y: [y, y.detach()])(x.sin()), "fresh", "alias_of_output"),
    _program("detached and output", lambda x: (lambda y: [y.detach(), y])(x.sin()), "alias_of_output", "fresh"),
    _program(
        "two views of an intermediate",
        lambda x: (lambda y: [y.view(-1), y[1:]])(x.sin()),
        "alias_of_intermediate",
        "alias_of_intermediate",
    ),
    _program(
        "two views of two intermediates",
        lambda x: (lambda y, z: [y[0], z[1], z[0], y[1]])(x.sin(), x.cos()),
        *["alias_of_intermediate"] * 4,
    ),
    _program("chunks", chunks, *["alias_of_intermediate"] * 2),
    _program("chunks of input", lambda x: list(x.chunk(2)), *["alias_of_input"] * 2),
    _program("unbound", unbound, *["alias_of_intermediate"] * 4),
    _program("constants", lambda x: [None, 3, 2.5, "a", True, x + 1], *["constant"] * 5, "fresh"),
    _program("dtype view of input", lambda x: [x.detach().view(torch.int32)[1]], "alias_of_input"),
    _program("made inside", lambda x: [torch.ones(3), torch.arange(4)], "fresh", "fresh"),
]


@pytest.mark.covers("F1.27", "F1.28", "F1.29", "F1.30", "F1.31", "F1.32", "F1.36", "F1.44")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("make", [one_grad, one_plain])
@pytest.mark.parametrize(("fn", "kinds"), PROGRAMS)
def test_outputs_alias_what_they_alias_in_eager(check, fn, kinds, make):
    captured = check(fn, make)
    found = [o.kind for o in captured.metadata.outputs]
    if make is one_grad and fn in _PARTS:
        assert set(found) == {OutputKind.FRESH}  # autograd forbids writing to one of several parts
    else:
        assert found == kinds


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("fn", "kinds"), PROGRAMS)
def test_outputs_are_classified_alike_when_gradients_are_off(layer, fn, kinds, mode):
    with mode():
        captured = capture(fn, [torch.randn(4, 6)], options=TraceOptions(layer=layer))
    assert [o.kind for o in captured.metadata.outputs] == kinds
    assert not captured.metadata.is_training


@pytest.mark.covers("F1.39")
@pytest.mark.parametrize("prepare", [lambda x: x, torch.sin], ids=["input", "intermediate"])
def test_a_view_taken_under_no_grad_carries_no_gradient(layer, run_graph, prepare):
    """Eager lets such a view claim ``requires_grad`` (its base does), but nothing flows through it."""

    def fn(x):
        y = prepare(x)
        with torch.no_grad():
            v = y.view(-1)
        return [v, x * 2]

    x = torch.randn(4, 6, requires_grad=True)
    captured = capture(fn, [x], options=TraceOptions(layer=layer))
    assert sum(captured.metadata.forward_requires_grad) == 1
    view, double = run_graph(captured, [x])
    assert view.grad_fn is None and fn(x)[0].grad_fn is None
    if captured.metadata.outputs[0].kind is OutputKind.ALIAS_OF_INPUT:
        assert view.requires_grad and fn(x)[0].requires_grad
    double.sum().backward()
    assert torch.equal(view.detach(), fn(x)[0].detach()) and torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.covers("F1.43")
def test_views_between_real_and_complex_are_regenerated(check):
    def make():
        return [torch.randn(3, 2, requires_grad=True), torch.randn(3, dtype=torch.complex64)]

    check(lambda x, z: [torch.view_as_complex(x), torch.view_as_real(z)[1:], z * 2], make)


BITS = {
    "alias": lambda z: [z.conj(), z.conj().imag],
    "intermediate": lambda z: [(z * 2).conj()],
    "two of an intermediate": lambda z: [(lambda y: [y.conj(), y.imag, y])(z * 2)[i] for i in range(3)][:1],
    "read": lambda z: [z.conj() * 2, z.conj().imag + 1],
    "split": lambda z: [part + 1 for part in z.conj().split(2)],
    "in another type": lambda z: [z.conj().resolve_conj().view(torch.float32) * 2],
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_has_no_lazy_bits_and_the_records_have(check, name, grad):
    def make():
        return [torch.randn(3, dtype=torch.complex64).conj().requires_grad_(grad)]

    captured = check(BITS[name], make)
    targets = {node.target for node in captured.graph.graph.nodes}
    assert not targets & {torch.ops.aten._conj.default, torch.ops.aten._neg_view.default}
    for node in captured.graph.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or not (value.is_conj() or value.is_neg()), node


@pytest.mark.covers("F1.60")
def test_an_unknown_output_type_is_refused():
    with pytest.raises(Unsupported, match="output 1 is a dict"):
        capture(lambda x: [x, {"a": x}], [torch.ones(2)])
    with pytest.raises(Unsupported, match="returns a single tensor"):
        capture(lambda x: x + 1, [torch.ones(2)])


def test_a_sparse_input_is_refused():
    with pytest.raises(Unsupported, match="sparse"):
        capture(lambda x: [x.to_dense()], [torch.eye(3).to_sparse()])


@pytest.mark.covers("F1.52")
def test_tangents_are_laid_out_as_dense_outputs_are_and_contiguous_otherwise():
    def fn(x):
        y = x.sin()
        return [y, x.cos()[:, :2, ::2, 1:].sum() * 1, x.exp()[..., ::2]]

    x = torch.randn(2, 3, 4, 5, requires_grad=True) * 1
    captured = capture(fn, [x.to(memory_format=torch.channels_last)])
    tangents = [t.meta.strides for t in captured.metadata.tangents]
    assert tangents == [(60, 1, 15, 3), (), (36, 12, 3, 1)]


class OnlyTheFirst(torch.autograd.Function):
    """Its backward gives the second argument nothing."""

    @staticmethod
    def forward(ctx, a, b):
        return a * b

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


@pytest.mark.covers("F4.29")
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: [x.sin(), y.cos()], ((0,), (1,))),
        (lambda x, y: [x * y, y.cos(), x.detach() + y], ((0,), (0, 1, 2))),
        (lambda x, y: [x.floor(), y * 2], ((0,), (1,))),  # though the gradient of x is zeros, which come from nothing
        (lambda x, y: [OnlyTheFirst.apply(x, y), y * 2], ((0,), (1,))),
        (lambda x, y: [x.sin(), x.cos()], ((0, 1), ())),
        (lambda x, y: list((x * y).sin().unbind(0)), ((0, 1), (0, 1))),
        (lambda x, y: [x.view(-1), x * y, y.sin()], ((0,), (0, 1))),  # the view is taken of the caller's tensor
        (lambda x, y: [x * y], ()),  # of one tangent nothing has to be told
    ],
)
def test_the_record_says_which_tangents_each_gradient_comes_from(fn, expected):
    x, y = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    metadata = capture(fn, [x, y]).metadata
    assert metadata.reached_by == expected
    assert type(metadata).from_json(metadata.to_json()) == metadata


@pytest.mark.parametrize("train", [True, None])
@pytest.mark.parametrize("prepare", [one_grad, one_plain])
def test_what_drops_nothing_is_memory_of_its_own_each_time(layer, run_graph, prepare, train):
    def dropped(x):
        first, second = (torch.native_dropout(x, 0.0, train) for _ in range(2))
        return [*first, *second]

    args = prepare()
    torch.manual_seed(0)
    want, state = dropped(*args), torch.get_rng_state()
    captured = capture(dropped, args, options=TraceOptions(layer=layer))
    assert {o.kind for o in captured.metadata.outputs} == {OutputKind.FRESH}
    torch.manual_seed(0)
    got = run_graph(captured, args)
    assert len({value.data_ptr() for value in got}) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
def test_a_dropout_of_integers_that_drops_nothing_is_refused_as_in_eager_mode(layer, dtype):
    def dropped(x):
        return list(torch.native_dropout(x, 0.0, True))

    with pytest.raises(RuntimeError, match="can't be cast"):
        dropped(torch.ones(3, dtype=dtype))
    with pytest.raises((Unsupported, RuntimeError), match=r"dropout of a tensor of|can't be cast"):
        capture(dropped, [torch.ones(3, dtype=dtype)], options=TraceOptions(layer=layer))
