"""Plans as data, dimensions as text, the inference call, debug mode, the boxed convention."""

from __future__ import annotations

import dataclasses
import json
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotkit_functionalize import GraphMetadata, records
from aotkit_runtime_wrappers import WrapperOptions, WrapperPlan, bind, build_plan, make_boxed, unboxed
from aotkit_runtime_wrappers.dims import evaluate, render, symbols_of
from aotkit_runtime_wrappers.epilogue import view_method
from aotkit_runtime_wrappers.errors import CallingConventionError, MetadataMismatchError, PlanError

TENSOR, SYMINT = records.InputKind.TENSOR, records.InputKind.SYMINT
KIND, MUTATION = records.OutputKind, records.MutationKind


def meta(sizes=(3, 4), strides=(4, 1), requires_grad=False, dtype="float32"):
    return records.TensorMeta(dtype, "cpu", sizes, strides, 0, requires_grad)


def view(sizes, strides, delta=0, requires_grad=False, dtype="float32", under_no_grad=False):
    return records.ViewSpec(dtype, sizes, strides, delta, requires_grad, under_no_grad)


def one_input(output, forward_outputs=0, **changes):
    info = records.InputInfo(0, TENSOR, changes.pop("input", meta()), **changes)
    return GraphMetadata(inputs=(info,), outputs=(output,), num_forward_outputs=forward_outputs)


def boxed(function):
    return make_boxed(function)


# -- plans ----------------------------------------------------------------------------------------------


def test_a_plan_prints_as_a_program_and_survives_its_text():
    record = GraphMetadata(
        inputs=(
            records.InputInfo(0, TENSOR, meta(("s0", 4)), mutation=MUTATION.DATA, updated_output=0),
            records.InputInfo(1, SYMINT),
        ),
        outputs=(
            records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=view(("s0*4",), (1,))),
            records.OutputInfo(1, KIND.CONSTANT, constant=2.5),
            records.OutputInfo(2, KIND.SYMINT, graph_output=1),
        ),
        symbols=(records.SymbolBinding("s0", 0, "size", 0),),
        effects=(records.EffectInfo("grad_mode", False),),
        num_forward_outputs=2,
        num_mutated=1,
    )
    plan = build_plan(record, options=WrapperOptions(debug=True))
    assert WrapperPlan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(WrapperPlan.from_json(plan.to_json()))
    text = str(plan)
    for line in ("s0 = in0.size(0)", "in0.copy_(fw0)", "out0 = in0.as_strided", "grad mode = False", "2.5, fw1]"):
        assert line in text


def test_plans_that_this_release_cannot_read_are_refused():
    plan = build_plan(one_input(records.OutputInfo(0, KIND.INPUT, base=0)))
    raw = json.loads(plan.to_json())
    with pytest.raises(PlanError, match="version 99"):
        WrapperPlan.from_json(json.dumps(raw | {"version": 99}))
    record = raw["record"]
    with pytest.raises(PlanError, match="'Teleport' is none of BindSymbol, BuildBase"):
        WrapperPlan.from_json(json.dumps(raw | {"record": record | {"prologue": [{"record": "Teleport"}]}}))
    with pytest.raises(PlanError, match="a BumpVersion has no field 'what'"):
        changed = record | {"prologue": [{"record": "BumpVersion", "what": 1}]}
        WrapperPlan.from_json(json.dumps(raw | {"record": changed}))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (one_input(records.OutputInfo(0, KIND.FRESH)), "no graph_output"),
        (one_input(records.OutputInfo(0, KIND.FRESH, graph_output=3), 1), "forward output 3"),
        (one_input(records.OutputInfo(0, KIND.INPUT, base=7)), "of number 7"),
        (one_input(records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0)), "has no view"),
        (one_input(records.OutputInfo(0, KIND.ALIAS_OF_OUTPUT, base=0, view=view((1,), (1,)))), "views of each other"),
        (one_input(records.OutputInfo(1, KIND.CONSTANT)), "in order of their index"),
        (one_input(records.OutputInfo(0, KIND.CONSTANT), mutation=MUTATION.METADATA), "no new_view"),
        (
            one_input(records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=view(("s9",), (1,)))),
            "bound from no input",
        ),
        (
            dataclasses.replace(
                one_input(records.OutputInfo(0, KIND.CONSTANT)), effects=(records.EffectInfo("weather", "rain"),)
            ),
            "'weather' is not known",
        ),
    ],
)
def test_records_that_contradict_each_other_are_refused(record, message):
    with pytest.raises(PlanError, match=message):
        build_plan(record)


