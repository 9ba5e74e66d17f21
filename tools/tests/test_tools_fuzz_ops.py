"""The fuzzer over operator arguments: it finds what is planted, survives what dies, goes on where it was."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import zlib
from dataclasses import replace

import pytest
import torch

from aotkit_inductor_lower.lowering import graph as driver
from tools.fuzz_ops import campaign, recipes
from tools.fuzz_ops.campaign import Campaign, Settings, quiet
from tools.fuzz_ops.compare import Difference, Wrong, _accurate, _in_double, differences
from tools.fuzz_ops.execute import Run, fakes_agree, observe
from tools.fuzz_ops.generate import Impossible, generate, misfit
from tools.fuzz_ops.known import KNOWN, excused
from tools.fuzz_ops.program import DIRECT, Call, Ref, Sample
from tools.fuzz_ops.public import public
from tools.fuzz_ops.recipes import targets
from tools.fuzz_ops.shrink import shrink
from tools.fuzz_ops.tensors import FLOATS, LAYOUTS, Tensor, fill
from tools.fuzz_ops.verdict import check, check_many

GOAL = ("aten.neg.default", "float32", "permuted")


@pytest.fixture
def negative_is_absolute(monkeypatch):
    """A wrong rule in the place of a right one."""
    rules = {**driver.RULES, torch.ops.aten.neg.default: driver.RULES[torch.ops.aten.abs.default]}
    monkeypatch.setattr(driver, "RULES", rules)


def test_a_sample_is_the_same_for_the_same_seed_and_goal():
    for op in targets():
        assert generate(3, (op, "float32", "gaps")) == generate(3, (op, "float32", "gaps"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_each_layout_is_printed_as_what_it_is(layout):
    for size in ((2, 3, 4, 1), (5,), (), (0, 3)):
        tensor = Tensor("x", "complex64", size, layout, ("special",), seed=5)
        made, read = (
            tensor.make(),
            eval(tensor.text(), {"torch": torch, "inf": math.inf, "nan": math.nan, "fill": fill}),
        )
        assert (read.size(), read.stride(), read.storage_offset()) == (
            made.size(),
            made.stride(),
            made.storage_offset(),
        )
        assert torch.equal(
            torch.view_as_real(read.resolve_conj()).nan_to_num(), torch.view_as_real(made.resolve_conj()).nan_to_num()
        )


@pytest.mark.parametrize("entry", ["direct", "function", "training", "dynamic"])
def test_a_planted_fault_is_found_and_made_small(negative_is_absolute, entry):
    samples = [generate(seed, GOAL, entry) for seed in range(8)]
    outcomes = check_many(samples)
    wrong = [sample for sample, outcome in outcomes if outcome.kind == "different"]
    assert wrong
    smallest = shrink(wrong[0], lambda smaller: check(smaller).kind == "different")
    assert len(smallest.calls) == 1 and smallest.entry == "direct"
    assert max(smallest.tensors[0].size, default=1) <= 3
    assert "aten.neg.default" in smallest.script()


def test_results_no_farther_from_float64_than_eagers_are_right():
    sample = replace(generate(0, ("aten.sum.default", "float16", "contiguous")), entry="function")
    assert check(sample).kind == "equal"


def test_a_campaign_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "CHUNK", 40)
    settings = Settings(60, only="aten.neg", plan="direct", together=20)
    half = Campaign(replace(settings, samples=40), 1, tmp_path / "journal")
    assert half.run().kinds.total() == 40
    whole = Campaign(settings, 1, tmp_path / "journal")
    assert whole.run().kinds.total() == 60
    assert Campaign(settings, 1, tmp_path / "journal").run().cells == whole.total.cells
    with pytest.raises(SystemExit, match="other settings"):
        Campaign(replace(settings, only="aten.abs"), 1, tmp_path / "journal").run()


def test_a_run_draws_the_same_samples_however_many_processes_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "CHUNK", 8)
    settings = Settings(40, only="aten.amax", plan="direct")
    alone, three = (Campaign(settings, n).run() for n in (1, 3))
    assert alone.tried == three.tried and alone.accepted == three.accepted
    journal = tmp_path / "journal"
    Campaign(replace(settings, samples=24), 3, journal).run()
    assert Campaign(settings, 1, journal).run().tried == alone.tried


def test_tensors_are_filled_as_asked_for():
    fills = [t.fill for seed in range(20) for t in generate(seed, GOAL, fill="large").tensors]
    assert sum(fill == ("large",) for fill in fills) > len(fills) / 2


def test_what_failed_is_run_again_by_what_the_journal_says(tmp_path, negative_is_absolute):
    settings = Settings(8, only="aten.neg.default", plan="direct", together=1)
    first = Campaign(settings, 1, tmp_path / "journal").run()
    again = Campaign(settings, 1, tmp_path / "journal").again()
    assert first.failed and again.failed == len(first.failures) == again.kinds.total()


def test_sizes_that_do_not_go_together_are_drawn_where_asked_for():
    goal = ("aten.bucketize.Tensor", "float32", "contiguous")
    assert Campaign(Settings(24, only=goal[0], plan="misfits"), 1).run().kinds["raises"] >= 3
    fitting = [generate(seed, goal) for seed in range(24)]
    changed = [misfit(sample) for sample in fitting]
    for one, other in zip(changed, fitting, strict=True):
        assert one.calls == other.calls and misfit(other) == one
        assert sum(a.size != b.size for a, b in zip(one.tensors, other.tensors, strict=True)) <= 1
    assert sum(one.tensors != other.tensors for one, other in zip(changed, fitting, strict=True)) >= 12


def test_a_sample_that_kills_its_process_is_found_and_the_others_are_run(monkeypatch):
    rule = driver.RULES[torch.ops.aten.neg.default]

    def deadly(ctx, node, *args):
        if not node.meta["val"].is_floating_point() and not node.meta["val"].is_complex():
            os.kill(os.getpid(), signal.SIGKILL)
        return rule(ctx, node, *args)

    monkeypatch.setattr(driver, "RULES", {**driver.RULES, torch.ops.aten.neg.default: deadly})
    tally = Campaign(Settings(60, only="aten.neg", plan="direct"), 1).run()
    assert tally.kinds["died"] >= 1 and tally.kinds.total() == 60
    assert tally.cells["aten.neg.default", "integer", "dense"] == 0
    assert tally.cells["aten.neg.default", "float", "dense"] > 0
    assert "int" in tally.reports[0]


def test_a_sample_that_kills_eager_mode_is_no_failure(monkeypatch):
    def deadly(d, op):
        if d.dtype == "int16":
            os.kill(os.getpid(), signal.SIGKILL)
        recipes.by_schema(d, op)

    targets()
    monkeypatch.setitem(recipes.RECIPES, "aten.neg.default", deadly)
    tally = Campaign(Settings(60, only="aten.neg", plan="direct"), 1).run()
    assert tally.kinds["impossible"] >= 1 and tally.kinds.total() == 60 and not tally.failed


def test_an_error_after_a_fake_kernel_told_other_sizes_than_eager_gives_is_the_fake_kernels():
    indices = [Ref("x1"), None, Ref("x2"), Ref("x3")]
    tensors = (
        Tensor("x0", "int32", (0, 2, 2, 1), "contiguous", ("normal",), seed=5),
        *(
            Tensor(f"x{k}", "int64", size, "contiguous", ("index", 0, 1), seed=5)
            for k, size in enumerate([(0,), (), ()], 1)
        ),
    )
    sample = Sample(0, tensors, (Call("v0", "aten.index.Tensor", (Ref("x0"), indices)),), (Ref("v0"),))
    assert check(sample).kind == "fake"


def test_results_of_integers_are_compared_with_float64_too():
    sample = generate(3, ("aten.special_i1.default", "int16", "contiguous"))
    exact = _in_double(sample, False).results[repr(sample.outputs[0])]
    assert exact.dtype is torch.float64 and torch.get_default_dtype() is torch.float32


def _one_of_each(ops, entry, seed):
    """A sample of every operator, the same ones whatever operators there are beside it."""
    samples = []
    for op in ops:
        rng = random.Random(f"{op} {seed}")
        goal = (op, rng.choice((*FLOATS, "int64", "int32")), rng.choice([n for n, c in LAYOUTS.items() if c != "lazy"]))
        with contextlib.suppress(Impossible):
            samples.append(generate(zlib.crc32(op.encode()), goal, entry))
    return samples


@pytest.mark.parametrize(
    ("entry", "every"), [("direct", 3), ("function", 10), ("training", 10), ("dynamic", 40), ("triton", 16)]
)
def test_operators_with_drawn_arguments_are_as_eager(entry, every):
    quiet()
    ops = targets() if entry in DIRECT else (*targets(), *public())
    samples = _one_of_each([op for op in ops if zlib.crc32(op.encode()) % every == 0], entry, 1)
    wrong = []
    for begin in range(0, len(samples), 12):
        for sample, outcome in check_many(samples[begin : begin + 12]):
            if outcome.failed:
                wrong.append(f"{outcome.kind}: {outcome.detail}\n{sample.script()}")
    assert not wrong, "\n".join(wrong)


def test_a_known_departure_must_explain_every_wrong_element():
    sample = replace(generate(0, ("aten.fmod.Scalar", "float32", "contiguous")), entry="function")
    x = Tensor("x0", "float32", (3,), fill=("constant", 3e38))
    call = Call("v0", "aten.fmod.Scalar", (Ref("x0"), 0.7))
    sample = replace(sample, tensors=(x,), calls=(call,), outputs=(Ref("v0"),), numbers=())
    nan, got = torch.tensor([math.nan, math.nan, math.nan]), torch.tensor([0.1, 0.2, 0.3])
    assert excused(sample, Difference("v0", "values", "", Wrong(nan, got, None)))
    for want in (torch.tensor([math.nan, 0.5, math.nan]), torch.tensor([math.nan, math.nan, 0.5])):
        assert excused(sample, Difference("v0", "values", "", Wrong(want, got, None))) is None
    small = replace(sample, tensors=(replace(x, fill=("constant", 3)),))
    assert excused(small, Difference("v0", "values", "", Wrong(nan, got, None))) is None


def _excused(op, tensors, rest, wrong):
    sample = replace(generate(0, ("aten.fmod.Scalar", "float32", "contiguous")), entry="function")
    call = Call("v0", op, (*(Ref(t.name) for t in tensors), *rest))
    sample = replace(sample, tensors=tuple(tensors), calls=(call,), outputs=(Ref("v0"),), numbers=())
    return excused(sample, Difference("v0", "values", "", wrong)) is not None


def test_a_number_that_the_type_holds_is_no_exponent_of_nothing():
    x = Tensor("x0", "float32", (1,), fill=("constant", -2))
    wrong = Wrong(torch.tensor([math.nan]), torch.tensor([1.0]), None)
    assert _excused("aten.pow.Tensor_Scalar", [x], [5e-324], wrong)
    assert not _excused("aten.pow.Tensor_Scalar", [x], [1e-3], wrong)
    assert not _excused("aten.pow.Tensor_Scalar", [x], [0.0], wrong)
    derivative = Wrong(torch.tensor([math.nan]), torch.tensor([-5e-9]), None)
    assert _excused("aten.pow.Tensor_Scalar", [x], [1e-8], derivative)
    assert not _excused("aten.pow.Tensor_Scalar", [x], [0.5], derivative)


def test_the_variance_of_doubles_is_near_eagers():
    x = Tensor("x0", "float64", (4096,), fill=("normal",), seed=1)
    want = torch.tensor([1.0], dtype=torch.float64)
    assert _excused("aten.var.correction", [x], [], Wrong(want, want * (1 + 1e-14), want))
    assert not _excused("aten.var.correction", [x], [], Wrong(want, want * (1 + 1e-12), want))
    same = Tensor("x0", "float64", (57,), fill=("constant", 5.3))
    for found, known in ((1.8e-15, True), (1e-10, False)):  # of equal numbers there is none
        wrong = Wrong(want * found, want * 0, want * found)
        assert _excused("aten.std.default", [same], [], wrong) is known
    huge = Tensor("x0", "float64", (9,), fill=("constant", 1e300))
    assert _excused("aten.std.default", [huge], [], Wrong(want * 1e285, want * 0, want * 1e285))


@pytest.mark.parametrize("size", [3e38, 3.0])
def test_the_order_of_what_is_added_up_tells_only_where_it_overflows(size):
    grad = Tensor("x0", "float32", (1, 1, 8), fill=("constant", size))
    wrong = Wrong(torch.tensor([-math.inf]), torch.tensor([math.nan]), torch.tensor([math.nan]).double())
    rest = [[8], [1, 1, 4], False, 2.0]
    assert _excused("aten.upsample_linear1d_backward.default", [grad], rest, wrong) is (size > 3)
    wrong = Wrong(torch.tensor([-math.inf]), torch.tensor([math.inf]), torch.tensor([2.9e38]).double())
    assert _excused("aten._log_softmax_backward_data.default", [grad, replace(grad, name="x1")], [2], wrong) is (
        size > 3
    )


def test_sums_of_equal_gradients_are_as_exact_as_sums_of_equal_numbers():
    tensors = [Tensor(name, "float64", (295,), fill=("constant", 1.0)) for name in ("x0", "x1")]
    want = torch.tensor([-800.9], dtype=torch.float64)
    for off, known in ((8e-12, True), (1e-10, False)):
        assert _excused("aten._log_softmax_backward_data.default", tensors, [0], Wrong(want, want + off, want)) is known


def test_a_departure_is_known_of_the_operator_in_place_too():
    x = Tensor("x0", "float32", (4,), fill=("constant", -5.0))
    true = torch.tensor([-1.4e-6], dtype=torch.float64)
    wrong = Wrong(true.float(), true.float() + 3e-7, true)
    assert [_excused(op, [x], [], wrong) for op in ("aten.gelu.default", "aten.gelu_.default")] == [True, True]
    assert not _excused("aten.relu_.default", [x], [], wrong)


@pytest.mark.parametrize(
    ("op", "rest", "value", "wrong", "right"),
    [
        ("aten.remainder.Scalar", [1e-40], 1, (math.nan, 8e-42, 6e-41), (1.0, 8e-42, 6e-41)),
        ("aten.pow.Tensor_Scalar", [0.3], 1e-40, (9.99998e-13, 9.99997e-13, 9.99998e-13), (1e-12, 9e-13, 1e-12)),
        ("aten.copysign.Scalar", [], math.nan, (-1.0, 1.0, -1.0), (-1.0, 2.0, -1.0)),
        ("aten.native_layer_norm.default", [[4], None, None, 0.1], 1e30, (math.nan, 0, 0), (0.5, 0.25, 0.5)),
        ("aten.group_norm.default", [1], math.inf, (math.nan, math.inf, math.nan), (1.0, math.inf, 1.0)),
        ("aten.special_xlog1py.other_scalar", [5e-324], 5.0, (2.5e-323, 0.0, 2.5e-323), (2.5e-300, 0.0, 2.5e-300)),
        (
            "aten.special_xlog1py.other_scalar",
            [5e-324],
            -math.inf,
            (-math.inf, math.nan, -math.inf),
            (-math.inf, 3.0, -math.inf),
        ),
        (
            "aten.native_group_norm.default",
            [None, None, 4, 1, 4, 1, 1e-3],
            4.4,
            (1e-14, 0.0, 1e-14),
            (1e-10, 0.0, 1e-10),
        ),
        ("aten.norm.Scalar", [0.5], 2.0, (1 + 8e-16, 1.0, 1 + 8e-16), (1 + 8e-13, 1.0, 1 + 8e-13)),
    ],
)
def test_what_is_known_of_an_operator_is_no_more_than_its_reason(op, rest, value, wrong, right):
    """(eager's, compiled, in float64) that a departure explains, and that it does not."""
    dtype = "float64" if op.endswith(("other_scalar", "norm.Scalar", "group_norm.default")) else "float32"
    x = Tensor("x0", dtype, (4, 4), fill=("constant", value))
    for numbers, known in ((wrong, True), (right, False)):
        *values, true = (torch.tensor([n], dtype=getattr(torch, dtype)) for n in numbers)
        assert _excused(op, [x], rest, Wrong(*values, true.double())) is known, numbers


@pytest.mark.parametrize(("key", "known"), [(math.nan, True), (math.inf, True), (1.0, False)])
def test_attention_without_scores_has_no_right_value(key, known):
    operands = [Tensor(f"x{k}", "float32", (4, 4), fill=("constant", n)) for k, n in enumerate((1.0, key, 1.0))]
    wrong = Wrong(*(torch.tensor([number]) for number in (0.0, 1.0, 0.0)))
    assert _excused("aten.scaled_dot_product_attention.default", operands, [], wrong) is known


@pytest.mark.parametrize(("layout", "strides"), [("overlapping", (1, 1)), ("contiguous", (4, 1)), ("permuted", (1, 4))])
def test_attention_of_a_query_that_overlaps_itself_has_no_right_value(layout, strides):
    query = Tensor("x0", "float32", (4, 4), layout=layout, seed=5)
    assert query.make().stride() == strides
    operands, known = [query, Tensor("x1", "float32", (4, 4))], layout == "overlapping"
    wrong = Wrong(*(torch.tensor([number]) for number in (0.0, 1.0, 0.0)))
    assert _excused("aten.scaled_dot_product_attention.default", operands, [], wrong) is known


@pytest.mark.parametrize(("layout", "known"), [("expanded", True), ("contiguous", False)])
def test_a_norm_of_groups_with_a_spread_bias_is_read_elsewhere_in_eager_mode(layout, known):
    operands = [Tensor("x0", "float32", (2, 4, 1)), *(Tensor(x, "float32", (4,), layout) for x in ("x1", "x2"))]
    wrong = Wrong(*(torch.tensor([number]) for number in (-1.0, 1.0, -1.0)))
    assert _excused("aten.native_group_norm.default", operands, [2, 4, 1, 2, 1e-3], wrong) is known


def test_fake_kernels_are_asked_about_sizes_that_are_symbols_where_a_sample_has_them():
    sample = generate(0, ("aten.narrow_copy.default", "float32", "contiguous"))
    call = Call("v0", "aten.narrow_copy.default", (Ref("x0"), 1, 0, 2))
    tensors = (Tensor("x0", "float32", (3, 4)),)
    sample = replace(sample, tensors=tensors, calls=(call,), outputs=(Ref("v0"),), numbers=(), entry="dynamic")
    assert "symbolic" in str(fakes_agree(sample))
    assert not isinstance(fakes_agree(replace(sample, entry="function")), Exception)


@pytest.mark.parametrize("op", sorted({row.ops for row in KNOWN if row.elements}))
def test_what_is_known_of_floats_is_asked_about_what_is_made_of_them_too(op):
    """In a chain the wrong result may be a comparison."""
    operands = [torch.ones(3).double(), torch.tensor(2.0).double()]
    for row in (row for row in KNOWN if row.ops == op and row.elements):
        for dtype in (torch.bool, torch.int64):
            wrong = Wrong(*(torch.tensor([number], dtype=dtype) for number in (1, 0, 1)))
            assert not bool(torch.as_tensor(row.elements(wrong, operands)).all())


@pytest.mark.parametrize("step", [2, 4])
def test_where_elements_of_a_result_share_a_place_its_values_are_not_defined(step):
    """Eager's functional copy and random numbers keep the strides of a tensor that overlaps itself."""
    sample = Sample(0, (), (Call("v0", "aten.copy.default", ()),), (Ref("v0"),))
    runs = [Run({"v0": torch.full((16,), value).as_strided((4, 4), (step, 1))}) for value in (1.0, 2.0)]
    assert bool(differences(sample, *runs)) is (step == 4)


def test_after_a_fake_kernel_told_another_type_than_eager_gives_what_follows_is_the_fake_kernels():
    calls = (Call("v0", "prims.erfcx.default", (Ref("x0"),)), Call("v1", "aten.logit.default", (Ref("v0"), 0.3)))
    sample = Sample(0, (Tensor("x0", "bool", (2,), fill=("constant", 1)),), calls, (Ref("v1"),))
    assert check(sample).kind == "fake"


def test_weights_of_upsampling_are_as_exact_as_places_in_the_image():
    image = Tensor("x0", "float32", (1, 1, 8), fill=("constant", 3.0))
    want = torch.tensor([0.125])
    for off, known in ((2e-6, True), (2e-5, False)):
        wrong = Wrong(want, want + off, want.double())
        assert _excused("aten.upsample_linear1d.default", [image], [[4], False, 2.0], wrong) is known


def test_what_float64_says_of_infinities_and_nan_is_right():
    inf, nan = math.inf, math.nan
    want, got = torch.tensor([1.0, -inf, 1.0, inf, 1.0]), torch.tensor([nan, nan, -inf, 3.0, inf])
    true = torch.tensor([nan, nan, inf, inf, inf], dtype=torch.float64)
    assert _accurate(want, got, true, [], []).tolist() == [True, True, False, False, True]


def test_accuracy_is_measured_around_the_arguments_too():
    want, true = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0], dtype=torch.float64)
    got = torch.tensor([1.0 + 3e-6, 1.0 + 3e-4])
    near = torch.tensor([1.0 + 2e-6, 1.0 - 2e-6])
    assert _accurate(want, got, true, [], [(near, true)]).tolist() == [True, False]
    assert _accurate(want, got, true, [], []).tolist() == [False, False]


