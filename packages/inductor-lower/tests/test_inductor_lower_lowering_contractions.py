"""Products of matrices become contractions with ATen's call in them, which the CPU is left with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    compile_graph,
    interpret_program,
    lower_graph,
    parse_program,
    print_program,
    schedule_program,
)
from aotkit_inductor_lower.ir import Alias, Contraction, ExternCall, Load, Program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import contractions

aten = torch.ops.aten
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def lowered(f: Callable[..., Any], args: list[Any], mode: str = "fake") -> Program:
    program = lower_graph(make_fx(f, tracing_mode=mode)(*args))
    verify_program(program)
    assert parse_program(print_program(program)) == program
    return program


def calls(program: Program) -> list[ExternCall]:
    return [step for step in program.steps if isinstance(step, ExternCall)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def sliced(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every second column of something wider."""
    return numbers(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def transposed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return numbers(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def broadcast(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return numbers(*shape[:-1], 1, dtype=dtype).expand(shape)


Make = Callable[..., torch.Tensor]
CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (aten.mm.default, [(7, 5), (5, 3)]),
    "of one row": (aten.mm.default, [(1, 17), (17, 1)]),
    "of nothing": (aten.mm.default, [(0, 5), (5, 3)]),
    "over nothing": (aten.mm.default, [(4, 0), (0, 3)]),
    "bmm": (aten.bmm.default, [(3, 7, 5), (3, 5, 2)]),
    "bmm of no batch": (aten.bmm.default, [(0, 7, 5), (0, 5, 2)]),
    "addmm": (aten.addmm.default, [(3,), (7, 5), (5, 3)]),
    "addmm of a matrix": (aten.addmm.default, [(7, 3), (7, 5), (5, 3)]),
    "addmm of a column": (aten.addmm.default, [(7, 1), (7, 5), (5, 3)]),
    "addmm of a number": (aten.addmm.default, [(), (7, 5), (5, 3)]),
    "addmm over nothing": (aten.addmm.default, [(3,), (7, 0), (0, 3)]),
    "baddbmm": (aten.baddbmm.default, [(3, 7, 2), (3, 7, 5), (3, 5, 2)]),
    "baddbmm of one matrix": (aten.baddbmm.default, [(7, 2), (3, 7, 5), (3, 5, 2)]),
    "scaled": (lambda b, x, w: aten.addmm(b, x, w, beta=-0.5, alpha=3), [(3,), (7, 5), (5, 3)]),
    "scaled batch": (lambda b, x, w: aten.baddbmm(b, x, w, beta=2, alpha=0.25), [(3, 7, 2), (3, 7, 5), (3, 5, 2)]),
    "without bias": (lambda b, x, w: aten.addmm(b, x, w, beta=0), [(3,), (7, 5), (5, 3)]),
}


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("make", [numbers, sliced, transposed, broadcast], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", CALLS)
def test_a_contraction_gives_what_aten_gives(name: str, make: Make, dtype: torch.dtype) -> None:
    f, shapes = CALLS[name]
    args = [make(*shape, dtype=dtype) if len(shape) > 1 else numbers(*shape, dtype=dtype) for shape in shapes]
    program = lowered(f, args)
    (product,) = contractions(program)
    assert product.library is not None and not calls(program)
    (got,) = interpret_program(program, args)
    want = f(*args)
    assert isinstance(got, torch.Tensor) and got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


def linear_of(*with_bias: Any) -> Any:
    """A graph that still has the call: tracing takes it apart."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "xwb"[: len(with_bias)]]
    result = graph.call_function(aten.linear.default, tuple(nodes))
    graph.output((result,))
    for node, value in zip(nodes, with_bias, strict=True):
        node.meta["val"] = value
    result.meta["val"] = torch.nn.functional.linear(*with_bias)
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("rows", [(), (4,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_any_number_of_rows(rows: tuple[int, ...], bias: bool) -> None:
    args = [numbers(*rows, 5), numbers(7, 5), *([numbers(7)] if bias else [])]
    program = lower_graph(linear_of(*args))
    verify_program(program)
    (product,) = contractions(program)
    assert len(product.rows) == len(rows) and not product.batch
    (got,) = interpret_program(program, args)
    torch.testing.assert_close(got, torch.nn.functional.linear(*args), rtol=1e-5, atol=1e-5)


def test_a_bias_that_is_multiplied_by_nothing_is_not_read() -> None:
    args = [torch.full((3,), math.nan), numbers(7, 5), numbers(5, 3)]
    program = lowered(lambda b, x, w: aten.addmm(b, x, w, beta=0), args)
    (product,) = contractions(program)
    assert [i.buffer for i in product.body if isinstance(i, Load)] == ["x_1", "w_1"]
    (got,) = interpret_program(program, args)
    assert isinstance(got, torch.Tensor) and not got.isnan().any()


def test_dynamic_sizes_are_ranges() -> None:
    f, args = CALLS["baddbmm"][0], [numbers(3, 7, 2), numbers(3, 7, 5), numbers(3, 5, 2)]
    program = lowered(f, args, "symbolic")
    (product,) = contractions(program)
    assert all(r.size.constant is None for r in (*product.outer, *product.reduced))
    other = [numbers(2, 1, 9), numbers(2, 1, 4), numbers(2, 4, 9)]
    (got,) = interpret_program(program, other)
    torch.testing.assert_close(got, f(*other))


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (aten.mm.default, [torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64)]),
        (aten.mm.default, [torch.ones(2, 3, dtype=torch.complex64), torch.ones(3, 2, dtype=torch.complex64)]),
        (lambda b, x, w: aten.addmm(b, x, w, alpha=0), [numbers(3), numbers(7, 5), numbers(5, 3)]),
        (lambda b, x, w: aten.addmm(b, x, w, beta=math.inf), [numbers(3), numbers(7, 5), numbers(5, 3)]),
        (lambda b, x, w: aten.addmm(b, x, w, beta=1e-50), [numbers(3), numbers(7, 5), numbers(5, 3)]),
        (lambda b, x, w: aten.addmm(b, x, w, alpha=1e39), [numbers(3), numbers(7, 5), numbers(5, 3)]),
        (aten.mv.default, [numbers(7, 5), numbers(5)]),
    ],
    ids=["integers", "complex", "alpha of 0", "infinite beta", "beta of 0", "large alpha", "mv"],
)
def test_what_has_no_such_form_is_a_call_as_before(f: Callable[..., Any], args: list[torch.Tensor]) -> None:
    program = lowered(f, args)
    assert not contractions(program) and len(calls(program)) == 1


def test_factors_that_float32_does_not_hold_are_taken_as_eager_takes_them() -> None:
    """A ``beta`` that is 0 there reads no bias, a factor that is infinite is refused."""
    args = [torch.full((48,), math.nan), numbers(20, 64), numbers(64, 48)]
    for f in (
        lambda b, x, w: aten.addmm(b, x, w, beta=1e-50),
        lambda b, x, w: aten.baddbmm(b, x[None], w[None], beta=1e-50),
    ):
        compiled = compile_graph(make_fx(f, tracing_mode="fake")(*args), options=LowerOptions(contractions="generated"))
        assert torch.equal(compiled([*args])[0], f(*args)) and f(*args).isfinite().all()
    refused = make_fx(lambda b, x, w: aten.addmm(b, x, w, alpha=1e39), tracing_mode="fake")(*args)
    with pytest.raises(RuntimeError, match="without overflow"):
        compile_graph(refused, options=LowerOptions(contractions="generated"))([*args])


def test_the_cpu_is_left_with_atens_calls_in_their_places() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = aten.addmm(b, x.relu(), w.t())
        return aten.mm(y, w), aten.mm(y.exp(), w), aten.addmm(b, x, w.t(), alpha=2)

    args = [numbers(6, 5), numbers(7, 5), numbers(7)]
    program = lowered(f, args)
    assert [type(step) for step in program.steps if not isinstance(step, Alias)].count(Contraction) == 4
    for options in (LowerOptions(verify=True), LowerOptions(fuel=0), LowerOptions(contractions="generated")):
        scheduled, decisions = schedule_program(program, options)
        assert not contractions(scheduled) and not any(d.kind == "contraction" for d in decisions)
        in_graph = [c.library for c in contractions(program)]
        assert sorted(map(str, calls(scheduled))) == sorted(map(str, in_graph))
    graph = compile_graph(make_fx(f, tracing_mode="fake")(*args), options=LowerOptions(verify=True))
    for got, want in zip(graph(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want)
