"""Layers that a model repeats are compiled once: results, gradients and what else can be seen are those of eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aotkit
from aotkit.frontend.repeats import find_layers

COUNT = 7
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Block(nn.Module):
    """A residual layer as transformers have it."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), drop
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))) * scale, self.drop, self.training)
        return x + self.down(hidden)


class Stack(nn.Module):
    """Equal blocks between other layers."""

    def __init__(self, make: Callable[[], nn.Module], width: int = 16, count: int = COUNT) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.scale = nn.Parameter(torch.rand(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x, self.scale)
        return self.last(x)


def compiled(model: Any, **options: Any) -> tuple[Any, aotkit.Recorder]:
    recorder = aotkit.Recorder()
    chosen = {"fallback": "error", "observer": recorder, "cache": False, "repeated_layers": "once", **options}
    return torch.compile(model, backend="aotkit", options=chosen), recorder


def counts(recorder: aotkit.Recorder) -> list[tuple[int, ...]]:
    """How many layers are calls of one, of each graph that was compiled."""
    return [tuple(what["layers"]) for name, what in recorder.events if name == "layers.once"]  # type: ignore[call-overload]


def reasons(recorder: aotkit.Recorder) -> list[str]:
    return [str(what["reason"]) for name, what in recorder.events if name == "layers.apart"]


def outcome(call: Any, model: nn.Module, x: Tensor) -> list[Any]:
    """Results, gradients, buffers and the generator's state of a step."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(3)
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    if any(result.requires_grad for result in results):
        sum(result.square().sum() for result in results if result.requires_grad).backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [*(r.detach() for r in results), *gradients, *model.buffers(), torch.rand(2)]


def assert_like_eager(model: nn.Module, x: Tensor, expected: list[tuple[int, ...]], **options: Any) -> aotkit.Recorder:
    call, recorder = compiled(model, **options)
    twin = copy.deepcopy(model)
    for _ in range(2):
        ours, eagers = outcome(call, model, x), outcome(twin, twin, x)
        for a, b in zip(ours, eagers, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert counts(recorder) == expected
    return recorder


@pytest.mark.covers("F2.42")
@pytest.mark.parametrize("training", [True, False])
def test_equal_layers_are_compiled_once(training: bool) -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16)).train(training)
    x = torch.randn(5, 8, requires_grad=training)
    with torch.set_grad_enabled(training):
        recorder = assert_like_eager(model, x, [(COUNT - 1,)])
        call, flat = compiled(model, repeated_layers="apart")
        outcome(call, model, x)
    assert counts(flat) == []
    for once, whole in zip(recorder.graphs, flat.graphs, strict=True):
        assert once.report.kernel_count < 0.7 * whole.report.kernel_count, str(once.report)


def test_as_many_layers_more_add_no_kernel() -> None:
    torch.manual_seed(0)
    found = []
    for count in (8, 16):
        model = Stack(lambda: Block(16), count=count)
        model.scale.requires_grad_(False)  # whose gradient is a sum over all layers
        call, recorder = compiled(model)
        outcome(call, model, torch.randn(5, 8, requires_grad=True))
        assert counts(recorder) == [(count - 1,)]
        found.append([graph.report.kernel_count for graph in recorder.graphs])
    assert found[0] == found[1]


@pytest.mark.parametrize(("count", "expected"), [(12, []), (20, [(19,)])])
def test_by_themselves_only_many_layers_are_compiled_once(count: int, expected: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16), count=count)
    assert_like_eager(model, torch.randn(5, 8, requires_grad=True), expected, repeated_layers="auto")


def test_updates_of_many_parameters_are_no_layers() -> None:
    """They are a few kernels together; each in a call of its own took twenty times as long."""

    def update(*tensors: Tensor) -> None:
        parameters, gradients, squares = (list(tensors[k::3]) for k in range(3))
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 0.1)  # Dynamo fills a tensor for each
        roots = torch._foreach_add(torch._foreach_sqrt(squares), 1e-8)
        torch._foreach_addcdiv_(parameters, gradients, roots, -0.01)

    ours, eagers = [[torch.linspace(k, k + 1, 30 - k // 3 % 2) for k in range(120)] for _ in range(2)]
    for repeated in ("once", "auto"):
        torch._dynamo.reset()
        recorder = aotkit.Recorder()
        options = aotkit.Options(cache=False, repeated_layers=repeated)
        torch.compile(update, backend=aotkit.make_backend(options, recorder))(*ours)
        update(*eagers)
        torch.testing.assert_close(ours, eagers)
        assert not counts(recorder) or repeated == "once", reasons(recorder)
        # With other versions Dynamo fills no tensor for each, and there is nothing that repeats.
        assert counts(recorder) or repeated == "auto" or RELEASE != (2, 13), reasons(recorder)


def test_dropout_draws_the_numbers_of_eager() -> None:
    torch.manual_seed(0)
    assert_like_eager(Stack(lambda: Block(16, 0.3)), torch.randn(5, 8, requires_grad=True), [(COUNT - 1,)], rng="eager")


def test_a_weight_that_all_layers_share_gets_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
    shared = Block(16)
    model = Stack(lambda: shared)
    assert_like_eager(model, torch.randn(5, 8, requires_grad=True), [(COUNT - 1,)])


def test_layers_without_gradients_before_those_with_them() -> None:
    """The first layers are frozen, and the input has no gradient: a layer there is another function."""
    torch.manual_seed(0)
    model = Stack(lambda: Block(16), count=2 * COUNT + 2)
    model.first.requires_grad_(False)
    model.scale.requires_grad_(False)
    for block in model.blocks[: COUNT + 1]:
        block.requires_grad_(False)
    assert_like_eager(model, torch.randn(5, 8), [(COUNT, COUNT - 1)])


class Encoders(nn.Module):
    """Two stacks of other blocks, as an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Stack(lambda: Block(16)), Stack(lambda: Gated(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.value(x) + scale) + x


def test_two_kinds_of_layers_are_two_regions() -> None:
    torch.manual_seed(0)
    model = Encoders()
    call, recorder = compiled(model)
    x = torch.randn(5, 8, requires_grad=True)
    ours, eagers = outcome(call, model, x), outcome(model, model, x)
    torch.testing.assert_close(ours, eagers, rtol=2e-5, atol=2e-5)
    ((first, second),) = counts(recorder)
    assert min(first, second) >= COUNT - 1


def test_a_result_that_the_loss_does_not_use_gives_no_gradient() -> None:
    """The backward without a tangent, and inputs that only that result depends on."""
    torch.manual_seed(0)
    model = Encoders()
    call, recorder = compiled(model)
    twin = copy.deepcopy(model)
    x = torch.randn(5, 8)
    for which in (0, 1, 0):
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)
        call(x)[which].sum().backward()
        twin(x)[which].sum().backward()
        for ours, eagers in zip(model.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (eagers.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, eagers.grad, rtol=2e-5, atol=2e-5)
    assert len(counts(recorder)) == 1


def test_gradients_that_are_kept_share_no_memory() -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16))
    call, recorder = compiled(model)
    outcome(call, model, torch.randn(5, 8, requires_grad=True))
    starts = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(set(starts)) == len(starts) and counts(recorder)


