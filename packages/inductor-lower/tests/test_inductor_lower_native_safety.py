"""What would kill a native program: eager's value or eager's error, also with every buffer between redzones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
Compile = Callable[..., Callable[..., list[Any]]]


@pytest.fixture(params=[False, True], ids=["plain", "redzones"])
def compiled(request: pytest.FixtureRequest) -> Compile:
    """``compiled(f, *args)``: ``f`` traced with ``args``, as a function of tensors that returns a list."""

    def compile_for(f: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> Callable[..., list[Any]]:
        graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode=mode)(*args)
        run = compile_graph(graph, options=LowerOptions(verify=True, redzones=request.param))
        return lambda *given: run(list(given))

    return compile_for


X = torch.arange(24.0).reshape(4, 6)
WRONG = torch.tensor([0, 3, 1, 7])
READS = {
    "index": lambda x, i: x[i] + 1,
    "index_select": lambda x, i: torch.index_select(x * 2, 0, i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x + 1),
    "gather": lambda x, i: torch.gather(x.sin(), 0, i[:, None].expand(4, 6)),
    "take": lambda x, i: torch.take(x, i * 7) + 1,
    "second dimension": lambda x, i: x[:, i].cos(),
}
WRITES = {
    "index_put": lambda x, i: torch.index_put(x + 1, (i,), x * 2),
    "accumulate": lambda x, i: torch.index_put(x + 1, (i,), x * 2, accumulate=True),
    "scatter": lambda x, i: torch.scatter(x + 1, 0, i[:, None].expand(4, 6), x),
    "scatter_add": lambda x, i: torch.scatter_add(x + 1, 0, i[:, None].expand(4, 6), x),
    "index_add": lambda x, i: torch.index_add(x + 1, 0, i, x * 2),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_an_index_out_of_range_raises_as_eager_does_and_the_next_call_is_right(name: str, compiled: Compile) -> None:
    f = {**READS, **WRITES}[name]
    right = torch.tensor([0, 3, 1, 1])
    run, x = compiled(f, X, right), X.clone()
    for wrong in (WRONG, torch.tensor([0, -100, 1, 2])):
        with pytest.raises((IndexError, RuntimeError)):
            f(x, wrong)
        with pytest.raises((IndexError, RuntimeError), match=r"index|out of range|out of bounds"):
            run(x, wrong)
    assert torch.equal(x, X)
    torch.testing.assert_close(run(x, right)[0], f(x, right))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.uint8])
def test_an_integer_division_by_zero_raises_as_eager_does(dtype: torch.dtype, compiled: Compile) -> None:
    x, y = torch.arange(1, 38).to(dtype), torch.ones(37, dtype=dtype)
    zero = y.clone()
    zero[36] = 0  # the last one, in what is left over from whole vectors
    for f in (torch.floor_divide, torch.remainder, torch.fmod, lambda x, y: torch.div(x, y, rounding_mode="trunc")):
        run = compiled(f, x, y)
        assert torch.equal(run(x, y)[0], f(x, y))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            f(x, zero)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(x, zero)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_least_integer_divided_by_minus_one_wraps(dtype: torch.dtype, compiled: Compile) -> None:
    """Eager mode dies here for the wide types, so the results are written out."""
    low = torch.iinfo(dtype).min
    x, y = torch.full((37,), low, dtype=dtype), torch.full((37,), -1, dtype=dtype)
    for mode in ("trunc", "floor"):
        (got,) = compiled(lambda x, y, m=mode: torch.div(x, y, rounding_mode=m), x, y)(x, y)
        assert got.tolist() == [low] * 37
    for f in (torch.remainder, torch.fmod):
        assert compiled(f, x, y)(x, y)[0].tolist() == [0] * 37
    negated, magnitude = compiled(lambda x: (-x, x.abs()), x)(x)
    assert negated.tolist() == magnitude.tolist() == [low] * 37


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_by_the_width_and_over_give_eagers_values(dtype: torch.dtype, compiled: Compile) -> None:
    width = torch.iinfo(dtype).bits
    x = torch.tensor([1, -1, 5, -7, torch.iinfo(dtype).min]).to(dtype).repeat_interleave(4)
    by = torch.tensor([0, width - 1, width, min(2 * width, 127)]).to(dtype).repeat(5)
    for f in (torch.bitwise_left_shift, torch.bitwise_right_shift):
        assert torch.equal(compiled(f, x, by)(x, by)[0], f(x, by))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.int32, torch.int64])
def test_nan_and_infinity_become_the_integers_that_eager_gives(
    source: torch.dtype, target: torch.dtype, compiled: Compile
) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.5, -2.5] * 8).to(source)
    assert torch.equal(compiled(lambda x: x.to(target), x)(x)[0], x.to(target))


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_what_no_narrow_integer_holds_is_converted_without_harm(target: torch.dtype, compiled: Compile) -> None:
    """C++ leaves the value open, and eager's differs between its loops; what fits is exact."""
    x = torch.tensor([float("nan"), float("inf"), 1e30, 100.0, 0.0, 7.9] * 7)
    got = compiled(lambda x: x.to(target), x)(x)[0]
    fits = torch.tensor([False, False, False, True, True, True] * 7)
    assert torch.equal(got[fits], x[fits].to(target))


