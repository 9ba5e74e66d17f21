"""What users bring themselves: autograd functions, custom operators, kernels, generators, hooks; against eager."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit_aot_trace import Unsupported
from aotkit_aot_trace._torch_compat import graphs_hold_generators

# Dynamo makes an instance to look at.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    return aotkit.aot_function(fn, lambda graph, _: graph)


def by_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error", "rng": "eager"})


WAYS = pytest.mark.parametrize("wrap", [by_hand, by_dynamo])


@pytest.fixture
def this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and generators live in one process, so a graph that holds one is not written down and read back."""
    monkeypatch.delenv("AOTKIT_VERIFY")


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def outcome(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[Any]]:
    """Results and the arguments afterwards, then gradients."""
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)
    results = fn(*args)
    results = list(results) if isinstance(results, tuple | list) else [results]
    leaves = [a for a in args if a.requires_grad]
    losses = [(r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in results if r.requires_grad]
    gradients = torch.autograd.grad(losses, leaves, allow_unused=True) if losses and leaves else ()
    return [r.detach() for r in (*results, *args)], list(gradients)


def assert_like_eager(fn: Callable[..., Any], wrap: Callable[..., Any], *args: torch.Tensor) -> None:
    compiled = wrap(fn)
    for _ in range(2):
        (mine, my_gradients), (theirs, their_gradients) = outcome(compiled, args), outcome(fn, args)
        torch.testing.assert_close(mine, theirs)
        assert [g is None for g in my_gradients] == [g is None for g in their_gradients]
        for a, b in zip(my_gradients, their_gradients, strict=True):
            torch.testing.assert_close(a, b)


# -- autograd functions --------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Takes what is no tensor; its backward is wrong on purpose, so that it is seen to be used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor * 7, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class WithIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = x.argmax()
        ctx.mark_non_differentiable(place)
        return x * 2, place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return grad * 5


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view(ctx.shape) * 5


def flat_of_intermediate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, Flat.apply(y)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a number as argument": lambda x: Scaled.apply(x, 3.0).sin(),
    "marked dirty": lambda x: InPlace.apply(x.clone()).sin(),
    "marked non-differentiable": lambda x: WithIndex.apply(x),
    "a view of an input": lambda x: Flat.apply(x),
    "a view of an intermediate": flat_of_intermediate,
    "a view inside": lambda x: Flat.apply(x.clone()) * 2,
}


@pytest.mark.covers("F2.41")
@pytest.mark.sample(ways=1)
@WAYS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions_keep_their_own_backward(name: str, wrap: Callable[..., Any]) -> None:
    assert_like_eager(FUNCTIONS[name], wrap, grad(2, 3))


def test_a_view_with_its_own_backward_still_shares_memory() -> None:
    x = grad(2, 3)
    flat = by_hand(lambda t: Flat.apply(t))(x)
    assert flat.data_ptr() == x.data_ptr()


def test_a_view_with_its_own_backward_of_an_input_that_is_written_to_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = Flat.apply(x)
        with torch.no_grad():
            x.add_(1)
        return y

    with pytest.raises(Unsupported):
        by_hand(fn)(grad(2, 3))


