"""Run loop passes on a program that is written out::

    python -m aotkit_inductor_lower fuse-kernels,write-through < before.ir > after.ir
    python -m aotkit_inductor_lower --list
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import IRError
from .ir.parse import parse_program
from .ir.print import print_program
from .ir.verify import verify_program
from .options import LowerOptions
from .pass_lists import DEVICE_PASSES, GRAPH_PASSES, KERNEL_PASSES, LOOP_LEVEL, LOOP_PASSES, WRITE_PASSES
from .passes import Pass, PassContext, run_passes
from .targets.select import named_target

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 2 for a name that is no loop pass, and 1 for text that is no program."""
    parser = argparse.ArgumentParser(prog="python -m aotkit_inductor_lower", description=(__doc__ or "").split("::")[0])
    parser.add_argument("passes", nargs="?", default="", help="names of loop passes, comma-separated, in this order")
    parser.add_argument("--list", action="store_true", help="print every pass of every level, with its reason")
    parser.add_argument("--fuel", type=int, help="make only so many rewrites")
    parser.add_argument("--target", default="cpu", help="what to choose for: cpu, cpu:NAME, cuda:0, triton-interpreter")
    given = parser.parse_args(argv)
    if given.list:
        print(_listing(), end="")
        return 0
    known = {each.name: each for each in LOOP_PASSES}
    names = [name for name in given.passes.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"there is no loop pass {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    ctx = PassContext.of(LowerOptions(fuel=given.fuel, verify=True), target=named_target(given.target))
    try:
        program = parse_program("".join(line for line in sys.stdin if not line.startswith("#")))
        verify_program(program)
    except IRError as error:
        print(error, file=sys.stderr)
        return 1
    for name in names:  # one by one: the order is the caller's
        program = run_passes((known[name],), program, ctx, LOOP_LEVEL)
    print(print_program(program), end="")
    for decision in ctx.decisions:
        print(decision, file=sys.stderr)
    return 0


def _listing() -> str:
    lines = []
    for level, passes in (
        ("FX graph, once", WRITE_PASSES),
        ("FX graph", (*DEVICE_PASSES, *GRAPH_PASSES)),
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
