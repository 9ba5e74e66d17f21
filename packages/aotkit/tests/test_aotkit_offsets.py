"""Tensors that do not begin their storage: inputs, saved operands and tangents, and elsewhere at a later call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aotkit
from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions

N = 4

LAYOUTS = {
    "dense": lambda big, at: big[at : at + N * N].view(N, N),
    "transposed": lambda big, at: big[at : at + N * N].view(N, N).t(),
    "columns of wider rows": lambda big, at: big[at : at + N * 7].view(N, 7)[:, 2 : 2 + N],
    "every other element": lambda big, at: big[at : at + N * 8].view(N, 8)[:, 1::2],
    "every other row, transposed": lambda big, at: big[at : at + 2 * N * N].view(2 * N, N)[1::2].t(),
    "one row for all": lambda big, at: big[at : at + N].expand(N, N),
}

TANGENTS = {
    "dense": lambda big, like: big[: like.numel()].view(like.shape),
    "offset": lambda big, like: big[5 : 5 + like.numel()].view(like.shape),
    "gaps": lambda big, like: big[3 : 3 + 2 * like.numel()].view(*like.shape[:-1], -1)[..., ::2],
    "expanded": lambda big, like: big[2].expand(like.shape),
}

# The saved operand is b; a requires grad.
PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "mm from the left": lambda a, b: b.t() @ a,
    "bmm": lambda a, b: torch.bmm(a.view(2, 2, N), b[None].expand(2, N, N)),
    "addmm": lambda a, b: torch.addmm(b[0], a, b),
    "linear": lambda a, b: F.linear(a, b, b[1]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b.t()[None, None]),
    "convolution": lambda a, b: F.conv1d(a[None], b[:2, :, None]),
    "part of b": lambda a, b: a[:, 1:] @ b[1:, 1:3],
    "rows of b": lambda a, b: sum(x @ y for x, y in zip(a.split(2, 1), b.split(2, 0), strict=True)),
    "b is changed before": lambda a, b: a @ b.mul_(2),
    "rows of b are changed before": lambda a, b: (b[1:].mul_(2), a[:, 1:] @ b[1:])[1],
    "b is returned as well": lambda a, b: (a @ b, b[1:], b.t()),
    "a part of an intermediate": lambda a, b: a[:, :2] @ b.sin()[2:] + a @ torch.cat([b, b])[1:5],
}


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()


def run(fn, big, at, layout, tangent):
    """Results, gradients and all memory around the operand that a call leaves."""
    memory = big.clone()
    a = torch.arange(float(N * N)).view(N, N).sin().to(big.dtype).requires_grad_()
    b = LAYOUTS[layout](memory, at)
    out = fn(a, b)
    outs = out if isinstance(out, tuple) else (out,)
    gradients = torch.autograd.grad(outs[0], a, TANGENTS[tangent](big, outs[0]))
    return [*(o.detach().clone() for o in outs), *gradients, memory], [(o.stride(), o.storage_offset()) for o in outs]


def agree(fn, compiled, dtype, places, layout, tangent):
    big = torch.linspace(-1.0, 1.0, 120).to(dtype)
    for at in places:
        expected, geometry = run(fn, big, at, layout, tangent)
        got, found = run(compiled, big, at, layout, tangent)
        assert found == geometry
        for value, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(value, wanted)


def cases():
    """Every operator in a layout, and every layout under an operator; types, tangents and sizes in turn."""
    layouts, tangents = list(LAYOUTS), list(TANGENTS)
    for number, name in enumerate(PRODUCTS):
        layout = layouts[number % 5]  # not the last one, which is not written to
        yield name, layout, tangents[number % 4], torch.float16 if number % 3 == 1 else torch.float32, number % 4 == 3
    for number, layout in enumerate(layouts):
        yield "mm", layout, tangents[number % 4], torch.float32, number % 2 == 1


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("name", "layout", "tangent", "dtype", "dynamic"), list(cases()))
def test_a_saved_operand_is_read_where_it_begins_in_every_call(name, layout, tangent, dtype, dynamic):
    fn = PRODUCTS[name]
    options = {"fallback": "error", "redzones": True, "cache": False}
    compiled = torch.compile(fn, backend="aotkit", dynamic=dynamic, options=options)
    agree(fn, compiled, dtype, (3, 0, 8), layout, tangent)


@pytest.mark.parametrize("first", [0, 5])
def test_a_graph_from_the_cache_reads_a_saved_operand_where_this_call_has_it(first, tmp_path, monkeypatch):
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path))
    fn = PRODUCTS["mm"]
    for places in ((first, 3), (3, first), (7, 0)):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error"})
        agree(fn, compiled, torch.float32, places, "transposed", "gaps")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_compiled_by_hand_reads_a_saved_operand_where_it_begins(dynamic):
    def lower(graph, _):
        return compile_graph(graph, LowerOptions(redzones=True))

    fn = PRODUCTS["bmm"]
    compiled = aotkit.aot_function(fn, lower, decompositions=decompositions(), dynamic=dynamic)
    agree(fn, compiled, torch.float32, (4, 0, 9), "columns of wider rows", "offset")


STRIDED = {
    "read": lambda x: x.as_strided((2,), (1,), 6) * 1,
    "of a part": lambda x: x[2:].as_strided((2, 2), (1, 3), 4) + 1,
    "written": lambda x: x.clone().as_strided((2,), (1,), 3) + x.as_strided((2,), (3,), 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_counts_from_the_start_of_the_storage_that_this_call_brings(name, dynamic):
    fn, big = STRIDED[name], torch.arange(100.0)
    compiled = torch.compile(fn, backend="aotkit", dynamic=dynamic, options={"fallback": "error", "cache": False})
    for at in (3, 0, 10, 3, 0):
        assert torch.equal(compiled(big[at : at + 8]), fn(big[at : at + 8])), at


def test_as_strided_is_refused_where_the_storage_of_this_call_ends_before():
    def fn(x):
        return x.as_strided((2,), (1,), 30) * 1

    compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error", "cache": False})
    assert torch.equal(compiled(torch.arange(100.0)[:8]), torch.tensor([30.0, 31.0]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(torch.arange(8.0))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("fn", [torch.trace, torch.diag, torch.ops.aten.diagonal_copy.default])
def test_diagonals_of_tensors_whose_offset_is_a_symbol_equal_eager(fn, dtype):
    big = torch.randn(100).mul(9).to(dtype)
    compiled = aotkit.aot_function(fn, compile_graph, decompositions=decompositions(), dynamic=True)
    for at, rows, columns in ((3, 4, 7), (40, 5, 2), (17, 3, 3)):
        x = big[at : at + rows * columns].view(rows, columns)
        assert torch.allclose(compiled(x), fn(x)), at
