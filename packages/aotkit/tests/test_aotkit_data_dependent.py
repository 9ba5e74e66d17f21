"""Sizes and numbers that depend on data, effects whose order matters, and random numbers: against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._library.effects import EffectType
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit_aot_trace import Unsupported

whole_graphs = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    return aotkit.aot_function(fn, lambda graph, _: graph)


def by_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error", "rng": "eager"})


RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
WAYS = pytest.mark.parametrize("wrap", [by_hand, by_dynamo])


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Results, then gradients, of a call with copies of the arguments."""
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)
    torch.manual_seed(0)
    results = fn(*args)
    results = list(results) if isinstance(results, tuple | list) else [results]
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    leaves = [a for a in args if a.requires_grad]
    losses = [(r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in tensors if r.requires_grad]
    gradients = torch.autograd.grad(losses, leaves, allow_unused=True) if losses and leaves else ()
    return [torch.as_tensor(r).detach() for r in results] + list(gradients)


def assert_like_eager(fn: Callable[..., Any], wrap: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    with whole_graphs:
        compiled = wrap(fn)
        for args in calls:
            got, expected = outcome(compiled, args), outcome(fn, args)
            assert [tuple(t.shape) for t in got if t is not None] == [tuple(t.shape) for t in expected if t is not None]
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs)


def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0] * 2


def positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.nonzero(x > 0)
    return found.t(), found + 1


