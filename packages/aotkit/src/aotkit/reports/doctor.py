"""What this machine offers and what is wrong with it, for a person who asks for help."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import dataclass

__all__ = ["Diagnosis", "diagnose"]

_PARTS = ("functionalize", "aot-trace", "partition", "runtime-wrappers", "inductor-lower", "cudagraphs", "cache")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``facts`` are (what, value); ``problems`` sentences with what to do. ``str()`` is the report."""

    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        lines = [f"{name:<{width}}  {value}" for name, value in self.facts]
        lines += [f"problem: {problem}" for problem in self.problems] or ["no problems found"]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at versions, the processor, torch's libraries and the cache directory. Compiles nothing."""
    facts: list[tuple[str, str]] = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("aotkit", _version("aotkit", "aotkit")),
        ("its parts", ", ".join(f"{part} {_version(f'aotkit-{part}', _module(part))}" for part in _PARTS)),
    ]
    problems: list[str] = []
    _look_at_torch(facts, problems)
    _look_at_processor(facts, problems)
    triton = importlib.util.find_spec("triton") is not None
    facts.append(("triton", "installed" if triton else "not installed (needed for CUDA devices only)"))
    _look_at_cache(facts, problems)
    return Diagnosis(tuple(facts), tuple(problems))


def _module(part: str) -> str:
    return f"aotkit_{part.replace('-', '_')}"


def _version(distribution: str, module: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        about = importlib.import_module(f"{module}.__about__") if importlib.util.find_spec(module) else None
        return f"{about.__version__} (sources)" if about is not None else "missing"


def _look_at_torch(facts: list[tuple[str, str]], problems: list[str]) -> None:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts.append(("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {devices} CUDA devices"))
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 16):
        problems.append(f"torch {torch.__version__} is not supported; install a version from 2.11 to 2.15")


def _look_at_processor(facts: list[tuple[str, str]], problems: list[str]) -> None:
    import torch

    from aotkit_inductor_lower.targets.cpu import host_machine, why_one_thread

    target = host_machine()
    features = [f[1:] for f in target.features.split(",") if f.startswith("+")]
    known = [name for name in ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bf16", "amx-bf16", "neon")
             if name in features]  # fmt: skip
    facts.append(("processor", f"{target.cpu}, {target.vector_bits} bit vectors, {' '.join(known)}"))
    facts.append(("torch uses", torch.backends.cpu.get_cpu_capability()))
    functions = len(target.vector_math)
    facts.append(("vector math", f"{functions} functions of torch's library found"))
    alone = why_one_thread()
    facts.append(("threads", "one, see below" if alone else "those of torch's OpenMP runtime"))
    if not functions:
        problems.append(
            "torch's vector math library was not found in this build: exp, tanh and others are computed one element at "
            "a time. Results are right; a wheel from pytorch.org is faster"
        )
    if alone:
        problems.append(
            f"generated kernels use one thread: {alone}. Results are right; a wheel from pytorch.org is faster"
        )


def _look_at_cache(facts: list[tuple[str, str]], problems: list[str]) -> None:
    from aotkit_cache import CacheError, default_cache_dir, make_key, open_cache

    try:
        facts.append(("cache", str(default_cache_dir())))
        cache = open_cache()
        entries = cache.entries()
        probe = make_key(doctor=sys.version)
        if not cache.put(probe, {"probe": b"x"}) or cache.get(probe) is None:
            problems.append(f"the cache directory {default_cache_dir()} can't be written; see the warning above")
        cache.delete(probe)
    except CacheError as error:
        problems.append(f"nothing is kept between processes: {error}")
        return
    size = sum(entry.size for entry in entries)
    facts.append(("entries", f"{len(entries)}, {size / 1e6:.1f} MB"))
