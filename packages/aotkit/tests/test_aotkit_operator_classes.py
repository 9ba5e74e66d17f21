"""Classes of operators that generated kernels surround but do not replace: what is left to ATen is called as eager
calls it. Values, gradients, dtypes and strides of each are eager's, and so is what is left of the random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aotkit
from aotkit_inductor_lower.errors import FakeKernelError

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

Function = Callable[..., Any]


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = True) -> Tensor:
    """Seeded normal numbers, five times as large for integers."""
    g = torch.Generator().manual_seed(seed)
    differentiable = dtype.is_floating_point or dtype.is_complex
    drawn = torch.randn(shape, generator=g, dtype=dtype if differentiable else torch.float64)
    return drawn.requires_grad_(grad) if differentiable else (drawn * 5).to(dtype)


def observe(fn: Function, args: tuple[Tensor, ...]) -> tuple[list[Any], list[Any], Tensor]:
    """Results, gradients, and the state of the generator after the call."""
    torch.manual_seed(7)
    given = [a.detach().clone(memory_format=torch.preserve_format).requires_grad_(a.requires_grad) for a in args]
    results = tree_leaves(fn(*given))
    state = torch.get_rng_state()
    leaves = [a for a in given if a.requires_grad]
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    g = torch.Generator().manual_seed(3)
    weights = [torch.randn(r.shape, generator=g, dtype=r.dtype) for r in roots]
    gradients = torch.autograd.grad(roots, leaves, weights, allow_unused=True) if leaves and roots else ()
    return results, list(gradients), state


def check(fn: Function, *args: Tensor, dynamic: bool = False, **how: Any) -> list[Any]:
    """Compiled, ``fn`` is what it is in eager mode; the reports of its graphs."""
    torch._dynamo.reset()
    want, want_gradients, want_state = observe(fn, args)
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder, **how}
    compiled = torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=dynamic, options=options)
    got, gradients, state = observe(compiled, args)
    torch.testing.assert_close(got, want, equal_nan=True, check_stride=True)
    torch.testing.assert_close(gradients, want_gradients, equal_nan=True)
    assert torch.equal(state, want_state)
    return [record.report for record in recorder.graphs]


def rows(table: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Arguments of ``parametrize`` for rows of (name, function, arguments...)."""
    return {"argnames": "row", "argvalues": [row[1:] for row in table], "ids": [row[0] for row in table]}


# -- order statistics --------------------------------------------------------------------------------------------------


