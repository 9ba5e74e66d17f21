"""Steps of models whose state is made of the last one: the new state is written where it is kept, by the kernel that
multiplies it, and the few places of a convolution before it are no call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.graph_passes.remove_noops import remove_noops
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu.choose_few_rows import SHORT_AMD

Step = Callable[..., torch.Tensor]
CHANNELS, STATES = 96, 16

needs_fma = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")


def selective_step(
    state: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor,
) -> torch.Tensor:
    """One step of Mamba's scan."""
    dt = F.softplus(dt)
    new = state * torch.exp(dt[:, :, None] * decay) + (dt * x)[:, :, None] * b[:, None]
    out = torch.matmul(new, c[:, :, None]).squeeze(2) * F.silu(z)
    state.copy_(new)
    return out


def two_layers(state: torch.Tensor, other: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    x = selective_step(state, *rest)
    decay, dt, b, _, c, z = rest
    return selective_step(other, decay, dt, b, x, c, z)


def inputs(batch: int, layers: int = 1) -> list[torch.Tensor]:
    states = [torch.randn(batch, CHANNELS, STATES) for _ in range(layers)]
    sizes = (
        (CHANNELS, STATES),
        (batch, CHANNELS),
        (batch, STATES),
        (batch, CHANNELS),
        (batch, STATES),
        (batch, CHANNELS),
    )
    return [*states, *(torch.randn(*size) / 2 for size in sizes)]


def compiled(f: Step, args: Sequence[torch.Tensor]) -> CompiledGraph:
    graph = make_fx(torch.func.functionalize(f), tracing_mode="fake")(*(x.clone() for x in args))
    made = compile_graph(graph, options=LowerOptions(verify=True))
    assert isinstance(made, CompiledGraph)
    return made


def check(f: Step, args: Sequence[torch.Tensor], steps: int = 3) -> CompiledGraph:
    """Some steps in a row, with the states that each leaves."""
    made, theirs = compiled(f, args), [x.clone() for x in args]
    mine = [x.clone() for x in args]
    run = bind_program(made.compiled, made.constants, redzones=True)
    for _ in range(steps):
        (got,) = run(list(mine))
        torch.testing.assert_close(got, f(*theirs), rtol=1e-5, atol=1e-5)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return made


@needs_fma
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_a_state_space_model_is_one_kernel(batch: int) -> None:
    made = check(selective_step, inputs(batch))
    assert made.report().kernel_count == 1 and not made.report().externs
    assert "the kernel that does so sums it" in str(made.report())


@needs_fma
def test_states_of_several_layers_are_each_written_where_they_are_kept() -> None:
    made = check(two_layers, inputs(2, layers=2))
    assert made.report().kernel_count <= 2 and not made.report().externs


def test_a_state_that_is_read_again_behind_the_product_is_right() -> None:
    """The old state, which then must not be written over before."""

    def f(state: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        new = state * 0.5 + w
        out = torch.mm(new, c) + state.sum(1, keepdim=True) + torch.mm(new * 2, c) * state[:, :1]
        state.copy_(new)
        return out

    check(f, [torch.randn(48, 32), torch.randn(48, 32), torch.randn(32, 1)])


def test_a_computed_matrix_that_is_returned_is_stored_and_summed_at_once() -> None:
    def f(x: torch.Tensor, c: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        new = torch.exp(x) + 1
        kept.copy_(new)
        return torch.mv(new, c) + new[0, 0]

    check(f, [torch.randn(40, 24), torch.randn(24), torch.randn(40, 24)])


def conv_step(state: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A causal depthwise convolution of one new place, as transformers writes it."""
    whole = torch.cat([state, x], -1)
    out = F.silu(F.conv1d(whole, w, bias, groups=w.shape[0])[:, :, -x.shape[-1] :])
    state.copy_(whole[:, :, -state.shape[-1] :])
    return out


@pytest.mark.parametrize(("batch", "places", "taps"), [(1, 1, 4), (2, 1, 3), (3, 5, 4), (2, 7, 2)])
def test_a_step_of_a_causal_convolution_is_no_call(batch: int, places: int, taps: int) -> None:
    """With 512-bit vectors, as others."""
    sizes = ((batch, 40, taps), (batch, 40, places), (40, 1, taps), (40,))
    made = check(conv_step, [torch.randn(*size) for size in sizes])
    ours = host_machine().vector_bits == 512 or host_machine().cpu in SHORT_AMD
    assert bool(made.report().externs) != ours


def test_long_rows_of_a_convolution_of_many_taps_are_atens() -> None:
    sizes = ((1, 40, 10), (1, 40, 64), (40, 1, 10), (40,))
    made = check(conv_step, [torch.randn(*size) for size in sizes])
    assert [each.target for each in made.report().externs] == ["aten.convolution.default"]


def test_copies_of_values_that_nothing_writes_to_are_removed_behind_a_write_too() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one, two = a * 2, b * 3
        a.copy_(one)
        b.copy_(two)
        return one + two

    args = [torch.randn(5, 4), torch.randn(5, 4)]
    graph = make_fx(torch.func.functionalize(f), tracing_mode="fake")(*(x.clone() for x in args)).graph
    remove_noops(graph, 100)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)
    check(f, args)


def test_copies_of_an_input_that_is_written_to_stay() -> None:
    """What is exchanged needs a memory of its own."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return a + 1

    check(f, [torch.randn(5, 4), torch.randn(5, 4)])


def test_copies_of_what_may_be_anothers_memory_stay_behind_a_write() -> None:
    """Of an operator that is not ATen's nothing is known."""
    library = torch.library.Library("kept_states", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CompositeExplicitAutograd")

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        same = torch.ops.kept_states.same(a)
        a.copy_(b)
        b.copy_(torch.ops.aten.copy.default(b, same))
        return a + 1

    graph = make_fx(f, tracing_mode="fake")(torch.randn(5, 4), torch.randn(5, 4)).graph
    remove_noops(graph, 100)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)) == 1
