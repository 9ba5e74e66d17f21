"""Convolutions whose places share no pixels, and their gradients, as products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.graph_passes.freeze import freeze
from aotkit_inductor_lower.graph_passes.multiply_patches import PASS
from aotkit_inductor_lower.graph_passes.replace import views_of
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu.machine import level_machine
from aotkit_inductor_lower.targets.cpu.target import target_of

aten = torch.ops.aten
CALLS = (aten.convolution.default, aten.convolution_backward.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)
LAST, PLAIN = torch.channels_last, torch.contiguous_format
ALL = [True, True, True]
Program = Callable[..., tuple[torch.Tensor, ...]]


def context(processor: str = "znver3", options: LowerOptions | None = None) -> PassContext:
    """Of a processor that this one need not be."""
    return PassContext.of(options, target=target_of(level_machine("x86-64-v3"), processor))


def passed(program: Program, args: Sequence[Any], ctx: PassContext | None = None) -> torch.fx.GraphModule:
    """The graph of a program behind the pass."""
    return behind(traced(program, args), ctx or context())


def traced(program: Program, args: Sequence[torch.Tensor], mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(lambda *given: program(*given), tracing_mode=mode)(*args)


def behind(gm: torch.fx.GraphModule, ctx: PassContext) -> torch.fx.GraphModule:
    """A graph behind the pass."""
    graph = copy_graph(gm)
    if PASS.when(ctx):
        graph = PASS.run(graph, ctx)
    graph.lint()
    return torch.fx.GraphModule(gm, graph)


def count(made: torch.fx.GraphModule, ops: Sequence[Any]) -> int:
    return sum(node.target in ops for node in made.graph.nodes)


def convolution(stride: Sequence[int], **other: Any) -> Program:
    how = {"pad": [0, 0], "dilation": [1, 1], "transposed": False, "more": [0, 0], "groups": 1, **other}
    return lambda x, w, bias=None: (aten.convolution(x, w, bias, list(stride), *how.values()),)


def gradients(stride: Sequence[int], wanted: Sequence[bool] = ALL) -> Program:
    def run(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        how = [w.shape[0]], list(stride), [0, 0], [1, 1], False, [0, 0], 1, list(wanted)
        found = aten.convolution_backward(grad, x, w, *how)  # oneDNN gives the weights' beside the bias's
        return tuple(each for each, asked in zip(found, wanted, strict=True) if asked)

    return run


def operands(
    sizes: tuple[int, ...], results: int, taps: tuple[int, int], layout: Any = LAST, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Images, weights and a bias."""
    x = torch.randn(sizes, dtype=dtype).contiguous(memory_format=layout)
    w = torch.randn(results, sizes[1], *taps, dtype=dtype).contiguous(memory_format=layout)
    return [x, w, torch.randn(results, dtype=dtype)]