@WAYS
def test_a_hook_on_a_returned_view_is_part_of_the_gradient(wrap: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        view = y.view(-1)
        view.register_hook(lambda g: g * 3)
        return y, view

    assert_like_eager(fn, wrap, grad(2, 3))


# -- custom operators ----------------------------------------------------------------------------------


@torch.library.custom_op("aotkit_user_calls::halve", mutates_args=())
def halve(x: torch.Tensor) -> list[torch.Tensor]:
    return [x / 2, x / 4]


@halve.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


@torch.library.custom_op("aotkit_user_calls::add_into", mutates_args=("x",))
def add_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


@add_into.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("aotkit_user_calls::add_all", mutates_args=("x",))
def add_all(x: torch.Tensor, ys: list[torch.Tensor]) -> None:
    for y in ys:
        x.add_(y)


@add_all.register_fake
def _(x: torch.Tensor, ys: list[torch.Tensor]) -> None: ...


def into_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return add_into(x[1], y) + x


def into_a_view_of_a_clone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w = x.clone()
    add_all(w[0], [y, w[1]])
    return w * 2


def into_an_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return add_into(x, y) + x


OPERATORS: dict[str, Callable[..., Any]] = {
    "returns a list": lambda x, y: [part + y for part in halve(x)],
    "writes into an input": into_an_input,
    "writes into a view of an input": into_a_view,
    "returns nothing, takes a list that shares memory with what it writes": into_a_view_of_a_clone,
}


@pytest.mark.covers("F1.63", "F5g.27")
@pytest.mark.sample(ways=1)
@WAYS
@pytest.mark.parametrize("name", OPERATORS)
def test_custom_operators_return_and_write_as_in_eager(name: str, wrap: Callable[..., Any]) -> None:
    assert_like_eager(OPERATORS[name], wrap, torch.randn(4, 4), torch.randn(4))


class DoublingKernel:
    """Stands for a user's kernel on a machine without one: launched like it, runs on the CPU."""

    arg_names = ("out", "x", "n")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
            out.view(-1)[:n].copy_(x.view(-1)[:n] * 2)

        return launch


@pytest.mark.covers("F1.64")
def test_a_users_kernel_is_seen_to_write_its_output(this_process_only: None) -> None:
    kernel = kernel_side_table.add_kernel(DoublingKernel())
    constants = kernel_side_table.add_constant_args({"n": 4})

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros_like(x)
        triton_kernel_wrapper_mutation(
            kernel_idx=kernel,
            constant_args_idx=constants,
            grid=[(1, 1, 1)],
            tma_descriptor_metadata={},
            kwargs={"out": out, "x": x},
        )
        return [out + 1]

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x, y = torch.randn(6), torch.randn(6)
    compiled = aotkit.aot_function(fn, keep)
    for value in (x, y):
        torch.testing.assert_close(compiled(value), fn(value))
    assert any("triton_kernel_wrapper_functional" in str(node.target) for node in graphs[0].graph.nodes)
    # And between generated kernels. The kernel is known to this process only, so nothing is written down.
    graph = make_fx(fn, tracing_mode="fake")(x)
    for processor in ("host", "interpreter", *["triton-interpreter"] * bool(importlib.util.find_spec("triton"))):
        options = aotkit.Options(fallback="error", processor=processor)
        generated = aotkit.make_backend(options, aotkit.Recorder())(graph, [x])
        torch.testing.assert_close(generated(y), fn(y))


# -- generators ----------------------------------------------------------------------------------------

needs_generators = pytest.mark.skipif(
    not graphs_hold_generators(), reason="refused before torch 2.13, see test_aot_trace_torch_compat.py"
)


def drawn_with(x: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    return [x + torch.rand(4, generator=generator), torch.empty(4).normal_(generator=generator)]


@needs_generators
@pytest.mark.covers("F2.40")
def test_a_generator_given_as_an_argument_is_drawn_from_and_advanced(this_process_only: None) -> None:
    generator, x = torch.Generator(), torch.randn(4)
    compiled = by_hand(drawn_with)
    runs = []
    for fn in (drawn_with, compiled):
        generator.manual_seed(5)
        runs.append([fn(x, generator), fn(x, generator), generator.get_state()])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


@needs_generators
def test_a_generator_from_outside_is_drawn_from_at_each_call(this_process_only: None) -> None:
    generator, x = torch.Generator(), torch.randn(4)

    def fn(t: torch.Tensor) -> list[torch.Tensor]:
        return drawn_with(t, generator)

    compiled = by_hand(fn)
    runs = []
    for run in (fn, compiled):
        generator.manual_seed(5)
        runs.append([run(x), run(x)])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


def reseeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.rand(4)


def rewound(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first * torch.rand(4)


@pytest.mark.parametrize("fn", [reseeded, rewound])
def test_setting_the_state_of_the_process_generator_is_refused(fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="state of the random generator"):
        by_hand(fn)(torch.randn(4))


def dropped_out(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(y.sin(), 0.5), x, use_reentrant=False)


@pytest.mark.covers("F4.35")
@WAYS
@pytest.mark.parametrize("fn", [dropped_out, lambda x: F.dropout(x, 0.5)], ids=["recomputed", "saved"])
def test_masks_belong_to_their_forward_whatever_the_order_of_the_backwards(
    fn: Callable[..., Any], wrap: Callable[..., Any]
) -> None:
    x = grad(64)
    compiled = wrap(fn)
    runs = []
    for run in (fn, compiled):
        torch.manual_seed(0)
        first, second = run(x), run(x)
        gradients = [
            torch.autograd.grad(y.sum(), x, retain_graph=again)[0] for y, again in ((second, True), (first, False))
        ]
        gradients += torch.autograd.grad(second.sum(), x)
        runs.append([first.detach(), second.detach(), *gradients])
    torch.testing.assert_close(runs[1], runs[0])


@WAYS
def test_a_stream_of_the_cpu_changes_nothing(wrap: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.Stream(device="cpu"):
            return x * 2

    assert_like_eager(fn, wrap, grad(4))
