"""What is in the binary of a program for Triton: its kernels, and how each is launched.

Note [Cubins are part of the program]
    What is stored is the plan with the cubin of every kernel. A process that finds it stored, in a cache or a package,
    binds it with the CUDA driver alone: it needs neither Triton nor the code generator. So the version of Triton is no
    part of the digest under which a program is kept: torch's own version names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...launch_plan.records import Binary, CompiledProgram
from ...ops.dtypes import DType
from ...symbolic import Expr
from ...symbolic.text import parse_expr
from .records import Config, Cubin, KernelArgument, KernelSource, TritonKernel

__all__ = ["ZERO_SLOT", "Contents", "Launch", "contents_of", "kernels_of", "to_binary"]

ZERO_SLOT = "$#zero"  # a frame entry that holds 0, for the null pointers that Triton's kernels take last


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: ``kernel`` as position in the program's kernels, ``grid`` the frame's slot of the number of program
    instances, ``slots`` those of the arguments."""

    kernel: int
    grid: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """``segments``: launches per segment of the plan. ``counts``: slot and expression of each number of program
    instances. ``aligned``: inputs that must begin at a multiple of 16 bytes, and are copied if they do not;
    ``written``: inputs that the graph writes, copied back then. ``device``: as torch prints it. Kernels without a cubin
    are for Triton's interpreter."""

    kernels: tuple[TritonKernel, ...]
    segments: tuple[tuple[str, tuple[Launch, ...]], ...]
    counts: tuple[tuple[str, Expr], ...]
    aligned: tuple[str, ...]
    written: tuple[str, ...]
    device: str


def to_binary(contents: Contents) -> Binary:
    """The binary: cubins are its sections, everything else facts. Sources are kept, so that they can be read and
    interpreted; alternatives that were not chosen are not."""
    facts = {
        "device": contents.device,
        "kernels": [_kernel_out(kernel) for kernel in contents.kernels],
        "segments": [
            [function, [[launch.kernel, launch.grid, list(launch.slots)] for launch in launches]]
            for function, launches in contents.segments
        ],
        "counts": [[slot, str(count)] for slot, count in contents.counts],
        "aligned": list(contents.aligned),
        "written": list(contents.written),
    }
    cubins = tuple((k.source.name, k.cubin.code) for k in contents.kernels if k.cubin is not None)
    return Binary.of("triton", facts, cubins)


def contents_of(binary: Binary) -> Contents:
    """The inverse of :func:`to_binary`."""
    facts, codes = binary.facts, iter(binary.sections)
    return Contents(
        tuple(_kernel_in(data, next(codes)[1] if "cubin" in data else b"") for data in facts["kernels"]),
        tuple(
            (function, tuple(Launch(kernel, grid, tuple(slots)) for kernel, grid, slots in launches))
            for function, launches in facts["segments"]
        ),
        tuple((slot, parse_expr(count)) for slot, count in facts["counts"]),
        tuple(facts["aligned"]),
        tuple(facts["written"]),
        facts["device"],
    )


def kernels_of(program: CompiledProgram) -> tuple[TritonKernel, ...]:
    """The kernels of a program, to be looked at."""
    return contents_of(program.binary).kernels


def _config_out(config: Config) -> list[Any]:
    return [[list(block) for block in config.blocks], config.num_warps, config.num_stages]


def _config_in(data: Any) -> Config:
    blocks, warps, stages = data
    return Config(tuple((name, size) for name, size in blocks), warps, stages)


def _kernel_out(kernel: TritonKernel) -> dict[str, Any]:
    found, cubin = _source_out(kernel.source) | {"choice": kernel.choice}, kernel.cubin
    if cubin is not None:
        found["cubin"] = {
            "name": cubin.name,
            "arch": cubin.arch,
            "shared": cubin.shared,
            "threads": cubin.threads,
            "hidden": cubin.hidden,
            "config": _config_out(cubin.config),
        }
    return found


def _source_out(source: KernelSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "text": source.text,
        "arguments": [[a.kind, a.name, a.dtype.value, a.written, a.aligned, str(a.extent)] for a in source.arguments],
        "grid": [[str(size), block] for size, block in source.grid],
        "config": _config_out(source.config),
        "checks": source.checks,
        "persistent": source.persistent,
        "fast": source.fast,
    }


def _source_in(data: dict[str, Any]) -> KernelSource:
    arguments = tuple(
        KernelArgument(kind, name, DType(dtype), written, parse_expr(extent), aligned)
        for kind, name, dtype, written, aligned, extent in data["arguments"]
    )
    grid = tuple((parse_expr(size), block) for size, block in data["grid"])
    config = _config_in(data["config"])
    facts = data["checks"], data["persistent"], data.get("fast", False)  # older programs have none that is
    return KernelSource(data["name"], data["text"], arguments, grid, config, *facts)


def _kernel_in(data: dict[str, Any], code: bytes) -> TritonKernel:
    made, cubin = data.get("cubin"), None
    if made is not None:
        config = _config_in(made["config"])
        cubin = Cubin(made["name"], code, made["arch"], made["shared"], made["threads"], made["hidden"], config)
    return TritonKernel(_source_in(data), (), cubin, data["choice"])
