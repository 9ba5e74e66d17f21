"""The order of collectives: they overlap with what needs no result of theirs, within the memory that is allowed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from aotkit_inductor_lower import LowerOptions, compile_graph, interpret_program, lower_graph, schedule_program
from aotkit_inductor_lower.analysis.collectives import Collectives
from aotkit_inductor_lower.analysis.dependencies import Dependencies
from aotkit_inductor_lower.driver import schedule_graph
from aotkit_inductor_lower.ir import ExternCall, Program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import step_writes
from aotkit_inductor_lower.loop_passes.order_steps import simulated_peak
from aotkit_inductor_lower.loop_passes.overlap_collectives import overlap_collectives

start = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers(*sizes, seed=0):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def traced(f, *args):
    return make_fx(f, tracing_mode="fake")(*[a.clone() for a in args])


def reduced(x):
    return start.wait_tensor(start.all_reduce(x, "sum", "0"))


def gathered(x):
    return start.wait_tensor(start.all_gather_into_tensor(x, 1, "0"))


class Log(TorchDispatchMode):
    """Names of the operators that a call makes; kernels are none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def products_beside(names):
    """How many products run while some collective does, and how many do not."""
    running, beside, alone = 0, 0, 0
    for name in names:
        if name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            running += 1
        elif name == "wait_tensor":
            running -= 1
        elif name == "mm":
            beside, alone = beside + bool(running), alone + (not running)
    return beside, alone


def layers(x, *weights):
    """As the backward of layers: each gives a gradient, which is summed over ranks, and goes on."""
    grads = []
    for w in weights:
        grads.append(reduced(x.t() @ x) * 2)
        x = x @ w
    return x, *grads


def gathered_parameters(x, *weights):
    for w in weights:
        x = torch.tanh(x @ gathered(w))
    return (x,)


@pytest.mark.parametrize(("f", "least"), [(layers, 7), (gathered_parameters, 4)], ids=["reduced", "gathered"])
def test_products_run_while_collectives_do_that_in_the_graph_run_alone(f, least):
    args = [numbers(64, 64, seed=k) / 8 for k in range(6)]
    gm = traced(f, *args)
    with Log() as given:
        want = gm(*args)
    compiled = compile_graph(gm, args)
    with Log() as log:
        got = compiled([*args])
    torch.testing.assert_close(list(got), list(want), rtol=1e-12, atol=1e-12)
    total = sum(products_beside(given.names))
    assert products_beside(given.names) == (0, total)
    assert products_beside(log.names)[0] >= least and sum(products_beside(log.names)) == total, log.names
    assert [n for n in log.names if n.startswith("all_")] == [n for n in given.names if n.startswith("all_")]


def test_each_collective_has_a_record_and_the_report_shows_it():
    args = [numbers(64, 64, seed=k) for k in range(4)]
    report = compile_graph(traced(layers, *args), args).report()
    assert [record.first for record in report.overlaps] == ["all_reduce", "all_reduce_1", "all_reduce_2"]
    assert "steps run while it does, before it were 0" in report.overlaps[0].reason
    assert "collective all_reduce: " in str(report)


def test_without_room_the_order_stays():
    """Parameters of 512 KiB: gathered one after the other, one is held at a time."""
    args = [numbers(256, 256, seed=k) for k in range(6)]
    program, _ = schedule_program(lower_graph(traced(gathered_parameters, *args)), LowerOptions(overlap_memory=None))
    peak = simulated_peak(program)
    tight, loose = overlap_collectives(program, 0.0), overlap_collectives(program, 10.0)
    assert simulated_peak(tight) <= peak < simulated_peak(loose)
    decisions = []
    overlap_collectives(program, 0.0, decisions)
    assert len(decisions) == 5 and any("take more memory" in d.reason for d in decisions)


def test_the_option_leaves_collectives_where_they_are():
    args = [numbers(64, 64, seed=k) for k in range(4)]
    gm = traced(layers, *args)
    for options in (LowerOptions(overlap_memory=None), LowerOptions(disable=("overlap-collectives",))):
        compiled = compile_graph(gm, args, options=options)
        with Log() as log:
            compiled([*args])
        assert products_beside(log.names)[0] == 0 and not compiled.report().overlaps


def test_what_a_collective_reads_is_not_overwritten_before_it_has_ended():
    """The write needs nothing else, so it would come before the wait, which needs only be there for the result."""

    def f(x, y):
        started = start.all_gather_into_tensor(x, 1, "0")
        waited = start.wait_tensor(started)
        x.copy_(y)
        return waited + 1, y @ y

    program = lower_graph(traced(f, numbers(8, 8), numbers(8, 8, seed=1)))
    steps = overlap_collectives(program, 1.0).steps
    (wait,) = Collectives.of(steps).waits
    (write,) = [k for k, step in enumerate(steps) if "x_1" in step_writes(step)]
    (product,) = [k for k, step in enumerate(steps) if step.name == "mm"]
    assert product < wait < write, [step.name for step in steps]


def in_place_while_it_runs(x, y):
    started = start.all_reduce_(y * 2, "sum", "0")
    waited = start.wait_tensor(started)
    product = x @ x
    x.copy_(product)
    return waited + product, product @ product


