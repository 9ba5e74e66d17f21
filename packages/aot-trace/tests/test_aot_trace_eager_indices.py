"""What is read by tensors of indices is laid out as in eager mode, which looks at the strides of the indices, too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_aot_trace import capture

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


def test_a_recorded_view_of_what_does_not_lie_as_torchs_fake_kernel_says_is_one_of_a_copy() -> None:
    def rows(x, i):
        read = x[i.t()]
        return [read.reshape(-1) * 2, read.contiguous().view(2, -1), read.sin()]

    inputs = [torch.randn(4, 5), torch.tensor([[0, 1], [3, 2], [1, 1]])]
    recorded = make_fx(rows, tracing_mode="fake")(*inputs)
    assert recorded.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    torch.testing.assert_close(capture(recorded, inputs).graph(*inputs), rows(*inputs))