def _doubtful(dtype, eager, compiled):
    """The differences where eager gives ``eager[0]`` for a permuted tensor, ``eager[1]`` for a contiguous one."""
    x = Tensor("x0", dtype, (4, 10), "permuted", ("constant", 3))
    sample = Sample(0, (x,), (Call("v0", "aten.clone.default", (Ref("x0"),)),), (Ref("v0"),))
    with pytest.MonkeyPatch.context() as patch:
        whole = sample.function()
        patch.setattr(Sample, "function", lambda self: lambda x: [whole(x)[0].fill_(eager[x.is_contiguous()])])
        run = observe(sample, lambda x: [torch.full_like(x, compiled)])
        return differences(sample, observe(sample, sample.function()), run)


def test_what_eager_gives_for_the_same_numbers_in_other_places_is_right():
    assert not _doubtful("float32", (math.nan, math.inf), math.inf)
    assert _doubtful("float32", (math.nan, math.inf), -math.inf)
    assert _doubtful("float32", (math.nan, math.nan), math.inf)


def test_integers_about_which_eager_contradicts_itself_have_no_right_value():
    assert not _doubtful("int64", (3, 4), 5)
    assert _doubtful("int64", (3, 3), 5)


@pytest.mark.parametrize(("number", "bits", "right"), [(math.inf, -512, True), (1.0, -512, False), (1.0, 0, True)])
def test_which_bits_a_computed_nan_has_is_not_settled(number, bits, right):
    x = Tensor("x0", "float16", (3,), fill=("constant", number))
    calls = (
        Call("v0", "aten.sub.Tensor", (Ref("x0"), Ref("x0"))),
        Call("v1", "aten.view.dtype", (Ref("v0"), torch.int16)),
    )
    sample = Sample(0, (x,), calls, (Ref("v1"),))
    eager = observe(sample, sample.function())
    run = observe(sample, lambda x: [torch.full((3,), bits, dtype=torch.int16)])
    found = [difference for difference in differences(sample, eager, run) if difference.kind == "values"]
    assert (not found) is right


