"""Collectives of one block of a model become one, and every rank gets the same numbers as before."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.driver import join_collectives, schedule_graph
from aotkit_inductor_lower.errors import UnknownPassError
from aotkit_inductor_lower.ir import LoopNest

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")

RANKS, GROUP = 2, "0"
LARGE = LowerOptions(link_latency=1.0)


def ops():
    return torch.ops._c10d_functional


def gathered(x):
    return ops().wait_tensor(ops().all_gather_into_tensor(x, RANKS, GROUP))


def scattered(x, op="sum"):
    return ops().wait_tensor(ops().reduce_scatter_tensor(x, op, RANKS, GROUP))


def reduced(x, op="sum"):
    return ops().wait_tensor(ops().all_reduce(x, op, GROUP))


KINDS = (gathered, scattered, reduced)


class OneOfTwo(torch.fx.Interpreter):
    """The first of two ranks, of which the other always has twice its numbers; ``starts`` are counted."""

    starts = 0

    def call_function(self, target, args, kwargs):
        name = str(target).removeprefix("_c10d_functional.")
        if name == str(target):
            return super().call_function(target, args, kwargs)
        x = args[0].contiguous()
        self.starts += "wait" not in name
        if name.startswith("all_gather"):
            return torch.cat([x, 2 * x])
        if name.startswith("wait"):
            return x
        total = x + 2 * x if args[1] == "sum" else torch.maximum(x, 2 * x)
        return total.chunk(RANKS)[0].clone() if name.startswith("reduce_scatter") else total


def graph_of(f, *args, mode="fake", blocks=None):
    """``blocks``: the path of a module for each collective, in order."""
    gm = make_fx(f, tracing_mode=mode)(*args)
    starts = [node for node in gm.graph.nodes if "c10d" in str(node.target) and "wait" not in str(node.target)]
    for node, path in zip(starts, blocks or [], strict=bool(blocks)):
        node.meta["nn_module_stack"] = {"": ("L['self']", object), path: (path, object)}
    return gm


def run(gm, args):
    ranks = OneOfTwo(gm)
    torch.manual_seed(0)
    return ranks.run(*[arg.clone() for arg in args]), ranks.starts


def check(gm, args, options=LARGE):
    """How many collectives start before and after; what they give is the same."""
    want, before = run(gm, args)
    joined = join_collectives(gm, options)
    joined.graph.lint()
    got, after = run(joined, args)
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for node, a in zip(joined.graph.output_node().args[0], got, strict=True):
        assert node.meta["val"].shape == a.shape and node.meta["val"].stride() == a.stride()
    return before, after


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


PARAMETERS = [(3, 4), (5,), (2, 2, 2), (1,)]


@pytest.mark.parametrize("collective", KINDS)
def test_collectives_of_a_block_become_one(collective):
    args = [numbers(2 * shape[0], *shape[1:]) for shape in PARAMETERS]
    gm = graph_of(lambda *given: [collective(x.sin()) for x in given], *args)
    assert check(gm, args) == (4, 1)


@pytest.mark.parametrize("collective", KINDS)
def test_blocks_stay_apart(collective):
    args = [numbers(4, 3) for _ in range(6)]
    paths = ["layers.0.first", "layers.0.last.parametrizations.weight.0", "layers.1.first", "layers[1].last", "head.a"]
    blocks = [f"L['self'].{path}" for path in (*paths, "head.b")]
    gm = graph_of(lambda *given: [collective(x) for x in given], *args, blocks=blocks)
    before, after = check(gm, args)
    assert (before, after) == (6, 4)  # layers.0, layers.1, layers[1], head


@pytest.mark.parametrize(("apart", "what"), [("dtype", 2), ("op", 2), ("group", 2), ("kind", 2), ("nothing", 1)])
def test_only_what_is_alike_is_joined(apart, what):
    def f(x, y):
        if apart == "group":
            return [reduced(x), ops().wait_tensor(ops().all_reduce(y, "sum", "other"))]
        if apart == "op":
            return [reduced(x), reduced(y, "max")]
        return [reduced(x), gathered(y)] if apart == "kind" else [reduced(x), reduced(y)]

    args = [numbers(4), numbers(4, dtype=torch.float32 if apart == "dtype" else torch.float64)]
    assert check(graph_of(f, *args), args) == (2, what)


def test_what_needs_the_result_of_another_is_not_joined_with_it():
    args = [numbers(4, 4), numbers(4, 4)]
    chain = graph_of(lambda x, y: [reduced(reduced(x) @ y), reduced(y)], *args)
    assert check(chain, args) == (3, 2)
    # The third could join the first or the second bucket, but not so that each bucket needs the other.
    across = graph_of(lambda x, y: [gathered(scattered(x)), scattered(gathered(y))], *args)
    assert check(across, args) == (4, 3)


def test_a_bucket_is_full_where_its_latency_is_small():
    args = [numbers(16) for _ in range(8)]  # 128 bytes each
    gm = graph_of(lambda *given: [reduced(x) for x in given], *args)
    for bandwidth, buckets in ((1e9, 1), (16 * 4, 2), (16 * 2, 4), (16, 8), (1, 8)):
        options = LowerOptions(link_latency=1.0, link_bandwidth=bandwidth)
        assert check(gm, args, options) == (8, buckets)


@pytest.mark.parametrize("collective", KINDS)
def test_copies_into_a_bucket_and_out_of_it_are_what_casts_too(collective):
    """As with parameters in float32 that are gathered in bfloat16: casts are no kernels of their own."""
    args = [numbers(4, 3, dtype=torch.float32) for _ in range(4)]

    def kernels(dtype):
        gm = graph_of(lambda *given: [collective(x.to(dtype)).float() * 2 for x in given], *args)
        steps = schedule_graph(join_collectives(gm, LARGE), LARGE).program.steps
        return sum(isinstance(step, LoopNest) for step in steps)

    assert kernels(torch.bfloat16) == kernels(torch.float32) > 0


def test_random_numbers_are_drawn_in_the_same_order():
    def f(x):
        first = reduced(x)
        noisy = first + torch.rand_like(first)  # must come before the other numbers, which the second reduction needs
        second = reduced(torch.rand_like(x))
        return [noisy, second]

    args = [numbers(8)]
    assert check(graph_of(f, *args), args) == (2, 2)

    def g(x):
        return [reduced(x) + 1, torch.rand_like(x), reduced(x * 2), torch.rand_like(x)]

    assert check(graph_of(g, *args), args) == (2, 1)


def test_what_is_written_to_an_input_is_written_behind_the_collectives():
    def f(x, y):
        first, second = reduced(x), reduced(y)
        x.copy_(first)
        return [first, second, reduced(x)]

    args = [numbers(4), numbers(4)]
    assert check(graph_of(f, *args), args) == (3, 2)


def test_results_that_leave_the_graph_have_memory_of_their_own():
    args = [numbers(4), numbers(4)]
    joined = join_collectives(graph_of(lambda x, y: [c(z) for c in KINDS for z in (x, y)], *args), LARGE)
    results = OneOfTwo(joined).run(*args)
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results) == 6
    assert all(result.untyped_storage().nbytes() == result.nbytes for result in results)


def test_unknown_sizes_and_empty_tensors_are_left_alone():
    args = [numbers(6, 2), numbers(8, 2)]
    gm = graph_of(lambda x, y: [reduced(x), reduced(y)], *args, mode="symbolic")
    assert join_collectives(gm, LARGE) is gm
    args = [numbers(0, 2), numbers(8, 2)]
    gm = graph_of(lambda x, y: [reduced(x), reduced(y)], *args)
    assert join_collectives(gm, LARGE) is gm


def test_it_can_be_left_out_and_takes_fuel():
    args = [numbers(4) for _ in range(4)]
    gm = graph_of(lambda *given: [reduced(x) for x in given], *args)
    assert join_collectives(gm, LowerOptions(disable=("bucket-collectives",))) is gm
    assert join_collectives(gm, LowerOptions(fuel=0)) is gm
    assert check(gm, args, LowerOptions(fuel=2)) == (4, 2)
    with pytest.raises(UnknownPassError):
        join_collectives(gm, LowerOptions(disable=("bucket",)))


def random_program(seed):
    """Collectives of what inputs and earlier results are made into, in any order."""
    chosen = random.Random(seed)

    def f(*given):
        known = list(given)
        for _ in range(chosen.randrange(3, 14)):
            x = chosen.choice(known)
            kind = chosen.choice(["gather", "scatter", "reduce", "max", "sin", "add", "noise", "product"])
            if kind == "gather":
                known.append(gathered(x.chunk(RANKS)[1]))
            elif kind == "scatter":
                part = scattered(x)
                known.append(torch.cat([part, part.cos()]))
            elif kind in ("reduce", "max"):
                known.append(reduced(x.t() if chosen.randrange(2) else x, "sum" if kind == "reduce" else "max"))
            elif kind == "noise":
                known.append(x + torch.rand_like(x))
            elif kind == "product":
                known.append(x @ chosen.choice(known))
            else:
                known.append(x.sin() if kind == "sin" else x + chosen.choice(known))
        return [x.clone() for x in chosen.sample(known, chosen.randrange(1, len(known)))]

    return f


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    args = [numbers(4, 4) / 4 for _ in range(3)]
    gm = graph_of(random_program(seed), *args)
    before, after = check(
        gm, args, LowerOptions(link_latency=1.0, link_bandwidth=random.Random(seed).choice([1e9, 60]))
    )
    assert after <= before
