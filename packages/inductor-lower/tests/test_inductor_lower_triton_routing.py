"""The device of a graph decides what it is compiled for, and what is elsewhere in it stays with ATen."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.errors import UnsupportedGraphError
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.runtime import BindError
from aotkit_inductor_lower.targets.select import kernel_device
from aotkit_inductor_lower.targets.triton import (
    InterpreterDriver,
    Tf32Advice,
    TritonError,
    TritonMissing,
    compile_kernel,
    kernels_of,
    resource_facts,
)
from aotkit_inductor_lower.targets.triton import load as load_module
from aotkit_inductor_lower.targets.triton.checks import tell_tf32

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def traced(f: Callable[..., Any], *devices: str, shape: tuple[int, ...] = (6, 8)) -> torch.fx.GraphModule:
    """``f`` of fake tensors, one per device; a 0-d one for the CPU."""
    with FakeTensorMode():
        args = [torch.empty(() if device == "cpu" else shape, device=device) for device in devices]
        return make_fx(f, decompositions(), tracing_mode="fake")(*args)


def values(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random tensors."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class OnTheCpu(InterpreterDriver):
    """Stands for a device of compute capability 9.0 whose memory is the CPU's."""

    arch = 90

    def __init__(self, device: str) -> None:
        super().__init__()
        self.asked_for = device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device, as far as this package asks: kernels are compiled for it and run in the interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # asks for a driver before torch 2.12
    monkeypatch.setattr(load_module, "CudaDriver", OnTheCpu)


class Store(dict[str, bytes]):
    """An object store in memory."""

    def put(self, digest: str, data: bytes) -> None:
        """Keep."""
        self[digest] = data