@pytest.mark.parametrize(("want", "got"), [(0.0, math.nan), (math.nan, 1.5)])
def test_the_gradient_of_a_product_is_eagers_unless_a_factor_is_not_finite(want, got):
    wrong = Wrong(torch.full((2,), want), torch.full((2,), got), None)
    for numbers, known in (("special", True), ("constant", False)):
        x = Tensor("x0", "float32", (64,), fill=(numbers, 0.0) if numbers == "constant" else (numbers,))
        sample = Sample(0, (x,), (Call("v0", "aten.prod.default", (Ref("x0"),)),), (Ref("v0"),), (), "training")
        assert (excused(sample, Difference("gradient of x0", "values", "", wrong)) is not None) is known


@pytest.mark.parametrize(("grad", "known"), [(1e15, True), (1.0, False)])
def test_what_gelu_loses_below_minus_three_is_multiplied_by_the_gradient(grad, known):
    tensors = [Tensor(f"x{i}", "float32", (4,), fill=("constant", value)) for i, value in enumerate((grad, -5.0))]
    true = torch.tensor([-7.1e-6 * grad], dtype=torch.float64)
    wrong = Wrong(true.float(), true.float() + 2e8, true)
    assert _excused("aten.gelu_backward.default", tensors, [], wrong) is known


