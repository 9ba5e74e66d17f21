"""What the scheduler decides about small functions: kernels, scratch rows and temporaries left, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import interpret_program, lower_graph, schedule_program, verify_program
from aotkit_inductor_lower.ir import BufferKind, LoopNest, Program
from aotkit_inductor_lower.ir.walk import expressions, instructions
from aotkit_inductor_lower.symbolic import has_calls

F = torch.nn.functional
DEAR = "is dear to compute again"
IRREGULAR = "does not pass through all of the shared buffer in a regular way"
OVERWRITES = "one of them overwrites memory that the other uses"


@dataclass(frozen=True)
class Case:
    """A function of ``tensors``, and what becomes of it. ``record``: (kind, whether fused, part of the reason).
    ``passes``: stages with loops of their own, of all kernels."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    kernels: int
    temporaries: int
    record: tuple[str, bool, str] | None = None
    rows: tuple[int, ...] = ()
    passes: int | None = None


def m(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


def both(value: Tensor, f: Callable[[Tensor], Any]) -> Any:
    """The value has several readers in ``f``."""
    return f(value)


A, B, S = m(40, 30), m(40, 30) + 1, m(40, 40)
WHOLE = torch.arange(1, 13).view(3, 4)
WHICH = torch.arange(120).view(40, 3) * 7 % 40

INLINED = [
    Case("one reader", lambda x: (x + 1).t() * 2, (A,), 1, 0, ("inline", True, "it has one reader")),
    Case("one column", lambda x: (x + 1).t() * 2, (m(40, 1),), 1, 0, ("inline", True, "it has one reader")),
    Case(
        "dear and summed up repeatedly", lambda x: x.exp()[:, None].expand(20, 50, 30).sum(2), (m(20, 30),), 2, 1,
        ("inline", False, "its reader would compute each element many times"),
    ),
    Case("sorted", lambda x: x.sort(1)[0] * 2, (m(40, 8),), 1, 0, rows=(8, 8, 8)),
    Case("unused", lambda x: (x + 1, (x * 2).sum(1))[0], (A,), 1, 0),
    Case(
        "positions", lambda x: both(torch.arange(30.0) + 1, lambda c: (x * c, x + c.flip(0))), (A,), 1, 0,
        ("inline", True, "it is a constant or a position"),
    ),
    Case(
        "dear and read twice", lambda x: both(x.exp(), lambda e: (e.flip(0) * 2, e.sum(1))), (A,), 2, 1,
        ("inline", False, "it has 2 readers and " + DEAR),
    ),
    Case(
        "cheap and read twice", lambda x: both(x * 2, lambda e: (e.flip(0) * 2, e.t().sum(1))), (A,), 2, 0,
        ("inline", True, "computing it again costs no more than loading it"),
    ),
    Case(
        "two loads and read twice", lambda x, y: both(x * y, lambda e: (e.flip(0) * 2, e.roll(1, 0) + 1)), (A, B), 3, 1,
        ("inline", False, DEAR),
    ),
    Case(
        "one wide load and read twice", lambda x, y: both(x * y, lambda e: (e.flip(0) * 2, e.roll(1, 0) + 1)),
        (A, m(30)), 2, 0, ("inline", True, "costs no more than loading it"),
    ),
    Case(
        "one wide load, one that four rows share", lambda x, y: both(x * y, lambda e: (e.flip(0) * 2, e.roll(1, 0))),
        (m(4, 30), m(30)), 2, 0, ("inline", True, "costs no more than loading it"),
    ),
    Case(
        "one wide load, one that three rows share", lambda x, y: both(x * y, lambda e: (e.flip(0) * 2, e.roll(1, 0))),
        (m(3, 30), m(30)), 3, 1, ("inline", False, DEAR),
    ),
    Case(
        "a division read once", lambda x, y: (x // y).flip(0) + 1, (WHOLE, WHOLE.flip(0)), 1, 0,
        ("inline", True, "it has one reader"),
    ),
    Case(
        "dear and repeated", lambda x: x.exp()[:, None, :] + x[:, None, :1].expand(20, 50, 1), (m(20, 30),), 2, 1,
        ("inline", False, "its reader would compute each element many times"),
    ),
    Case(
        "cheap and repeated", lambda x: (x * 2)[:, None, :] + x[:, None, :1].expand(20, 50, 1), (m(20, 30),), 1, 0,
        ("inline", True, "costs no more than loading it"),
    ),
    Case(
        "dear and scanned", lambda x: x.exp().cumsum(1), (m(20, 30),), 1, 0,
        ("inline", False, "its reader takes one element at a time, and it is dear"), rows=(30,),
    ),
    Case("cheap and scanned", lambda x: (x * 2).cumsum(1), (m(20, 30),), 1, 0, ("inline", True, "it has one reader")),
    Case(
        "a division under a mask", lambda x, y: F.pad(x // y, (1, 1)), (WHOLE, WHOLE.flip(0)), 2, 1,
        ("inline", False, "it may report an error in lanes that its reader masks off"),
    ),
    Case(
        "a division read twice", lambda x, y: both(x // y, lambda q: (q.flip(0) + 1, q.roll(1, 0))),
        (WHOLE, WHOLE.flip(0)), 3, 1, ("inline", False, DEAR),
    ),
    Case(
        "its memory is overwritten", lambda x, y: both(x * 2, lambda e: (x.copy_(y), e.flip(0) + 1)[1]), (A, B), 3, 1,
        ("inline", False, "it reads memory that the graph overwrites"),
    ),
    Case(
        "other memory is overwritten", lambda x, y: both(y * 2, lambda e: (x.copy_(y * 3), e + 1, y.sin())[1:]), (A, B),
        1, 0, ("horizontal", True, "through y"),
    ),
    Case("gathered", lambda x, i: x.exp().gather(1, i) * 2, (S, WHICH), 1, 0, ("inline", True, "it has one reader")),
    Case(
        "gathered many times", lambda x, i: x.exp().gather(1, i) * 2, (m(40, 4), torch.arange(1200).view(40, 30) % 4),
        2, 1, ("inline", False, "would compute each element many times"),
    ),
    Case(
        "written in parts", lambda x, i: x.exp().index_put([i], x[:3], True) * 2, (m(40, 4), torch.tensor([3, 1, 3])),
        3, 1, ("inline", False, "several kernels write parts of it"),
    ),
]  # fmt: skip
FUSED = [
    Case(
        "an ATen call between", lambda x: torch.logcumsumexp(x + 1, 0) + (x + 1).sum(), (A,), 2, 3,
        ("vertical", False, "another step must run between them"),
    ),
    Case(
        "an ATen call that waits for both",
        lambda x, y: both(x.exp(), lambda p: both(p @ y.sin(), lambda g: (y.cos(), g + p))),
        (S, S + 1), 3, 3, ("vertical", False, "another step must run between them"),
    ),
    Case("little is shared", lambda x: (x.exp(), x.flip(0).sin()), (m(10, 10),), 2, 0),
    Case("much is shared", lambda x: (x.exp(), x.sin()), (S,), 1, 0, ("horizontal", True, "through x")),
    Case(
        "other orders", lambda x: (x.exp(), x.t().sin().contiguous()), (S,), 2, 0,
        ("horizontal", False, "they write in different orders"),
    ),
    Case(
        "rows and columns", lambda x, y: (x.sum(1), (x * y).sum(1), x.sum(0)), (S, S + 1), 2, 0,
        ("horizontal", False, "the rows of one are not the rows of the other"),
    ),
    Case(
        "a product of what is overwritten later",
        lambda x, y: both(x @ y.cos(), lambda p: (y.sin(), x.copy_(y * 2), p)[::2]), (S, S + 1), 2, 1,
        ("horizontal", True, "through y"),
    ),
    Case(
        "an ATen call reads what is overwritten later",
        lambda x, y: both(x @ y.cos(), lambda p: (y.sin(), x.copy_(p))[:1]), (S, S + 1), 2, 2,
        ("horizontal", True, "through y"),
    ),
    Case(
        "dear, kept and weighted by the first of each row",
        lambda x: both(x.exp(), lambda e: (e, (e * e[:, :1]).sum(1))), (A,), 1, 0, passes=2,
    ),
    Case(
        "a kernel that joins what it waits for",
        lambda x, y: both(x.exp(), lambda e: (e, (y * e[:, :1]).sum(1), (e * y).sum(1))), (S, S + 1), 1, 0,
        ("horizontal", True, "through y"),
    ),
    Case("dear, kept and summed up", lambda x: both(x.exp(), lambda e: (e, e.sum(1))), (A,), 1, 0, passes=1),
    Case(
        "dear and summed up twice", lambda x: both(x.exp(), lambda e: (e, (e.sum(1, keepdim=True) * e).sum(1))), (A,),
        1, 0, passes=2,
    ),
    Case("a softmax", lambda x: x.softmax(1), (S,), 1, 0, rows=(40,), passes=3),
    Case(
        "sums of a softmax", lambda x: both(x.softmax(1), lambda y: (y.sum(1), (y * x).sum(1))), (S,), 1, 0,
        rows=(40,), passes=3,
    ),
    Case("sums of rows", lambda x, y: (x.sum(1), (x * y).sum(1), x.amax(1)), (S, S + 1), 1, 0, passes=1),
    Case("a scan and its double", lambda x: both(x.cumsum(1), lambda y: (y, y * 2, x + 1)), (S,), 1, 0, passes=1),
    Case("a scan and what is dear", lambda x: both(x.cumsum(1), lambda y: (y, y.exp())), (S,), 1, 0, passes=2),
    Case(
        "a scan across the order of a sum",
        lambda x: both(x * 2, lambda y: (y, y.sum((1, 2)), y.transpose(1, 2).reshape(4, 40).cumsum(1))), (m(4, 5, 8),),
        1, 0, passes=2,
    ),
    Case("a scan and a sum", lambda x: (x.cumsum(1), x.sum(1)), (S,), 1, 0, passes=1),
    Case("one row", lambda x: (x.sum(), x.amax(), x.exp().sum()), (S,), 1, 0, ("horizontal", True, "through x")),
    Case(
        "one row and then all", lambda x: x / (x.sum() + 1000), (S,), 2, 1,
        ("vertical", False, "there is a single row, so its passes could not run in parallel"),
    ),
    Case("mean and variance", lambda x: (x - x.mean(1, keepdim=True)) / x.var(1, keepdim=True), (S,), 1, 0),
    Case("two softmaxes across", lambda x: x.softmax(1).softmax(0), (S,), 2, 1, rows=(40, 40)),
    Case("places and values", lambda x: (x.argmax(1), x.amax(1), x.sum(1)), (S,), 1, 0),
    Case("written and read", lambda x, y: (x.copy_(y.exp()), x + 1)[1], (A, B), 2, 0, ("vertical", False, OVERWRITES)),
    Case(
        "exchanged", lambda x, y: [x.copy_(y + 0), y.copy_(x * 2)][:0], (A, B), 2, 0, ("vertical", False, OVERWRITES)
    ),
    Case(
        "a row of every fourth", lambda a, b: both((a * b).exp().tanh(), lambda p: p - _fourths(p)),
        (m(24, 24), m(24, 24) + 1), 1, 0, ("vertical", True, "through tanh"), rows=(6,),
    ),
    Case(
        "groups that do not fit", lambda x: x.view(6, 10).sum(1)[:, None] + x.view(4, 15).sum(1).repeat(15).view(6, 10),
        (m(60),), 2, 1, ("vertical", False, IRREGULAR),
    ),
    Case(
        "rows within rows", lambda x: both(x.softmax(2), lambda y: (y, y.sum((1, 2)))), (m(4, 6, 32),), 2, 0,
        ("vertical", False, "the rows of one are not the rows of the other"), rows=(32,),
    ),
    Case(
        "rows and those at the other end", lambda x: both(x.softmax(1), lambda y: (y, y + y.flip(0))), (S,), 2, 0,
        ("vertical", False, IRREGULAR), rows=(40,),
    ),
    Case("two parts of what is read once", lambda x: torch.cat([x.exp(), x.sin()], 1), (S,), 1, 0),
    Case(
        "joined, and one of the parts overwritten",
        lambda x, y: both(torch.cat([x, y * 2]), lambda c: (x.copy_(y), c.sum(1))[1]), (A, B), 3, 1,
        ("concat", False, "a part reads memory that the graph overwrites"),
    ),
    Case(
        "joined and summed", lambda x, y: torch.cat([x.exp(), y], 1).sum(1), (S, S + 1), 3, 1,
        ("concat", False, "a part is dear to compute for each element"),
    ),
]  # fmt: skip


def _fourths(p: Tensor) -> Tensor:
    return p.reshape(6, 4, 24).sum(0).repeat(6, 1)


def fresh(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def nests(program: Program) -> list[LoopNest]:
    return [step for step in program.steps if isinstance(step, LoopNest)]


@pytest.mark.parametrize("case", [*INLINED, *FUSED], ids=lambda case: case.name)
def test_small_functions_become_the_kernels_that_their_reasons_explain(case: Case) -> None:
    lowered = lower_graph(make_fx(case.function, tracing_mode="fake")(*fresh(case.tensors)))
    program, records = schedule_program(lowered)
    verify_program(program)
    mine, theirs = fresh(case.tensors), fresh(case.tensors)
    want = case.function(*theirs)
    results = [*interpret_program(program, mine), *mine]
    for got, expected in zip(results, [*(want if isinstance(want, tuple | list) else [want]), *theirs], strict=True):
        torch.testing.assert_close(got, expected)
    rows = [b.sizes for b in program.buffers if b.kind is BufferKind.SCRATCH]
    assert tuple(size.constant for (size,) in rows) == case.rows
    assert len(nests(program)) == case.kernels
    if case.passes is not None:
        assert sum(bool(stage.ranges) for nest in nests(program) for stage in nest.stages) == case.passes
    assert sum(b.kind is BufferKind.TEMPORARY for b in program.buffers) == case.temporaries
    if case.record is not None:
        kind, fused, reason = case.record
        assert any(r.kind == kind and r.fused == fused and reason in r.reason for r in records), records


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.view(0, 2, 3) + 1).view(0, 6) * 2,
        lambda x: (x.exp().view(0, 3, 2).sum(2), x.exp().view(0, 6).sum(1)),
        lambda x: (x + 1).t().reshape(2, 3, 0).sum((0, 1)),
        lambda x: both(x.exp(), lambda e: (e, e.view(6, 0).sin(), e.view(6, 0).sum(1))),
        lambda x: torch.cat([x, x * 2], 1).view(0, 3, 4).amax(2),
    ],
)
def test_empty_tensors_are_scheduled_too(f) -> None:
    x = m(0, 6)
    program, _ = schedule_program(lower_graph(make_fx(f, tracing_mode="fake")(x)))
    verify_program(program)
    want = f(x)
    for got, expected in zip(interpret_program(program, [x]), want if isinstance(want, tuple) else [want], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.view(4, 6, 10).permute(1, 0, 2).reshape(240) + 1,
        lambda x: x.view(4, 6, 5, 2).permute(2, 0, 3, 1).reshape(40, 6) * 2,
        lambda x: x.view(4, 60).t().reshape(60, 2, 2).sum(1),
        lambda x: x.view(2, 3, 4, 10).permute(1, 3, 0, 2).reshape(30, 8).softmax(-1),
        lambda x: x.view(24, 10).t().reshape(2, 120).amax(0),
        lambda x: x[:4].view(1, 4, 1).expand(6, 4, 10).reshape(240) + x,
    ],
)
def test_what_is_read_through_reshapes_is_looped_over_without_divisions(f) -> None:
    x = m(240)
    program, _ = schedule_program(lower_graph(make_fx(f, tracing_mode="fake")(x)))
    verify_program(program)
    assert not any(has_calls(expr) for nest in nests(program) for expr in expressions(instructions(nest.stages)))
    torch.testing.assert_close(interpret_program(program, [x])[0], f(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.view(24, 10).t().reshape(16, 15) + 1,
        lambda x: x.view(4, 6, 5, 2).permute(2, 0, 3, 1).reshape(48, 5) * 2,
        lambda x: x.view(4, 60).t().reshape(40, 6).sum(1),
    ],
)
def test_loops_that_no_divisors_share_keep_their_divisions(f) -> None:
    x = m(240)
    program, _ = schedule_program(lower_graph(make_fx(f, tracing_mode="fake")(x)))
    torch.testing.assert_close(interpret_program(program, [x])[0], f(x))
    assert any(has_calls(expr) for nest in nests(program) for expr in expressions(instructions(nest.stages)))
