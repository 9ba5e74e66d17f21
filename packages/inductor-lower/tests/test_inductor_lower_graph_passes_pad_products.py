"""Products whose rows begin in the middle of 16 bytes: padded, with the same values and strides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, decompositions
from aotkit_inductor_lower.graph_passes.pad_products import PASS, pad_products
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.target import NO_MACHINE
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER

aten = torch.ops.aten


def on_device(**options: Any) -> PassContext:
    return PassContext.of(LowerOptions(**options), target=TRITON_INTERPRETER)


def padded(f: Callable[..., Any], args: list[torch.Tensor], **options: Any) -> GraphModule:
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    return GraphModule(graph, pad_products(copy_graph(graph), on_device(**options), 0))


def operand(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    return torch.randn(rows, columns, dtype=dtype)


def products(graph: GraphModule) -> list[tuple[list[int], ...]]:
    """Shapes of the factors of each."""
    found = [node for node in graph.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
    return [tuple(list(arg.meta["val"].shape) for arg in node.args[-2:]) for node in found]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("left", ["rows", "columns"])
@pytest.mark.parametrize("right", ["rows", "columns"])
@pytest.mark.parametrize("sizes", [(9, 13, 11), (16, 13, 8), (7, 8, 24), (8, 16, 9), (2, 5, 3)])
def test_values_and_strides_stay(
    sizes: tuple[int, int, int], left: str, right: str, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    m, n, k = sizes
    given = [operand(m, k, left, dtype), operand(k, n, right, dtype), torch.randn(n, dtype=dtype)]

    def f(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten.addmm(bias, a, b) if biased else aten.mm(a, b),)

    graph = padded(f, given)
    (got,), (want,) = graph(*given), f(*given)
    exact = given[0].double() @ given[1].double() + (given[2].double() if biased else 0)
    assert (got.double() - exact).norm() <= 1.01 * (want.double() - exact).norm() + 1e-6
    assert got.stride() == want.stride() and got.is_contiguous()
    ((first, second),) = products(graph)
    assert second[1] % 8 == 0, "rows of the result"
    assert first[1] % 8 == 0 or (left == "columns" and right == "rows"), "rows of a factor that has the inner size"
    assert first[0] % 8 == 0 or left == "rows"


def test_the_gradients_of_a_layer_read_one_padded_gradient() -> None:
    def f(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g.t() @ x, g @ w

    given = [torch.randn(16, 13, dtype=torch.bfloat16), *(torch.randn(n, 8, dtype=torch.bfloat16) for n in (16, 13))]
    graph = padded(f, given)
    assert products(graph) == [([16, 16], [16, 8]), ([16, 16], [16, 8])]
    pads = graph.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert {(pad.args[0].target, tuple(pad.args[1])) for pad in pads} == {
        ("g_1", (0, 3, 0, 0)),
        ("w_1", (0, 0, 0, 3)),
    }
    for got, want in zip(graph(*given), f(*given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "what", ["aligned", "wide type", "small", "vector", "without fuel", "sizes known later", "bias of rows"]
)
def test_what_stays_as_it_is(what: str) -> None:
    dtype = torch.float32 if what == "wide type" else torch.bfloat16
    size = 16 if what == "aligned" else 13
    a, b = torch.randn(24, 16, dtype=dtype), torch.randn(16, size, dtype=dtype)
    f: Callable[..., Any] = lambda a, b: (aten.mm(a[:1] if what == "vector" else a, b),)
    if what == "bias of rows":
        f = lambda a, b: (aten.addmm(a[:, :1], a, b),)
    mode = "symbolic" if what == "sizes known later" else "fake"
    graph = copy_graph(make_fx(f, decompositions(), tracing_mode=mode)(a, b))
    before = str(graph)
    ctx = on_device(fuel=0) if what == "without fuel" else on_device()
    assert str(pad_products(graph, ctx, 1 << 33 if what == "small" else 0)) == before


def test_only_a_device_wants_it() -> None:
    assert PASS.when(on_device())
    assert not PASS.when(PassContext.of()) and not NO_MACHINE.capabilities.row_bytes


def test_what_is_summed_behind_a_product_is_read_where_the_product_has_it() -> None:
    """Else the gradient of logits would be stored twice, for the sum that is the gradient of a bias."""

    def f(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g = g * 2
        first = g.abs()
        return g @ w, g.t() @ x, g.sum(0), first

    given = [torch.randn(16, 13, dtype=torch.bfloat16), *(torch.randn(n, 8, dtype=torch.bfloat16) for n in (16, 13))]
    graph = padded(f, given)
    assert products(graph) == [([16, 16], [16, 8]), ([16, 16], [16, 8])]
    (total,) = graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    (first,) = graph.graph.find_nodes(op="call_function", target=aten.abs.default)
    assert total.args[0].meta["val"].stride() == (16, 1), "of the rows with zeros"
    assert first.args[0].target is aten.mul.Tensor, "that is not there yet"
    for got, want in zip(graph(*given), f(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_what_counts_elements_of_a_storage_reads_the_copy_without_padding() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.as_strided(a @ b, [3, 4], [13, 1], 2) * 2, (a @ b).view(-1) * 2

    given = [torch.randn(9, 11, dtype=torch.bfloat16), torch.randn(11, 13, dtype=torch.bfloat16)]
    graph = padded(f, given)
    assert [sizes[1][1] for sizes in products(graph)] == [16, 16]
    for got, want in zip(graph(*given), f(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_what_reads_an_input_behind_a_write_reads_what_was_written() -> None:
    """And not the padded copy of what was there."""

    def f(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = x.view(9, 11)
        result = (seen @ w).sin()
        x.copy_(y)
        return result, seen + 1

    given = [torch.randn(size, dtype=torch.bfloat16) for size in ((99,), (11, 13), (99,))]
    graph = padded(f, given)
    assert [sizes[1][1] for sizes in products(graph)] == [16]
    want = f(*[each.clone() for each in given])
    for got, value in zip(graph(*[each.clone() for each in given]), want, strict=True):
        torch.testing.assert_close(got, value)
