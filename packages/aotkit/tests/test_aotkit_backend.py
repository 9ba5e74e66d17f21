"""torch.compile(backend="aotkit") against eager: values, gradients, mutation, aliasing, dynamic shapes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotkit


def compile_strict(fn: Callable[..., object], **kwargs: object) -> Callable[..., object]:
    return torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error"}, **kwargs)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.down(self.norm(F.gelu(self.up(x)))), dim=-1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn(self.conv(x))))
        return self.head(x.mean((2, 3)))


def test_inference_of_an_mlp_equals_eager() -> None:
    model, x = MLP().eval(), torch.randn(6, 16)
    with torch.no_grad():
        torch.testing.assert_close(compile_strict(model)(x), model(x))


@pytest.mark.covers("F2.13", "F8.6")
@pytest.mark.parametrize("make, shape", [(MLP, (6, 16)), (ConvNet, (4, 3, 8, 8))])
def test_training_gives_eager_gradients_and_buffers(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make()
    reference = copy.deepcopy(model)
    compiled = compile_strict(model)
    for step in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for module, run in ((model, compiled), (reference, reference)):
            module.zero_grad()
            run(x).square().sum().backward()
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, msg=lambda m, n=name: f"{n}: {m}")
        for got, want in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(got, want)


def test_dynamic_batch_is_served_by_one_compile() -> None:
    model, recorder = MLP(), aotkit.Recorder()
    compiled = torch.compile(model, backend="aotkit", dynamic=True, options={"observer": recorder, "fallback": "error"})
    for batch in (3, 5, 17, 2):
        x = torch.randn(batch, 16, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        compiled(x).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        for got, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad)
        model.zero_grad()
    assert len([g for g in recorder.graphs if g.name.endswith("forward")]) == 1


def mutate_and_view(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(y)
    return x.t(), x.sin()


def duplicate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


def two_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = x.exp()
    return z[0], z.view(-1)


@pytest.mark.covers("F1.18", "F1.28")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_mutated_input_is_updated_and_its_view_aliases_it() -> None:
    for grad in (False, True):
        base = torch.randn(3, 4, requires_grad=grad)
        y = torch.randn(3, 4, requires_grad=grad)
        results = []
        for run in (mutate_and_view, compile_strict(mutate_and_view)):
            leaf, other = base.detach().clone().requires_grad_(grad), y.detach().clone().requires_grad_(grad)
            x = leaf * 1 if grad else leaf
            view, sine = run(x, other)
            if grad:
                (view.sum() + sine.sum()).backward()
            with torch.no_grad():
                view.add_(1)
            results.append((x.detach(), view.detach(), sine.detach(), leaf.grad, other.grad, view._base is x))
        for eager, ours in zip(*results, strict=True):
            if isinstance(eager, torch.Tensor):
                torch.testing.assert_close(ours, eager)
            else:
                assert ours == eager


@pytest.mark.covers("F1.45", "F4.17")
def test_duplicated_argument_gets_both_gradients() -> None:
    x = torch.randn(5, requires_grad=True)
    compile_strict(duplicate)(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5,), 3.0))


@pytest.mark.covers("F1.30")
def test_two_views_of_one_intermediate_share_memory() -> None:
    x = torch.randn(2, 3)
    first, flat = compile_strict(two_views)(x)
    flat.add_(1)
    torch.testing.assert_close(first, x.exp()[0] + 1)


def test_one_view_returned_twice_is_one_object() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = x.exp()
        view = z.view(-1)
        return view, z, view

    first, whole, second = compile_strict(fn)(torch.randn(2, 3))
    assert first is second
    whole.zero_()
    assert not first.any()


def test_dropout_with_eager_rng_equals_eager() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU(), nn.Dropout(0.5))
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aotkit", options={"rng": "eager", "fallback": "error"})
    x = torch.randn(4, 8)
    for run in (compiled, reference):
        torch.manual_seed(7)
        for _ in range(3):
            run(x).square().sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.covers("F8.2")
def test_unknown_option_is_named_with_the_closest_known_one() -> None:
    with pytest.raises(Exception, match="did you mean 'numerics'"):
        torch.compile(lambda x: x + 1, backend="aotkit", options={"numeric": "fast"})(torch.randn(2))
    with pytest.raises(Exception, match="known modes"):
        torch.compile(lambda x: x + 1, backend="aotkit", mode="fastest")(torch.randn(2))


@pytest.mark.covers("F8.7")
def test_unsupported_device_runs_eagerly_with_one_notice_or_raises() -> None:
    x = torch.empty(3, device="meta")
    with pytest.warns(aotkit.EagerFallback, match="device meta"):
        assert torch.compile(lambda t: t + 1, backend="aotkit")(x).device.type == "meta"
    with pytest.raises(Exception, match="device meta"):
        compile_strict(lambda t: t + 2)(x)


def test_tensors_of_zeros_without_memory_run_eagerly() -> None:
    """A kernel that was given one ended the process. Gradients of forward mode are such tensors where they are zero."""
    compiled = torch.compile(lambda t: t + 1, backend="aotkit")
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.warns(aotkit.EagerFallback, match="has no memory"):
        assert compiled(torch._efficientzerotensor((3,))).tolist() == [1, 1, 1]


def test_what_is_refused_runs_eagerly_with_one_notice() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(int(x.shape[0] * 1.7 * 1.3))  # a size of floats that torch merges

    x = torch.randn(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = torch.compile(fn, backend="aotkit", dynamic=True, fullgraph=True)(x)
    torch.testing.assert_close(results, fn(x))
    assert len([w for w in caught if issubclass(w.category, aotkit.EagerFallback)]) == 1


def test_non_tensor_output_is_refused_by_aot_function() -> None:
    compiled = aotkit.aot_function(lambda x: (x, object()), lambda g, _: g)
    with pytest.raises(Exception, match="object"):
        compiled(torch.randn(2))


@pytest.mark.covers("F5h.1", "F5h.3", "F5h.4")
@pytest.mark.parametrize(
    "fn, kernels",
    [
        (lambda x, b: F.layer_norm(x, (64,), b, b), 1),
        (lambda x, b: F.softmax(x, -1), 1),
        (lambda x, b: F.gelu(x + b), 1),
        (lambda x, b: F.gelu(x + b, approximate="tanh"), 1),
    ],
)
def test_fused_functions_are_one_kernel(fn: Callable[..., torch.Tensor], kernels: int) -> None:
    x, b = torch.randn(32, 64), torch.randn(64)
    explanation = aotkit.explain(fn, x, b)
    assert explanation.kernel_count == kernels
    assert not explanation.fallbacks
    torch.testing.assert_close(compile_strict(fn)(x, b), fn(x, b))


@pytest.mark.parametrize("lowering", ["none", "kernels"])
def test_an_operator_that_asks_for_requires_grad_gets_arguments_without(lowering: str) -> None:
    """as_strided_scatter refuses a strided argument that requires grad."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((2, 2), (2, 1)).diagonal().zero_()
        return x * 2

    def make() -> torch.Tensor:
        return torch.arange(24.0).view(6, 4)[::2].requires_grad_()

    compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error", "lowering": lowering})
    with torch.no_grad():
        torch.testing.assert_close(compiled(make()), fn(make()))


