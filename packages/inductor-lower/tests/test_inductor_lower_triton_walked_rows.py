"""Row kernels whose program instances walk over rows and keep sums of columns, in Triton's interpreter and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions, parse_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.targets.triton import (
    KernelSource,
    TileLimits,
    compile_kernel,
    kernels_of,
    render_program,
    resource_facts,
    to_program,
    vector_bytes,
)
from aotkit_inductor_lower.targets.triton.binary import contents_of

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
INTERPRETED = LowerOptions(processor="triton-interpreter", verify=True)


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def layer_norm_backward(g: Any, x: Any, w: Any, b: Any) -> Any:
    mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True) + 1e-5).rsqrt()
    return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])


def rms_norm_backward(g: Any, x: Any, w: Any) -> Any:
    scale = (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt()
    normal = x * scale
    return scale * (g * w - normal * (g * w * normal).mean(-1, keepdim=True)), (g * normal).sum((0, 1))


def bias_gradient(g: Any, x: Any) -> Any:
    y = aten.gelu_backward(g, x)
    return y, y.to(torch.float32).sum((0, 1))


def lower(f: Any, args: Any) -> Compiled:
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    lowered = compile_to_program(graph, options=INTERPRETED)
    assert isinstance(lowered, Compiled)
    return lowered


def sources(program: CompiledProgram) -> list[KernelSource]:
    return [kernel.source for kernel in kernels_of(program)]


def launched(program: CompiledProgram) -> list[str]:
    contents = contents_of(program.binary)
    return [contents.kernels[each.kernel].source.name for _, own in contents.segments for each in own]


CASES = {
    "layer norm": (layer_norm_backward, (random(4, 128, 264), random(4, 128, 264), random(264), random(264)), 2),
    "rms norm": (rms_norm_backward, (random(6, 96, 256), random(6, 96, 256), random(256)), 1),
    "rows in steps that do not fit": (rms_norm_backward, (random(50, 12, 256), random(50, 12, 256), random(256)), 1),
    "the first loop has the divisors": (rms_norm_backward, (random(32, 23, 256), random(32, 23, 256), random(256)), 1),
    "gelu": (bias_gradient, (random(8, 64, 768, dtype=torch.bfloat16), random(8, 64, 768, dtype=torch.bfloat16)), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_of_columns_are_kept_while_rows_are_walked(name: str) -> None:
    f, args, sums = CASES[name]
    lowered = lower(f, args)
    (walked,) = (s for s in sources(lowered.program) if "sums0" in s.text)
    assert f"sums{sums - 1}" in walked.text and f"sums{sums}" not in walked.text
    assert not any("atomic" in s.text for s in sources(lowered.program))
    assert not [n for n in launched(lowered.program) if "zeros" in n], "what is stored whole needs no zeros before"
    got = bind_program(lowered.program, lowered.constants)([*args])
    want = f(*(a.double() for a in args))
    for ours, exact, eager in zip(got, want, f(*args), strict=True):
        assert ours.dtype is eager.dtype and ours.stride() == eager.stride()
        own, others = ((t.double() - exact).abs().max() for t in (ours, eager))
        assert own <= 4 * others + 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_give_what_eager_gives(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, two, columns = (int(torch.randint(*each, (1,), generator=generator)) for each in ((1, 40), (2, 80), (40, 300)))
    columns = max(columns, -(-(1 << 17) // (one * two)))  # enough data to share
    if columns > 2000:
        one, columns = one * 8, -(-columns // 8)
    args = (random(one, two, columns), random(one, two, columns), random(columns))
    lowered = lower(rms_norm_backward, args)
    exact = rms_norm_backward(*(a.double() for a in args))
    for ours, want in zip(bind_program(lowered.program, lowered.constants)([*args]), exact, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


NUMBERS_OF_ROWS = """\
aotkit-ir 2
program graph
input x
buffer x : float32[3, 7, 9] strides [63, 9, 1] input on cpu
buffer part : float32[3] strides [1] output on cpu
buffer most : float32[3, 7] strides [7, 1] output on cpu
loop zeros(i0 < 3):
  origin nodes ["zeros"] ops ["aten.zeros.default"] line ""
  stage():
    %v0 = const 0.0 : f32
    store part[i0] = %v0
loop loss(i0 < 3, i1 < 7):
  origin nodes ["loss"] ops ["aten.sum.default"] line ""
  stage(r0 < 9):
    %v0 = load x[i0, i1, r0] : f32
    %v1 = reduce max %v0 : f32
  stage():
    store most[i0, i1] = %v1
    %v2 = exp %v1 : f32
    store part[i0] += %v2