def with_odd_values(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x[2, 3], x[1, 1], x[3, 0] = math.nan, math.inf, -math.inf
    return x.requires_grad_()


ORDERS = [
    ("sort", lambda x: (torch.sort(x * 2, 1), x.sort(0, descending=True), x.msort()), values(6, 9)),
    ("transposed", lambda x: ((x.t() * 1).sort(1), (x.t() * 1).sort(0)), values(6, 9)),
    ("nan", lambda x: (x.sort(1), x.sort(0, descending=True), x.topk(2), x.median(1), x.nanmedian(1)), None),
    ("ties", lambda x: (x.sort(dim=1, stable=True), x.argsort(dim=0, stable=True, descending=True)), torch.int32),
    ("half", lambda x: (x.sort(dim=1, stable=True)[0] * 2, x.topk(3)[0]), torch.float16),
    ("bool", lambda x: (x.sort(dim=1, stable=True), x.int().argsort(dim=1, stable=True)), torch.bool),
    ("empty", lambda x: (x.sort(1), x.topk(2, 1), x.argsort(1)), values(0, 5)),
    ("topk", lambda x: (torch.topk(x * 2, 3, 1), x.topk(2, 0, largest=False, sorted=True)), values(6, 9)),
    ("kthvalue", lambda x: (x.kthvalue(3, 1), x.kthvalue(2, 0, keepdim=True)), values(6, 9)),
    ("median", lambda x: (x.median(), x.median(1), x.nanmedian(), x.median(0, keepdim=True)), values(6, 9)),
    ("mode", lambda x: (x.mode(1), x.mode(0, keepdim=True)[0] + 1), torch.int64),
    ("quantile", lambda x: (x.quantile(0.3), x.nanquantile(0.5, 1)), values(6, 9)),
]
QUANTILE = ORDERS[-1][1]


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize(**rows(ORDERS))
def test_what_sorts_gives_eagers_order(row: tuple[Function, Any]) -> None:
    fn, given = row
    if isinstance(given, torch.dtype):
        given = values(6, 9).detach() > 0 if given is torch.bool else values(6, 9, dtype=given, grad=False)
    if fn is QUANTILE and RELEASE < (2, 12):  # where eager compares values on the way
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Data dependent operator"):
            check(fn, given)
        return
    check(fn, with_odd_values(values(6, 9)) if given is None else given)


@pytest.mark.covers("F5g.12")
def test_how_many_are_asked_for_may_depend_on_a_size() -> None:
    check(lambda x: torch.topk(x * 2, x.shape[0] // 2, 1), values(6, 9), dynamic=True)


def gate(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """How a mixture of experts picks two of eight for each token, and weighs them."""
    best, experts = torch.softmax(x @ w, -1).topk(2)
    return best / best.sum(-1, keepdim=True), experts


@pytest.mark.covers("F5g.12")
def test_short_rows_of_any_number_are_sorted_in_kernels_and_their_gradients_are_eagers() -> None:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    compiled = torch.compile(gate, backend="aotkit", fullgraph=True, options=options)
    for tokens in (7, 40, 33):
        args = (values(tokens, 5, seed=tokens), values(5, 8))
        want, want_gradients, _ = observe(gate, args)
        got, gradients, _ = observe(compiled, args)
        torch.testing.assert_close(got, want, check_stride=True)
        torch.testing.assert_close(gradients, want_gradients)
    called = [extern.target for record in recorder.graphs for extern in record.report.externs]
    assert len(recorder.graphs) == 4  # of seven tokens, and of any number
    assert not any("topk" in target for target in called), called
    check(lambda x: x.sin().sort(0)[0] * 2 + x.sort(dim=1, descending=True, stable=True)[0], values(9, 12))


# -- convolutions ------------------------------------------------------------------------------------------------------

PLANES = [
    ("strided", lambda x, w, b: F.relu(F.conv2d(x, w, b, stride=2, padding=1)), (6, 4, 3, 3)),
    ("dilated", lambda x, w, b: F.conv2d(x, w, b, dilation=2, padding="same"), (6, 4, 3, 3)),
    ("grouped", lambda x, w, b: F.conv2d(x, w, b, groups=2) * 2, (6, 2, 3, 3)),
    ("depthwise", lambda x, w, b: F.conv2d(x, w, b[:4], groups=4, padding=1), (4, 1, 3, 3)),
    ("pointwise", lambda x, w, b: F.conv2d(x * 2, w, b), (6, 4, 1, 1)),
    ("transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1), (4, 6, 3, 3)),
    ("transposed, grouped", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, groups=2), (4, 3, 3, 3)),
    ("without bias", lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w) * b[0], (6, 4, 3, 3)),
    ("no batch", lambda x, w, b: F.conv2d(x[0], w, b), (6, 4, 3, 3)),
]


@pytest.mark.covers("F5g.17")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["planes", "channels last"])
@pytest.mark.parametrize(**rows(PLANES))
def test_a_convolution_keeps_the_layout_that_eager_gives_it(
    row: tuple[Function, Any], memory: torch.memory_format
) -> None:
    fn, weight = row
    images = values(2, 4, 7, 8).detach().contiguous(memory_format=memory).requires_grad_()
    check(fn, images, values(*weight, seed=1), values(6, seed=2))


OTHER_DIMENSIONS = [
    ("1", lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 4, 9), (6, 4, 3)),
    ("3", lambda x, w, b: F.conv3d(x, w, b, padding=1), (2, 4, 3, 4, 5), (6, 4, 3, 3, 3)),
    ("transposed 1", lambda x, w, b: F.conv_transpose1d(x, w, b, padding=1), (2, 4, 9), (4, 6, 3)),
    ("transposed 3", lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2), (2, 4, 2, 3, 4), (4, 6, 3, 3, 3)),
]