@pytest.mark.covers("F2.47")
def test_a_python_float_that_changes_needs_no_other_compile_where_that_changes_no_bit() -> None:
    compiles = []

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiles.append(gm)
        return aotkit.make_backend(aotkit.Options(fallback="error", verify=True))(gm, inputs)

    def fn(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return (((x * a + b) / a - b) * x.sum(0)).sin() + (b - x) * 0.5

    compiled = torch.compile(fn, backend=counting, dynamic=True)
    for dtype in (torch.float32, torch.float64):
        compiles.clear()
        for a in (2.5, 0.1, -7.0, 1.5):
            x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            ours, theirs = compiled(x, a, 0.3), fn(y, a, 0.3)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert len(compiles) <= 2  # one for a number on the left of a difference, which is fixed
    torch._dynamo.reset()
    exact = torch.compile(lambda x, a: x * a + a, backend=counting, dynamic=True)
    compiles.clear()
    x = torch.randn(64, 7)
    for a in (2.5, 0.1, 1e-40, 7.0):
        assert torch.equal(exact(x, a), x * a + a)
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, a: x.bfloat16() * a,
        lambda x, a: x.int() * a,
        lambda x, a: x.sum() * a,
        lambda x, a: a - x,
        lambda x, a: a / x,
        lambda x, a: x * (a + 1),
        lambda x, a: torch.add(x, a, alpha=2),
        lambda x, a: F.layer_norm(x, (3,), eps=a),
        lambda x, a: x**a,
    ],
)
def test_a_python_float_with_another_use_is_eagers_too(fn: Callable[..., torch.Tensor]) -> None:
    compiled = torch.compile(fn, backend="aotkit", dynamic=True, options={"fallback": "error"})
    x = torch.rand(4, 3)
    for a in (0.1, 2.0):
        ours, theirs = compiled(x, a), fn(x, a)
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs)
