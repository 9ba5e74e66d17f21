"""What matters on a real device and no interpreter shows: contexts of threads, devices and streams, memory that begins
anywhere, parameters, the order of additions, and what ptxas makes of a kernel."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions, parse_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.runtime import BoundProgram
from aotkit_inductor_lower.targets.triton import (
    CudaDriver,
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
from aotkit_inductor_lower.targets.triton import drivers as drivers_module
from aotkit_inductor_lower.targets.triton.launcher import MOST_ARGUMENTS, LaunchRow, LaunchTable

triton = pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

Tensor = torch.Tensor


def lower(f: Callable[..., Any], *args: Any, **settings: Any) -> Compiled:
    """``f`` traced on the CPU and lowered for a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    return compile_to_program(graph, options=LowerOptions(verify=True, **settings, processor="triton-interpreter"))


def interpreted(lowered: Compiled) -> BoundProgram:
    """In Triton's interpreter."""
    return bind_program(lowered.program, lowered.constants)


# -- threads, devices, streams -----------------------------------------------------------------------------------


class Machine(threading.local):
    """CUDA as one thread sees it: a current device, streams per device, and a context or none."""

    def __init__(self) -> None:
        self.device = 0
        self.context: int | None = None
        self.streams = {0: 0, 1: 0}


class Library:
    """The driver's library. Contexts are called 100 + device; kernels of a module belong to the context that was
    current when it was loaded, and run in no other."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.launches, self.failed = machine, list[tuple[int, int, int]](), list[int]()
        self.functions: dict[int, int] = {}
        self.cuLaunchKernel = drivers_module._LAUNCH(self._launch)

    def _launch(self, function: int, *rest: Any) -> int:
        if self.machine.context != self.functions[function]:
            self.failed.append(threading.get_ident())
            return 201 if self.machine.context is None else 400
        self.launches.append((threading.get_ident(), self.machine.device, rest[7] or 0))
        return 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, to: Any, index: int) -> int:
        to._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, to: Any, ordinal: Any) -> int:
        to._obj.value = 100 + ordinal.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.machine.context = context.value
        self.machine.device = context.value - 100
        return 0

    def cuModuleLoadData(self, to: Any, code: bytes) -> int:
        assert code[:4] == b"\x7fELF"
        to._obj.value = self.machine.context
        return 0 if self.machine.context is not None else 201

    def cuModuleGetFunction(self, to: Any, module: Any, name: bytes) -> int:
        to._obj.value = 1000 + len(self.functions)
        self.functions[to._obj.value] = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: Any) -> int:
        return 0

    def cuGetErrorString(self, status: int, to: Any) -> int:
        to._obj.value = f"error {status}".encode()
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two devices of which device 0 is current, as torch and the driver's library show them."""
    made = Machine()

    class Guard:
        def __init__(self, index: Any) -> None:
            self.index = torch.device("cuda", index).index if isinstance(index, int) else torch.device(index).index

        def __enter__(self) -> None:
            self.before = made.device
            if self.index != made.device:  # torch calls the device only then
                made.device, made.context = self.index, 100 + self.index

        def __exit__(self, *_: object) -> None:
            if self.before != made.device:
                made.device, made.context = self.before, 100 + self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.streams[index], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    return made


def on_machine(machine: Machine, device: str, f: Callable[..., Any], *args: Any) -> tuple[BoundProgram, Library]:
    """``f`` compiled and bound for a device, whose memory is the CPU's."""
    lowered, library = lower(f, *args), Library(machine)
    driver = CudaDriver(device, library)
    driver.device = "cpu"
    program = to_program(assemble(render_program(lowered.scheduled), 90))
    return bind_program(program, lowered.constants, load=lambda program: load_on(program, driver)), library


