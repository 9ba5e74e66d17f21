"""Custom operators that break the word of their schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aotkit_runtime_wrappers import WrapperError


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("aotkit_test_aliases", "FRAGMENT") as library:
        yield library


def define(library: torch.library.Library, name: str, schema: str, implementation: Callable[..., object]) -> None:
    library.define(f"{name}{schema}")
    library.impl(name, implementation, "CPU")


@pytest.mark.covers("F4.12")
@pytest.mark.parametrize("lowering", ["kernels", "none"])
@pytest.mark.parametrize("how", ["itself", "a view", "twice"])
def test_a_custom_operator_that_returns_what_its_schema_does_not_say_is_named_at_the_first_call(
    library: torch.library.Library, how: str, lowering: str
) -> None:
    if how == "twice":
        define(library, "broken", "(Tensor x) -> (Tensor, Tensor)", lambda x: (lambda y: (y, y[:1]))(x + 1))
        library.impl("broken", lambda x: (torch.empty_like(x), torch.empty_like(x[:1])), "Meta")
    else:
        define(library, "broken", "(Tensor x) -> Tensor", lambda x: x if how == "itself" else x.view_as(x))
        library.impl("broken", torch.empty_like, "Meta")

    def fn(x: Tensor) -> Tensor:
        result = torch.ops.aotkit_test_aliases.broken(x * 2)
        return result + 1 if isinstance(result, Tensor) else result[0] + 1

    options = {"fallback": "error", "lowering": lowering}
    compiled = torch.compile(fn, backend="aotkit", options=options)
    with pytest.raises(WrapperError, match="custom operator aotkit_test_aliases::broken returns"):
        compiled(torch.randn(4))


@pytest.mark.covers("F4.12")
def test_a_custom_operator_that_keeps_its_word_is_looked_at_once(library: torch.library.Library) -> None:
    modes: list[int] = []

    def implementation(x: Tensor) -> Tensor:
        modes.append(torch._C._len_torch_dispatch_stack())
        return x + 1

    define(library, "honest", "(Tensor x) -> Tensor", implementation)
    library.impl("honest", torch.empty_like, "Meta")
    compiled = torch.compile(
        lambda x: torch.ops.aotkit_test_aliases.honest(x * 2) * 3, backend="aotkit", options={"fallback": "error"}
    )
    x = torch.randn(4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), (x * 2 + 1) * 3)
    assert len(modes) == 3 and modes[1:] == [0, 0]


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_the_check_of_a_gradient_scaler_is_compiled(bad: float) -> None:
    """Its operator gives a list beside a tensor."""

    def fn(a: Tensor, b: Tensor, found: Tensor, inverse: Tensor) -> Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_([a, b], found, inverse)
        return torch.where(found > 0, 0.0, a.sum() + b.sum())

    def arguments() -> list[Tensor]:
        return [torch.arange(3.0), torch.ones(2, 3).t() + bad, torch.zeros(1), torch.tensor([0.5])]

    given, wanted = arguments(), arguments()
    found = torch.compile(fn, backend="aotkit", options={"fallback": "error"})(*given)
    torch.testing.assert_close([found, *given], [fn(*wanted), *wanted], equal_nan=True)
