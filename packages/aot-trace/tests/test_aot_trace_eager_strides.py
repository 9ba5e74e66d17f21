"""Results of elementwise operators are laid out as in eager mode, whatever the strides of the operands are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aotkit_aot_trace import TraceOptions, capture
from aotkit_aot_trace.eager_strides import elementwise_operators

SHAPES = [(1, 4, 1, 3), (2, 1, 3), (3, 2), (1, 1), (4, 1), (1, 5), (2, 3, 4), (1, 3, 1, 1), (0, 3), (2, 0, 1), ()]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
INTEGERS = ("bitwise", "shift", "gcd", "lcm", "__xor__")


def laid_out(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Permuted, with any strides where the size is one, maybe with gaps or repeated."""
    strides, step = [0] * len(shape), 1
    for dim in rng.sample(range(len(shape)), len(shape)):
        strides[dim] = step if shape[dim] != 1 or rng.random() < 0.5 else rng.choice([0, 1, 5, 77])
        step *= max(shape[dim], 1)
    if rng.random() < 0.2:
        strides = [2 * stride for stride in strides]
    if shape and rng.random() < 0.15:
        strides[rng.randrange(len(shape))] = 0
    return (torch.rand(500) / 2 + 0.3).ceil().to(dtype).as_strided(shape, strides)


def draw(rng: random.Random, op: Any) -> list[Any] | None:
    """Arguments for the operator, or ``None`` where its schema asks for others than tensors and numbers."""
    shape, args = rng.choice(SHAPES), []
    dtype = torch.int32 if any(part in str(op) for part in INTEGERS) else torch.float32
    for place, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind != "Tensor"):
            break
        if kind == "Tensor":
            other = tuple(1 if rng.random() < 0.4 else size for size in shape)[rng.choice([0, 0, 1]) :]
            given = shape if not args or rng.random() < 0.6 else other
            args.append(laid_out(rng, given, torch.bool if place == 0 and "where" in str(op) else dtype))
        elif kind in ("number", "int", "float"):
            args.append(2)
        else:
            return None
    return args


def test_the_rule_gives_the_strides_of_every_elementwise_operator():
    rng = random.Random(0)
    looked_at = set()
    for each in elementwise_operators():
        if each.name.endswith(("loss", "cross_entropy")):
            continue  # below
        for _ in range(12):
            args = draw(rng, each.op)
            if args is None:
                break
            try:
                want = each.op(*args)
            except (RuntimeError, TypeError):
                continue  # the operator refuses these
            layouts = [
                (tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else ((), ())
                for place, a in enumerate(args)
                if isinstance(a, torch.Tensor) or place in each.numbers
            ]
            assert each.strides(layouts) == want.stride(), (each.op, layouts)
            looked_at.add(each.op)
    assert len(looked_at) > 180


MIXED: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, z: torch.add(x, y, alpha=2),
    "rsub": lambda x, y, z: torch.rsub(x, y),
    "mul": lambda x, y, z: x * y,
    "div": lambda x, y, z: x / y,
    "copysign": lambda x, y, z: torch.copysign(x, y),
    "atan2": lambda x, y, z: torch.atan2(x, y),
    "xlogy": lambda x, y, z: torch.xlogy(x, y),
    "pow": lambda x, y, z: x.double() ** y,
    "logaddexp2": lambda x, y, z: torch.logaddexp2(x.float(), y.bfloat16()),
    "less": lambda x, y, z: x < y,
    "logical": lambda x, y, z: torch.logical_and(x, y),
    "where": lambda x, y, z: torch.where(z > 0, x, y),
    "clamp": lambda x, y, z: torch.clamp(x, y, z),
    "addcmul": lambda x, y, z: torch.addcmul(x.double(), y.double(), z.float()),
    "maximum": lambda x, y, z: torch.maximum(x, y),
    "sigmoid_backward": lambda x, y, z: torch.ops.aten.sigmoid_backward(x.double(), y.float()),
    "threshold_backward": lambda x, y, z: torch.ops.aten.threshold_backward(x, y, 0),
}


@pytest.mark.parametrize("name", MIXED)
def test_results_of_operands_that_are_converted_have_eagers_strides(name: str):
    rng = random.Random(name)
    dtypes = [torch.int32, torch.int16, torch.float32, torch.float64, torch.bfloat16]
    for shape in [(2, 3, 4), (1, 4, 3), (3, 2), (2, 3, 4), (4, 2, 3), (2, 3, 2, 3)]:
        x, y, z = (laid_out(rng, shape, rng.choice(dtypes)) for _ in range(3))
        x = x.as_strided(shape, rng.choice([[0] * len(shape), [*([0] * (len(shape) - 1)), 1], x.stride()]))
        try:
            want = MIXED[name](x, y, z)
        except RuntimeError:
            continue  # the operator refuses these types
        graph = capture(lambda *args: [MIXED[name](*args)], [x, y, z]).graph
        (value,) = (node.args[0][0].meta["val"] for node in graph.graph.nodes if node.op == "output")
        assert value.stride() == want.stride(), [(v.stride(), v.dtype) for v in (x, y, z)]