def softmax(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One kernel."""
    return (F.softmax(x * 2, -1),)


@pytest.mark.covers("F7.19")
@pytest.mark.usefixtures("device")
def test_a_graph_on_cuda_becomes_cubins_and_a_stored_one_is_bound_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, store = traced(softmax, "cuda:0"), Store()
    here = LowerOptions(compile_workers=0)  # processes of their own would still have what is hidden below
    compiled = compile_graph(graph, options=here, object_store=store)
    assert compiled.compiled.binary.facts["device"] == "cuda:0"
    assert all(k.cubin is not None and k.cubin.arch == 90 for k in kernels_of(compiled.compiled))
    assert compiled.report().kernel_count == 1 and len(store) == 1
    (x,) = values((6, 8))
    torch.testing.assert_close(compiled([x])[0], softmax(x)[0])
    text = compiled_to_json(compiled.compiled)
    assert compiled_to_json(compiled_from_json(text)) == text
    torch.testing.assert_close(bind_program(compiled_from_json(text), compiled.constants)([x])[0], softmax(x)[0])
    monkeypatch.setitem(sys.modules, "triton.compiler", None)  # whoever compiles now fails
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", None)
    again = compile_graph(graph, options=here, object_store=store)
    assert again.compiled == compiled.compiled
    with pytest.raises(TritonError, match=r"import of triton\.backends\.compiler"):
        compile_graph(graph, options=here)


@pytest.mark.usefixtures("device")
def test_a_stored_program_serves_only_the_options_that_it_was_compiled_with() -> None:
    graph, store = traced(lambda x: (torch.index_select(x, 0, torch.argmax(x, 1)) * 2,), "cuda:0"), Store()
    for count in (2, 2):
        for asserts in (True, False):
            compiled = compile_graph(graph, options=LowerOptions(index_asserts=asserts), object_store=store)
            assert any(k.source.checks for k in kernels_of(compiled.compiled)) == asserts
        assert len(store) == count


@pytest.mark.usefixtures("device")
def test_cubins_for_another_architecture_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_graph(traced(softmax, "cuda:0")).compiled
    monkeypatch.setattr(OnTheCpu, "arch", 80)
    with pytest.raises(BindError, match=r"compiled for sm_90, and cuda:0 is sm_80; compile again"):
        bind_program(compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BindError, match="this process has no CUDA device"):
        bind_program(compiled)


def test_without_a_device_or_without_triton_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(softmax, "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TritonError, match="the graph is on cuda:0, and this process has no CUDA device"):
        compile_graph(graph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TritonMissing, match="pip install"):
        compile_graph(graph)
    with pytest.raises(UnsupportedGraphError, match="only memory of the CPU is watched"):
        compile_graph(graph, options=LowerOptions(redzones=True))


def test_a_graph_on_the_cpu_stays_there_unless_the_interpreter_is_asked_for() -> None:
    (x,) = values((6, 8))
    graph = make_fx(softmax, decompositions(), tracing_mode="fake")(x)
    assert compile_graph(graph).compiled.binary.target == "cpu"
    compiled = compile_graph(graph, options=LowerOptions(processor="triton-interpreter", verify=True))
    assert compiled.compiled.binary.target == "triton" and compiled.compiled.binary.facts["device"] == "cpu"
    torch.testing.assert_close(compiled([x])[0], softmax(x)[0])
    torch.testing.assert_close(
        bind_program(compiled_from_json(compiled_to_json(compiled.compiled)))([x])[0], softmax(x)[0]
    )


def test_a_graph_with_a_part_that_depends_on_data_runs_its_pieces_as_kernels() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x * 2 + 1).nonzero() * 3 + 1,)

    x = torch.tensor([0.0, -0.5, 2.0, 3.0])
    graph = make_fx(f, decompositions(), tracing_mode="symbolic")(x)
    compiled = compile_graph(graph, options=LowerOptions(processor="triton-interpreter"))
    assert torch.equal(compiled([x])[0], f(x)[0])
    assert compiled.report().kernel_count == 1


class Kernel:
    """Stands for a kernel of the user's own, launched on the present device."""

    arg_names = ("x",)
    current, launched = 0, list[int]()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(x: torch.Tensor) -> None:
            Kernel.launched.append(Kernel.current)
            x.add_(1)

        return launch


@pytest.mark.usefixtures("device")
def test_kernels_of_the_users_own_are_launched_on_the_graphs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            Kernel.current = self.device.index

        def __exit__(self, *_: object) -> None:
            Kernel.current = 0

    monkeypatch.setattr(torch.cuda, "device", Guard)
    kernel, none = kernel_side_table.add_kernel(Kernel()), kernel_side_table.add_constant_args({})
    settings = {"kernel_idx": kernel, "constant_args_idx": none, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = triton_kernel_wrapper_functional(**settings, kwargs={"x": x * 2}, tensors_to_clone=["x"])["x"]
        return (y.sin(),)

    compiled, (x,) = compile_graph(traced(f, "cuda:1")), values((6, 8))
    torch.testing.assert_close(compiled([x])[0], (x * 2 + 1).sin())
    assert Kernel.launched == [1] and Kernel.current == 0


# -- several devices ---------------------------------------------------------------------------------------------


def reasons(lowered: Any) -> dict[str, str]:
    """Per ATen call of a program why it is one."""
    return {step.target: step.reason for step in lowered.scheduled.steps if hasattr(step, "target")}


def test_a_number_on_the_cpu_goes_to_the_device_once_and_into_the_kernel() -> None:
    def f(x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = number * 3  # on the CPU
        return x * scaled + number, x.sin() / scaled

    graph = traced(f, "cuda:0", "cpu")
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    assert lowered.program.binary.facts["device"] == "cuda:0"
    found = reasons(lowered)
    assert found["aten.mul.Tensor"] == "a tensor is on cpu, and this graph's kernels run on cuda:0"
    assert [s.target for s in lowered.scheduled.steps if hasattr(s, "target")].count("aten._to_copy.default") == 2
    assert len(lowered.program.kernels) == 2  # each after the copy that it needs
    x, number = values((6, 8), ())
    got = bind_program(lowered.program, lowered.constants)([x, number])
    for ours, reference in zip(got, f(x, number), strict=True):
        torch.testing.assert_close(ours, reference)


def test_a_constant_on_the_cpu_goes_to_the_device_too() -> None:
    graph = traced(lambda x: (x * 2,), "cuda:0")
    graph.register_buffer("three", torch.tensor(3.0))
    (product,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with graph.graph.inserting_before(product):
        product.args = (product.args[0], graph.graph.get_attr("three"))
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    assert reasons(lowered).keys() == {"aten._to_copy.default"}
    (x,) = values((6, 8))
    assert torch.equal(bind_program(lowered.program, lowered.constants)([x])[0], x * 3)


def test_what_is_on_a_second_device_stays_with_aten_with_the_reason() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = F.gelu(x + 1).exp()
        there = (hidden.to("cuda:1") + w).relu()
        return hidden, there, there.to("cuda:0") * 2

    graph = traced(f, "cuda:0", "cuda:1")
    assert kernel_device(graph) == torch.device("cuda:0")
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    found = reasons(lowered)
    assert found.keys() == {"aten._to_copy.default", "aten.add.Tensor", "aten.relu.default"}
    assert found["aten.relu.default"] == "a tensor is on cuda:1, and this graph's kernels run on cuda:0"
    assert {b.device for b in lowered.program.plan.buffers} == {"cuda:0", "cuda:1"}
    x, w = values((6, 8), (6, 8))
    bound = bind_program(lowered.program, lowered.constants)
    hidden = F.gelu(x + 1).exp()
    there = (hidden + w).relu()
    for ours, reference in zip(bound([x, w]), (hidden, there, there * 2), strict=True):
        torch.testing.assert_close(ours, reference)


def test_temporaries_of_rules_are_on_the_graphs_device() -> None:
    """Averages over a scatter keep counts in a buffer of their own."""

    def f(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(x).scatter_reduce(0, index, x, "mean", include_self=False),)

    with FakeTensorMode():
        args = [torch.empty(6, 8, device="cuda:0"), torch.empty(6, 8, dtype=torch.int64, device="cuda:0")]
        graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    assert {b.device for b in lowered.scheduled.buffers} == {"cuda:0"}
    (x,) = values((6, 8))
    index = torch.randint(6, (6, 8), generator=torch.Generator().manual_seed(1))
    got = bind_program(lowered.program, lowered.constants)([x, index])
    torch.testing.assert_close(got[0], f(x, index)[0])


@pytest.mark.covers("F5f.21")
def test_random_numbers_are_made_in_the_kernels_of_a_device_from_seeds_that_it_draws() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mask = torch.ops.aten.native_dropout(F.gelu(x) + 1, 0.4, True)
        return y * 2, mask, torch.rand_like(x), torch.randn_like(x, dtype=torch.bfloat16)

    with FakeTensorMode():
        graph = make_fx(f, decompositions(), tracing_mode="fake")(torch.empty(40, 50, device="cuda:1"))
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, rng="fast", processor="triton-interpreter"))
    (call,) = [step for step in lowered.scheduled.steps if hasattr(step, "target")]
    assert call.target == "aten.randint.low" and dict(call.kwargs)["device"].value == "cuda:1"
    bound = bind_program(lowered.program, lowered.constants)
    (x,) = values((40, 50))
    torch.manual_seed(0)
    y, mask, uniform, normal = first = bound([x])
    torch.testing.assert_close(y, (F.gelu(x) + 1) * mask / 0.6 * 2)
    assert abs(mask.float().mean() - 0.6) < 0.05
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.03
    assert normal.dtype is torch.bfloat16 and abs(normal.float().var() - 1) < 0.15
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(bound([x]), first, strict=True))
    on_cpu = compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(x), options=LowerOptions(rng="fast"))
    torch.manual_seed(0)
    assert torch.equal(on_cpu([x])[2], uniform)  # the same arithmetic everywhere
    for kernel in kernels_of(lowered.program):
        assert resource_facts(compile_kernel(kernel.source, 90)).spills == 0


