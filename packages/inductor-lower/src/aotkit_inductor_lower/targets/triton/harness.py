"""A kernel as a script of its own: made-up arguments, its time, and the bandwidth that it reaches."""

from __future__ import annotations

from collections.abc import Mapping

from ...ops.dtypes import is_float, to_torch_dtype
from ...symbolic import Expr, Symbol, SymbolKind
from .jit import program_count, standalone_text
from .records import KernelArgument, KernelSource

__all__ = ["harness_text"]

_MAIN = """

if __name__ == "__main__":
    import os

    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cpu" if interpreted else "cuda"
    torch.manual_seed(0)
    arguments = [
{arguments}
    ]

    def run():
        {name}[({count},)](*arguments, {options})

{scratch}    run()
    moved = sum(a.nbytes for a in arguments if isinstance(a, torch.Tensor))
    if interpreted:
        print(f"{name}: {{moved}} bytes, in the interpreter")
    else:
        milliseconds = triton.testing.do_bench(run)
        print(f"{name}: {{milliseconds * 1e3:.1f}} us, {{moved}} bytes, {{moved / milliseconds / 1e6:.0f}} GB/s")
"""

_SCRATCH = """\
    def memory(size, alignment, stream):
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(memory)
"""


def harness_text(source: KernelSource, extents: Mapping[str, Expr], sizes: Mapping[str, int] | None = None) -> str:
    """A script that runs the kernel once and times it, with nothing but torch and Triton. With ``TRITON_INTERPRET=1``
    it runs on the CPU, if Triton's interpreter knows the functions that the kernel calls.

    ``extents``: elements of each buffer's memory; ``sizes``: values of the size symbols. Floats are normal numbers;
    integers are 0, so that those that are indices stay in range. The bandwidth counts each argument once.
    """
    env = {Symbol(name, SymbolKind.SIZE): value for name, value in (sizes or {}).items()}
    lines = [f"        {_made(a, extents, sizes or {}, env)},  # {a.kind} {a.name}" for a in source.parameters]
    config = source.config
    options = [f"{name}={size}" for name, size in config.blocks]
    options += [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    own = _SCRATCH if len(source.parameters) < len(source.arguments) else ""
    main = _MAIN.format(
        scratch=own,
        arguments="\n".join(lines),
        name=source.name,
        count=program_count(source, sizes),
        options=", ".join(options),
    )
    return standalone_text(source) + main


def _made(
    argument: KernelArgument, extents: Mapping[str, Expr], sizes: Mapping[str, int], env: Mapping[Symbol, int]
) -> str:
    if argument.kind == "size":
        return str(sizes[argument.name])
    extent = argument.extent if argument.kind == "scratch" else extents[argument.name]
    count, dtype = extent.evaluate(dict(env)), to_torch_dtype(argument.dtype)
    if is_float(argument.dtype):
        return f"torch.randn({count}, device=device).to({dtype})"
    return f"torch.zeros({count}, dtype={dtype}, device=device)"
