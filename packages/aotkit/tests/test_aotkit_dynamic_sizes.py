"""One compile serves every size: each kind of kernel with sizes that change, 0 and 1 among them, with gradients.

``backed``: sizes that Dynamo knows examples of. It gives 0 and 1 graphs of their own, all others share one.
``unbacked``: sizes of which nothing is known (``mark_unbacked``); one graph serves 0 and 1 too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.errors import SizeOverflowError

Make = Callable[[int], tuple[torch.Tensor, ...]]
SIZES = (23, 2, 17, 1, 0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def rows(*rest: int) -> Make:
    return lambda n: (normal(n, *rest),)


def places(n: int) -> torch.Tensor:
    return torch.arange(n) % 5


KINDS: dict[str, tuple[Callable[..., torch.Tensor], Make]] = {
    "pointwise": (lambda x, y: torch.sin(x) * y + 1, lambda n: (normal(n, 5), normal(n, 5))),
    "broadcast": (lambda x, y: x * y, lambda n: (normal(n, 1), normal(1, 7))),
    "outer product": (lambda x: x[:, None] - x[None, :], rows()),
    "row sum": (lambda x: (x * 2).sum(1), lambda n: (normal(5, n),)),
    "column sum": (lambda x: (x * 2).sum(0), rows(5)),
    "full sum": (lambda x: (x * 2).sum(), rows(5)),
    "mean": (lambda x: x.mean(0), rows(5)),
    "product": (lambda x: x.prod(1), rows(3)),
    "softmax of rows": (lambda x: torch.softmax(x, -1), lambda n: (normal(3, n),)),
    "softmax of columns": (lambda x: torch.softmax(x, 0), rows(4)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda n: (normal(n, 6), normal(6), normal(6))),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda n: (normal(n, 4, 3, 3), normal(4), normal(4))),
    "variance of rows": (lambda x: x.var(1), rows(6)),
    "variance of columns": (lambda x: x.var(0, correction=0), rows(6)),
    "sum between functions": (lambda x: x.exp().sum(1).log(), rows(6)),
    "scan": (lambda x: x.cumsum(0), rows(6)),
    "cat": (lambda x, y: torch.cat([x * 2, y + 1]), lambda n: (normal(n, 4), normal(3, 4))),
    "cat of columns": (lambda x, y: torch.cat([x * 2, y + 1], 1), lambda n: (normal(n, 4), normal(n, 3))),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), lambda n: (normal(3, n),)),
    "flip and roll": (lambda x: x.flip(0).roll(2, 1), rows(5)),
    "repeat": (lambda x: x.repeat(2, 3), rows(5)),
    "transpose": (lambda x: (x.t() * 2).contiguous(), rows(5)),
    "index": (lambda x, i: x[i] * 2, lambda n: (normal(5, 4), places(n))),
    "accumulate": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda n: (normal(5, 4), places(n), normal(n, 4)),
    ),
    "scatter": (
        lambda x, i, v: x.scatter_add(0, i, v),
        lambda n: (normal(5, 4), places(n)[:, None].expand(n, 4), normal(n, 4)),
    ),
    "embedding": (lambda w, i: F.embedding(i, w), lambda n: (normal(5, 4), places(n))),
    "any": (lambda x: (x > 0).any(1), rows(4)),
    "argmax": (lambda x: x.argmax(1), rows(3)),
    "sort": (lambda x: x.sort(0).values, rows(3)),
    "top": (lambda x: x.topk(2, 1).values * 2, rows(3)),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda n: (normal(n, 4), normal(3, 4), normal(3))),
    "batched product": (lambda x, y: torch.bmm(x, y) * 2, lambda n: (normal(n, 4, 3), normal(n, 3, 2))),
    "convolution": (lambda x, w: F.conv2d(x, w) * 2, lambda n: (normal(n, 2, 5, 5), normal(3, 2, 3, 3))),
    "pooling": (lambda x: F.max_pool2d(x, 2), rows(2, 6, 6)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), rows(2, 4, 4)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), rows(2, 4, 4)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), lambda n: (normal(n, 5), places(n))),
    "squared error": (lambda x: F.mse_loss(x * 2, x.flip(1)), rows(5)),
    "attention": (
        lambda q, k: torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ k,
        lambda n: (normal(2, n, 8), normal(2, n, 8) + 1),
    ),
    "size as a number": (lambda x: x * x.shape[0] / x.numel() ** 0.5 + 2.0 / (x.shape[0] + 1), rows(3)),
    "function of a size": (lambda x: x * torch.sym_sqrt(x.shape[0]) * math.log2(x.shape[0] + 1), rows(3)),
    "half a size more": (lambda x: x.new_ones(int(x.shape[0] * 1.5) + 2).sum() * x + abs(x.shape[0] - 9), rows(3)),
    "padded to sevens": (lambda x: F.pad(x, (0, 0, 0, 7 + -x.shape[0] % 7)).view(-1, 7, 3).sum(1), rows(3)),
    "part of a size": (lambda x: x.new_ones(math.ceil(x.shape[0] / 3) + 1).sum() * x, rows(3)),
    "square image": (
        lambda x: (x.view(int(x.shape[0] ** 0.5), int(math.sqrt(x.shape[0])), 3).transpose(0, 1) * 2).flip(1).mean(0),
        lambda n: (normal(n * n, 3),),
    ),
    "root of a size": (
        lambda x: F.pad(x * x.new_ones(int((3 * x.shape[0]) ** 0.5)).sum(), (0, int(x.shape[0] ** 0.5))),
        rows(3),
    ),
    "rounded parts": (
        lambda x: (
            F.pad(x * x.new_ones(int(x.shape[0] * 1.7)).sum(), (0, round(x.shape[0] / 4), 0, math.ceil(len(x) ** 0.5)))
            + int(math.floor(x.shape[0] * 0.3) * 0.7) * round(x.shape[0] * 0.1)
        ),
        rows(3),
    ),
    "of two sizes": (
        lambda x: x.new_ones(math.floor(x.shape[0] * (8.0 / min(x.shape[0] + 1, x.shape[1])))).sum() * x.sin(),
        lambda n: (normal(n, n + 1),),
    ),
    "partly negative": (
        lambda x: x * x.new_ones(int(x.shape[0] * 0.3 - 1.9) + 9).sum() + int(x.shape[0] * 0.3 - 1.9),
        rows(3),
    ),
    "zoomed": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), lambda n: (normal(1, 2, n + 2, 8),)),
    "zoomed and measured": (
        lambda x: F.interpolate(x, scale_factor=(0.7, 1.3), mode="nearest", recompute_scale_factor=True).exp(),
        lambda n: (normal(1, 2, n + 2, 8),),
    ),
    "shrunk": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), lambda n: (normal(2, 2, n + 2, 8),)),
    "diagonal": (lambda x: x.diagonal() * 2, lambda n: (normal(n, n),)),
    "triangle": (lambda x: x.triu(1), rows(4)),
    "parts": (lambda x: x[:, 1:3] * x[:, -1:], rows(4)),
    "reshape": (lambda x: (x * 2).view(x.shape[0], 2, 2).permute(1, 0, 2).reshape(-1, 2), rows(4)),
    "windows": (lambda x: x.unfold(1, 2, 1).sum(-1), rows(4)),
}
#: Torch's own derivative or fake kernel asks whether the size is 0 or 1, which nobody knows: a typed refusal.
ASKS = {"scan", "product"}
#: Kinds, and whether nothing is known of the sizes.
WAYS = [(name, unbacked) for name in KINDS for unbacked in (False, True) if not (unbacked and name in ASKS)]
#: Dynamo itself asks before torch 2.12 whether two unknown sizes are one, and leaves the function to eager.
DYNAMO_ASKS = {"cross entropy"} if torch.__version__.startswith("2.11.") else set()


def _mark(inputs: tuple[torch.Tensor, ...], make: Make) -> None:
    """The dimensions that are not the same for 3 and 4 are unknown."""
    for tensor, three, four in zip(inputs, make(3), make(4), strict=True):
        for dim in range(tensor.dim()):
            if three.shape[dim] != four.shape[dim]:
                mark_unbacked(tensor, dim)


def _run(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point()]
    result = function(*inputs)
    if not result.requires_grad:
        return [result]
    weights = torch.cos(torch.arange(result.numel(), dtype=result.dtype)).view(result.shape)
    return [result.detach(), *torch.autograd.grad(result, leaves, weights)]


def check(name: str, *, unbacked: bool, sizes: tuple[int, ...] = SIZES) -> int:
    """Compare with eager at every size; how many graphs were compiled."""
    function, make = KINDS[name]
    torch._dynamo.reset()
    counters.clear()
    options = {"fallback": "error"}
    compiled = torch.compile(function, backend="aotkit", dynamic=None if unbacked else True, options=options)
    for size in sizes:
        inputs = make(size)
        if unbacked:
            _mark(inputs, make)
        try:
            want = _run(function, make(size))
        except (RuntimeError, IndexError):  # an empty row has no largest element
            continue
        torch.testing.assert_close(_run(compiled, inputs), want, equal_nan=True)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("ignore:var:UserWarning")  # of eager: the variance of nothing
@pytest.mark.covers("F5c.9")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("name", "unbacked"), WAYS)
def test_every_kind_of_kernel_serves_every_size(name, unbacked, request):
    """Symbols, or sizes of which nothing is known; at each push a kind has one of both.

    As symbols 0 and 1 have graphs of their own, without symbols: a third of the kinds run there, all of them with
    `--whole`.
    """
    if unbacked:  # a transposed one of size 1 or 0 is contiguous, others are not
        assert check(name, unbacked=True) in ((0,) if name in DYNAMO_ASKS else (1, 2))
    elif request.config.getoption("--whole") or zlib.crc32(name.encode()) % 3 == 0:
        assert check(name, unbacked=False) <= 3
    else:
        assert check(name, unbacked=False, sizes=SIZES[:3]) <= 1


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize("name", sorted(ASKS))
def test_what_torch_asks_of_a_size_of_which_nothing_is_known_is_refused_by_name(name):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="depends on the elements of a tensor"):
        check(name, unbacked=True)


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize(
    "size",
    [
        lambda n: int(n * 0.3 * 7.5),  # 26 for 12, where 2.25 * n is 27
        lambda n: int(n * 0.1 + n * 0.2),
        lambda n: int(n // 0.1),
        lambda n: int(n * 0.7 * 1.3 + 0.1),
        lambda n: int((n + 1000.0) * 0.3 * 10),  # 3020 for 7, where 3.0 * n + 3000.0 is 3021
        lambda n: int(math.prod([n, 0.3, 7.5])),
    ],
)
def test_a_size_of_floats_that_torch_merges_is_refused_by_name(size):
    compiled = torch.compile(lambda x: x.new_ones(size(x.shape[0])) * 2, backend="aotkit", dynamic=True)
    with pytest.warns(aotkit.EagerFallback, match="a size depends on floats that torch merges"):
        for rows in (7, 3, 12, 36, 100):  # without the small ones of one graph more
            assert len(compiled(normal(rows, 2))) == size(rows)


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize(
    "size",
    [
        lambda n: int(int(n * 0.7) * 1.5),
        lambda n: int((int(n * 0.7) + 1) * 1.3),
        lambda n: int(int(n * 0.7) * int(n * 0.3) * 1.5),
        lambda n: math.ceil(math.floor(n * 0.7) / 3),
    ],
)
def test_a_size_that_is_made_an_integer_twice_is_compiled(size):
    options = {"cache": False, "fallback": "error"}
    compiled = torch.compile(lambda x: x.new_ones(size(len(x))) * 2, backend="aotkit", dynamic=True, options=options)
    for rows in (7, 13, 12, 36, 101):
        assert len(compiled(normal(rows, 2))) == size(rows)


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize("inside", [False, True])
def test_a_size_of_merged_floats_in_a_checkpointed_region_is_refused_by_name(inside):
    def function(x):
        size = len(x) * 0.3 * 7.5

        def region(x):
            return x * x.new_ones(int(len(x) * 0.3 * 7.5 if inside else size)).sum()

        return checkpoint(region, x, use_reentrant=False)

    compiled = torch.compile(function, backend="aotkit", dynamic=True)
    with pytest.warns(aotkit.EagerFallback, match="a size depends on floats that torch merges"):
        for rows in (7, 12):
            x = normal(rows, 2).requires_grad_()
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.covers("F5c.9")
def test_a_size_that_an_operator_merges_is_refused_by_name():
    compiled = torch.compile(
        lambda x: x.new_ones(len(torch.arange(len(x) * 0.7, len(x) * 2.1, 0.1))), backend="aotkit", dynamic=True
    )
    with pytest.warns(aotkit.EagerFallback, match="a size depends on floats that torch merges"):
        for rows in (7, 3, 12, 36, 100):
            assert len(compiled(normal(rows, 2))) == len(torch.arange(rows * 0.7, rows * 2.1, 0.1))


def test_floats_of_sizes_that_torch_merges_are_numbers_of_kernels():
    def function(x):
        return x * (x.shape[0] * 0.3 * 7.5) + x.new_ones(int(x.shape[0] * 0.75)).sum()

    compiled = torch.compile(function, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for rows in (7, 4, 10):
        torch.testing.assert_close(compiled(normal(rows, 2)), function(normal(rows, 2)))


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize(
    "size",
    [
        lambda n: math.ceil(math.floor(n * 0.7)) + math.trunc(round(n / 3)),
        lambda n: math.ceil(math.ceil(n - int(n * 0.3))),  # of a sum, which could be negative for all that is known
        lambda n: math.floor(max(int(n * 0.3), n // 2)) - math.floor(math.ceil(n**0.5)) + 3,
        lambda n: int(n * 0.7) + round(n**0.5),
    ],
)
def test_a_size_that_is_rounded_once_or_twice_is_that_of_the_program(size):
    def function(x):
        rows = size(x.shape[0])
        return x.new_ones(rows).cumsum(0) * rows, x[: size(x.shape[0])]

    options = {"fallback": "error", "verify": True}  # programs are printed and read back
    compiled = torch.compile(function, backend="aotkit", dynamic=True, options=options)
    for rows in (10, 7, 33):
        x = normal(rows, 2)
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.covers("F5c.9")
def test_scaled_images_of_every_size_have_eagers_sizes():
    compiled = torch.compile(
        lambda x, y: (F.interpolate(x, scale_factor=0.7), F.interpolate(y, scale_factor=1.1)),
        backend="aotkit", dynamic=True, options={"fallback": "error"},
    )  # fmt: skip
    for rows in range(2, 200, 3):
        x, y = torch.ones(1, 1, rows, 4), torch.ones(1, rows, rows + 1)
        found = compiled(x, y)
        assert found[0].shape == F.interpolate(x, scale_factor=0.7).shape
        assert found[1].shape == F.interpolate(y, scale_factor=1.1).shape


CONDITIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "factor": lambda x: x * (x.shape[0] > 4),
    "term of a bool": lambda x: (x > 0) + (x.shape[0] > 4),
    "filled": lambda x: torch.full((3,), x.shape[0] % 3 == 0),
    "filled with a float": lambda x: torch.full((3,), x.shape[0] * 0.5 > 2, dtype=torch.float32),
    "filled in place": lambda x: x.clone().fill_(x.shape[0] != 4),
    "as a float": lambda x: x + float(x.shape[0] == 5) * 2,
    "and another": lambda x: x.masked_fill(x > 0, (x.shape[0] > 3) & (x.shape[0] < 6)),
    "not": lambda x: torch.where(x > 0, not x.shape[0] > 4, x),
    "also a branch": lambda x: torch.cond(
        x.sum() > 0, lambda y: y * (y.shape[0] > 4) + (y.shape[0] > 5), lambda y: y * (y.shape[0] < 5), (x,)
    ),
    "in a checkpointed region": lambda x: checkpoint(lambda y: y.sin() * (y.shape[0] > 4), x, use_reentrant=False),
}


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_on_sizes_is_a_number_of_its_graph(name: str) -> None:
    """It is known while the graph is compiled, and another graph is compiled where it does not hold."""
    torch._dynamo.reset()
    compiled = torch.compile(CONDITIONS[name], backend="aotkit", dynamic=True, options={"fallback": "error"})
    for size in (4, 5, 6, 4, 3):
        ours, eager = (normal(size, 2).requires_grad_() for _ in range(2))
        found, wanted = compiled(ours), CONDITIONS[name](eager)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        if wanted.requires_grad:
            found.sum().backward(), wanted.sum().backward()
            torch.testing.assert_close(ours.grad, eager.grad, rtol=0, atol=0)


def after_a_graph_break(x: torch.Tensor) -> torch.Tensor:
    large = x.shape[0] > 4
    y = x * large
    torch._dynamo.graph_break()
    return y + large


@pytest.mark.covers("F5c.9")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it where it breaks the graph
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "function",
    [lambda x: (x.sin(), x.shape[0] > 4, x.shape[0] % 2 == 0), after_a_graph_break, lambda x: x.shape[0] != 4],
    ids=["returned", "across a graph break", "alone"],
)
def test_a_condition_on_sizes_is_returned(function: Callable[[torch.Tensor], Any], gradients: bool) -> None:
    """It was ``None``."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for size in (4, 5, 6, 4, 3):
        ours, eager = (normal(size, 2).requires_grad_(gradients) for _ in range(2))
        found, wanted = tree_leaves(compiled(ours)), tree_leaves(function(eager))
        assert [type(value) for value in found] == [type(value) for value in wanted]
        for value, want in zip(found, wanted, strict=True):
            assert torch.equal(value, want) if isinstance(want, torch.Tensor) else value is want
        if isinstance(wanted[0], torch.Tensor) and gradients:
            found[0].sum().backward(), wanted[0].sum().backward()
            assert torch.equal(ours.grad, eager.grad)


