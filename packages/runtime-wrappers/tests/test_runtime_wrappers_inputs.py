"""Duplicate, overlapping and newly aliasing arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_runtime_wrappers import (
    AliasingChangedError,
    InputPlan,
    WrapperError,
    WrapperOptions,
    WrapperPlan,
    build,
    make_boxed,
    overlap,
    prepare_inputs,
)
from aotkit_runtime_wrappers.contract import InputKind, MutationKind, TensorMeta
from aotkit_runtime_wrappers.operations.checks import CheckAliases, CheckPlace
from aotkit_runtime_wrappers.overlap import AliasCheck, PlacedAliasCheck, refuse_new_aliases
from aotkit_runtime_wrappers.placed_arguments import PlacedArguments, placed
from aotkit_runtime_wrappers.refinements import checks_aliases
from aotkit_runtime_wrappers.source import Source
from aotkit_runtime_wrappers.synthetic_base import PreparedFunction, graph_inputs, plan_synthetic_bases


@pytest.mark.covers("F4.17")
def test_duplicates_are_found_by_identity_and_put_back():
    a, b = torch.randn(2), torch.randn(2)
    plan = prepare_inputs([a, 3, b, a, 3, a.view(2)])
    assert plan.kept == (0, 1, 2, 4, 5)
    assert plan.keep_mask == (True, True, True, False, True, True)
    assert plan.duplicate_of == (None, None, None, 0, None, None)
    assert plan.overlaps == ((0, 5),)
    args = [a, 3, b, a, 3, a]
    assert all(x is y for x, y in zip(plan.expand(plan.select(args)), args, strict=True))
    assert InputPlan.from_json(plan.to_json()) == plan
    assert "in3 is in0" in str(plan)


@pytest.mark.covers("F4.17", "F4.20")
def test_gradients_of_a_duplicate_are_counted_once_and_it_is_returned_itself(compile_eagerly, how):
    x = torch.randn(3, requires_grad=True)
    compiled = compile_eagerly(lambda a, b: (a * b, b), [x, x], how=how)
    product, same = compiled.call([x, x])
    assert same is x
    torch.testing.assert_close(torch.autograd.grad(product.sum(), x)[0], 2 * x.detach())


@pytest.mark.covers("F4.17")
def test_a_mutated_duplicate_is_seen_through_both_names(compile_eagerly, how):
    def function(a, b):
        a.add_(1)
        return (b * 2,)

    x = torch.zeros(3)
    compiled = compile_eagerly(function, [x, x], how=how)
    (out,) = compiled.call([x, x])
    assert out.tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


@pytest.mark.covers("F4.17", "F4.19")
def test_distinct_tensors_where_duplicates_were_captured_are_refused(compile_eagerly, how):
    x = torch.randn(3)
    compiled = compile_eagerly(lambda a, b: (a * b,), [x, x], how=how)
    args = [x, torch.randn(3)]
    with pytest.raises(AliasingChangedError, match="in1 and in0 were the same tensor"):
        compiled.call(args)
    assert len(args) == 2, "the arguments must still be there for another capture"


def _writes_first(a, b):
    a.add_(1)
    return (a * b,)


@pytest.mark.covers("F4.42")
@pytest.mark.parametrize("aliases", [lambda t: (t, t), lambda t: (t, t[:]), lambda t: (t[:3], t[1:4])])
def test_an_alias_of_a_mutated_input_that_was_not_there_at_capture_is_refused(compile_eagerly, how, aliases):
    compiled = compile_eagerly(_writes_first, [torch.ones(3), torch.ones(3)], how=how)
    args = list(aliases(torch.ones(4)))
    with pytest.raises(AliasingChangedError, match="mutated by this graph and now shares memory"):
        compiled.call(args)
    assert len(args) == 2


@pytest.mark.covers("F4.42")
@pytest.mark.parametrize(
    "parts",
    [lambda t: (t[:, 0], t[:, 1]), lambda t: (t.flatten()[:4], t.flatten()[4:]), lambda t: (t[0, :0], t[0, :0])],
)
def test_parts_of_one_storage_that_do_not_overlap_are_accepted(compile_eagerly, how, parts):
    first, second = parts(torch.ones(4, 2))
    copies = [torch.ones(first.shape), torch.ones(second.shape)]
    compiled = compile_eagerly(_writes_first, copies, how=how)
    (out,) = compiled.call([first, second])
    assert out.tolist() == [2.0] * len(first)
    assert second.tolist() == [1.0] * len(second)


@pytest.mark.covers("F4.42")
def test_the_alias_check_can_be_left_out_and_is_free_without_mutation(compile_eagerly):
    options = WrapperOptions(check_aliasing=False)
    compiled = compile_eagerly(_writes_first, [torch.ones(3), torch.ones(3)], options=options)
    assert "_refuse_new_aliases" not in compiled.call.source
    compiled = compile_eagerly(lambda a, b: (a * b,), [torch.ones(3), torch.ones(3)])
    assert "_refuse_new_aliases" not in compiled.call.source


def test_a_graph_that_counts_from_the_start_of_a_storage_is_called_where_the_input_begins_as_at_capture(
    compile_eagerly, how
):
    memory = torch.arange(10.0)
    plan = compile_eagerly(lambda a: (a.as_strided((2,), (1,), 6) * 1,), [memory[3:7]]).plan
    check = CheckPlace("in0", 3, 32)
    plan = replace(plan, prologue=(*plan.prologue, check))
    assert WrapperPlan.from_json(plan.to_json()) == plan and checks_aliases(plan)
    call = how(plan, make_boxed(lambda a: [a.as_strided((2,), (1,), 6) * 1]), None)
    assert call([memory[3:7]])[0].tolist() == [6.0, 7.0]
    with pytest.raises(AliasingChangedError, match="begins at element 2 of it and began at 3"):
        call([memory[2:6]])
    with pytest.raises(RuntimeError, match="ends at byte 32 of a storage of 28"):
        call([torch.arange(7.0)[3:7]])


@pytest.mark.covers("F4.21")
def test_bases_come_first_among_the_graph_inputs():
    a, c_base, b_base, d = torch.randn(4), torch.randn(2, 2), torch.randn(2, 2), torch.randn(4)
    args = [a, c_base.view(-1), b_base.view(-1), b_base, c_base, d]
    plan = prepare_inputs(args)
    assert plan.overlaps == ((1, 4), (2, 3))
    plan = plan_synthetic_bases(plan, args, [(1, 4), (2, 3)])
    assert plan.graph_input_names() == ("base0", "base1", "in0", "in5")
    found = graph_inputs(plan, args)
    assert all(x is y for x, y in zip(found, [c_base, b_base, a, d], strict=True))
    assert InputPlan.from_json(plan.to_json()) == plan


def _writes_one_of_two_views(a, b, other):
    a.mul_(2)
    return b + other, b, b.sum()


@pytest.mark.covers("F4.21")
@pytest.mark.parametrize("kind", ["slices", "base and view", "other memory order", "no common base"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_overlapping_arguments_one_of_them_mutated_behave_as_eager(compile_eagerly, how, kind, training):
    def arguments():
        leaf = torch.arange(12.0).requires_grad_(training)
        whole = leaf * 1
        if kind == "slices":
            parts = whole[:8], whole[4:]
        elif kind == "base and view":
            parts = whole, whole[4:]
        elif kind == "other memory order":
            square = whole.view(3, 4)
            parts = square.t(), square
        else:
            whole = whole.detach()
            parts = whole.data[:8], whole.data[4:]
        return leaf, whole, *parts, torch.ones(parts[1].shape, requires_grad=training)

    def observe(call):
        leaf, whole, a, b, other = arguments()
        out, same, total = call(a, b, other)
        grads = []
        if training:
            sources = [other] if kind == "no common base" else [leaf, other]
            grads = torch.autograd.grad((out * 3).sum() + total * 5, sources, allow_unused=True)
        return same is b, [t.detach() for t in (whole, a, b, out, total)], grads

    compiled = compile_eagerly(_writes_one_of_two_views, list(arguments()[2:]), how=how)
    assert compiled.plan.call.graph_inputs[0] == "base0"
    expected, found = observe(_writes_one_of_two_views), observe(lambda *args: compiled.call(list(args)))
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.covers("F4.21")
def test_an_overlapping_argument_whose_shape_changes_in_place_has_it_after_the_call(compile_eagerly, how):
    def fn(a, b):
        a.mul_(2)
        b.t_()
        return (b + 1,)

    def observe(call):
        whole = torch.arange(12.0)
        a, b = whole[:8], whole[4:].view(2, 4)
        (out,) = call(a, b)
        return whole, b, out, b.stride(), b.storage_offset()

    whole = torch.arange(12.0)
    compiled = compile_eagerly(fn, [whole[:8], whole[4:].view(2, 4)], how=how)
    torch.testing.assert_close(observe(lambda *args: compiled.call(list(args))), observe(fn))


@pytest.mark.covers("F4.21")
def test_another_overlap_than_the_captured_one_is_refused(compile_eagerly, how):
    whole = torch.arange(12.0)
    compiled = compile_eagerly(_writes_one_of_two_views, [whole[:8], whole[4:], torch.ones(8)], how=how)
    with pytest.raises(AliasingChangedError, match="another part of the memory"):
        compiled.call([whole[1:9], whole[4:], torch.ones(8)])
    with pytest.raises(AliasingChangedError, match="do not now"):
        compiled.call([whole[:8], torch.ones(8), torch.ones(8)])


@pytest.mark.covers("F4.22")
def test_overlaps_that_no_base_can_stand_for_are_refused_with_the_reason():
    whole = torch.arange(8.0)
    shifted = torch.zeros(12, dtype=torch.uint8)[1:9]
    odd = [shifted, torch.zeros(0).set_(shifted.untyped_storage(), 1, (1,), (1,)).requires_grad_()]
    unrelated = [whole.data[:4].requires_grad_(), whole.data[2:]]
    for args in (odd, unrelated):
        with pytest.raises(WrapperError, match="no views of one tensor"):
            plan_synthetic_bases(prepare_inputs(args), args, [(0, 1)])
    differentiable = [(whole.clone().requires_grad_() * 1)]
    differentiable.append(differentiable[0][:4])
    plan = plan_synthetic_bases(prepare_inputs(differentiable), differentiable, [(0, 1)])
    changes_shape = PreparedFunction(lambda a, b: (b.unsqueeze_(0),), plan)
    with pytest.raises(WrapperError, match="changed in place"):
        changes_shape(differentiable[0])


def test_detached_fakes_of_one_storage_have_a_fake_base():
    with FakeTensorMode() as mode:
        whole = torch.empty(8)
        args = [whole, whole.detach()]
    plan = plan_synthetic_bases(prepare_inputs(args), args, [(0, 1)])
    (base,) = graph_inputs(plan, args)
    assert isinstance(base, FakeTensor) and base.fake_mode is mode and base.shape == (8,)


def test_writing_to_a_flat_base_moves_the_versions_of_its_members(compile_eagerly, how):
    whole = torch.ones(8)
    args = [whole, whole.detach()[2:], torch.ones(6)]
    compiled = compile_eagerly(_writes_one_of_two_views, args, how=how)
    before = [a._version for a in args]
    compiled.call(list(args))
    assert [a._version > b for a, b in zip(args, before, strict=True)] == [True, True, False]


def test_a_storage_whose_size_no_argument_tells_is_refused():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    whole = torch.randn(5, 3, 2)
    first = whole[::2]
    fakes = [mode.from_tensor(t, static_shapes=False) for t in (first, first.detach())]
    with pytest.raises(WrapperError, match=r"the sizes \['s\d+'\] .* cannot be read from any argument"):
        plan_synthetic_bases(prepare_inputs([first, first.detach()]), fakes, [(0, 1)])


def test_tensors_that_lie_where_they_lay_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have moved are, and so are all after a refusal."""
    compared: list[int] = []

    def noted(mutated, others, *names):
        compared.append(len(mutated))
        refuse_new_aliases(mutated, others, *names)

    monkeypatch.setattr(overlap, "refuse_new_aliases", noted)
    check, memory = AliasCheck(), torch.zeros(12)
    a, b, c = memory[:4], memory[4:8], memory[6:10]
    for _ in range(3):
        check((a,), (b,), "in0", "in1")
    assert len(compared) == 1
    for _ in range(2):
        with pytest.raises(AliasingChangedError, match=r"input in0 is mutated .* shares memory with input in1"):
            check((b,), (c,), "in0", "in1")
    check((a,), (b,), "in0", "in1")
    assert len(compared) == 3
    check((torch.zeros(4),), (b,), "in0", "in1")
    assert len(compared) == 4