# -- dimensions ----------------------------------------------------------------------------------------


@given(st.integers(-9, 9), st.integers(1, 9))
def test_dimension_text_means_what_python_means(s0, s1):
    for text in ("s0*s1 + 1", "(s0 - 3)//s1", "-s0 % s1", "max(s0, s1, 2)*min(s0, 4)", "s1**2"):
        expected = eval(text, {"s0": s0, "s1": s1, "min": min, "max": max})
        assert evaluate(text, {"s0": s0, "s1": s1}) == expected
        assert eval(render(text), {"s0": s0, "s1": s1, "min": min, "max": max}) == expected
    assert symbols_of(["s0*s1 + 1", 3, "max(s0, s2)"]) == {"s0", "s1", "s2"}


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "s0.size", "s0 if s1 else 2", "s0; s1", "lambda: 1", "1.5", "f(s0)", "args", "in0", "_k0"],
)
def test_dimension_text_that_is_no_arithmetic_is_refused(text):
    with pytest.raises(PlanError):
        render(text)


# -- the inference call -----------------------------------------------------------------------------------


@pytest.mark.covers("F4.3")
def test_grad_mode_is_off_during_the_call_and_back_on_after_an_error(how):
    seen = []

    def forward(x):
        seen.append(torch.is_grad_enabled())
        raise ZeroDivisionError("from the compiled code")

    call = how(build_plan(one_input(records.OutputInfo(0, KIND.FRESH, graph_output=0), 1)), boxed(forward))
    with pytest.raises(ZeroDivisionError):
        call([torch.ones(3, 4)])
    assert torch.is_grad_enabled()
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        call([torch.ones(3, 4)])
    assert seen == [False, False]


@pytest.mark.covers("F4.2")
def test_inputs_that_the_epilogue_does_not_need_can_die_inside_the_call(how):
    import weakref

    record = GraphMetadata(
        inputs=tuple(records.InputInfo(i, TENSOR, meta()) for i in range(2)),
        outputs=(
            records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=1, view=view((12,), (1,))),
            records.OutputInfo(1, KIND.FRESH, graph_output=0),
        ),
        num_forward_outputs=1,
    )
    alive = []

    def forward(args):
        references = [weakref.ref(a) for a in args]
        result = args[0] + args[1]
        args.clear()
        alive.append([r() is not None for r in references])
        return [result]

    forward._boxed_call = True
    args = [torch.ones(3, 4), torch.ones(3, 4)]
    how(build_plan(record), forward)(args)
    assert args == []
    if how is bind:
        assert alive == [[False, True]]


def test_a_call_inside_the_call_is_independent(how):
    depth = []

    def forward(x):
        depth.append(len(depth))
        return [call([x + 1])[0] if len(depth) < 4 else x]

    call = how(build_plan(one_input(records.OutputInfo(0, KIND.FRESH, graph_output=0), 1)), boxed(forward))
    assert call([torch.zeros(3, 4)])[0].unique().tolist() == [3.0]


def test_a_backend_view_becomes_a_tensor_of_its_own(how):
    call = how(
        build_plan(one_input(records.OutputInfo(0, KIND.FRESH, graph_output=0), 1)),
        boxed(lambda x: [(x + 1).view(12)]),
    )
    (out,) = call([torch.zeros(3, 4)])
    assert not out._is_view() and out.shape == (12,)


@pytest.mark.covers("F4.7")
def test_an_input_that_the_graph_itself_wrote_to_gets_a_new_version(how):
    record = one_input(records.OutputInfo(0, KIND.CONSTANT), mutation=MUTATION.DATA)
    x = torch.zeros(3, 4)
    how(build_plan(record), boxed(lambda x: []))([x])
    assert x._version == 1


