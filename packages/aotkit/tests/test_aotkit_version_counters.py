"""Programs that read or set version counters themselves."""

from __future__ import annotations

import warnings

import pytest
import torch

import aotkit


def _set_back(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    before = w._version
    w.copy_(x.cos() - 2)
    torch._C._autograd._unsafe_set_version_counter((w,), (before,))
    return w, before


def _not_counted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kept = w.tanh()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.copy_(x)
    return kept * x


def _of_a_new_tensor(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    made = w - x
    made.mul_(3)
    return made, made._version


def _computes_with_it(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * w._version + w


def _sizes_of_it(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.add_(x)
    return torch.full((w._version,), 2.0)


@pytest.mark.parametrize("program", [_set_back, _not_counted, _of_a_new_tensor, _computes_with_it, _sizes_of_it])
@pytest.mark.parametrize("grad", [False, True])
def test_what_needs_counters_gives_what_eager_mode_gives(program, grad: bool):
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=aotkit.make_backend(aotkit.Options(cache=False)))

    def run(function, times: int):
        leaf, x = torch.full((3,), 0.5, requires_grad=grad), torch.linspace(-1, 1, 3)
        w = leaf if program is _not_counted else leaf * 2
        with torch.no_grad():
            for _ in range(times):
                w.add_(1)
        result = function(w, x)
        first = result[0] if isinstance(result, tuple) else result
        if first.requires_grad:
            first.sum().backward()
        return result, leaf.grad, w.detach(), w._version

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for times in (2, 0):
            torch.testing.assert_close(run(compiled, times), run(program, times))
    assert any("version counter" in str(w.message) for w in caught if w.category is aotkit.EagerFallback)
    assert not any("bug" in str(w.message) for w in caught)


def test_the_counter_of_an_argument_that_is_only_returned_needs_no_eager_mode():
    torch._dynamo.reset()

    def program(w):
        return w + 1, w._version

    compiled = torch.compile(program, backend=aotkit.make_backend(aotkit.Options(cache=False, fallback="error")))
    for times in (1, 3):
        w = torch.zeros(2)
        for _ in range(times):
            w.add_(1)
        torch.testing.assert_close(compiled(w), program(w))
