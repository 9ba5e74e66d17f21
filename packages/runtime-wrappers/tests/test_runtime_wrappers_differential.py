"""Wrapped functions against eager: results, aliasing, inputs afterwards, autograd state, gradients."""

from __future__ import annotations

import pytest
import torch


def mul_returning_view(x, w):
    x.mul_(2)
    return x.view(-1), (x * w).sum()


def transposes_its_input(x, w):
    x.t_()
    return (x.t() * w,)


def transposes_and_writes(x, w):
    x.t_()
    x.add_(1)
    return (x.t() * w,)


def writes_a_view(x, w):
    x[0].add_(w[0])
    return (x * w,)


def returns_its_input(x, w):
    return x, w, x * w


def mutates_and_returns_it(x, w):
    x.add_(w.detach())
    return x, x[1:], w * 2


def views_of_an_intermediate(x, w):
    y = (x * w).sin()
    return y[0], y[1:].t(), y.view(-1)[::2]


def view_of_an_output(x, w):
    y = x * w
    return y, y.t(), y[0], y.view(-1)


def detached_view(x, w):
    return w.detach().view(-1), w.view(-1) * x.view(-1)


def hidden_mutation(x, w):
    x.data.mul_(3)
    return (x * w,)


def detached_mutation(x, w):
    x.detach().mul_(3)
    return (x * w,)


def mutation_under_no_grad(x, w):
    with torch.no_grad():
        x.mul_(3)
    return (x * w,)


def differentiable_value_into_a_buffer(x, w):
    x.copy_(w * 2)
    return ((x * x).sum(),)


def integers_and_constants(x, w):
    return (x * w).argmax(), None, 3, "text", (x * w).sum(), True


def same_output_twice(x, w):
    y = x * w
    return y, y, y.sum()


def only_an_alias(x, w):
    return w.view(-1), x.t()


def unused_output_is_differentiable(x, w):
    return (x * w).sum(), (w * w).sum(), w.sin()


def permuted_tangent(x, w):
    return ((x * w).t(), (x + w).t().contiguous().t())


def float_of_complex(x, w):
    z = torch.complex(x * w, w)
    return torch.view_as_real(z), z.abs()


def clone_then_mutate(x, w):
    z = x.t().clone() * w.t()
    x.add_(1)
    return (z,)


def leaves_grad_mode_off(x, w):
    y = x * w
    torch.set_grad_enabled(False)
    return y, x * 2


FUNCTIONS = [value for value in list(globals().values()) if callable(value) and getattr(value, "__code__", None)]


def _arguments(grad, non_leaf_x):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator)
    w = torch.randn(3, 4, generator=generator)
    if grad:
        w.requires_grad_()
    leaf = x
    if non_leaf_x:
        leaf = x.requires_grad_()
        x = leaf * 1
    return leaf, x, w


def _observe(call, grad, non_leaf_x):
    """Everything about one call that a caller could notice, as comparable values."""
    leaf, x, w = _arguments(grad, non_leaf_x)
    versions = x._version, w._version
    sources = [s for s in (leaf, w) if s.requires_grad]  # as they are before the call
    try:
        outputs = list(call(x, w))
        mode = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    tensors = [(f"out{i}", o) for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)]
    named = [("x", x), ("w", w), *tensors]
    seen = {"grad mode": mode, "plain": [o for o in outputs if not isinstance(o, torch.Tensor)]}
    seen["versions moved"] = (x._version > versions[0], w._version > versions[1])
    for name, t in named:
        seen[name] = (t.size(), t.stride(), t.storage_offset() if name in "xw" else None, t.dtype, t.requires_grad)
        seen[name, "is leaf"] = t.is_leaf
        seen[name, "identity"] = [other for other, o in named if o is t]
        storage = t.untyped_storage().data_ptr()
        seen[name, "shares"] = [other for other, o in named if o.untyped_storage().data_ptr() == storage]
        # Whether a view of a tensor that takes no part in autograd was detached first is not on record.
        seen[name, "view of"] = [other for other, o in named if t._base is o and o.requires_grad]
    values = {name: t.detach().clone() for name, t in named}
    seen["values"] = values
    wanted = [t for _, t in named if t.requires_grad and t.grad_fn is not None]
    if wanted and sources:
        loss = sum((t * torch.arange(1, t.numel() + 1).view(t.size())).abs().sum() for t in wanted if t.numel())
        grads = torch.autograd.grad(loss, sources, allow_unused=True)
        seen["grads"] = list(grads)
    with torch.no_grad():  # what shows when an output is changed afterwards
        for name, t in tensors:
            if t.is_floating_point():
                t.mul_(2)
                seen[name, "after a write"] = {other: o.detach().clone() for other, o in named}
    return seen


def _compare(expected, found):
    assert expected.keys() == found.keys()
    for key, want in expected.items():
        if isinstance(want, dict) or key == "grads":
            torch.testing.assert_close(found[key], want, msg=lambda m, key=key: f"{key}: {m}", equal_nan=True)
        else:
            assert found[key] == want, key


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize(
    ("grad", "non_leaf_x"), [(False, False), (True, False), (True, True)], ids=["inference", "training", "both"]
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.covers("F4.2", "F4.5", "F4.6", "F4.9", "F4.26", "F4.27", "F4.29")
def test_a_wrapped_function_is_indistinguishable_from_eager(compile_eagerly, how, function, grad, non_leaf_x):
    try:
        expected = _observe(function, grad, non_leaf_x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        expected = None
    _, x, w = _arguments(grad, non_leaf_x)
    try:
        compiled = compile_eagerly(function, [x, w], how=how)
    finally:
        torch.set_grad_enabled(True)
    found = _observe(lambda *args: compiled.call(list(args)), grad, non_leaf_x)
    if expected is not None:
        _compare(expected, found)
