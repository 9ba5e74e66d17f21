"""Losses of large logits in chunks: equal results and gradients, no value as large as logits, and what is refused."""

import itertools
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_partition import PartitionOptions, partition
from aotkit_partition.chunk_losses import chunk_losses
from aotkit_partition.errors import InvalidOptionError

ROWS, WORDS, WIDTH = 600, 1700, 40


def arguments(dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64) / 6
    b = torch.randn(WORDS, generator=generator, dtype=torch.float64)
    target = torch.randint(0, WORDS, (rows,), generator=generator)
    target[::7] = -100
    return [*(t.to(dtype).requires_grad_() for t in (h, w, b)), target]


def largest(graph):
    """Elements of the largest value that a graph computes."""
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    return max(value.numel() for value in values if isinstance(value, torch.Tensor))


def run(graph, given, gradient):
    return torch.fx.Interpreter(graph).run(*(t.detach() for t in given), gradient)


def check(joint_of, fn, given, rtol=1e-9, gradient=0.3):
    """That a rewritten joint graph gives what the graph gives, with strides, and has no value like the logits."""
    joint, num_outputs = joint_of(fn, *given)
    before = str(joint.graph)
    made, products = chunk_losses(joint, 1)
    assert len(products) == 1 and str(joint.graph) == before
    made.graph.lint()
    assert largest(joint) >= ROWS * WORDS > 2 * largest(made)
    tangent = torch.tensor(gradient, dtype=given[0].dtype)
    want, got = run(joint, given, tangent), run(made, given, tangent)
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            scale = a.abs().max().nan_to_num().item()
            torch.testing.assert_close(b, a, rtol=rtol, atol=rtol * scale, equal_nan=True)
    return joint, made, num_outputs


def plain(h, w, b, target):
    return F.cross_entropy(F.linear(h, w, b), target)


def without_bias(h, w, b, target):
    return F.cross_entropy(h @ w.t(), target) + b.sum()


def summed(h, w, b, target):
    return F.cross_entropy(F.linear(h, w, b), target, reduction="sum") / 7


