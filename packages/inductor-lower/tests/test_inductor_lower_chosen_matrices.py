"""Products with matrices that are chosen by numbers in memory, as a mixture of experts has them: right for all types,
layouts and indices, and no chosen matrix is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph, interpret_program, ir
from aotkit_inductor_lower.driver import lower_graph, schedule_graph, schedule_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import buffers_of, contains, contractions
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import product
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.choose import choose_form
from aotkit_inductor_lower.targets.cpu.choose_few_rows import ROWS_OF_A_GROUP
from aotkit_inductor_lower.targets.cpu.generate import generate

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

Program = Callable[..., torch.Tensor]
GENERATED = LowerOptions(contractions="generated", verify=True)


def of_columns(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A matrix times a column, as transformers writes it."""
    return torch.bmm(w[chosen], x.unsqueeze(2)).squeeze(2)


def of_rows(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.unsqueeze(1), w[chosen].transpose(1, 2)).squeeze(1)


def along_columns(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Of matrices whose rows are steps of the sum."""
    return torch.bmm(x.unsqueeze(1), w[chosen]).squeeze(1)


def of_several_rows(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    rows = torch.stack([x, x * 2, -x], 1)
    return torch.bmm(rows, w.index_select(0, chosen).transpose(1, 2)).sum(1)


def of_two_choices(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """By the numbers of a table, in two dimensions."""
    table = torch.stack([chosen, chosen], 1).reshape(-1)
    return torch.bmm(w[table], x.repeat_interleave(2, 0).unsqueeze(2)).view(len(x), 2, -1).sum(1)


def compiled(f: Program, *args: torch.Tensor, options: LowerOptions = GENERATED) -> CompiledGraph:
    made = compile_graph(make_fx(f, tracing_mode="fake")(*args), options=options)
    assert isinstance(made, CompiledGraph)
    return made


def operands(dtype: torch.dtype, rows: int = 5, summed: int = 40, columns: int = 70) -> list[torch.Tensor]:
    return [torch.randn(rows, summed).to(dtype), torch.randn(7, columns, summed).to(dtype)]


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("f", [of_columns, of_rows, along_columns, of_several_rows, of_two_choices])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_chosen_matrices_are_read_where_they_lie(kind: torch.dtype, f: Program, dtype: torch.dtype) -> None:
    x, w = operands(dtype)
    w = w.transpose(1, 2).contiguous() if f is along_columns else w
    chosen = torch.tensor([3, 0, 6, 2 if f is of_several_rows else -2, 3], dtype=kind)
    made = compiled(f, x, w, chosen)
    assert not made.report().externs
    (got,) = bind_program(made.compiled, made.constants, redzones=True)([x, w, chosen])
    want, true = f(x, w, chosen), f(x.double(), w.double(), chosen)
    off, eager = ((each.double() - true).abs().max().item() for each in (got, want))
    assert got.dtype is want.dtype and off <= 1.5 * eager + 2e-6
    gathered = chosen.numel() * w[0].numel()
    program = schedule_graph(make_fx(f, tracing_mode="fake")(x, w, chosen), GENERATED).program
    temporaries = [b for b in program.buffers if b.kind is ir.BufferKind.TEMPORARY]
    sizes = [product(b.sizes).constant for b in temporaries]
    assert all(size is not None and size < gathered for size in sizes), temporaries


def test_a_weight_of_bytes_is_chosen_and_widened_in_registers() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        wide = w[chosen].to(x.dtype) * scale[chosen].unsqueeze(2)
        return torch.bmm(wide, x.unsqueeze(2)).squeeze(2)

    x, scale, chosen = torch.randn(4, 64), torch.rand(6, 33), torch.tensor([5, 5, 0, 2])
    w = torch.randint(-128, 127, (6, 33, 64), dtype=torch.int8)
    made = compiled(f, x, w, scale, chosen)
    assert made.report().kernel_count == 1 and not made.report().externs
    torch.testing.assert_close(made([x, w, scale, chosen])[0], f(x, w, scale, chosen), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("wrong", [7, -8, 1 << 40])
def test_a_choice_that_is_out_of_range_is_eagers_error(wrong: int) -> None:
    x, w = operands(torch.float32)
    made = compiled(of_columns, x, w, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(IndexError):
        made([x, w, torch.tensor([0, 1, wrong, 2, 3])])
    chosen = torch.tensor([0, 1, 2, 3, 4])
    torch.testing.assert_close(made([x, w, chosen])[0], of_columns(x, w, chosen))


def test_what_is_chosen_along_the_sum_or_the_columns_is_written() -> None:
    """Such a factor is no matrix in memory."""

    def columns(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unsqueeze(1), w[:, at].transpose(1, 2)).squeeze(1)

    def summed(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unsqueeze(1), w[:, :, at].transpose(1, 2)).squeeze(1)

    for f, size in ((columns, 70), (summed, 40)):
        x, w, at = torch.randn(7, 40), torch.randn(7, 70, 40), torch.randperm(size)
        made = compiled(f, x, w, at)
        assert made.report().kernel_count == 2
        torch.testing.assert_close(made([x, w, at])[0], f(x, w, at), rtol=1e-5, atol=1e-4)


def test_the_interpreter_of_kernels_agrees() -> None:
    x, w = operands(torch.float32, columns=20)
    chosen = torch.tensor([3, 0, 6, -2, 3])
    options = LowerOptions(contractions="generated", processor="interpreter")
    (got,) = compiled(of_columns, x, w, chosen, options=options)([x, w, chosen])
    torch.testing.assert_close(got, of_columns(x, w, chosen), rtol=1e-5, atol=1e-5)


def test_random_contractions_choose_matrices_too() -> None:
    options, seen = RandomOptions(nests=1, contractions=True, max_elements=2000), 0
    for seed in range(300):
        drawn = random_program(seed, options)
        (found,) = contractions(drawn)
        steps = product(loop.size for loop in (*found.outer, *found.reduced)).constant
        if not contains((*found.left.body, *found.right.body), ir.CheckedIndex) or not steps or steps > 5000:
            continue
        seen += 1
        assert parse_program(print_program(drawn)) == drawn
        inputs = random_inputs(drawn, seed, options)
        scheduled, _ = schedule_program(drawn, GENERATED)
        made = bind_program(generate(scheduled), redzones=True)
        for want, got in zip(interpret_program(drawn, inputs), made(list(inputs)), strict=True):
            assert isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
            assert difference(want, got) is None
    assert seen > 10


# -- groups of rows --------------------------------------------------------------------------------------


def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w, offs=ends)


@pytest.fixture(scope="module", autouse=True)
def fallback() -> Iterator[None]:
    """An operator as transformers has one, for types that ``_grouped_mm`` is not traced with."""
    with torch.library._scoped_library("transformers", "FRAGMENT") as library:
        library.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
        library.impl("grouped_mm_fallback", by_hand, "CPU")
        library.impl("grouped_mm_fallback", lambda x, w, offs: x.new_empty(len(x), w.shape[2]), "Meta")
        yield


def by_fallback(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs=ends)  # type: ignore[no-any-return]


def by_hand(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out, start = torch.zeros(len(x), w.shape[2], dtype=x.dtype), 0
    for matrix, end in zip(w, ends.tolist(), strict=True):
        out[start:end] = x[start:end] @ matrix
        start = end
    return out


ENDS = [[2, 2, 5, 8], [0, 0, 0, 8], [8, 8, 8, 8], [1, 2, 3, 5], [0, 0, 0, 0]]


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_groups_of_rows_are_multiplied_with_a_matrix_each(
    dtype: torch.dtype, transposed: bool, ends: list[int]
) -> None:
    """Empty groups, and rows behind the last group, which are 0."""
    x = torch.randn(8, 64).to(dtype)
    w = torch.randn(4, 80, 64).to(dtype).transpose(1, 2) if transposed else torch.randn(4, 64, 80).to(dtype)
    for f in (grouped, by_fallback) if dtype is torch.bfloat16 else (by_fallback,):
        for kind in (torch.int32, torch.int64) if f is by_fallback else (torch.int32,):
            offsets = torch.tensor(ends, dtype=kind)
            made = compiled(f, x, w, offsets)
            assert not made.report().externs
            (got,) = bind_program(made.compiled, made.constants, redzones=True)([x, w, offsets])
            rounded = 2e-2 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(got, by_hand(x, w, offsets), rtol=rounded, atol=1e-4)


def test_groups_have_a_meaning_without_the_call() -> None:
    x, w, ends = torch.randn(8, 16), torch.randn(4, 16, 24), torch.tensor([1, 1, 4, 7], dtype=torch.int32)
    lowered = lower_graph(make_fx(by_fallback, tracing_mode="fake")(x, w, ends))
    verify_program(lowered)
    assert parse_program(print_program(lowered)) == lowered
    (got,) = interpret_program(lowered, [x, w, ends])
    torch.testing.assert_close(got, by_hand(x, w, ends))


@pytest.mark.parametrize(("rows", "ours"), [(4 * ROWS_OF_A_GROUP, True), (4 * ROWS_OF_A_GROUP + 1, False)])
def test_large_groups_are_the_calls(rows: int, ours: bool) -> None:
    x, w = torch.randn(rows, 256, dtype=torch.bfloat16), torch.randn(4, 256, 512, dtype=torch.bfloat16)
    ends = torch.tensor([1, 2, 3, rows], dtype=torch.int32)
    program = lower_graph(make_fx(grouped, tracing_mode="fake")(x, w, ends))
    (found,) = contractions(program)
    choice = choose_form(found, buffers_of(program), LowerOptions(), generic_machine(512), "any")
    assert (choice.form == "fma") == ours
    assert choose_form(found, buffers_of(program), LowerOptions(), generic_machine(128), "any").form == "aten"
    if not ours:
        scheduled = schedule_graph(make_fx(grouped, tracing_mode="fake")(x, w, ends))
        assert [type(step) for step in scheduled.program.steps] == [ir.ExternCall]  # and nothing counts groups


def test_other_products_of_groups_are_calls() -> None:
    """Of parts of a sum, and of matrices of rows."""
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    for x, w, args in (
        (torch.randn(16, 64), torch.randn(64, 24), (ends,)),
        (torch.randn(4, 16, 16), torch.randn(4, 16, 24), ()),
    ):
        x, w = x.bfloat16(), w.bfloat16()
        made = compiled(lambda x, w, *ends: torch._grouped_mm(x, w, *ends), x, w, *args)
        assert [each.target for each in made.report().externs] == ["aten._grouped_mm.default"]
        torch.testing.assert_close(made([x, w, *args])[0], torch._grouped_mm(x, w, *args))


def test_what_becomes_of_groups_is_stored_by_their_kernel() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.silu(by_fallback(x, w, ends)) + 1

    x, w, ends = torch.randn(8, 32), torch.randn(4, 32, 48), torch.tensor([1, 1, 4, 8], dtype=torch.int32)
    made = compiled(f, x, w, ends)
    assert made.report().kernel_count == 2  # and the one that counts groups
    torch.testing.assert_close(made([x, w, ends])[0], f(x, w, ends), rtol=1e-5, atol=1e-5)
