"""Second and higher derivatives through compiled graphs, beside eager."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit_runtime_wrappers import DoubleBackwardError


def compiled(fn, **options):
    return torch.compile(
        fn, backend="aotkit", fullgraph=True, options={"fallback": "error"}, dynamic=options.pop("dynamic", False)
    )


def leaf(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


def derivatives(fn, args, order):
    """Outputs, and gradients of each order up to ``order`` with respect to inputs and tangents; ``None`` as zeros."""
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    torch.manual_seed(5)
    values = fn(*args)
    values = list(values) if isinstance(values, tuple) else [values]
    inputs = [a for a in args if a.requires_grad]
    found = [v.detach() for v in values]
    shape = [[v.requires_grad for v in values]]
    torch.manual_seed(6)
    for _ in range(order):
        values = [v for v in values if v is not None and v.requires_grad]
        tangents = [torch.randn_like(v).requires_grad_() for v in values]
        wanted = [*inputs, *tangents] if shape[1:] else inputs
        values = torch.autograd.grad(values, wanted, tangents, create_graph=True, allow_unused=True)
        shape.append([v is not None and v.requires_grad for v in values])
        found += [torch.zeros_like(w) if v is None else v.detach() for v, w in zip(values, wanted, strict=True)]
        inputs = [*inputs, *tangents]
    return found, shape


def check(fn, *args, order=3, tolerance=1e-5, dynamic=False):
    expected, shape = derivatives(fn, args, order)
    got, got_shape = derivatives(compiled(fn, dynamic=dynamic), args, order)
    assert got_shape[:2] == shape[:2]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Cubed(torch.autograd.Function):
    """With a gradient twice as large as its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 6 * x * x


class Rounded(torch.autograd.Function):
    """Whose gradient passes straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Viewed(torch.autograd.Function):
    """Whose gradient is a view of what it gets."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.view_as(grad)


