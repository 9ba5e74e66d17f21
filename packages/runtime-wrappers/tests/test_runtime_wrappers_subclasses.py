"""Wrappers taken apart before a dense graph and put together behind it."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import analyze
from aotkit_runtime_wrappers import WrapperPlan, bind, build_plan, interpret
from aotkit_runtime_wrappers.errors import AliasingChangedError, CallingConventionError

HOWS = pytest.mark.parametrize("how", [bind, interpret], ids=["bind", "interpret"])


def two(*numbers):
    return TwoTensor(torch.tensor(numbers), torch.tensor(numbers) * 10)


def compiled(how, function, dense, *examples):
    plan = build_plan(analyze(function, list(examples)))
    assert plan.call.subclasses is not None and WrapperPlan.from_json(plan.to_json()) == plan
    return how(plan, dense)


def doubled(x, y):
    return [x * 2 + y, y * 3, x]


def dense_doubled(a, b, y):
    return [a * 2 + y, b * 2 + y, y * 3]


@pytest.mark.covers("F6.1")
@HOWS
def test_the_graph_gets_what_is_inside_and_results_are_put_together(how):
    x, y = two(1.0, 2.0), torch.tensor([3.0, 4.0])
    call = compiled(how, doubled, dense_doubled, x, y)
    for _ in range(2):
        made, plain, same = call([x, y])
        assert type(made) is TwoTensor and type(plain) is torch.Tensor and same is x
        assert made.a.tolist() == [5, 8] and made.b.tolist() == [23, 44] and plain.tolist() == [9, 12]


@pytest.mark.covers("F6.1")
@HOWS
def test_without_elements_the_strides_of_an_argument_may_be_others_but_not_its_sizes(how):
    def empty(*sizes):
        return TwoTensor(torch.ones(sizes), torch.ones(sizes))

    call = compiled(how, lambda x, y: [x * 2], lambda a, b, y: [a * 2, b * 2], empty(0, 3), torch.ones(2))
    other = TwoTensor(*(torch.ones(0, 3).as_strided((0, 3), (5, 2)) for _ in range(2)))
    assert call([other, torch.ones(2)])[0].a.shape == (0, 3)
    with pytest.raises(CallingConventionError, match=r"its tensor a has sizes \(0, 4\)"):
        call([empty(0, 4), torch.ones(2)])


@pytest.mark.covers("F6.1")
@HOWS
def test_arguments_that_were_not_captured_like_this_are_refused(how):
    y = torch.tensor([3.0, 4.0])
    call = compiled(how, doubled, dense_doubled, two(1.0, 2.0), y)
    with pytest.raises(CallingConventionError, match=r"argument 0 .* it is a Tensor, not a TwoTensor"):
        call([torch.ones(2), y])
    with pytest.raises(CallingConventionError, match=r"its tensor a has sizes \(3,\)"):
        call([two(1.0, 2.0, 3.0), y])
    with pytest.raises(CallingConventionError, match=r"its tensor a is torch\.float64"):
        call([TwoTensor(torch.ones(2).double(), torch.ones(2).double()), y])
    with pytest.raises(CallingConventionError, match="its attribute a is a TwoTensor, not a plain tensor"):
        call([TwoTensor(two(1.0, 2.0), two(1.0, 2.0)), y])
    with pytest.raises(CallingConventionError, match="compiled for 3 forward results, but there are 2"):
        compiled(how, doubled, lambda a, b, y: [a, b], two(1.0, 2.0), y)([two(1.0, 2.0), y])


@pytest.mark.covers("F6.1")
@HOWS
def test_a_written_wrapper_gets_its_new_values_and_no_other_may_share_its_memory(how):
    def write(x, y):
        x.mul_(y)
        return [x.sum()]

    y = torch.tensor([3.0, 4.0])
    call = compiled(how, write, lambda a, b, y: [a * y, b * y, (a * y).sum(), (b * y).sum()], two(1.0, 2.0), y)
    x = two(1.0, 2.0)
    (total,) = call([x, y])
    assert x.a.tolist() == [3, 8] and x.b.tolist() == [30, 80] and total.a.item() == 11 and total.b.item() == 110
    with pytest.raises(AliasingChangedError):
        call([TwoTensor(y, torch.ones(2)), y])