def in_thread(call: Callable[[], None]) -> int:
    """Run in a new thread, whose number is given."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    assert thread.ident is not None
    return thread.ident


def two_segments(x: Tensor) -> tuple[Tensor, ...]:
    """A kernel, a product, a kernel."""
    return (((x * 2) @ x).softmax(-1),)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_kernels_run_on_their_device_and_its_present_stream(device: str, machine: Machine) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    bound, library = on_machine(machine, device, two_segments, x)
    own, me = int(device[-1]), threading.get_ident()
    assert machine.device == 0
    for stream in (0, 77):
        machine.streams = {own: stream, 1 - own: 5}
        bound([x])
    assert library.launches == [(me, own, 0)] * 2 + [(me, own, 77)] * 2
    assert machine.device == 0  # as before
    machine.device, machine.context = 1, 101
    bound([x])
    assert library.launches[-1] == (me, own, 77) and machine.device == 1
    assert not library.failed


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_thread_that_has_no_context_yet_gets_it_at_its_first_launch(device: str, machine: Machine) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    bound, library = on_machine(machine, device, two_segments, x)

    def work() -> None:
        assert machine.context is None
        bound([x])
        bound([x])

    ident = in_thread(work)
    assert [launch[:2] for launch in library.launches] == [(ident, int(device[-1]))] * 4
    assert library.failed == ([ident] if device == "cuda:0" else [])  # a guard makes the other device's current
    compiled_there: list[tuple[BoundProgram, Library]] = []
    in_thread(lambda: compiled_there.append(on_machine(machine, device, two_segments, x)))
    again, library = compiled_there[0]
    again([x])
    assert len(library.launches) == 2


def test_another_failure_of_a_launch_is_not_tried_again(machine: Machine) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    bound, library = on_machine(machine, "cuda:0", two_segments, x)
    machine.context = 999
    with pytest.raises(TritonError, match=r"the CUDA driver says: error 400 \(400\)(.|\n)*kernel mul"):
        bound([x])
    assert len(library.failed) == 1 and not library.launches


def test_threads_share_a_program_each_with_addresses_of_its_own(machine: Machine) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    bound, library = on_machine(machine, "cuda:0", two_segments, x)
    bound([x])
    idents = {in_thread(lambda: [bound([x]) for _ in range(5)] and None) for _ in range(2)}
    assert len(library.launches) == 2 + 2 * 5 * 2 and {launch[0] for launch in library.launches} >= idents


# -- memory that begins anywhere ---------------------------------------------------------------------------------


class Watching(InterpreterDriver):
    """The interpreter, which looks at the addresses that kernels get."""

    def __init__(self) -> None:
        super().__init__()
        self.unaligned: list[str] = []

    def _run(self, handle: int, *rest: Any) -> int:
        source, params = self._kernels[handle - 1].source, rest[8]
        for argument, param in zip(source.arguments, params, strict=False):
            if argument.kind != "size" and argument.aligned and param[0] % 16:
                self.unaligned.append(f"{source.name}: {argument.name}")
        return super()._run(handle, *rest)


def watched(lowered: Compiled) -> tuple[BoundProgram, Watching]:
    """Bound to a driver that watches alignment."""
    driver = Watching()
    return bind_program(lowered.program, lowered.constants, load=lambda program: load_on(program, driver)), driver


def anywhere(tensor: Tensor, by: int = 1) -> Tensor:
    """A copy that begins ``by`` elements into memory."""
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    copy = memory[by:].view(tensor.shape)
    assert copy.data_ptr() % 16
    return copy.copy_(tensor)


def test_constants_that_begin_anywhere_are_copied_in_each_call() -> None:
    w, x = anywhere(torch.arange(12.0).view(3, 4)), torch.ones(3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(lambda x: (x * w + 1,), tracing_mode="fake")(torch.empty(3, 4))
    lowered = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter"))
    assert [c.data_ptr() % 16 != 0 for c in lowered.constants.values()] == [True]
    bound, driver = watched(lowered)
    assert torch.equal(bound([x])[0], x * w + 1)
    w.mul_(2)  # the graph reads the tensor, not what it was
    assert torch.equal(bound([x])[0], x * w + 1)
    assert not driver.unaligned


def test_results_of_aten_that_begin_anywhere_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_module = import_module("aotkit_inductor_lower.runtime.bind")
    product = torch.ops.aten.mm.default
    monkeypatch.setattr(bind_module, "resolve_target", lambda target: lambda *args: anywhere(product(*args)))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    bound, driver = watched(lower(two_segments, x))
    torch.testing.assert_close(bound([x])[0], two_segments(x)[0])
    assert not driver.unaligned and "aligned_copy" in bound.source


def saves_what_it_reads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """As the forward of a training graph does: an input, a view of it, and a product come back for the backward."""
    product = x @ w
    return torch.nn.functional.gelu(x), torch.nn.functional.gelu(product), x, x[1:], product


def test_what_is_saved_for_the_backward_is_read_16_bytes_at_once() -> None:
    lowered = lower(saves_what_it_reads, torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(256, 256).bfloat16())
    assert len(kernels_of(lowered.program)) == 1  # one text for both
    (kernel,) = kernels_of(lowered.program)
    assert all(argument.aligned for argument in kernel.source.arguments)
    cubin = compile_kernel(kernel.source, 90, keep_ptx=True)
    assert set(vector_bytes(cubin.ptx)) == set(vector_bytes(cubin.ptx, "st")) == {16}


def test_kernels_of_equal_code_are_compiled_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they differ in names and in how many program instances there are."""
    compiled = []
    module = import_module("aotkit_inductor_lower.targets.triton.compile")

    def counted(source: Any, arch: int) -> Any:
        compiled.append(source.name)
        return compile_kernel(source, arch)

    def three(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(x) + 1, torch.relu(y) + 1, torch.relu(z) * 2

    examples = [torch.empty(rows, 1024) for rows in (64, 128, 256)]
    lowered = lower(three, *examples, disable=frozenset({"gather-launches"}))
    sources = [kernel.source for kernel in kernels_of(lowered.program)]
    assert len(sources) == 3
    first, second, third = module.compile_all(sources, 90, counted)
    assert compiled == [sources[0].name, sources[2].name]
    assert first is second and first.code != third.code
    loads = []
    monkeypatch.setattr(InterpreterDriver, "load", lambda self, kernel: loads.append(kernel) or len(loads))
    program = to_program(assemble(render_program(lowered.scheduled), 90))
    load_on(program, InterpreterDriver())
    assert [kernel.source.name for kernel in loads] == compiled


def test_equal_launches_of_several_kernels_are_one_kernel() -> None:
    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            q, r = torch.linalg.qr(x)
            q, r = torch.sin(q), torch.cos(r)
            x = q @ r
        return x, q

    given = [torch.randn(24, 16, generator=torch.Generator().manual_seed(0))]
    lowered = lower(layers, *given)
    contents = contents_of(lowered.program.binary)
    launched = [contents.kernels[launch.kernel].source.name for _, own in contents.segments for launch in own]
    assert len(launched) == 3 and all(name.endswith("_and_more") for name in launched)
    assert launched[1] == launched[2] and len(contents.kernels) == 2  # the first reads its result in another layout
    for got, want in zip(interpreted(lowered)(list(given)), layers(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_a_kernel_is_parsed_again_where_threads_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(saves_what_it_reads, torch.empty(8, 16), torch.empty(16, 16))
    (kernel,) = kernels_of(lowered.program)
    compile_, calls = triton.compile, []

    def clumsy(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) < failing:
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=31)")
        return compile_(*args, **options)

    monkeypatch.setattr(triton, "compile", clumsy)
    failing = 3
    assert compile_kernel(kernel.source, 90).code and len(calls) == 3
    failing = 1000
    with pytest.raises(TritonError, match="recursion depth"):
        compile_kernel(kernel.source, 90)


def test_an_input_that_begins_anywhere_comes_back_itself_and_so_do_views_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    bound, driver = watched(lower(saves_what_it_reads, x, w))
    odd = anywhere(x)
    for given in (odd, anywhere(x, 3)[1:].clone(), x):
        rows = anywhere(x, 5) if given.shape != x.shape else given
        got, want = bound([rows, w]), saves_what_it_reads(rows, w)
        assert got[2] is rows
        assert got[3].data_ptr() == rows[1:].data_ptr() and got[3].stride() == rows.stride()
        torch.testing.assert_close(tuple(got), want)
    assert not driver.unaligned


def test_an_input_that_begins_anywhere_is_written_and_comes_back() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        x.add_(1)
        return y, x.t()

    x = anywhere(torch.arange(12.0).view(3, 4))
    bound, driver = watched(lower(f, x.clone()))
    before = x.clone()
    doubled, turned = bound([x])
    assert torch.equal(doubled, before * 2) and torch.equal(x, before + 1)
    assert turned.data_ptr() == x.data_ptr() and torch.equal(turned, x.t())
    assert not driver.unaligned


RETYPED = """\
aotkit-ir 2
program retyped
input x
buffer x : float32[12] strides [1] input on cpu
buffer bits : int32[12] strides [1] output on cpu
buffer doubled : float32[12] strides [1] output on cpu
loop doubled(i0 < 12):
  origin nodes ["mul"] ops ["aten.mul.Tensor"] line ""
  stage():
    %v0 = load x[i0] : f32
    %v1 = add %v0, %v0 : f32
    store doubled[i0] = %v1
alias bits: bits = x + 0
return doubled, bits
"""


def test_an_input_that_comes_back_as_another_type_may_begin_anywhere() -> None:
    rendered = render_program(parse_program(RETYPED))
    assert contents_of(to_program(rendered).binary).aligned == ()
    assert [a.aligned for k in rendered.kernels for a in k.source.arguments] == [False, True]
    x = anywhere(torch.arange(12.0))
    doubled, bits = bind_program(to_program(rendered))([x])
    assert bits.data_ptr() == x.data_ptr() and torch.equal(doubled, x * 2)


@pytest.mark.parametrize("by", [1, 3])
def test_inputs_whose_elements_share_memory_may_begin_anywhere(by: int) -> None:
    f = lambda x, y: (x * 2 + y, x.sum(0))
    row = anywhere(torch.arange(5.0), by)
    for x in (row.expand(3, 5), row.as_strided((3, 3), (1, 1), row.storage_offset())):
        y = torch.ones(x.shape)
        bound, driver = watched(lower(f, x, y))
        for ours, want in zip(bound([x, y]), f(x, y), strict=True):
            assert torch.equal(ours, want)
        assert not driver.unaligned


# -- launches ----------------------------------------------------------------------------------------------------


def test_a_kernel_with_more_parameters_than_a_launch_passes_is_refused() -> None:
    LaunchTable([LaunchRow(1, 0, 32, 0, (0,) * MOST_ARGUMENTS)])
    with pytest.raises(TritonError, match="takes 513 arguments, and a launch passes 512 at most"):
        LaunchTable([LaunchRow(1, 0, 32, 0, (0,) * (MOST_ARGUMENTS + 1))])
    lowered = lower(lambda *xs: (sum(xs),), *(torch.ones(4) for _ in range(320)))
    assert 200 < max(len(kernel.source.arguments) for kernel in kernels_of(lowered.program)) <= MOST_ARGUMENTS - 2


def test_grids_have_one_axis_so_that_none_ends_at_65535() -> None:
    f = lambda x: (x.amax(1), x.t().clone(memory_format=torch.contiguous_format))
    with FakeTensorMode():
        lowered = lower(f, torch.empty(200_000, 70_000, dtype=torch.int8, device="cuda:0"))
    assert len(lowered.program.kernels) >= 2
    for _, count in contents_of(lowered.program.binary).counts:
        assert count.constant is not None and 65_535 < count.constant < 2**31


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_launched_for_tensors_without_elements(shape: tuple[int, int]) -> None:
    f = lambda x: (x * 2, x.sum(1), x.sum(0), x.t().contiguous(), torch.cat([x, x]))
    x = torch.empty(shape)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(x)
    dynamic = make_fx(f, decompositions(), tracing_mode="symbolic")(torch.ones(3, 4))
    for traced in (graph, dynamic):
        lowered = compile_to_program(traced, options=LowerOptions(processor="triton-interpreter"))
        for ours, want in zip(interpreted(lowered)([x]), f(x), strict=True):
            assert ours.shape == want.shape and torch.equal(ours, want)
        for kernel in kernels_of(lowered.program) if traced is graph else ():
            assert compile_kernel(kernel.source, 80).code


# -- arithmetic --------------------------------------------------------------------------------------------------


def instructions(lowered: Compiled, arch: int) -> set[str]:
    """Names of the machine instructions of all kernels, as the bundled disassembler prints them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found: set[str] = set()
    for kernel in kernels_of(lowered.program):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compile_kernel(kernel.source, arch).code)
            file.flush()
            command = [str(tool), "--dump-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        lines = (line.split("*/", 1)[1].split() for line in text.splitlines() if line.strip().startswith("/*0"))
        found.update(word for words in lines for word in words[:2] if word[0].isalpha())
    return found


@pytest.mark.parametrize("arch", [80, 90])
def test_the_assembler_contracts_nothing_either(arch: int) -> None:
    x = torch.randn(4096)
    made = instructions(lower(lambda x, y: (x * y + x, x * y - y), x, x), arch)
    assert any(name.startswith("FMUL") for name in made) and any(name.startswith("FADD") for name in made), made
    assert not any(name.startswith(("FFMA", "DFMA")) for name in made)
    wide = instructions(lower(lambda x, y: (x * y + x,), x.double(), x.double()), arch)
    assert any(name.startswith("DMUL") for name in wide) and not any(name.startswith("DFMA") for name in wide)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As the user asks for."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def scattered(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Elements that meet."""
    return x.index_add(0, index, y), x.index_put((index,), y, accumulate=True), F.embedding(index, x) * 2


@pytest.mark.parametrize("place", ["cuda:0", "cpu"])
def test_deterministic_algorithms_leave_elements_that_meet_to_aten(place: str, deterministic: None) -> None:
    with FakeTensorMode():
        args = [torch.empty(5, 3), torch.empty(7, dtype=torch.int64), torch.empty(7, 3)]
        graph = make_fx(scattered, decompositions(), tracing_mode="fake")(*(a.to(place) for a in args))
    lowered = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter"))
    called = [extern.target for extern in lowered.report.externs]
    assert called == (["aten.index_add.default", "aten.index_put.default"] if place == "cuda:0" else [])


def combined(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Elements that meet, in several ways; and some that are only put in their place."""
    aten = torch.ops.aten
    rows = aten.expand(aten.unsqueeze(index, 1), y.shape)
    return (
        x.index_add(0, index, y),
        x.index_put((index,), y, accumulate=True),
        aten.embedding_dense_backward(y, index, 5, -1, False),
        aten.scatter_reduce.two(x, 0, rows, y, "amax"),
        x.index_put((index,), y),
    )


@pytest.mark.parametrize(
    ("dtype", "left"),
    [
        (torch.float32, ["scatter_reduce.two"]),
        (torch.bfloat16, ["index_put.default", "embedding_dense_backward.default", "scatter_reduce.two"]),
        (torch.int64, []),
    ],
)
@pytest.mark.covers("F5g.13")
def test_elements_meet_in_atomic_operations_or_in_aten_never_in_one_thread(dtype: torch.dtype, left: list[str]) -> None:
    with FakeTensorMode():
        sizes = ((5, 3), dtype), ((7,), torch.int64), ((7, 3), dtype)
        args = [torch.empty(shape, dtype=kind, device="cuda:0") for shape, kind in sizes]
        graph = make_fx(combined, decompositions(), tracing_mode="fake")(*args)
    lowered = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    assert {extern.target: extern.reason for extern in lowered.report.externs} == {
        f"aten.{name}": "elements meet in one place, and devices have no atomic operation for them" for name in left
    }
    assert any("atomic_add" in kernel.source.text for kernel in kernels_of(lowered.program))
    assert all(kernel.source.grid for kernel in kernels_of(lowered.program))


def test_integers_divide_by_constants_without_a_call_and_keep_signs_in_indices() -> None:
    f = lambda x: (x.roll(-3, 0), x.view(-1).roll(5), x // 7)
    x = torch.arange(-12, 12).view(6, 4)
    lowered = lower(f, x)
    for ours, want in zip(interpreted(lowered)([x]), f(x), strict=True):
        assert torch.equal(ours, want)
    for kernel in kernels_of(lowered.program):
        facts = resource_facts(compile_kernel(kernel.source, 90))
        assert (facts.spills, facts.stack) == (0, 0)


def test_shared_memory_of_default_kernels_fits_every_device() -> None:
    f = lambda x: (x.softmax(-1), x.cumsum(1), x.var(0), x.argmax(1))
    for kernel in kernels_of(lower(f, torch.empty((64, 8192), dtype=torch.float64)).program):
        assert compile_kernel(kernel.source, 80).shared <= 48 * 1024, kernel.source.name