class WritesItsGradient(torch.autograd.Function):
    """Which it must not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.mul_(2 * x)


def mlp(x, w, b, v):
    return F.linear(F.gelu(F.linear(x, w, b)), v)


def relu_mlp(x, w, b, v):
    return F.linear(F.relu(F.linear(x, w, b)), v)


def norm(x, w, b):
    return F.layer_norm(x, (4,), w, b).sin()


def attention(q, k, v):
    return F.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v


def conv_bn(x, w, b, gain, bias):
    return F.batch_norm(F.conv2d(x, w, b, padding=1), None, None, gain, bias, training=True).tanh()


def partly_detached(x, w):
    return x * x.detach() * (x @ w).detach().sin() + x.pow(3)


def under_no_grad(x):
    with torch.no_grad():
        scale = x.exp()
    return x.sin() * scale


def views(x):
    y = x.sin()
    return y.view(-1)[2:7] * 2, y.t(), y[0].exp()


def several(x, w):
    return x.sin() * w, (x * w).sum(), w.exp()


@pytest.mark.covers("F2.51")
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (torch.tanh, [leaf(3, 4)]),
        (mlp, [leaf(3, 4), leaf(5, 4), leaf(5), leaf(2, 5)]),
        (relu_mlp, [leaf(3, 4), leaf(5, 4), leaf(5), leaf(2, 5)]),
        (norm, [leaf(3, 4), leaf(4), leaf(4)]),
        (attention, [leaf(2, 3, 4), leaf(2, 3, 4), leaf(2, 3, 4)]),
        (partly_detached, [leaf(4, 4), leaf(4, 4)]),
        (under_no_grad, [leaf(3, 4)]),
        (views, [leaf(3, 4)]),
        (several, [leaf(3, 4), leaf(3, 4)]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2])), [leaf(3, 4)]),
        (lambda w: F.embedding(torch.tensor([1, 2, 1]), w).pow(3), [leaf(4, 3)]),
        (lambda x, w: x @ w, [leaf(3, 4), torch.randn(4, 5)]),
    ],
    ids=[
        *("tanh", "mlp", "relu-mlp", "norm", "attention", "detached", "no-grad", "views", "several"),
        *("cross-entropy", "embedding", "linear"),
    ],
)
def test_derivatives_of_three_orders_are_those_of_eager(fn, args):
    check(fn, *args, tolerance=1e-4)


@pytest.mark.covers("F2.51")
def test_convolution_with_batch_norm_has_eagers_second_derivatives():
    check(conv_bn, leaf(2, 3, 5, 5), leaf(4, 3, 3, 3), leaf(4), leaf(4), leaf(4), order=2, tolerance=1e-4)


@pytest.mark.covers("F2.51")
def test_running_statistics_move_once_though_the_gradient_is_differentiated():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    twin = copy.deepcopy(net)
    x = torch.randn(8, 4)
    for model, run in ((net, net), (twin, compiled(twin))):
        data = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(run(data).sum(), data, create_graph=True)
        grad.pow(2).sum().backward()
        assert model[1].num_batches_tracked == 1
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.covers("F2.51")
@pytest.mark.parametrize("fn", [mlp, norm, attention, conv_bn], ids=lambda f: f.__name__)
def test_gradgradcheck_in_double(fn):
    shapes = {
        mlp: [(2, 3), (4, 3), (4,), (2, 4)],
        norm: [(2, 4), (4,), (4,)],
        attention: [(2, 2, 3)] * 3,
        conv_bn: [(2, 2, 3, 3), (2, 2, 3, 3), (2,), (2,), (2,)],
    }
    args = [leaf(*s, dtype=torch.float64) for s in shapes[fn]]
    assert torch.autograd.gradcheck(compiled(fn), args, fast_mode=True)
    assert torch.autograd.gradgradcheck(compiled(fn), args, fast_mode=True)


@pytest.mark.covers("F2.51")
def test_dropout_keeps_its_mask_in_every_derivative():
    def fn(x, w):
        return F.dropout(torch.tanh(F.dropout(x, 0.3) @ w), 0.5).sin() @ w.t()

    check(fn, leaf(6, 4), leaf(4, 5))


@pytest.mark.covers("F2.51")
def test_dropout_of_an_input_that_needs_no_gradient():
    check(lambda x, w: (F.dropout(x, 0.3) @ w).exp(), torch.randn(6, 4), leaf(4, 5))


@pytest.mark.covers("F2.51")
def test_sizes_that_vary():
    fn = compiled(lambda x, w: F.softmax(torch.tanh(x @ w), -1).view(-1) ** 2, dynamic=True)
    for rows in (3, 5, 7):
        args = [leaf(rows, 4), leaf(4, 5)]
        expected, _ = derivatives(lambda x, w: F.softmax(torch.tanh(x @ w), -1).view(-1) ** 2, args, 2)
        got, _ = derivatives(fn, args, 2)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Dynamo looks at the .grad of inputs that are no leaves.
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@NON_LEAF
@pytest.mark.covers("F2.51")
def test_an_input_that_is_written_to():
    def fn(x, w):
        x.mul_(w)
        return x.sin() * w

    def run(f):
        torch.manual_seed(0)
        start, w = leaf(3, 4), leaf(3, 4)
        x = start * 3
        (grad_start, grad_w) = torch.autograd.grad(f(x, w).sum(), (start, w), create_graph=True)
        return x.detach(), grad_start, grad_w, *torch.autograd.grad((grad_start * grad_w).sum(), (start, w))

    for a, b in zip(run(compiled(fn)), run(fn), strict=True):
        torch.testing.assert_close(a, b)


@NON_LEAF
@pytest.mark.covers("F2.51")
@pytest.mark.parametrize("fn", [torch.relu, torch.exp, torch.sigmoid, torch.tanh], ids=lambda f: f.__name__)
def test_inputs_whose_memory_is_gone_keep_their_history(fn):
    options = {"fallback": "error", "partitioner": "default"}  # which saves results, as eager does
    run = torch.compile(lambda x: fn(x) * 2, backend="aotkit", options=options)
    x = leaf(5)
    hidden = x.sin()
    gone = weakref.ref(hidden)
    out = run(hidden)
    del hidden
    gc.collect()
    assert gone() is None
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    (expected,) = torch.autograd.grad((fn(x.sin()) * 2).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(second, torch.autograd.grad(expected.sum(), x)[0])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.body(x)


@pytest.mark.covers("F2.51")
def test_training_with_a_gradient_penalty_follows_eager():
    torch.manual_seed(1)
    critic, twin = Critic(), Critic()
    twin.load_state_dict(critic.state_dict())
    losses = []
    for model, run in ((critic, critic), (twin, compiled(twin))):
        torch.manual_seed(2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        history = []
        for _ in range(5):
            real, fake = torch.randn(8, 6) + 1, torch.randn(8, 6)
            mix = torch.rand(8, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (grad,) = torch.autograd.grad(run(between).sum(), between, create_graph=True)
            penalty = (grad.norm(2, dim=1) - 1).pow(2).mean()
            loss = run(fake).mean() - run(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        losses.append(torch.stack(history))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
    for a, b in zip(twin.parameters(), critic.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.covers("F2.51")
def test_backward_with_create_graph_twice_and_retain_graph():
    fn = compiled(mlp)
    args = [leaf(*shape).detach().double().requires_grad_() for shape in ((3, 4), (5, 4), (5,), (2, 5))]
    out, reference = fn(*args).pow(2).sum(), mlp(*args).pow(2).sum()
    for _ in range(2):
        first = torch.autograd.grad(out, args, create_graph=True)
        expected = torch.autograd.grad(reference, args, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), args, retain_graph=True)
        wanted = torch.autograd.grad(sum(g.pow(2).sum() for g in expected), args, retain_graph=True)
        for a, b in zip((*first, *second), (*expected, *wanted), strict=True):
            torch.testing.assert_close(a, b)


def test_an_operator_without_a_second_derivative_has_a_first_one_and_raises_for_the_second():
    q, k, v = leaf(1, 2, 3, 4), leaf(1, 2, 3, 4), leaf(1, 2, 3, 4)
    out = compiled(F.scaled_dot_product_attention)(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
    torch.testing.assert_close(grad, expected)
    assert grad.requires_grad
    with pytest.raises(DoubleBackwardError, match="not implemented"):
        torch.autograd.grad(grad.sum(), k)


def test_a_parameter_changed_before_the_second_derivative_is_noticed():
    x, w = leaf(3, 4), leaf(4, 5)
    fn = compiled(lambda x, w: torch.tanh(x @ w))
    out = fn(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.covers("F2.51")
def test_a_function_compiled_without_dynamo():
    fn = aotkit.aot_function(lambda x, w: torch.tanh(x @ w).sin(), lambda graph, inputs: graph)
    args = [leaf(3, 4), leaf(4, 5)]
    expected, _ = derivatives(lambda x, w: torch.tanh(x @ w).sin(), args, 3)
    got, _ = derivatives(fn, args, 3)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def recomputed(x):
    return checkpoint(lambda x: Cubed.apply(x) * x, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("fn", [lambda x: Cubed.apply(x) * x, recomputed, lambda x: Cubed.apply(Rounded.apply(x) * x)])
def test_the_backward_of_a_users_function_is_not_differentiated(fn):
    """Dynamo records it without what its results depend on; a part of the second derivative was missing."""
    x = leaf(4)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    (first,) = torch.autograd.grad(compiled(fn)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first, expected)
    with pytest.raises(DoubleBackwardError, match=r"torch\.autograd\.Function"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_gradients_that_a_users_function_passes_on_are_differentiated():
    check(lambda x, y: Rounded.apply(x * x) * y + x.sin(), leaf(4), leaf(4), order=2)


def scaled(x, w):
    return (Cubed.apply(x) * w).sum()


def apart(x, w):
    return Cubed.apply(x).sum() + (w * x).sin().sum()


def transposed(x, w):
    return (Cubed.apply(x.view(2, 2).t()).reshape(-1) * w).sum() + w.exp().sum()


# Dynamo makes instances of the functions.
USERS_FUNCTION = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@USERS_FUNCTION
@pytest.mark.parametrize("fn", [scaled, apart, transposed])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_that_depend_on_no_backward_of_a_users_function_are_differentiated(fn, together):
    """Those of ``w`` need the function's value at most; those of ``x``, which come with them, what it computes."""
    x, w = leaf(4), leaf(4)

    def run(f):
        wanted = (w, x) if together else (w,)
        first = torch.autograd.grad(f(x, w), wanted, create_graph=True)
        return *first, *torch.autograd.grad((first[0] ** 2).sum(), (x, w), allow_unused=True)

    for got, expected in zip(run(compiled(fn)), run(fn), strict=True):
        if expected is None:  # the loss does not depend on it
            assert got is None
        else:
            torch.testing.assert_close(got, expected)


