"""What is read by tensors of indices is laid out as in eager mode, which looks at the strides of the indices, too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_aot_trace import FunctionalLayer, TraceOptions, Unsupported, capture

VALUES = {
    "contiguous": lambda: torch.randn(5, 4, 6),
    "permuted": lambda: torch.randn(6, 5, 4).permute(1, 2, 0),
    "size-one": lambda: torch.randn(4, 2, 5, 1, 3).permute(2, 1, 0, 3, 4),
}
# By an index that is not contiguous, and by one of one dimension as long as its last one.
READS = {
    "first": lambda x, i, j: x[i],
    "second": lambda x, i, j: x[:, i],
    "last": lambda x, i, j: x[..., i],
    "part": lambda x, i, j: x[i, :, :3],
    "broadcast": lambda x, i, j: x[:, j, i],
    "column": lambda x, i, j: x[i, i[..., :1]],
    "apart": lambda x, i, j: x[i, :, j],
    "apart-again": lambda x, i, j: x[i[..., :1], :, i],
    "short": lambda x, i, j: x[i.int()],
    "computed": lambda x, i, j: x[i * i].sin(),
    "batched": lambda x, i, j: torch.func.vmap(lambda a, b: a[b], (2, None))(x, i),
}
INDICES = [
    torch.tensor([[0, 1], [1, 0], [1, 1]]).t(),
    torch.tensor([[0, 1, 0], [0, 0, 1], [1, 1, 1]]).t(),
    (torch.arange(24) % 5 % 2).reshape(3, 4, 2).permute(2, 0, 1),
]


def strides(x: torch.Tensor) -> list[int]:
    return [int(step) for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("form", VALUES)
def test_what_is_read_lies_as_eagers_does(form: str, symbolic: bool) -> None:
    inputs = [VALUES[form](), *INDICES[2 * symbolic :]]
    reads = list(READS.values())[:: 1 + 3 * symbolic]  # with symbols each takes ten times as long

    def call(x, *indices):
        places = [(i, torch.zeros(i.shape[-1], dtype=torch.int64)) for i in indices]
        return [read(x, *place) for read, place in itertools.product(reads, places)]

    expected = call(*inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = capture(call, [mode.from_tensor(x) for x in inputs] if symbolic else inputs).graph
    (output,) = graph.graph.find_nodes(op="output")
    for node, found, wanted in zip(output.args[0], graph(*inputs), expected, strict=True):
        assert strides(node.meta["val"]) == strides(wanted)
        torch.testing.assert_close(found, wanted)


def the_ones(index):
    return torch.zeros(2, dtype=index).as_strided((2, 1, 1), (1, 1, 2))


# Values and their indices: what eager lays out otherwise than torch's fake kernel says, one cause each.
SINGLE = {
    "short-repeated": (torch.randn(3, 2), [torch.tensor([1]).int(), torch.zeros(3, 3, dtype=torch.int64).t()]),
    "short-repeated-twice": (torch.randn(4, 3), [None, torch.tensor([[1], [2]]).int().t().expand(4, 3, 2)]),
    "row-of-permuted": (torch.randn(4, 1, 3).permute(1, 2, 0), [None, torch.tensor([0, 2, 1])]),
    "number-last": (torch.randn(1, 3, 1), [torch.tensor([0]), torch.tensor(1), None]),
    "ones": (torch.randn(4).as_strided((2, 1, 2), (1, 1, 2)), [the_ones(torch.int64)]),
    "short-ones": (
        torch.randn(2, 2, 4, 1).as_strided((2, 2, 4, 1), (1, 8, 2, 16)),
        [None, None, the_ones(torch.int32)],
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_places_of_one_read_lie_as_eagers_do(name: str) -> None:
    x, indices = SINGLE[name]

    def read(x, *given):
        left = iter(given)
        return [torch.ops.aten.index(x, [None if index is None else next(left) for index in indices])]

    inputs = [x, *(index for index in indices if index is not None)]
    graph = capture(read, inputs).graph
    (output,) = graph.graph.find_nodes(op="output")
    (node,), (wanted,) = output.args[0], read(*inputs)
    assert node.meta["val"].shape == wanted.shape
    assert strides(node.meta["val"]) == strides(wanted)


def test_other_devices_make_indices_contiguous_that_lie_differently() -> None:
    x, i, j = torch.randn(5, 4), INDICES[1], torch.zeros(3, 3, dtype=torch.int64)

    def read(x, i, j):
        return [x[i, j], x[i, i]]

    graph = capture(read, [value.to("meta") for value in (x, i, j)]).graph
    (output,) = graph.graph.find_nodes(op="output")
    assert [strides(node.meta["val"]) for node in output.args[0]] == [[3, 1], [1, 3]]


ROWS = [torch.randn(4, 5), torch.tensor([[0, 1], [3, 2], [1, 1]])]


def test_a_recorded_view_of_what_does_not_lie_as_torchs_fake_kernel_says_is_one_of_a_copy() -> None:
    def rows(x, i):
        other, read = x * 2, x[i.t()]
        other.add_(1)
        return [read.reshape(-1) * 2, read.contiguous().view(2, -1), read.sin(), read[0] * 1, other]

    recorded = make_fx(rows, tracing_mode="fake")(*ROWS)
    assert recorded.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    for layer in FunctionalLayer:
        graph = capture(recorded, ROWS, options=TraceOptions(layer=layer)).graph
        torch.testing.assert_close(graph(*ROWS), rows(*ROWS))


def written_value(x, i):
    read = x[i.t()]
    row, view = read[0], read.reshape(-1)
    read.add_(1)
    return [row * 1, view * 1, read * 1]


def written_before(x, i):
    read = x[i.t()].contiguous()
    read[0].add_(1)
    return [read.view(-1) * 1]


def written_view(x, i):
    read = x[i.t()].contiguous()
    read.view(-1)[1:].add_(1)
    return [read * 1]


def value_and_view(x, i):
    read = x[i.t()].contiguous()
    return [read, read.view(-1)]


def two_views(x, i):
    read = x[i.t()].contiguous()
    return [read.view(2, -1), read.view(-1)]


@pytest.mark.parametrize("layer", FunctionalLayer)
@pytest.mark.parametrize("rows", [written_value, written_before, written_view, value_and_view, two_views])
def test_no_view_is_one_of_a_copy_where_the_difference_shows(rows, layer) -> None:
    recorded = make_fx(rows, tracing_mode="fake")(*ROWS)
    with pytest.raises(Unsupported, match="view"):
        capture(recorded, ROWS, options=TraceOptions(layer=layer))


@pytest.mark.parametrize("layer", FunctionalLayer)
@pytest.mark.parametrize("given", [lambda x: x, lambda x: x[1:]], ids=["argument", "part"])
def test_no_view_of_an_argument_is_one_of_a_copy(given, layer) -> None:
    def written(x):
        view = given(x).view(-1)
        view.mul_(2)
        return [view.sum()]

    recorded = make_fx(written, tracing_mode="fake")(torch.randn(3, 4))
    with pytest.raises(Unsupported, match="view"):
        capture(recorded, [torch.randn(4, 3).t()], options=TraceOptions(layer=layer))