def compare(program: Program, made: Callable[..., Any], args: Sequence[torch.Tensor]) -> None:
    """As near to float64 as eager mode, and laid out as there."""
    eager, exact = program(*args), program(*(each.double() for each in args))
    tiny = 2e-6 if args[0].dtype is torch.float32 else 1e-2
    for ours, theirs, true in zip(made(*args), eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        steps = zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
        assert all(size == 1 or step == wanted for size, step, wanted in steps)
        scale = true.abs().max()
        off, allowed = ((each.double() - true).abs().max() / scale for each in (ours, theirs))
        assert off <= 3 * (allowed + tiny)


SIZES = [
    ((2, 32, 8, 8), 48, (2, 2)),
    ((3, 16, 9, 11), 40, (4, 3)),  # a row and two columns fill no patch
    ((1, 48, 7, 7), 33, (2, 2)),
    ((2, 1, 33, 40), 32, (16, 8)),
    ((4, 3, 32, 32), 64, (16, 16)),
    ((2, 40, 4, 4), 32, (4, 4)),  # one patch is the image
    ((2, 130, 5, 1), 32, (1, 1)),
]


@pytest.mark.parametrize("layout", [LAST, PLAIN], ids=["last", "contiguous"])
@pytest.mark.parametrize(("sizes", "results", "taps"), SIZES)
def test_a_convolution_is_a_product(sizes: Any, results: int, taps: Any, layout: Any) -> None:
    args = operands(sizes, results, taps, layout)
    for given in (args, args[:2]):
        made = passed(convolution(taps), given)
        single = taps == (1, 1)  # whose call is a product already
        assert (count(made, CALLS), count(made, PRODUCTS)) == (single, not single)
        compare(convolution(taps), made, given)


@pytest.mark.parametrize("layout", [LAST, PLAIN], ids=["last", "contiguous"])
@pytest.mark.parametrize(("sizes", "results", "taps"), SIZES)
def test_gradients_are_products(sizes: Any, results: int, taps: Any, layout: Any) -> None:
    x, w, _ = operands(sizes, results, taps, layout)
    (result,) = convolution(taps)(x, w)
    for grad in (torch.randn_like(result), torch.randn(result.shape)):
        made = passed(gradients(taps), [grad, x, w])
        if taps == (1, 1):
            assert count(made, CALLS) == 1
        else:
            assert (count(made, CALLS), count(made, PRODUCTS)) == (0, 2)
        compare(gradients(taps), made, [grad, x, w])


@pytest.mark.parametrize(
    "wanted",
    [[True, False, False], [False, True, False], [False, True, True], [True, False, True], [False, False, True]],
)
def test_gradients_that_are_wanted(wanted: list[bool]) -> None:
    x, w, _ = operands((2, 32, 9, 8), 48, (2, 2))
    grad = torch.randn(2, 48, 4, 4)
    made = passed(gradients((2, 2), wanted), [grad, x, w])
    assert count(made, PRODUCTS) == sum(wanted[:2])
    assert count(made, CALLS) == (not any(wanted[:2]))  # a gradient by the bias alone
    compare(gradients((2, 2), wanted), made, [grad, x, w])


@pytest.mark.parametrize("layout", [LAST, PLAIN], ids=["last", "contiguous"])
def test_bfloat16(layout: Any) -> None:
    args = operands((2, 16, 9, 8), 24, (2, 2), layout, torch.bfloat16)
    made = passed(convolution((2, 2)), args)
    assert (count(made, CALLS), count(made, PRODUCTS)) == (0, 1)
    compare(convolution((2, 2)), made, args)
    grads = [torch.randn(2, 24, 4, 4).bfloat16(), *args[:2]]
    made = passed(gradients((2, 2)), grads)
    assert (count(made, CALLS), count(made, PRODUCTS)) == (0, 2)
    compare(gradients((2, 2)), made, grads)


@pytest.mark.parametrize("layout", [LAST, PLAIN], ids=["last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_one_tap_what_oned_nn_computes_slowly_is_a_product(dtype: torch.dtype, layout: Any) -> None:
    x, w, _ = operands((2, 16, 5, 6), 24, (1, 1), layout, dtype)
    grads = [torch.randn(2, 24, 5, 6, dtype=dtype), x, w]
    for wanted, taken in (
        ([True, False, False], dtype is torch.float32 and layout is LAST),
        ([False, True, False], dtype is torch.bfloat16),
    ):
        made = passed(gradients((1, 1), wanted), grads)
        assert count(made, PRODUCTS) == taken and count(made, CALLS) == (not taken)
        compare(gradients((1, 1), wanted), made, grads)


@pytest.mark.parametrize(
    "other",
    [
        {"stride": (2, 3)},
        {"stride": (1, 1)},
        {"pad": [0, 1]},
        {"dilation": [2, 1]},
        {"groups": 2},
        {"transposed": True},
    ],
    ids=str,
)
def test_what_has_other_places_stays(other: dict[str, Any]) -> None:
    x, w, _ = operands((2, 32, 12, 12), 64, (2, 2))
    w = w[:, :16].contiguous() if "groups" in other else w[:32] if "transposed" in other else w
    made = passed(convolution(**{"stride": (2, 2), **other}), [x, w])
    assert (count(made, CALLS), count(made, PRODUCTS)) == (1, 0)


def test_images_of_one_dimension_stay() -> None:
    program = convolution([4], pad=[0], dilation=[1], more=[0])
    made = passed(program, [torch.randn(2, 32, 16), torch.randn(48, 32, 4)])
    assert (count(made, CALLS), count(made, PRODUCTS)) == (1, 0)


def test_one_number_for_both_steps() -> None:
    args = operands((2, 32, 8, 8), 48, (2, 2))
    made = passed(convolution([2], pad=[0], dilation=[1]), args)
    assert (count(made, CALLS), count(made, PRODUCTS)) == (0, 1)
    compare(convolution([2]), made, args)
    args = operands((2, 32, 8, 8), 48, (2, 4))
    assert count(passed(convolution([2]), args), CALLS) == 1


def test_a_small_product_stays_and_the_reason_is_kept() -> None:
    for results, channels, taken in ((32, 32, True), (31, 32, False), (32, 31, False)):
        ctx = context()
        made = passed(convolution((2, 2)), operands((2, channels, 8, 8), results, (2, 2)), ctx)
        assert count(made, PRODUCTS) == taken
        (decision,) = ctx.decisions
        assert ("as a product of matrices" if taken else "a small product") in str(decision)
        assert f"float32 patches of [2, {channels}, 8, 8] x [{results}, {channels}, 2, 2]" in str(decision)


def test_as_many_images_as_there_are() -> None:
    """A size that is known at run time only: the number of images may be one, others leave the call as it is."""
    args = operands((3, 32, 8, 8), 48, (2, 2))
    for dynamic, calls in ((0, 0), (2, 1), (1, 1)):
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        sizes = [DimDynamic.DYNAMIC if k == dynamic else DimDynamic.STATIC for k in range(4)]
        fake = mode.from_tensor(args[0], symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        others = [mode.from_tensor(each, static_shapes=True) for each in args[1:]]
        gm = traced(convolution((2, 2)), [fake, *others], "real")
        guards = len(mode.shape_env.guards)
        made = behind(gm, context())
        assert count(made, CALLS) == calls and len(mode.shape_env.guards) == guards
        if not calls:
            run = compile_graph(made)
            for images in (3, 1, 7):
                x = torch.randn(images, 32, 8, 8).contiguous(memory_format=LAST)
                want = convolution((2, 2))(x, *args[1:])[0]
                torch.testing.assert_close(run([x, *args[1:]])[0], want, rtol=1e-4, atol=1e-4)


def test_other_processors_keep_the_call_and_so_do_options() -> None:
    args = operands((2, 32, 8, 8), 48, (2, 2))
    for ctx in (
        *map(context, ("znver4", "haswell", "sapphirerapids")),
        context(options=LowerOptions(contractions="aten")),
        context(options=LowerOptions(contractions="generated")),
    ):
        assert count(passed(convolution((2, 2)), args, ctx), CALLS) == 1


def test_each_product_takes_fuel() -> None:
    x, w, _ = operands((2, 32, 8, 8), 48, (2, 2))
    for fuel in range(3):
        made = passed(gradients((2, 2)), [torch.randn(2, 48, 4, 4), x, w], context(options=LowerOptions(fuel=fuel)))
        assert count(made, PRODUCTS) == fuel
        compare(gradients((2, 2)), made, [torch.randn(2, 48, 4, 4), x, w])


def test_images_are_read_where_they_were_before_they_were_laid_out_anew() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return convolution((4, 4))(x.clone(memory_format=LAST), w)

    args = operands((2, 16, 8, 8), 48, (4, 4), PLAIN)
    made = passed(program, args[:2])
    copies = [node.kwargs["memory_format"] for node in made.graph.nodes if node.target is aten.clone.default]
    assert LAST not in copies and count(made, PRODUCTS) == 1
    compare(program, made, args[:2])


def test_not_where_these_were_written_to_meanwhile() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = x.clone(memory_format=LAST)
        x.copy_(torch.zeros_like(x))
        return convolution((2, 2))(kept, w)

    args = operands((2, 32, 8, 8), 48, (2, 2), PLAIN)[:2]
    made = passed(program, args)
    assert count(made, PRODUCTS) == 1
    want = convolution((2, 2))(*args)[0]
    torch.testing.assert_close(made(args[0].clone(), args[1])[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [LAST, PLAIN], ids=["last", "contiguous"])
def test_frozen_weights_are_not_copied(layout: Any) -> None:
    args = operands((2, 32, 8, 8), 48, (2, 2), layout)
    made = behind(freeze(traced(convolution((2, 2)), args), {1: args[1], 2: args[2]}), context())
    assert count(made, PRODUCTS) == 1
    readers = [user for node in made.graph.find_nodes(op="get_attr") for user in (node, *views_of(node))]
    assert {user.target for node in readers for user in node.users if user not in readers} <= {*PRODUCTS}
    compare(convolution((2, 2)), made, args)


def test_what_comes_before_is_stored_as_patches_and_what_follows_reads_the_product() -> None:
    x, w, bias = operands((2, 32, 9, 8), 48, (2, 2))

    def program(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.relu(convolution((2, 2))(torch.tanh(x), w, bias)[0]),)

    made = passed(program, [x, w, bias])
    run = compile_graph(made, options=LowerOptions(verify=True))
    assert [group.nodes for group in run.report().groups] == [("tanh", "clone_default"), ("relu",)]
    compare(program, lambda *args: run(list(args)), [x, w, bias])