@USERS_FUNCTION
@pytest.mark.parametrize("fn", [scaled, apart, transposed])
def test_the_other_gradients_of_such_a_graph_refuse(fn):
    x, w = leaf(4), leaf(4)
    expected = torch.autograd.grad(fn(x, w), (x, w))
    grad_x, grad_w = torch.autograd.grad(compiled(fn)(x, w), (x, w), create_graph=True)
    torch.testing.assert_close((grad_x.detach(), grad_w.detach()), expected)
    for loss in (grad_x.sum(), (grad_x * grad_w).sum()):
        for source in (x, w):
            with pytest.raises(DoubleBackwardError, match=r"no derivative of this one.*torch\.autograd\.Function"):
                torch.autograd.grad(loss, source, allow_unused=True, retain_graph=True)


@USERS_FUNCTION
def test_inputs_that_share_a_gradient_which_refuses():
    def fn(x, y, w):
        return (Cubed.apply(x + y) * w).sum()

    args = [leaf(4), leaf(4), leaf(4)]
    expected = torch.autograd.grad(fn(*args), args, create_graph=True)
    got = torch.autograd.grad(compiled(fn)(*args), args, create_graph=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    seconds = [torch.autograd.grad(first[2].sum(), args[:2], retain_graph=True) for first in (got, expected)]
    torch.testing.assert_close(*seconds)
    for gradient in got[:2]:
        with pytest.raises(DoubleBackwardError, match="no derivative of this one"):
            torch.autograd.grad(gradient.sum(), args[2], retain_graph=True)


@USERS_FUNCTION
def test_a_second_derivative_that_a_users_function_computed_is_not_differentiated():
    x, w = leaf(4), leaf(4)
    seconds = []
    for run in (scaled, compiled(scaled)):
        (first,) = torch.autograd.grad(run(x, w), w, create_graph=True)
        seconds.append(torch.autograd.grad((first**2).sum(), x, create_graph=True)[0])
    torch.testing.assert_close(seconds[1], seconds[0])
    with pytest.raises(DoubleBackwardError, match=r"torch\.autograd\.Function"):
        torch.autograd.grad(seconds[1].sum(), x, allow_unused=True)


@USERS_FUNCTION
def test_a_view_of_the_gradient_that_a_users_function_makes_refuses():
    """It had no history at all: None was the derivative."""

    def fn(x, w):
        return (Viewed.apply(x) * w * w).sum()

    x, w = leaf(4), leaf(4)
    (expected,) = torch.autograd.grad(fn(x, w), x)
    grad_x, grad_w = torch.autograd.grad(compiled(fn)(x, w), (x, w), create_graph=True)
    torch.testing.assert_close(grad_x.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(grad_w.sum(), x, retain_graph=True)[0], 2 * w)
    with pytest.raises(DoubleBackwardError, match="no derivative of this one"):
        torch.autograd.grad(grad_x.sum(), w, allow_unused=True)


@USERS_FUNCTION
def test_a_users_function_that_writes_to_its_gradient_refuses_all_second_derivatives():
    x, y, w = leaf(4), leaf(4), leaf(4)
    out = compiled(lambda x, y, w: ((WritesItsGradient.apply(x) + y) * w).sin().sum())(x, y, w)
    for gradient in torch.autograd.grad(out, (x, y, w), create_graph=True):
        with pytest.raises(DoubleBackwardError, match=r"torch\.autograd\.Function"):
            torch.autograd.grad(gradient.sum(), w, allow_unused=True, retain_graph=True)


def _distance_of_a_row(row, w, b):
    return (F.linear(row, w, b) - 0.5).abs().sum()


def _signs_in_other_shapes(row, w, b):
    return (F.linear(row, w, b).abs().reshape(1, -1) @ w.sgn()).reshape(2, 3).t().sum(0).sin()


def _distance_of_an_image(row, w, b):
    image = F.conv1d(row.reshape(1, 2, 3), w.reshape(2, 2, 3), b)
    return F.l1_loss(image.flatten(), b.detach())


@pytest.mark.parametrize("fn", [_distance_of_a_row, _signs_in_other_shapes, _distance_of_an_image])
def test_second_derivatives_that_are_zeros_without_memory_may_be_reshaped(fn):
    args = [leaf(6), leaf(2, 6), leaf(2)]
    torch.testing.assert_close(derivatives(compiled(fn), args, 2), derivatives(fn, args, 2))
