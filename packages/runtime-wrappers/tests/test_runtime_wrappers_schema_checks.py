"""Custom operators are looked at in the first call of compiled code, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from aotkit_runtime_wrappers import WrapperError, schema_checks


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("aotkit_test_checks", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")
        library.define("view(Tensor(a) x) -> Tensor(a)")
        library.impl("view", lambda x: x.view(-1), "CompositeExplicitAutograd")
        library.define("twice(Tensor x) -> (Tensor, Tensor)")
        library.impl("twice", lambda x: (x.clone(),) * 2, "CompositeExplicitAutograd")
        library.define("fresh(Tensor x) -> Tensor")
        library.impl("fresh", lambda x: x.clone(), "CompositeExplicitAutograd")
        yield library


def test_operators_that_promise_new_memory_are_found(library: torch.library.Library) -> None:
    ours = torch.ops.aotkit_test_checks
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(op, (x,)) for op in (ours.same.default, ours.view.default, torch.ops.aten.sin.default)]
    graph.output(calls)
    found = schema_checks.operators_to_check(fx.GraphModule(torch.nn.Module(), graph))
    assert found == {ours.same.default}


@pytest.mark.parametrize(("name", "message"), [("same", "memory of one of its inputs"), ("twice", "same memory twice")])
def test_an_operator_that_breaks_its_word_is_named(library: torch.library.Library, name: str, message: str) -> None:
    operator = getattr(torch.ops.aotkit_test_checks, name)
    run = schema_checks.checked_at_first_call(lambda args: [operator(*args)], [f"aotkit_test_checks.{name}.default"])
    with pytest.raises(WrapperError, match=f"aotkit_test_checks::{name}.*{message}"):
        run([torch.ones(2)])


def test_calls_after_the_first_are_not_watched(library: torch.library.Library) -> None:
    operators = [torch.ops.aotkit_test_checks.fresh, torch.ops.aotkit_test_checks.same]

    def call(args: list[Any]) -> list[Any]:
        return [operators[0](*args)]

    names = ["aotkit_test_checks.fresh.default", "aotkit_test_checks.same.default"]
    run = schema_checks.checked_at_first_call(call, names)
    x = torch.ones(2)
    assert run([x])[0] is not x
    del operators[0]
    assert run([x])[0] is x


def test_a_graph_may_hold_control_flow_beside_custom_operators(library: torch.library.Library) -> None:
    """A dispatch mode is an error to higher-order operators unless it says that it takes them."""
    fresh = torch.ops.aotkit_test_checks.fresh

    def call(args: list[Any]) -> list[Any]:
        (x,) = args
        return [torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (fresh(x),))]

    run = schema_checks.checked_at_first_call(call, ["aotkit_test_checks.fresh.default"])
    x = torch.ones(2)
    for _ in range(2):
        assert torch.equal(run([x])[0], x.sin())
