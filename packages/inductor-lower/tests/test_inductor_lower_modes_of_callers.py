"""Modes that are active around calls of compiled code: its own memory is none of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aotkit_inductor_lower import LowerOptions, compile_graph


class Dispatched(TorchDispatchMode):
    """Notes the operators that allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if "empty" in str(func) else []
        return func(*args, **(kwargs or {}))


class Elsewhere(TorchFunctionMode):
    """Gives other memory than was asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.empty_strided):
            return torch.empty(0)
        return func(*args, **(kwargs or {}))


def rows(x: torch.Tensor) -> list[torch.Tensor]:
    """Of which a temporary is kept in memory."""
    y = x.sin().cumsum(1)
    return [y.flip(0) @ y.t(), y.exp()]


MODES: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    "function mode": Elsewhere,
    "dispatch mode": Dispatched,
}


@pytest.mark.parametrize("options", [{}, {"redzones": True}], ids=["plain", "redzones"])
@pytest.mark.parametrize("mode", MODES)
def test_temporaries_are_memory_of_the_cpu_under_any_mode(mode: str, options: dict[str, Any]) -> None:
    """Under ``torch.set_default_device`` they were elsewhere, and kernels wrote to address 0."""
    x = torch.randn(6, 5)
    compiled = compile_graph(make_fx(rows, tracing_mode="fake")(x), options=LowerOptions(**options))
    with MODES[mode]() as active:
        results = compiled([x])
    torch.testing.assert_close(results, rows(x))
    assert not getattr(active, "seen", [])


@pytest.mark.parametrize("first", [True, False])
def test_memory_of_a_call_in_inference_mode_serves_other_calls(first: bool) -> None:
    """An operator that writes its result there raised."""
    x = torch.randn(6, 5)
    compiled = compile_graph(make_fx(lambda x: [(x.sin() @ x.t()).cos()], tracing_mode="fake")(x))
    for inference in (first, not first):
        with torch.inference_mode(inference), torch.no_grad():
            torch.testing.assert_close(compiled([x]), [(x.sin() @ x.t()).cos()])