@pytest.mark.covers("F5g.17")
@pytest.mark.parametrize(**rows(OTHER_DIMENSIONS))
def test_convolutions_over_one_and_three_dimensions(row: tuple[Function, Any, Any]) -> None:
    fn, signal, weight = row
    check(fn, values(*signal), values(*weight, seed=1), values(6, seed=2))


@pytest.mark.covers("F5g.17")
def test_a_convolution_of_unknown_batch_and_one_in_bfloat16() -> None:
    check(lambda x, w: F.conv2d(x, w).sin(), values(3, 4, 8, 8), values(6, 4, 3, 3, seed=1), dynamic=True)
    images = values(2, 4, 8, 8, grad=False).contiguous(memory_format=torch.channels_last).bfloat16()
    check(lambda x, w: F.conv2d(x, w), images, values(6, 4, 3, 3, seed=1, grad=False).bfloat16())


# -- random numbers ----------------------------------------------------------------------------------------------------

SHARES = torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
RANDOM = [
    ("dropout", lambda x: F.dropout(F.dropout(x, 0.3).sin(), 0.5) * 2, values(6, 9)),
    ("alpha dropout", lambda x: F.alpha_dropout(x, 0.3, training=True), values(6, 9)),
    ("dropout of channels", lambda x: F.dropout2d(x, 0.3), values(2, 3, 4, 4)),
    ("uniform", lambda x: x + torch.rand(6, 9, dtype=torch.float64) + torch.rand_like(x), values(6, 9)),
    ("normal", lambda x: x * torch.randn(6, 9, dtype=torch.float64) * torch.randn_like(x), values(6, 9)),
    ("integers", lambda x: x * torch.randint(3, 9, (6, 9)) + torch.randint_like(x, 5), values(6, 9)),
    ("bernoulli", lambda p: (torch.bernoulli(p), p.bernoulli(0.2)), SHARES),
    ("multinomial", lambda p: (torch.multinomial(p, 3), torch.multinomial(p, 20, replacement=True)), SHARES),
    ("permutation", lambda x: x[torch.randperm(6)], values(6, 9)),
    ("normal of tensors", lambda p: (torch.normal(p, p), torch.normal(p, 2.0), torch.normal(0.0, 1.0, (3,))), SHARES),
    ("exponential", lambda x: (x * torch.empty_like(x).exponential_(), torch.empty(3).exponential_(2.0)), values(6, 9)),
    (
        "into memory",
        lambda x: (x.clone().uniform_(-1, 1), torch.empty(4).normal_(1, 2), x.new_empty(3).geometric_(0.3)),
        SHARES,
    ),
    ("counts", lambda p: (torch.poisson(p * 10), torch.binomial(torch.full_like(p, 10), p)), SHARES),
    ("gumbel", lambda x: F.gumbel_softmax(x, hard=True), values(6, 9)),
    ("slopes", lambda x: F.rrelu(x, training=True), values(6, 9)),
    ("categorical", lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample(), SHARES),
]


@pytest.mark.covers("F5g.19")
@pytest.mark.parametrize(**rows(RANDOM))
def test_random_numbers_are_eagers_and_so_is_the_next_one(row: tuple[Function, Tensor]) -> None:
    check(*row, rng="eager")


@pytest.mark.covers("F5g.19")
def test_an_input_that_is_filled_with_random_numbers() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.uniform_(2, 3) + x.normal_()

    check(fn, torch.zeros(3, 4), rng="eager")


# -- attention ---------------------------------------------------------------------------------------------------------


