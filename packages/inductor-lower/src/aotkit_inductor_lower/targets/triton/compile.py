"""Kernels to cubins, with or without a GPU, and what can be read off the result."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..._observer import Observer
from ...ir import DType
from .errors import SharedMemoryExceeded, TritonError
from .jit import triton_module
from .records import DESCRIPTOR_BYTES, Config, Cubin, Gpu, KernelArgument, KernelSource
from .render.names import argument_name
from .worker import Job, Made, compile_job, identify
from .workers import CompileWorkers, KernelRefused, WorkersLost

__all__ = ["Compiler", "Cubin", "KernelFacts", "code_identity", "compile_all", "compile_by", "compile_kernel"]
__all__ += ["resource_facts", "vector_bytes"]

_TYPES: Mapping[DType, str] = {
    DType.F64: "fp64",
    DType.F32: "fp32",
    DType.F16: "fp16",
    DType.BF16: "bf16",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.I16: "i16",
    DType.I8: "i8",
    DType.U8: "u8",
    DType.BOOL: "i1",
}
#: From a source, for ``sm_<arch>``, to its cubin; raises :class:`~.errors.TritonError`.
Compiler = Callable[[KernelSource, int], Cubin]


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Resources of a kernel per thread: registers, bytes spilled to local memory, bytes of its stack; and per
    program instance the static shared memory."""

    registers: int
    spills: int
    stack: int
    shared: int


def compile_kernel(source: KernelSource, arch: int, *, config: Config | None = None, keep_ptx: bool = False) -> Cubin:
    """Compile for ``sm_<arch>``.

    No option that changes results is left to Triton: nothing is contracted unless the source allows it, subnormals
    stay. Raises
    :class:`~.errors.TritonMissing`, and :class:`~.errors.TritonError` where Triton refuses the kernel.
    """
    return _cubin(_compiled_here(source, arch, config), source, config or source.config, arch, keep_ptx)


def _job(source: KernelSource, arch: int, config: Config | None) -> Job:
    """What is compiled, in built-in types."""
    config = config or source.config
    blocks = {name: config.block(name) for name, _ in source.config.blocks}
    return {
        "text": source.text,
        "name": source.name,
        "signature": {argument_name(a): _type(a) for a in source.parameters} | dict.fromkeys(blocks, "constexpr"),
        "constexprs": blocks,
        "aligned": [k for k, a in enumerate(source.parameters) if a.kind != "size" and a.aligned],
        "options": {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": source.fast,
            "enable_reflect_ftz": False,
            "sanitize_overflow": False,
            "debug": source.checks,
        },
        "arch": arch,
    }


def compile_by(workers: CompileWorkers, observer: Observer | None = None) -> Compiler:
    """As :func:`compile_kernel`, in ``workers``; in this process where there are none, of which the observer is told
    once (``compile-workers.lost``). It is told the processor's time that each kernel took (``kernel.compiled``)."""

    def compiled(source: KernelSource, arch: int) -> Cubin:
        triton_module()
        try:
            made = workers.compile(_job(source, arch, None))
            if observer is not None:
                observer.event("kernel.compiled", {"kernel": source.name, "seconds": made["seconds"]})
            return _cubin(made, source, source.config, arch, False)
        except KernelRefused as refusal:
            error = TritonError(f"{_refused(source, arch)}: {refusal}")
            if refusal.trace:
                error.add_note(refusal.trace)
            raise error from None
        except WorkersLost as lost:
            if observer is not None and workers.tell_once():
                observer.event("compile-workers.lost", {"reason": str(lost)})
        return compile_kernel(source, arch)

    return compiled


_IDENTITY = threading.Lock()


def _compiled_here(source: KernelSource, arch: int, config: Config | None = None) -> Made:
    triton_module()
    with _IDENTITY:  # takes half a second the first time, and each thread would do it
        identify()
    try:
        return compile_job(_job(source, arch, config))
    except Exception as error:
        raise TritonError(f"{_refused(source, arch)}: {error}") from error


def _refused(source: KernelSource, arch: int) -> str:
    return f"Triton does not compile the kernel {source.name} for sm_{arch}"


