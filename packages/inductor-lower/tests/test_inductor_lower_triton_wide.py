"""Offsets beyond 2**31: kernels run in Triton's interpreter on tensors of which few elements are touched.

The memory is a file without contents, of which what is written takes room: it costs nothing, also where a process gets
no more addresses than there is memory. Tensors begin in its middle: an offset that has lost its upper bits lies in it
too, and gives a wrong number instead of a crash.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    bind_program,
    compile_graph,
    compile_to_program,
    decompositions,
    parse_program,
)
from aotkit_inductor_lower.targets.triton import (
    TritonError,
    compile_kernel,
    kernels_of,
    render_program,
    to_program,
)

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

ROW = 1_100_000_000  # the third row of this length begins beyond 2**31
REACH = 2 * ROW + 64


def addresses(count: int, dtype: torch.dtype, directory: pathlib.Path) -> torch.Tensor:
    """A tensor in a file that is gone with it."""
    path = directory / "addresses"
    tensor = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
    path.unlink()
    return tensor


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """4.4 GB of addresses."""
    return addresses(2 * REACH, torch.int8, tmp_path_factory.mktemp("memory"))


def rows(memory: torch.Tensor) -> torch.Tensor:
    """Three rows of five elements, far apart."""
    x = memory.as_strided((3, 5), (ROW, 1), REACH)
    return x.copy_(torch.arange(15).view(3, 5) * 7 % 11)


def columns(memory: torch.Tensor) -> torch.Tensor:
    """Five rows of three elements that are far apart."""
    x = memory.as_strided((5, 3), (1, ROW), REACH)
    return x.copy_(torch.arange(15).view(5, 3) * 7 % 11)


def interpreted(f: Callable[..., Any], *args: Any, mode: str = "fake") -> CompiledGraph:
    """``f`` with the kernels of a device, in the interpreter."""
    graph = make_fx(torch.func.functionalize(f), decompositions(), tracing_mode=mode)(*args)
    compiled = compile_graph(graph, options=LowerOptions(processor="triton-interpreter", verify=True))
    assert isinstance(compiled, CompiledGraph)
    return compiled


def assert_same(got: list[Any], want: tuple[torch.Tensor, ...]) -> None:
    """Everything is an integer: equal."""
    for ours, reference in zip(got, want, strict=True):
        assert ours.dtype == reference.dtype and torch.equal(ours, reference)


READERS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: (x * 2 + 1, x.t() - 1),
    "reversed": lambda x: (x.flip(0) + 1, x.flip(1) + 1),
    "reductions": lambda x: (x.sum(0), x.sum(1), x.amax(0), x.any(1)),
    "places": lambda x: (x.argmax(0), x.argmin(1)),
    "scans": lambda x: (x.cumsum(0), x.cumsum(1)),
    "gathered": lambda x: (x[torch.tensor([2, -1, 0])], x.index_select(1, torch.tensor([2, 0], dtype=torch.int32))),
    "joined": lambda x: (torch.cat([x, x + 1]), torch.stack([x, x], 1).sum(1)),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("layout", [rows, columns])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.covers("F5e.1")
def test_what_lies_beyond_two_to_the_31_is_read(
    name: str, layout: Callable[..., torch.Tensor], memory: torch.Tensor
) -> None:
    x = layout(memory)
    assert_same(interpreted(READERS[name], x)([x]), READERS[name](x))


WRITERS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: x.mul_(3).add_(1),
    "rows": lambda x: x[1:].copy_(x[:-1] + 1),
    "scattered": lambda x: x.index_put_((torch.tensor([2, 0]),), x[:2] * 2),
    "accumulated": lambda x: x.index_put_((torch.tensor([2, 2, 1]),), x[torch.tensor([0, 2, 1])], accumulate=True),
}


@pytest.mark.parametrize("layout", [rows, columns])
@pytest.mark.parametrize("name", WRITERS)
def test_what_lies_beyond_two_to_the_31_is_written(
    name: str, layout: Callable[..., torch.Tensor], memory: torch.Tensor
) -> None:
    write = WRITERS[name]

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write(x)
        return (x.sum(0, dtype=torch.int64),)

    x = layout(memory)
    near = x.clone(memory_format=torch.contiguous_format)
    assert_same(interpreted(f, x)([x]), f(near))
    assert torch.equal(x, near)


def test_results_reach_beyond_two_to_the_31() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.empty_strided((3, 5), (ROW, 1), dtype=torch.int8).copy_(x * 2),)

    x = torch.arange(15, dtype=torch.int8).view(3, 5)
    compiled = interpreted(f, x)
    (result,) = compiled([x])
    assert result.stride() == (ROW, 1) and torch.equal(result, x * 2)
    assert compiled.report().kernel_count == 1 and not compiled.report().externs


def test_one_program_serves_strides_on_both_sides_of_two_to_the_31(memory: torch.Tensor) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2 + y, x.sum(0), x.sum(1), x.argmax(0), x.flip(0) + 1, x[torch.tensor([1, -1])]

    near = torch.empty(64, dtype=torch.int8).as_strided((3, 5), (16, 1)).copy_(torch.arange(15).view(3, 5))
    y = torch.ones(3, 5, dtype=torch.int8)
    compiled = interpreted(f, near, y, mode="symbolic")
    assert any(kind == "stride" for _, _, kind, _ in compiled.compiled.plan.symbol_sources)
    for x in (near, rows(memory)):
        assert_same(compiled([x, y]), f(x, y))


def test_numbers_that_are_made_of_indices_are_whole_where_their_parts_are_large() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = torch.arange(-3_000_000_000, 0, 3_000_001)
        return x + down, x + torch.arange(0, 3_000_000_000, 3_000_001), x + down % 1000

    x = torch.zeros(1000, dtype=torch.int64)
    compiled = interpreted(f, x)
    assert_same(compiled([x]), f(x))


SERIAL = f"""\
aotkit-ir 2
program put
input u
input index
input y
buffer u : int8[3, 5] strides [{ROW}, 1] input on cpu
buffer index : int64[3] strides [1] input on cpu
buffer y : int8[4, 5] strides [5, 1] input on cpu
loop put(i0 < 3, i1 < 5):
  stage():
    %v0 = load u[i0, i1] : i8
    %v1 = load index[i0] : i64
    %v2 = check %v1 < 4
    store y[%v2, i1] += %v0
