"""Programs in parts as data: they read back and run as they did, and what does not hold together is refused."""

from __future__ import annotations

import gc
import json
import math
import operator
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import cond, while_loop
from torch._higher_order_ops._invoke_quant import InvokeQuant
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program
from aotkit_inductor_lower.errors import BindError, InputMismatchError
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.launch_plan.functions import find_function, function_name
from aotkit_inductor_lower.launch_plan.parts import (
    PartitionedProgram,
)
from aotkit_inductor_lower.launch_plan.program_text import program_from_json, program_to_json, programs_in
from aotkit_inductor_lower.runtime import bind_parts

aten = torch.ops.aten


def branches(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    first = cond(x.sum() > 0, lambda x, w: (x @ w).sin() + 1, lambda x, w: (x @ w).cos() * 2, (x, w))
    return [first * 3, x + 1]


def with_constants(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    scale = torch.tensor([1.0, 2.0, 3.0])
    return [cond(x.sum() > 0, lambda x, s: x * s, lambda x, s: x - s, (x @ w, scale)) * scale]


def loop(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return list(while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * 1.5).sin()), (torch.tensor(0), x @ w)))


def decided(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    def again(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cond(y.sum() > 0, lambda i: i < 3, lambda i: i < 2, (i,))

    return list(while_loop(again, lambda i, y: (i + 1, y - i), (torch.tensor(0), x @ w)))


def counted(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    at = torch.nonzero(x > 0)
    more = torch.ones(at.shape[0], dtype=torch.float64, device="cpu") * w.sum()
    return [x[at[:, 0], at[:, 1]].exp() * more, at.float() * 0.5, x[:1, None, ..., ::2] * complex(1, float("inf"))]


PROGRAMS = {fn.__name__: fn for fn in (branches, with_constants, loop, decided, counted)}


def values(sign: float = 1.0) -> list[torch.Tensor]:
    return [torch.linspace(-1, 2, 12).reshape(4, 3) * sign, torch.linspace(0.1, 1, 9).reshape(3, 3)]


def compiled(fn: Callable[..., Any], mode: str = "symbolic") -> CompiledParts:
    found = compile_to_program(make_fx(fn, tracing_mode=mode)(*values()), options=LowerOptions(verify=True))
    assert isinstance(found, CompiledParts) and found.program is not None, found
    return found


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reads_back_and_runs_as_eager_does(name: str, mode: str) -> None:
    fn = PROGRAMS[name]
    made = compiled(fn, mode)
    text = program_to_json(made.program)
    read = program_from_json(text)
    assert isinstance(read, PartitionedProgram) and program_to_json(read) == text
    assert [*programs_in(read)] == [*programs_in(made.program)] != []
    call = bind_parts(read, made.constants)
    for sign in (1.0, -1.0):
        torch.testing.assert_close(call(values(sign)), fn(*values(sign)), equal_nan=True)


def test_constants_that_several_parts_hold_are_one() -> None:
    made = compiled(with_constants)
    assert len(made.constants) == 1 and len({tensor.data_ptr() for tensor in made.constants.values()}) == 1
    with pytest.raises(BindError, match="constant tensors"):
        bind_parts(made.program, {})


def test_inputs_are_let_go_while_the_graph_runs() -> None:
    """As of any compiled graph: the list is emptied, and a value dies behind its last use."""
    made = compiled(counted)
    call = bind_parts(made.program, made.constants)
    args = values()
    x = weakref.ref(args[0])
    results = call(args)
    assert args == []
    del results[2]  # a view of x would keep it
    gc.collect()
    assert x() is None


def test_parts_look_at_what_they_are_given_where_that_is_asked_for() -> None:
    graph = make_fx(branches, tracing_mode="fake")(*values())
    call = compile_graph(graph)
    with pytest.raises(InputMismatchError):
        call([torch.ones(4, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)])


def regions(between: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.GraphModule:
    """A nested region that is called with an input, and with what is computed of its result."""
    x = values()[0]
    graph = make_fx(lambda x: [between(x.sin()).cos()], tracing_mode="fake")(x)
    graph.region = make_fx(lambda x: [(x * 2).sigmoid()], tracing_mode="fake")(x)
    for node in graph.graph.find_nodes(op="call_function", target=aten.sin.default) + graph.graph.find_nodes(
        op="call_function", target=aten.cos.default
    ):
        with graph.graph.inserting_before(node):
            region = graph.graph.get_attr("region")
            call = graph.graph.call_function(torch.ops.higher_order.invoke_subgraph, (region, "region", node.args[0]))
            call.meta["val"] = (node.meta["val"],)
            result = graph.graph.call_function(operator.getitem, (call, 0))
            result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


@pytest.mark.parametrize(
    ("between", "known"),
    [
        (lambda y: y, True),
        (lambda y: y * 3 + 1, True),
        (lambda y: torch.cat([y, y * 2])[:4], True),
        (lambda y: cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,)), False),
    ],
    ids=["nothing", "kernels", "a view of what kernels made", "a branch"],
)
def test_regions_look_at_layouts_only_where_these_may_be_others(between: Any, known: bool) -> None:
    found = compile_to_program(regions(between), options=LowerOptions(verify=True))
    assert isinstance(found, CompiledParts) and found.program is not None
    bodies = [found.program.parts[body.part] for body in found.program.bodies if body.part is not None]
    assert [not body.layouts for body in bodies if len(body.program.plan.inputs) == 1][:1] == [known]
    read = program_from_json(program_to_json(found.program))
    x = values()[0]
    want = (between((x * 2).sigmoid()) * 2).sigmoid()
    torch.testing.assert_close(bind_parts(read, found.constants)([x]), [want])


def test_a_region_with_another_layout_than_it_was_compiled_for_runs_as_it_was_recorded() -> None:
    graph = regions(lambda y: cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,)))
    found = compile_to_program(graph)
    assert isinstance(found, CompiledParts) and found.program is not None
    call = bind_parts(found.program, found.constants)
    x = values()[0].t().contiguous().t()
    torch.testing.assert_close(call([x]), [(((x * 2).sigmoid() + 1) * 2).sigmoid()])


