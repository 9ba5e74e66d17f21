"""Inputs whose storage changes: resize_, set_, assignment to .data, storages of sharded parameters.

torch 2.13's own stack returns no gradient after ``x.data = y``, crashes the process where a storage is emptied after
use, and refuses a tensor that is given another storage and then written to.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotkit
from aotkit_aot_trace import Unsupported

resize_storage = torch.ops.inductor.resize_storage_bytes_
Check = Callable[..., None]


def ten() -> list[Tensor]:
    return [torch.randn(10)]


def pair() -> list[Tensor]:
    return [torch.randn(6), torch.randn(6)]


def parameter_and_value() -> list[Tensor]:
    return [torch.randn(6, requires_grad=True), torch.randn(6)]


def longer_and_shorter() -> list[Tensor]:
    return [torch.randn(10), torch.randn(6)]


def enlarged(x: Tensor) -> Tensor:
    return x.resize_(20).zero_() + 1


def enlarged_and_returned(x: Tensor) -> Tensor:
    x.resize_(4, 5)
    return x.copy_(torch.arange(20.0).view(4, 5))


def enlarged_like(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.ones(3, 5)
    x.resize_as_(y).copy_(y)
    return x.view(-1), y + x


def made_smaller(x: Tensor) -> Tensor:
    return x.resize_(2, 2) + 1


@pytest.mark.covers("F1.70")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("fn", [enlarged, enlarged_and_returned, enlarged_like, made_smaller])
def test_an_input_resized_in_place_has_its_new_size_after_the_call(
    same_as_eager: Check, fn: Callable[..., object]
) -> None:
    same_as_eager(fn, ten)


def set_to_input(x: Tensor, y: Tensor) -> Tensor:
    x.set_(y)
    return x + 1


def set_then_written(x: Tensor, y: Tensor) -> Tensor:
    x.set_(y[2:])
    x.mul_(2)
    return y.view(2, 3)


def set_to_intermediate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.set_(y + 1)
    x.mul_(2)
    return x.view(-1), x


def set_and_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.set_(y)
    return x, x[1:]


@pytest.mark.covers("F1.8")
@pytest.mark.parametrize("fn", [set_to_input, set_then_written, set_to_intermediate, set_and_returned])
def test_an_input_set_to_another_storage_looks_at_it_after_the_call(
    captured_same_as_eager: Check, fn: Callable[..., object]
) -> None:
    captured_same_as_eager(fn, longer_and_shorter)


def data_of_input(x: Tensor, y: Tensor) -> Tensor:
    x.data = y
    return x * x


def data_of_intermediate(x: Tensor, y: Tensor) -> Tensor:
    x.data = y + 1
    return x * 2


def data_exchanged_and_put_back(x: Tensor, y: Tensor) -> Tensor:
    kept = x.data
    x.data = y * 2
    used = x * 3
    x.data = kept
    return used


def view_of_the_storage_in_between(x: Tensor, y: Tensor) -> Tensor:
    kept = x.data
    x.data = y + 1
    between = x.view(2, 3)
    x.data = kept
    return between


@pytest.mark.covers("F1.8", "F1.38")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("make", [pair, parameter_and_value])
@pytest.mark.parametrize("fn", [data_of_input, data_of_intermediate, data_exchanged_and_put_back])
def test_data_given_to_a_tensor_is_its_data_after_the_call(
    same_as_eager: Check, fn: Callable[..., object], make: Callable[[], list[Tensor]]
) -> None:
    same_as_eager(fn, make)


@pytest.mark.covers("F1.38")
def test_a_view_of_data_that_was_put_back_is_no_view_of_the_input(same_as_eager: Check) -> None:
    same_as_eager(view_of_the_storage_in_between, pair, lone_view=True)


@pytest.mark.covers("F4.6")
@pytest.mark.parametrize("change", [Tensor.t_, Tensor.squeeze_, lambda x: x.unsqueeze_(0)])
def test_data_copied_to_a_tensor_of_a_history_that_then_changes_its_shape(
    captured_same_as_eager: Check, change: Callable[[Tensor], Tensor]
) -> None:
    """The new value is a view of the old one, and cannot be used any more once autograd saw the change of shape."""

    def fn(x: Tensor) -> None:
        x.data.copy_(x)
        change(x)

    leaf = torch.randn(1, 4, requires_grad=True)
    captured_same_as_eager(fn, lambda: [leaf.clone()])


@pytest.mark.covers("F4.6")
def test_a_view_copied_to_itself_is_no_view_of_the_memory_it_is_copied_to(captured_same_as_eager: Check) -> None:
    def fn(x: Tensor) -> None:
        row = x.expand(1, 4)
        row.data.copy_(row)

    captured_same_as_eager(fn, lambda: [torch.randn(2, 4)[::2]])


@pytest.mark.covers("F1.9")
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_to_returned_data_does_not_count_as_one_to_the_tensor(grad: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.data, x.detach(), y, y.data, y.detach()

    seen = []
    for call in (fn, aotkit.aot_function(fn, lambda graph, inputs: graph)):
        x = torch.ones(3, requires_grad=grad)
        results = call(x)
        for result in results:
            result.detach().add_(1)
            seen.append([tensor._version for tensor in (x, *results)])
    assert seen[:5] == seen[5:]


def gathered(size: int, grad: bool) -> Callable[[], list[Tensor]]:
    """A parameter whose storage holds ``size`` elements, and the value that it is given."""

    def make() -> list[Tensor]:
        parameter = torch.randn(4, requires_grad=grad)
        parameter.untyped_storage().resize_(4 * size)
        return [parameter, torch.randn(4)]

    return make


def fill_use_and_free(p: Tensor, shard: Tensor) -> Tensor:
    with torch.no_grad():
        resize_storage(p, 16)
        p.copy_(shard)
    result = (p * p).sum()
    with torch.no_grad():
        resize_storage(p, 0)
    return result


def fill_and_use(p: Tensor, shard: Tensor) -> Tensor:
    with torch.no_grad():
        resize_storage(p, 16)
        p.copy_(shard)
    return p * 2


def use_and_free(p: Tensor, shard: Tensor) -> Tensor:
    result = p * shard
    resize_storage(p, 0)
    return result


@pytest.mark.covers("F1.11")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    "fn, size, grad",
    [
        (fill_use_and_free, 0, False),
        (fill_and_use, 0, False),
        (fill_and_use, 0, True),
        (use_and_free, 4, False),
    ],
)
def test_a_storage_that_is_filled_or_emptied_is_so_after_the_call(
    same_as_eager: Check, fn: Callable[..., object], size: int, grad: bool
) -> None:
    same_as_eager(fn, gathered(size, grad))


def test_a_gradient_through_a_storage_that_is_emptied_after_the_forward_is_right() -> None:
    """Eager mode needs a hook that fills the storage again; a functional graph saves the value."""
    p, shard = gathered(0, True)()
    aotkit.aot_function(fill_use_and_free, lambda graph, inputs: graph)(p, shard).backward()
    assert p.untyped_storage().nbytes() == 0
    torch.testing.assert_close(p.grad, 2 * shard)


def swapped(x: Tensor, y: Tensor) -> Tensor:
    kept = x.detach()
    x.set_(y)
    y.set_(kept)
    return x + 1


def resized_then_set(x: Tensor, y: Tensor) -> Tensor:
    resize_storage(x, 0)
    x.set_(y)
    return x + 1


def set_then_resized(x: Tensor, y: Tensor) -> Tensor:
    x.set_(y)
    result = x * 2
    resize_storage(x, 0)
    return result


def view_that_outlives(x: Tensor, y: Tensor) -> Tensor:
    view = x.view(-1)
    x.set_(y)
    return view


def resized_under_a_view(x: Tensor, y: Tensor) -> Tensor:
    view = x[2:]
    x.resize_(20)
    return view + y[2:]


@pytest.mark.covers("F1.12")
def test_a_storage_may_be_set_and_then_resized() -> None:
    x, y = pair()
    want = y * 2
    torch.testing.assert_close(aotkit.aot_function(set_then_resized, lambda graph, inputs: graph)(x, y), want)
    assert x.untyped_storage()._cdata == y.untyped_storage()._cdata
    assert x.untyped_storage().nbytes() == 0


@pytest.mark.covers("F1.12")
@pytest.mark.parametrize(
    "fn, message",
    [
        (resized_then_set, "the storage of input 0 is resized, and then the input is given another one"),
        (swapped, "inputs 0 and 1 are both given other storages"),
        (view_that_outlives, "output 0 is a view of the storage that an input had before"),
        (resized_under_a_view, r"a tensor of sizes \(6,\) is resized to \(20,\) and has views"),
    ],
)
def test_changes_of_storage_that_cannot_be_carried_out_are_refused(fn: Callable[..., object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        aotkit.aot_function(fn, lambda graph, inputs: graph)(*pair())
