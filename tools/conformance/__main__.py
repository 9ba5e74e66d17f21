"""``python -m tools.conformance TABLE ..``: one of torch's tables through the stack, or a page about it."""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]

TABLES = ("op_db", "module_db", "inductor", "kernels", "triton", "coverage")


def main() -> int:
    """Runs the table that the first argument names, with the arguments after it."""
    if len(sys.argv) < 2 or sys.argv[1] not in TABLES:
        print(f"usage: python -m tools.conformance {{{','.join(TABLES)}}} [options]", file=sys.stderr)
        return 2
    table = importlib.import_module(f"tools.conformance.{sys.argv[1]}")
    return int(table.main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
