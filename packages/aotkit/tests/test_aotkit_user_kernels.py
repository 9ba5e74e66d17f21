"""Triton kernels of the user's own in compiled graphs: captured by Dynamo as for a CUDA device, with Triton's own
analysis of what they write; where a device would be launched, Triton's interpreter runs the kernel on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import aotkit
from aotkit.driver.context import CompileContext
from aotkit.driver.run import compile_and_bind
from aotkit.driver.stages import own_stages
from aotkit_cudagraphs import CudagraphTrees
from aotkit_cudagraphs.drivers import SimulatedDriver
from aotkit_inductor_lower import compile_graph

triton = pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
import triton.language as tl  # noqa: E402

Tensor = torch.Tensor


# -- kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def twice(x):  # type: ignore[no-untyped-def]
    return x * 2


def five_times(x):  # type: ignore[no-untyped-def]
    return x * 5


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < n), tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, twice(x) + y, mask=at < n)


@triton.jit
def scale_kernel(x_ptr, rows, columns, stride, factor, NEGATE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < columns)
    if NEGATE:
        x = 0 - x
    tl.store(x_ptr + row * stride + column, x * factor, mask=column < columns)


CONFIGS = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64}, num_warps=2)]


@triton.autotune(CONFIGS, key=["n"], restore_value=["x_ptr"])
@triton.jit
def increase_kernel(x_ptr, n, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + by, mask=at < n)


def add(x: Tensor, y: Tensor) -> Tensor:
    """``2 * x + y`` in new memory."""
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out


def scale(x: Tensor, factor: float, negate: bool) -> None:
    """In place, over a grid of two axes."""
    rows, columns = x.shape
    scale_kernel[(rows, triton.cdiv(columns, 8))](x, rows, columns, x.stride(0), factor, NEGATE=negate, BLOCK=8)


def increase(x: Tensor, by: float) -> None:
    """In place, with a grid that depends on the configuration."""
    increase_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel(), by)


# -- programs ----------------------------------------------------------------------------------------------------


def between(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A kernel between generated ones."""
    return (add(x.sin(), y.cos()).relu() + 1,)


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """An input and a temporary are written, twice and with other constants."""
    z = y * 3
    scale(x, 0.5, False)
    scale(z, 2.0, True)
    scale(x, 3.0, True)
    return x + z, z.sum(1)


def of_a_view(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """What is written is a part of something."""
    z = x.clone()
    scale(z[:, 1:4], 10.0, False)
    scale(y[1:], 2.0, False)
    return z, y * 2


def tuned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The configuration is chosen where the kernel runs."""
    z = x * 2
    increase(z, 3.0)
    increase(y, 1.0)
    return z.exp(), z + y


COPIES = {between: 0, in_place: 1, of_a_view: 2, tuned: 1}  # of inputs, before the first write, and of what has parts


def arguments(rows: int = 6) -> list[Tensor]:
    """In float64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 11, generator=generator, dtype=torch.float64) for _ in range(2)]