@pytest.mark.parametrize("fn", [branches, decided])
def test_what_no_other_process_finds_by_name_stays_live_and_runs(fn: Callable[..., Any]) -> None:
    graph = make_fx(fn, tracing_mode="fake")(*values())
    (output,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(output):
        graph.graph.call_function(InvokeQuant, ())
    found = compile_to_program(graph)
    assert isinstance(found, CompiledParts) and found.program is None and found.live is not None
    assert "InvokeQuant, which no other process finds by its name" in found.reason
    for sign in (1.0, -1.0):
        torch.testing.assert_close(list(found.live(values(sign))), fn(*values(sign)))


def test_functions_have_the_names_that_find_them() -> None:
    for function in (torch.ops.higher_order.cond, torch.sym_max, operator.getitem, aten.mm.default, min, math.floor):
        name = function_name(function)
        assert name is not None and find_function(name) is function
    assert function_name(torch.ops.higher_order.flex_attention) is None
    assert function_name(print) is None and function_name([]) is None


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.exec", "os.system", "operator.methodcaller", "torch.load", "aten.__class__.x",
     "higher_order.flex_attention", "aten.nothing.default", "aten.add", "aten..default", "torch.ops.aten.add", "",
     "__import__"],
)  # fmt: skip
def test_only_what_a_table_names_is_found(name: str) -> None:
    with pytest.raises(LookupError):
        find_function(name)


def calls_in(raw: Any) -> Iterator[dict[str, Any]]:
    if isinstance(raw, dict) and "sections" not in raw:
        if raw.get("record") == "CallFunction":
            yield raw
        for item in raw.values():
            yield from calls_in(item)
    elif isinstance(raw, list):
        for item in raw:
            yield from calls_in(item)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda raw: raw.update(version=2), "has version 2"),
    "format": (lambda raw: raw.update(format="something"), "this is no aotkit program in parts"),
    "field": (lambda raw: raw["record"].update(more=1), "has no field 'more'"),
    "type": (lambda raw: raw["record"]["plan"].update(inputs="2"), "is none of"),
    "no parts": (lambda raw: raw["record"].update(parts=[]), "which is not there"),
    "no bodies": (lambda raw: raw["record"].update(bodies=[]), "which is not there"),
    "no constants": (lambda raw: raw["record"].update(constants=[]), "another constant"),
    "no steps": (lambda raw: raw["record"]["plan"].update(steps=[]), "before it is there"),
    "negative": (lambda raw: raw["record"]["plan"].update(inputs=-1), "has -1 inputs"),
    "layouts": (lambda raw: raw["record"]["parts"][0].update(layouts=[[9, {}]]), "Layout"),
    "body of itself": (
        lambda raw: next(calls_in(raw["record"]["bodies"]))["args"].append({"record": "BodyOf", "number": 0}),
        "which is not there",
    ),
    "keyword": (
        lambda raw: (
            next(calls_in(raw))["kwargs"].append(["x=print(), y", {"record": "Plain", "value": 1}])
            if "kwargs" in next(calls_in(raw))
            else next(calls_in(raw)).update(kwargs=[["x=print(), y", {"record": "Plain", "value": 1}]])
        ),
        "has the keyword",
    ),
    "argument": (lambda raw: next(calls_in(raw)).update(args=[{"record": "Evil", "code": "1"}]), "is none of"),
    "dtype": (
        lambda raw: raw["record"]["parts"][0].update(layouts=[[0, {"dtype": {"dtype": "load"}, "sizes": None}]]),
        "is no type of elements",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_text_that_does_not_hold_together_is_refused(how: str) -> None:
    change, told = DAMAGES[how]
    raw = json.loads(program_to_json(compiled(with_constants).program))
    change(raw)
    with pytest.raises(ValueError, match=told):
        program_from_json(json.dumps(raw))


def test_a_text_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        program_from_json("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize("target", ["builtins.eval", "higher_order.flex_attention", "aten.nothing.default"])
def test_a_forged_call_is_refused_before_anything_runs(target: str) -> None:
    made = compiled(branches)
    raw = json.loads(program_to_json(made.program))
    [*calls_in(raw)][-1]["target"] = target
    with pytest.raises(BindError, match="compile again with this torch"):
        bind_parts(program_from_json(json.dumps(raw)), made.constants)


def places(raw: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of the outer plan with each of its keys; the compiled parts are left as they are."""
    if isinstance(raw, dict) and "sections" in raw:
        return
    if isinstance(raw, dict | list):
        for key in raw if isinstance(raw, dict) else range(len(raw)):
            yield raw, key
            yield from places(raw[key])


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_300_damaged_texts_each_is_refused_or_bound_and_none_does_anything_else(name: str) -> None:
    made, chance = compiled(PROGRAMS[name]), random.Random(18)
    text = program_to_json(made.program)
    refused = 0
    for _ in range(300):
        raw = json.loads(text)
        where, key = chance.choice([*places(raw)])
        where[key] = chance.choice([None, True, -1, 0, 1, 99, 0.5, "", "x", [], {}, [1], {"record": "ValueOf"}])
        try:
            bind_parts(program_from_json(json.dumps(raw)), made.constants)
        except (ValueError, BindError):
            refused += 1
    assert refused > 150