def in_batches(h, w, b, target):
    logits = F.linear(h.view(4, ROWS // 4, WIDTH), w, b)
    return F.cross_entropy(logits.view(-1, WORDS), target.view(4, -1).view(-1))


def soft_capped(h, w, b, target):
    return F.cross_entropy(20 * torch.tanh(F.linear(h, w, b) / 20), target)


def widened(h, w, b, target):
    return F.cross_entropy(F.linear(h.float(), w.float(), b.float()).double() * 0.5, target).to(h.dtype)


def other_class_ignored(h, w, b, target):
    return F.cross_entropy(F.linear(h, w, b), target.clamp(min=0), ignore_index=3)


def written_out(h, w, b, target):
    logits = F.linear(h, w, b)
    shifted = logits - logits.detach().amax(1, keepdim=True)
    return F.nll_loss(shifted - shifted.exp().sum(1, keepdim=True).log(), target)


def two_losses(h, w, b, target):
    return plain(h, w, b, target) + 0.1 * (h * h).mean()


FORMS = [plain, without_bias, summed, in_batches, soft_capped, widened, other_class_ignored, written_out, two_losses]


@pytest.mark.covers("F5f.24")
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_results_and_gradients_are_those_of_the_whole_and_no_value_is_as_large_as_the_logits(joint_of, fn):
    check(joint_of, fn, arguments(), rtol=1e-5 if fn is widened else 1e-9)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("fn", [plain, summed], ids=lambda fn: fn.__name__)
def test_sums_of_bfloat16_are_kept_in_float32(joint_of, fn, dtype, rtol):
    _, made, _ = check(joint_of, fn, arguments(dtype), rtol)
    totals = list(made.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))
    assert totals and all(n.meta["val"].dtype is torch.float32 for n in totals if n.meta["val"].numel() > 1)


def test_frozen_weights_and_inputs_without_gradients(joint_of):
    for wanted in itertools.product((False, True), repeat=3):
        if any(wanted):
            given = arguments()
            given[:3] = [t.detach().requires_grad_(flag) for t, flag in zip(given[:3], wanted, strict=True)]
            check(joint_of, plain, given)


@pytest.mark.parametrize("gradient", [0.0, 1.0, -3.0e4])
def test_the_gradient_of_the_loss_may_be_any_number(joint_of, gradient):
    check(joint_of, plain, arguments(), gradient=gradient)


def test_where_every_row_is_ignored_the_loss_is_nan_and_the_gradients_are_zero(joint_of):
    given = arguments()
    given[3].fill_(-100)
    _, made, _ = check(joint_of, plain, given)
    loss, *gradients = run(made, given, torch.tensor(1.0, dtype=torch.float64))
    assert loss.isnan() and all(not g.any() for g in gradients if g is not None)


@pytest.mark.parametrize("gradient", [float("inf"), float("nan")])
@pytest.mark.parametrize("fn", [plain, summed, soft_capped], ids=lambda fn: fn.__name__)
def test_ignored_rows_have_no_gradient_where_that_of_the_loss_is_no_finite_number(joint_of, fn, gradient):
    """A sum divided by the number of words in a batch without any: its gradient is infinite, that of a row is 0."""
    given, tangent = arguments(), torch.tensor(gradient, dtype=torch.float64)
    joint, _ = joint_of(fn, *given)
    made, products = chunk_losses(joint, 1)
    assert products
    for ignored in (slice(0, ROWS, 2), slice(None)):
        given[3][ignored] = -100
        for want, got in zip(run(joint, given, tangent)[1:4], run(made, given, tangent)[1:4], strict=True):
            finite = want.isfinite()
            assert torch.equal(finite, got.isfinite()) and torch.equal(want[finite], got[finite])


def test_a_number_of_rows_that_does_not_divide(joint_of):
    given = arguments(rows=601)
    _, made, _ = check(joint_of, plain, given)
    parts = made.graph.find_nodes(op="call_function", target=torch.ops.aten.nll_loss_forward.default)
    assert len({n.args[1].meta["val"].numel() for n in parts}) > 1


# -- what stays whole ----------------------------------------------------------------------------------------------


def returned(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits, target), logits


def smoothed(h, w, b, target):
    return F.cross_entropy(F.linear(h, w, b), target, label_smoothing=0.1)


def weighed_classes(h, w, b, target):
    return F.cross_entropy(F.linear(h, w, b), target, weight=torch.ones_like(b.detach()))


def weighed_rows(h, w, b, target):
    rows = F.cross_entropy(F.linear(h, w, b), target, reduction="none")
    return (rows * torch.arange(ROWS, dtype=rows.dtype)).sum()


def with_dropout(h, w, b, target):
    return F.cross_entropy(F.dropout(F.linear(h, w, b), 0.5), target)


def mean_of_logits(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits, target) + logits.mean()


def normed_over_rows(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits - logits.mean(0), target)


def less_the_largest_of_all(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits - logits.detach().amax(), target)


def and_a_sum_of_all(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits, target) + torch.sum(logits, dim=None)


def target_of_the_logits(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits, logits.argmax(1))


def regularised(h, w, b, target):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits, target) + logits.logsumexp(1).square().mean()


def hooked(h, w, b, target, dtype):
    logits = F.linear(h, w, b)
    logits.register_hook(lambda gradient: (gradient * 1e3).to(dtype).to(gradient.dtype))
    return F.cross_entropy(logits, target)


def gradients_as_whole_numbers(h, w, b, target):
    return hooked(h, w, b, target, torch.int32)


def gradients_in_float16(h, w, b, target):
    return hooked(h, w, b, target, torch.float16)


