"""Chains of operators: which differences are the last call's own, and what the comparison in float64 is given."""

from __future__ import annotations

import math

import pytest
import torch

from aotkit_inductor_lower.lowering import graph as driver
from tools.fuzz_ops.compare import Difference, Wrong, _in_double, settled
from tools.fuzz_ops.execute import Run, observe
from tools.fuzz_ops.known import KNOWN, excused
from tools.fuzz_ops.program import Call, Ref, Sample
from tools.fuzz_ops.tensors import Tensor
from tools.fuzz_ops.verdict import check


def _chain(*ops: str, value: float = 1 + 2**-23) -> Sample:
    calls = tuple(Call(f"v{k}", op, (Ref(f"v{k - 1}" if k else "x0"),)) for k, op in enumerate(ops))
    return Sample(0, (Tensor("x0", "float32", (3,), fill=("constant", value)),), calls, (Ref(calls[-1].result),))


def _plant(monkeypatch, factor: float) -> None:
    """A rule for negation that multiplies as well."""

    def rule(ctx, node, x):
        return ctx.pointwise(node, [x], lambda nest, v: nest.op("mul", v, nest.const(-factor, v.dtype)))

    monkeypatch.setattr(driver, "RULES", {**driver.RULES, torch.ops.aten.neg.default: rule})


@pytest.mark.parametrize(("factor", "kind"), [(1 - 2**-23, "known"), (1 - 2**-16, "different")])
@pytest.mark.parametrize("last", [(), ("aten.cos.default",)], ids=str)
def test_a_difference_that_later_calls_make_larger_is_judged_where_it_arises(monkeypatch, factor, kind, last):
    """The arc cosine of 1 is 0, and of the next number nan, in float64 too."""
    _plant(monkeypatch, factor)
    sample = _chain("aten.neg.default", "aten.acos.default", *last)
    assert check(sample).kind == kind


def test_a_wrong_last_call_is_wrong_whatever_is_before_it(monkeypatch):
    _plant(monkeypatch, 1.5)
    assert check(_chain("aten.exp.default", "aten.abs_.default", "aten.neg.default")).kind == "different"


def _with_an_error(*used: str) -> Sample:
    """``v1`` takes an element that is not there."""
    tensors = (Tensor("x0", "float32", (3,), fill=("constant", 1.0)), Tensor("x1", "int64", (1,), fill=("constant", 9)))
    select = Call("v1", "aten.index_select.default", (Ref("x0"), 0, Ref("x1")))
    return Sample(0, tensors, (Call("v0", "aten.neg.default", (Ref("x0"),)), select), tuple(map(Ref, used)))


def test_a_call_that_nobody_uses_may_raise_in_eager_mode_only(monkeypatch):
    assert check(_with_an_error("v0")).kind == "known"
    assert check(_with_an_error("v0", "v1")).kind == "raises"
    _plant(monkeypatch, 1.5)
    assert check(_with_an_error("v0")).failed


def test_float64_is_given_the_numbers_that_were_drawn():
    calls = (Call("v0", "aten.randn.default", ([40],)), Call("v1", "aten.dropout.default", (Ref("v0"), 0.5, True)))
    sample = Sample(0, (), calls, (Ref("v0"), Ref("v1")))
    eager, exact = observe(sample, sample.function()), _in_double(sample, False)
    for name in ("v0", "v1"):
        assert exact.results[name].dtype is torch.float64
        torch.testing.assert_close(exact.results[name].float(), eager.results[name])


def test_float64_is_asked_about_a_result_that_another_call_cannot_have_in_it():
    x = Tensor("x0", "float32", (4,), fill=("constant", 0.5))
    calls = (
        Call("v0", "aten.exp.default", (Ref("x0"),)),
        Call("v1", "aten.view.dtype", (Ref("x0"), torch.int32)),
        Call("v2", "aten.expand.default", (Ref("v1"), [4])),
    )
    sample = Sample(0, (x,), calls, (Ref("v0"), Ref("v2")))
    assert _in_double(sample, False).error is not None
    eager = observe(sample, sample.function())
    for off, right in ((2e-7, True), (1e-5, False)):
        other = Run({**eager.results, "v0": eager.results["v0"] + off})
        assert (settled(sample, eager, other, ["v0"], False) == []) is right


@pytest.mark.parametrize(
    ("op", "operand", "wrong", "right"),
    [
        ("aten.cosh.default", 710.0, (math.inf, 1.1169973830808553e308), (math.inf, 3.0)),
        ("aten.cosh.default", 709.0, (math.inf, math.inf), (math.inf, 1.1169973830808553e308)),
        ("aten.view.dtype", math.nan, (-8, 32760), (-8, 32761)),
        ("aten.view.dtype", math.nan, (32760, -8), (8, 7)),
    ],
)
def test_what_is_known_of_infinities_and_signs_of_nan_is_no_more_than_that(op, operand, wrong, right):
    rows = [row for row in KNOWN if row.elements and row.ops.startswith(("aten\\.(cosh", "aten\\.view"))]
    row = next(row for row in rows if op.split(".")[1] in row.ops)
    dtype = torch.float64 if "cosh" in op else torch.int16
    operands = [torch.tensor([operand], dtype=torch.float64)]

    def known(want: float, got: float) -> bool:
        values = Wrong(torch.tensor([want], dtype=dtype), torch.tensor([got], dtype=dtype), None)
        return bool(torch.as_tensor(row.elements(values, operands)).all())

    assert (known(*wrong) or wrong[0] == wrong[1]) and not known(*right)


@pytest.mark.parametrize(("factors", "known"), [(40, True), (8, False)])
def test_the_gradient_of_a_product_may_overflow_where_the_factors_before_do(factors, known):
    x = Tensor("x0", "float16", (factors,), fill=("constant", 2.0), grad=True)
    sample = Sample(0, (x,), (Call("v0", "aten.prod.default", (Ref("x0"),)),), (Ref("v0"),), entry="training")
    wrong = Wrong(torch.tensor([-0.5]).half(), torch.tensor([-math.inf]).half(), torch.tensor([-0.5]).double())
    assert (excused(sample, Difference("gradient of x0", "values", "", wrong)) is not None) is known


@pytest.mark.parametrize(("off", "known"), [(6e-9, True), (6e-7, False)])
def test_the_gradient_of_a_deviation_is_as_exact_as_the_mean(off, known):
    x = Tensor("x0", "float32", (9,), fill=("normal",), seed=3, grad=True)
    sample = Sample(0, (x,), (Call("v0", "aten.std.default", (Ref("x0"),)),), (Ref("v0"),), entry="training")
    true = torch.tensor([-1.539e-3], dtype=torch.float64)
    difference = Difference("gradient of x0", "values", "", Wrong(true.float(), (true + off).float(), true))
    assert (excused(sample, difference) is not None) is known
