"""Whole graphs for CUDA: the launch plan runs on CPU tensors in Triton's interpreter, against eager."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    bind_program,
    compile_graph,
    compile_to_program,
    decompositions,
    interpret_program,
    parse_program,
)
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.runtime import BindError
from aotkit_inductor_lower.targets.triton import (
    DeviceTooOld,
    InterpreterDriver,
    TritonError,
    assemble,
    compile_kernel,
    contents_of,
    kernels_of,
    load_on,
    render_program,
    resource_facts,
    to_program,
    vector_bytes,
)
from aotkit_inductor_lower.targets.triton.checks import check_device, check_types
from aotkit_inductor_lower.targets.triton.launcher import LaunchRow, LaunchTable, segment_runner

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def lower(f: Callable[..., Any], *args: Any, mode: str = "fake", **settings: Any) -> Compiled:
    """``f`` traced on the CPU and lowered for a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode=mode)(*args)
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **settings))


def assert_same(got: list[Any], want: tuple[Any, ...]) -> None:
    """Values to rounding, everything else exactly."""
    for ours, reference in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (reference.dtype, reference.shape, reference.stride())
        torch.testing.assert_close(ours, reference)


def train(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A linear map, layer norm, softmax and gelu, with the gradient of the input."""
    x = x.detach().requires_grad_()
    y = F.gelu(F.layer_norm(x @ w, (64,)).softmax(-1) + b)
    (g,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), g, (x.detach().t() + 1).contiguous(), x.detach().sum(0), x.detach().argmax(1)


def arguments(rows: int = 24) -> list[torch.Tensor]:
    """Inputs of :func:`train`."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 64, generator=g), torch.randn(64, 64, generator=g), torch.randn(64, generator=g)]


@pytest.mark.covers("F5e.1")
def test_a_training_graph_gives_what_eager_gives() -> None:
    args = arguments()
    lowered = lower(train, *args)
    driver = InterpreterDriver()
    bound = bind_program(lowered.program, lowered.constants, load=lambda program: load_on(program, driver))
    assert_same(bound(list(args)), train(*args))
    assert driver.launched == list(dict.fromkeys(launch.function for launch in lowered.program.kernels))
    assert len(driver.launched) <= 3  # norm, softmax and gelu, forward and backward, are one kernel


def test_a_constant_is_read_where_it_lies_now_and_copied_if_that_is_no_multiple_of_sixteen() -> None:
    scale, x = torch.ones(8), torch.randn(3, 8)
    lowered = lower(lambda x: (x * scale,), x, mode="real")
    bound = bind_program(lowered.program, lowered.constants)
    for offset in (0, 1, 4):
        scale.data = torch.full((12,), offset + 2.0)[offset : offset + 8]
        assert_same(bound([x]), (x * scale,))


def test_dynamic_sizes_are_served_by_one_program() -> None:
    lowered = lower(lambda x: (F.softmax(x * 2, -1), x.sum(0), x.t().contiguous()), torch.randn(7, 5), mode="symbolic")
    bound = bind_program(lowered.program, lowered.constants)
    for shape in ((7, 5), (33, 70), (2, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        assert_same(bound([x]) if len(lowered.program.plan.inputs) == 1 else bound([*shape, x]), (
            F.softmax(x * 2, -1),
            x.sum(0),
            x.t().contiguous(),
        ))  # fmt: skip


def test_a_size_that_is_the_root_of_another_is_computed_in_the_kernel() -> None:
    def image(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = torch.sym_int(x.shape[0] ** 0.5)
        return (x[: side * side] * 2).view(side, side, 3).transpose(0, 1).contiguous(), (x[:side] + 1).sum(0)

    lowered = lower(image, torch.randn(30, 3), mode="symbolic")
    assert any("index_square_root(" in kernel.source.text for kernel in kernels_of(lowered.program))
    bound = bind_program(lowered.program, lowered.constants)
    for rows in (30, 36, 5):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
        assert_same(bound([x] if len(lowered.program.plan.inputs) == 1 else [rows, x]), image(x))


def test_a_size_that_is_computed_with_floats_is_computed_by_the_host() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = math.trunc(x.shape[0] * 0.7)  # 0.7 * 10 is 7.0 in floats, and less than 7 in truth
        return (x[:some] * 2).t().contiguous(), x.new_ones(some).cumsum(0), F.softmax(x[: math.ceil(some / 7)], 0)

    lowered = lower(parts, torch.randn(30, 3), mode="symbolic")
    assert any("computed0" in kernel.source.text for kernel in kernels_of(lowered.program))
    bound = bind_program(lowered.program, lowered.constants)
    for rows in (30, 10, 20, 110, 3):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
        assert_same(bound([x] if len(lowered.program.plan.inputs) == 1 else [rows, x]), parts(x))
    (name, text), *_ = lowered.program.plan.computed_sizes
    assert (name, text) == ("computed0", f"trunc(0.7 * float(${lowered.program.plan.symbol_sources[0][0]}))")


def test_equal_kernels_are_compiled_once() -> None:
    w = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

    def layers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(3):
            x = F.gelu(x @ w)
        return (x,)

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    lowered = lower(layers, x, w)
    assert len(lowered.program.kernels) == 3
    assert len(kernels_of(lowered.program)) == 1
    assert_same(bind_program(lowered.program)([x, w]), layers(x, w))


def test_kernels_that_are_called_what_they_compute_are_not_taken_for_equal() -> None:
    functions = ("sin", "cos", "exp", "tanh", "erf", "trunc")

    def f(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(torch, name)(x) for name, x in zip(functions, args, strict=True))

    args = [torch.full((5, 7), k / 4, dtype=torch.float64) for k in range(len(functions))]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    program = compile_to_program(graph, options=LowerOptions(fuse=False, processor="triton-interpreter")).program
    assert len(program.kernels) == len(kernels_of(program)) == len(functions)
    assert {k.source.name for k in kernels_of(program)} == set(functions)
    assert_same(bind_program(program)(list(args)), f(*args))


SCATTER = """\
aotkit-ir 2
program add_rows
input index
input x
input y
buffer index : int64[6] strides [1] input on cpu
buffer x : float32[6, 4] strides [4, 1] input on cpu
buffer y : float32[3, 4] strides [4, 1] input on cpu
loop add_rows(i0 < 6, i1 < 4):
  origin nodes ["index_add"] ops ["aten.index_add.default"] line "model.py:7: y.index_add_(0, index, x)"
  stage():
    %v0 = load index[i0] : i64
    %v1 = check %v0 < 3
    %v2 = load x[i0, i1] : f32
    store y[%v1, i1] += %v2
return none
"""


def test_inputs_that_are_not_aligned_are_copied_and_what_was_written_is_copied_back() -> None:
    program = to_program(render_program(parse_program(SCATTER.replace("return none", "return"))))
    contents = contents_of(program.binary)
    assert contents.aligned == ("index", "x", "y") and contents.written == ("y",)
    bound = bind_program(program)
    index = torch.tensor([0, 2, 2, 1, 0, 2])
    x = torch.arange(24.0).reshape(6, 4)
    want = torch.ones(3, 4).index_add_(0, index, x)
    memory = torch.ones(13)
    for y in (torch.ones(3, 4), memory[1:].view(3, 4)):
        assert (y.data_ptr() % 16 == 0) == (y.storage_offset() == 0)
        bound([index, x, y])
        assert torch.equal(y, want)
    assert memory[0] == 1


def test_an_index_out_of_range_names_the_kernel_and_the_users_line() -> None:
    program = to_program(render_program(parse_program(SCATTER.replace("return none", "return"))))
    bound = bind_program(program)
    index = torch.tensor([0, 2, 3, 1, 0, 2])
    with pytest.raises(IndexError, match=r"index 3 is out of bounds(.|\n)*kernel add_rows(.|\n)*model.py:7"):
        bound([index, torch.zeros(6, 4), torch.zeros(3, 4)])


def test_a_graph_over_two_devices_is_refused_with_their_names() -> None:
    text = SCATTER.replace("return none", "return").replace("input on cpu", "input on cuda:0", 1)
    with pytest.raises(TritonError, match=r"several devices \(index on cuda:0, x on cpu\)"):
        render_program(parse_program(text))


def test_devices_and_types_that_no_kernel_is_made_for_are_refused() -> None:
    half = lower(lambda x: (x + 1,), torch.empty(4, dtype=torch.bfloat16)).scheduled
    check_types(half, 80)
    with pytest.raises(TritonError, match="bfloat16, which sm_75 does not convert"):
        check_types(half, 75)
    with pytest.raises(TritonError, match="for CUDA devices, not for cpu"):
        check_device("cpu")
    assert "compute capability 6.1; kernels are generated for 7.0" in str(DeviceTooOld("GTX 1080", (6, 1)))


# -- the artifact ------------------------------------------------------------------------------------------------


@pytest.mark.covers("F5e.5")
def test_a_warm_process_launches_from_cubins_without_triton(tmp_path: Path) -> None:
    lowered = lower(lambda x: (F.softmax(x, -1),), torch.randn(6, 32))
    assembled = assemble(render_program(lowered.scheduled), 90)
    text = compiled_to_json(to_program(assembled))
    again = compiled_from_json(text)
    assert compiled_to_json(again) == text and again == to_program(assembled)
    assert kernels_of(again) == assembled.kernels and all(k.cubin is not None for k in assembled.kernels)
    (tmp_path / "program.json").write_text(text)
    code = f"""
import ctypes, sys
from pathlib import Path
sys.modules["triton"] = None
import torch
from aotkit_inductor_lower import bind_program
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json
from aotkit_inductor_lower.targets.triton import load_on
from aotkit_inductor_lower.targets.triton.drivers import _LAUNCH

class Recorder:
    device = "cpu"
    def __init__(self):
        self.seen = []
        self.callback = _LAUNCH(self.run)
        self.launch = ctypes.cast(self.callback, ctypes.c_void_p).value
    def load(self, kernel):
        assert kernel.cubin.code[:4] == b"\\x7fELF"
        return 77
    def stream(self): return 5
    def guard(self): return None
    def mend(self, status): return False
    def failure(self, status): return RuntimeError(str(status))
    def run(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        self.seen.append((function, gx, gy, gz, bx, by, bz, stream, params[0][0]))
        return 0

program = compiled_from_json(Path({str(tmp_path / "program.json")!r}).read_text())
driver = Recorder()
x = torch.randn(6, 32)
(y,) = bind_program(program, load=lambda program: load_on(program, driver))([x])
(seen,) = driver.seen
assert seen[0] == 77 and seen[2:4] == (1, 1) and seen[4] % 32 == 0 and seen[5:8] == (1, 1, 5), seen
assert seen[1] >= 1 and seen[8] in (x.data_ptr(), y.data_ptr())
unwanted = "lowering graph_passes loop_passes memory.build_plan targets.cpu.generate"
unwanted += " targets.triton.render.kernel targets.triton.generate targets.triton.compile"
assert not [name for name in unwanted.split() if f"aotkit_inductor_lower.{{name}}" in sys.modules]
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "fine", done.stderr


def test_a_damaged_cubin_is_noticed_before_it_is_loaded() -> None:
    lowered = lower(lambda x: (x + 1,), torch.randn(64))
    text = compiled_to_json(to_program(assemble(render_program(lowered.scheduled), 80)))
    assert '"f0VM' in text
    with pytest.raises(BindError, match="damaged"):
        bind_program(compiled_from_json(text.replace('"f0VM', '"f0VN')))


def test_a_segment_is_one_native_call_that_stops_at_the_first_failure() -> None:
    seen: list[tuple[int, int, list[int]]] = []
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
        ctypes.c_void_p,
    )

    def launch(function: int, *rest: Any) -> int:
        seen.append((function, rest[0], [rest[8][k][0] for k in range(2)]))
        return 700 if function == 13 else 0

    callback = kind(launch)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    frame = (ctypes.c_int64 * 6)(1000, 2000, 3000, 4, 0, 9)
    rows = [
        LaunchRow(11, 3, 128, 0, (0, 1)),
        LaunchRow(12, 4, 128, 0, (0, 1)),  # no program instances: nothing to launch
        LaunchRow(13, 5, 128, 0, (2, 0)),
        LaunchRow(14, 3, 128, 0, (0, 1)),
    ]
    status = segment_runner(address, LaunchTable(rows))(ctypes.addressof(frame), 0)
    assert seen == [(11, 4, [1000, 2000]), (13, 9, [3000, 1000])]
    assert status == (3 << 32) | 700


# -- on a device -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 1000])
def test_on_a_device_the_training_graph_gives_what_eager_gives(rows: int) -> None:
    args = [a.cuda() for a in arguments(rows)]
    graph = make_fx(train, decompositions(), tracing_mode="fake")(*args)
    bound = compile_graph(graph)
    for got, want in zip(bound(list(args)), train(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = bound(list(args))
    stream.synchronize()
    torch.testing.assert_close(got[0], train(*args)[0], rtol=2e-5, atol=2e-5)


# -- what the cache keeps ------------------------------------------------------------------------------------------


def policies(f: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """Buffer and policy of each load of the only kernel, as its text has them."""
    (kernel,) = kernels_of(lower(f, *args).program)
    found = re.findall(r"tl\.load\((\w+) \+ .*?(?:eviction_policy=\"(\w+)\"\))?$", kernel.source.text, re.MULTILINE)
    assert {16} == set(vector_bytes(compile_kernel(kernel.source, 90, keep_ptx=True).ptx))
    return [policy for _, policy in found]


def test_rows_that_are_read_again_and_what_all_rows_share_stay_in_the_cache() -> None:
    x, w = torch.empty(1024, 16384), torch.empty(16384)
    last, first = "evict_last", "evict_first"
    assert policies(lambda x: (F.softmax(x, -1),), x) == [last, first]
    assert policies(lambda x: (x.var(-1),), x) == [""]  # one pass, and nothing to keep for
    norm = lambda x, w: (F.layer_norm(x, (x.shape[-1],), w),)
    assert policies(norm, x, w) == [last, first, last]
    assert policies(norm, x[:, :1024], w[:1024].clone()) in ([first, last], [last, first])


def test_where_nothing_is_shared_nothing_is_said() -> None:
    assert policies(lambda x: (F.gelu(x),), torch.empty(64, 1024)) == [""]
    assert policies(lambda x: (F.softmax(x, -1),), torch.empty(64, 1024)) == [""]


# -- long rows ---------------------------------------------------------------------------------------------------


@pytest.mark.covers("F5e.1", "F5g.10")
def test_the_maximum_and_the_sum_of_a_long_softmax_are_one_pass_over_the_row() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 9001, generator=g, dtype=torch.float64) * 20
    inf, nan = float("inf"), float("nan")
    x[1], x[2], x[3, 17], x[4, 9000], x[5, :8999], x[6, 3] = -inf, inf, inf, nan, -inf, -inf
    x[7] = torch.arange(9001)  # the maximum grows with every element
    x[8] = x[7].flip(0)
    target = torch.randint(0, 9001, (9,), generator=g)
    cases: tuple[tuple[Callable[..., Any], int], ...] = (
        (lambda x, _: (F.softmax(x * 2, -1),), 2),
        (lambda x, _: (F.log_softmax(x, -1),), 2),
        (lambda x, target: (F.cross_entropy(x, target),), 1),
    )
    for f, loops in cases:
        lowered = lower(f, x, target)
        bound = bind_program(lowered.program, lowered.constants)
        for got, want in zip(bound([x, target]), f(x, target), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
        texts = [kernel.source.text for kernel in kernels_of(lowered.program)]
        assert sum(text.count("in range(0, 9001, RBLOCK)") for text in texts) == loops
        assert not any(a.kind == "scratch" for k in kernels_of(lowered.program) for a in k.source.arguments)


def test_the_gradient_of_a_shifted_loss_keeps_no_row() -> None:
    """What is the same for a whole row is not read from memory again: a causal language model's labels, of which the
    last row has none, and the scale of the loss."""

    def f(x: torch.Tensor, labels: torch.Tensor, g: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x.float(), F.pad(labels, (0, 1), value=-100)[1:], reduction="sum") / count
        return torch.autograd.grad(loss, [x], g)

    g = torch.Generator().manual_seed(0)
    labels = torch.tensor([8199, -100, 3, 0, 17])
    args = [torch.randn(5, 8200, generator=g).bfloat16(), labels, torch.tensor(0.5), torch.tensor(3.0)]
    lowered = lower(f, *args, disable=frozenset(["split-reductions", "fission-long-rows"]))  # as many rows are not
    assert not any(a.kind == "scratch" for k in kernels_of(lowered.program) for a in k.source.arguments)
    (got,), (want,) = bind_program(lowered.program)(list(args)), f(*args)
    torch.testing.assert_close(got, want)


def test_a_long_softmax_compiles_without_spilling() -> None:
    lowered = lower(lambda x: (F.softmax(x, -1),), torch.empty(64, 50257, dtype=torch.bfloat16))
    (kernel,) = kernels_of(lowered.program)
    assert resource_facts(compile_kernel(kernel.source, 90)).spills == 0


def test_a_number_of_each_row_is_no_reason_to_go_down_the_columns() -> None:
    x, row = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(512)
    plain, turned = (lambda x, row: (x * row[:, None],)), (lambda x, row: ((x * row[:, None]).t().contiguous(),))
    (first,), (second,) = (kernels_of(lower(f, x, row).program) for f in (plain, turned))
    assert [name for name, _ in first.source.config.blocks] == ["XBLOCK"]
    assert [name for name, _ in second.source.config.blocks] == ["XBLOCK", "YBLOCK"]


# -- split reductions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4096, 5003])
@pytest.mark.covers("F5e.1")
def test_long_reductions_of_few_results_are_two_kernels(length: int) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.amax(0), (x * x).sum(0).sqrt() + 1, (x > 3).any(), x.prod()

    g = torch.Generator().manual_seed(length)
    x = torch.rand(length, 3, generator=g, dtype=torch.float64) * 0.001 + 1  # so that rounding does not matter
    lowered = lower(f, x)
    names = [launch.name for launch in lowered.program.kernels]
    assert any(name.endswith("_partial") for name in names)
    assert_same(bind_program(lowered.program)([x]), f(x))
    assert_same(interpret_program(lowered.scheduled, [x]), f(x))  # as loop IR too
    x[length - 1, 1] = float("nan")
    got, want = bind_program(lowered.program)([x]), f(x)
    torch.testing.assert_close(got[1], want[1], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.covers("F5e.1", "F5g.9")
def test_a_long_argmax_is_two_kernels_and_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(), x.argmin(1), x.argmax(0), *x.max(1)

    g = torch.Generator().manual_seed(0)
    x = torch.randint(-500, 500, (3, 5003), generator=g).to(dtype)  # every value many times
    lowered = lower(f, x)
    assert any(launch.name.endswith("_partial") for launch in lowered.program.kernels)
    bound = bind_program(lowered.program)
    assert_same(bound([x]), f(x))
    assert_same(interpret_program(lowered.scheduled, [x]), f(x))
    if dtype.is_floating_point:
        x[1, 4999], x[2, 17] = float("nan"), float("nan")
        x[0] = float("-inf")
        for got, want in zip(bound([x]), f(x), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.covers("F5e.1")
def test_reductions_of_sizes_known_at_run_time_are_split_too() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.argmax()

    lowered = lower(f, torch.randn(700, dtype=torch.float64), mode="symbolic")
    launches = [launch for _, own in contents_of(lowered.program.binary).segments for launch in own]
    records = zip(lowered.program.kernels, launches, strict=True)
    grids = [launch.grid for record, launch in records if record.name.endswith("_partial")]
    assert grids and all(grid != "$#programs 1" for grid in grids)
    bound = bind_program(lowered.program)
    for rows in (700, 5):
        x = torch.randn(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
        args = [x] if len(lowered.program.plan.inputs) == 1 else [rows, x]
        assert_same(bound(list(args)), f(x))


def test_the_gradient_of_a_norms_weight_is_split_over_rows() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
        y = F.layer_norm(x, (32,), w, b)
        return torch.autograd.grad((y * y).sum(), (w, b))

    g = torch.Generator().manual_seed(0)
    args = [torch.randn(1024, 32, generator=g), torch.randn(32, generator=g), torch.randn(32, generator=g)]
    lowered = lower(f, *args)
    assert sum(launch.name.endswith("_partial") for launch in lowered.program.kernels) >= 1
    got, want = bind_program(lowered.program)(list(args)), f(*args)
    for ours, reference in zip(got, want, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sizes", [(8, 512), (4096,), (8, 16, 32)])
def test_column_sums_run_on_all_units_and_are_stored_side_by_side(sizes: tuple[int, ...]) -> None:
    """One number of each row, its mean, lies beside the next row's: that does not make a column a row."""

    def f(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (((x - mean) * rstd).sum(list(range(len(sizes)))),)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(*sizes, 96, generator=g)
    args = [x, x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt()]
    lowered = lower(f, *args)
    (first, _) = kernels_of(lowered.program)
    assert first.source.name.endswith("_partial")
    chunks = lowered.scheduled.steps[0].outer[0].size.constant
    assert chunks >= 32
    assert re.search(r"tl.store\(p_\w+_partial0 \+ \(i0 \+ k_chunk \* 96\)", first.source.text)
    (got,), (want,) = bind_program(lowered.program)(list(args)), f(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_no_kernel_of_a_norms_backward_adds_up_in_memory() -> None:
    """As on the CPU, where sums of rows and columns share a walk over the data."""

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        y = F.layer_norm(x, (512,), w, b)
        return torch.autograd.grad((y * y).sum(), (x, w, b))

    lowered = lower(f, torch.empty(4096, 512), torch.empty(512), torch.empty(512))
    assert all(kernel.source.grid for kernel in kernels_of(lowered.program))  # none runs in one program instance
    assert not any("atomic" in kernel.source.text for kernel in kernels_of(lowered.program))


def test_one_short_row_is_one_kernel() -> None:
    """A norm of one token: three launches would take three times as long."""

    def f(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + r
        return y, w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    args = torch.randn(1, 1, 4096), torch.randn(1, 1, 4096), torch.randn(4096)
    lowered = lower(f, *args)
    assert len(lowered.program.kernels) == 1
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("begin", "kernels"), [(2, 1), (3, 2)], ids=["one slice", "two"])
def test_what_reads_one_slice_is_one_kernel(begin: int, kernels: int) -> None:
    """Sums into other places, as the gradient of an interpolation adds to what each element was made of."""

    def f(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = (torch.zeros(2, 4, 30) for _ in range(2))
        left = torch.ops.aten.index_put(left, [None, None, i], x[:, 2:6], True)
        return left, torch.ops.aten.index_put(right, [None, None, j], x[:, begin : begin + 4], True)

    args = (torch.randn(2, 9, 64), torch.randint(30, (64,)), torch.randint(30, (64,)))
    compiled = lower(f, *args)
    assert sum("atomic_add(" in kernel.source.text for kernel in kernels_of(compiled.program)) == kernels
    assert_same(bind_program(compiled.program)(list(args)), f(*args))