@pytest.mark.parametrize(("size", "known"), [(1e25, True), (1e3, False)])
def test_gradients_of_norms_overflow_where_products_do(size, known):
    tensors = [Tensor(f"x{i}", "float32", (2, 6), fill=("constant", size)) for i in range(2)]
    wrong = Wrong(torch.tensor([math.nan]), torch.tensor([math.inf]), torch.tensor([1.7e38]).double())
    assert _excused("aten.native_layer_norm_backward.default", tensors, [], wrong) is known


def test_where_a_unit_decides_whether_a_result_is_a_number_it_may_be_none():
    want, true = torch.tensor([16.0, 16.0, 7.0]), torch.tensor([16.0, 16.0, 7.0], dtype=torch.float64)
    got, moved = torch.tensor([math.nan, 9.0, math.nan]), torch.tensor([math.nan, math.nan, 7.0], dtype=torch.float64)
    assert _accurate(want, got, true, [moved], []).tolist() == [True, False, False]


@pytest.mark.parametrize(("off", "known"), [(1e-14, True), (1e-9, False)])
def test_digamma_is_right_to_eleven_digits_near_a_zero(off, known):
    x = Tensor("x0", "float64", (1,), fill=("constant", 1.4616321449683622))
    want = torch.tensor([-1.9], dtype=torch.float64)
    assert _excused("aten.digamma.default", [x], [], Wrong(want, want + off, want)) is known