class TwiceAsMany(torch.autograd.Function):
    """A loss whose gradient is divided by another number of rows."""

    @staticmethod
    def forward(ctx, x, target):
        loss, total = torch.ops.aten.nll_loss_forward(x, target, None, 1, -100)
        ctx.save_for_backward(x, target, total)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        x, target, total = ctx.saved_tensors
        return torch.ops.aten.nll_loss_backward(gradient, x, target, None, 1, -100, total * 2), None


def another_total(h, w, b, target):
    return TwiceAsMany.apply(F.log_softmax(F.linear(h, w, b), 1), target)


REFUSED = [
    gradients_as_whole_numbers, gradients_in_float16, another_total,
    returned, smoothed, weighed_classes, weighed_rows, with_dropout, mean_of_logits, normed_over_rows,
    target_of_the_logits, regularised, less_the_largest_of_all, and_a_sum_of_all,
]  # fmt: skip


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_needs_more_than_a_chunk_stays_whole(joint_of, fn):
    joint, _ = joint_of(fn, *arguments())
    assert chunk_losses(joint, 1) == (joint, ())


def test_a_number_per_row_that_is_repeated_for_other_rows_stays_whole():
    """As many rows as words, so the pairs of rows are as large as the logits, and the chunk's have other rows."""

    def pairs(h, w, target, y):
        logits = h @ w.t()
        sums = (logits.exp().sum(1) * y[:, None]).sum(0)
        return torch.ops.aten.nll_loss_forward(F.log_softmax(logits, 1), target, None, 1, -100)[0], sums

    h, w, _, target = arguments()
    given = h.detach(), w.detach()[:ROWS], target.clamp(max=ROWS - 1), torch.randn(ROWS, dtype=h.dtype)
    graph = make_fx(pairs, tracing_mode="fake")(*given)
    made, _ = chunk_losses(graph, 1)
    for got, want in zip(torch.fx.Interpreter(made).run(*given), pairs(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_float16_stays_whole_because_its_gradients_need_the_scale(joint_of):
    joint, _ = joint_of(plain, *arguments(torch.float16))
    assert chunk_losses(joint, 1) == (joint, ())


def test_unknown_rows_and_small_logits_stay_whole(joint_of):
    joint, _ = joint_of(plain, *arguments(), tracing_mode="symbolic")
    assert chunk_losses(joint, 1) == (joint, ())
    joint, _ = joint_of(plain, *arguments())
    assert chunk_losses(joint, ROWS * WORDS * 4 + 1) == (joint, ())
    assert chunk_losses(joint, 0) == (joint, ())
    assert chunk_losses(joint, ROWS * WORDS * 4)[1] == ("addmm",)


def test_logits_that_are_smaller_than_the_weight_stay_whole(joint_of):
    def wide(h, w, target):
        return F.cross_entropy(h @ w.t(), target)

    h, w = torch.randn(300, 900, requires_grad=True), torch.randn(WORDS, 900, requires_grad=True)
    joint, _ = joint_of(wide, h, w, torch.zeros(300, dtype=torch.int64))
    assert chunk_losses(joint, 1) == (joint, ())


# -- in a partition ------------------------------------------------------------------------------------------------


@pytest.mark.covers("F5f.24")
def test_the_forward_saves_gradients_and_the_peak_of_memory_is_half_at_most(joint_of):
    given = arguments(torch.float32)
    joint, num_outputs = joint_of(plain, *given)
    whole = partition(joint, num_outputs, PartitionOptions(chunk_loss_bytes=0))
    parts = partition(joint, num_outputs, PartitionOptions(chunk_loss_bytes=1))
    assert largest(parts.forward) * 2 < ROWS * WORDS
    assert parts.report.peak_bytes * 2 <= whole.report.peak_bytes
    tangent = torch.tensor(0.3)
    results = []
    for one in (whole, parts):
        inputs = [t.detach() for t in given]
        out = torch.fx.Interpreter(one.forward).run(*inputs)
        results.append((out[0], *torch.fx.Interpreter(one.backward).run(*out[1:], tangent)))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_a_negative_size_is_refused():
    with pytest.raises(InvalidOptionError, match="chunk_loss_bytes"):
        PartitionOptions(chunk_loss_bytes=-1)


# -- programs drawn at random --------------------------------------------------------------------------------------


def drawn(seed):
    """A loss behind a linear layer and some random steps, which may or may not be cut."""
    random = Random(seed)
    steps = [random.choice(sorted(STEPS)) for _ in range(random.randrange(4))]
    ending = random.choice(sorted(ENDINGS))
    bias, shape = random.random() < 0.5, random.choice([None, 2, 5])

    def fn(h, w, b, target):
        given = h if shape is None else h.view(shape, ROWS // shape, WIDTH)
        logits = F.linear(given, w, b if bias else None).reshape(-1, WORDS)
        for name in steps:
            logits = STEPS[name](logits, h, b)
        return ENDINGS[ending](logits, target)

    fn.__name__ = " ".join((*steps, ending))
    return fn


STEPS = {
    "scaled": lambda x, h, b: x * 0.7,
    "divided": lambda x, h, b: x / 1.3,
    "capped": lambda x, h, b: 5 * torch.tanh(x / 5),
    "plus a row": lambda x, h, b: x + b.sin(),
    "plus a column": lambda x, h, b: x + h[:, :1],
    "times a column": lambda x, h, b: x * h[:, 1:2],
    "times a fixed column": lambda x, h, b: x * h.detach().sum(1, keepdim=True).cos(),
    "gelu": lambda x, h, b: F.gelu(x),
    "sigmoid": lambda x, h, b: x.sigmoid() * 3,
    "masked": lambda x, h, b: torch.where(b > -1, x, -30.0),
    "less its largest": lambda x, h, b: x - x.detach().amax(1, keepdim=True),
    "squared": lambda x, h, b: x * x * 0.2,
    "in batches": lambda x, h, b: (x.view(3, -1, WORDS) + 1).view(-1, WORDS),
    "detached sum": lambda x, h, b: x + x.detach() * 0.1,
    "less a mean of all": lambda x, h, b: x - x.mean(),
    "less a mean of rows": lambda x, h, b: x - x.mean(1, keepdim=True),
}
ENDINGS = {
    "mean": lambda x, target: F.cross_entropy(x, target),
    "sum": lambda x, target: F.cross_entropy(x, target, reduction="sum") * 0.01,
    "twice": lambda x, target: F.cross_entropy(x, target) ** 2,
    "ignoring": lambda x, target: F.cross_entropy(x, target.clamp(min=0), ignore_index=0),
    "nll": lambda x, target: F.nll_loss(x.log_softmax(-1), target),
    "two": lambda x, target: F.cross_entropy(x, target) + F.cross_entropy(x * 0.5, target),
    "and a norm": lambda x, target: F.cross_entropy(x, target) + x.square().mean(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seeds", [range(16), range(16, 40)])
def test_random_losses_are_cut_right_or_not_at_all(joint_of, seeds):
    cut = 0
    for seed in seeds:
        fn, given = drawn(seed), arguments()
        joint, _ = joint_of(fn, *given)
        made, products = chunk_losses(joint, 1)
        if not products:
            continue
        cut += 1
        made.graph.lint()
        tangent = torch.tensor(0.3, dtype=torch.float64)
        for a, b in zip(run(joint, given, tangent), run(made, given, tangent), strict=True):
            assert (a is None) == (b is None), fn.__name__
            if a is not None:
                scale = 1e-9 * a.abs().max().item()
                torch.testing.assert_close(b, a, rtol=1e-9, atol=scale, msg=lambda m, fn=fn: f"{fn.__name__}: {m}")
    assert cut > len(seeds) / 4
