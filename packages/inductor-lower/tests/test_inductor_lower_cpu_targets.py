"""Processors to generate for: levels of x86-64, run here; 64-bit ARM, assembled here."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    compile_graph,
    decompositions,
    interpret_program,
    lower_graph,
    schedule_program,
)
from aotkit_inductor_lower.errors import CodegenError
from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.native import symbol_address
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import Machine, arm_machine, generic_machine, host_machine, processor_machine
from aotkit_inductor_lower.targets.cpu import machine as target_module
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.machine import target_machine

LEVELS = [
    "x86-64",
    *(["x86-64-v2"] if host_machine().has("sse4.2") else []),
    "x86-64-v3",
    *(["x86-64-v4"] if host_machine().vector_bits == 512 else []),
    *(["x86-64-amx"] if host_machine().has("amx-bf16") else []),
]
HALVES = (torch.float16, torch.bfloat16)


def representative(x: torch.Tensor, i: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One of every kind of kernel, over odd sizes."""
    norm = torch.nn.functional.layer_norm(x, (x.shape[1],))
    transposed = (x.t() * 2).contiguous()
    halves = [(x.to(dtype) * 1.5 + 0.25).relu() for dtype in HALVES]
    return (
        torch.nn.functional.gelu(x) * x.sigmoid() + x.exp().log1p() - x.sin() * x.tanh(),
        norm.softmax(1),
        torch.cat([transposed, transposed.flip(0)], 1),
        x.double().sum(0),
        x.argmax(1),
        x.amin(0),
        x.cumsum(1),
        x[i] + 1,
        torch.index_add(x, 0, i, x * 0.5),
        torch.where(x > 0, x.to(torch.int32), k[:, None]).bitwise_and(12),
        torch.div(i + 7, k.long() + 40, rounding_mode="floor"),
        *halves,
        x.long().to(torch.int8),
        torch.isnan(x / x).any(1),
    )


def arguments() -> tuple[torch.Tensor, ...]:
    return torch.linspace(-9, 9, 37 * 45).reshape(37, 45), torch.arange(37).flip(0) // 2, torch.arange(37).int()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("processor", LEVELS)
@pytest.mark.covers("F5d.3")
def test_code_for_a_lesser_processor_gives_eagers_results_here(processor: Any, threads: int) -> None:
    before = torch.get_num_threads()
    compiled = compile_graph(traced(), options=LowerOptions(verify=True, redzones=True, processor=processor))
    assert compiled.compiled.binary.facts["machine"][1] == processor_machine(processor).cpu
    torch.set_num_threads(threads)
    try:
        got, want = compiled([a.clone() for a in arguments()]), representative(*arguments())
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        bound = 1e-2 if theirs.dtype in HALVES else 4e-6
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", LEVELS)
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_give_the_interpreters_results_on_every_level(processor: str, seed: int) -> None:
    options = RandomOptions(exact_only=True)
    program = random_program(seed + 500, options)
    inputs = random_inputs(program, seed, options)
    found = bind_program(generate(program, processor_machine(processor)), redzones=True)(list(inputs))
    for got, want in zip(found, interpret_program(program, inputs), strict=True):
        assert isinstance(want, torch.Tensor)
        assert difference(want, got, exact=True) is None


@functools.cache
def traced() -> torch.fx.GraphModule:
    return make_fx(representative, decompositions(), tracing_mode="fake")(*arguments())


@functools.cache
def scheduled() -> Program:
    return schedule_program(lower_graph(traced()))[0]


def assembly(target: Machine) -> str:
    """The machine code of the representative kernels, as text."""
    text = generate(scheduled(), target, keep_text=True).text
    return str(target_machine(target).emit_assembly(llvm.parse_assembly(text)))


def test_no_instruction_is_beyond_the_chosen_level() -> None:
    plain, avx2 = (assembly(generic_machine(bits)) for bits in (128, 256))
    assert "%xmm" in plain and "%ymm" not in plain and "vmul" not in plain
    assert "%ymm" in avx2 and "%zmm" not in avx2 and "vfmadd" in avx2


def test_a_level_that_this_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "host_machine", lambda: generic_machine(128))
    assert processor_machine("x86-64").vector_bits == 128
    with pytest.raises(CodegenError, match="x86-64-v3"):
        processor_machine("x86-64-v3")
    with pytest.raises(CodegenError, match="x86-64-v2"):
        processor_machine("x86-64-v2")  # 128 bits wide, too, but with SSE 4.2
    monkeypatch.setattr(target_module, "host_machine", arm_machine)
    with pytest.raises(CodegenError, match="generic"):
        processor_machine("x86-64")


AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx2", "fma")