@pytest.mark.covers("F4.6")
def test_a_hidden_mutation_leaves_the_version_alone_and_one_under_no_grad_does_not(how):
    for flag, version in (("mutation_hidden_from_autograd", 0), ("mutation_under_no_grad", 1)):
        record = one_input(
            records.OutputInfo(0, KIND.CONSTANT), 1, mutation=MUTATION.DATA, updated_output=0, **{flag: True}
        )
        x = torch.zeros(3, 4, requires_grad=True)
        how(build_plan(record), boxed(lambda x: [x + 1]))([x])
        assert (x._version, x.unique().tolist(), x.is_leaf) == (version, [1.0], True)


@pytest.mark.covers("F4.8")
def test_dynamic_dimensions_of_outputs_are_marked(how):
    record = one_input(records.OutputInfo(0, KIND.FRESH, graph_output=0, dynamic_dims=(1,)), 1)
    (out,) = how(build_plan(record), boxed(lambda x: [x + 1]))([torch.zeros(3, 4)])
    assert out._dynamo_weak_dynamic_indices == {1}


def test_symbols_come_from_integers_sizes_strides_and_offsets(how):
    names = ("s0", "s1", "s2", "s3")
    record = GraphMetadata(
        inputs=(records.InputInfo(0, TENSOR, meta(("s1", "s0"), ("s2", 1))), records.InputInfo(1, SYMINT)),
        outputs=(
            records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=view(("s1", "s0 - 1"), ("s2", 1), "s3 - s3 + 1")),
        ),
        symbols=tuple(
            records.SymbolBinding(n, *where)
            for n, where in zip(
                names, [(1, "int"), (0, "size", 0), (0, "stride", 0), (0, "storage_offset")], strict=True
            )
        ),
    )
    call = how(build_plan(record), boxed(lambda x, n: []))
    for rows in (2, 5):
        x = torch.arange(rows * 8.0).view(rows, 8)[:, 2:6]
        (out,) = call([x, 4])
        assert torch.equal(out, x[:, 1:]) and out._base is x._base


@pytest.mark.parametrize(
    ("make", "dtype", "spec"),
    [
        (lambda: torch.arange(12.0), "int32", view((12,), (1,), dtype="int32")),
        (lambda: torch.randn(4, dtype=torch.complex64), "float32", view((3, 2), (2, 1), 2)),
        (lambda: torch.arange(12.0), "complex64", view((2, 2), (2, 1), 1, dtype="complex64")),
        (lambda: torch.arange(12.0), "int16", view((6,), (2,), 1, dtype="int16")),
    ],
)
def test_views_in_another_dtype_share_the_memory_of_their_base(how, make, dtype, spec):
    base = make()
    info = meta(tuple(base.shape), base.stride(), dtype=str(base.dtype).removeprefix("torch."))
    record = one_input(records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=spec), input=info)
    (out,) = how(build_plan(record), boxed(lambda x: []))([base])
    expected = torch.empty(0, dtype=getattr(torch, dtype)).set_(
        base.untyped_storage(), spec.offset_delta, spec.sizes, spec.strides
    )
    assert torch.equal(out, expected) and out.dtype == expected.dtype
    out.zero_()
    assert not expected.any()


def test_views_are_taken_by_the_plainest_operation():
    assert view_method(meta(), view((12,), (1,))) == ("view", ())
    assert view_method(meta(), view((4, 3), (1, 4))) == ("permute", (1, 0))
    assert view_method(meta((2, 3, 4), (12, 4, 1)), view((4, 2, 3), (1, 12, 4))) == ("permute", (2, 0, 1))
    assert view_method(meta((3, 1), (1, 1)), view((2, 3, 4), (0, 1, 0))) == ("expand", ())
    others = [view((4,), (1,)), view((12,), (1,), 1), view((3, 4), (0, 1)), view(("s0",), (1,))]
    for other in (*others, view((5, 3, 4), (0, 1, 4)), view((1, 3, 4), (0, 4, 1))):
        assert view_method(meta(), other)[0] == "as_strided"


