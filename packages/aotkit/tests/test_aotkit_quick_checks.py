"""Facts about a call that are written out as a function: it says yes only where the walk over all facts does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from aotkit import GuardError
from aotkit._tensors_alike import tensors_alike
from aotkit.artifact import saved_checks
from aotkit.artifact.graph_inputs import GraphInput, InputCheck, InputContract
from aotkit.artifact.module_settings import ModuleSettings, settings_of
from aotkit.artifact.saved_checks import code_digest, tree_of_rows
from aotkit.artifact.values import value_to_json


class Plain:
    """An object whose attributes are its own."""

    on_class = 3


class Slotted:
    __slots__ = ("a", "b")


class Computed(Plain):
    """An attribute that its class computes, whatever is in the dictionary of the object."""

    @property
    def a(self) -> Any:
        return self.__dict__.get("hidden", 0)


class Told(Plain):
    def __getattribute__(self, name: str) -> Any:
        return 7 if name == "b" else object.__getattribute__(self, name)


CONSTANTS: tuple[Any, ...] = (None, True, False, 0, 1, 0.0, -0.0, 1.5, "a", "b", torch.float32, torch.device("cpu"))
NAMES = ("a", "b", "c")


def random_value(random: Random, depth: int) -> Any:
    kind = random.choice(("constant", "constant", "object", "dict", "list")) if depth else "constant"
    if kind == "constant":
        return random.choice(CONSTANTS)
    inner = [random_value(random, depth - 1) for _ in range(random.randrange(1, 4))]
    if kind == "list":
        return inner
    named = dict(zip(NAMES, inner, strict=False))
    if kind == "dict":
        return named
    value = random.choice((Plain, Plain, Slotted, Computed, Told))()
    for name, held in named.items():
        if isinstance(value, Slotted):
            if name != "c":
                setattr(value, name, held)
        else:
            value.__dict__[name] = held
    return value


def random_rows(random: Random, value: Any, path: list[Any]) -> list[Any]:
    """Facts that hold for a value and for what is in it; of a container also its class, as Dynamo has it."""
    rows: list[Any] = []
    if isinstance(value, dict | list) or random.random() < 0.6:
        rows.append([path, "type", [type(value).__module__, type(value).__qualname__]])
    if isinstance(value, dict | list):
        rows.append([path, "length", len(value)])
        rows += [[path, "empty", None]] * (not value)
    if not isinstance(value, list):
        rows.append([path, "hasattr", ["on_class", hasattr(value, "on_class")]])
    if isinstance(value, dict) or hasattr(value, "__dict__"):
        held = value if isinstance(value, dict) else vars(value)
        rows += [[path, "contains", [name, name in held]] for name in NAMES if random.random() < 0.5]
    if isinstance(value, dict):
        rows.append([path, "keys", list(value)])
    if type(value) in {type(constant) for constant in CONSTANTS}:
        rows.append([path, "equal", value_to_json(value)])
    for step, held in inside(value):
        rows += random_rows(random, held, [*path, list(step)])
    return rows


def inside(value: Any) -> list[tuple[tuple[str, Any], Any]]:
    if isinstance(value, dict):
        return [(("item", name), held) for name, held in value.items()]
    if isinstance(value, list):
        return [(("item", k), held) for k, held in enumerate(value)]
    if isinstance(value, Plain | Slotted):
        named = [(("attr", name), name) for name in (*NAMES, "on_class") if hasattr(value, name)]
        return [(step, saved_checks._step(value, *step)) for step, _ in named]
    return []


def all_owners(value: Any) -> list[Any]:
    found = [value] if isinstance(value, dict | list | Plain | Slotted) else []
    for _, held in inside(value):
        found += all_owners(held)
    return found


def change(random: Random, value: Any) -> None:
    """Something else somewhere in the value: another constant, one that is equal, a new name, one less, a class."""
    owner, new = random.choice(all_owners(value)), random_value(random, random.randrange(3))
    how = random.randrange(4)
    if isinstance(owner, list):
        if how == 0:
            owner.append(new)
        elif owner:
            owner[random.randrange(len(owner))] = new
        return
    if how == 1 and isinstance(owner, Plain) and type(owner) is not Told:
        owner.__class__ = random.choice((Plain, Computed))
        return
    name = random.choice((*NAMES, "hidden", "on_class"))
    if isinstance(owner, Slotted):
        setattr(owner, random.choice(("a", "b")), new)
        return
    held = owner if isinstance(owner, dict) else vars(owner)
    if how == 0:
        held.pop(name, None)
    else:
        held[name] = new


def message(check: Callable[[Any], None], scope: Any) -> str | None:
    try:
        check(scope)
    except GuardError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_out_refuses_what_the_walk_refuses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_checks, "MOST_WRITTEN", 1 << 30)
    random, refused, quick = Random(seed), 0, 0
    for _ in range(12):
        value = random_value(random, 3)
        while not all_owners(value):
            value = random_value(random, 3)
        tree = tree_of_rows(random_rows(random, value, [["local", "x"]]))
        tree.check_often({"x": value})
        for _ in range(12):
            scope = {"x": copy.deepcopy(value)}
            change(random, scope["x"])
            expected = message(tree.check, scope)
            assert tree._quick is not None
            quick += tree._quick(scope)
            assert message(tree.check_often, scope) == expected
            refused += expected is not None
    assert refused > 10 and quick > 10


def test_two_paths_to_one_object_are_compared_in_every_call() -> None:
    one = Plain()
    scope = {"x": [one, one]}
    paths = [[["local", "x"], ["item", k]] for k in range(2)]
    tree = tree_of_rows([[paths[0], "type", [Plain.__module__, "Plain"]], [paths[0], "same", paths[1]]])
    tree.check_often(scope)
    tree.check_often(scope)
    scope["x"][1] = Plain()
    with pytest.raises(GuardError, match="are two objects"):
        tree.check_often(scope)


def test_a_missing_argument_is_told_by_name() -> None:
    tree = tree_of_rows([[[["local", "x"]], "equal", 1]])
    tree.check_often({"x": 1})
    with pytest.raises(GuardError, match="the argument x is missing"):
        tree.check_often({})


def test_callers_that_alternate_between_two_classes_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes the facts out for its own class, a few times."""
    written: list[int] = []
    whole = saved_checks.write_out
    monkeypatch.setattr(saved_checks, "write_out", lambda *given: (written.append(1), whole(*given))[1])
    tree = tree_of_rows([[[["local", "x"], ["attr", "c"]], "equal", 1]])
    values = Plain(), Computed()
    for value in values:
        value.__dict__["c"] = 1
    for turn in range(100):
        tree.check_often({"x": values[turn % 2]})
    assert len(written) == saved_checks.MOST_WRITTEN
    values[0].__dict__["c"] = 2
    with pytest.raises(GuardError):
        tree.check_often({"x": values[0]})


