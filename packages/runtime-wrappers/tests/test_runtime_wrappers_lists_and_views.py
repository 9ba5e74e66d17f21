"""The list that a call empties, who may share memory with whom, what is bound, parts of a base in every dtype."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import GraphMetadata, analyze, records
from aotkit_runtime_wrappers import SerializableFunction, WrapperOptions, build_plan
from aotkit_runtime_wrappers.base_views import take_member
from aotkit_runtime_wrappers.compiled_autograd import cooperation
from aotkit_runtime_wrappers.errors import (
    AliasingChangedError,
    CallingConventionError,
    MetadataMismatchError,
    PlanError,
    UnsupportedOverlapError,
)
from aotkit_runtime_wrappers.operations.symbols import BindSymbol
from aotkit_runtime_wrappers.serialized import _digest

TENSOR, KIND, DATA = records.InputKind.TENSOR, records.OutputKind, records.MutationKind.DATA


def meta(sizes: Any = (3,), strides: Any = (1,), grad: bool = False, dtype: str = "float32") -> Any:
    return records.TensorMeta(dtype, "cpu", sizes, strides, 0, grad)


def boxed(function: Any) -> Any:
    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    run._boxed_call = True
    return run


def training(like: Any, plain: int = 0) -> GraphMetadata:
    """One differentiable result, and ``plain`` others."""
    others = tuple(records.OutputInfo(1 + i, KIND.FRESH, meta(), graph_output=1 + i) for i in range(plain))
    return GraphMetadata(
        inputs=(records.InputInfo(0, TENSOR, like),),
        outputs=(records.OutputInfo(0, KIND.FRESH, like, graph_output=0), *others),
        tangents=(records.TangentInfo(0, like),),
        num_forward_outputs=1 + plain,
        forward_requires_grad=(True, *(False,) * plain),
        differentiable_inputs=(0,),
        is_training=True,
    )


@pytest.mark.parametrize("plain", [0, 1, 2])
def test_the_list_of_arguments_is_empty_after_a_call(how: Any, plain: int) -> None:
    call = how(build_plan(training(meta(grad=True), plain), num_saved_tensors=1),
               boxed(lambda x: [x * 2, *[x * 3] * plain, x]), boxed(lambda x, t: [t * 2]))  # fmt: skip
    args = [torch.ones(3, requires_grad=True)]
    found = call(args)
    assert args == [] and [o.tolist() for o in found] == [[2] * 3, *[[3] * 3] * plain]
    assert [o.requires_grad for o in found] == [True, *[False] * plain]


def test_a_write_under_no_grad_after_one_with_history_has_none(same_as_eager: Any) -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        x.mul_(z)
        with torch.no_grad():
            y.mul_(3)
        return [x * 2, y.sin(), y.view(-1), z]

    def make() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.rand(4).requires_grad_() * 1 for _ in range(3)]

    assert same_as_eager(fn, make) == 2


def test_arguments_that_nobody_writes_to_may_share_memory(how: Any) -> None:
    infos = (records.InputInfo(0, TENSOR, meta(), mutation=DATA, updated_output=0),
             *(records.InputInfo(i, TENSOR, meta()) for i in (1, 2)))  # fmt: skip
    plan = build_plan(GraphMetadata(infos, (), num_forward_outputs=1, num_mutated=1))
    call = how(plan, boxed(lambda a, b, c: [a + b]))
    memory = torch.arange(8.0)
    call([memory[5:], memory[:3], memory[1:4]])
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 7, 9]
    with pytest.raises(AliasingChangedError, match=r"input in0 is mutated .* shares memory with input in2,"):
        call([memory[5:], memory[:3], memory[3:6]])


@pytest.mark.parametrize("checks", [True, False])
def test_parts_of_wrappers_are_compared_where_it_is_asked_for(how: Any, checks: bool) -> None:
    def write(x: Any, y: Any) -> list[Any]:
        x.mul_(y)
        return []

    y = torch.tensor([3.0, 4.0])
    meta = analyze(write, [TwoTensor(torch.ones(2), torch.ones(2)), y])
    call = how(build_plan(meta, options=WrapperOptions(check_aliasing=checks)), lambda a, b, y: [a * y, b * y])
    call([TwoTensor(torch.ones(2), torch.ones(2)), y])
    if checks:
        with pytest.raises(AliasingChangedError):
            call([TwoTensor(y, torch.ones(2)), y])
    else:
        call([TwoTensor(y, torch.ones(2)), y])
        assert y.tolist() == [9, 16]


def test_tensors_inside_of_results_are_tensors_of_their_own(how: Any) -> None:
    x = TwoTensor(torch.ones(2), torch.ones(2))

    def forward(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cat([a * 2, a])[:2], torch.cat([b * 3, b])[:2]]

    (made,) = how(build_plan(analyze(lambda x: [x * 2], [x])), forward)([x])
    assert not made.a._is_view() and not made.b._is_view() and made.b.tolist() == [3, 3]


def test_only_what_is_used_is_read() -> None:
    symbols = tuple(records.SymbolBinding(f"s{i}", 0, "size", i) for i in range(2))
    view = records.ViewSpec("float32", ("s1",), (1,), 0, False)
    outputs = (records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=view),)
    record = GraphMetadata((records.InputInfo(0, TENSOR, meta(("s0", "s1"), ("s1", 1))),), (), symbols=symbols)
    assert build_plan(record).prologue == ()
    used = build_plan(GraphMetadata(record.inputs, outputs, symbols=symbols))
    assert used.prologue == (BindSymbol("s1", "in0", "size", 1),)


def test_a_graph_without_tangents_or_without_inputs_to_differentiate_has_no_backward() -> None:
    like = records.InputInfo(0, TENSOR, meta(grad=True))
    for changes in ({"is_training": True}, {"differentiable_inputs": (0,)}, {"is_training": True,
                    "differentiable_inputs": (0,)}, {"tangents": (records.TangentInfo(0, meta()),)}):  # fmt: skip
        outputs = (records.OutputInfo(0, KIND.FRESH, meta(), graph_output=0),)
        assert not build_plan(GraphMetadata((like,), outputs, num_forward_outputs=1, **changes)).call.training


@pytest.mark.parametrize("bits", ["conjugated", "negated", "both", "none"])
def test_a_complex_tangent_is_what_it_means(how: Any, bits: str) -> None:
    like = meta((2,), (1,), True, "complex64")
    seen = []

    def backward(x: Tensor, tangent: Tensor) -> list[Tensor]:
        seen.append((tangent.is_conj(), tangent.is_neg()))
        return [tangent * 2]

    call = how(build_plan(training(like), num_saved_tensors=1), boxed(lambda x: [x * 2, x]), boxed(backward))
    x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    given = torch.tensor([1 + 1j, 2 - 3j])
    given = torch._neg_view(given) if bits in ("negated", "both") else given
    given = given.conj() if bits in ("conjugated", "both") else given
    (grad,) = torch.autograd.grad(call([x])[0], x, given)
    torch.testing.assert_close(grad, given.resolve_conj().resolve_neg() * 2)
    assert seen == [(False, False)]


def test_a_graph_that_is_not_kept_is_released_by_a_backward_for_second_derivatives_too(how: Any) -> None:
    call = how(build_plan(training(meta(grad=True)), num_saved_tensors=1), boxed(lambda x: [x.sin(), x.cos()]),
               boxed(lambda c, t: [t * c]))  # fmt: skip
    x = torch.ones(3, requires_grad=True)
    (out,) = call([x])
    torch.autograd.grad(out.sum(), x, create_graph=True, retain_graph=False)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(out.sum(), x)
    (out,) = call([x])
    torch.autograd.grad(out.sum(), x, create_graph=True, retain_graph=True)
    torch.autograd.grad(out.sum(), x)


def test_a_plain_result_before_a_wrapper_that_the_loss_ignores(wrapped: Any) -> None:
    def fn(x: Any, y: Any) -> list[Any]:
        return [y * 2, y * 3, x * y]

    def make() -> list[Any]:
        return [TwoTensor(torch.ones(2), torch.full((2,), 2.0)), torch.tensor([1.0, 5.0]).requires_grad_()]

    call, (x, y) = wrapped(fn, make()), make()
    first, second, product = call([x, y])
    for plain in ([first], [second], [first, second]):
        with pytest.raises(MetadataMismatchError, match="gives argument 1 a gradient of a tensor subclass"):
            torch.autograd.grad([p.sum() for p in plain], y, retain_graph=True)
    (grad,) = torch.autograd.grad([second, product], y, [torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2))])
    assert grad.a.tolist() == [4, 4] and grad.b.tolist() == [5, 5]


DTYPES = ["float32", "float64", "int16", "int8", "complex64", "complex128", "float16", "int64"]


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_base_is_seen_in_any_dtype(base_dtype: str, dtype: str) -> None:
    """Compared with a tensor over the same storage; where strides are no whole numbers of elements it is refused."""
    rng = random.Random(f"{base_dtype} {dtype}")
    kind, whole = getattr(torch, dtype), torch.arange(96, dtype=torch.uint8).view(getattr(torch, base_dtype))
    taken = refused = 0
    for _ in range(40):
        sizes = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
        strides = tuple(rng.randint(1, 6) for _ in sizes)
        reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        room = whole.nbytes // kind.itemsize - reach
        if room < 0:
            continue
        delta = rng.randint(0, room)
        expected = torch.empty(0, dtype=kind).set_(whole.untyped_storage(), delta, sizes, strides)
        try:
            found = take_member(whole, records.ViewSpec(dtype, sizes, strides, delta, False), {})
        except UnsupportedOverlapError as error:
            assert "are no views" not in str(error) and kind.itemsize < whole.element_size()
            ratio = whole.element_size() // kind.itemsize
            assert any(s % ratio and n != 1 for n, s in zip(sizes[:-1], strides[:-1], strict=True))
            assert f"one of dtype torch.{dtype} has strides {strides}" in str(error)
            refused += 1
            continue
        assert found.dtype == kind and found.shape == sizes and found.data_ptr() == expected.data_ptr()
        real = [i for i, n in enumerate(sizes) if n > 1]
        assert [found.stride(i) for i in real] == [strides[i] for i in real]
        taken += 1
    assert taken > 5 and (refused == 0 or kind.itemsize < whole.element_size())


def test_a_result_that_is_an_earlier_one_is_a_tensor_of_its_own(how: Any) -> None:
    like = meta(grad=True)
    record = replace(
        training(like),
        outputs=tuple(records.OutputInfo(i, KIND.FRESH, like, graph_output=i) for i in range(2)),
        tangents=tuple(records.TangentInfo(i, like) for i in range(2)),
        num_forward_outputs=2,
        forward_requires_grad=(True, True),
        repeated_outputs=(1,),
    )

    def forward(x: Tensor) -> list[Tensor]:
        doubled = x * 2
        return [doubled, doubled, x]

    call = how(build_plan(record, num_saved_tensors=1), boxed(forward), boxed(lambda x, a, b: [a * 2 + b * 2]))
    x = torch.ones(3, requires_grad=True)
    first, second = call([x])
    assert first is not second and first.data_ptr() == second.data_ptr()
    first.mul_(3)
    assert (first._version, second._version) == (1, 0) and second.tolist() == [6, 6, 6]
    first.sum().backward(retain_graph=True)
    assert x.grad is not None and x.grad.tolist() == [6, 6, 6]
    (grad,) = torch.autograd.grad(second.sum(), x)
    assert grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("delta", [-2, -1, 0, 1, "s0 - 4", "-s0 + 3"])
def test_a_view_may_begin_before_what_it_is_a_view_of(how: Any, delta: Any) -> None:
    view = records.ViewSpec("float32", (2,), (2,), delta, False)
    record = GraphMetadata(
        (records.InputInfo(0, TENSOR, meta(("s0",), (1,))),),
        (records.OutputInfo(0, KIND.ALIAS_OF_INPUT, base=0, view=view),),
        symbols=(records.SymbolBinding("s0", 0, "size", 0),),
    )
    memory = torch.arange(12.0)
    (out,) = how(build_plan(record), boxed(lambda x: []))([memory[4:8]])
    begin = 4 + (delta if isinstance(delta, int) else {"s0 - 4": 0, "-s0 + 3": -1}[delta])
    assert out.tolist() == [begin, begin + 2] and out.data_ptr() == memory[begin:].data_ptr()


def test_what_the_backward_writes_to_shares_memory_with_no_other_argument(how: Any) -> None:
    infos = (records.InputInfo(0, TENSOR, meta(grad=True)), records.InputInfo(1, TENSOR, meta()))
    record = replace(training(meta(grad=True)), inputs=infos, backward_writes=(records.BackwardWrite(1, 1),))
    plan = build_plan(record, num_saved_tensors=1)
    call = how(plan, boxed(lambda x, y: [x.sin(), x.cos()]), boxed(lambda c, t, now: [t * c, now + 1]))
    memory = torch.ones(5)
    call([memory[:3].requires_grad_(), torch.ones(3)])
    with pytest.raises(AliasingChangedError, match=r"input in1 is mutated .* shares memory with input in0,"):
        call([memory[:3].requires_grad_(), memory[2:]])
    assert cooperation(plan.call, torch.fx.symbolic_trace(torch.nn.Identity())) == {}


def test_versions_of_arguments_over_one_memory_move_by_every_write(same_as_eager: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        x.mul_(2)
        y.add_(1)
        x.sub_(0.5)
        return [x * 1]

    def make() -> list[Tensor]:
        memory = torch.arange(8.0)
        return [memory[:5], memory.detach()[2:]]

    assert same_as_eager(fn, make) == 2


def test_results_inside_of_wrappers_are_counted_with_what_is_saved(how: Any, wrapped: Any) -> None:
    def make() -> list[Any]:
        return [TwoTensor(torch.ones(2, 3), torch.ones(2, 3)).requires_grad_(), torch.ones(2, 3)]

    plan = wrapped(lambda x, y: [x * y, y * 2], make(), varying=True).plan
    inner = plan.call.subclasses
    expected = inner.num_forward_outputs + inner.num_saved_tensors + inner.num_saved_symints
    assert (inner.num_forward_outputs, inner.num_saved_tensors, inner.num_saved_symints) == (3, 3, 1)
    call = how(plan, boxed(lambda *args: [torch.ones(2, 3)] * 4), lambda: 1 / 0)
    with pytest.raises(CallingConventionError, match=f"compiled for {expected} forward results, but there are 4"):
        call(make())


@pytest.mark.parametrize("lengths", [[-3, 10], [True, 6], [7.0], [], [7, 0, 0], [3, 3], "7", None, [[7]]], ids=repr)
def test_lengths_that_no_part_has_are_damage(lengths: Any) -> None:
    plan = build_plan(GraphMetadata((records.InputInfo(0, TENSOR, meta()),), ()))
    line, _, body = SerializableFunction(plan, b"forward", None, lambda data: boxed(list)).serialize().partition(b"\n")
    header = json.loads(line)
    whole = isinstance(lengths, list) and all(isinstance(n, int | float) for n in lengths)
    starts = [0, *itertools.accumulate(map(int, lengths))] if whole else [0, 7]
    parts = [body[a:b] for a, b in itertools.pairwise(starts)]
    header |= {"lengths": lengths, "digest": _digest(header["plan"], parts)}
    with pytest.raises(PlanError, match="are damaged: lengths or digest do not fit them"):
        SerializableFunction.deserialize(json.dumps(header).encode() + b"\n" + body, lambda data: boxed(list))


def test_a_wrapper_whose_gradient_is_of_its_own_class_may_get_none(wrapped: Any) -> None:
    def make() -> list[Any]:
        return [TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_(), torch.ones(2).requires_grad_()]

    call, (x, y) = wrapped(lambda x, y: [x * 3, y * 2], make()), make()
    product, plain = call([x, y])
    found = torch.autograd.grad(plain.sum(), [x, y], allow_unused=True, retain_graph=True)
    assert (found[0] is None or not found[0].a.any()) and found[1].tolist() == [2, 2]
    (grad,) = torch.autograd.grad(product, x, TwoTensor(torch.ones(2), torch.ones(2)))
    assert type(grad) is TwoTensor and grad.b.tolist() == [3, 3]


def test_many_results_keep_their_order(how: Any) -> None:
    like = meta(grad=True)
    order = [9, 1, 8, 16, 0, 3]
    record = replace(
        training(like),
        outputs=tuple(records.OutputInfo(i, KIND.FRESH, like if i in order else meta(), graph_output=i)
                      for i in range(18)),
        tangents=tuple(records.TangentInfo(i, meta()) for i in order),
        num_forward_outputs=18,
        forward_requires_grad=tuple(i in order for i in range(18)),
    )  # fmt: skip
    call = how(build_plan(record, num_saved_tensors=1), boxed(lambda x: [*(x * i for i in range(18)), x]),
               boxed(lambda x, *tangents: [sum(t * i for t, i in zip(tangents, order, strict=True))]))  # fmt: skip
    x = torch.ones(3, requires_grad=True)
    found = call([x])
    assert [o.tolist() for o in found] == [[i] * 3 for i in range(18)]
    assert [o.requires_grad for o in found] == [i in order for i in range(18)]
    for i in order:
        (grad,) = torch.autograd.grad(found[i].sum(), x, retain_graph=True)
        assert grad.tolist() == [i] * 3


def test_a_conjugated_view_of_a_plain_argument_comes_back_conjugated(how: Any) -> None:
    like = meta((2,), (1,), False, "complex64")
    view = records.ViewSpec("complex64", (2,), (1,), 0, False, conj=True)
    result = records.OutputInfo(0, KIND.ALIAS_OF_INPUT, replace(like, conj=True), base=0, view=view)
    call = how(build_plan(GraphMetadata((records.InputInfo(0, TENSOR, like),), (result,))), boxed(lambda x: []))
    x = torch.tensor([1 + 2j, 3 - 1j])
    (found,) = call([x])
    assert found.is_conj() and found.data_ptr() == x.data_ptr() and torch.equal(found, x.conj())