return
"""


def test_loops_of_the_only_program_instance_reach_beyond_two_to_the_31(memory: torch.Tensor) -> None:
    program = to_program(render_program(parse_program(SERIAL)))
    (kernel,) = kernels_of(program)
    assert kernel.source.grid == () and compile_kernel(kernel.source, 90).code
    u, y = rows(memory), torch.ones(4, 5, dtype=torch.int8)
    index = torch.tensor([3, -1, 0])
    want = y.clone().index_put_((index,), u, accumulate=True)
    bind_program(program)([u, index, y])
    assert torch.equal(y, want)


@pytest.mark.parametrize(("rows_", "columns_"), [(3_000_000_000, 4), (2**31 - 1, 20000)])
def test_long_loops_compile_with_64_bits(rows_: int, columns_: int) -> None:
    program = parse_program(f"""\
aotkit-ir 2
program total
input x
buffer x : int8[{rows_}, {columns_}] strides [{columns_}, 1] input on cpu
buffer y : int8[{columns_}] strides [1] output on cpu
loop total(i0 < {columns_}):
  stage(r0 < {rows_}):
    %v0 = load x[r0, i0] : i8
    %v1 = reduce max %v0 : i8
  stage():
    store y[i0] = %v1
return y
""")
    (kernel,) = render_program(program).kernels
    assert ".to(tl.int64)" in kernel.source.text
    ptx = compile_kernel(kernel.source, 90, keep_ptx=True).ptx
    ends = [int(n) for n in re.findall(r"setp\.l[te]\.[su]64\s+%p\d+, %rd\d+, (\d+);", ptx)]
    assert "ld.global" in ptx and any(rows_ - 4096 <= end <= rows_ for end in ends), ends


FEW_OFFSETS = {
    # (buffers, loop): 2^33 iterations of a sum of pairs; a corner of a large memory; the product of two long matrices
    "many iterations": (
        "x : float32[131072] strides [1]",
        "w : float32[65536] strides [1]",
        "y : float32[131072] strides [1]",
        "i0 < 131072",
        "r0 < 65536",
        ("i0", "r0", "i0"),
    ),
    "a corner": (
        f"x : float32[3, {ROW}] strides [{ROW}, 1]",
        "w : float32[64] strides [1]",
        "y : float32[64] strides [1]",
        "i0 < 64",
        "r0 < 64",
        ("0, i0", "r0", "i0"),
    ),
    "a product": (
        "x : float32[4096, 4096] strides [4096, 1]",
        "w : float32[4096, 4096] strides [4096, 1]",
        "y : float32[4096, 4096] strides [4096, 1]",
        "i0 < 4096, i1 < 4096",
        "r0 < 4096",
        ("i0, r0", "r0, i1", "i0, i1"),
    ),
}


@pytest.mark.parametrize("name", FEW_OFFSETS)
def test_offsets_count_and_neither_iterations_nor_memory_around_them(name: str) -> None:
    x, w, y, grid, inner, (at_x, at_w, at_y) = FEW_OFFSETS[name]
    (kernel,) = render_program(
        parse_program(f"""\