def compiled(fn: Callable[..., Any], processor: str, **settings: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` in one graph."""
    recorder = aotkit.Recorder()
    options = aotkit.Options(fallback="error", processor=processor)  # type: ignore[arg-type]
    backend = aotkit.make_backend(options, recorder)
    return torch.compile(fn, backend=backend, fullgraph=True, **settings), recorder


def assert_same(got: Any, want: Any) -> None:
    """Values to rounding, and layouts."""
    for ours, reference in zip(got, want, strict=True):
        assert ours.stride() == reference.stride()
        torch.testing.assert_close(ours, reference)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", ["host", "interpreter", "triton-interpreter"])
@pytest.mark.parametrize("program", COPIES)
@pytest.mark.covers("F1.64", "F5e.1", "F5g.27", "F5b.9", "F5f.35")
def test_kernels_of_the_user_give_what_they_give_when_they_are_launched_by_hand(
    program: Callable[..., Any], processor: str, launched: list[Any]
) -> None:
    run, recorder = compiled(program, processor)
    theirs = arguments()
    want = program(*theirs)
    by_hand = {(name, settings.get("BLOCK")) for name, _, settings in launched}
    for _ in range(2):
        launched.clear()
        ours = arguments()
        assert_same(run(*ours), want)
        assert_same(ours, theirs)  # what was written
    assert {name for name, *_ in launched} == {name for name, _ in by_hand}
    targets = [call.target for graph in recorder.graphs for call in graph.report.externs]
    assert all("triton_kernel_wrapper" in target for target in targets)
    copied = sum(c.count for g in recorder.graphs for c in g.report.externs if "functional" in c.target)
    assert copied == COPIES[program]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")  # Triton 3.9's, within torch's analysis
def test_only_what_a_kernel_writes_is_copied(launched: list[Any]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x, y = arguments()
    assert_same(aotkit.aot_function(lambda x, y: [*between_with_wrapper(x, y)], keep)(x, y), between(x, y))
    (call,) = (n for n in graphs[0].graph.nodes if "triton_kernel_wrapper_functional" in str(n.target))
    assert call.kwargs["tensors_to_clone"] == ["out_ptr"]


@pytest.mark.parametrize("wanted", ["the old value", "a view of it", "nothing", "the input", "the input and a result"])
@pytest.mark.covers("F5f.35")
def test_a_kernel_writes_to_a_copy_where_the_old_value_is_wanted(wanted: str, launched: list[Any]) -> None:
    kernel, none = kernel_side_table.add_kernel(scale_kernel), kernel_side_table.add_constant_args({})

    def f(x: Tensor) -> list[Tensor]:
        y = x if "input" in wanted else x * 2
        view = y[1:]
        given = {"x_ptr": y, "rows": 6, "columns": 11, "stride": 11, "factor": 3.0, "NEGATE": False, "BLOCK": 16}
        settings = {"kernel_idx": kernel, "constant_args_idx": none, "grid": [(6, 1, 1)], "tma_descriptor_metadata": {}}
        z = triton_kernel_wrapper_functional(**settings, kwargs=given, tensors_to_clone=["x_ptr"])["x_ptr"]
        if "input" in wanted:
            x.copy_(z)
        old = y if wanted == "the old value" else view.sum() if wanted == "a view of it" else torch.ones(1)
        return [z if wanted == "the input and a result" else z + old]

    (x, _), (ours, _) = arguments(), arguments()
    compiled_graph = compile_graph(make_fx(f, tracing_mode="fake")(x))
    want = f(x)
    assert_same(compiled_graph([ours]), want)
    assert_same([ours], [x])
    in_place = wanted in ("nothing", "the input")
    assert {call.target for call in compiled_graph.report().externs if "triton" in call.target} == {
        f"triton_kernel_wrapper_{'mutation' if in_place else 'functional'}"
    }


def copies_of_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Values that equal an input or each other, and have memory of their own."""
    same = [
        x * 1,
        x + 0,
        x.clone(),
        x.to(torch.float64, copy=True),
        torch.zeros(6, 11),
        torch.zeros(6, 11),
        y.exp(),
        y.exp(),
    ]
    for k, value in enumerate(same[:5]):
        scale(value, float(k + 2), False)
    increase(same[4], 1.0)
    scale(same[6], 2.0, False)
    return (*same, x - 1, y * 2)


@pytest.mark.parametrize("processor", ["host", "interpreter", "triton-interpreter"])
def test_what_equals_an_input_is_not_the_input_to_a_kernel_that_writes(processor: str, launched: list[Any]) -> None:
    run, _ = compiled(copies_of_inputs, processor)
    theirs, ours = arguments(), arguments()
    want = copies_of_inputs(*theirs)
    for _ in range(2):
        assert_same(run(*ours), want)
        assert_same(ours, theirs)


def between_with_wrapper(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """:func:`between` for a trace without Dynamo."""
    x, y = x.sin(), y.cos()
    out = torch.empty_like(x)
    torch.library.wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return (out.relu() + 1,)


@pytest.mark.parametrize("processor", ["host", "interpreter", "triton-interpreter"])
def test_grids_and_sizes_are_those_of_each_call(processor: str, launched: list[Any]) -> None:
    run, recorder = compiled(lambda x, y: (*between(x, y), *tuned(x, y)), processor, dynamic=True)
    for rows in (6, 3, 20):
        theirs, ours = arguments(rows), arguments(rows)
        launched.clear()
        want = (*between(*theirs), *tuned(*theirs))
        launched.clear()
        assert_same(run(*ours), want)
        assert_same(ours, theirs)
        assert [grid[0] for name, grid, _ in launched if name == "add_kernel"] == [-(-rows * 11 // 32)]
    assert len(recorder.graphs) == 1


class Twice(torch.autograd.Function):
    """``2 * x + y`` whose gradient is a kernel too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """The kernel."""
        return add(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """``2 * g`` and ``g``."""
        return add(g, torch.zeros_like(g)), g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("processor", ["host", "interpreter", "triton-interpreter"])
def test_a_gradient_may_be_a_kernel_of_the_users(processor: str, launched: list[Any]) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return Twice.apply(x.sin(), y).exp()

    run, recorder = compiled(f, processor)
    theirs, ours = ([a.requires_grad_() for a in arguments()] for _ in range(2))
    want, got = f(*theirs), run(*ours)
    torch.testing.assert_close(got, want)
    want.sum().backward()
    launched.clear()
    got.sum().backward()
    assert [name for name, *_ in launched] == ["add_kernel"]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert not recorder.fallbacks


def test_an_edited_helper_of_a_kernel_is_what_runs(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = arguments()
    run, _ = compiled(between, "host")
    assert_same(run(x, y), between(x, y))
    torch._dynamo.reset()
    monkeypatch.setattr(twice, "fn", five_times)
    again, _ = compiled(between, "host")
    assert_same(again(x, y), [(x.sin() * 5 + y.cos()).relu() + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("program", COPIES)
def test_on_a_device_kernels_of_the_user_give_what_they_give_by_hand(program: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    run, _ = compiled(program, "host")
    theirs, ours = ([a.cuda() for a in arguments()] for _ in range(2))
    assert_same(run(*ours), program(*theirs))
    assert_same(ours, theirs)


# -- arguments that share memory ---------------------------------------------------------------------------------


@triton.jit
def both_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def again_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


PARTS = {
    "one tensor": lambda x: (x, x),
    "views of one": lambda x: (x.view(-1)[:64], x.view(-1)[:64]),
    "overlapping": lambda x: (x.view(-1)[:10], x.view(-1)[5:15]),
    "apart": lambda x: (x.view(-1)[:10], x.view(-1)[20:30]),
}


@pytest.mark.sample(parts=2)
@pytest.mark.parametrize("kernel", [both_kernel, again_kernel], ids=["both are written", "one is read"])
@pytest.mark.parametrize("parts", PARTS)
def test_arguments_that_share_memory_which_a_kernel_writes_to(parts: str, kernel: Any, launched: list[Any]) -> None:
    """The kernel saw the old values through one argument of what it had written through the other."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x + y
        for base in (x, z):
            first, second = PARTS[parts](base)
            kernel[(1,)](first, second, first.numel(), BLOCK=64)
        return x * 2, z

    theirs, ours = arguments(), arguments()
    want = program(*theirs)
    if parts == "apart":
        run, _ = compiled(program, "host")
        got = run(*ours)
    else:
        run = torch.compile(program, backend="aotkit", options={"cache": False}, fullgraph=True)
        with pytest.warns(aotkit.EagerFallback, match="a Triton kernel writes to memory that its arguments"):
            got = run(*ours)
    assert_same(got, want)
    assert_same(ours, theirs)


@triton.jit
def rows_kernel(q_ptr, k_ptr, batch, row, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * batch + tl.program_id(1) * row + tl.arange(0, BLOCK)
    there = tl.arange(0, BLOCK) < n
    tl.store(q_ptr + at, tl.load(q_ptr + at, mask=there) * 2, mask=there)
    tl.store(k_ptr + at, tl.load(k_ptr + at, mask=there) * 3, mask=there)


def test_parts_of_a_projection_are_apart(launched: list[Any]) -> None:
    """As rotary embeddings write to queries and keys in place."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x @ w).view(2, 3, 12).chunk(3, -1)
        rows_kernel[(2, 3)](q, k, q.stride(0), q.stride(1), q.shape[2], BLOCK=4)
        return q + k, v

    x, w = arguments()[0], torch.randn(11, 12, dtype=torch.float64)
    run, _ = compiled(program, "host")
    assert_same(run(x, w), program(x, w))
    assert launched


class Doubled(torch.autograd.Function):
    """Of which one argument is the result's memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        again_kernel[(1,)](out, out, out.numel(), BLOCK=64)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_the_same_in_an_autograd_function(launched: list[Any]) -> None:
    x = arguments()[0][:5].requires_grad_()
    run = torch.compile(Doubled.apply, backend="aotkit", options={"cache": False})
    with pytest.warns(aotkit.EagerFallback, match="a Triton kernel writes to memory that its arguments"):
        result = run(x)
    torch.testing.assert_close(result, Doubled.apply(x))


# -- among modes, ours and the user's ------------------------------------------------------------------------------


class HandsOn(TorchDispatchMode):
    """Knows operators only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert isinstance(func, torch._ops.OpOverload)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_mode_around_a_backward_sees_no_launch(launched: list[Any]) -> None:
    run, _ = compiled(lambda x, y: Twice.apply(x.sin(), y).exp(), "host")
    for _ in range(2):
        theirs, ours = ([a.requires_grad_() for a in arguments()] for _ in range(2))
        Twice.apply(theirs[0].sin(), theirs[1]).exp().sum().backward()
        loss = run(*ours).sum()
        with HandsOn():
            loss.backward()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_kernel_and_a_custom_operator_in_one_graph(launched: list[Any]) -> None:
    """Custom operators are watched in a first call, by a mode."""
    with torch.library._scoped_library("aotkit_test_kernels", "FRAGMENT") as library:
        library.define("tripled(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("tripled", lambda x: x * 3, "CPU")
        library.impl("tripled", torch.empty_like, "Meta")

        def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return (add(x.sin(), torch.ops.aotkit_test_kernels.tripled(y)) * 2,)

        run, _ = compiled(program, "host")
        for _ in range(2):
            assert_same(run(*arguments()), program(*arguments()))


def test_kernels_are_recorded(launched: list[Any]) -> None:
    """On the simulated device, which sees operators: one between others, and one that writes to a parameter."""
    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 20))

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        (z,) = between_with_wrapper(x, y)
        torch.library.wrap_triton(scale_kernel)[(6, 2)](x, 6, 11, 11, 0.5, NEGATE=False, BLOCK=8)
        return [z * 2]

    ours, theirs = ([a, a.clone()] for a in arguments())
    weight, twin = ours
    mode, settings = FakeTensorMode(), aotkit.Options(cudagraphs=True, lowering="none", fallback="error")
    ctx = CompileContext(settings, aotkit.Recorder(), own_stages(), "model", num_static=1, trees=trees)
    examples = [weight, theirs[0]]
    run = compile_and_bind(program, [mode.from_tensor(a) for a in examples], examples, ctx)
    for step in range(5):
        y = theirs[0] + step
        assert_same(run(weight, y), program(twin, y))
        assert_same([weight], [twin])
    assert sum(info.replays for info in trees.report().functions) == 4