def test_second_derivatives_are_those_of_the_whole_graph() -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16, 0.2))
    call, recorder = compiled(model, rng="eager")

    def penalty(run: Any) -> list[Tensor]:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(5)
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), list(model.parameters()), allow_unused=True))

    for ours, eagers in zip(penalty(call), penalty(model), strict=True):
        assert (ours is None) == (eagers is None)
        if ours is not None:
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
    assert counts(recorder)[0] == (COUNT - 1,)


def test_a_backward_may_run_twice() -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16))
    call, _ = compiled(model)
    loss = call(torch.randn(5, 8)).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters() if p.grad is not None], first, rtol=0, atol=0)


def test_what_was_compiled_once_is_loaded_as_a_whole(no_compile: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model, x = Stack(lambda: Block(16)), torch.randn(5, 8, requires_grad=True)
    call, recorder = compiled(model, cache=True, verify=False)
    expected = outcome(call, model, x)
    torch._dynamo.reset()
    call, again = compiled(model, cache=True, verify=False)
    no_compile()
    found = outcome(call, model, x)
    assert counts(recorder) == [(COUNT - 1,)] and counts(again) == []
    assert all(graph.loaded for graph in again.graphs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, outcome(model, model, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{"verify": True}, {"redzones": True}, {"chunk_loss_bytes": 0}], ids=str)
def test_other_options_hold_inside_of_layers(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_like_eager(Stack(lambda: Block(16)), torch.randn(5, 8, requires_grad=True), [(COUNT - 1,)], **options)


def test_under_compiled_autograd() -> None:
    torch.manual_seed(0)
    model, x = Stack(lambda: Block(16)), torch.randn(5, 8, requires_grad=True)
    call, recorder = compiled(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        ours = outcome(call, model, x)
    torch.testing.assert_close(ours, outcome(model, model, x), rtol=2e-5, atol=2e-5)
    assert counts(recorder)[0] == (COUNT - 1,)


@pytest.mark.parametrize("inside", [True, False])
def test_under_autocast(inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Stack(lambda: Block(16)), torch.randn(5, 8, requires_grad=True)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    call, _ = compiled(cast if inside else model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        ours = outcome(lambda x: call(x).float(), model, x)
    torch.testing.assert_close(ours, outcome(cast, model, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", ["grad", "jvp", "vmap of grad", "inference"])
def test_layers_within_a_transform_are_no_calls(way: str) -> None:
    """A call can't take the values that a transform wraps."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(COUNT))).requires_grad_(False)

    def loss(x: Tensor) -> Tensor:
        return model(x).sin().sum()

    def within(x: Tensor) -> Any:
        if way == "inference":
            with torch.inference_mode():
                return model(x)
        if way == "jvp":
            return torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return torch.func.grad(loss)(x) if way == "grad" else torch.func.vmap(torch.func.grad(loss))(x)

    x = torch.randn(3, 4)
    run, recorder = compiled(within)
    torch.testing.assert_close(run(x), within(x))
    assert not counts(recorder)


def test_sizes_known_at_run_time() -> None:
    torch.manual_seed(0)
    model = Stack(lambda: Block(16))
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "repeated_layers": "once"}
    call = torch.compile(model, backend="aotkit", dynamic=True, options=options)
    for rows in (5, 9):
        x = torch.randn(rows, 8, requires_grad=True)
        torch.testing.assert_close(outcome(call, model, x), outcome(model, model, x), rtol=2e-5, atol=2e-5)
    assert counts(recorder) == []


# -- layers that can't be calls of one ---------------------------------------------------------------------


class Normed(nn.Module):
    """Writes running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.line(x)))


class Views(nn.Module):
    """Gives back a view of what it computes, of which a part is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.line(x).t().t()


class Writes(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.line(x)))


class Counted(nn.Module):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.line(x)) * self.calls


class Detaches(nn.Module):
    """Some weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.one(x)) + self.two(x).detach() + torch.floor(x)


class Silent(nn.Module):
    """Runs without gradients in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.line(x).mean(-1, keepdim=True)
        return torch.sin(self.line(x) - mean)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16, 0.2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, scale, use_reentrant=False)  # type: ignore[no-any-return]


class Split(nn.Module):
    """Two halves travel from layer to layer; each layer changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([two, one * torch.sigmoid(self.line(two))], -1)


KINDS = (Normed, Views, Writes, Counted, Detaches, Silent, Checkpointed, Split)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    ("kind", "training"), [*((kind, True) for kind in KINDS if kind is not Writes), *((kind, False) for kind in KINDS)]
)
def test_whatever_a_layer_does_is_what_eager_does(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    # In float64: batch norms of five rows, one behind the other, enlarge what float32 rounds.
    model = Stack(kind).train(training).double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=training)
    twin = copy.deepcopy(model)
    call, recorder = compiled(model, rng="eager")
    with torch.set_grad_enabled(training):
        for _ in range(2):
            ours, eagers = outcome(call, model, x), outcome(twin, twin, x)
            for a, b in zip(ours, eagers, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    if kind in (Normed, Counted) and training:
        assert counts(recorder) == [] and reasons(recorder)
    if kind is Silent:
        assert counts(recorder), reasons(recorder)


def test_all_hidden_states_may_be_returned() -> None:
    class States(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            x, states = torch.tanh(self.first(x)), []
            for block in self.blocks:
                x = block(x, self.scale)
                states.append(x)
            return (*states, self.last(x))

    torch.manual_seed(0)
    model = States(lambda: Block(16), count=10)
    assert_like_eager(model, torch.randn(5, 8, requires_grad=True), [(10,)])


def test_a_result_of_a_layer_that_is_written_to_afterwards() -> None:
    class Later(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            for block in self.blocks:
                x = block(x, self.scale)
            x.mul_(2)
            return self.last(x)

    torch.manual_seed(0)
    assert_like_eager(Later(lambda: Block(16)), torch.randn(5, 8, requires_grad=True), [(COUNT - 1,)])


# -- random layers -----------------------------------------------------------------------------------------

_UNARY: list[Callable[[Tensor], Tensor]] = [torch.sin, torch.tanh, F.gelu, torch.abs, Tensor.detach, Tensor.clone]
_UNARY += [
    lambda x: x.t().t(),
    lambda x: x.softmax(-1),
    lambda x: x.roll(1, -1),
    lambda x: x - x.mean(-1, keepdim=True),
]
_UNARY += [lambda x: x.reshape(-1, 4).sum(0, keepdim=True).repeat(x.shape[0], x.shape[1] // 4)]


class Random(nn.Module):
    """A layer of random operations over its input, a weight and what all layers share."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.line, self.weight = nn.Linear(16, 16), nn.Parameter(torch.rand(16))
        rng, self.steps = random.Random(seed), []
        for number in range(3, 3 + rng.randrange(2, 8)):
            which = rng.choice("uuuulldwbbbb"), rng.randrange(number), rng.randrange(number)
            self.steps.append((*which, rng.choice(_UNARY), rng.choice([torch.add, torch.mul, torch.maximum])))
        self.results = rng.randrange(3, 3 + len(self.steps)), rng.randrange(3 + len(self.steps))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        values = [x, x * self.weight, scale[:16].expand_as(x)]
        for kind, first, second, unary, binary in self.steps:
            a, b = values[first], values[second]
            if kind == "u":
                values.append(unary(a))
            elif kind == "l":
                values.append(self.line(a))
            elif kind == "d":
                values.append(F.dropout(a * 1.5, 0.2, self.training))  # of new memory: it may be expanded
            else:
                values.append(a.clone().mul_(b) if kind == "w" else binary(a, b))
        drawn = [
            value for step, value in zip(self.steps, values[3:], strict=True) if step[0] == "d"
        ]  # a dead one draws nothing
        return sum([*drawn, x * 0.1], values[self.results[0]] * 0.5 + values[self.results[1]] * 0.1)  # type: ignore[arg-type]


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(24))
def test_random_layers_are_what_eager_computes(seed: int) -> None:
    torch.manual_seed(seed)
    model, training = Stack(lambda: Random(seed)), seed % 3 > 0
    model.train(training)
    x = torch.randn(4, 8, requires_grad=seed % 2 > 0)
    call, _ = compiled(model, rng="eager")
    with torch.set_grad_enabled(training):
        ours, eagers = outcome(call, model, x), outcome(model, model, x)
    for a, b in zip(ours, eagers, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# -- how layers are found ----------------------------------------------------------------------------------


def graph_of(fn: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
    kept: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, _: kept.append(gm) or gm, fullgraph=True)(*args)  # type: ignore[arg-type,func-returns-value]
    return kept[0]


def test_layers_are_cut_where_sums_and_norms_stay_one_kernel() -> None:
    model = Stack(lambda: Block(16), count=8)
    (found,) = find_layers(graph_of(model, torch.randn(5, 8)), 6)
    assert len(found.layers) == 7 and len(found.outputs) == 2
    assert "add" not in found.layers[0][-1].name
    assert len({len(layer) for layer in found.layers}) == 1


class Attending(nn.Module):
    """A residual layer of attention, whose heads are copied to lie side by side, and of a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        parts = self.heads(self.norm(x)).view(2, -1, 3, 2, x.shape[-1] // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts)
        mixed = mixed.transpose(1, 2).contiguous().view(x.shape)
        return x + F.dropout(self.out(mixed), 0.1, self.training)


def test_layers_are_not_cut_between_attention_and_what_copies_its_result() -> None:
    """Written out, its last product writes what the copy would."""
    model = Stack(lambda: Attending(16), count=8)
    (found,) = find_layers(graph_of(model, torch.randn(10, 8)), 6)
    names = [str(getattr(node.target, "__name__", node.target)) for node in found.layers[0]]
    assert names.index("scaled_dot_product_attention") < names.index("contiguous"), names
    assert len(found.outputs) == 2 and names[-1] != "add"


def test_layers_of_attention_are_what_eager_computes() -> None:
    assert_like_eager(Stack(lambda: Attending(16), count=8), torch.randn(10, 8), [(7,)])


def test_layers_that_differ_in_one_number_are_not_alike() -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for power in range(2, 14):
                x = torch.tanh(x * power) + x.roll(1)
            return x

    assert find_layers(graph_of(Powers(), torch.randn(5, 8)), 6) == []


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (complex(0.0, 0.0), complex(0.0, -0.0))], ids=["real", "complex"])
def test_layers_that_differ_in_the_sign_of_a_zero_are_not_alike(zeros: tuple[complex, complex]) -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for layer in range(12):
                x = torch.tanh(x + zeros[int(layer in (4, 8))]) + x.roll(1)
            return x

    assert find_layers(graph_of(Sums(), torch.randn(5, 8, dtype=torch.complex64)), 6) == []


def test_layers_that_take_other_values_are_not_alike() -> None:
    """Each layer reads the result of the layer before the last one, the first two the input."""

    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            before, now = x, torch.sin(x)
            for number in range(12):
                other = before if number != 6 else now
                before, now = now, torch.tanh(now + 1.5) * other
            return now

    found = find_layers(graph_of(Skips(), torch.randn(5, 8)), 6)
    assert all(len(group.layers) <= 6 for group in found)


def test_more_than_a_hundred_layers_are_found() -> None:
    x = torch.randn(5, 8)
    (found,) = find_layers(graph_of(Stack(lambda: Gated(16), count=110), x), 6)
    assert len(found.layers) >= 109
