"""The autograd function of a training graph: saved state, tangents, lazy and double backward, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from aotkit_functionalize import GraphMetadata, records
from aotkit_runtime_wrappers import DoubleBackwardError, WrapperError, bind, build_plan
from aotkit_runtime_wrappers.errors import (
    BackwardCompileError,
    CallingConventionError,
    MetadataMismatchError,
    PlanError,
)

TENSOR, FRESH = records.InputKind.TENSOR, records.OutputKind.FRESH


def meta_of(tensor, requires_grad=None):
    grad = tensor.requires_grad if requires_grad is None else requires_grad
    dtype = str(tensor.dtype).removeprefix("torch.")
    return records.TensorMeta(dtype, str(tensor.device), tuple(tensor.shape), tensor.stride(), 0, grad)


def sine_metadata(x, outputs=1, *, is_leaf=True):
    """``outputs`` fresh differentiable outputs of one input."""
    like = meta_of(x, False)
    return GraphMetadata(
        inputs=(records.InputInfo(0, TENSOR, meta_of(x, True), is_leaf=is_leaf),),
        outputs=tuple(records.OutputInfo(i, FRESH, meta_of(x, True), graph_output=i) for i in range(outputs)),
        tangents=tuple(records.TangentInfo(i, like) for i in range(outputs)),
        num_forward_outputs=outputs,
        forward_requires_grad=(True,) * outputs,
        differentiable_inputs=(0,),
        is_training=True,
    )


def boxed(function):
    def run(args):
        values = list(args)
        args.clear()
        return function(*values)

    run._boxed_call = True
    return run


def bind_sine(how, x, **changes):
    """``sin`` that saves its cosine."""
    plan = build_plan(sine_metadata(x, is_leaf=x.is_leaf), num_saved_tensors=1)
    parts = {"forward": lambda v: [v.sin(), v.cos()], "backward": boxed(lambda c, t: [t * c])} | changes
    return how(plan, boxed(parts["forward"]), parts["backward"])


@pytest.mark.covers("F4.33")
def test_the_backward_is_compiled_at_the_first_backward_and_only_once(how):
    made = []

    def factory():
        made.append(1)
        return boxed(lambda c, t: [t * c])

    x = torch.randn(3, requires_grad=True)
    call = bind_sine(how, x, backward=factory)
    outs = [call([x])[0] for _ in range(3)]
    assert made == []
    for out in outs:
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, x.detach().cos())
    assert made == [1]


@pytest.mark.covers("F4.33")
def test_a_backward_that_does_not_compile_is_reported_and_tried_again(how):
    attempts = []

    def factory():
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("no such kernel")
        return boxed(lambda c, t: [t * c])

    x = torch.randn(3, requires_grad=True)
    (out,) = bind_sine(how, x, backward=factory)([x])
    with pytest.raises(BackwardCompileError, match="no such kernel") as caught:
        out.sum().backward()
    assert isinstance(caught.value.__cause__, ValueError)
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.covers("F4.33", "F4.44")
def test_threads_that_come_to_the_first_backward_together_compile_it_once(how):
    made, barrier = [], threading.Barrier(8)

    def factory():
        made.append(threading.get_ident())
        return boxed(lambda c, t: [t * c])

    call = bind_sine(how, torch.randn(3, requires_grad=True), backward=factory)

    def one(seed):
        x = torch.full((3,), float(seed), requires_grad=True)
        (out,) = call([x])
        barrier.wait()
        (grad,) = torch.autograd.grad(out.sum(), x)
        return torch.equal(grad, x.detach().cos())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(8)))
    assert len(made) == 1


@pytest.mark.covers("F4.44")
def test_two_threads_in_one_bound_function_do_not_disturb_each_other(compile_eagerly, how):
    def function(x, w):
        x.add_(1)
        return ((x * w).sin(), w.view(-1))

    example = [torch.zeros(3), torch.ones(3, requires_grad=True)]
    compiled = compile_eagerly(function, example, how=how)

    def one(seed):
        good = True
        for step in range(20):
            x, w = torch.full((3,), float(seed)), torch.full((3,), float(step), requires_grad=True)
            out, view = compiled.call([x, w])
            (grad,) = torch.autograd.grad(out.sum(), w)
            good &= torch.equal(grad, (x * w.detach()).cos() * x) and view._base is w and bool((x == seed + 1).all())
        return good and torch.is_grad_enabled()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))


@pytest.mark.covers("F4.28")
def test_a_saved_output_that_the_user_changes_is_noticed(how):
    x = torch.randn(3, requires_grad=True)

    def forward(v):
        result = v.exp()
        return [result, result]

    (out,) = bind_sine(how, x, forward=forward)([x])
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.covers("F4.28")
@pytest.mark.parametrize("saved", [lambda buffer: buffer[:3], lambda buffer: buffer[1:3], lambda buffer: buffer])
def test_a_saved_view_of_an_output_that_the_user_changes_is_noticed(how, saved):
    x = torch.randn(3, requires_grad=True)

    def forward(v):
        buffer = torch.cat([v.exp(), v])
        return [buffer[:3], saved(buffer)]

    call = bind_sine(how, x, forward=forward, backward=boxed(lambda s, t: [t * s[:1]]))
    (out,) = call([x])
    assert not out._is_view()
    out.sum().backward()
    (out,) = call([x])
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.covers("F4.28")
def test_outputs_that_are_parts_of_one_buffer_can_be_changed_in_place(how):
    x = torch.randn(3, requires_grad=True)

    def forward(v):
        buffer = torch.stack([v.sin(), v.exp()])
        return [*buffer.unbind(), v.detach()]

    plan = build_plan(sine_metadata(x, 2), num_saved_tensors=1)
    call = how(plan, boxed(forward), boxed(lambda v, s, t: [s * v.cos() + t * v.exp()]))
    first, second = call([x])
    first.mul_(2)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, (2 * x.cos() + x.exp()).detach())


@pytest.mark.covers("F4.28")
def test_an_input_that_is_saved_and_written_back_keeps_its_value_for_the_backward(compile_eagerly, how):
    def function(x, w):
        product = x.t().clone() * w
        x.add_(1)
        return (product,)

    x, w = torch.rand(3, 3), torch.rand(3, 3, requires_grad=True)
    before = x.clone()
    (out,) = compile_eagerly(function, [x, w], how=how).call([x, w])
    torch.testing.assert_close(x, before + 1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), w)[0], before.t())


def test_saved_tensors_are_released_by_the_backward_unless_the_graph_is_retained(how):
    x = torch.randn(3, requires_grad=True)
    kept = []

    def forward(v):
        cosine = v.cos()
        kept.append(StorageWeakRef(cosine.untyped_storage()))
        return [v.sin(), cosine]

    alive = []

    def backward(args):
        cosine, tangent = args
        args.clear()
        grad = tangent * cosine
        del cosine, tangent
        alive.append(not kept[-1].expired())
        return [grad]

    backward._boxed_call = True
    call = bind_sine(how, x, forward=forward, backward=backward)
    (out,) = call([x])
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert alive == [True, False], "while it runs, the last backward is the only one to hold a saved tensor"
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_saved_tensors_hooks_of_the_user_see_what_is_saved(how):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.clone())
        return tensor.numpy().copy()

    def unpack(array):
        unpacked.append(array)
        return torch.from_numpy(array)

    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        (out,) = bind_sine(how, x)([x])
    out.sum().backward()
    assert len(packed) == len(unpacked) == 1
    torch.testing.assert_close(packed[0], x.detach().cos())
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.covers("F2.44")
def test_tensors_that_hooks_give_back_have_the_form_that_the_backward_was_compiled_for(how):
    """Compiled code reads memory: other strides are brought into form, other elements and sizes refused."""
    read = []

    def backward(v, s):
        read.append(v.stride())
        return [s * v.cos()]

    x = torch.randn(2, 3, requires_grad=True)
    plan = build_plan(sine_metadata(x), num_saved_tensors=1)
    call = how(plan, boxed(lambda v: [v.sin(), v.detach()]), boxed(backward))

    def under(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
            return call([x])[0].sum()

    (grad,) = torch.autograd.grad(under(lambda t: t.t().contiguous().t()), x)
    assert read == [(3, 1)]
    torch.testing.assert_close(grad, x.detach().cos())
    for unpack in (torch.Tensor.double, torch.Tensor.flatten):
        loss = under(unpack)
        with pytest.raises(MetadataMismatchError, match="hook on saved tensors gave back a Tensor"):
            loss.backward()
    assert x.grad is None


@pytest.mark.covers("F4.29")
def test_an_unused_output_gets_a_zero_tangent_and_no_tangent_at_all_runs_nothing(how):
    x = torch.randn(2, 3, requires_grad=True)
    seen = []

    def backward(v, s, t):
        seen.append((s, t))
        return [s * v.cos() + t * v.exp()]

    plan = build_plan(sine_metadata(x, 2), num_saved_tensors=1)
    call = how(plan, boxed(lambda v: [v.sin(), v.exp(), v.detach()]), boxed(backward))
    _, second = call([x])
    second.sum().backward()
    assert seen[0][0].stride() == (3, 1) and not seen[0][0].any()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.covers("F4.29", "F4.33")
def test_a_backward_made_for_missing_tangents_gets_none_and_others_share_one_with_zeros():
    x = torch.randn(2, 3, requires_grad=True)
    made, seen = [], []

    def specialize(missing):
        made.append(missing)

        def backward(v, s, t):
            seen.append(("special", s is None, t is None))
            return [s * v.cos()]

        return boxed(backward)

    def whole(v, s, t):
        seen.append(("whole", bool(s.any()), bool(t.any())))
        return [s * v.cos() + t * v.exp()]

    plan = build_plan(sine_metadata(x, 2), num_saved_tensors=1)
    forward = boxed(lambda v: [v.sin(), v.exp(), v.detach()])
    call = bind(plan, forward, lambda: boxed(whole), specialize=specialize)
    sine, cosine, exponential = x.detach().sin(), x.detach().cos(), x.detach().exp()
    for chosen, expected in [
        (lambda a, b: a, cosine),
        (lambda a, b: a * 2, 2 * cosine),
        (lambda a, b: a + b, cosine + exponential),
        (lambda a, b: b, exponential),
        (lambda a, b: a, cosine),
    ]:
        first, second = call([x])
        torch.testing.assert_close(first.detach(), sine)
        (grad,) = torch.autograd.grad(chosen(first, second).sum(), x)
        torch.testing.assert_close(grad, expected)
    assert made == [(False, True)]
    special = ("special", False, True)
    assert seen == [special, special, ("whole", True, True), ("whole", False, True), special]


@pytest.mark.covers("F4.29")
def test_where_there_is_no_backward_without_the_tangent_it_is_zeros():
    x = torch.randn(2, 3, requires_grad=True)
    seen = []

    def whole(v, s, t):
        seen.append(bool(t.any()))
        return [s * v.cos() + t * v.exp()]

    plan = build_plan(sine_metadata(x, 2), num_saved_tensors=1)
    forward = boxed(lambda v: [v.sin(), v.exp(), v.detach()])
    call = bind(plan, forward, lambda: boxed(whole), specialize=lambda missing: None)
    call([x])[0].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert seen == [False]


@pytest.mark.covers("F4.30")
@pytest.mark.parametrize(
    "tangent",
    [
        lambda: torch.ones(()).expand(2, 3),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(2, 6)[:, ::2],
        lambda: torch.randn(2, 3, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((2, 3)),
    ],
    ids=["expanded", "transposed", "gaps", "negated", "lazy zeros"],
)
def test_a_tangent_in_another_layout_is_brought_into_the_traced_one(how, tangent):
    x = torch.randn(2, 3, requires_grad=True)
    seen = []

    def backward(c, t):
        seen.append((t.stride(), t.is_neg(), t._is_zerotensor()))
        return [t * c]

    (out,) = bind_sine(how, x, backward=boxed(backward))([x])
    given = tangent()
    (grad,) = torch.autograd.grad(out, x, given)
    assert seen == [((3, 1), False, False)]
    torch.testing.assert_close(grad, (given.resolve_neg() + torch.zeros(2, 3)) * x.detach().cos())


@pytest.mark.covers("F4.32")
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
@pytest.mark.parametrize("allow_unused", [True, False])
def test_a_second_derivative_is_refused_and_never_silently_none(how, leaf, allow_unused):
    x = torch.randn(3, requires_grad=True)
    h = x if leaf else x * 2
    (out,) = bind_sine(how, h)([h])
    (grad,) = torch.autograd.grad(out.sum(), h, create_graph=True)
    torch.testing.assert_close(grad.detach(), h.detach().cos())
    for wanted in (x, h):
        with pytest.raises(DoubleBackwardError, match="second derivative"):
            torch.autograd.grad(grad.sum(), wanted, allow_unused=allow_unused, retain_graph=True)
    with pytest.raises(DoubleBackwardError):
        grad.sum().backward()


@pytest.mark.covers("F4.32")
def test_a_second_derivative_through_a_dead_input_and_through_the_tangent_is_refused(how):
    x = torch.randn(3, requires_grad=True)
    (out,) = bind_sine(how, x * 2)([x * 2])
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)
    tangent = torch.ones(3, requires_grad=True)
    (out,) = bind_sine(how, x)([x])
    (grad,) = torch.autograd.grad(out, x, tangent, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(grad.sum(), tangent, allow_unused=True)


def test_create_graph_without_a_second_derivative_works(how):
    x = torch.randn(3, requires_grad=True)
    (out,) = bind_sine(how, x)([x])
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(grad.detach(), x.detach().cos())
    assert grad.requires_grad


@pytest.mark.covers("F4.28")
def test_saved_symints_and_symbolic_tangents_reach_the_backward(how):
    x = torch.randn(4, 3, requires_grad=True)
    meta = records.TensorMeta("float32", "cpu", ("s0", 3), (3, 1), 0, True)
    record = GraphMetadata(
        inputs=(records.InputInfo(0, TENSOR, meta),),
        outputs=tuple(records.OutputInfo(i, FRESH, meta, graph_output=i) for i in range(2)),
        tangents=tuple(records.TangentInfo(i, meta) for i in range(2)),
        symbols=(records.SymbolBinding("s0", 0, "size", 0),),
        num_forward_outputs=2,
        forward_requires_grad=(True, True),
        differentiable_inputs=(0,),
        is_training=True,
    )
    plan = build_plan(record, num_saved_tensors=1, num_saved_symints=1)
    seen = []

    def backward(size, cosine, s, t):
        seen.append((size, tuple(t.shape)))
        return [s * cosine + t * 2]

    call = how(plan, boxed(lambda v: [v.sin(), v * 2, v.cos(), v.shape[0]]), boxed(backward))
    for rows in (4, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        call([x])[0].sum().backward()
        torch.testing.assert_close(x.grad, x.detach().cos())
    assert seen == [(4, (4, 3)), (7, (7, 3))]


@pytest.mark.covers("F4.36")
def test_compiled_code_runs_without_the_autocast_of_its_caller(how):
    seen = []

    def forward(v):
        seen.append(torch.is_autocast_enabled("cpu"))
        return [v.sin(), v.cos()]

    def backward(c, t):
        seen.append(torch.is_autocast_enabled("cpu"))
        return [t * c]

    x = torch.randn(3, requires_grad=True)
    call = bind_sine(how, x, forward=forward, backward=boxed(backward))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call([x])[0].sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


@pytest.mark.covers("F4.4", "F4.31")
def test_wrong_numbers_of_values_are_named(how):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CallingConventionError, match="compiled for 1 arguments, but there are 2"):
        bind_sine(how, x)([x, x])
    with pytest.raises(CallingConventionError, match="compiled for 2 forward results, but there are 1"):
        bind_sine(how, x, forward=lambda v: [v.sin()])([x])
    (out,) = bind_sine(how, x, backward=boxed(lambda c, t: [t, t]))([x])
    with pytest.raises(CallingConventionError, match="compiled for 1 gradients, but there are 2"):
        out.sum().backward()


def test_a_gradient_of_another_size_than_compiled_for_is_refused(how):
    x = torch.randn(3, requires_grad=True)
    call = bind_sine(how, x)
    other = torch.randn(2, requires_grad=True)
    (out,) = call([other])
    with pytest.raises(MetadataMismatchError, match="has sizes"):
        out.sum().backward()


def test_a_training_plan_needs_a_backward_and_a_tangent_for_each_differentiable_output(how):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(PlanError, match="needs a backward"):
        how(build_plan(sine_metadata(x), num_saved_tensors=1), boxed(lambda v: [v, v]))
    record = sine_metadata(x)
    broken = replace(record, tangents=())
    with pytest.raises(PlanError, match="no tangent"):
        build_plan(broken)


def test_a_transform_of_torch_func_is_refused(how):
    x = torch.randn(3, requires_grad=True)
    call = bind_sine(how, x)
    with pytest.raises(WrapperError, match=r"torch\.func transform"):
        torch.func.vmap(lambda v: call([v])[0])(torch.randn(2, 3))


def test_gradients_of_forward_mode_are_refused(how):
    x = torch.randn(3)
    call = bind_sine(how, x.clone().requires_grad_())
    with forward_ad.dual_level():
        with pytest.raises(WrapperError, match="dual tensors"):
            call([forward_ad.make_dual(x, torch.ones(3))])
        torch.testing.assert_close(call([x])[0].detach(), x.sin())


def test_gradients_of_gradients_in_forward_mode_are_refused(how):
    x = torch.randn(3, requires_grad=True)
    (result,) = bind_sine(how, x)([x])
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(torch.ones(3), torch.randn(3))
        with pytest.raises(WrapperError, match="dual tensors"):
            torch.autograd.grad(result, x, tangent, retain_graph=True)
        (gradient,) = torch.autograd.grad(result, x, torch.ones(3))
    torch.testing.assert_close(gradient, x.detach().cos())


@pytest.mark.covers("F1.24")
def test_what_the_backward_writes_to_is_handed_to_it_as_it_is_by_then_and_given_its_new_value(how):
    x, scale = torch.randn(3, requires_grad=True), torch.ones(3)
    sine = sine_metadata(x)
    late = records.InputInfo(1, TENSOR, meta_of(scale, False))
    writes = (records.BackwardWrite(1, version_steps=3),)
    plan = build_plan(replace(sine, inputs=(*sine.inputs, late), backward_writes=writes), num_saved_tensors=1)
    assert type(plan).from_json(plan.to_json()) == plan and "the backward writes to inputs (1,)" in str(plan)
    backward = boxed(lambda cosine, tangent, now: [tangent * cosine * now, now + 1])
    out = how(plan, boxed(lambda v, unread: [v.sin(), v.cos()]), backward)([x, scale])[0]
    scale.mul_(5)
    (grad,) = torch.autograd.grad(out, x, torch.ones(3), retain_graph=True)
    torch.testing.assert_close(grad, 5 * x.detach().cos())
    assert scale.tolist() == [6.0] * 3 and scale._version == 4
    torch.autograd.grad(out, x, torch.ones(3))
    assert scale.tolist() == [7.0] * 3 and scale._version == 7