EMPTY = {
    "pointwise": lambda x: x.sin() + 1,
    "rows": lambda x: (x.sum(1), x.mean(1), x.softmax(1), torch.nn.functional.layer_norm(x, (6,))),
    "columns": lambda x: (x.sum(0), x.prod(0), x.any(0), x.cumsum(0)),
    "all": lambda x: (x.sum(), x * x.sum()),
    "joined": lambda x: (torch.cat([x, x + 1]), torch.stack([x, x]), x.repeat(2, 2)),
    "moved": lambda x: (x.t().contiguous() * 2, x.flip(0), x.roll(1, 1), torch.nn.functional.pad(x, (1, 1)) + 1),
    "product": lambda x: (x @ x.t() + 1, x.t() @ x),
    "scattered": lambda x: torch.zeros(6, 6).index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x.cos()),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_tensors_without_elements_give_eagers_results(name: str, mode: str, compiled: Compile) -> None:
    """Traced for no rows, and for four of them where the number of rows is a symbol."""
    f, empty = EMPTY[name], torch.empty(0, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mean of nothing
        got = compiled(f, empty if mode == "fake" else X, mode=mode)(empty)
        want = f(empty)
    for ours, theirs in zip(got, want if isinstance(want, tuple) else [want], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def unaligned(values: torch.Tensor) -> torch.Tensor:
    """The values at an address that no element of their type has otherwise."""
    memory = bytearray(1) + bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(memory, dtype=values.dtype, offset=1).view(values.shape)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16]
)
def test_inputs_at_odd_addresses_are_read_as_they_are(dtype: torch.dtype, compiled: Compile) -> None:
    x = torch.arange(-60, 60).reshape(4, 30).to(dtype)
    run = compiled(lambda x: (x + x, x.t().contiguous() + 1, x.sum(1), x.amax(0), x[:, 3:17] * 2), x)
    odd = unaligned(x)
    assert odd.data_ptr() % 2 == 1
    for got, want in zip(run(odd), run(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("others", [0, 2])
def test_as_strided_of_an_empty_input_reads_the_elements_of_its_storage(compiled, others):
    def program(x, *more):
        return [x.as_strided((2, 3), (3, 1), 1) + 1, *(y.sin() for y in more)]

    storage = torch.arange(8.0)
    args = [storage[2:2], *(torch.rand(0) for _ in range(others))]
    found = compiled(program, *args)(*args)
    assert torch.equal(found[0], storage[1:7].view(2, 3) + 1)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_zeros_divided_by_zeros_raise_when_they_are_computed_and_only_then(mode: str) -> None:
    """Both operands are known when the graph is compiled; without elements nothing is divided."""

    def divided(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(x)
        return torch.div(zeros, zeros, rounding_mode=mode)

    for sizes, fails in (((0, 3), False), ((2, 3), True)):
        x = torch.ones(sizes, dtype=torch.int32)
        run = compile_graph(make_fx(divided, decompositions(), tracing_mode="fake")(x))
        with pytest.raises(RuntimeError, match="ZeroDivisionError") if fails else nullcontext():
            assert run([x])[0].shape == x.shape


ALONE_ON_A_PAGE = """
import ctypes, mmap, torch
from torch.fx.experimental.proxy_tensor import make_fx
from aotkit_inductor_lower import compile_graph, decompositions

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for closed in (0, 2):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + closed * page), page, 0) == 0
whole = torch.frombuffer(memory, dtype=torch.float32, count=page // 4, offset=page)
"""

MASKED = """
x = whole.view(1, 8, -1, 16).permute(0, 3, 1, 2)
x.copy_(torch.randn(x.shape))
w, scale = torch.randn(16, 1, 3, 3), torch.rand(4, 16) + 1


def gradient(x, w, scale):
    how = [1, 1], [1, 1], [1, 1], False, [0, 0], 16, [True, False, False]
    return torch.ops.aten.convolution_backward(x, x, w, None, *how)[0]


def padded(x, w, scale):
    return torch.nn.functional.pad(torch.nn.functional.batch_norm(x, *scale), (1, 1, 1, 1))


for f in (gradient, padded):
    run = compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(x, w, scale))
    torch.testing.assert_close(run([x, w, scale])[0], f(x, w, scale), rtol=1e-5, atol=1e-5)
"""


# Elements with steps between them: nothing is read before the first lane or behind the last.
SPACED = """
whole.copy_(torch.randn(whole.shape))
for space in range(2, 10):
    count = (len(whole) - 1) // space + 1
    last = whole.as_strided((count,), (space,), len(whole) - 1 - (count - 1) * space)
    first = whole.as_strided((count,), (space,), 0)
    for x in (first, last, first[:-3], last[3:]):
        run = compile_graph(make_fx(torch.neg, decompositions(), tracing_mode="fake")(x))
        assert torch.equal(run([x])[0], -x), space
images = whole.view(1, 1, 32, 32)
for stride in (2, 3):
    def pool(x):
        return torch.nn.functional.avg_pool2d(x, 3, stride, 1)
    run = compile_graph(make_fx(pool, decompositions(), tracing_mode="fake")(images))
    torch.testing.assert_close(run([images])[0], pool(images))
"""

# Lanes that are picked out of whole vectors: nothing is read behind the last one's place.
COMPUTED = """
whole.copy_(torch.randn(whole.shape))
for size in (16, 17, 40, 56):
    for x in (whole[: 3 * size].view(3, size), whole[-3 * size :].view(3, size)):
        for times in (1, 2, 3):
            at = torch.arange(size * times) // times
            def repeated(x, at):
                return x[:, at].relu()
            run = compile_graph(make_fx(repeated, decompositions(), tracing_mode="fake")(x, at))
            assert torch.equal(run([x, at])[0], repeated(x, at)), (size, times)
"""

# Factors of a product that are copied, vectors of which are longer than what is left of them.
COPIED = """
from aotkit_inductor_lower import LowerOptions
whole.copy_(torch.randn(whole.shape))
for summed, side in ((26, 39), (20, 50), (31, 33), (40, 22), (100, 9)):
    last, other = whole[-summed * side :].view(summed, side), torch.randn(summed, 40)
    for f in (lambda x, y: x.t() @ y, lambda x, y: y.t() @ x, lambda x, y: x.t().exp() @ y):
        for part in (last, whole[-summed * side :].view(side, summed).t()):
            graph = make_fx(f, decompositions(), tracing_mode="fake")(part, other)
            run = compile_graph(graph, options=LowerOptions(contractions="generated"))
            torch.testing.assert_close(run([part, other])[0], f(part, other), rtol=1e-4, atol=1e-3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are closed by a function of POSIX")
@pytest.mark.parametrize(
    "program", [MASKED, SPACED, COMPUTED, COPIED], ids=["masked", "spaced", "computed", "copied"]
)
def test_what_lies_beside_a_page_is_not_read(program: str, warm_python: Any) -> None:
    done = warm_python.run(["-c", ALONE_ON_A_PAGE + program])
    assert done.returncode == 0, done.stderr


WIDER_THAN_A_REGISTER = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from aotkit_inductor_lower import compile_graph

def padded(x, y):
    wide = torch.ops.aten.constant_pad_nd(x, [1, 2], 0.0)
    return wide.float() * y + 1, wide > 0

for dtype in (torch.float64, torch.float32):
    x, y = torch.randn(7, 50, dtype=dtype), torch.randn(7, 53)
    run = compile_graph(make_fx(padded, tracing_mode="fake")(x, y), [x, y])
    for got, want in zip(run([x, y]), padded(x, y), strict=True):
        torch.testing.assert_close(got, want)
"""


def test_masked_loads_of_more_than_a_register_compile(warm_python: Any) -> None:
    """LLVM ends the process where assembly takes a vector that no register holds."""
    done = warm_python.run(["-c", WIDER_THAN_A_REGISTER])
    assert done.returncode == 0, done.stderr
