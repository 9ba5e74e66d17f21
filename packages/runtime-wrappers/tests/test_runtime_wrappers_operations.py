"""Operations one by one: what each says that it reads and writes is what its code reads and writes."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

from aotkit_functionalize import records
from aotkit_runtime_wrappers import WrapperError, WrapperPlan, operations
from aotkit_runtime_wrappers._size_text import evaluate_tree, parse_size, write_size
from aotkit_runtime_wrappers.dims import symbols_of
from aotkit_runtime_wrappers.errors import PlanError
from aotkit_runtime_wrappers.operations import OPERATIONS, functions_of
from aotkit_runtime_wrappers.operations.bases import BuildBase
from aotkit_runtime_wrappers.operations.checks import (
    CheckAliases,
    CheckDuplicate,
    CheckPlace,
    CheckStrides,
    CheckValue,
)
from aotkit_runtime_wrappers.operations.modes import SetGradMode
from aotkit_runtime_wrappers.operations.mutations import CopyBack, SetRequiresGrad, SetStrides
from aotkit_runtime_wrappers.operations.operation import Operation
from aotkit_runtime_wrappers.operations.storages import Resize, ResizeStorage, SetStorage
from aotkit_runtime_wrappers.operations.symbols import BindSymbol
from aotkit_runtime_wrappers.operations.versions import BumpVersion, BumpVersions, ReadVersion, SetVersion
from aotkit_runtime_wrappers.operations.views import MarkDynamic, ReplayView, SetLazyBits
from aotkit_runtime_wrappers.plan import CallSpec
from aotkit_runtime_wrappers.source import Source

SIZES = [
    ("-3", -3), ("--s0", 3), ("s0 - s1 - 1", 0), ("s0 - (s1 - 1)", 2), ("(s0 == s1) == False", True),
    ("s0 > 2 and s1 > 2", False), ("s0 > 2 and s1 > 1", True), ("s0 > 3 or s1 > 1", True),
]  # fmt: skip


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 58), (61, "x" * 56 + "...")])
def test_a_long_value_that_does_not_fit_is_cut_off_in_the_error(length: int, shown: str) -> None:
    raw = json.loads(WrapperPlan(0, (), CallSpec((), 0, ()), (), ()).to_json())
    raw["record"]["num_inputs"] = "x" * (length - 2)
    with pytest.raises(WrapperError) as refusal:
        WrapperPlan.from_json(json.dumps(raw))
    assert f"'{shown}" in str(refusal.value) and "x" * 59 not in str(refusal.value)
    assert ("..." in str(refusal.value)) == (length > 60)


@pytest.mark.parametrize(("text", "value"), SIZES)
def test_sizes_are_written_with_no_more_parentheses_than_they_need(text: str, value: Any) -> None:
    tree = parse_size(text)
    assert write_size(tree) == text and evaluate_tree(tree, {"s0": 3, "s1": 2}) == value
    assert type(tree) is (int if text == "-3" else tuple)


VIEW = records.ViewSpec("float32", ("s0", 2), (2, "s1"), "s0*2", False)
BITS = records.ViewSpec("float64", ("s0",), (1,), 0, True, detached=True, conj=True)
META = records.TensorMeta("float32", "cpu", ("s0", 3), ("s1", 1), 0, True)

EXAMPLES: list[Operation] = [
    CheckDuplicate("in1", "in0"),
    CheckPlace("in0", 4, 64),
    CheckAliases(("in0", "in1"), ("in2",)),
    CheckAliases(("in0", "in1"), ()),
    CheckAliases(("in0",), ("in1",), fixed=True),
    CheckValue("in0", "input 0", META),
    CheckValue("fw0", "output 0", META, check_strides=False, check_requires_grad=True),
    CheckStrides("fw0", ("s0", 1)),
    BindSymbol("s0", "in0", "size", 1),
    BindSymbol("s1", "in1", "int"),
    BindSymbol("s2", "fw0", "storage_offset"),
    BuildBase("base0", ("in0", "in1"), (VIEW, VIEW), symbols=("s0", "s1")),
    SetStorage("in0", "fw0"),
    SetStorage("in0", "in1", VIEW),
    Resize("in0", ("s0", 4)),
    ResizeStorage("in0", "s0*4"),
    SetStrides("in0", VIEW, no_grad=True),
    CopyBack("in0", "fw0"),
    CopyBack("in0", "fw0", "hidden"),
    CopyBack("in0", "fw0", "no_grad"),
    SetRequiresGrad("out0", True),
    SetRequiresGrad("in0", False),
    BumpVersion("in0", 3),
    BumpVersions(("in0", "in1"), 2),
    ReadVersion("version0", "in0"),
    SetVersion("in0", "version0", 2),
    ReplayView("out0", "in0", VIEW, "float32"),
    ReplayView("out0", "in0", VIEW, "int32", detach=True, set_requires_grad=True),
    ReplayView("out0", "fw1", VIEW, "float32", "view"),
    ReplayView("out0", "fw1", VIEW, "float32", "permute", (1, 0), lazy=True),
    ReplayView("out0", "fw1", BITS, "float64", "expand", history="fw2"),
    SetLazyBits("fw0", True, False),
    MarkDynamic("out0", (0, 1)),
    SetGradMode(False),
]


def named(operation: Operation) -> str:
    return f"{type(operation).__name__}-{EXAMPLES.index(operation)}"


def test_there_is_an_example_of_every_operation():
    assert {type(operation).__name__ for operation in EXAMPLES} == set(OPERATIONS)


@pytest.mark.parametrize("operation", EXAMPLES, ids=named)
def test_an_operation_is_frozen_data_that_prints_and_round_trips(operation: Operation):
    assert is_dataclass(operation) and type(operation).__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not hasattr(operation, "__dict__")
    plan = WrapperPlan(0, (operation,), CallSpec((), 0), (), ())
    assert WrapperPlan.from_json(plan.to_json()) == plan
    assert str(operation) and "object at" not in str(operation)


@pytest.mark.parametrize("operation", EXAMPLES, ids=named)
def test_emitted_code_reads_and_writes_what_the_operation_says(operation: Operation):
    source = Source()
    operation.emit_all([operation], source, 0)
    names = [node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Name)]
    loaded = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    if isinstance(operation, ReadVersion):  # into a list, which SetVersion takes
        assert stored == {"versions0"} and source.versions == {"(version0,)": "versions0"}
    else:
        assert stored == set(operation.writes)
    values = {name for name in loaded if not name.startswith("_")}
    assert values <= {*operation.reads, *operation.writes, *symbols_of(operation.dims_read)}
    assert values >= set(operation.reads)
    assert {name for name in loaded if name.startswith("_")} <= {*operation.functions, *source.constants}


@pytest.mark.parametrize("operation", EXAMPLES, ids=named)
def test_a_run_looks_up_what_the_operation_says(operation: Operation):
    """A dictionary that notes what is asked for; what then goes wrong with the tensors does not matter here."""

    class Noted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            asked.add(name)
            return super().__getitem__(name)

    asked: set[str] = set()
    numbers = {"s0": 2, "s1": 1, "version0": 0, "s2": 0}
    values = Noted({name: numbers.get(name, torch.zeros(4, 4)) for name in operation.reads})
    values.update({symbol: numbers[symbol] for symbol in symbols_of(operation.dims_read)})
    before = set(values)
    grad_mode = torch.is_grad_enabled()
    try:
        operation.run(values)
    except (RuntimeError, ValueError, AssertionError):
        pass
    finally:
        torch.set_grad_enabled(grad_mode)
    assert asked <= before
    assert set(values) - before <= set(operation.writes)


def test_what_operations_call_is_bound_once():
    declared: dict[str, Any] = {}
    for operation in OPERATIONS.values():
        for name, function in operation.functions.items():
            assert declared.setdefault(name, function) is function
    assert declared == functions_of(EXAMPLES)
    assert all(name.startswith("_") for name in declared)


def test_operations_are_those_that_the_modules_name():
    homes = {name: f"{operations.__name__}.{module}" for module, names in operations._MODULES.items() for name in names}
    assert {name: kind.__module__ for name, kind in OPERATIONS.items()} == homes
    for module in operations._MODULES:
        named_there = set(import_module(f"{operations.__name__}.{module}").__all__)
        assert named_there == set(operations._MODULES[module])
    modules = {module.name for module in pkgutil.iter_modules(operations.__path__)}
    assert modules == {*operations._MODULES, "operation"}


@pytest.mark.parametrize("raw", [{}, {"record": 3}, {"record": "Operation"}, {"record": "SetGradMode", "mode": 3}])
def test_what_is_no_operation_is_not_read(raw: dict[str, Any]):
    text = WrapperPlan(0, (SetGradMode(False),), CallSpec((), 0), (), ()).to_json()
    changed = json.loads(text)
    changed["record"]["prologue"] = [raw]
    with pytest.raises(PlanError, match="can't be read"):
        WrapperPlan.from_json(json.dumps(changed))


def test_a_plan_without_operations_imports_none_of_their_modules():
    code = """
import sys
from aotkit_runtime_wrappers import WrapperPlan, bind
from aotkit_runtime_wrappers.plan import CallSpec, Return
plan = WrapperPlan.from_json(WrapperPlan(1, (), CallSpec(("in0",), 1), (), (Return("fw0"),)).to_json())
assert bind(plan, lambda value: [2 * value])([21]) == [42]
print([name for name in sys.modules if ".operations." in name or name.endswith((".build", ".inputs", ".serialized"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in ast.literal_eval(done.stdout) if name.startswith("aotkit_runtime_wrappers")]
    assert sorted(loaded) == [f"{operations.__name__}.{name}" for name in ("operation", "symbols")]


def test_fields_of_operations_are_names_numbers_and_records():
    for operation in EXAMPLES:
        for field in fields(operation):  # type: ignore[arg-type]
            assert not isinstance(getattr(operation, field.name), list | dict | set | torch.Tensor)
