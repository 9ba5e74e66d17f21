"""The interpreter target: kernels that are kept as text and run by the kernel IR's own interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
    driver,
    interpret_program,
    print_program,
)
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.errors import BindError, CodegenError, IRError
from aotkit_inductor_lower.ir import Compute
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.kernel_ir.parse import parse_module
from aotkit_inductor_lower.kernel_ir.walk import map_instructions
from aotkit_inductor_lower.kernel_passes.each_kernel import kernel_pass
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.launch_plan.records import Binary
from aotkit_inductor_lower.targets.cpu.render import ops as rendered_ops
from aotkit_inductor_lower.targets.interpreter.generate import generate

Function = Callable[..., Any]
Tensor = torch.Tensor
PROCESSORS: tuple[Any, ...] = ("host", "interpreter")


def lower(f: Function, args: list[Any], processor: Any = "interpreter", mode: str = "fake", **options: Any) -> Compiled:
    """``f``, functionalized, lowered for a processor."""
    graph = make_fx(torch.func.functionalize(f), decompositions(), tracing_mode=mode)(*fresh(args))
    compiled = compile_to_program(graph, options=LowerOptions(processor=processor, verify=True, **options))
    assert isinstance(compiled, Compiled)
    return compiled


def fresh(args: list[Any]) -> list[Any]:
    """Arguments of one's own, laid out alike."""
    return [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, Tensor) else a for a in args
    ]


def call(compiled: Compiled, args: list[Any], *, redzones: bool = True) -> list[Any]:
    """What the program gives, its memory watched."""
    return bind_program(compiled.program, compiled.constants, redzones=redzones)(list(args))


