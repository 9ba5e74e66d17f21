"""Kernels that are alike: one function, one call for a run of them, eager's values, and not a byte more memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.kernel_passes import deduplicate as alike
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json

F = torch.nn.functional


class Dumps:
    """An observer that keeps the generated text."""

    text = ""

    def stage(self, name):
        return nullcontext()

    def dump(self, name, kind, text):
        if kind == "kernels":
            self.text = text()


def compiled(f, args, **options):
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    dumps = Dumps()
    return compile_graph(graph, options=LowerOptions(verify=True, **options), observer=dumps), dumps.text


def calls(graph):
    return len({kernel.combo or kernel.name for kernel in graph.compiled.kernels})


def functions(graph):
    return len({kernel.function for kernel in graph.compiled.kernels})


def tensors(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def sums(*args):
    half = len(args) // 2
    return [a + b for a, b in zip(args[:half], args[half:], strict=True)]


SIZES = {
    "one size": [(37,)] * 100,
    "many sizes": [(7 * k + 2,) for k in range(100)],
    "weights and biases": [(64, 64), (64,), (256, 64), (256,)] * 25,
    "enough for threads": [(3000 + k,) for k in range(100)],
}


@pytest.mark.parametrize(
    ("sizes", "made", "called"),
    [
        ([(37,)] * 3, 1, 3),  # calls are shorter than a table
        ([(37,)] * 4, 1, 1),
        ([(30,), (40,)], 2, 2),
        ([(30,), (40,), (50,)], 1, 3),  # one function for all lengths
        ([(30,), (40,), (50,), (60,)], 1, 1),
        ([(30,), (40,)] * 4, 2, 8),  # two lengths are two functions, by turns
        ([(30,)] * 4 + [(40,)] * 4, 2, 2),
        ([(1,)] * 4, 1, 1),
        ([(1,), (2,), (3,), (4,)], 2, 4),  # a loop of one iteration is none
    ],
)
def test_functions_are_shared_and_tables_made_from_a_few_on(sizes, made, called):
    args = tensors(sizes) + tensors(sizes, 1)
    graph, _ = compiled(sums, args)
    assert (functions(graph), calls(graph)) == (made, called)
    assert all(torch.equal(a, b) for a, b in zip(graph(list(args)), sums(*args), strict=True))


@pytest.mark.covers("F5h.10")
@pytest.mark.parametrize("name", SIZES)
def test_a_hundred_small_additions_are_one_call_of_one_function(name):
    args = tensors(SIZES[name]) + tensors(SIZES[name], 1)
    graph, text = compiled(sums, args, redzones=True)
    assert len(graph.compiled.kernels) == 100 and calls(graph) == functions(graph) == 1
    assert graph.compiled.plan.arena == ()  # nothing but the results, which eager allocates too
    assert ("at once" in text) == (name == "enough for threads" or name == "weights and biases")
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            got = graph(list(args))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(got, sums(*args), strict=True))
    assert compiled_from_json(compiled_to_json(graph.compiled)) == graph.compiled


@pytest.mark.covers("F5h.10")
def test_a_batch_keeps_the_memory_of_single_launches(monkeypatch):
    def f(weight, *xs):
        return [(x.exp() + x) @ weight for x in xs]  # temporaries that take each other's memory

    def chain(x):
        for _ in range(6):
            x = x.sin()
        return x

    cases = [
        (f, [torch.ones(64, 8), *tensors([(k + 3, 64) for k in range(12)])], None),
        (chain, [torch.ones(20, 30)], "the arena is used again between them"),
    ]
    for function, args, why in cases:
        monkeypatch.setattr(alike, "LEAST_MEMBERS", 4)
        together, text = compiled(function, args, fuse=function is f)
        monkeypatch.setattr(alike, "LEAST_MEMBERS", 1000)
        single, _ = compiled(function, args, fuse=function is f)
        assert calls(single) == len(single.compiled.kernels)
        assert why is None or (why in text and calls(together) < calls(single))
        assert together.compiled.plan.arena == single.compiled.plan.arena
        for a, b in zip(together(list(args)), single(list(args)), strict=True):
            assert torch.equal(a, b)


def test_members_that_need_each_other_run_in_order():
    def f(x):
        results = [x]
        for _ in range(6):
            results.append(results[-1].sin())
        return results[1:]

    x = torch.randn(200, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    graph, text = compiled(f, [x], fuse=False)
    assert calls(graph) == 1 and "one reads what another writes" in text
    for got, want in zip(graph([x]), f(x), strict=True):
        torch.testing.assert_close(got, want)


def test_many_inputs_are_updated_in_few_calls():
    def update(*args):
        params, grads = args[:12], args[12:]
        for p, g in zip(params, grads, strict=True):
            p.mul_(0.9).sub_(g, alpha=0.1)
        return []

    sizes = [(k + 2, 5) for k in range(12)]
    params, grads = tensors(sizes), tensors(sizes, 1)
    graph = make_fx(torch.func.functionalize(update), decompositions(), tracing_mode="fake")(*params, *grads)
    made = compile_graph(graph)
    assert calls(made) == functions(made) <= 2  # the copies into the inputs are kernels of their own here
    want = [p.clone() for p in params]
    update(*want, *grads)
    made([*params, *grads])
    for got, expected in zip(params, want, strict=True):
        torch.testing.assert_close(got, expected)


def test_kernels_that_may_fail_are_launched_alone_and_name_themselves():
    def f(table, *places):
        return [table[p] * 2 for p in places]

    places = [torch.zeros(k + 2, dtype=torch.int64) for k in range(6)]
    graph, _ = compiled(f, [torch.randn(9), *places])
    assert calls(graph) == 6
    places[4][1] = 9
    with pytest.raises(IndexError, match=graph.compiled.kernels[4].name):
        graph([torch.randn(9), *places])


def test_few_lengths_keep_code_of_their_own():
    args = tensors([(640,), (64,)]) + tensors([(640,), (64,)], 1)
    graph, _ = compiled(sums, args)
    assert calls(graph) == functions(graph) == 2
    dynamic = make_fx(sums, decompositions(), tracing_mode="symbolic")(*args)
    made = compile_graph(dynamic)
    given = [args[0].numel(), args[0], args[1].numel(), args[1], *args[2:]]
    by_name = args if len(made.program.inputs) == 4 else given
    assert all(torch.equal(a, b) for a, b in zip(made(list(by_name)), sums(*args), strict=True))
