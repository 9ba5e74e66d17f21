"""Symbolic sizes: one capture serves many sizes."""

from __future__ import annotations

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_aot_trace import TraceOptions, capture, trace_inference

ARITHMETIC = re.compile(r"^[\w\s+\-*/%(),]+$")


def sizes(*shape, grad=True):
    return lambda: [torch.randn(*shape, requires_grad=grad), torch.randn(shape[-1], 5, requires_grad=grad)]


PROGRAMS = {
    "matmul": lambda x, w: [(x @ w).relu()],
    "flattened": lambda x, w: [x.sin().reshape(-1), x.shape[0] * w],
    "view of input": lambda x, w: [x.view(-1)[x.shape[1] :], x.t()],
    "shared views": lambda x, w: (lambda y: [y[1:], y.view(-1), y.t()])(x.cos()),
    "mutated": lambda x, w: [x.mul_(2), w.t_(), x[0].sum()],
    "size returned": lambda x, w: [x.shape[0], x.shape[0] * x.shape[1] + 1, x * 2],
    "halves": lambda x, w: [x.sin()[: x.shape[0] // 2], x.shape[0] // 2, max(x.shape[0], 3)],
    "padded": lambda x, w: [F.pad(x, (1, 2)).cumsum(0)],
    "concatenated": lambda x, w: [torch.cat([x @ w, x @ w], 0).softmax(-1)],
    "made inside": lambda x, w: [torch.arange(x.shape[0]) + 1, torch.ones_like(x)],
}


@pytest.mark.covers("F1.40", "F2.6", "F2.7")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "plain"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_capture_serves_other_sizes(layer, compare, name, grad):
    options = TraceOptions(layer=layer, dynamic=True)
    captured = compare(PROGRAMS[name], sizes(6, 4, grad=grad), make_call=sizes(8, 3, grad=grad), options=options)
    assert captured.shape_env is not None
    texts = [d for i in captured.metadata.inputs if i.meta for d in i.meta.sizes if isinstance(d, str)]
    texts += [d for o in captured.metadata.outputs if o.meta for d in o.meta.sizes if isinstance(d, str)]
    assert texts and all(ARITHMETIC.match(t) for t in texts)


@pytest.mark.covers("F1.40")
def test_a_flattened_tensor_written_to_under_no_grad_has_its_gradient_for_other_sizes(layer, compare):
    """Autograd takes the view again after the write; its sizes belong to the recorded backward."""

    def fn(x):
        flat = x.sin().reshape(-1)
        with torch.no_grad():
            flat.add_(1)
        return [flat]

    def gaps(rows, columns):
        return lambda: [torch.randn(2 * rows, 2 * columns)[::2, ::2].requires_grad_()]

    compare(fn, gaps(4, 4), make_call=gaps(5, 5), options=TraceOptions(layer=layer, dynamic=True))


@pytest.mark.parametrize(
    "size",
    [lambda a, b: 2 * a * b, lambda a, b: a + b + 3, lambda a, b: 3 * (a + b + 1) * a, lambda a, b: 3 * a * b // 2],
)
def test_sizes_of_many_parts_that_were_made_while_nothing_was_recorded(compare, size):
    """As the outer sizes of distributed tensors are."""

    def fn(x, w):
        with disable_proxy_modes_tracing():
            number = size(x.shape[0], x.shape[1])
        return [x.sin().sum() * number, w.new_ones(number)]

    compare(fn, sizes(6, 4), make_call=sizes(8, 3), options=TraceOptions(dynamic=True))


@pytest.mark.covers("F2.6")
def test_static_sizes_need_no_shape_env():
    assert capture(lambda x: [x + 1], [torch.ones(3)]).shape_env is None


def test_dimensions_that_vary_are_recorded():
    captured = trace_inference(lambda x: [x + 1, x.sum(0), x.sum()], [torch.ones(6, 4)], dynamic=True)
    assert [o.dynamic_dims for o in captured.metadata.outputs] == [(0, 1), (0,), ()]


def dynamo_capture(fn, *args):
    """What Dynamo gives a backend with dynamic sizes: examples, their fakes, and the capture."""
    found = []

    def backend(graph, examples):
        context = torch._guards.TracingContext.get()
        mode, fakes = context.fake_mode, []
        for value in examples:
            if isinstance(value, torch.Tensor):
                symbolic = context.tensor_to_context.get(value)
                source = getattr(symbolic, "tensor_source", None)
                value = mode.from_tensor(value, symbolic_context=symbolic, source=source)
            fakes.append(value)
        found.append((examples, fakes, capture(graph, fakes)))
        return graph

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=True, fullgraph=True)(*args)
    (result,) = found
    return result


@pytest.mark.covers("F2.47")
def test_a_python_float_of_dynamo_stays_variable(run_graph):
    def fn(x, scale):
        return (x * scale).sin()

    x = torch.randn(4, requires_grad=True)
    examples, _, captured = dynamo_capture(fn, x, 2.5)
    floats = [i for i, e in enumerate(examples) if isinstance(e, torch.Tensor) and e.dim() == 0]
    assert floats, "Dynamo passes the float as a tensor"
    args = [_call_value(e, x, torch.tensor(0.5, dtype=torch.float64)) for e in examples]
    ours = run_graph(captured, args)[-1]
    torch.testing.assert_close(ours, fn(x, 0.5))
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x)[0], (x * 0.5).cos() * 0.5)


def _call_value(example, x, scale):
    if isinstance(example, torch.Tensor):
        return scale if example.dim() == 0 else x
    return x.shape[0]