BACKWARDS: dict[str, Callable[..., torch.Tensor]] = {
    "elu": lambda g, x: torch.ops.aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "hardsigmoid": torch.ops.aten.hardsigmoid_backward,
    "hardswish": torch.ops.aten.hardswish_backward,
    "hardtanh": lambda g, x: torch.ops.aten.hardtanh_backward(g, x, 0, 1),
    "leaky_relu": lambda g, x: torch.ops.aten.leaky_relu_backward(g, x, 0.1, False),
    "mish": torch.ops.aten.mish_backward,
    "softplus": lambda g, x: torch.ops.aten.softplus_backward(g, x, 1, 20),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_of_activations_have_eagers_strides(name: str):
    rng = random.Random(name)
    for shape in SHAPES * 2:
        g, x = laid_out(rng, shape, torch.float32), laid_out(rng, shape, torch.float32)
        graph = capture(lambda g, x: [BACKWARDS[name](g, x)], [g, x]).graph
        (result,) = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        assert result.meta["val"].stride() == BACKWARDS[name](g, x).stride(), (g.stride(), x.stride())


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("sizes", [((3, 1), (1, 3, 1)), ((1, 4), (2, 3, 4)), ((3, 4), (1, 1))])
def test_a_loss_of_operands_that_are_broadcast_has_eagers_strides(sizes):
    x, y = (torch.rand(s).transpose(-1, -2).contiguous().transpose(-1, -2) for s in sizes)
    graph = capture(lambda x, y: [torch.ops.aten.huber_loss.default(x, y, 0)], [x, y]).graph
    (result,) = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert result.meta["val"].stride() == torch.ops.aten.huber_loss.default(x, y, 0).stride()


@pytest.mark.parametrize("f", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy])
def test_losses_that_are_not_reduced_have_eagers_strides(f):
    rng = random.Random(1)
    for _ in range(8):
        shape = rng.choice(SHAPES)
        x, y = laid_out(rng, shape, torch.float32), laid_out(rng, shape, torch.float32)
        graph = capture(lambda x, y: [f(x, y, reduction="none")], [x, y]).graph
        (result,) = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        assert result.meta["val"].stride() == f(x, y, reduction="none").stride(), (x.stride(), y.stride())


X = torch.randn(60)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.logical_or(x > 0, x),
        lambda x: x.angle(),
        lambda x: F.hardtanh(x * 2),
        lambda x: torch.xlogy(x, x[:, :1]),
        lambda x: x.diagonal() + 1,
        lambda x: x.relu(),
        lambda x: torch.ops.aten.lift_fresh_copy.default(x),
    ],
    ids=["logical_or", "angle", "hardtanh", "xlogy", "diagonal", "relu", "lift_fresh_copy"],
)
@pytest.mark.parametrize("strides", [(3, 1, 77, 1), (1, 6, 5, 2), (6, 2, 0, 2), (3, 3, 3, 1)], ids=str)
def test_captured_results_have_eagers_strides(fn: Callable[..., Any], strides: tuple[int, ...]):
    x = X.as_strided((2, 1, 1, 3), strides)
    graph = capture(lambda x: [fn(x)], [x]).graph
    (value,) = (node.args[0][0].meta["val"] for node in graph.graph.nodes if node.op == "output")
    assert value.stride() == fn(x).stride()


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_give_a_memory_format_whatever_their_input_has(training):
    x, mean, var = torch.randn(4, 3, 2).permute(2, 1, 0), torch.zeros(3), torch.ones(3)
    graph = capture(lambda x, m, v: [F.batch_norm(x, m, v, training=training)], [x, mean, var]).graph
    output = next(node for node in graph.graph.nodes if node.op == "output")
    assert output.args[0][-1].meta["val"].stride() == (12, 4, 1)