def test_what_is_overwritten_need_not_raise_and_other_errors_must():
    x = Tensor("x0", "float32", (0,))
    sample = Sample(0, (x,), (Call("v0", "aten.max.default", (Ref("x0"),)),), (Ref("v0"),))
    text = "max(): Expected reduction dim to be specified for input.numel() == 0."
    assert excused(sample, Difference("it", "error", f"only eager raises: {text}"))
    assert excused(sample, Difference("it", "error", "only eager raises: x INTERNAL ASSERT FAILED at y"))
    assert excused(sample, Difference("it", "error", "only eager raises: index out of range")) is None


@pytest.mark.parametrize(("size", "known"), [(3e38, True), (3.0, False)])
def test_a_matrix_product_is_infinite_or_nan_as_the_order_has_it_where_it_overflows(size, known):
    tensors = [Tensor(f"x{i}", "float32", (2, 2), fill=("constant", n)) for i, n in enumerate((1.5, size))]
    wrong = Wrong(torch.tensor([math.nan]), torch.tensor([math.inf]), torch.tensor([-1.2e37]).double())
    assert _excused("aten.mm.default", tensors, [], wrong) is known


@pytest.mark.parametrize(("place", "known"), [(1e12, True), (3.0, False)])
def test_places_far_from_an_image_are_reflected_exactly(place, known):
    image = Tensor("x0", "float32", (1, 1, 2, 3))
    grid = Tensor("x1", "float32", (1, 1, 2, 2), fill=("constant", place))
    wrong = Wrong(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0]).double())
    assert _excused("aten.grid_sampler_2d.default", [image, grid], [0, 2, True], wrong) is known
