"""Matrices that never change, which are packed once as products read them, and products of pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.driver import compile_to_program
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.kernel_ir.nodes import Loop
from aotkit_inductor_lower.kernel_ir.panels import Panels, panels_at
from aotkit_inductor_lower.loop_passes.pack_constants import pack
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import Symbol, sym, to_expr
from aotkit_inductor_lower.targets.cpu import Machine, host_machine, processor_machine
from aotkit_inductor_lower.targets.cpu import target as targets
from aotkit_inductor_lower.targets.cpu.choose_few_rows import FEW_ROWS
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.products import multiplies_pairs

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

SIZES = [(9, 40, 67), (13, 300, 200), (37, 33, 130), (64, 64, 128), (65, 129, 200), (300, 41, 65), (12, 16, 129)]
LEVELS = ["x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else []), "host"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
Program = Callable[..., torch.Tensor]


def machine_without_tiles(name: str) -> Machine:
    """A processor with its tile registers left out."""
    found = processor_machine(name)
    return replace(found, features=",".join(f for f in found.features.split(",") if not f.startswith("+amx")))


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in tile registers read no packed constants; what has them runs the other kernels as well."""
    monkeypatch.setattr(targets, "processor_machine", machine_without_tiles)


def traced(f: Program, *args: torch.Tensor, mode: str = "fake") -> torch.fx.GraphModule:
    """What else ``f`` uses is a constant of the graph."""
    return make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)


def compiled(f: Program, *args: torch.Tensor, mode: str = "fake", **options: Any) -> CompiledGraph:
    chosen = {"contractions": "generated", "pack_constants": True, "verify": True, **options}
    made = compile_graph(traced(f, *args, mode=mode), options=LowerOptions(**chosen))
    assert isinstance(made, CompiledGraph)
    return made


def run(f: Program, *args: torch.Tensor, packed: bool = True, **options: Any) -> torch.Tensor:
    """The result, which has the bits of the same kernels without packing where these multiply alike."""
    made = compiled(f, *args, **options)
    assert not made.report().externs
    assert packed == any(name.endswith("_packed") for name in made.constants), made.constants.keys()
    (got,) = made(list(args))
    watched = bind_program(made.compiled, made.constants, redzones=True)
    assert torch.equal(watched(list(args))[0].nan_to_num(7.0), got.nan_to_num(7.0))
    want = f(*args)
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    return got


def assert_near(got: torch.Tensor, want: torch.Tensor, true: torch.Tensor) -> None:
    """Against float64: at most three times as far off as eager."""
    largest = true.abs().max().item()
    off, eager = ((x.double() - true).abs().max().item() / largest for x in (got, want))
    assert off <= 3 * (eager + (1e-14 if want.dtype is torch.float64 else 2e-6))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packed_products_of_both_orientations(size: tuple[int, int, int], dtype: torch.dtype, level: str) -> None:
    m, k, n = size
    x, rows, columns = (torch.randn(*s, dtype=dtype) for s in ((m, k), (n, k), (k, n)))
    pairs = multiplies_pairs(host_machine()) and level == "host"
    packed = dtype is not torch.bfloat16 or pairs
    for f, true in (
        (lambda a: a @ rows.t(), x.double() @ rows.double().t()),
        (lambda a: a @ columns, x.double() @ columns.double()),
    ):
        got = run(f, x, packed=packed, processor=level)
        assert_near(got, f(x), true)
        plain = compiled(f, x, pack_constants=False, processor=level)
        assert not any(name.endswith("_packed") for name in plain.constants)
        if dtype is not torch.bfloat16 and m > FEW_ROWS:
            assert torch.equal(plain([x])[0], got), "the same sums in the same order"


@pytest.mark.covers("F5b.10")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_before_and_after_is_in_the_kernel(dtype: torch.dtype) -> None:
    w, b = torch.randn(200, 96, dtype=dtype), torch.randn(200, dtype=dtype)
    x, rest = torch.randn(3, 17, 96, dtype=dtype), torch.randn(3, 17, 200, dtype=dtype)

    def layer(x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b) + rest)

    pairs = dtype is not torch.bfloat16 or multiplies_pairs(host_machine())
    got = run(layer, x, rest, packed=pairs)
    wide = F.gelu(F.linear(x.double(), w.double(), b.double()) + rest.double())
    assert_near(got, layer(x, rest), wide)
    assert compiled(layer, x, rest).report().kernel_count == 1