return part, most
"""


def test_the_sum_of_one_number_of_each_row_is_kept_while_rows_are_walked() -> None:
    """As the loss of a row that was reduced to its log-sum-exp before."""
    program = to_program(render_program(parse_program(NUMBERS_OF_ROWS)))
    (walked,) = (s for s in sources(program) if "sums0" in s.text)
    assert "in_i1" in walked.text, "seven rows leave one of eight empty"
    assert "atomic" not in walked.text and launched(program) == ["loss"]
    x = random(3, 7, 9)
    part, most = bind_program(program)([x])
    assert torch.equal(most, x.amax(-1))
    torch.testing.assert_close(part, x.amax(-1).exp().sum(-1))


def test_walked_rows_compile_without_spilling_and_load_16_bytes_at_once() -> None:
    f, args, _ = CASES["layer norm"]
    args = (random(4, 128, 768), random(4, 128, 768), random(768), random(768))
    (walked,) = (s for s in sources(lower(f, args).program) if "sums0" in s.text)
    cubin = compile_kernel(walked, 90, keep_ptx=True)
    assert resource_facts(cubin).spills == 0
    assert min(vector_bytes(cubin.ptx)) >= 8


def test_rows_that_are_not_held_add_up_in_atomic_operations_behind_their_zeros() -> None:
    f, args, _ = CASES["rms norm"]
    scheduled = lower(f, args).scheduled
    program = to_program(render_program(scheduled, limits=TileLimits(row=64)))
    assert any("atomic_add" in s.text for s in sources(program)) and [n for n in launched(program) if "zeros" in n]
    for ours, want in zip(bind_program(program)([*args]), f(*args), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_sums_as_large_as_the_rows_are_made_apart() -> None:
    """Two rows for each line of sums: nothing is gained."""
    args = (random(521, 2, 264), random(521, 2, 264), random(264), random(264))
    lowered = lower(layer_norm_backward, args)
    reasons = [r.reason for r in lowered.report.refused if r.kind == "mixed-order"]
    assert reasons and "partial sums are as much to write" in reasons[0]


def test_rows_that_lie_across_memory_are_not_walked() -> None:
    """A norm over the channels of an image that lies plane by plane: a tile of rows reads planes side by side."""

    def f(g: Any, x: Any, w: Any, b: Any) -> Any:
        return layer_norm_backward(g.permute(0, 2, 1), x, w, b)

    args = (random(8, 264, 128), random(8, 128, 264), random(264), random(264))
    lowered = lower(f, args)
    reasons = [r.reason for r in lowered.report.refused if r.kind == "mixed-order"]
    assert "the rows do not lie side by side" in reasons
    assert not any("sums0" in s.text for s in sources(lowered.program))


def test_the_backward_of_a_wide_rms_norm_is_one_kernel_with_the_sums_of_its_weight() -> None:
    """Products before it are large temporaries, which live no longer for it."""

    def f(x: Any, w: Any, g: Any, left: Any, right: Any, scale: Any) -> Any:
        grad = (g @ left).float() + (g @ right).float()
        normal = x * scale
        inner = (grad * w * normal).sum(-1, keepdim=True)
        return scale * (grad * w - normal * inner / 2048), (grad * normal).sum(0)

    g = torch.empty(4096, 64, dtype=torch.bfloat16)
    left = torch.empty(64, 2048, dtype=torch.bfloat16)
    args = (torch.empty(4096, 2048), torch.empty(2048), g, left, left.clone(), torch.empty(4096, 1))
    names = launched(lower(f, args).program)
    assert len(names) <= 3, names  # the rows, and the sums of their lines


def test_zeros_that_are_not_launched_leave_no_gap_in_a_segment_of_their_own() -> None:
    """Where a call of ATen stands between them and the rows, and in the names of kernels that fail."""

    def f(x: Any, w: Any, other: Any, index: Any) -> Any:
        rows, sums = rms_norm_backward(other @ x, x, w)
        return rows, sums, rows[:, index]

    args = (random(1, 264, 512), random(512), random(264, 264), torch.tensor([5, 7]))
    lowered = lower(f, args)
    bound = bind_program(lowered.program, lowered.constants)
    assert any("sums0" in s.text for s in sources(lowered.program))
    for ours, want in zip(bound([*args]), f(*args), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    with pytest.raises(IndexError, match="index"):
        bound([*args[:3], torch.tensor([5, 264])])


def sum_of_columns(g: Any, x: Any, *factors: Any) -> Any:
    y = g + x
    for factor in factors:
        y = y * factor
    return y, y.to(torch.float32).sum((0, 1))


def walked_over(*args: torch.Tensor) -> tuple[Compiled, KernelSource]:
    """What is lowered of a sum of columns, and the kernel that walks over the rows."""
    lowered = lower(sum_of_columns, args)
    (walked,) = (s for s in sources(lowered.program) if "sums0" in s.text)
    return lowered, walked


def two(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [random(8, rows, columns, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize(("columns", "together"), [(150, 4), (158, 4), (157, 8)])
def test_odd_rows_are_walked_several_at_once(columns: int, together: int) -> None:
    _, walked = walked_over(*two(256, columns))
    assert walked.text.count("tl.debug_barrier") == together - 1 and f"< {together * columns}" in walked.text
    ptx: Any = compile_kernel(walked, 90, keep_ptx=True).ptx
    widths = vector_bytes(ptx, "ld")
    assert 2 not in widths and widths.count(16) >= 4  # those of 4 and 8 are of the sums


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [256, 264])
def test_sums_of_rows_that_are_walked_together_are_those_of_eager_mode(rows: int) -> None:
    args = two(rows, 150)
    lowered, walked = walked_over(*args)
    assert "tl.debug_barrier" in walked.text
    got = bind_program(lowered.program, lowered.constants)([*args])
    for ours, want in zip(got, sum_of_columns(*args), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


ONE_BY_ONE = {
    "rows that begin well": (264, torch.bfloat16),
    "two numbers at once": (150, torch.float32),
    "long rows": (514, torch.bfloat16),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_other_rows_are_walked_one_by_one(name: str) -> None:
    assert "tl.debug_barrier" not in walked_over(*two(256, *ONE_BY_ONE[name]))[1].text


def test_odd_rows_with_a_number_of_each_are_walked_one_by_one() -> None:
    _, walked = walked_over(*two(256, 150), random(8, 256, 1, dtype=torch.bfloat16))
    assert "tl.debug_barrier" not in walked.text
