"""What only some graphs ask for: histories, static inputs, versions, places in storages, compiled autograd."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import GraphMetadata, analyze, records
from aotkit_runtime_wrappers import InputPlan, SerializableFunction, WrapperPlan, bind, build_plan, prepare_inputs
from aotkit_runtime_wrappers._torch_compat import backward_can_be_pasted, dtype_from_name
from aotkit_runtime_wrappers.dims import evaluate
from aotkit_runtime_wrappers.errors import (
    AliasingChangedError,
    CallingConventionError,
    DoubleBackwardError,
    MetadataMismatchError,
    PlanError,
    UnsupportedOverlapError,
)
from aotkit_runtime_wrappers.overlap import refuse_new_aliases, storage_id, tensors_overlap
from aotkit_runtime_wrappers.refinements import RandomState, plan_donated, plan_fake_results, plan_random_state
from aotkit_runtime_wrappers.runtime import check_strides, clone_exact, coerce_tangent, own_outputs
from aotkit_runtime_wrappers.synthetic_base import graph_inputs, plan_synthetic_bases

TENSOR, SYMINT, KIND = records.InputKind.TENSOR, records.InputKind.SYMINT, records.OutputKind
DATA = records.MutationKind.DATA


def meta(sizes: Any = (3,), strides: Any = (1,), grad: bool = False, dtype: str = "float32", offset: Any = 0) -> Any:
    return records.TensorMeta(dtype, "cpu", sizes, strides, offset, grad)


def inputs(*metas: Any, **changes: Any) -> tuple[Any, ...]:
    return tuple(records.InputInfo(i, TENSOR, m, **changes) for i, m in enumerate(metas))


def fresh(count: int, like: Any) -> tuple[Any, ...]:
    return tuple(records.OutputInfo(i, KIND.FRESH, like, graph_output=i) for i in range(count))


def boxed(function: Any) -> Any:
    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    run._boxed_call = True
    return run


def reloaded(plan: WrapperPlan) -> WrapperPlan:
    again = WrapperPlan.from_json(plan.to_json())
    assert again == plan and str(again) == str(plan)
    return again


# -- records and texts -----------------------------------------------------------------------------------


SYMBOL = records.SymbolBinding("s0", 0, "colour", 0)
VIEW = records.ViewSpec("float32", (1,), (1,), 0, False)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another plan": (GraphMetadata(inputs(meta()), ()), {"input_plan": InputPlan.one_to_one(2)}, "prepares 2"),
    "source": (GraphMetadata(inputs(meta()), (
        records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=replace(VIEW, sizes=("s0",))),
    ), symbols=(SYMBOL,)), {}, "read from 'colour', which is not a known"),
    "saves": (GraphMetadata(inputs(meta()), ()), {"num_saved_tensors": 1}, "saves nothing for a backward"),
    "saved symints": (GraphMetadata(inputs(meta()), ()), {"num_saved_symints": 2}, "saves nothing for a backward"),
    "view of a constant": (GraphMetadata(inputs(meta()), (
        records.OutputInfo(0, KIND.CONSTANT, constant=3),
        records.OutputInfo(1, KIND.ALIAS_OF_OUTPUT, base=0, view=VIEW),
    )), {}, "output 1 is a view of output 0, which is a constant"),
    "index": (GraphMetadata(inputs(meta())[::-1] + inputs(meta()), ()), {}, r"prepares 2|in order of their index"),
    "reserved": (GraphMetadata(inputs(meta()), (), symbols=(records.SymbolBinding("grads", 0, "size", 0),)), {},
                 "symbol name 'grads' cannot be used"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_metadata_that_fits_nothing_is_refused(name: str) -> None:
    record, options, message = BAD[name]
    with pytest.raises(PlanError, match=message):
        build_plan(record, **options)


def training(count: int = 1, **changes: Any) -> GraphMetadata:
    """``count`` differentiable results of one input."""
    made = GraphMetadata(
        inputs=inputs(meta(grad=True)),
        outputs=fresh(count, meta(grad=True)),
        tangents=tuple(records.TangentInfo(i, meta()) for i in range(count)),
        num_forward_outputs=count,
        forward_requires_grad=(True,) * count,
        differentiable_inputs=(0,),
        is_training=True,
    )
    return replace(made, **changes)


def test_numbers_that_do_not_fit_a_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="3 saved inputs are given for 1 saved tensors"):
        build_plan(training(), num_saved_tensors=1, saved_inputs=[0, 0, 0])
    plan = build_plan(training(), num_saved_tensors=1)
    for position in (2, -1):
        with pytest.raises(PlanError, match=f"the backward has no result {position} to return"):
            plan_random_state(plan, RandomState(1, backward_offset=position))
    for position in (-1, 4):
        with pytest.raises(PlanError, match=f"forward result {position} of 0 to"):
            plan_random_state(plan, RandomState(position))
    assert plan_random_state(plan, RandomState(2, backward_offset=1)).call.random == RandomState(2, 1)
    wrapped = build_plan(analyze(lambda x: [x * 2], [TwoTensor(torch.ones(2), torch.ones(2))]))
    assert plan_donated(wrapped, []) == wrapped
    with pytest.raises(PlanError, match="a graph with tensor subclasses cannot be donated"):
        plan_donated(wrapped, [0])
    with pytest.raises(PlanError, match="complete: gradients or tangents miss"):
        boundary = analyze(lambda x: [x * 2], [TwoTensor(torch.ones(2), torch.ones(2))]).subclasses
        build_plan(replace(GraphMetadata((), ()), subclasses=replace(boundary, gradients=(None, None))))


def test_texts_that_hold_something_else_are_refused() -> None:
    plan = InputPlan.one_to_one(2)
    assert InputPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="this is no aotkit input plan"):
        InputPlan.from_json(json.dumps([1, 2]))
    with pytest.raises(CallingConventionError, match=r"3 flat arguments were passed where .* made for 2"):
        plan.select([1, 2, 3])
    with pytest.raises(PlanError, match=r"InputPlan.duplicate_of: <object object .* is none of NoneType, bool, int"):
        replace(plan, duplicate_of=(1, object())).to_json()  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a InputPlan has no field 'what'"):
        InputPlan.from_json(plan.to_json().replace("num_inputs", "what"))
    nested = replace(plan, duplicate_of=(2, None), overlaps=((0, 1), (2,)))
    assert InputPlan.from_json(nested.to_json()) == nested
    with pytest.raises(PlanError, match="'s7' is used but bound from no input"):
        evaluate("s7 + 1", {"s0": 3})
    with pytest.raises(ValueError, match="'float33' is not the name of a torch dtype"):
        dtype_from_name("float33")
    assert dtype_from_name("torch.int8") is dtype_from_name("int8") is torch.int8


def test_operations_print_what_they_do() -> None:
    record = GraphMetadata(
        inputs=inputs(meta(offset=3), meta(), mutation=DATA, version_steps=2)[:1] + inputs(meta(), meta())[1:],
        outputs=fresh(1, meta()),
        num_forward_outputs=1,
    )
    text = str(build_plan(record, addressed={0: 24}))
    assert "check in0 begins at 3 of 24 bytes" in text
    assert "version_in0 = version of in0" in text and "version of in0 = version_in0 + 2" in text
    plan = build_plan(replace(record, inputs=inputs(meta(), meta())))
    faked = plan_fake_results(plan, record, [meta()])
    assert "fake calls get fake results" in str(faked) and "fake" not in str(plan)


# -- calls ---------------------------------------------------------------------------------------------------


def test_a_view_has_the_history_of_a_forward_output_where_the_records_say_so(how: Any) -> None:
    """Its memory is that of another result; of a custom autograd function, for instance."""
    view = records.ViewSpec("float32", (3,), (1,), 0, True)
    outputs = (
        records.OutputInfo(0, KIND.FRESH, meta(grad=True), graph_output=0),
        records.OutputInfo(1, KIND.ALIAS_OF_OUTPUT, meta(grad=True), base=0, view=view, graph_output=1),
        records.OutputInfo(2, KIND.ALIAS_OF_OUTPUT, meta(grad=True), base=1, view=view),
        records.OutputInfo(3, KIND.FRESH, meta(grad=True), graph_output=0, same_as=0),
        records.OutputInfo(4, KIND.ALIAS_OF_OUTPUT, meta(grad=True), base=3, view=view),
    )
    plan = reloaded(build_plan(training(2, outputs=outputs), num_saved_tensors=1))
    call = how(plan, boxed(lambda x: [x * 2, x * 2, x]), boxed(lambda x, a, b: [a * 2 + b * 7]))
    x = torch.arange(3.0).requires_grad_()
    first, second, third, same, fifth = call([x])
    assert same is first and len({t.data_ptr() for t in (first, second, third, fifth)}) == 1
    for value, factor in ((first, 2), (second, 7), (third, 7), (fifth, 2)):
        assert value.requires_grad
        assert torch.autograd.grad(value.sum(), x, retain_graph=True)[0].tolist() == [factor] * 3
    first.detach().fill_(5)
    assert second.tolist() == third.tolist() == fifth.tolist() == [5, 5, 5]


def test_results_that_are_not_finite_and_symbols_of_results(how: Any) -> None:
    outputs = (
        records.OutputInfo(0, KIND.CONSTANT, constant=float("inf")),
        records.OutputInfo(1, KIND.CONSTANT, constant=float("-inf")),
        records.OutputInfo(2, KIND.CONSTANT, constant=float("nan")),
        records.OutputInfo(3, KIND.CONSTANT, constant="a 'text'"),
        records.OutputInfo(4, KIND.CONSTANT, constant=float("inf")),
    )
    call = how(build_plan(GraphMetadata(inputs(meta()), outputs)), boxed(lambda x: []))
    found = call([torch.ones(3)])
    assert found[:2] == [float("inf"), float("-inf")] and found[2] != found[2] and found[3:] == ["a 'text'", found[0]]


def test_a_tangent_may_have_the_size_of_a_result(how: Any) -> None:
    """Which is known after the forward only."""
    like = meta(("u0",), (1,), True)
    record = training(
        outputs=fresh(1, like),
        tangents=(records.TangentInfo(0, replace(like, requires_grad=False)),),
        symbols=(records.SymbolBinding("u0", 0, "size", 0, of_output=True),),
    )
    plan = reloaded(build_plan(record, num_saved_tensors=1, num_saved_symints=1))
    seen = []

    def backward(count: int, x: Tensor, tangent: Tensor) -> list[Tensor]:
        seen.append((count, tangent.stride(), tangent.size()))
        return [torch.cat([tangent * 2, torch.zeros(3 - count)])]

    def forward(x: Tensor) -> list[Any]:
        count = int((x > 0).sum())
        return [x[x > 0] * 2, x, count]

    call = how(plan, boxed(forward), boxed(backward))
    for numbers, expected in (([1.0, 2.0, -3.0], [2, 2, 0]), ([1.0, -2.0, -3.0], [2, 0, 0])):
        x = torch.tensor(numbers, requires_grad=True)
        (out,) = call([x])
        out.backward(torch.ones(()).expand(out.shape))
        assert x.grad is not None and x.grad.tolist() == expected
    assert seen == [(2, (1,), (2,)), (1, (1,), (1,))]


def test_a_forward_that_returns_too_little_is_named(how: Any) -> None:
    call = how(build_plan(GraphMetadata(inputs(meta()), fresh(2, meta()), num_forward_outputs=2)), boxed(lambda x: [x]))
    with pytest.raises(CallingConventionError, match="compiled for 2 forward results, but there are 1"):
        call([torch.ones(3)])


def test_no_tangent_at_all_gives_no_gradient(how: Any) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None

    x = torch.ones(3, requires_grad=True)
    call = how(build_plan(training(), num_saved_tensors=1), boxed(lambda x: [x * 2, x]), boxed(lambda x, t: 1 / 0))
    Nothing.apply(call([x])[0]).sum().backward()
    assert x.grad is None


def test_versions_of_some_of_the_written_inputs(how: Any) -> None:
    """The graph writes to its inputs itself; inference tensors have no version."""
    infos = tuple(records.InputInfo(i, TENSOR, meta(), mutation=DATA, version_steps=i + 1) for i in range(3))
    outputs = (records.OutputInfo(0, KIND.FRESH, meta(), graph_output=0),)
    plan = reloaded(build_plan(GraphMetadata(infos, outputs, num_forward_outputs=1)))
    call = how(plan, boxed(lambda a, b, c: [a.add_(1).clone(), b.mul_(2), c.mul_(2)][:1]))
    with torch.inference_mode():
        quiet = torch.ones(3)
    for k in range(4):
        args = [torch.ones(3) for _ in range(3)]
        if k < 3:
            args[k] = quiet.clone() if k == 3 else torch.inference_mode()(torch.ones)(3)
        with torch.inference_mode(k < 3):
            call(list(args))
        assert [None if a.is_inference() else a._version for a in args] == [None if i == k else i + 1 for i in range(3)]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kernels", [True, False])
def test_writes_beside_torch_are_counted(kernels: bool, steps: int) -> None:
    """Kernels move no counters; operators do, and what they moved is not counted twice. Inference tensors have none."""
    infos = tuple(
        records.InputInfo(i, TENSOR, meta(), mutation=DATA, version_steps=n) for i, n in enumerate((steps, 1, 1))
    )
    outputs = (records.OutputInfo(0, KIND.FRESH, meta(), graph_output=0),)
    plan = reloaded(build_plan(GraphMetadata(infos, outputs, num_forward_outputs=1)))

    def forward(args: list[Any]) -> list[Any]:
        for value in args:
            if kernels:
                value.numpy()[:] += 1
            else:
                value.add_(1)
        return [torch.ones(3)]

    forward._boxed_call, forward.moves_no_versions = True, kernels  # type: ignore[attr-defined]
    call = bind(plan, forward)
    assert ("_move_versions" in call.source) is (kernels and steps < 3)  # type: ignore[attr-defined]
    quiet = torch.inference_mode()(torch.ones)(3)
    args = [torch.ones(3), torch.ones(3), quiet if kernels else torch.ones(3)]
    for turn in (1, 2):
        call(list(args))
        assert [a._version for a in args[:2]] == [steps * turn, turn]
        assert args[2].tolist() == [1 + turn] * 3
    with torch.profiler.profile():
        call(list(args))
    assert [a._version for a in args[:2]] == [steps * 3, 3]


def test_a_static_input_that_is_written_to_may_not_share_memory_with_any_other(how: Any) -> None:
    """With another static one either: ``p.data = q.data`` after the capture."""
    infos = (
        records.InputInfo(0, TENSOR, meta(), mutation=DATA, updated_output=0, is_static=True),
        records.InputInfo(1, TENSOR, meta()),
        records.InputInfo(2, TENSOR, meta(), is_static=True),
    )
    plan = reloaded(build_plan(GraphMetadata(infos, (), num_forward_outputs=1, num_mutated=1)))
    call = how(plan, boxed(lambda a, b, c: [a + 1]))
    memory = torch.zeros(9)
    call([memory[:3], memory[3:6], memory[6:]])
    assert memory.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    for number, others in (1, [memory[2:5], memory[6:]]), (2, [memory[3:6], memory[:3]]):
        with pytest.raises(AliasingChangedError, match=rf"input in0 is mutated .* shares memory with .* in{number}"):
            call([memory[:3], *others])
    assert memory.sum() == 3


def test_a_graph_that_counts_from_the_start_of_a_storage_is_called_at_the_same_place(how: Any) -> None:
    plan = reloaded(build_plan(GraphMetadata(inputs(meta(offset=2)), ()), addressed={0: 40}))
    call = how(plan, boxed(lambda x: []))
    call([torch.ones(10)[2:5]])
    with pytest.raises(AliasingChangedError, match="begins at element 1 of it and began at 2"):
        call([torch.ones(10)[1:4]])
    with pytest.raises(RuntimeError, match="ends at byte 40 of a storage of 36"):
        call([torch.ones(9)[2:5]])
    symbolic = build_plan(GraphMetadata(inputs(meta(offset="s0")), ()), addressed={0: 40})
    how(symbolic, boxed(lambda x: []))([torch.ones(10)[1:4]])


def test_fake_results_may_be_numbers_and_nothing(how: Any) -> None:
    like = meta(("s0",), (1,))
    record = GraphMetadata(
        inputs=inputs(like),
        outputs=tuple(records.OutputInfo(i, KIND.SYMINT, graph_output=i) for i in range(2)),
        symbols=(records.SymbolBinding("s0", 0, "size", 0),),
        num_forward_outputs=2,
    )
    plan = reloaded(plan_fake_results(build_plan(record), record, ["s0*2 + 1", None]))
    call = how(plan, boxed(lambda x: [x.shape[0] * 2 + 1, None]))
    mode = FakeTensorMode()
    assert call([mode.from_tensor(torch.ones(4))]) == [9, None] == call([torch.ones(4)])
    assert not isinstance(call([torch.ones(5)])[0], FakeTensor)


# -- second derivatives, compiled autograd -------------------------------------------------------------------


def test_a_backward_that_writes_to_inputs_has_no_second_derivative(how: Any) -> None:
    record = training(inputs=(*inputs(meta(grad=True)), records.InputInfo(1, TENSOR, meta())),
                      backward_writes=(records.BackwardWrite(1, version_steps=2),))  # fmt: skip
    call = how(build_plan(record, num_saved_tensors=1), boxed(lambda x, y: [x.sin(), x.cos()]),
               boxed(lambda c, t, now: [t * c * now, now + 1]))  # fmt: skip
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    (grad,) = torch.autograd.grad(call([x, y])[0].sum(), x, create_graph=True)
    torch.testing.assert_close(grad.detach(), 2 * x.detach().cos())
    assert y.tolist() == [3, 3, 3] and y._version == 2
    with pytest.raises(DoubleBackwardError, match="its backward writes to inputs"):
        grad.sum().backward()


@pytest.mark.skipif(not backward_can_be_pasted(), reason="left alone before torch 2.13, see the next test")
@pytest.mark.parametrize("reached_by", [(), ((0,), (0, 1))], ids=["by all", "by some"])
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_compiled_autograd_pastes_the_backward_graph(which: Any, made: bool, reached_by: Any) -> None:
    from torch._dynamo import compiled_autograd

    like = meta((2, 2), (1, 2), True)
    record = training(
        2,
        inputs=inputs(like, like),
        outputs=fresh(2, like),
        tangents=tuple(records.TangentInfo(i, replace(like, requires_grad=False)) for i in range(2)),
        differentiable_inputs=(0, 1),
        reached_by=reached_by,
    )

    class Backward(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
            return [first * y, first * x + second * 2]

    asked = []

    def make() -> Any:
        asked.append(1)
        return torch.fx.symbolic_trace(Backward())

    call = bind(build_plan(record, num_saved_tensors=2), boxed(lambda x, y: [x * y, y * 2, x, y]),
                lambda: 1 / 0, backward_graph=make if made else torch.fx.symbolic_trace(Backward()))  # fmt: skip
    for again in (False, True):
        x, y = (torch.rand(2, 2).requires_grad_() for _ in range(2))
        outputs, eager = call([x, y]), [x * y, y * 2]
        expected = torch.autograd.grad([(eager[i] * (i + 1)).sum() for i in which], [x, y], allow_unused=True)
        graphs: list[Any] = []
        with compiled_autograd._enable(lambda graph, graphs=graphs: graphs.append(graph) or graph):
            torch.stack([(outputs[i] * (i + 1)).sum() for i in which]).sum().backward()
        assert (graphs or again) and (x.grad is None) == (expected[0] is None and bool(reached_by))
        for leaf, want in zip((x, y), expected, strict=True):
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, torch.zeros(2, 2) if want is None else want)
    assert len(asked) == made


def test_before_torch_2_13_compiled_autograd_leaves_our_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from aotkit_runtime_wrappers import compiled_autograd

    assert backward_can_be_pasted() == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13))
    like = meta((2,), (1,), True)
    call = build_plan(training(1, inputs=inputs(like), outputs=fresh(1, like)), num_saved_tensors=1).call
    monkeypatch.setattr(compiled_autograd, "backward_can_be_pasted", lambda: True)
    assert "_aot_id" in compiled_autograd.cooperation(call, torch.fx.symbolic_trace(torch.nn.Identity()))
    monkeypatch.setattr(compiled_autograd, "backward_can_be_pasted", lambda: False)
    assert compiled_autograd.cooperation(call, torch.fx.symbolic_trace(torch.nn.Identity())) == {}


# -- memory ------------------------------------------------------------------------------------------------------


def test_outputs_of_a_buffer_become_tensors_of_their_own() -> None:
    def parts(saved: Any) -> tuple[Tensor, list[Any]]:
        buffer = torch.arange(8.0)
        return buffer, own_outputs([buffer[:4], buffer[4:], *saved(buffer)], (0,), 2, 2 + len(saved(buffer)))

    buffer, (first, second, *rest) = parts(lambda b: [b[1:3], b[5:], b, None, b[:4].detach()])
    assert not first._is_view() and second._is_view() and first.data_ptr() == buffer.data_ptr()
    assert rest[0].tolist() == [1, 2] and rest[2].shape == (8,) and rest[3] is None
    before = [t._version for t in rest if t is not None]
    first.add_(1)
    moved = [t._version - v for t, v in zip([t for t in rest if t is not None], before, strict=True)]
    assert moved[0] == moved[2] == 1 and moved[1] == 0  # what lies elsewhere in the buffer stays valid
    _, (first, _, other) = parts(lambda b: [torch.view_as_complex(b.view(4, 2))[:1]])
    assert first._is_view() and other.dtype == torch.complex64  # stays a view
    output = torch.arange(8.0)[:4]
    first, same = own_outputs([output, output], (0,), 1, 2)
    assert first is same and not first._is_view()


def test_copies_have_the_strides_of_what_they_are_made_of() -> None:
    odd = torch.rand(3, 1).as_strided((3, 1), (1, 7))
    for saved in (torch.rand(4, 6), torch.rand(4, 6).t(), torch.rand(4, 12)[:, ::2], odd):
        copy = clone_exact(saved)
        assert copy.stride() == saved.stride() and torch.equal(copy, saved) and copy.data_ptr() != saved.data_ptr()


def test_strides_matter_where_there_are_several_elements() -> None:
    for sizes, strides, wanted in [((0, 3), (3, 1), (9, 9)), ((1, 3), (3, 1), (7, 1)), ((3,), (1,), (1,))]:
        check_strides(torch.empty_strided(sizes, strides), "fw0", wanted)
        tangent = torch.empty_strided(sizes, strides).fill_(2)
        given = coerce_tangent(tangent, 0, sizes, wanted)
        assert given.stride() == wanted and torch.equal(given, tangent) and given.data_ptr() == tangent.data_ptr()
    with pytest.raises(MetadataMismatchError, match=r"fw0 with strides \(3, 1\), but .* strides \(1, 2\)"):
        check_strides(torch.empty(2, 3), "fw0", (1, 2))


def test_whether_tensors_overlap_is_told_by_their_bytes() -> None:
    base = torch.rand(24)
    rows = base.view(4, 6)
    assert tensors_overlap(rows[:, :3], rows[:, 2:]) and not tensors_overlap(rows[:, :3], rows[:, 3:])
    assert not tensors_overlap(base[:12], base[12:]) and tensors_overlap(base[:13], base[12:])
    assert not tensors_overlap(base, torch.rand(24)) and not tensors_overlap(base[:0], base)
    assert tensors_overlap(rows[:, :3], rows.view(torch.int16)[:, 8:])  # not told apart: sizes of elements differ
    halves = base.view(torch.int16)[8:]
    assert not tensors_overlap(base[:4], halves) and tensors_overlap(base[:5], halves)
    large = torch.empty(1 << 23, dtype=torch.int8)
    assert tensors_overlap(large[::2], large[1::2])  # too many to look at each
    assert storage_id(torch.eye(3).to_sparse()) is None
    assert not tensors_overlap(torch.eye(3).to_sparse(), torch.eye(3).to_sparse())
    assert storage_id(rows) == storage_id(base) and storage_id(rows) is not None


@pytest.mark.parametrize("others", [1, 4])
def test_new_aliases_are_looked_for_on_both_sides(others: int) -> None:
    base = torch.rand(8)
    rest = [torch.rand(2) for _ in range(others - 1)]
    names = " ".join(f"in{2 + k}" for k in range(others))
    refuse_new_aliases([base[:2], base[2:4]], [base[4:], *rest], "in0 in1", names)
    with pytest.raises(AliasingChangedError, match=r"input in1 is mutated .* memory with input in2,"):
        refuse_new_aliases([base[:2], base[2:5]], [base[4:], *rest], "in0 in1", names)
    with pytest.raises(AliasingChangedError, match=r"input in0 is mutated .* memory with input in1,"):
        refuse_new_aliases([base[:3], base[2:4]], [torch.rand(2), *rest], "in0 in1", names)


# -- synthetic bases ---------------------------------------------------------------------------------------------


def based(*args: Any, groups: Any = ((0, 1),)) -> tuple[InputPlan, Any]:
    plan = plan_synthetic_bases(prepare_inputs(args), args, groups)
    assert InputPlan.from_json(plan.to_json()) == plan
    return plan, graph_inputs(plan, args)


def test_members_that_are_no_parts_of_one_base_are_refused() -> None:
    base = torch.rand(12)
    with pytest.raises(UnsupportedOverlapError, match=r"arguments \[0, 1\] share their storage with no other argument"):
        plan_synthetic_bases(prepare_inputs([base, torch.rand(3)]), [base, torch.rand(3)], [(0, 1)])
    memory = torch.arange(24, dtype=torch.int16)
    halves = memory[1:21]
    numbers = torch.empty(0, dtype=torch.float32).set_(memory.untyped_storage(), 2, (4,), (1,))
    plan, values = based(halves, numbers)
    assert plan.bases[0].flat and values[0].dtype == torch.int16 and values[0].numel() == 24
    first = torch.arange(12.0, requires_grad=True) * 1
    plan, values = based(first[:4], first[2:])
    assert not plan.bases[0].flat and values[0] is first
    for other in (torch.rand(12)[:4], first.detach()[:4]):
        with pytest.raises((AliasingChangedError, UnsupportedOverlapError)):
            graph_inputs(plan, [other, first[2:]])
    with pytest.raises(AliasingChangedError, match="were views of one tensor when the graph was captured and are not"):
        graph_inputs(plan, [first.detach()[:4], first.detach()[2:]])
    with pytest.raises(AliasingChangedError, match="argument in1 is another part of the memory"):
        graph_inputs(plan, [first[:4], first[3:]])


@pytest.mark.parametrize("inside", [True, False])
def test_detached_members_have_the_base_of_the_others_if_they_lie_within_it(inside: bool) -> None:
    memory = torch.rand(12)
    whole = torch.empty(0).set_(memory.untyped_storage(), 2, (6,), (1,)).requires_grad_()
    member = whole[1:3]
    for other in [memory[3:8], memory[2:8:5], memory[9:9]] if inside else [memory[3:9], memory[1:4], memory[::11]]:
        for args in ([member, other], [other, member]):
            if inside:
                plan, values = based(*args)
                assert not plan.bases[0].flat and values[0] is whole
            else:
                with pytest.raises(UnsupportedOverlapError, match="no views of one tensor as far as autograd knows"):
                    based(*args)


def test_a_function_that_is_read_back_knows_when_it_was_damaged() -> None:
    plan = build_plan(GraphMetadata(inputs(meta()), fresh(1, meta()), num_forward_outputs=1))
    function = SerializableFunction(plan, b"forward", None, lambda data: boxed(lambda x: [x * len(data)]))
    assert function([torch.ones(3)])[0].tolist() == [7, 7, 7]
    data = function.serialize()
    again = SerializableFunction.deserialize(data, lambda found: boxed(lambda x: [x + len(found)]))
    assert again([torch.ones(3)])[0].tolist() == [8, 8, 8]
    for place in range(0, len(data), 7):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(PlanError):
            SerializableFunction.deserialize(damaged, lambda found: boxed(lambda x: [x]))