def test_threads_that_check_at_once_refuse_their_own_values_only() -> None:
    tree = tree_of_rows([[[["local", "x"], ["attr", "c"]], "equal", 1]])
    wrong: list[int] = []

    def work(held: int) -> None:
        value = Plain() if held else Computed()
        value.__dict__["c"] = held
        for _ in range(300):
            if (message(tree.check_often, {"x": value}) is None) is not bool(held):
                wrong.append(held)

    threads = [threading.Thread(target=work, args=(held,)) for held in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_in_another_mode_than_before_are_not_told_alike() -> None:
    values = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2, 2))]
    alike = tensors_alike(values)
    assert alike is not None and alike(*values) and alike(torch.ones(3), values[1])
    assert not alike(values[0], values[0]) and not alike(values[1], values[0])
    with torch.inference_mode():
        assert not alike(*values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not alike(*values)
    assert tensors_alike([torch.zeros(2), 3]) is None


def test_what_the_contract_refuses_is_refused_after_a_call_that_passed() -> None:
    """Also ``requires_grad`` where gradients are off, and strides of dimensions of one element."""
    weight, cache = torch.randn(4, 3, requires_grad=True), torch.randn(1, 5)
    check = InputCheck(
        InputContract(
            [
                GraphInput("weight", "tensor", "torch.float32", (4, 3), (3, 1), "cpu", True),
                GraphInput("cache", "tensor", "torch.float32", (1, 5), (5, 1), "cpu"),
            ]
        )
    )
    other = torch.empty_strided((1, 5), (1, 1))
    with torch.no_grad():
        for _ in range(3):
            check([weight, cache])
            with pytest.raises(GuardError, match="requires_grad"):
                check([weight.detach(), cache])
            with pytest.raises(GuardError, match="stride"):
                check([weight, other])
            with pytest.raises(GuardError, match="requires_grad"):
                check([weight, cache.clone().requires_grad_()])


def test_a_digest_of_code_is_that_of_no_other_code() -> None:
    def plain(a: Any, b: Any) -> Any:
        return a - b

    def by_name(a: Any, *, b: Any) -> Any:
        return a - b

    functions = [lambda x: x * 1 + 23, lambda x: x * 12 + 3, lambda x: x * 1.0 + 23, plain, by_name]
    assert len({code_digest(f.__code__) for f in functions}) == len(functions)


def test_a_digest_of_code_is_the_same_in_every_process() -> None:
    def chosen(x: int) -> bool:
        return x in {0, 8}

    orders = frozenset([0, 8]), frozenset([8, 0])
    assert repr(orders[0]) != repr(orders[1])  # as those of texts are from process to process
    made = [chosen.__code__.replace(co_consts=(None, order)) for order in orders]
    assert code_digest(made[0]) == code_digest(made[1])


@pytest.mark.parametrize("compiled, given", [(True, 1), (1, True), ([2, True], [2, 1]), ({"k": (1,)}, {"k": (True,)})])
def test_a_truth_value_is_not_the_number_that_it_is_equal_to(compiled: Any, given: Any) -> None:
    tree = tree_of_rows([([["local", "x"]], "equal", value_to_json(compiled))])
    for check in (tree.check, tree.check_often, tree.check_often):
        check({"x": copy.deepcopy(compiled)})
        with pytest.raises(GuardError):
            check({"x": given})


@pytest.mark.parametrize(
    "before, after", [(1, True), (1, 1.0), (True, 1), ((1, 2), (1, 2.0)), ([1, (2,)], [1, (True,)])]
)
def test_a_setting_of_another_type_is_another_setting(before: Any, after: Any) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    model[0].scale = before
    settings = ModuleSettings(settings_of(model))
    for _ in range(2):
        settings.check(model)
    model[0].scale = after
    with pytest.raises(GuardError, match="scale"):
        settings.check(model)
    model[0].scale = before
    settings.check(model)