def zeros_of_size(k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(k.item()) + 1


def cut_in_two(x: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    first, second = k.tolist()
    return list(x.split([first, second]))


def repeated(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, counts) * 2


def scaled(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x * k.item()


def softmax_of_positive(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(F.gelu(x[x > 0]), dim=0)


def views_of_the_positive(x: torch.Tensor) -> list[torch.Tensor]:
    y = x[x > 0] * 2
    return [y, y.view(-1, 1), y[1:]]


def in_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.view(rows.item(), -1)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def split(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(x, at)


def split_and_written(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x * 2
    x.mul_(3)
    return torch.tensor_split(x, at)


CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "mask": (positive, [(vector(1, -2, 3),), (vector(-1, -2, -3),), (vector(-1, -2, 3),)]),
    "mask with gradient": (positive, [(grad(6),), (grad(6),)]),
    "fused behind a mask": (softmax_of_positive, [(grad(40),), (grad(40),)]),
    "views": (
        views_of_the_positive,
        [(vector(1, -2, 3, 4).requires_grad_(),), (vector(1, 2, 3, -4).requires_grad_(),)],
    ),
    "a view of an input": (in_rows, [(grad(6), torch.tensor(2)), (grad(6), torch.tensor(3))]),
    "nonzero": (positions, [(torch.randn(4, 4),), (torch.ones(4, 4),), (-torch.ones(4, 4),)]),
    "item as size": (zeros_of_size, [(torch.tensor(3), torch.ones(2)), (torch.tensor(7), torch.ones(2))]),
    "item as factor": (scaled, [(grad(5), torch.tensor(3)), (grad(5), torch.tensor(-2))]),
    "float item as factor": (scaled, [(grad(5), torch.tensor(3.5)), (grad(5), torch.tensor(-0.5))]),
    "tolist as sizes": (cut_in_two, [(grad(5), torch.tensor([2, 3])), (grad(5), torch.tensor([4, 1]))]),
    "repeat_interleave": (repeated, [(grad(3), torch.tensor([1, 2, 3])), (grad(3), torch.tensor([2, 2, 5]))]),
    "unique": (torch.unique, [(torch.tensor([1, 2, 2, 3]),), (torch.tensor([5, 5, 5, 5]),)]),
}


@pytest.mark.covers("F1.59", "F5g.26")
@pytest.mark.sample(ways=1)
@WAYS
@pytest.mark.parametrize("name", CASES)
def test_sizes_and_numbers_that_depend_on_data_equal_eager(name: str, wrap: Callable[..., Any]) -> None:
    fn, calls = CASES[name]
    assert_like_eager(fn, wrap, *calls)


@pytest.mark.parametrize("fn", [split, split_and_written])
def test_views_at_places_that_depend_on_data(fn: Callable[..., Any]) -> None:
    places = ([2, 5], [3, 3], [0, 9], [7, 8])
    assert_like_eager(fn, by_dynamo, *((grad(9, 2), torch.tensor(at)) for at in places))
    assert_like_eager(fn, by_dynamo, *((torch.randn(9), torch.tensor(at)) for at in places))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("value", [True, False, 3, -0.5], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float16], ids=str)
def test_an_element_is_returned_as_a_number(value: float, dtype: torch.dtype) -> None:
    x = torch.tensor(value).to(dtype)
    with whole_graphs:
        number, more = by_dynamo(lambda x: (x.item(), x + 1))(x)
    assert type(number) is type(x.item()) and number == x.item()
    torch.testing.assert_close(more, x + 1)


def test_a_view_of_a_written_input_is_placed_in_it() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x[at.item() :]

    with whole_graphs:
        compiled, memory = by_dynamo(fn), torch.arange(12.0)
        for place in (2, 5):
            x, twin = memory.clone(), memory.clone()
            got, expected = compiled(x, torch.tensor(place)), fn(twin, torch.tensor(place))
            torch.testing.assert_close(got, expected)
            got.zero_()
            expected.zero_()
            torch.testing.assert_close(x, twin)


@WAYS
def test_a_size_out_of_the_range_that_was_checked_for_raises(wrap: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        size = k.item()
        torch._check(size >= 2)
        torch._check(size <= 4)
        return x[:size] * 2

    with whole_graphs:
        compiled = wrap(fn)
        torch.testing.assert_close(compiled(torch.ones(5), torch.tensor(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError):
            compiled(torch.ones(5), torch.tensor(1))


@pytest.mark.skipif(RELEASE < (2, 12), reason="before torch 2.12 Dynamo leaves these checks out of its graphs")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_number_that_was_checked_to_be_another_is_looked_at(requires_grad: bool) -> None:
    """The check makes a constant of it, also for its own condition."""

    def fn(x: torch.Tensor, k: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        number, size, chosen = k.item(), m.item(), x[x > 0]
        torch._check(number == 3)
        torch._check(size == x.shape[0])
        torch._check(chosen.shape[0] == 2)
        return x * number + torch.ones(size) + chosen.sum()

    with whole_graphs:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=False, options={"fallback": "error"})
        x = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0], requires_grad=requires_grad)
        k, m = torch.tensor([3]), torch.tensor([5])
        torch.testing.assert_close(compiled(x, k, m), fn(x, k, m))
        for other in ((x, k + 1, m), (x, k, m - 1), (x.detach().abs().add(1).requires_grad_(requires_grad), k, m)):
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                compiled(*other)


def test_a_number_that_was_checked_to_be_a_dynamic_size_is_refused() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = x[x > 0]
        torch._check(chosen.shape[0] == y.shape[0])
        return chosen + y

    with whole_graphs:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=True, options={"fallback": "error"})
        with pytest.raises(Exception, match="said to be the dynamic size"):
            compiled(torch.tensor([1.0, 0.0, 2.0]), torch.ones(2))


def test_kernels_are_generated_behind_a_size_that_depends_on_data() -> None:
    recorder = aotkit.Recorder()
    with whole_graphs:
        options = {"fallback": "error", "observer": recorder}
        torch.compile(softmax_of_positive, backend="aotkit", fullgraph=True, options=options)(torch.randn(40))
    (record,) = recorder.graphs
    assert record.report.kernel_count >= 2, str(record.report)
    assert any("size depends on data" in extern.reason for extern in record.report.externs)


# -- effects -------------------------------------------------------------------------------------------

LOG: list[float] = []
LIBRARY = torch.library.Library("aotkit_effects_test", "FRAGMENT")


def _note(x: torch.Tensor) -> torch.Tensor:
    LOG.append(float(x.sum()))
    return x.clone()


LIBRARY.define("note(Tensor x) -> Tensor")
LIBRARY.impl("note", _note, "CPU")
LIBRARY.impl("note", torch.clone, "Meta")
note = torch.ops.aotkit_effects_test.note
torch.library.register_autograd(
    "aotkit_effects_test::note", lambda ctx, g: note(g), setup_context=lambda ctx, inputs, output: None, lib=LIBRARY
)


@pytest.fixture
def ordered() -> Iterator[None]:
    from torch._higher_order_ops.effects import _register_effectful_op

    handle = _register_effectful_op(note.default, EffectType.ORDERED)
    LOG.clear()
    yield
    handle.destroy()


def two_notes(x: torch.Tensor) -> torch.Tensor:
    note(x * 2)  # its result is not used: it must happen all the same
    return note(x) * 3


def taking_notes(fn: Callable[..., Any], x: torch.Tensor) -> tuple[list[torch.Tensor | None], list[float]]:
    LOG.clear()
    return outcome(fn, (x,)), list(LOG)


@pytest.mark.covers("F1.58", "F2.36", "F2.37", "F4.16")
@WAYS
@pytest.mark.parametrize("requires_grad", [False, True])
def test_ordered_effects_happen_once_and_in_order_forward_and_backward(
    ordered: None, wrap: Callable[..., Any], requires_grad: bool
) -> None:
    x = torch.arange(3.0).requires_grad_(requires_grad)
    compiled = wrap(two_notes)
    taking_notes(compiled, x)
    assert _close(compiled, x)


def _close(compiled: Callable[..., Any], x: torch.Tensor) -> bool:
    (mine, my_log), (theirs, their_log) = taking_notes(compiled, x), taking_notes(two_notes, x)
    torch.testing.assert_close(mine, theirs)
    return my_log == their_log


@pytest.mark.covers("F2.38")
def test_tokens_are_made_and_sunk_inside_the_graph(ordered: None) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x = grad(3)
    aotkit.aot_function(two_notes, keep)(x).sum().backward()
    assert len(graphs) == 2
    for graph, arguments in zip(graphs, (1, 1), strict=True):
        targets = [str(node.target) for node in graph.graph.nodes]
        assert len(graph.graph.find_nodes(op="placeholder")) == arguments
        assert targets.count("prims._make_token.default") == targets.count("prims._sink_tokens.default") == 1
        assert "with_effects" in targets


@pytest.mark.covers("F1.58")
def test_ordered_effects_are_in_the_record(ordered: None) -> None:
    from aotkit_functionalize import analyze

    metadata = analyze(lambda x: [note(x)], [torch.ones(3)])
    assert [(effect.kind, effect.value) for effect in metadata.effects] == [("token", "Ordered")]
    assert not analyze(lambda x: [x + 1], [torch.ones(3)]).effects


@WAYS
def test_linear_algebra_checks_its_errors_when_the_graph_runs(wrap: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x) * 2

    compiled = wrap(fn)
    x = torch.eye(3) * 4
    torch.testing.assert_close(compiled(x), fn(x))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(3, 3))


# -- random numbers ------------------------------------------------------------------------------------


def dropout_in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(y.sin(), 0.5) * F.dropout(y.cos(), 0.25), x, use_reentrant=False)


def several_draws(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(8) + torch.randn_like(x) + torch.bernoulli(torch.full((8,), 0.5))
    return x * noise + torch.empty(8).uniform_(1, 2) + torch.randint(0, 9, (8,)) + torch.randperm(8)


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in a checkpoint": dropout_in_checkpoint,
    "several draws": several_draws,
}


@pytest.mark.covers("F3.44")
@WAYS
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_eagers_forward_and_backward(name: str, wrap: Callable[..., Any]) -> None:
    assert_like_eager(RANDOM[name], wrap, (grad(8),), (grad(8),))
    # And the generator is left where eager leaves it.
    fn, x = RANDOM[name], grad(8)
    compiled = wrap(fn)
    compiled(x)
    states = []
    for run in (compiled, fn):
        torch.manual_seed(3)
        run(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:],
    "transposed": lambda t: t.t(),
    "every second column": lambda t: t[:, ::2],
    "transposed with gaps": lambda t: t.t()[:, ::2],
    "one column": lambda t: t[:, 3],
}
DRAWS = {
    "normal_": (),
    "uniform_": (),
    "bernoulli_": (0.3,),
    "exponential_": (),
    "geometric_": (0.3,),
    "random_": (10,),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", DRAWS)
def test_in_place_random_operations_draw_eagers_numbers_into_any_view(name: str, view: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        getattr(VIEWS[view](y), name)(*DRAWS[name])
        return y

    if name == "normal_" and view in ("every second column", "one column"):
        with pytest.raises(Unsupported, match="gaps between its elements"):
            by_hand(fn)(torch.zeros(20, 20))
        return
    assert_like_eager(fn, by_hand, (torch.zeros(20, 20),))