@pytest.mark.covers("F5a.12")
@pytest.mark.usefixtures("device")
def test_products_in_float32_on_tensor_cores_are_told_of_once_and_not_where_they_are_allowed() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ y.t() + 1,)

    before = torch.get_float32_matmul_precision()
    told = {}
    try:
        for name, precision, graph in (
            ("highest", "highest", traced(product, "cuda:0", "cuda:0")),
            ("high", "high", traced(product, "cuda:0", "cuda:0")),
            ("no product", "highest", traced(softmax, "cuda:0")),
        ):
            torch.set_float32_matmul_precision(precision)
            tell_tf32.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    compile_graph(graph)
            told[name] = [w.category for w in caught]
    finally:
        torch.set_float32_matmul_precision(before)
    assert told == {"highest": [Tf32Advice], "high": [], "no product": []}


@pytest.mark.usefixtures("device")
def test_that_advice_is_no_error_under_the_filters_of_this_repository() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ y.t() + 1,)

    assert torch.get_float32_matmul_precision() == "highest"
    tell_tf32.cache_clear()
    compile_graph(traced(product, "cuda:0", "cuda:0"))


@pytest.mark.covers("F5a.13")
@pytest.mark.usefixtures("device")
def test_bfloat16_on_a_device_without_it_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.bfloat16() + 1,)

    graph = traced(half, "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(TritonError, match="bfloat16, which sm_75 does not convert in hardware; use float16, or run"):
        compile_graph(graph)


@pytest.mark.covers("F5e.7")
def test_a_dumped_kernel_is_a_script_that_makes_its_inputs_and_runs_by_itself(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    class Watcher:
        def stage(self, name: str) -> AbstractContextManager[None]:
            return nullcontext()

        def dump(self, name: str, kind: str, text: Callable[[], str]) -> None:
            seen[kind] = text()

    (x,) = values((6, 8))
    graph = make_fx(lambda x: ((x * 2 + 1).sum(1),), decompositions(), tracing_mode="fake")(x)
    compile_graph(graph, options=LowerOptions(processor="triton-interpreter"), observer=Watcher())
    assert "loop " in seen["ir"] and 'print(f"' in seen["kernels"]
    (tmp_path / "kernel.py").write_text(seen["kernels"])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(tmp_path / "kernel.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum_1: 216 bytes, in the interpreter\n"
