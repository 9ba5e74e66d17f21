"""Plans with a random state by seed and offset, and plans whose fake calls get fake results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_functionalize import analyze, records
from aotkit_runtime_wrappers import WrapperError, WrapperPlan, bind, build_plan, unboxed
from aotkit_runtime_wrappers.forward_adapters import _reading_memory
from aotkit_runtime_wrappers.placed_arguments import placed
from aotkit_runtime_wrappers.plan import LazyInput
from aotkit_runtime_wrappers.refinements import RandomState, plan_fake_results, plan_random_state

TensorMeta = records.TensorMeta


def reloaded(plan: WrapperPlan) -> WrapperPlan:
    again = WrapperPlan.from_json(plan.to_json())
    assert again == plan
    return again


def boxed(function: Callable[..., list[Any]]) -> Callable[[list[Any]], list[Any]]:
    def run(args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()
        return function(*values)

    run._boxed_call = True
    return run


def noise(like, seed, offset):
    """A generator by counter: number ``offset + i`` of the stream ``seed``, and the offset behind the last one."""
    counter = offset + torch.arange(like.numel())
    mixed = (counter * 2654435761 + seed * 40503) % 1000003
    return ((mixed * 7919) % 65537).view(like.shape).to(like.dtype) / 65537, offset + like.numel()


class Stream:
    def __init__(self, seed: int) -> None:
        self.seed, self.offset, self.reads = seed, torch.tensor(0), 0

    def get(self):
        self.reads += 1
        return torch.tensor(self.seed), self.offset

    def set_offset(self, offset) -> None:
        self.offset = offset


def scaled(x, w):
    x.add_(1)
    return (x * w,)


def test_plans_without_state_and_fakes_bind_the_compiled_code_itself():
    plan = build_plan(analyze(scaled, [torch.ones(3), torch.ones(3)]))
    forward = boxed(scaled)
    assert bind(plan, forward).__globals__["_forward"] is forward


@pytest.mark.covers("F4.13")
@pytest.mark.parametrize("returns_offset", [False, True])
def test_seed_and_offset_go_in_behind_the_inputs_and_the_next_offset_comes_out(how, returns_offset: bool):
    x, w = torch.arange(6.0).view(2, 3), torch.full((2, 3), 2.0)
    meta = analyze(scaled, [x.clone(), w])
    lengths = []

    def forward(x, w, seed, offset):
        drawn, offset = noise(x, seed, offset)
        new = x + 1
        return [new, new * w + drawn, offset]

    if returns_offset:
        meta = replace(meta, num_forward_outputs=3, forward_requires_grad=(*meta.forward_requires_grad, False))
    plan = plan_random_state(build_plan(meta), RandomState(2, returns_offset=returns_offset))
    assert "next offset is forward result 2" in str(plan)
    stream, expected = Stream(3), Stream(3)

    def counted(args):
        results = boxed(forward)(args)
        lengths.append(len(results))
        return results

    counted._boxed_call = True
    run = unboxed(how(reloaded(plan), counted, random=stream))
    for call in range(1, 3):
        before = x.clone()
        results = run(x, w)
        drawn, expected.offset = noise(x, *expected.get())
        assert len(results) == 1
        torch.testing.assert_close(x, before + 1)
        torch.testing.assert_close(results[0], x * w + drawn)
        assert stream.offset == expected.offset == 6 * call and stream.reads == call
    assert lengths == [3, 3]


@pytest.mark.covers("F4.13")
def test_forward_and_backward_each_draw_and_move_the_offset(how):
    def f(x, w):
        return (x * w,)

    x, w = torch.arange(1.0, 5.0), torch.ones(4, requires_grad=True)

    def forward(x, w, seed, offset):
        mask, offset = noise(x, seed, offset)
        return [x * w * mask, offset, x, mask]

    def backward(x, mask, tangent, seed, offset):
        extra, offset = noise(x, seed, offset)
        return [None, tangent * x * mask + extra, offset]

    plan = build_plan(analyze(f, [x, w]), num_saved_tensors=2)
    plan = plan_random_state(plan, RandomState(1, backward_offset=2))
    stream = Stream(5)
    run = unboxed(how(reloaded(plan), boxed(forward), lambda: boxed(backward), random=stream))
    mask, after = noise(x, torch.tensor(5), torch.tensor(0))
    (y,) = run(x, w)
    assert stream.offset == after == 4
    torch.testing.assert_close(y, x * w * mask)
    extra, after = noise(x, torch.tensor(5), after)
    y.sum().backward()
    assert stream.offset == after == 8
    torch.testing.assert_close(w.grad, x * mask + extra)


@pytest.mark.covers("F4.13")
def test_a_forward_that_fails_or_returns_too_little_leaves_the_offset(how):
    plan = plan_random_state(build_plan(analyze(scaled, [torch.ones(2), torch.ones(2)])), RandomState(2))
    stream = Stream(1)

    def fails(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        how(plan, boxed(fails), random=stream)([torch.ones(2), torch.ones(2)])
    with pytest.raises(WrapperError, match="3 forward results"):
        how(plan, boxed(lambda *_: [torch.ones(2)]), random=stream)([torch.ones(2), torch.ones(2)])
    assert stream.offset == 0


def test_random_states_that_fit_no_plan_are_refused(how):
    plan = build_plan(analyze(scaled, [torch.ones(2), torch.ones(2)]))
    with pytest.raises(WrapperError, match="forward result 3 of 0 to 2"):
        plan_random_state(plan, RandomState(3))
    with pytest.raises(WrapperError, match="no backward"):
        plan_random_state(plan, RandomState(1, backward_offset=0))
    with pytest.raises(WrapperError, match="give bind the state"):
        how(plan_random_state(plan, RandomState(2)), boxed(scaled))


def dense(sizes, strides) -> TensorMeta:
    return TensorMeta("torch.float32", "cpu", sizes, strides, 0, False)


def products(x, w):
    x.add_(1)
    y = x * w
    return y, y.view(-1), w.sum()


def never(*_: Any):
    raise AssertionError("compiled code ran on fake tensors")


@pytest.mark.covers("F4.14")
def test_a_fake_call_gets_the_strides_of_the_compiled_code_and_the_next_call_is_real(how):
    def f(x, w):
        x.add_(1)
        y = x * w
        return y, y.sum(0)

    calls = []

    def forward(x, w):  # a backend that likes columns
        assert not any(isinstance(v, FakeTensor) for v in (x, w))
        calls.append(x)
        new = x + 1
        y = (new * w).t().contiguous().t()
        return [new, y, y.sum(0), x, w]

    def backward(x, w, *tangents):
        return [None, (x + 1) * (tangents[0] + tangents[1])]

    x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    meta = analyze(f, [x.clone(), w])
    rows, columns = dense((3, 4), (4, 1)), dense((3, 4), (1, 3))
    plan = build_plan(meta, num_saved_tensors=2)
    plan = reloaded(plan_fake_results(plan, meta, [rows, columns, dense((4,), (1,)), rows, rows]))
    run = unboxed(how(plan, boxed(forward), lambda: boxed(backward)))

    mode = FakeTensorMode()
    fake_x, fake_w = mode.from_tensor(x), mode.from_tensor(w)
    first = run(fake_x, fake_w)
    assert not calls and all(isinstance(v, FakeTensor) and v.fake_mode is mode for v in first)
    assert first[0].stride() == (1, 3) and first[0].shape == (3, 4) and first[1].stride() == (1,)
    assert first[0].requires_grad and fake_x._version == 1
    with mode:
        assert run(fake_x, fake_w)[0].stride() == (1, 3)

    before = x.clone()
    y, total = run(x, w)
    assert len(calls) == 1 and type(y) is torch.Tensor
    assert y.stride() == first[0].stride() and total.stride() == first[1].stride()
    torch.testing.assert_close((x, y), (before + 1, (before + 1) * w))


@pytest.mark.covers("F4.14")
def test_fake_results_are_symbolic_where_the_arguments_are_and_epilogues_run_on_them(how):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5, 4), static_shapes=False)
    meta = analyze(lambda x: ((x * 2), x.view(-1)), [x])
    rows = next(o.meta for o in meta.outputs if o.meta is not None)
    assert isinstance(rows.sizes[0], str)
    columns = dense(rows.sizes, (1, rows.sizes[0]))
    plan = reloaded(plan_fake_results(build_plan(meta), meta, [columns]))
    doubled, view = unboxed(how(plan, boxed(never)))(x)
    assert isinstance(doubled.shape[0], torch.SymInt) and doubled.shape[0] is not x.shape[0]
    assert doubled.shape[0].node.expr == x.shape[0].node.expr
    assert str(doubled.stride()) == f"(1, {x.shape[0]})"
    assert view._base is x and isinstance(view, FakeTensor)


def test_fake_results_that_fit_no_plan_are_refused():
    meta = analyze(products, [torch.ones(2, 2), torch.ones(2, 2)])
    plan = build_plan(meta)
    with pytest.raises(WrapperError, match="1 results are described"):
        plan_fake_results(plan, meta, [dense((2, 2), (2, 1))])
    with pytest.raises(WrapperError, match="which no input gives"):
        plan_fake_results(plan, meta, [dense(("s9", 2), (2, 1))] * plan.call.num_forward_outputs)


@pytest.mark.parametrize("negated", [True, False])
def test_where_a_lazy_input_lies_is_asked_anew(negated: bool) -> None:
    """One that comes with other bits than at capture is copied, and so lies elsewhere than the wrapper was told."""
    given = torch.ones(3)
    args = placed([torch._neg_view(given) if negated else given, torch.ones(2)])
    seen: list[Any] = []

    def forward(box: list[Any]) -> list[Any]:
        addresses = getattr(box, "addresses", None) or tuple(value.data_ptr() for value in box)
        seen.extend(zip(addresses, [value.data_ptr() for value in box], strict=True))
        seen.append((box[0].tolist(), [1.0] * 3 if negated else [-1.0] * 3))
        return []

    _reading_memory([LazyInput(0, conj=False, neg=True)], forward)(args)
    assert len(seen) == 3 and all(found == expected for found, expected in seen)