aotkit-ir 2
program few
input x
input w
buffer {x} input on cpu
buffer {w} input on cpu
buffer {y} output on cpu
loop few({grid}):
  stage({inner}):
    %v0 = load x[{at_x}] : f32
    %v1 = load w[{at_w}] : f32
    %v2 = mul %v0, %v1 : f32
    %v3 = reduce sum %v2 : f32
  stage():
    store y[{at_y}] = %v3
return y
""")
    ).kernels
    assert "int64" not in kernel.source.text
    assert compile_kernel(kernel.source, 90).code


def test_more_program_instances_than_a_launch_has_are_refused() -> None:
    f = lambda x: (x.sum(1),)
    graph = make_fx(f, decompositions(), tracing_mode="symbolic")(torch.ones(4, 4))
    options = LowerOptions(processor="triton-interpreter", check_inputs=False)  # it has no memory: strides are 0
    compiled = compile_graph(graph, options=options)
    assert compiled.compiled.binary.target == "triton"
    many = torch.empty(1, dtype=torch.float32).expand(2**33, 20000)
    with pytest.raises(TritonError, match="program instances, more than 2\\^31"):
        compiled([many])


STEP = 60_000_000  # the 36th line begins beyond 2**31
LINES = 40


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """9.6 GB of addresses."""
    return addresses(2 * LINES * STEP + 64, torch.float16, tmp_path_factory.mktemp("halves"))


def lines(number: int, memory: torch.Tensor | None) -> torch.Tensor:
    """Lines of an attention, far apart if there is ``memory`` for that."""
    x = torch.randn(1, 1, LINES, 16, generator=torch.Generator().manual_seed(number)).half()
    if memory is None:
        return x
    return memory.as_strided(x.shape, (1, 1, STEP, 1), LINES * STEP + 16 * number).copy_(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", ["queries", "keys"])
def test_lines_of_an_attention_beyond_two_to_the_31_are_read(halves: torch.Tensor, far: str, causal: bool) -> None:
    """Of one block, which begins at line 0: that times a step has as many bits as the line's number."""

    def f(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *given, gradient = args
        given = [t.detach().requires_grad_() for t in given]
        out = F.scaled_dot_product_attention(*given, is_causal=causal)
        return out.detach(), *torch.autograd.grad(out, given, gradient)

    of_queries, of_keys = (halves if far == which else None for which in ("queries", "keys"))
    args = [lines(k, of_keys if k in (1, 2) else of_queries) for k in range(4)]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    program = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter")).program
    assert len(kernels_of(program)) == 3
    for ours, reference in zip(bind_program(program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-2, atol=1e-2)


def test_parts_of_keys_have_memory_beyond_two_to_the_31() -> None:
    """The keys of all heads are the same, so they reach nowhere as far."""
    query = torch.empty(128, 1, 32, 256, dtype=torch.float16)
    keys = torch.empty(1, 1, 1 << 18, 256, dtype=torch.float16).expand(128, 1, -1, -1)
    seen = torch.empty(128, 1, 1, 1 << 18, dtype=torch.bool)
    f = lambda q, k, seen: F.scaled_dot_product_attention(q, k, k, seen)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(query, keys, seen)
    program = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter")).program
    texts = [kernel.source.text for kernel in kernels_of(program) if "scratch_sums" in kernel.source.text]
    assert len(texts) == 2 and all("tl.program_id(0).to(tl.int64)" in text for text in texts)