def test_the_symbols_of_dynamo_are_bound_from_its_integer_inputs(run_graph):
    def fn(x, w):
        return (x @ w).sum(0) * x.shape[0], x.view(-1)

    x, w = torch.randn(6, 4), torch.randn(4, 5, requires_grad=True)
    examples, fakes, captured = dynamo_capture(fn, x, w)
    assert captured.metadata.is_training and captured.shape_env is fakes[-1].fake_mode.shape_env
    integers = [i for i, e in enumerate(examples) if isinstance(e, int | torch.SymInt)]
    assert integers and {b.input_index for b in captured.metadata.symbols if b.source == "int"} == set(integers)
    other = torch.randn(9, 7), torch.randn(7, 2, requires_grad=True)
    values = {"x": other[0], "w": other[1]}
    args = _arguments(captured, fakes, examples, values, x, w)
    ours, flat = run_graph(captured, args)
    expected = fn(*other)
    torch.testing.assert_close(ours, expected[0])
    assert flat.shape == (63,)
    grads = torch.autograd.grad(ours.sum(), other[1]), torch.autograd.grad(expected[0].sum(), other[1])
    torch.testing.assert_close(grads[0], grads[1])


def _arguments(captured, fakes, examples, values, x, w):
    """The same flat arguments for other tensors: integers are read off the tensors that carry their symbol."""
    chosen = [values["x"] if e is x else values["w"] if e is w else None for e in examples]
    for index, fake in enumerate(fakes):
        if isinstance(fake, torch.SymInt):
            for tensor, real in zip(fakes, chosen, strict=True):
                if isinstance(tensor, torch.Tensor):
                    chosen[index] = next(
                        (real.shape[d] for d, s in enumerate(tensor.shape) if str(s) == str(fake)), chosen[index]
                    )
    return chosen


def test_an_integer_argument_is_a_constant_or_a_symbol(run_graph):
    captured = capture(lambda x, n: [x * n], [torch.ones(3), 4])
    assert captured.metadata.inputs[1].kind.value == "other"
    assert torch.equal(run_graph(captured, [torch.ones(3), 4])[0], torch.full((3,), 4.0))


def test_size_expressions_in_the_graph_are_binary(run_graph):
    def fn(x):
        return [x.reshape(x.shape[0] * x.shape[1] * x.shape[2]).sin(), x.shape[0] + x.shape[1] + x.shape[2]]

    captured = trace_inference(fn, [torch.ones(3, 4, 5)], dynamic=True)
    for node in captured.graph.graph.nodes:
        if node.target in (operator.mul, operator.add):
            assert len(node.args) == 2
    assert run_graph(captured, [torch.ones(2, 6, 7)])[1] == 15


def test_specialising_a_size_is_seen_in_the_record():
    captured = trace_inference(lambda x: [x + torch.ones(6, 1)], [torch.ones(6, 4)], dynamic=True)
    assert captured.metadata.inputs[0].meta.sizes[0] == 6
    assert isinstance(captured.metadata.inputs[0].meta.sizes[1], str)


@pytest.mark.covers("F1.59")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_size_that_depends_on_data_is_read_off_the_output_that_has_it(run_graph, dynamic):
    captured = trace_inference(lambda x: [x.nonzero(), x + 1], [torch.ones(4)], dynamic=dynamic)
    (binding,) = [b for b in captured.metadata.symbols if b.of_output]
    assert captured.metadata.outputs[0].meta.sizes == (binding.name, 1)
    assert (binding.input_index, binding.source, binding.dim) == (0, "size", 0)
    assert [tuple(v.shape) for v in run_graph(captured, [torch.tensor([0.0, 2.0, 0.0, 3.0])])] == [(2, 1), (4,)]


@pytest.mark.covers("F1.59")
def test_a_number_that_no_output_has_as_its_size_becomes_an_output_of_the_graph(run_graph):
    def fn(x, k):
        size = k.item()
        torch._check(size >= 0)
        torch._check(size <= 5)
        return [x[:size], x[size:]]

    captured = trace_inference(fn, [torch.ones(5), torch.tensor(2)])
    (binding,) = [b for b in captured.metadata.symbols if b.of_output]
    assert binding.source == "int" and captured.metadata.num_forward_outputs == 1
    assert [len(v) for v in run_graph(captured, [torch.ones(5), torch.tensor(3)])] == [3, 2]


def test_a_write_through_a_view_of_another_shape_is_no_change_of_size(layer, compare):
    def fn(x, y):
        x.reshape(2, -1).mul_(2)
        y.view(2, -1).copy_(y.view(2, -1) + 1)
        return [x * y]

    def make(rows):
        return lambda: [torch.randn(rows, 5), torch.randn(rows, 5)]

    compare(fn, make(4), make_call=make(6), options=TraceOptions(layer=layer, dynamic=True))


def test_a_symbol_that_turns_out_to_be_a_number_keeps_its_binding(layer):
    def fn(x, y):
        z = x.clone().detach()
        windows = z.unfold(0, 2, 1)
        z.add_(y)
        return [windows, windows]

    args = [torch.randn(1, 3, 2).expand(2, 3, 2), torch.randn(2, 3, 2, requires_grad=True)]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(arg, static_shapes=False) for arg in args]
    metadata = capture(fn, fakes, options=TraceOptions(layer=layer)).metadata
    bound = {binding.name for binding in metadata.symbols}
    used = {d for i in metadata.inputs if i.meta for d in i.meta.sizes if isinstance(d, str)}
    assert used and used <= bound