NORMS = {
    "batch": lambda x, w: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "batch, running": lambda x, w: torch.native_batch_norm(x, None, None, w.clone(), w.clone(), True, 0.1, 1e-5),
    "layer": lambda x, w: torch.native_layer_norm(x, [3], w, w, 1e-5),
    "group": lambda x, w: torch.native_group_norm(x, w, w, 4, 3, 3, 3, 1e-5),
    "weight": lambda x, w: torch._weight_norm_interface(x, x[:, :1, :1].clone(), 0),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", ["half", "float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_halves_save_statistics_of_eagers_type(half, parameters, norm):
    x, w = torch.randn(4, 3, 3).to(half), torch.ones(3, dtype=half if parameters == "half" else torch.float32)
    graph = capture(lambda x, w: list(NORMS[norm](x, w)), [x, w]).graph
    output = next(node for node in graph.graph.nodes if node.op == "output")
    assert [value.meta["val"].dtype for value in output.args[0]] == [value.dtype for value in NORMS[norm](x, w)]


def test_a_fresh_copy_is_contiguous(check):
    check(lambda x: [torch.ops.aten.lift_fresh_copy(x)], lambda: [torch.rand(2, 3, 4).permute(2, 0, 1)])


def test_the_gradient_of_log_softmax_is_contiguous():
    backward = torch.ops.aten._log_softmax_backward_data.default
    gradient, y = torch.randn(9, 6).t(), torch.randn(6, 9).log_softmax(1)
    want = backward(gradient, y, 1, torch.float32)
    graph = capture(lambda g, y: [backward(g, y, 1, torch.float32)], [gradient, y]).graph
    (value,) = (node.args[0][0].meta["val"] for node in graph.graph.nodes if node.op == "output")
    assert value.stride() == want.stride() == (9, 1)
    (got,) = graph(gradient, y)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_an_outer_product_lies_as_what_it_is_added_to():
    a, b, tables = torch.arange(3.0), torch.arange(4.0), ({}, {torch.ops.aten.addr.default: torch._refs.addr})
    for x in (torch.ones(4, 3).t(), torch.ones(3, 4), torch.ones(4), torch.ones(3, 1), torch.ones(8, 3).t()[:, ::2]):
        for beta in (0, 0.0, 1, 0.5):
            want = torch.addr(x, a, b, beta=beta, alpha=2)
            for table in tables:
                graph = capture(
                    lambda *given, beta=beta: [torch.addr(*given, beta=beta, alpha=2)], [x, a, b], decompositions=table
                ).graph
                (value,) = (node.args[0][0].meta["val"] for node in graph.graph.nodes if node.op == "output")
                (got,) = graph(x, a, b)
                assert value.stride() == got.stride() == want.stride()
                torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_batch_norms_are_laid_out_in_eagers_memory_format():
    rng = random.Random(2)
    formats = set()
    for _ in range(60):
        shape = rng.choice([(2, 3, 1, 4), (2, 3, 4, 1), (1, 3, 2, 2), (3, 2, 1, 2, 3), (2, 1, 3), (3, 2)])
        x = laid_out(rng, shape, torch.float32)
        if rng.random() < 0.5 and len(shape) > 3:
            strides = list(x.contiguous(memory_format=FORMATS[len(shape)]).stride())
            one = rng.choice([dim for dim, n in enumerate(shape) if n == 1] or [0])
            strides[one] = 77 if shape[one] == 1 else strides[one]
            x = torch.rand(500).as_strided(shape, strides)

        def norm(x):
            return [F.batch_norm(x, None, None, training=True)]

        (node,) = capture(norm, [x]).graph.graph.output_node().args[0]
        kept = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (norm(x)[0], node.meta["val"])]
        assert kept[0] == kept[1], (shape, x.stride())
        formats.add(norm(x)[0].is_contiguous())
    assert formats == {True, False}


@pytest.mark.parametrize("decomposed", [False, True])
def test_angles_of_complex_numbers_are_contiguous(decomposed):
    table = {torch.ops.aten.angle.default: lambda x: torch.atan2(x.imag, x.real)} if decomposed else {}
    z = torch.randn(2, 3, 4, dtype=torch.complex64).transpose(1, 2)
    inputs = [z, z[:, 1:], z.real] if not decomposed else [z, z[:, 1:]]
    graph = capture(lambda *given: [torch.angle(x) for x in given], inputs, decompositions=table).graph
    (output,) = graph.graph.find_nodes(op="output")
    for x, node, got in zip(inputs, output.args[0], graph(*inputs), strict=True):
        want = torch.angle(x)
        assert node.meta["val"].stride() == got.stride() == want.stride()
        torch.testing.assert_close(got, want)


BINARY: dict[str, Callable[..., Any]] = {
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div": torch.div,
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "logaddexp": torch.logaddexp,
    "heaviside": torch.heaviside,
    "logical_and": torch.logical_and,
    "polar": torch.polar,
    "complex": torch.complex,
    "logit_backward": torch.ops.aten.logit_backward,
    "a number": lambda x, y: torch.copysign(x, -1.0) + torch.xlogy(2.0, y),
    "power of a number": lambda x, y: torch.pow(2.0, x.exp()),
    "of one number": lambda x, y: torch.xlogy(x, 2.0),
}


@pytest.mark.parametrize("other", [(0, 1, 2), (1, 2, 0), "repeated"], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_results_of_symbolic_sizes_have_eagers_strides(name: str, other: Any):
    x = torch.rand(4, 5, 6).permute(2, 0, 1)
    sizes = [(6, 4, 5)[dim] for dim in other] if other != "repeated" else []
    order = sorted(range(3), key=lambda dim: other[dim]) if sizes else []
    y = torch.rand(sizes).permute(order) if sizes else torch.rand(6, 1, 5).expand(6, 4, 5)
    for given in ([x, y], [y, x]):
        captured = capture(lambda x, y: [BINARY[name](x, y)], given, options=TraceOptions(dynamic=True))
        (value,) = (node.args[0][0].meta["val"] for node in captured.graph.graph.nodes if node.op == "output")
        hints = tuple(n if isinstance(n, int) else n.node.hint for n in value.stride())
        assert hints == BINARY[name](*given).stride()
