"""Fakes of inputs that are made without torch's converter are those that it makes; others go through it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit.frontend.plain_fakes import new_fake_like, plain_inputs, plain_twin

PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "a tensor": lambda: torch.randn(3, 4),
    "a parameter": lambda: nn.Parameter(torch.randn(5)),
    "one without gradients": lambda: nn.Parameter(torch.randn(5), requires_grad=False),
    "transposed memory": lambda: torch.empty_strided((3, 4, 5), (1, 15, 3)),
    "a number": lambda: torch.tensor(2.0),
    "integers": lambda: torch.arange(6),
    "bfloat16 in channels-last memory": lambda: (
        torch.randn(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last)
    ),
    "complex numbers": lambda: torch.randn(3, dtype=torch.complex64),
    "a leaf that requires a gradient": lambda: torch.randn(2, 2, requires_grad=True),
}


def _with_gradient() -> torch.Tensor:
    made = torch.randn(3, requires_grad=True)
    made.grad = torch.ones(3)
    return made


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "a view": lambda: torch.randn(3, 4)[1:],
    "a detached view": lambda: torch.randn(3, 4)[1:].detach(),
    "all of its base": lambda: torch.randn(3, 4).view(12),
    "elements that repeat": lambda: torch.randn(3, 1).expand(3, 4),
    "every second element": lambda: torch.empty_strided((3,), (2,)),
    "nothing": lambda: torch.randn(0, 3),
    "no leaf": lambda: torch.randn(3, requires_grad=True) * 2,
    "one with a gradient": _with_gradient,
    "one of inference mode": _of_inference,
    "a conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
}


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Everything that a compile asks of a fake."""
    told = [
        (type(t), t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.requires_grad, t.is_leaf, t._version,
         isinstance(t, nn.Parameter), t.untyped_storage().nbytes(), t._is_view())
        for t in (got, want)
    ]  # fmt: skip
    return told[0] == told[1]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_tensor_has_the_fake_that_torch_makes(name: str) -> None:
    value, mode = PLAIN[name](), FakeTensorMode(shape_env=ShapeEnv())
    assert plain_inputs([value, 3, None]) == {id(value)}
    made = plain_twin(value, mode, None)
    assert made is not None and made.fake_mode is mode
    want = mode.from_tensor(value, static_shapes=True)
    assert same(made, want)
    again = new_fake_like(made)
    assert again.untyped_storage()._cdata != made.untyped_storage()._cdata
    assert (again.shape, again.stride(), again.dtype, again.device) == (
        want.shape,
        want.stride(),
        want.dtype,
        want.device,
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_go_through_torchs_converter(name: str) -> None:
    plain, other = torch.randn(2), OTHERS[name]()
    assert plain_inputs([plain, other]) == {id(plain)}


def test_tensors_that_share_memory_go_through_torchs_converter() -> None:
    base = nn.Parameter(torch.randn(4))
    twin = nn.Parameter(base.data)
    assert plain_inputs([base, twin]) == frozenset()
    assert plain_inputs([base]) == {id(base)}
    assert plain_inputs([base, base]) == frozenset()


def test_beside_a_subclass_nothing_is_plain() -> None:
    class Sub(torch.Tensor):
        pass

    assert plain_inputs([torch.randn(2), torch.randn(2).as_subclass(Sub)]) == frozenset()


def test_sizes_that_may_change_go_through_torchs_converter() -> None:
    value, mode = torch.randn(3, 4), FakeTensorMode(shape_env=ShapeEnv())
    fixed = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * 2)
    changing = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    assert isinstance(plain_twin(value, mode, fixed), FakeTensor)
    assert plain_twin(value, mode, changing) is None
    assert (
        plain_twin(
            value, mode, StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * 2, view_base_context=fixed)
        )
        is None
    )


def _args(generator: random.Random) -> list[torch.Tensor]:
    """Weights, some of which share memory, one in a gradient and one in pieces."""
    base = torch.randn(8, 8, dtype=torch.float64)
    kinds: list[Callable[[], Any]] = [
        lambda: nn.Parameter(torch.randn(8, 8, dtype=torch.float64)),
        lambda: nn.Parameter(base.data),
        lambda: nn.Parameter(base.t()),
        lambda: base,
        lambda: base[2:].detach(),
        lambda: torch.randn(8, 8, dtype=torch.float64, requires_grad=True),
    ]
    return [generator.choice(kinds)() for _ in range(4)]


@pytest.mark.parametrize("seed", range(12))
def test_weights_that_may_share_memory_compile_to_what_eager_does(seed: int) -> None:
    torch.manual_seed(seed)
    args = _args(random.Random(seed))

    def f(*args: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            args[0].mul_(2)
        total = args[0].new_zeros(())
        for number, arg in enumerate(args, 1):
            total = total + (arg * number).sin().sum()
        return total

    def run(call: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[Any]:
        out = call(*given)
        wanted = [a for a in given if a.requires_grad]
        grads = torch.autograd.grad(out, wanted) if wanted else ()
        return [out.detach(), *grads, *(a.detach().clone() for a in given)]

    before = [a.detach().clone() for a in args]
    want = run(f, args)
    for arg, old in zip(args, before, strict=True):
        with torch.no_grad():
            arg.copy_(old)
    torch._dynamo.reset()
    options = {"fallback": "error", "cache": False}
    try:
        got = run(torch.compile(f, backend="aotkit", options=options, fullgraph=True), args)
    except BackendCompilerFailed as refusal:  # what writes to memory that a trained tensor has too
        assert "share memory" in str(refusal)
        return
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
