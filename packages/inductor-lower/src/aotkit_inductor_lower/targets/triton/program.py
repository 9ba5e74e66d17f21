"""A graph compiled for a CUDA device, as data: the plan, its kernels, and how each is launched."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from ...ir import DType
from ...launch_plan import LaunchPlan, plan_from_json, plan_to_json
from ...symbolic import Expr
from ...symbolic.text import parse_expr
from .records import Config, Cubin, KernelArgument, KernelSource

__all__ = ["ZERO_SLOT", "DeviceKernel", "DeviceLaunch", "DeviceProgram", "device_from_json", "device_to_json"]

FORMAT = 2
ZERO_SLOT = "$#zero"  # a frame entry that holds 0, for the null pointers that Triton's kernels take last


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """A kernel: its source (kept, so that it can be read and interpreted) and, once compiled, its cubin.

    ``alternatives``: other ways to compute the same, until one is chosen; ``choice`` says why it was."""

    source: KernelSource
    alternatives: tuple[KernelSource, ...] = ()
    cubin: Cubin | None = None
    choice: str = ""


@dataclass(frozen=True, slots=True)
class DeviceLaunch:
    """One launch: ``name`` of the nest, ``kernel`` as position in the program's kernels, ``grid`` the frame's slot of
    the number of program instances, ``slots`` those of the arguments, ``line`` the user's."""

    name: str
    kernel: int
    grid: str
    slots: tuple[str, ...]
    line: str = ""


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """A compiled graph. ``segments``: launches per segment of the plan. ``counts``: slot and expression of each number
    of program instances. ``aligned``: inputs that must begin at a multiple of 16 bytes, and are copied if they do
    not; ``written``: inputs that the graph writes, copied back then. ``device``: as torch prints it."""

    plan: LaunchPlan
    kernels: tuple[DeviceKernel, ...]
    segments: tuple[tuple[str, tuple[DeviceLaunch, ...]], ...]
    counts: tuple[tuple[str, Expr], ...]
    aligned: tuple[str, ...]
    written: tuple[str, ...]
    device: str
    loader: ClassVar[str] = "triton"

    def launches(self) -> tuple[DeviceLaunch, ...]:
        """All launches in order."""
        return tuple(launch for _, launches in self.segments for launch in launches)


def device_to_json(program: DeviceProgram) -> str:
    """The program as JSON text; cubins are base64. Nothing is pickled."""
    return json.dumps(
        {
            "device": program.device,  # first: by this a reader tells it from a program for the CPU
            "format": FORMAT,
            "plan": plan_to_json(program.plan),
            "kernels": [_kernel_out(k) for k in program.kernels],
            "segments": [
                [name, [[launch.name, launch.kernel, launch.grid, list(launch.slots), launch.line] for launch in found]]
                for name, found in program.segments
            ],
            "counts": [[slot, str(expr)] for slot, expr in program.counts],
            "aligned": list(program.aligned),
            "written": list(program.written),
        },
        separators=(",", ":"),
    )


def device_from_json(text: str) -> DeviceProgram:
    """The inverse of :func:`device_to_json`. Raises ``ValueError`` for another format or a damaged cubin."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"this program has format {data.get('format')}, this version reads {FORMAT}; compile again")
    return DeviceProgram(
        plan_from_json(data["plan"]),
        tuple(_kernel_in(k) for k in data["kernels"]),
        tuple(
            (name, tuple(DeviceLaunch(n, k, grid, tuple(slots), line) for n, k, grid, slots, line in launches))
            for name, launches in data["segments"]
        ),
        tuple((slot, parse_expr(expr)) for slot, expr in data["counts"]),
        tuple(data["aligned"]),
        tuple(data["written"]),
        data["device"],
    )


def _config_out(config: Config) -> list[Any]:
    return [[list(block) for block in config.blocks], config.num_warps, config.num_stages]


def _config_in(data: Any) -> Config:
    blocks, warps, stages = data
    return Config(tuple((name, size) for name, size in blocks), warps, stages)


def _kernel_out(kernel: DeviceKernel) -> dict[str, Any]:
    cubin = kernel.cubin
    found = _source_out(kernel.source) | {
        "choice": kernel.choice,
        "alternatives": [_source_out(source) for source in kernel.alternatives],
    }
    if cubin is not None:
        found["cubin"] = {
            "name": cubin.name,
            "code": base64.b64encode(cubin.code).decode("ascii"),
            "digest": hashlib.sha256(cubin.code).hexdigest(),
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
    }


def _source_in(data: dict[str, Any]) -> KernelSource:
    arguments = tuple(
        KernelArgument(kind, name, DType(dtype), written, parse_expr(extent), aligned)
        for kind, name, dtype, written, aligned, extent in data["arguments"]
    )
    grid = tuple((parse_expr(size), block) for size, block in data["grid"])
    config = _config_in(data["config"])
    return KernelSource(data["name"], data["text"], arguments, grid, config, data["checks"], data["persistent"])


def _kernel_in(data: dict[str, Any]) -> DeviceKernel:
    source, others = _source_in(data), tuple(map(_source_in, data["alternatives"]))
    made = data.get("cubin")
    if made is None:
        return DeviceKernel(source, others, None, data["choice"])
    code = base64.b64decode(made["code"])
    if hashlib.sha256(code).hexdigest() != made["digest"]:
        raise ValueError(f"the cubin of {source.name} is damaged (its digest differs); compile again")
    cubin = Cubin(
        made["name"], code, made["arch"], made["shared"], made["threads"], made["hidden"], _config_in(made["config"])
    )
    return DeviceKernel(source, others, cubin, data["choice"])