@pytest.mark.covers("F5c.9")
def test_a_condition_on_sizes_of_which_nothing_is_known_is_returned() -> None:
    compiled = torch.compile(lambda x: (x * 2, x.shape[0] > 4), backend="aotkit", options={"fallback": "error"})
    for size in (5, 4):
        x = normal(size, 2)
        mark_unbacked(x, 0)
        assert compiled(x)[1] is (size > 4)


@pytest.mark.covers("F5c.9")
def test_a_condition_on_sizes_of_which_nothing_is_known_as_a_number_is_refused_by_name() -> None:
    compiled = torch.compile(CONDITIONS["factor"], backend="aotkit")
    five, four = normal(5, 2), normal(4, 2)
    mark_unbacked(five, 0), mark_unbacked(four, 0)
    with pytest.warns(aotkit.EagerFallback, match="a condition on dynamic sizes is used as a number"):
        assert torch.equal(compiled(five), five)
    assert torch.equal(compiled(four), 0 * four)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo of torch 2.11 looks at it where it breaks the graph
@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_computed_from_numbers_alone_are_returned(dynamic):
    def function(x):
        half = torch.div(x.shape[0], 2, rounding_mode="trunc")
        return half, x * half, torch.add(3, x.shape[1]), half

    compiled = torch.compile(function, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    for size in (5, 8):
        inputs = normal(size, 3).requires_grad_(), normal(size, 3).requires_grad_()
        got, want = compiled(inputs[0]), function(inputs[1])
        torch.testing.assert_close(got, want)
        assert got[3] is got[0]
        got[1].sum().backward(), want[1].sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_two_tensors_computed_from_numbers_alone_that_share_memory_are_refused_by_name():
    def function(x):
        half = torch.div(x.shape[0], 2)
        return half, half.view(1), x + 1

    with pytest.warns(aotkit.EagerFallback, match="both were computed from numbers alone"):
        half, viewed, _ = torch.compile(function, backend="aotkit")(normal(5, 3))
    assert viewed._base is half


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True), (1.0, True)])
def test_a_dropout_that_keeps_everything_is_its_argument(p, training, dynamic):
    def f(x):
        y = torch.nn.functional.dropout(x, p, training)
        y.add_(1)
        return y * 2

    compiled = torch.compile(f, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    for size in (3, 5):
        mine, eagers = torch.arange(size), torch.arange(size)
        assert torch.equal(compiled(mine), f(eagers)) and torch.equal(mine, eagers)


def with_infinities(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    x.view(-1)[::7] = math.inf
    x.view(-1)[3] = 3e38
    return x


OVERLAPPING = torch.arange(21.0).bfloat16().as_strided((2, 2, 1, 3), (12, 1, 4, 1), 4)
UPSAMPLED: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "linear next to infinities": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), with_infinities(2, 3, 6)),
    "bilinear next to infinities": (
        lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True),
        with_infinities(2, 3, 4, 5),
    ),
    "trilinear by a broken factor": (
        lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
        with_infinities(1, 2, 4, 5, 3),
    ),
    **{
        f"{name} of halves that overlap": (function, OVERLAPPING)
        for name, function in {
            "nearest": lambda x: torch.ops.aten._upsample_nearest_exact2d(x, [1, 2], None, None),
            "bicubic": lambda x: F.interpolate(x, size=(2, 5), mode="bicubic"),
            "padding": lambda x: F.pad(x, (1, 0, 1, 1), mode="replicate"),
            "reflection": lambda x: F.pad(x, (1, 0, 0, 0), mode="reflect"),
        }.items()
    },
    "factors that do not fit the sizes": (
        lambda x: torch.ops.aten._upsample_nearest_exact3d(x, [1, 1, 1], 0.5, 0.5, 0.5),
        torch.arange(8.0).view(2, 1, 1, 2, 2),
    ),
}