def heads(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (values(*shape, dtype=dtype, seed=seed, grad=grad) for seed in range(3))
    return q, k, v


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def across_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


attend = F.scaled_dot_product_attention
Q, K, V = heads(2, 4, 8, 16)
BELOW = values(8, 8, seed=4, grad=False) > -1
ATTENTION = [
    ("plain", lambda q, k, v: attend(q, k, v), (Q, K, V)),
    ("causal, scaled", lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3), (Q, K, V)),
    ("mask of bools", lambda q, k, v, m: attend(q, k, v, attn_mask=m), (Q, K, V, BELOW)),
    ("learned mask", lambda q, k, v, m: attend(q, k, v, attn_mask=m), (Q, K, V, values(2, 1, 8, 8))),
    ("shared heads", lambda q, k, v: attend(q, k, v, enable_gqa=True), (Q, *heads(2, 2, 8, 16)[1:])),
    ("dropout", lambda q, k, v: attend(q, k, v, dropout_p=0.2), (Q, K, V)),
    ("heads inside", across_heads, heads(2, 8, 4, 16)),
    ("three dimensions", lambda q, k, v: attend(q, k, v), heads(4, 8, 16)),
    ("other values", lambda q, k, v: attend(q, k, v), (Q, K, values(2, 4, 8, 5, seed=2))),
    ("chosen backend", math_attention, (Q, K, V)),
    ("bfloat16", lambda q, k, v: attend(q, k, v), heads(2, 4, 8, 16, dtype=torch.bfloat16, grad=False)),
]


class Called(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.covers("F5g.21")
@pytest.mark.parametrize(**rows(ATTENTION))
def test_attention_takes_the_kernel_that_eager_takes(row: tuple[Function, tuple[Tensor, ...]]) -> None:
    """Which that is differs: torch 2.15 takes the fused one for three dimensions too."""
    fn, args = row
    fused = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    with Called() as eager:
        fn(*args)
    reports = check(fn, *args, rng="eager", contractions="aten")
    called = [call.target for report in reports for call in report.externs]
    assert (fused in called) == (fused in eager.names), called


@pytest.mark.covers("F5g.21")
def test_attention_over_a_length_that_is_known_at_run_time_only() -> None:
    check(lambda q, k, v: attend(q, k, v, is_causal=True), Q, K, V, dynamic=True)


CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
FLEX = [
    ("plain", lambda q, k, v, bias: flex_attention(q, k, v), 2),
    ("captured", lambda q, k, v, bias: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j] * (i - j)), 2),
    ("blocks", lambda q, k, v, bias: flex_attention(q, k, v, block_mask=CAUSAL) * 2, 2),
    ("shared heads", lambda q, k, v, bias: flex_attention(q, k, v, enable_gqa=True), 4),
]


@pytest.mark.covers("F5g.21")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(**rows(FLEX))
def test_flexible_attention_with_scores_and_masks_of_the_users_own(row: tuple[Function, int]) -> None:
    fn, queries = row
    q, (_, k, v) = values(1, queries, 128, 16, grad=False), heads(1, 2, 128, 16, grad=False)
    check(fn, q, k, v, values(128, seed=9, grad=False))


# -- complex numbers, spectra, linear algebra --------------------------------------------------------------------------

