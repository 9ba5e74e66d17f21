"""Arguments that eager refuses, or gives a meaning of its own: ATen's call, and so ATen's error or result."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from aotkit_inductor_lower import compile_graph

aten = torch.ops.aten

X = torch.arange(6.0).reshape(2, 3)
N, U, B = X.long(), X.to(torch.uint8), X > 2
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
INF, NAN = float("inf"), float("nan")
LAPPING = torch.arange(9.0).as_strided((3, 3), (1, 1))
FLAT = torch.arange(8.0).as_strided((1, 2, 2, 2), (8, 1, 4, 2))
APART = torch.arange(600.0).as_strided((16, 1, 11), (36, 1, 1))
IMAGE = torch.arange(12.0).reshape(1, 3, 2, 2)
PIXELS = torch.tensor([[[0, 2], [1, 0]]])
SPREAD = torch.arange(9.0).as_strided((3, 1), (1, 2))  # its dimension of one element has an odd stride


def compiled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """A graph of one call, and its inputs."""
    graph, inputs = torch.fx.Graph(), [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
    names = iter([graph.placeholder(f"x{k}") for k in range(len(inputs))])
    given = tuple(tree_map_only(torch.Tensor, lambda _: next(names), arg) for arg in args)
    result = graph.call_function(op, given, kwargs)
    graph.output((graph.call_function(operator.getitem, (result, 0)) if len(op._schema.returns) > 1 else result,))
    return compile_graph(torch.fx.GraphModule({}, graph), inputs), inputs


REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    *((op, args, {}, "eager subtracts no bools") for op, args in [
        (aten.sub.Tensor, (X, True)), (aten.sub.Scalar, (X, True)), (aten.sub.Tensor, (N, B)),
        (aten.rsub.Scalar, (N, True)), (aten.rsub.Tensor, (B, N)), (aten.rsub.Scalar, (B, 2)),
    ]),
    (aten.add.Tensor, (N, N), {"alpha": True}, "bools for bools only"),
    (aten.add.Tensor, (X, X), {"alpha": True}, "bools for bools only"),
    (aten.add.Scalar, (N, 2, True), {}, "bools for bools only"),
    (aten.add.Scalar, (N, 2, 1.5), {}, "no such factor of integers"),
    *((op, args, {}, "a number that does not fit torch.") for op, args in [
        (aten.full_like.default, (U, 256)), (aten.fill.Scalar, (U, 300)), (aten.full_like.default, (N, INF)),
        (aten.full_like.default, (X.half(), 1e5)), (aten.masked_fill.Scalar, (U, B, 300)),
        (aten.hardtanh.default, (U, 0, 300)),
    ]),
    (aten.argmax.default, (B,), {}, "no extreme among bools"),
    (aten.argmin.default, (B, 1), {}, "no extreme among bools"),
    (aten.max.default, (X[:0],), {}, "nothing has no extreme"),
    *((op, args, {}, "a dimension that is not there") for op, args in [
        (aten._softmax.default, (X, 2, False)), (aten._softmax.default, (X, -3, False)),
        (aten.sort.default, (X, 5)), (aten.cummax.default, (X[0, 0], 1)),
        (aten.select_backward.default, (X, [2, 3, 4], 3, 0)),
        (aten.select_scatter.default, (X, X[0], -3, 0)), (aten.slice_backward.default, (X, [2, 3], 2, 0, 2, 1)),
        (aten.index_reduce.default, (X, 2, N[0], X, "prod")), (aten.diagonal_scatter.default, (X, X[0, :2], 0, 0, 2)),
    ]),
    *((op, args, {}, "volumes of two layouts") for op, args in [
        (aten.max_pool3d_with_indices.default, (FLAT, [1, 1, 1])),
        (aten.max_pool3d_with_indices_backward.default,
         (FLAT, FLAT, [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1], False, FLAT.long())),
    ]),
    (aten.nll_loss2d_forward.default, (IMAGE, N[:1, :2, None], None, 1, -100), {}, "may not go together"),
    (aten.addcdiv.default, (X, N, B), {}, "eager divides no integers"),
    (aten.view_as.default, (APART, APART.reshape(11, 16)), {}, "a view of elements"),
    (aten._unsafe_view.default, (APART, [11, 16]), {}, "a view of elements"),
    (aten.view.default, (APART, [11, 16]), {}, "a view of elements"),
    (aten.native_group_norm.default, (X, X[0, :1], None, 2, 3, 1, 1, 1e-5), {}, "weights of another size"),
    (aten.native_group_norm.default, (X[:0], None, X[0, :1], 0, 3, 1, 1, 1e-5), {}, "weights of another size"),
    *((op, args, {}, "statistics of nothing") for op, args in [
        (aten._native_batch_norm_legit_functional.default, (X[:0], None, None, X[0], X[0], True, 0.1, 1e-5)),
        (aten._native_batch_norm_legit.no_stats, (X[:0], None, None, True, 0.1, 1e-5)),
    ]),
    (aten.select_scatter.default, (X, X[0, :1], 0, 1), {}, "of other sizes than"),
    (aten.select_scatter.default, (X, X[0, 0], -1, 1), {}, "of other sizes than"),
    (aten.slice_scatter.default, (X, X[:1], -1, 1), {}, "of other sizes than"),
    (aten.slice_scatter.default, (X, X[:, :1], 0, 1), {}, "of other sizes than"),
    (aten.slice_scatter.default, (X, X[0], 0, 0, 1), {}, "of other sizes than"),
    (aten.index_put.default, (X[0], [N[0], N[0]], X[0]), {}, "more indices than dimensions"),
    *((op, args, {}, "more dimensions than their places") for op, args in [
        (aten.index_put.default, (X, [N[0, :1], N[0, :1]], X[:1, :1])),
        (aten._unsafe_index_put.default, (X, [N[0, :1], N[0, :1]], X[:1, :1])),
        (aten._unsafe_masked_index_put_accumulate.default, (X, B[0, :1], [N[0, :1], N[0, :1]], X[:1, :1])),
    ]),
    *((op, args, {}, "values of another type") for op, args in [
        (aten.put.default, (N, N[0], X[0])), (aten.index_put.default, (N, [U[0].long() * 0], X)),
        (aten.index_add.default, (N, 1, N[0], X)), (aten.index_copy.default, (N, 1, N[0], X)),
        (aten.index_copy.default, (X, 1, N[0], X.double())), (aten.index_reduce.default, (X, 1, N[0], N, "prod")),
    ]),
    (aten.put.default, (X, N[0], X[0, :2]), {}, "other numbers of indices"),
    (aten.put.default, (X, N[0, :2], X[0]), {}, "other numbers of indices"),
    *((op, args, {}, "slices of other sizes") for op, args in [
        (aten.index_add.default, (X, 0, N[0, 1:2], X[:1, :1])), (aten.index_add.default, (X, -1, N[0, :1], X[:1, :1])),
        (aten.index_reduce.default, (X, 0, N[0, :1], X[:1, :1], "amax")),
        (aten.index_reduce.default, (X, 0, N[0, :2], X[:1], "prod")),
    ]),
    *((op, args, {}, "may not go together") for op, args in [
        (aten._softmax_backward_data.default, (X, X[:1], 1, torch.float32)),
        (aten.replication_pad3d_backward.default, (IMAGE.expand(2, 3, 2, 2), IMAGE, [0, 0, 0, 0, 0, 0])),
        (aten.nll_loss2d_forward.default, (IMAGE, PIXELS, X[0, :1], 1, -100)),
        (aten.nll_loss2d_forward.default, (IMAGE, PIXELS[:, :0], None, 1, -100)),
        (aten.nll_loss2d_backward.default, (IMAGE[:, 0, :1], IMAGE, PIXELS, None, 0, -100, X[0, 0])),
        (aten._unsafe_masked_index_put_accumulate.default, (X, B[0, :2], [N[0], N[0, :2]], X[0, :2])),
        (aten._unsafe_index_put.default, (X, [N[0], N[0, :2]], X[0])),
    ]),
    (aten.bucketize.Tensor, (X, X), {}, "no lowering rule"),
    (aten.binary_cross_entropy_with_logits.default, (X, U, None, None, 0), {}, "no lowering rule"),
]  # fmt: skip
ALIKE: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (aten.add.Tensor, (B, B), {"alpha": True}, ""),
    (aten.add.Scalar, (N, 2.5, 1.5), {}, ""),
    (aten.add.Tensor, (N, True), {}, ""),
    (aten.sub.Tensor, (N, 1), {}, ""),
    (aten.full_like.default, (U, 255), {}, ""),
    (aten.full_like.default, (X.half(), INF), {}, ""),
    (aten.full_like.default, (X.half(), 65504.0), {}, ""),
    (aten.full_like.default, (B, 7), {}, ""),
    (aten.full_like.default, (U, -1), {}, "does not fit"),  # eager wraps it around
    (aten.hardtanh.default, (X, NAN, 1.0), {}, "a bound is nan"),
    (aten.hardtanh.default, (X, -1.0, INF), {}, ""),
    (aten.sum.dim_IntList, (X, [1]), {"dtype": torch.bool}, "sums as bools"),
    (aten.sum.dim_IntList, (B, [1]), {}, ""),
    (aten.amax.default, (X[:0], [1]), {}, "nothing has no extreme"),
    (aten.amax.default, (B, [1]), {}, ""),
    (aten.argmax.default, (N,), {}, ""),
    (aten.slice_scatter.default, (LAPPING, X[:1, :] + 9, 0, 1, 2), {}, "overlaps itself"),
    (aten.select_scatter.default, (LAPPING, X[0] + 9, 0, 1), {}, "overlaps itself"),
    (aten.diagonal_scatter.default, (LAPPING, X[0] + 9), {}, "overlaps itself"),
    (aten.copy.default, (LAPPING, LAPPING.flip(0)), {}, "overlaps itself"),
    (aten.copy.default, (X.t(), X.t() + 9), {}, ""),
    (aten.select_scatter.default, (X.t(), X[:, 0] + 9, 0, 1), {}, ""),
    (aten._unsafe_view.default, (X.t(), [3, 1, 2]), {}, ""),
    (aten.unsqueeze.default, (X, 2), {}, ""),
    (aten.unsqueeze.default, (X, -3), {}, ""),
    (aten._softmax.default, (X[0, 0], 0, False), {}, ""),
    (aten.index_add.default, (X[:0], 0, N[0], X[[0, 0, 0]]), {}, "nothing is indexed"),
    (aten.index_put.default, (X[:0], [N[0, :0]], X[0]), {}, "nothing is indexed"),
    (aten.constant_pad_nd.default, (X, [3, -2], 1.5), {}, ""),
    (aten.view_as.default, (X, X.t()), {}, ""),
    (aten.addcdiv.default, (X, N, X), {}, ""),
    (aten.topk.default, (X, True, -1), {}, "equal elements compete"),
    (aten.unfold.default, (X, True, True, True), {}, ""),
    (aten.max_pool2d_with_indices.default, (X.t()[None, :, :1], [7, 3], [7, 3], [2, 1], [2], True), {},
     "around the input"),
    (aten.max_pool2d_with_indices.default, (X[None], [3, 3], [1, 1], [1, 1], [1, 1], True), {}, ""),
    (aten.max_pool2d_with_indices.default, (FLAT, [1, 1]), {}, ""),
    (aten.max_pool3d_with_indices.default, (IMAGE, [1, 1, 1]), {}, ""),
    (aten.select_scatter.default, (SPREAD, X[0] + 9, 1, 0), {}, ""),
    (aten.select_scatter.default, (X[:, :1].expand(2, 3), X[0] + 9, 0, 1), {}, ""),
    (aten._softmax_backward_data.default, (X, X, 1, torch.float32), {}, ""),
    (aten._log_softmax_backward_data.default, (X, X, 0, torch.float32), {}, ""),
    (aten.reflection_pad1d_backward.default, (X, X[:, :2], [1, 0]), {}, ""),
    (aten._adaptive_avg_pool2d_backward.default, (IMAGE[..., :1], IMAGE), {}, ""),
    (aten.nll_loss_forward.default, (X, N[0, 1:], X[0], 1, -100), {}, ""),
    (aten.nll_loss2d_forward.default, (IMAGE, PIXELS, X[1], 1, -100), {}, ""),
    (aten.nll_loss_backward.default, (X[0, :1], X, N[0, 1:], None, 2, -100, X[0, 0]), {}, "may not go together"),
    (aten.nll_loss_backward.default, (X[0, 2], X, N[0, 1:], X[0], 1, -100, X[1, 0]), {}, ""),
    (aten.nll_loss_backward.default, (X[0, 1:], X, N[0, 1:], X[0], 0, -100, X[1, 0]), {}, ""),
    (aten.nll_loss_forward.default, (X[:1, :0], N[0, :1], None, 2, 0), {}, "may not go together"),
    (aten.gather.default, (X[0], 0, N[0, 1]), {}, "may not go together"),
    (aten.gather.default, (X, 1, N[:1, :2]), {}, ""),
    (aten.scatter.value, (X, 0, N[0, :0], 1.5), {}, "may not go together"),
    (aten.scatter.src, (X[0], 0, N[0, :2], X[1]), {}, ""),
    (aten._native_batch_norm_legit_no_training.default, (X, X[0], X[1], X[0], X[1] * X[1], 0.1, 1e-5), {}, ""),
    (aten.native_layer_norm_backward.default,
     (X, X, [3], X[:, 1:2] / 1, X[:, :1] / 8, X[0], X[1], [True, True, True]), {}, ""),
]  # fmt: skip


WRITTEN: list[tuple[torch.Tensor, str]] = [
    (LAPPING, "whether elements of this tensor overlap"),
    (torch.arange(60.0).as_strided((2, 3, 5), (9, 5, 1)), "whether elements of this tensor overlap"),
    (torch.arange(30.0).view(2, 3, 5), ""),
    (torch.arange(30.0).view(5, 2, 3).permute(1, 2, 0), ""),
    (torch.arange(5.0).expand(2, 3, 5), ""),
    (torch.arange(60.0).view(2, 3, 10)[..., :5], "whether elements of this tensor overlap"),
    (torch.arange(120.0).view(4, 3, 10)[::2].transpose(0, 2), "whether elements of this tensor overlap"),
]


@pytest.mark.parametrize(("x", "reason"), WRITTEN, ids=[str(x.stride()) for x, _ in WRITTEN])
def test_a_tensor_of_symbolic_strides_is_written_to_in_atens_order_unless_it_certainly_does_not_overlap(
    x: torch.Tensor, reason: str
) -> None:
    y = torch.arange(x.numel()).view(x.shape) % 7 - 3.0
    graph = make_fx(aten.copy.default, tracing_mode="symbolic")(x, y)
    code = compile_graph(graph)
    assert [reason in call.reason for call in code.report().externs] == ([True] if reason else [])
    torch.testing.assert_close(code([x, y])[0], aten.copy.default(x, y))


def test_a_target_of_one_column_does_not_agree_with_an_image_of_unknown_width() -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return aten.nll_loss2d_forward.default(x, target, None, 1, -100)[0]

    target = N[:1, :2, None]
    code = compile_graph(make_fx(loss, tracing_mode="symbolic")(IMAGE, target))
    assert ["may not go together" in call.reason for call in code.report().externs] == [True]
    for call in (loss, lambda *args: code(list(args))):
        with pytest.raises(RuntimeError, match="size mismatch"):
            call(IMAGE, target)


CASE = ("op", "args", "kwargs", "reason")

#: What the fake kernels of this torch refuse in eager's words, so that no graph is compiled.
SEEN_BY_FAKES = {aten.diagonal_scatter.default} if RELEASE < (2, 13) else set()
SEEN_BY_FAKES |= (
    {aten.native_group_norm.default, aten.replication_pad3d_backward.default} if RELEASE >= (2, 15) else set()
)


@pytest.mark.parametrize(CASE, REFUSED, ids=[str(c[0]) for c in REFUSED])
def test_what_eager_refuses_is_refused_in_its_words(op: Any, args: Any, kwargs: Any, reason: str) -> None:
    if op is aten.hardtanh.default and RELEASE >= (2, 15):  # which takes bounds that let everything pass
        graph, inputs = compiled(op, args, kwargs)
        assert torch.equal(graph(inputs)[0], op(*args, **kwargs))
        return
    with pytest.raises(Exception) as refusal:  # of whatever type it is
        op(*args, **kwargs)
    if op in SEEN_BY_FAKES:
        with pytest.raises(refusal.type, match=re.escape(str(refusal.value)[:40])):
            compiled(op, args, kwargs)
        return
    graph, inputs = compiled(op, args, kwargs)
    assert [call.target for call in graph.report().externs] == [str(op)]
    assert reason in graph.report().externs[0].reason
    with pytest.raises(refusal.type, match=re.escape(str(refusal.value)[:40])):
        graph(inputs)


@pytest.mark.parametrize(CASE, ALIKE, ids=[str(c[0]) for c in ALIKE])
def test_what_eager_takes_gives_its_result_and_is_left_to_aten_for_a_reason_only(
    op: Any, args: Any, kwargs: Any, reason: str
) -> None:
    graph, inputs = compiled(op, args, kwargs)
    assert len(graph.report().externs) == bool(reason)
    assert all(reason in call.reason for call in graph.report().externs)
    (got,), want = graph(inputs), op(*args, **kwargs)
    want = want if isinstance(want, torch.Tensor) else want[0]
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, equal_nan=True)


TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("op", ["masked_fill", "index_fill"])
def test_a_tensor_taken_as_a_number_is_refused_by_its_value_where_eager_refuses_it(op: str, dtype: torch.dtype) -> None:
    x = torch.zeros(2, dtype=dtype)
    for given in TYPES:
        calls = {
            "masked_fill": (aten.masked_fill.Tensor, (x, torch.tensor([False, True]))),
            "index_fill": (aten.index_fill.int_Tensor, (x, 0, torch.tensor([1]))),
        }
        function, first = calls[op]
        limits = torch.finfo(given) if given.is_floating_point else None
        numbers = [limits.min, limits.max, -0.9, 300.0, INF, NAN] if limits else [-1, 1, 2**7, 2**15, 2**31, 2**62]
        code, _ = compiled(function, (*first, torch.zeros((), dtype=given)), {})
        for number in numbers:
            value = torch.tensor(number, dtype=torch.float64 if limits else torch.int64).to(given)
            inputs = [*(a for a in first if isinstance(a, torch.Tensor)), value]
            try:
                want = function(*first, value)
            except RuntimeError as refusal:
                with pytest.raises(RuntimeError, match=re.escape(str(refusal)[:40])):
                    code(inputs)
            else:
                torch.testing.assert_close(code(inputs)[0], want, equal_nan=True)
