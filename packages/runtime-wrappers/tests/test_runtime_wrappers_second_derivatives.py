"""``create_graph=True`` where the gradients are graphs themselves, against eager mode."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import analyze
from aotkit_runtime_wrappers import DoubleBackwardError, WrapperOptions, build_plan
from aotkit_runtime_wrappers.double_backward import Gradients, refusing

pytestmark = pytest.mark.covers("F4.32")


def _boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    run._boxed_call = True
    return run


class Wrapped:
    """``function`` with a backward and with gradients that run it again under autograd.

    ``saves`` are the numbers of inputs that the forward saves; ``needs`` those without which there are no gradients.
    """

    def __init__(
        self,
        how: Callable[..., Any],
        function: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        saves: Sequence[int] = (0,),
        needs: Sequence[int] = (),
        options: WrapperOptions | None = None,
        dynamic: bool = False,
    ) -> None:
        self.function, self.saves, self.needs = function, saves, needs
        self.metadata = analyze(function, args, dynamic=dynamic)
        self.requests: list[Any] = []
        self.calls = 0
        plan = build_plan(
            self.metadata,
            num_saved_tensors=len(args),
            num_saved_symints=2,
            saved_inputs=[i if i in saves else -1 for i in range(len(args))],
            options=options,
        )
        gradients = Gradients(self.metadata, self._compile)
        self.call = how(plan, _boxed(self._forward), _boxed(self._backward), gradients=gradients)

    def __call__(self, *args: Any) -> list[Any]:
        return self.call(list(args))

    def _forward(self, *inputs: Any) -> list[Any]:
        kept = [v if isinstance(v, Tensor) else torch.tensor(float(v)) for v in inputs]
        self.scalars = {i: v for i, v in enumerate(inputs) if not isinstance(v, Tensor)}
        saved = [v if i in self.saves else v * 1 for i, v in enumerate(kept)]
        with torch.no_grad():
            outputs = self.function(*[v.detach() if isinstance(v, Tensor) else v for v in inputs])
        return [*outputs, *saved, 5, 6]

    def _backward(self, five: int, six: int, *args: Tensor) -> list[Tensor | None]:
        assert (five, six) == (5, 6)
        count = len(self.metadata.inputs)
        inputs = [self.scalars.get(i, v.detach().requires_grad_()) for i, v in enumerate(args[:count])]
        with torch.enable_grad():
            outputs = self.function(*inputs)
        return self._grad(outputs, inputs, args[count:], range(count))

    def _grad(self, outputs: Any, inputs: Any, tangents: Any, wanted: Any, missing: Any = (), **options: Any) -> Any:
        values = [outputs[t.forward_output] for n, t in enumerate(self.metadata.tangents) if n not in missing]
        leaves = [i for i in wanted if i in self.metadata.differentiable_inputs]
        found = torch.autograd.grad(values, [inputs[i] for i in leaves], tangents, allow_unused=True, **options)
        grads = dict(zip(leaves, found, strict=True))
        return [grads.get(i) for i in wanted]

    def _compile(self, request: Any) -> Any:
        self.requests.append(request)
        for number in self.needs:
            if number in request.lost:
                raise RuntimeError(f"input {number}: {request.lost[number]}")
        count = len(self.metadata.inputs)

        def gradients(*args: Any) -> list[Tensor | None]:
            self.calls += 1
            inputs, saved, tangents = args[:count], args[count : 2 * count], args[2 * count :]
            for number, value in enumerate(inputs):
                if isinstance(value, Tensor) and number not in request.lost:
                    torch.testing.assert_close(saved[number].detach(), value.detach())
            with torch.enable_grad():
                outputs = self.function(*inputs)
                wanted = self.metadata.differentiable_inputs
                return self._grad(outputs, inputs, tangents, wanted, request.missing, create_graph=True)

        return _boxed(gradients)


def product(x: Tensor, w: Tensor) -> list[Tensor]:
    return [(x * w).sin(), (x * x).sum() * w]


def _arguments(computed: bool, n: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(n)
    leaves = [torch.randn(n, 2, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    return leaves, [leaf * 2 if computed else leaf for leaf in leaves]


def _derivatives(function: Callable[..., Any], computed: bool, which: Sequence[int], n: int = 3) -> list[Tensor]:
    """Of the first, second and third order, of some outputs, also with respect to the tangents."""
    leaves, args = _arguments(computed, n)
    results = function(*args)
    outputs = [results[k] for k in which]
    tangents = [torch.linspace(1, 2, o.numel(), dtype=torch.float64).view(o.shape).requires_grad_() for o in outputs]
    first = torch.autograd.grad(outputs, args, tangents, create_graph=True)
    second = torch.autograd.grad([g.square().sum() for g in first], [*leaves, *tangents], create_graph=True)
    third = torch.autograd.grad([g.sin().sum() for g in second], [*leaves, *tangents])
    return [*first, *second, *third]


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("keep_inputs", [False, True])
@pytest.mark.parametrize("saves", [(0, 1), (0,), ()])
@pytest.mark.parametrize("computed", [False, True], ids=["leaves", "computed"])
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)], ids=str)
def test_higher_derivatives_are_those_of_eager_mode(
    how: Any, which: Any, computed: bool, saves: Any, keep_inputs: bool
) -> None:
    expected = _derivatives(product, computed, which)
    options = WrapperOptions(keep_inputs=keep_inputs)
    wrapped = Wrapped(how, product, _arguments(computed)[1], saves=saves, needs=(0, 1), options=options)
    for _ in range(2):
        torch.testing.assert_close(_derivatives(wrapped, computed, which), expected)
    (request,) = wrapped.requests  # one graph for both calls
    assert wrapped.calls == 2
    assert request.missing == tuple(k for k in (0, 1) if k not in which) and not request.lost
    assert [t.requires_grad for t in request.tangents] == [True] * len(which)


def test_gradients_are_compiled_for_each_kind_of_call(how: Any) -> None:
    wrapped = Wrapped(how, product, _arguments(False)[1])
    for which in [(0,), (1,), (0, 1), (0,)]:
        torch.testing.assert_close(_derivatives(wrapped, False, which), _derivatives(product, False, which))
    assert [r.missing for r in wrapped.requests] == [(1,), (0,), ()]
    leaves, _ = _arguments(False)
    outputs = wrapped(*leaves)
    torch.autograd.grad([o.sum() for o in outputs], leaves, create_graph=True)
    assert [t.requires_grad for t in wrapped.requests[-1].tangents] == [False, False]


def test_sizes_that_vary_are_told_by_their_symbols(how: Any) -> None:
    wrapped = Wrapped(how, product, _arguments(True)[1], dynamic=True)
    sizes = []
    for n in (3, 5, 4):
        torch.testing.assert_close(_derivatives(wrapped, True, (0, 1), n), _derivatives(product, True, (0, 1), n))
        sizes.append(dict(wrapped.requests[-1].symbols))
    assert len(wrapped.requests) == 3
    for found, n in zip(sizes, (3, 5, 4), strict=True):
        assert sorted(found.values()) == sorted([n, 2]) or list(found.values()) == [n]


def scaled(x: Tensor, factor: int) -> list[Tensor]:
    return [x.sin() * factor]


def test_numbers_are_given_to_the_gradients_as_they_are(how: Any) -> None:
    def derivatives(function: Any) -> Any:
        x = torch.linspace(0, 1, 3).requires_grad_()
        (grad,) = torch.autograd.grad(function(x, 3)[0].sum(), x, create_graph=True)
        return grad, *torch.autograd.grad(grad.sum(), x)

    wrapped = Wrapped(how, scaled, [torch.ones(3, requires_grad=True), 3])
    torch.testing.assert_close(derivatives(wrapped), derivatives(scaled))
    assert wrapped.requests[0].inputs[1] == 3


def _lost(how: Any, after: Callable[[Tensor], Any] | None, x_is_leaf: bool = True) -> Any:
    """A gradient of ``product`` by ``w`` after ``x``, which the forward does not save, is freed or written to."""
    w = torch.ones(3, 2, requires_grad=True)
    x = torch.full((3, 2), 2.0)
    wrapped = Wrapped(how, product, [x, w], saves=(1,), needs=(0,))
    first, _ = wrapped(x, w)
    if after is not None:
        after(x)
    else:
        del x
        gc.collect()
    (grad,) = torch.autograd.grad(first.sum(), w, create_graph=True)
    torch.testing.assert_close(grad.detach(), (torch.full((3, 2), 2.0) * w.detach()).cos() * 2)
    return wrapped, w, grad


@pytest.mark.parametrize("after", [None, lambda x: x.add_(1)], ids=["freed", "written to"])
def test_a_graph_that_needs_what_is_gone_has_no_second_derivative_and_says_why(how: Any, after: Any) -> None:
    wrapped, w, grad = _lost(how, after)
    assert list(wrapped.requests[0].lost) == [0]
    stand_in = wrapped.requests[0].inputs[0]
    assert stand_in.is_meta and stand_in.shape == (3, 2) and stand_in.stride() == (2, 1)
    assert stand_in.dtype == torch.float32
    with pytest.raises(DoubleBackwardError, match=r"input 0: .* been freed or written to since the forward") as caught:
        torch.autograd.grad(grad.sum(), w, allow_unused=True)
    assert "torch.compiler.disable" in str(caught.value) and isinstance(caught.value.__cause__, DoubleBackwardError)
    w2 = torch.ones(3, 2, requires_grad=True)
    first, _ = wrapped(torch.full((3, 2), 2.0), w2)
    torch.autograd.grad(first.sum(), w2, create_graph=True)
    assert len(wrapped.requests) == 1  # the refusal is remembered


def test_an_input_that_is_alive_and_unchanged_is_at_hand(how: Any) -> None:
    wrapped, w, grad = _lost(how, lambda x: x.sum())
    assert not wrapped.requests[0].lost
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), w)[0], -(2 * w.detach()).sin() * 4)


def test_an_input_of_inference_mode_is_at_hand(how: Any) -> None:
    with torch.inference_mode():
        x = torch.full((3, 2), 2.0)
    w = torch.ones(3, 2, requires_grad=True)
    wrapped = Wrapped(how, lambda x, w: [w.sin() * 3, w * 2], [torch.ones(3, 2), w], saves=(1,))
    (grad,) = torch.autograd.grad(wrapped(x, w)[0].sum(), w, create_graph=True)
    assert not wrapped.requests[0].lost
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), w)[0], -3 * w.detach().sin())


def test_an_error_of_another_kind_is_named_and_first_derivatives_are_right(how: Any) -> None:
    def fail(request: Any) -> Any:
        raise KeyError("gone")

    x = torch.linspace(0, 1, 3).requires_grad_()
    wrapped = Wrapped(how, scaled, [x, 2])
    wrapped._compile = fail
    plan_call = how(wrapped.call.plan, _boxed(wrapped._forward), _boxed(wrapped._backward),
                    gradients=Gradients(wrapped.metadata, fail))  # fmt: skip
    (grad,) = torch.autograd.grad(plan_call([x, 2])[0].sum(), x, create_graph=True)
    torch.testing.assert_close(grad.detach(), 2 * x.detach().cos())
    with pytest.raises(DoubleBackwardError, match="first derivatives only: KeyError: 'gone'"):
        grad.sum().backward()


@pytest.mark.parametrize("saves", [(0,), ()])
def test_under_hooks_of_the_user_nothing_is_kept_that_they_would_see(how: Any, saves: Any) -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    leaf = torch.linspace(0, 1, 3).requires_grad_()
    x = leaf * 2
    wrapped = Wrapped(how, scaled, [x, 2], saves=saves)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = wrapped(x, 2)
    assert packed == [(3,), ()]  # what the forward saves
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(grad.detach(), 2 * x.detach().cos())
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), leaf)[0], -4 * x.detach().sin())


def test_what_is_kept_for_its_history_holds_no_memory(how: Any) -> None:
    leaf = torch.linspace(0, 1, 3).requires_grad_()
    x = leaf * 2
    wrapped = Wrapped(how, scaled, [x, 2], saves=(), needs=(0,))
    (out,) = wrapped(x, 2)
    before = x.detach().clone()
    reference = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x
    gc.collect()
    assert reference.expired()
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert list(wrapped.requests[0].lost) == [0]
    torch.testing.assert_close(grad.detach(), 4 * before.cos())
    with pytest.raises(DoubleBackwardError, match="input 0"):
        grad.sum().backward()


def test_a_leaf_where_the_captured_one_was_computed_is_found_by_its_edge(how: Any) -> None:
    wrapped = Wrapped(how, scaled, [torch.ones(3, requires_grad=True) * 1, 2], saves=())
    x = torch.linspace(0, 1, 3).requires_grad_()
    (grad,) = torch.autograd.grad(wrapped(x, 2)[0].sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], -2 * x.detach().sin())


def test_a_wrong_number_of_gradients_is_named_under_create_graph_too(how: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    wrapped = Wrapped(how, scaled, [x, 2])
    call = how(wrapped.call.plan, _boxed(wrapped._forward), _boxed(lambda *args: [None]))
    with pytest.raises(RuntimeError, match="compiled for 2 gradients, but there are 1"):
        torch.autograd.grad(call([x, 2])[0].sum(), x, create_graph=True)


def test_first_derivatives_under_create_graph_do_without_the_autocast_of_the_caller(how: Any) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    seen = []

    def backward(five: int, six: int, x: Tensor, two: Tensor, tangent: Tensor) -> list[Tensor | None]:
        seen.append(torch.mm(x, x).dtype)
        return [tangent, None]

    wrapped = Wrapped(how, scaled, [x, 2])
    call = how(wrapped.call.plan, _boxed(wrapped._forward), _boxed(backward))
    (out,) = call([x, 2])
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert seen == [torch.float32]


def test_one_gradient_of_several_refuses_to_be_differentiated():
    (x, w), _ = _arguments(False)
    boxed = _boxed(lambda x, w: [(x * w).detach(), None, x.sin() * w])
    compiled = refusing(boxed, {0: "for a reason", 1: "no gradient"})
    args = [x, w]
    refused, missing, fine = compiled(args)
    assert missing is None and not args
    torch.testing.assert_close(refused.detach(), (x * w).detach())
    (derivative,) = torch.autograd.grad(fine.sum(), x, retain_graph=True)
    torch.testing.assert_close(derivative, x.cos() * w)
    for loss in (refused.sum(), (refused * fine).sum()):
        with pytest.raises(DoubleBackwardError, match="no derivative of this one: for a reason"):
            torch.autograd.grad(loss, x, allow_unused=True, retain_graph=True)