Z = values(4, 5, dtype=torch.complex128)
SQUARE = values(4, 4)
DEFINITE = (SQUARE.detach() @ SQUARE.detach().T + 4 * torch.eye(4, dtype=torch.float64)).requires_grad_()
LIBRARY = [
    ("complex arithmetic", lambda z: (z * z.conj() + 2j, z.abs(), z.angle(), z.real + z.imag), Z),
    ("complex products", lambda z: (z @ z.mH, z.sum(1), z.mean(), z.exp().prod(1)), Z),
    ("complex views", lambda z: torch.view_as_complex(torch.view_as_real(z) * 2), Z),
    ("polar", lambda a, b: torch.polar(a.abs(), b), values(4, 5), values(4, 5, seed=1)),
    ("spectrum", lambda x: (torch.fft.fft(x * 2).abs(), torch.fft.irfft(torch.fft.rfft(x), n=9)), values(6, 9)),
    ("spectrum in two dimensions", lambda z: (torch.fft.ifft2(torch.fft.fft2(z)) * 1j, torch.fft.fftshift(z)), Z),
    ("halves of a spectrum", lambda z: (torch.fft.irfft(z * 2), torch.fft.irfft2(z), torch.fft.hfft(z, n=7)), Z),
    ("solve", lambda a, b: (torch.linalg.inv(a), torch.linalg.solve(a, b)), DEFINITE, SQUARE),
    ("factors", lambda a: (torch.linalg.cholesky(a), torch.linalg.lu(a)[1:], torch.linalg.qr(a)[1]), DEFINITE),
    ("singular values", lambda a: (torch.linalg.svdvals(a), torch.linalg.eigvalsh(a @ a.T)), SQUARE),
    ("eigenvalues", lambda a: torch.linalg.eigvals(a) * 2, SQUARE.detach()),
    ("determinants", lambda a: (torch.linalg.det(a), *torch.linalg.slogdet(a)), DEFINITE),
    ("powers", lambda a: (torch.linalg.matrix_exp(a), torch.linalg.matrix_power(a, 5)), SQUARE),
    ("norms", lambda a: (torch.linalg.norm(a, 2), torch.linalg.norm(a, "nuc"), torch.linalg.matrix_norm(a)), SQUARE),
    ("triangles", lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), DEFINITE, SQUARE),
    ("counts", lambda x: (torch.histc(x, 5, -1, 1) + 1, torch.histogram(x, 4, range=(-1.0, 1.0))), values(40).detach()),
]


@pytest.mark.covers("F5g.22")
@pytest.mark.parametrize(**rows(LIBRARY))
def test_complex_numbers_spectra_and_linear_algebra(row: tuple[Any, ...]) -> None:
    check(*row)


SETS = [
    ("unique", lambda i: torch.unique(i, return_inverse=True, return_counts=True)),
    ("runs", lambda i: torch.unique_consecutive(i.sort()[0], return_inverse=True, return_counts=True)),
    ("unique rows", lambda i: torch.unique(i.view(20, 2), dim=0) * 2),
    ("nonzero", lambda i: i.nonzero() * 2),
    ("selected", lambda i: i[i > 0] * 2),
    ("counted", lambda i: (torch.bincount(i.abs()) + 1, torch.bincount(i.abs(), minlength=30))),
    ("counted by weight", lambda i: torch.bincount(i.abs(), i.sin(), minlength=30)),
]
COUNTED = SETS[-1][1]


@pytest.mark.covers("F5g.22")
@pytest.mark.parametrize(**rows(SETS))
def test_sets_whose_size_depends_on_data_are_part_of_the_graph(row: tuple[Function]) -> None:
    wrong = row[0] is COUNTED and RELEASE < (2, 13)  # the fake kernel's type
    refused = pytest.raises(FakeKernelError, match="where its fake kernel said") if wrong else nullcontext()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True), refused:
        check(row[0], values(40, dtype=torch.int64))


# -- one element per row -----------------------------------------------------------------------------------------------

CLASSES = torch.randint(0, 5, (6, 9), generator=torch.Generator().manual_seed(2))
ONE_PER_ROW = [
    ("one_hot", lambda i, w: F.one_hot(i, 5), True),
    ("smoothed", lambda i, w: (F.one_hot(i, num_classes=5).double() * 0.9 + 0.02) * w, True),
    ("of a scalar", lambda i, w: F.one_hot(i[0, 0], 7), True),
    ("of nothing", lambda i, w: F.one_hot(i[:0], 7), True),
    ("a number", lambda i, w: torch.zeros_like(w).scatter_(2, i[..., None], 1.0) * w, True),
    ("across", lambda i, w: torch.full_like(w, 2.0).scatter(1, i[:, None, :5], w[:, :1]), True),
    ("nan", lambda i, w: torch.full_like(w, math.nan).scatter(-1, i[..., None], math.inf), True),
    ("a loss", lambda i, w: F.cross_entropy(w.flatten(0, 1), F.one_hot(i.flatten(), 5).double()), False),
    ("into a value", lambda i, w: (w * 2).scatter(2, i[..., None], 1.0), False),
    ("two per row", lambda i, w: torch.zeros_like(w).scatter(2, i[..., None] % torch.tensor([5, 3]), 1.0), False),
]