def written_beside(seed: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Memory, pieces of it that are written and that are not; none have an element in common."""
    memory, random = torch.zeros(400), Random(seed)
    cuts = sorted(random.sample(range(400), 24))
    pieces = [memory[low:high] for low, high in itertools.pairwise(cuts)]
    random.shuffle(pieces)
    return memory, pieces[:8], pieces[8:]


@pytest.mark.parametrize("told", ["nothing", "addresses", "what moved"])
@pytest.mark.parametrize("seed", range(12))
def test_the_few_that_moved_are_refused_where_all_compared_would_be(seed: int, told: str) -> None:
    """Of tensors that are not written to some lie elsewhere in the next call: on free memory or on what is written."""
    memory, mutated, others = written_beside(seed)
    random, count = Random(seed + 100), 8 + len(others)
    check, placed_check = AliasCheck(), PlacedAliasCheck(range(8), range(8, count))
    names = [" ".join(f"in{k}" for k in range(*ends)) for ends in ((0, 8), (8, count))]
    before: tuple[int, ...] = ()

    def compared() -> None:
        refuse_new_aliases(mutated, others, *names)

    def asked() -> None:
        nonlocal before
        args = placed([*mutated, *others])
        if told == "nothing":
            check(mutated, others, *names)
            return
        if told == "what moved" and before:
            moved = tuple(k for k in range(count) if args.addresses[k] != before[k])
            args = PlacedArguments.at(args, args.addresses, before, moved)
        before = args.addresses
        placed_check(args)

    def outcome(asked: Callable[[], object]) -> str | None:
        try:
            asked()
        except AliasingChangedError as error:
            return str(error)
        return None

    refused = 0
    for turn in range(60):
        if turn:
            for k in random.sample(range(len(others)), random.choice((1, 2, 12))):
                start = random.randrange(400 - len(others[k]))
                elsewhere = torch.zeros(others[k].shape) if random.random() < 0.5 else memory[start:]
                others[k] = elsewhere[: len(others[k])]
            if random.random() < 0.1:
                mutated[0] = torch.zeros(mutated[0].shape)
        expected = outcome(compared)
        assert outcome(asked) == expected
        refused += expected is not None
        if expected is not None:
            _, mutated, others = written_beside(seed)
            memory = mutated[0]._base
    assert 0 < refused < 60


def test_tensors_without_memory_are_compared_in_every_call() -> None:
    """All have the same address."""
    check, memory, other = AliasCheck(), torch.zeros(4, device="meta"), torch.zeros(4, device="meta")
    for _ in range(2):
        check((memory,), (other,), "in0", "in1")
    with pytest.raises(AliasingChangedError):
        check((memory,), (memory[1:],), "in0", "in1")
    placed_check = PlacedAliasCheck([0], [1])
    for _ in range(2):
        placed_check(placed([memory, other]))
    with pytest.raises(AliasingChangedError):
        placed_check(placed([memory, memory[1:]]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_addresses_are_enough_where_sizes_are_known(dynamic: bool) -> None:
    meta = TensorMeta("float32", "cpu", ("s0" if dynamic else 3, 2), (2, 1), 0, False)
    names = ("in0", "in1")
    contract = SimpleNamespace(
        inputs=[
            SimpleNamespace(index=k, kind=InputKind.TENSOR, mutation=mutation, meta=meta, is_static=False)
            for k, mutation in enumerate((MutationKind.DATA, MutationKind.NONE))
        ],
        backward_writes=(),
    )
    (check,) = build._alias_checks(contract, names)
    assert check == CheckAliases(("in0",), ("in1",), fixed=not dynamic)
    for source in (Source(), Source(placed="args")):
        check.emit(source, 1)
        assert bool(source.constants) is not dynamic


def test_arguments_that_tell_where_they_lie_are_not_asked() -> None:
    values = [torch.ones(2), torch.ones(3)]
    args = PlacedArguments.at(values, (11, 12), (11, 10), (1,))
    assert placed(args) is args
    assert (args.addresses, args.before, args.moved) == ((11, 12), (11, 10), (1,))
    assert placed(values).addresses == tuple(v.data_ptr() for v in values)
    assert placed(PlacedArguments.at(values, None)).addresses == tuple(v.data_ptr() for v in values)