def test_a_collective_in_place_keeps_its_readers_behind_its_wait():
    args = numbers(16, 16), numbers(16, 16, seed=1)
    gm = traced(in_place_while_it_runs, *args)
    mine, theirs = ([a.clone() for a in args] for _ in range(2))
    want, got = gm(*theirs), compile_graph(gm, args)([*mine])
    torch.testing.assert_close([*got, *mine], [*want, *theirs], rtol=1e-12, atol=1e-12)


def random_graph(seed):
    """Products, sums and collectives that read any earlier values."""
    chosen = random.Random(seed)

    def f(*args):
        values = list(args)
        for _ in range(chosen.randint(6, 20)):
            a, b = chosen.choice(values), chosen.choice(values)
            kind = chosen.choice(["mm", "add", "reduce", "gather", "tanh", "started early"])
            if kind == "mm":
                values.append(a @ b / 16)
            elif kind == "add":
                values.append(a + b)
            elif kind == "tanh":
                values.append(torch.tanh(a))
            elif kind == "reduce":
                values.append(reduced(a + 1))
            elif kind == "gather":
                values.append(gathered(a))
            else:
                started = start.all_reduce(a, "max", "0")
                values.append(a @ b / 16)
                values.append(start.wait_tensor(started))
        return values[-1] + values[-2], values[len(values) // 2] * 2

    return f


def read_and_gathered(x, y, z):
    """``y`` is read before the gather, which needs nothing of it."""
    return (y @ y.t()).sum(0, keepdim=True), gathered(x).sin() @ z


def test_an_input_that_only_the_call_holds_is_not_kept_longer_than_the_bound_allows():
    """What reads it last frees it: behind the start of a collective it would be held beside that one's result."""
    args = [numbers(256, 256), numbers(64, 2048, seed=1), numbers(256, 256, seed=2)]
    gm = traced(read_and_gathered, *args)
    program, _ = schedule_program(lower_graph(gm), LowerOptions(overlap_memory=None))
    released = frozenset({program.inputs[1]})
    peak = simulated_peak(program, released)
    careless, careful = overlap_collectives(program, 0.0), overlap_collectives(program, 0.0, released=released)
    assert simulated_peak(careless, released) > peak >= simulated_peak(careful, released)

    node = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == program.inputs[1])
    for known, wanted in ((False, careless), (True, careful)):
        node.meta["released"] = known
        scheduled = schedule_graph(gm, LowerOptions(overlap_memory=0.0)).program
        assert [step.name for step in scheduled.steps] == [step.name for step in wanted.steps]


def starts_of(program: Program) -> list[str]:
    steps = [program.steps[p] for p in Collectives.of(program.steps).starts]
    assert all(isinstance(step, ExternCall) for step in steps)
    return [step.name for step in steps]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_results_orders_and_bounds(seed):
    args = [numbers(16, 16, seed=k) for k in range(3)]
    gm = traced(random_graph(seed), *args)
    program, _ = schedule_program(lower_graph(gm), LowerOptions(overlap_memory=None))
    released = frozenset(program.inputs[seed % 2 :])  # the call holds some of its inputs, as a backward does
    ordered = overlap_collectives(program, seed % 3 / 2, released=released)
    verify_program(ordered)
    assert sorted(map(repr, ordered.steps)) == sorted(map(repr, program.steps))
    assert starts_of(ordered) == starts_of(program)
    peak = simulated_peak(program, released)
    bound = peak if seed % 3 == 0 else max(1 << 20, 2 * peak)
    assert simulated_peak(ordered, released) <= bound
    for position, before in enumerate(Dependencies.of(ordered).before):
        assert all(need < position for need in before)
    torch.testing.assert_close(interpret_program(ordered, args), list(gm(*args)), rtol=1e-12, atol=1e-12)
    got = compile_graph(gm, args)([*args])
    torch.testing.assert_close(list(got), list(gm(*args)), rtol=1e-12, atol=1e-12)


def seconds_of(names, collective):
    """What a call takes where a product takes a second, and collectives so long, one after the other, beside them."""
    now = link = 0.0
    ends = []
    for name in names:
        if name == "mm":
            now += 1
        elif name.startswith(("all_", "reduce_")):
            link = max(now, link) + collective
            ends.append(link)
        elif name == "wait_tensor":
            now = max(now, ends.pop(0))
    return now


@pytest.mark.parametrize("f", [layers, gathered_parameters], ids=["reduced", "gathered"])
def test_a_call_takes_little_longer_than_its_products_where_collectives_take_half_as_long(f):
    args = [numbers(64, 64, seed=k) / 8 for k in range(17)]
    gm = traced(f, *args)
    with Log() as given:
        gm(*args)
    products, collectives = given.names.count("mm"), sum(n.startswith("all_") for n in given.names)
    collective = products / 2 / collectives
    assert seconds_of(given.names, collective) == products * 1.5
    with Log() as log:
        compile_graph(gm, args, options=LowerOptions(overlap_memory=10.0))([*args])
    assert seconds_of(log.names, collective) <= 1.15 * products
