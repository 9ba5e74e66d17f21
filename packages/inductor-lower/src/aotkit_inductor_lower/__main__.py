"""Run passes on a program that is written out, in the loop IR or as kernels::

    python -m aotkit_inductor_lower fuse-kernels,write-through < before.ir > after.ir
    python -m aotkit_inductor_lower linearize,merge-loops < before.ir > kernels.ir
    python -m aotkit_inductor_lower expand-ops < kernels.ir
    python -m aotkit_inductor_lower --list

``linearize`` makes kernels of the loop IR; passes of the kernel IR come after it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .driver import (
    COLLECTIVE_PASSES,
    DEVICE_PASSES,
    GRAPH_PASSES,
    KERNEL_LEVEL,
    KERNEL_PASSES,
    LOOP_LEVEL,
    LOOP_PASSES,
    WRITE_PASSES,
)
from .errors import CodegenError, IRError
from .ir.parse import parse_program
from .ir.print import print_program
from .ir.verify import verify_program
from .kernel_ir.parse import parse_module
from .kernel_ir.print import print_module
from .kernel_ir.verify import verify_module
from .kernel_passes.linearize import linearize
from .options import LowerOptions
from .passes import Pass, PassContext, run_passes
from .targets.select import named_target

__all__ = ["main"]

LINEARIZE = "linearize"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 2 for a name that is no pass of these levels, and 1 for text that is no program or can be no kernels."""
    parser = argparse.ArgumentParser(prog="python -m aotkit_inductor_lower", description=(__doc__ or "").split("::")[0])
    parser.add_argument("passes", nargs="?", default="", help="names of passes, comma-separated, in order")
    parser.add_argument("--list", action="store_true", help="print every pass of every level, with its reason")
    parser.add_argument("--fuel", type=int, help="make only so many rewrites")
    parser.add_argument("--target", default="cpu", help="what to choose for: cpu, cpu:NAME, cuda:0, interpreter, ..")
    who = ("auto", "generated", "aten")
    parser.add_argument("--contractions", choices=who, default="auto", help="products of matrices")
    given = parser.parse_args(argv)
    if given.list:
        print(_listing(), end="")
        return 0
    known = [*(each.name for each in LOOP_PASSES), *(each.name for each in KERNEL_PASSES)]
    names = [name for name in given.passes.split(",") if name]
    unknown = [name for name in names if name not in (*known, LINEARIZE)]
    if unknown:
        print(f"there is no pass {', '.join(unknown)}; there are {LINEARIZE}, {', '.join(known)}", file=sys.stderr)
        return 2
    text = "".join(line for line in sys.stdin if not line.startswith("#"))
    options = LowerOptions(fuel=given.fuel, verify=True, contractions=given.contractions)
    ctx = PassContext.of(options, target=named_target(given.target))
    try:
        print(_result(text, names, ctx), end="")
    except (IRError, CodegenError) as error:
        print(error, file=sys.stderr)
        return 1
    for decision in ctx.decisions:
        print(decision, file=sys.stderr)
    return 0


def _result(text: str, names: Sequence[str], ctx: PassContext) -> str:
    """What the passes make of a text, one by one: the order is the caller's."""
    kernels = {each.name: each for each in KERNEL_PASSES}
    loops = {each.name: each for each in LOOP_PASSES}
    at = next((k for k, name in enumerate(names) if name == LINEARIZE or name in kernels), len(names))
    rest = [name for name in names[at:] if name != LINEARIZE]
    late = [name for name in rest if name in loops]
    if text.startswith("aotkit-kernel"):
        late += [name for name in names[:at] if name in loops]
        module = parse_module(text)
        verify_module(module)
    else:
        program = parse_program(text)
        verify_program(program)
        for name in names[:at]:
            program = run_passes((loops[name],), program, ctx, LOOP_LEVEL)
        if at == len(names):
            return print_program(program)
        module = linearize(program)
    if late:
        raise IRError(f"passes of the loop IR run before {LINEARIZE}: {', '.join(late)}")
    for name in rest:
        module = run_passes((kernels[name],), module, ctx, KERNEL_LEVEL)
    return print_module(module)


def _listing() -> str:
    lines = []
    for level, passes in (
        ("FX graph, once", WRITE_PASSES),
        ("FX graph", (*DEVICE_PASSES, *COLLECTIVE_PASSES, *GRAPH_PASSES)),
        ("loop IR", LOOP_PASSES),
        ("kernel IR", KERNEL_PASSES),
    ):
        lines.append(f"{level}:")
        lines += [_line(each) for each in passes]
    return "\n".join(lines) + "\n"


def _line(each: Pass[object] | object) -> str:
    assert isinstance(each, Pass)
    return f"  {each.name:<28} {each.why}{' (required)' if each.required else ''}"


if __name__ == "__main__":
    sys.exit(main())