@pytest.mark.covers("F5f.20")
@pytest.mark.parametrize(**rows(ONE_PER_ROW))
def test_a_scatter_into_a_constant_is_part_of_the_kernel_that_reads_it(row: tuple[Function, bool]) -> None:
    fn, one_kernel = row
    first, *_ = check(fn, CLASSES, values(6, 9, 5))
    assert not first.externs and (first.kernel_count == 1 or not one_kernel)


@pytest.mark.covers("F5f.20")
@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("how", ["one_hot", "scatter", "reduced"])
def test_a_class_out_of_range_is_refused_as_in_eager_mode(how: str, wrong: int) -> None:
    functions: dict[str, Function] = {
        "one_hot": lambda i: F.one_hot(i, 5),
        "scatter": lambda i: torch.zeros(6, 9, 5).scatter(2, i[..., None], 1.0) * 2,
        "reduced": lambda i: torch.zeros(6, 9, 5).scatter(2, i[..., None], 1.0).sum(1),
    }
    given = CLASSES.clone()
    given[2, 3] = wrong
    torch._dynamo.reset()
    with pytest.raises(RuntimeError):
        functions[how](given)
    with pytest.raises(IndexError, match="out of range"):
        torch.compile(functions[how], backend="aotkit", options={"fallback": "error"})(given)


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("F5c.15")
def test_inputs_on_a_device_without_code_generation_are_refused_or_run_eagerly_with_one_notice() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() + 1

    given = torch.empty(4, 5, device="meta")
    with pytest.raises(
        RuntimeError, match="input 0 is on device meta; code is generated for the CPU and for CUDA only"
    ):
        torch.compile(fn, backend="aotkit", options={"fallback": "error"})(given)
    torch._dynamo.reset()
    with pytest.warns(aotkit.EagerFallback, match="on device meta"):
        result = torch.compile(fn, backend="aotkit")(given)
    assert result.device.type == "meta" and result.shape == (4, 5)


@pytest.mark.covers("F5c.15")
def test_what_a_graph_computes_on_another_device_is_left_to_aten() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin() * 2
        return y + 1, (y.to("meta") * 2).t()

    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    here, there = torch.compile(fn, backend="aotkit", fullgraph=True, options=options)(values(3, 4).detach())
    torch.testing.assert_close(here, fn(values(3, 4).detach())[0])
    assert there.device.type == "meta" and (there.shape, there.stride()) == ((4, 3), (1, 4))
    reasons = [call.reason for record in recorder.graphs for call in record.report.externs]
    assert [record.report.kernel_count for record in recorder.graphs] == [1]
    assert all("a tensor is on meta, and this graph's kernels run on cpu" in reason for reason in reasons) and reasons


@pytest.mark.covers("F5c.15")
@pytest.mark.parametrize("device", ["xpu", "mps", "mtia"])
def test_a_graph_for_another_kind_of_device_is_calls_of_its_operators(device: str) -> None:
    """Traced on fake tensors: no such device is here."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from aotkit_inductor_lower import compile_graph

    with FakeTensorMode():
        graph = make_fx(lambda x: (x.sin() + 1,))(torch.empty(4, 5, device=device))
    report = compile_graph(graph).report()
    assert report.kernel_count == 0 and {call.reason.split(",")[0] for call in report.externs} == {
        f"a tensor is on {device}:0"
    }