def compile_all(
    sources: Sequence[KernelSource], arch: int, compiler: Compiler = compile_kernel
) -> list[Cubin | TritonError]:
    """Each source's cubin, or why there is none, as many at once as there are processors. Sources with equal code are
    compiled once. Stages of a pipeline change no result: a kernel has as many of its own as the device has shared
    memory for, which only Triton knows in the end."""
    codes = [code_identity(source) for source in sources]
    alike: dict[str, KernelSource] = {}
    for code, source in zip(codes, sources, strict=True):
        alike.setdefault(code, source)

    def attempt(source: KernelSource) -> Cubin | TritonError:
        stages = source.config.num_stages
        try:
            return compiler(source, arch)
        except SharedMemoryExceeded as error:
            fewer = replace(source.config, num_stages=stages - 1)
            return attempt(with_config(source, fewer)) if stages > 1 else error
        except TritonError as error:
            return error

    with ThreadPoolExecutor(max(1, min(len(alike), os.cpu_count() or 1))) as pool:
        compiled = dict(zip(alike, pool.map(attempt, alike.values()), strict=True))
    return [compiled[code] for code in codes]


_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # not the `sin` of `libm.sin`


def code_identity(source: KernelSource) -> str:
    """Equal for sources whose compiled code differs in names only. How often a kernel is launched is not part of it."""
    names: Mapping[str, str] = {argument_name(a): f"argument{k}" for k, a in enumerate(source.parameters)}
    lines = [line for line in source.text.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace(f"def {source.name}(", "def kernel(")
    text = _NAME.sub(lambda m: names.get(m[0], m[0]), text)
    types = [(a.kind, a.dtype.value, a.aligned) for a in source.arguments]
    return f"{text}\n{types}\n{source.config}{source.checks}{source.fast}"


def _cubin(made: Made, source: KernelSource, config: Config, arch: int, keep_ptx: bool) -> Cubin:
    ptx = made["ptx"]
    entry = ptx[ptx.index(".entry") :]
    parameters = entry[: entry.index(")")].count(".param")
    hidden = parameters - len(source.arguments)
    if made["scratch"] > (2 * DESCRIPTOR_BYTES if len(source.parameters) < len(source.arguments) else 0):
        raise TritonError(f"the kernel {source.name} asks for scratch memory of its own, which is not provided")
    if Gpu(arch).is_known and made["shared"] > Gpu(arch).shared:
        raise SharedMemoryExceeded(
            f"the kernel {source.name} asks for {made['shared']} bytes of shared memory, too many for sm_{arch}"
        )
    threads = made["warps"] * 32
    code = bytes.fromhex(made["code"])
    return Cubin(made["name"], code, arch, made["shared"], threads, hidden, config, ptx if keep_ptx else "")


def _type(argument: KernelArgument) -> str:
    if argument.kind == "size":
        return "i64"
    return f"*{_TYPES[argument.dtype]}"


def with_config(source: KernelSource, config: Config) -> KernelSource:
    """The same text, launched otherwise. The blocks must be those that the text is made for."""
    return replace(source, config=config)


_USAGE = re.compile(r"Function (\S+):\s*\n?\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def resource_facts(cubin: Cubin) -> KernelFacts:
    """What the bundled ``cuobjdump`` says of a cubin. Raises :class:`~.errors.TritonError` where Triton brings none, or
    none that works."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise TritonError(f"Triton's cuobjdump does not run: {error}") from error
    for name, registers, stack, shared, local in _USAGE.findall(text):
        if name == cubin.name:
            return KernelFacts(int(registers), int(local), int(stack), int(shared))
    raise TritonError(f"cuobjdump names no kernel {cubin.name}")


_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b")


def vector_bytes(ptx: str, kind: str = "ld") -> tuple[int, ...]:
    """Bytes of each global load (``ld``) or store (``st``) in a PTX text, in order."""
    return tuple(int(count or 1) * int(bits) // 8 for which, count, bits in _ACCESS.findall(ptx) if which == kind)