def test_a_base_with_other_strides_than_traced_is_refused(how):
    record = GraphMetadata(
        inputs=(records.InputInfo(0, TENSOR, meta()),),
        outputs=(records.OutputInfo(0, KIND.ALIAS_OF_INTERMEDIATE, base=0, view=view((4,), (1,), 4)),),
        num_forward_outputs=1,
        intermediate_bases=(meta(),),
    )
    call = how(build_plan(record), boxed(lambda x: [x * 2]))
    x = torch.randn(3, 4)
    assert torch.equal(call([x])[0], x[1] * 2)
    with pytest.raises(MetadataMismatchError, match="keep the strides"):
        call([torch.randn(4, 3).t()])


def test_a_view_taken_under_no_grad_has_no_history(how):
    spec = view((12,), (1,), requires_grad=True, under_no_grad=True)
    record = one_input(records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=spec), input=meta(requires_grad=True))
    x = torch.randn(3, 4, requires_grad=True)
    (out,) = how(build_plan(record), boxed(lambda x: []))([x])
    with torch.no_grad():
        eager = x.view(-1)
    assert (out.grad_fn, out.requires_grad, out._base is x) == (None, eager.requires_grad, eager._base is x)


# -- debug mode -------------------------------------------------------------------------------------------


@pytest.mark.covers("F4.24", "F4.25")
@pytest.mark.parametrize(
    ("argument", "result", "message"),
    [
        (torch.ones(3, 5), None, r"input 0 \(in0\): sizes is \(3, 5\)"),
        (torch.ones(3, 4, dtype=torch.float64), None, "dtype is torch.float64 at run time and torch.float32"),
        (torch.ones(4, 3).t(), None, r"strides is \(1, 3\)"),
        (torch.ones(3, 4, requires_grad=True), None, "requires_grad is True"),
        ("text", None, "is a str where"),
        (torch.ones(3, 4), torch.ones(2), r"output 0 \(fresh\): sizes is \(2,\)"),
    ],
)
def test_debug_mode_names_the_field_that_differs(how, argument, result, message):
    record = one_input(records.OutputInfo(0, KIND.FRESH, meta(), graph_output=0), 1)
    call = how(build_plan(record, options=WrapperOptions(debug=True)), boxed(lambda x: [result]))
    with pytest.raises(MetadataMismatchError, match=message):
        call([argument])


# -- the boxed convention ---------------------------------------------------------------------------------


@pytest.mark.covers("F4.38")
def test_boxing_empties_the_list_and_unboxing_fills_one():
    function = make_boxed(lambda a, b: a + b)
    args = [1, 2]
    assert function(args) == (3,) and args == [] and function._boxed_call
    assert unboxed(function)(1, 2) == (3,)
    with pytest.raises(CallingConventionError, match="must be callable, not int"):
        bind(build_plan(one_input(records.OutputInfo(0, KIND.CONSTANT))), 3)


def test_a_traceback_shows_the_generated_line():
    call = bind(build_plan(one_input(records.OutputInfo(0, KIND.FRESH, graph_output=0), 1)), boxed(lambda x: [1 / 0]))
    with pytest.raises(ZeroDivisionError) as caught:
        call([torch.ones(3, 4)])
    assert "_forward(args) if not _autocast_enabled()" in "".join(traceback.format_exception(caught.value))


def test_the_observer_gets_the_source():
    events = []

    class Observer:
        def event(self, name, fields):
            events.append((name, fields))

    call = bind(
        build_plan(one_input(records.OutputInfo(0, KIND.INPUT, base=0))), boxed(lambda x: []), observer=Observer()
    )
    assert events[0][0] == "wrappers.bind" and events[0][1]["source"] == call.source
    assert "for " not in call.source.replace("compiled for", "")


def test_an_output_that_is_the_same_object_as_another_one_is_returned_as_that_object(how):
    twice = [records.OutputInfo(i, KIND.ALIAS_OF_INPUT, base=0, view=view((12,), (1,))) for i in range(3)]
    outputs = (twice[0], dataclasses.replace(twice[1], same_as=0), twice[2])
    record = dataclasses.replace(one_input(twice[0]), outputs=outputs)
    first, same, other = unboxed(how(build_plan(record), boxed(lambda x: [])))(torch.randn(3, 4))
    assert first is same and other is not first