@pytest.mark.parametrize("name", UPSAMPLED)
def test_upsampling_by_sizes_that_change_gives_what_it_gives_by_sizes_that_are_known(name):
    function, x = UPSAMPLED[name]
    for dynamic in (True, False):
        got = torch.compile(function, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})(x)
        want = function(x)
        assert got.stride() == want.stride(), f"dynamic={dynamic}"
        torch.testing.assert_close(got, want, equal_nan=True)


def test_a_size_of_nothing_after_one_that_was_divided_by_has_a_graph_of_its_own():
    def last_of_pieces(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(4)[-1] + 1

    compiled = aotkit.aot_function(last_of_pieces, lambda graph, inputs: graph, dynamic=True)
    for n in (2, 0, 5, 0, 2):
        torch.testing.assert_close(compiled(torch.ones(n)), last_of_pieces(torch.ones(n)))


@pytest.mark.parametrize("shape", [(3, 4, 5, 3), (2, 4, 5, 2)], ids=str)
def test_a_grid_that_eager_refuses_is_refused_after_one_that_it_takes(shape):
    def sampled(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.grid_sampler_2d(image, grid, 0, 0, False)

    image = torch.arange(24.0).view(3, 2, 2, 2)
    compiled = aotkit.aot_function(sampled, compile_graph, decompositions=decompositions(), dynamic=True)
    compiled(image, torch.zeros(3, 3, 4, 2))
    with pytest.raises(RuntimeError, match="expected grid"):
        compiled(image, torch.zeros(shape))


@pytest.mark.parametrize("size", [(0, 2, 0, 0), (0, 2, 3, 0), (1, 2, 0, 4)], ids=str)
def test_images_without_pixels_are_refused_after_others(size):
    def sampled(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.grid_sampler_2d(image, grid, 0, 0, False)

    compiled = aotkit.aot_function(sampled, compile_graph, decompositions=decompositions(), dynamic=True)
    compiled(torch.ones(2, 2, 4, 5), torch.zeros(2, 1, 3, 2))
    with pytest.raises(RuntimeError, match="non-empty spatial dimensions"):
        compiled(torch.ones(size), torch.zeros(size[0], 1, 3, 2))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_loss_of_several_labels_counts_those_before_the_first_that_is_minus_one(dynamic):
    x = torch.arange(20.0).view(4, 5).sin()
    targets = torch.tensor([[0, 1, 2, -1, 3], [3, 0, -1, 1, 2], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0]])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x, targets, reduction="none")

    compiled = torch.compile(loss, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), loss(x))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for leaf, function in zip(leaves, (compiled, loss), strict=True):
        function(leaf).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo of torch 2.11 looks at it where it breaks the graph
