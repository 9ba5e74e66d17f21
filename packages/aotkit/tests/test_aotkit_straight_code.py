"""Functions in two parts around a call of a graph: together they do what the function does, or there are none."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from aotkit.artifact.straight_code import straight_code

STRAIGHT = sys.version_info[:2] == (3, 11)  # what other versions have their instructions for may be no straight code
LOG: list[Any] = []
settings = types.SimpleNamespace(asked=False)
helpers = types.SimpleNamespace(begin=lambda: None, note=lambda *args, **kwargs: LOG.append((args, kwargs)))


def graph(*args: Any) -> list[Any]:
    return [("graph", *args), 2]


class Owner:
    def __init__(self) -> None:
        self.parts = {"a": [3, {"weight": 4}], "b": 5}
        self.seen = 0


def plain(owner, x):
    return graph(x, owner.parts["a"][1]["weight"], owner.parts["b"])[0]


def twice(owner, x):
    found = owner.parts
    a = found["a"]
    return [graph(a[0], a[1]["weight"], x)[0]]


def begun(owner, x):
    helpers.begin()
    parts = owner.parts
    result = graph(parts["b"])
    return (result[0], parts["a"][0], x)


def marked(owner, x):
    """As Dynamo does from torch 2.15 on."""
    entered = None
    if settings.asked:
        entered = helpers.begin()
    value = owner.parts["b"]
    if entered is not None:
        helpers.begin()
    return graph(x, value)[0]


def marked_always(owner, x):
    entered = 7
    if not settings.asked:
        entered = helpers.begin()
    value = owner.parts["b"]
    if entered is None:
        helpers.begin()
    return graph(x, value)[0]


def with_effects(owner, x):
    first, second = graph(x, owner.seen)
    owner.seen = second
    owner.parts["b"] = first
    helpers.note(owner.parts["b"], second, last=x)
    more = [first]
    more.extend([second])
    return {"a": more, "b": (x, None)}


def changed_between(owner, x):
    before = owner.parts["b"]
    results = graph(before)
    owner.parts = {"a": 0, "b": 1}
    return (before, owner.parts["b"], results)


def a_global(owner, x):
    result = graph(x)
    return (LOG, helpers, result)


def a_loop(owner, x):
    for _ in range(2):
        x = graph(x)
    return x


def a_condition(owner, x):
    return graph(x) if owner else None


def computed(owner, x):
    return graph(x + 1)


def asked_of_an_argument(owner, x):
    value = owner.parts["b"]
    if x is None:
        value = owner.seen
    return graph(value)


def called_before(owner, x):
    helpers.note(x)
    return graph(x)


def changed_before(owner, x):
    owner.seen = 7
    return graph(owner.seen)


def a_constant(owner, x):
    return graph(x, 1)


def two_calls(owner, x):
    return graph(graph(x))


def no_call(owner, x):
    return owner


def a_method(owner, x):
    return graph(x).index(2)


def caught(owner, x):
    try:
        return graph(x)[9]
    except IndexError:
        return 8


def gathered(owner, *args, **kwargs):
    return graph(args[0], kwargs["y"])[0]


def many(owner, *x):
    return graph(*x)


def generated(owner, x):
    yield graph(x)


def by_keyword(owner, x):
    return graph(x=x)


def inner(owner, x):
    return lambda: graph(x, owner)


def names_of_ours(owner, x):
    return (graph(x), _rest_result)  # noqa: F821


def an_attribute_of_a_number(owner, x):
    first, second = graph(x, owner.seen)
    owner.seen = (7).real
    return [first, second, (-3).real]


STRAIGHT_ONES = (
    plain,
    twice,
    begun,
    marked,
    marked_always,
    with_effects,
    changed_between,
    a_global,
    a_method,
    an_attribute_of_a_number,
)
OTHERS = (
    a_loop,
    a_condition,
    asked_of_an_argument,
    computed,
    called_before,
    changed_before,
    a_constant,
    two_calls,
    no_call,
    caught,
)
MORE = (many, generated, by_keyword, inner, names_of_ours)


def follow(path: Any, scope: dict[str, Any]) -> Any:
    value: Any = scope[path[0][1]]
    for kind, key in path[1:]:
        value = getattr(value, key) if kind == "attr" else value[key]
    return value


@pytest.mark.parametrize("function", STRAIGHT_ONES, ids=lambda f: f.__name__)
def test_both_parts_do_what_the_function_does(function: Any) -> None:
    code = straight_code(function, "graph", [helpers.begin])
    if not STRAIGHT and code is None:
        return
    assert code is not None
    LOG.clear()
    expected_owner = Owner()
    expected, expected_log = function(expected_owner, 9), [*LOG]
    LOG.clear()
    owner = Owner()
    scope = dict(zip(function.__code__.co_varnames, (owner, 9), strict=False))
    values = [follow(path, scope) for path in code.arguments]
    kept = [follow(path, scope) for path in code.kept]
    assert code.rest(graph(*values), kept) == expected
    assert (owner.parts, owner.seen, LOG) == (expected_owner.parts, expected_owner.seen, expected_log)


@pytest.mark.parametrize("function", OTHERS + MORE, ids=lambda f: f.__name__)
def test_what_does_more_is_not_straight(function: Any) -> None:
    assert straight_code(function, "graph", [helpers.begin]) is None
    assert straight_code(plain, "graph") is not None or not STRAIGHT


def test_arguments_that_are_gathered() -> None:
    code = straight_code(gathered, "graph")
    if code is None:
        assert not STRAIGHT
        return
    scope = {"args": (3,), "kwargs": {"y": 4}}
    assert [follow(path, scope) for path in code.arguments] == [3, 4]
    assert code.rest(graph(3, 4), ()) == gathered(None, 3, y=4)


def test_a_helper_that_is_not_known_to_do_nothing() -> None:
    assert straight_code(begun, "graph") is None