def check(f: Function, *args: Tensor, aten: bool = False) -> Compiled:
    """Compare the interpreted kernels with eager and, in results and arguments, with the CPU's code of the same
    kernels. Without ``aten`` all is generated."""
    host, ours = (lower(f, list(args), processor, contractions="aten") for processor in PROCESSORS)
    assert print_program(ours.scheduled) == print_program(host.scheduled)
    assert ours.program.kernels and (aten or not ours.report.externs)
    given = [fresh(list(args)) for _ in range(3)]
    found, compiled = call(ours, given[0]), call(host, given[1])
    eager = f(*given[2])
    eager = list(eager) if isinstance(eager, tuple | list) else [eager]
    for got, same, want in zip((*found, *given[0]), (*compiled, *given[1]), (*eager, *given[2]), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        bound = 3e-6 if want.dtype in (torch.float32, torch.float64) else None
        for reference in (same, want):
            torch.testing.assert_close(got, reference, rtol=bound, atol=bound, equal_nan=True)
    return ours


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GRAPHS: dict[str, tuple[Function, list[Tensor]]] = {
    "pointwise": (lambda x, y: (F.gelu(x + y), (x * y).sin().clamp(-0.5), x > y), [numbers(7, 33), numbers(33)]),
    "reductions": (lambda x: (x.sum(), x.amax(0), x.argmin(1), x.prod(1), x.var(0), x.mean((0, 1))), [numbers(9, 31)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (40,), w, b), [numbers(6, 5, 40), numbers(40), numbers(40)]),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)), [numbers(12, 50)]),
    "views": (
        lambda x: (x.t().contiguous() + 1, x[:, 1::3] * 2, x.flip(0).reshape(-1) - 1, x.unfold(1, 4, 2).sum(-1)),
        [numbers(8, 15)],
    ),
    "joined": (lambda x, y: torch.cat([x * 2, y + 1], 1).cos(), [numbers(5, 6), numbers(5, 9)]),
    "scans": (lambda x: (x.cumsum(1), x.cumprod(0), x.exp().cumsum(0)), [numbers(6, 11)]),
    "halves": (
        lambda x, y: (x * 2 + 1, x.float().softmax(-1).to(torch.float16), (y + y).sum(1), y.exp()),
        [numbers(6, 20).bfloat16(), numbers(6, 20).half()],
    ),
    "integers": (
        lambda x, y: (x + y, x // 3, x % 7, x << 2, x.sum(0), (x & y).to(torch.uint8), x.to(torch.int8), x == y),
        [torch.arange(-30, 30).view(5, 12), torch.arange(60).view(5, 12).flip(0)],
    ),
    "small integers": (
        lambda x, y: (x + x, x * 3, x.sum(1), y - 1, y.amax(0), y.bool(), ~x),
        [torch.arange(-60, 60, dtype=torch.int8).view(8, 15), torch.arange(120, dtype=torch.uint8).view(8, 15)],
    ),
    "bits": (lambda x: (x.view(torch.int32) >> 3, (x * 2).view(torch.int32).sum(1)), [numbers(4, 6)]),
    "eight bits": (lambda x: (x.to(torch.float8_e4m3fn).float() * 2, x.to(torch.float8_e5m2).float()), [numbers(5, 9)]),
    "doubles": (lambda x: (x.tanh(), x.std(1), torch.erf(x).sum()), [numbers(5, 14).double()]),
    "nothing": (lambda x: (x.sum(1), x + 1, x.sum(0)), [numbers(4, 0)]),
    "numbers alone": (lambda x: (x * 2, x.sum()), [numbers()]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_gives_what_eager_and_the_code_of_the_same_kernels_give(name: str) -> None:
    f, args = GRAPHS[name]
    check(f, *args)


def scattered(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Stores to computed places, of every mode."""
    return (
        y.index_put((index,), x),
        y.index_add(0, index, x),
        y.scatter_reduce(0, index[:, None].expand_as(x), x, "amax"),
        y.scatter(0, index[:, None].expand_as(x), x),
        x[index],
        y.bfloat16().index_put((index,), x.bfloat16(), accumulate=True),
        F.embedding(index, y).sum(0),
    )


def test_stores_to_computed_places() -> None:
    check(scattered, numbers(4, 6), torch.tensor([3, 0, 2, 1]), numbers(9, 6))
    added = lambda x, index: torch.zeros(5, 6).index_add(0, index, x)
    check(added, numbers(8, 6), torch.tensor([3, 3, 0, 3, 1, 0, 4, 4]))


def test_an_input_that_is_written_is_written_through_its_strides() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x.t()).mul_(2)
        return y.sum(1)

    check(f, numbers(5, 8), numbers(8, 5))
    check(f, numbers(5, 8), numbers(5, 8).t())
    check(f, numbers(5, 16)[:, ::2], numbers(9, 7)[1:, 1:6])


def test_an_alias_of_an_input_reaches_as_far_as_it_says() -> None:
    spread = lambda x: torch.as_strided(x, (3, 2), (5, 2), 1) * 2
    check(spread, numbers(4, 4))
    for start, f in ((4, lambda x: torch.as_strided(x, (9,), (3,), 4) + 1), (0, spread), (9, spread)):
        part = numbers(30)[start : start + 8]
        graph = make_fx(f, tracing_mode="fake")(part)
        host, ours = (compile_graph(graph, options=LowerOptions(processor=p)) for p in PROCESSORS)
        assert torch.equal(host([part])[0], f(part))
        assert torch.equal(ours([part])[0], f(part))


def test_long_reductions_are_cut_into_the_chunks_that_the_cpu_target_gets() -> None:
    x = numbers(2, 70000)
    compiled = check(lambda x: (x.sum(), x.double().mean(1), x.amax(1)), x)
    assert any(decision.kind == "split" for decision in compiled.records)
    long = check(lambda x: F.layer_norm(x, (300000,)), numbers(1, 300000))
    assert len(long.program.kernels) > 2


def test_what_is_left_of_a_sort_is_called_between_kernels() -> None:
    compiled = check(lambda x: (*x.sort(-1), *x.topk(3), x.view(torch.int16).sum(1)), numbers(6, 13), aten=True)
    assert len(compiled.program.kernels) > 2 and compiled.report.externs


def test_products_are_called_where_the_cpu_target_calls_them() -> None:
    x, w, b = numbers(128, 300), numbers(300, 300, seed=1) / 20, numbers(300, seed=2)
    compiled = check(lambda x, w, b: torch.addmm(b, x, w).relu().sum(1), x, w, b, aten=True)
    assert compiled.report.externs


@pytest.mark.parametrize("rng", ["fast", "eager"])
def test_random_numbers_are_those_of_the_code(rng: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        dropped = F.dropout(x, 0.4, True)
        return dropped, torch.rand_like(x) + x, torch.randn_like(x) * 2, torch.randint_like(x, 1, 90)

    x, found = numbers(6, 50), []
    for processor in PROCESSORS:
        compiled = lower(f, [x], processor, rng=rng)
        torch.manual_seed(3)
        found.append(call(compiled, [x]))
    for got, same in zip(*found, strict=True):
        torch.testing.assert_close(got, same)
    assert (found[0][0] == 0).any() and found[0][3].unique().numel() > 30


def test_dynamic_sizes_are_served_by_one_program() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return F.softmax(x * 2, -1), x.sum(0), x.t().contiguous(), torch.cat([x, x + 1], 1).mean(1)

    compiled = lower(f, [numbers(7, 5)], mode="symbolic")
    bound = bind_program(compiled.program, compiled.constants)
    for shape in ((7, 5), (33, 70), (2, 3)):
        x = numbers(*shape)
        sizes = list(shape) if compiled.program.plan.inputs[0].startswith("$") else []
        for got, want in zip(bound([*sizes, x]), f(x), strict=True):
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want)


def test_a_training_step_gives_eagers_gradients() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.layer_norm(F.gelu(x @ w + b), (16,)).softmax(-1)
        return (y.detach(), *torch.autograd.grad((y * y).sum(), (x, w)))

    args = [numbers(24, 16), numbers(16, 16, seed=1), numbers(16, seed=2)]
    compiled = compile_graph(
        make_fx(step, decompositions(), tracing_mode="fake")(*args), options=LowerOptions(processor="interpreter")
    )
    for got, want in zip(compiled(fresh(args)), step(*args), strict=True):
        torch.testing.assert_close(got, want)


RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_random_program_gives_what_the_reference_gives(seed: int, exact: bool) -> None:
    options = RandomOptions(exact_only=exact)
    program = random_program(seed + 900, options)
    run = bind_program(generate(program, normalize(linearize(program))), redzones=True)
    for sizes in range(2 if program.symbol_sources else 1):
        inputs = random_inputs(program, seed + 100 * sizes, options)
        want = interpret_program(program, fresh(inputs))
        for got, reference in zip(run(fresh(inputs)), want, strict=True):
            assert isinstance(reference, Tensor)
            assert difference(reference, got, exact=exact) is None


# -- what is kept ------------------------------------------------------------------------------------------------


def example() -> tuple[Function, list[Tensor]]:
    """A graph of two kernels, around a call."""
    f = lambda x, w: (torch.linalg.qr((x @ w).softmax(-1))[1].abs() + 1, x.sum(0))
    return f, [numbers(6, 9), numbers(9, 4, seed=1)]


def test_what_is_kept_is_the_text_of_the_kernels_and_json() -> None:
    f, args = example()
    compiled = lower(f, args)
    binary = compiled.program.binary
    ((name, code),) = binary.sections
    module = parse_module(code.decode())
    assert (binary.target, name) == ("interpreter", "kernels")
    assert [call.step for call in module.calls] == [record.name for record in compiled.program.kernels]
    text = compiled_to_json(compiled.program)
    read = compiled_from_json(text)
    assert read == compiled.program and compiled_to_json(read) == text
    for got, want in zip(bind_program(read, compiled.constants)(fresh(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want)


LOADED = """
import sys
from pathlib import Path
import torch
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json
from aotkit_inductor_lower.runtime import bind_program
bound = bind_program(compiled_from_json(Path(sys.argv[1]).read_text()))
torch.save(bound(torch.load(sys.argv[2])), sys.argv[3])
parts = ("driver", "passes", "lowering", "kernel_passes", "targets.select", "targets.interpreter.generate")
print([p for p in parts if f"aotkit_inductor_lower.{p}" in sys.modules], [m for m in sys.modules if m == "llvmlite"])
"""


def test_another_process_runs_what_is_kept_without_what_made_it(tmp_path: Path) -> None:
    f, args = example()
    kept, given, found = (tmp_path / name for name in ("program.json", "given.pt", "found.pt"))
    kept.write_text(compiled_to_json(lower(f, args).program))
    torch.save(args, given)
    command = [sys.executable, "-c", LOADED, *map(str, (kept, given, found))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split("\n")[-2] == "[] []"
    for got, want in zip(torch.load(found), f(*args), strict=True):
        torch.testing.assert_close(got, want)


class Store(dict[str, bytes]):
    """Keeps compiled programs by digest."""

    def put(self, digest: str, data: bytes) -> None:
        self[digest] = data


def test_kernels_of_other_passes_are_not_taken_for_what_is_kept() -> None:
    x, store = numbers(4, 5, 6), Store()
    graph = make_fx(lambda x: (x * 2,), tracing_mode="fake")(x)
    found = []
    for settings in ({}, {"disable": ("merge-loops",)}, {"fuel": 0}, {"fuel": 100}, {}):
        options = LowerOptions(processor="interpreter", **settings)  # type: ignore[arg-type]
        compiled = compile_graph(graph, options=options, object_store=store)
        found.append(compiled.compiled.binary.sections[0][1].decode().count(" < "))
        assert torch.equal(compiled([x])[0], x * 2)
    assert found == [1, 3, 3, 1, 1] and len(store) == 4


def test_kept_programs_of_the_two_targets_are_not_taken_for_each_other() -> None:
    f, args = example()
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    store = Store()
    for processor in (*PROCESSORS, "interpreter"):
        compiled = compile_graph(graph, options=LowerOptions(processor=processor), object_store=store)
        assert compiled.compiled.binary.target == {"host": "cpu"}.get(processor, processor)
    assert len(store) == 2


def test_text_that_does_not_read_is_refused_when_it_is_bound() -> None:
    f, args = example()
    program = lower(f, args).program
    ((name, code),) = program.binary.sections
    later = code.replace(b"aotkit-kernel 1", b"aotkit-kernel 99")
    with pytest.raises(BindError, match=r"text of version 99; .*; compile again"):
        bind_program(replace(program, binary=Binary.of("interpreter", program.binary.facts, ((name, later),))))
    with pytest.raises(BindError, match="damaged"):
        bind_program(replace(program, binary=replace(program.binary, sections=((name, later),))))


# -- errors ------------------------------------------------------------------------------------------------------


def message(f: Function, args: list[Tensor], processor: Any, error: type[Exception]) -> str:
    """What a call of the compiled graph raises."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = '  File "model.py", line 3, in forward\n    return x[index]\n'
    compiled = compile_graph(graph, options=LowerOptions(processor=processor))
    with pytest.raises(error) as caught:
        compiled(list(args))
    return str(caught.value)


def test_an_index_out_of_range_is_the_error_of_the_code() -> None:
    pick = lambda x, index: (x.sin(), torch.linalg.qr(x)[1] + x[index].sum(1))
    args = [numbers(4, 4), torch.tensor([0, -4, 4, 1])]
    host, ours = (message(pick, args, processor, IndexError) for processor in PROCESSORS)
    assert ours == host
    assert "an index is out of range" in ours and "kernel " in ours and "model.py" in ours
    fine = [args[0], torch.tensor([0, -4, 3, 1])]
    torch.testing.assert_close(call(lower(pick, fine), fine)[1], pick(*fine)[1])


def test_a_division_by_zero_is_the_error_of_the_code() -> None:
    args = [torch.arange(6), torch.tensor([1, 2, 3, 0, 4, 5])]
    host, ours = (message(lambda x, y: x // y, args, processor, RuntimeError) for processor in PROCESSORS)
    assert ours == host and "ZeroDivisionError" in ours


def test_a_program_can_be_called_again_after_an_error() -> None:
    pick = lambda x, index: (x * 2).softmax(0)[index]
    x = numbers(5)
    compiled = lower(pick, [x, torch.tensor([0, 4])])
    bound = bind_program(compiled.program, compiled.constants)
    for _ in range(2):
        with pytest.raises(IndexError):
            bound([x, torch.tensor([0, 5])])
        torch.testing.assert_close(bound([x, torch.tensor([0, 4])])[0], pick(x, torch.tensor([0, 4])))


def test_an_access_outside_of_its_memory_is_no_number() -> None:
    program = lower(lambda x: (x + 1).sum(1), [numbers(4, 6)]).program
    extents = dict(program.binary.facts["bytes"])
    taken = next(name for name in extents if name in program.plan.inputs)
    assert extents[taken] == str(4 * 6 * 4)
    facts = {**program.binary.facts, "bytes": {**extents, taken: str(4 * 6 * 4 - 4)}}
    short = replace(program, binary=Binary.of("interpreter", facts, program.binary.sections))
    with pytest.raises(IRError, match=r"reaches \[0, 23\], outside \[0, 23\)") as caught:
        bind_program(short)([numbers(4, 6)])
    (note,) = caught.value.__notes__
    assert note == f"\n  kernel {program.kernels[0].name}"


def test_kernels_over_tensors_elsewhere_are_refused() -> None:
    program = lower(lambda x: x + 1, [numbers(4)]).scheduled
    moved = replace(program, buffers=tuple(replace(b, device="cuda:0") for b in program.buffers))
    with pytest.raises(CodegenError, match="on cuda:0; only CPU kernels"):
        generate(moved, linearize(moved))


# -- what it is for ----------------------------------------------------------------------------------------------


def outcomes(f: Function, args: list[Tensor]) -> list[bool]:
    """Whether the code, and the interpreted kernels, give what eager gives."""
    return [
        torch.allclose(call(lower(f, args, processor), args, redzones=False)[0], f(*args)) for processor in PROCESSORS
    ]


def test_a_fault_of_the_renderer_is_in_the_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [numbers(5, 6), numbers(5, 6, seed=1)]
    monkeypatch.setattr(rendered_ops, "LLVM_OPS", {**rendered_ops.LLVM_OPS, "mul": rendered_ops.LLVM_OPS["add"]})
    assert outcomes(lambda x, y: x * y, args) == [False, True]


def test_a_fault_of_a_kernel_pass_is_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(kernel: Any) -> Any:
        wrong = lambda i: replace(i, op="add") if isinstance(i, Compute) and i.op == "mul" else i
        return replace(kernel, body=map_instructions(kernel.body, wrong))

    fault = kernel_pass("fault", damage, why="a fault", required=True)
    monkeypatch.setattr(driver, "KERNEL_PASSES", (*driver.KERNEL_PASSES, fault))
    assert outcomes(lambda x, y: x * y, [numbers(5, 6), numbers(5, 6, seed=1)]) == [False, False]


def test_the_kernels_that_are_dumped_are_those_that_run() -> None:
    class Dumps:
        kept: dict[tuple[str, str], str]

        def stage(self, _name: str, /) -> Any:
            return nullcontext()

        def event(self, _name: str, _fields: Any, /) -> None:
            return

        def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
            self.kept[name, kind] = text()

    f, args = example()
    graph, found = make_fx(f, decompositions(), tracing_mode="fake")(*args), []
    for processor in PROCESSORS:
        dumps = Dumps()
        dumps.kept = {}
        compiled = compile_graph(graph, options=LowerOptions(processor=processor), observer=dumps)
        found.append(dumps.kept)
    assert found[0]["kernels", "ir"] == found[1]["kernels", "ir"] == found[1]["graph.ir", "kernels"]
    assert compiled.compiled.text == found[1]["graph.ir", "kernels"] == compiled.compiled.binary.sections[0][1].decode()


def test_a_callers_modes_do_not_reach_into_kernels() -> None:
    f = lambda x: (x.softmax(-1) + 1).exp()
    x = numbers(5, 7)
    compiled = lower(f, [x])
    bound, want = bind_program(compiled.program, compiled.constants), f(x)
    for mode in (torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        with mode:
            (got,) = bound([x])
        torch.testing.assert_close(got, want)
    with torch.enable_grad():
        assert not bound([x.requires_grad_()])[0].requires_grad


def test_threads_may_call_a_program_at_once() -> None:
    f, args = example()
    compiled = lower(f, args)
    bound, want = bind_program(compiled.program, compiled.constants), f(*args)
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(bound(fresh(args)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for results in found:
        for got, reference in zip(results, want, strict=True):
            torch.testing.assert_close(got, reference)