def test_gradients_without_a_fake_kernel_are_compiled_for_every_size():
    """Of a gamma distribution's draws, and of a loss of several labels; torch runs their kernels to learn the sizes."""

    def drawn(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch._standard_gamma(x.exp()).sum(1) + F.multilabel_margin_loss(x, targets, reduction="none")

    compiled = torch.compile(drawn, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for rows in (4, 3):
        x, targets = torch.arange(5.0 * rows).view(5, rows).sin().t(), torch.zeros(rows, 5, dtype=torch.int64)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for leaf, function in zip(leaves, (compiled, drawn), strict=True):
            torch.manual_seed(0)
            function(leaf, targets).sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        assert leaves[0].grad.stride() == leaves[1].grad.stride()


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    ],
    ids=["contiguous", "channels last", "permuted"],
)  # fmt: skip
def test_batch_norm_lies_in_memory_as_in_eager_mode_for_every_size(lay_out):
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True)

    compiled = torch.compile(norm, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for sizes in ((6, 4, 5, 3), (7, 4, 5, 2), (3, 9, 2, 8)):
        leaves = [lay_out(torch.arange(math.prod(sizes)).sin().view(sizes)).requires_grad_() for _ in range(2)]
        results = [function(leaf) for function, leaf in zip((compiled, norm), leaves, strict=True)]
        found = [torch.autograd.grad(y.cos().sum(), leaf)[0] for y, leaf in zip(results, leaves, strict=True)]
        for ours, eagers in (results, found):
            torch.testing.assert_close(ours, eagers)
            assert ours.stride() == eagers.stride()


def test_gradients_of_activations_lie_in_memory_as_in_eager_mode_for_every_size():
    aten = torch.ops.aten

    def gradients(g: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            aten.hardtanh_backward(g, x, 0, 1),
            aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
            aten.softplus_backward(g, x, 1, 20),
            aten.hardsigmoid_backward(g, x),
            aten.leaky_relu_backward(g, x, 0.1, False),
        ]
        return [*found, *(each.reshape(x.shape[0] * x.shape[1]) for each in found)]

    compiled = torch.compile(gradients, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for sizes in ((7, 5), (3, 4)):
        values = torch.arange(math.prod(sizes)).sin()
        g, x = values.view(sizes[::-1]).t(), values.cos().view(sizes)
        for ours, eagers in zip(compiled(g, x), gradients(g, x), strict=True):
            torch.testing.assert_close(ours, eagers)
            assert ours.stride() == eagers.stride() and (ours._base is None) == (eagers._base is None)


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


WIDE: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "remainder": (lambda n: n**12, lambda power: power % 50 + 60),
    "quotient": (lambda n: n**12, lambda power: power // 7 % 50 + 60),
    "of floats": (lambda n: n**12, lambda power: int(power / 7) % 50 + 60),
    "of a computed size": (lambda n: int(n**6 * 1.7) ** 2, lambda power: power % 50 + 60),
}


@pytest.mark.parametrize("fused", [False, True], ids=["a buffer", "no buffer"])
@pytest.mark.parametrize("name", WIDE)
def test_sizes_that_pass_64_bits_on_the_way(name: str, fused: bool) -> None:
    """What kernels would compute for the large sizes here is smaller than what is allocated: nothing can be lost."""
    power, size = WIDE[name]

    def ones(x: torch.Tensor) -> torch.Tensor:
        count = size(power(x.shape[0]))
        return (torch.arange(count) * 2).sum() if fused else x.new_ones(count) * 2 + 1

    large = [n for n in range(39, 200) if 60 <= size(_wrapped(power(n))) < size(power(n))][:2]
    assert len(large) == 2
    function, refused = torch.compile(ones, backend="aotkit", dynamic=True), []
    for n in (9, 20, *large):
        x = torch.ones(n)
        try:
            found = function(x)
        except SizeOverflowError:
            refused.append(n)
        else:
            assert torch.equal(found, ones(x))
    assert refused == large


def test_quotients_that_are_no_exact_floats() -> None:
    """``int(n / 7)`` and ``n // 7`` are one expression to torch, and two numbers beyond 2**53."""

    def ones(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(int(x.shape[0] ** 12 / 7) % 50 + 60) * 2

    function = torch.compile(ones, backend="aotkit", dynamic=True)
    assert torch.equal(function(torch.ones(21)), ones(torch.ones(21)))
    with pytest.raises(SizeOverflowError, match="where floats are not exact"):
        function(torch.ones(26))


def test_a_value_that_passes_64_bits() -> None:
    function = torch.compile(lambda x: x + x.shape[0] ** 12 % 50, backend="aotkit", dynamic=True)
    assert torch.equal(function(torch.ones(38)), torch.ones(38) + 38**12 % 50)
    with pytest.raises(SizeOverflowError, match="64 bits"):
        function(torch.ones(39))


@pytest.mark.parametrize(
    "run",
    [lambda x, n: x.new_ones(n * 1000 % 7 + 1) + 1, lambda x, n: x + n * 1000 % 7, lambda x, n: x[n * 1000 % 7 :] * 2],
    ids=["size", "value", "place"],
)
def test_integers_that_pass_64_bits_when_multiplied(run: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """They are given to a call, as seeds are, and may be any: the product of a size and 1000 is no such number."""
    function, x = torch.compile(run, backend="aotkit", dynamic=True), torch.arange(10.0)
    for n in (5, 6, 2**40 + 3, 2**53 - 1, -(2**40)):
        assert torch.equal(function(x, n), run(x, n))
    for n in (2**60 + 1, 2**62 + 1, -(2**62) - 1):
        with pytest.raises(SizeOverflowError, match="64 bits"):
            function(x, n)


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "computed": lambda a: a * 2 + 1,
    "reduced": lambda a: (a + a.shape[0]).sum(0),
    "transposed": lambda a: a.T + 1,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_numpy_have_the_sizes_that_they_are_called_with(name: str) -> None:
    torch._dynamo.reset()
    fn = ARRAYS[name]
    run = torch.compile(fn, backend="aotkit", options={"fallback": "error"})
    for size in (4, 5, 6, 3):
        array = torch.arange(2.0 * size).reshape(size, 2).numpy()
        torch.testing.assert_close(torch.from_numpy(run(array)), torch.from_numpy(fn(array)))