def test_the_interpreter_of_programs_reads_packed_constants() -> None:
    w, x = torch.randn(130, 37), torch.randn(13, 37)
    graph = traced(lambda a: F.relu(a @ w.t()), x)
    made = compile_to_program(graph, options=LowerOptions(contractions="generated", pack_constants=True))
    assert not isinstance(made, CompiledParts)
    assert all(name.endswith("_packed") for name in made.constants)
    (got,) = interpret_program(made.scheduled, [x], made.constants)
    torch.testing.assert_close(got, F.relu(x @ w.t()), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-39, 3e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_numbers(value: float, dtype: torch.dtype) -> None:
    x, w = torch.ones(9, 40, dtype=dtype), torch.ones(70, 40, dtype=dtype)
    x[2, 3] = w[66, 5] = value
    pairs = dtype is not torch.bfloat16 or multiplies_pairs(host_machine())
    got = run(lambda a: a @ w.t(), x, packed=pairs)
    assert torch.equal(got.nan_to_num(7.0), (x @ w.t()).nan_to_num(7.0))


@pytest.mark.skipif(not multiplies_pairs(host_machine()), reason="there is no instruction for pairs of bfloat16")
def test_pairs_of_subnormal_numbers_are_zeros_as_in_eager_mode() -> None:
    x, w = torch.full((16, 128), 1e-39).bfloat16(), torch.randn(256, 128).bfloat16()
    x[3:] = torch.randn(13, 128).bfloat16()
    w[9] = 2e-39
    assert torch.equal(run(lambda a: a @ w.t(), x), x @ w.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_lie_anywhere_in_memory(dtype: torch.dtype) -> None:
    base = torch.randn(150, 301, dtype=dtype)
    pairs = dtype is not torch.bfloat16 or multiplies_pairs(host_machine())
    x, w, part = base[3:40:2, 1:62], base[20:150, 7:68], base[:61, 3:160]
    assert_near(run(lambda a: a @ w.t(), x, packed=pairs), x @ w.t(), x.double() @ w.double().t())
    assert_near(run(lambda a: a @ part, x, packed=pairs), x @ part, x.double() @ part.double())


@pytest.mark.parametrize("contractions", ["generated", "aten"])
def test_views_of_a_constant_that_begins_within_its_memory(contractions: str) -> None:
    """make_fx says of such a constant that it begins at 0, of its views that they do not: memory beside it was read."""
    w, x = torch.randn(150, 301)[20:150, 7:68], torch.randn(19, 61)
    made = compiled(lambda a: a @ w.t(), x, contractions=contractions, pack_constants=False)
    torch.testing.assert_close(made([x])[0], x @ w.t())


@pytest.mark.skipif(not multiplies_pairs(host_machine()), reason="there is no instruction for pairs of bfloat16")
@pytest.mark.parametrize("size", [(9, 40, 67), (13, 300, 200), (64, 64, 128), (300, 42, 65), (7, 18, 130)], ids=str)
def test_pairs_that_lie_along_the_sum_need_no_packing(size: tuple[int, int, int]) -> None:
    m, k, n = size
    base = torch.randn(m + n, k + 1).bfloat16()[:, :k]  # rows begin at odd places
    for x, w in ((torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()), (base[:m], base[m:].contiguous())):
        graph = make_fx(lambda a, b: F.silu(a @ b.t()), tracing_mode="fake")(x, w)
        made = compile_to_program(graph, options=LowerOptions(contractions="generated"))
        assert not isinstance(made, CompiledParts)
        (got,) = bind_program(made.program, made.constants, redzones=True)([x, w])
        assert_near(got, F.silu(x @ w.t()), F.silu(x.double() @ w.double().t()))


@pytest.mark.skipif(not multiplies_pairs(host_machine()), reason="there is no instruction for pairs of bfloat16")
def test_rows_that_fill_no_tile_register_are_multiplied_in_pairs() -> None:
    """Also where the processor has tile registers."""
    w, x = torch.randn(200, 300).bfloat16(), torch.randn(13, 300).bfloat16()
    graph = traced(lambda a: a @ w.t(), x)
    made = compile_to_program(graph, options=LowerOptions(contractions="generated", pack_constants=True))
    assert not isinstance(made, CompiledParts) and all(name.endswith("_packed") for name in made.constants)
    (got,) = bind_program(generate(made.scheduled, host_machine()), made.constants, redzones=True)([x])
    assert_near(got, x @ w.t(), x.double() @ w.double().t())


def test_a_matrix_that_something_else_reads_stays_as_it_is() -> None:
    w = torch.randn(300, 64)

    def tied(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w.t(), F.embedding(at, w)

    x, at = torch.randn(32, 64), torch.tensor([3, 299, 0])
    made = compiled(tied, x, at)  # type: ignore[arg-type]
    assert not any(name.endswith("_packed") for name in made.constants)
    assert "something else reads it" in " ".join(d.reason for d in made.records if d.kind == "pack")
    torch.testing.assert_close(made([x, at]), list(tied(x, at)), rtol=1e-5, atol=1e-4)


def test_a_matrix_that_several_products_read_is_packed_once() -> None:
    w = torch.randn(128, 64)
    x, y = torch.randn(32, 64), torch.randn(40, 64)
    made = compiled(lambda x, y: (x @ w.t()).sum() + (y @ w.t()).sum(), x, y)
    assert [name for name in made.constants if name.endswith("_packed")] == list(made.constants)
    assert len(made.constants) == 1
    both = compiled(lambda x: F.relu(x @ w.t()) @ w, x)  # one along its rows, one along its columns
    assert not any(name.endswith("_packed") for name in both.constants)
    torch.testing.assert_close(both([x])[0], F.relu(x @ w.t()) @ w, rtol=1e-4, atol=1e-3)


def test_without_the_option_or_the_pass_or_fuel_nothing_is_packed() -> None:
    w, x = torch.randn(128, 64), torch.randn(32, 64)
    want = compiled(lambda a: a @ w.t(), x)([x])[0]
    for options in ({"pack_constants": False}, {"disable": ("pack-constants",)}, {"fuel": 0}):
        made = compiled(lambda a: a @ w.t(), x, **options)
        assert not any(name.endswith("_packed") for name in made.constants)
        torch.testing.assert_close(made([x])[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_rows_may_be_known_at_run_time_only(dtype: torch.dtype) -> None:
    w = torch.randn(200, 65, dtype=dtype)
    made = compiled(lambda a: F.relu(a @ w.t()), torch.randn(9, 65, dtype=dtype), mode="symbolic")
    for rows in (1, 2, 5, 6, 7, 13, 64, 1100):
        x = torch.randn(rows, 65, dtype=dtype)
        assert_near(made([x])[0], F.relu(x @ w.t()), F.relu(x.double() @ w.double().t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_on_one_thread_and_on_two(dtype: torch.dtype) -> None:
    w, x = torch.randn(700, 301, dtype=dtype), torch.randn(600, 301, dtype=dtype)
    made = compiled(lambda a: F.gelu(F.linear(a, w)), x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = made([x])[0]
        torch.set_num_threads(2)
        assert torch.equal(made([x])[0], one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("panels", [Panels(32), Panels(64), Panels(64, 2), Panels(32, 2, 32)], ids=str)
@pytest.mark.parametrize(("steps", "columns"), [(5, 70), (64, 128), (33, 65)])
def test_a_packed_matrix_is_read_where_it_was_put(panels: Panels, steps: int, columns: int) -> None:
    matrix = torch.arange(float(steps * columns)).view(steps, columns)
    packed = pack(matrix, panels)
    assert packed is not None and packed.numel() == -(-columns // panels.width) * panels.width * panels.padded(steps)
    k, j = Symbol("k"), Symbol("j")
    offset = panels.offset(sym("j"), sym("k"), steps)
    for step, column in ((0, 0), (steps - 1, columns - 1), (3, 64)):
        assert packed.flatten()[offset.evaluate({k: step, j: column})] == matrix[step, column]
    assert packed.sum() == matrix.sum(), "zeros beside it"
    loops = (Loop("j", to_expr(columns)), Loop("k", to_expr(steps)))
    found = panels_at(offset, loops)
    assert found is not None and found[1:] == (j, k) and found[0].offset(sym("j"), sym("k"), steps) == offset
    assert (found[0].width, found[0].group) == (panels.width, panels.group)
    assert panels_at(offset + 1, loops) is None
    assert panels_at(sym("j") * steps + sym("k"), loops) is None


def test_pieces_of_a_packed_matrix_are_read_where_they_were_put() -> None:
    panels, k, j = Panels(32, 2, 32, 16, 3), Symbol("k"), Symbol("j")
    for steps, columns in ((5, 70), (64, 128), (33, 65)):
        matrix = torch.randn(steps, columns)
        packed = pack(matrix, panels)
        assert packed is not None
        loops = (Loop("j", to_expr(columns)), Loop("k", to_expr(steps)))
        offsets = [panels.offset(sym("j"), sym("k"), steps, piece) for piece in range(3)]
        for step, column in ((0, 0), (steps - 1, columns - 1), (3, 64)):
            places = [offset.evaluate({k: step, j: column}) for offset in offsets]
            assert sum(packed.flatten()[place].float() for place in places) == matrix[step, column]
        assert all(panels_at(offset, loops) == (panels, j, k) for offset in offsets)
        assert [panels.piece_at(offset, j, k, steps) for offset in offsets] == [0, 1, 2]
        assert panels_at(offsets[1] + 1, loops) is None