@pytest.mark.parametrize(
    ("features", "bits"),
    [
        (AVX512, 512),
        *((tuple(f for f in AVX512 if f != lacking), 256) for lacking in AVX512[:3]),
        *(((), 128), (("avx2",), 128), (("fma",), 128), (("avx2", "fma"), 256)),
    ],
)
def test_vectors_are_as_wide_as_all_that_they_need_is_there(
    features: tuple[str, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Features(dict[str, bool]):
        def flatten(self) -> str:
            return ",".join(f"+{name}" for name in self)

    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: Features.fromkeys(features, True))
    target = host_machine.__wrapped__()
    assert target.vector_bits == bits and (target.lanes(32), target.lanes(64)) == (bits // 32, bits // 64)
    assert ("-prefer-256-bit" in target.features) == (bits == 512)
    assert all(target.has(name) for name in features) and not target.has("avx512fp16")


def test_vector_functions_are_taken_from_torchs_library_by_width() -> None:
    wide, narrow, plain = generic_machine(512), generic_machine(256), generic_machine(128)
    assert wide.vector_function("exp", "f32") == "Sleef_expf16_u10avx512f"
    assert wide.vector_function("pow", "f64") == "Sleef_powd8_u10avx512f"
    assert narrow.vector_function("exp", "f32") == "Sleef_expf8_u10avx2"
    assert narrow.vector_function("erfc", "f64") == "Sleef_erfcd4_u15avx2"
    assert narrow.vector_function("hypot", "f32") == "Sleef_hypotf8_u05avx2"
    assert narrow.vector_function("fmod", "f32") == "Sleef_fmodf8_avx2"
    assert not plain.vector_math and narrow.vector_function("sqrt", "f32") is None
    assert symbol_address("no such function") == 0


def undefined_symbols(code: bytes) -> Iterator[str]:
    """Names that a 64-bit little-endian ELF object leaves to the linker."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + k * size) for k in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = headers[link][4]
        for at in range(offset + entry, offset + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0:
                yield code[names + name : code.index(b"\0", names + name)].decode()


def assert_assembled(code: bytes, imports: tuple[str, ...]) -> None:
    assert code[:6] == b"\x7fELF\x02\x01" and struct.unpack_from("<H", code, 18) == (183,)  # EM_AARCH64
    assert set(undefined_symbols(code)) <= set(imports)
    assert all(symbol_address(name) for name in imports), "functions of the C library and the thread runtime, as here"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.covers("F5d.3")
def test_random_programs_assemble_for_arm(seed: int) -> None:
    compiled = generate(random_program(seed), arm_machine())
    assert compiled.binary.facts["machine"][0].startswith("aarch64")
    assert_assembled(compiled.binary.sections[0][1], compiled.binary.facts["imports"])


def test_every_kind_of_kernel_assembles_to_vector_code_for_arm() -> None:
    compiled = generate(scheduled(), arm_machine())
    assert_assembled(compiled.binary.sections[0][1], compiled.binary.facts["imports"])
    text = assembly(arm_machine())
    for instruction in ("fmla", "fcvtl", "fcvtn", "fmul\tv", "fadd\tv"):  # four floats at a time, halves converted
        assert instruction in text
    assert host_machine().triple.startswith("aarch64") or host_machine().lanes(32) >= arm_machine().lanes(32)


@pytest.mark.parametrize("name", ["host", *(level for level in LEVELS if processor_machine(level).has("fma"))])
def test_attention_calls_only_what_it_asks_for(name: str) -> None:
    """A runner without Python refuses object code that calls anything else, as LLVM may by itself: ``memset``."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> Any:
        call = (None, None, None, 0.25, float("-inf"), False, 1.0, True)
        found = torch.ops.aotkit_lower.attention(q, k, v, *call, False)
        return found[0], *torch.ops.aotkit_lower.attention_backward(gradient, q, k, v, *found, *call, 0.25)

    graph = make_fx(step, tracing_mode="fake")(*(torch.randn(1, 2, 40, 16) for _ in range(4)))
    made = compile_graph(graph, options=LowerOptions(contractions="generated", processor=name))
    assert isinstance(made, CompiledGraph) and not made.report().externs
    binary = made.compiled.binary
    assert set(undefined_symbols(binary.sections[0][1])) <= set(binary.facts["imports"])


@pytest.mark.parametrize("name", ["host", "x86-64"])
def test_sorts_call_only_what_they_ask_for(name: str) -> None:
    """Counters are cleared, and elements copied, by loops of our own."""
    graph = make_fx(lambda x: [*x.sort(stable=True), *x.double().sort(stable=True)], tracing_mode="fake")
    made = compile_graph(graph(torch.randn(3, 3001)), options=LowerOptions(processor=name))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph) and not made.report().externs
    binary = made.compiled.binary
    assert set(undefined_symbols(binary.sections[0][1])) <= set(binary.facts["imports"])
