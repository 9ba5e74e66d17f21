"""How long tests take, and which parameters of long ones are left to the nightly run.

``python -m pytest -p tools.times_of_tests --times FILE ..`` writes the processor time of each test, that of processes
that it waited for included. ``python -m tools.times_of_tests FILE ..`` makes :data:`THINNED` of such files: a test
function whose parameters took more than a quarter of a second in all keeps about two of them, from a second on one of
at most eight, and `nox -s sweeps` runs all. Functions that also run under emulation, all parameters at each push, keep
one of at most four on this processor.

Note [Tests that are thinned]
    Most of the time goes to test functions that compile something for each of many parameters: cheap one by one, and
    each a case of its own. The run that everybody waits for takes every so many-th of these, the same in each run and
    beginning elsewhere for each function, so that functions over the same list do not all take its first entry. A
    function is thinned by what it was measured to cost, not by what it is about, and so the list is data: a mark
    `sample` is for the author who knows which parameters say the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["THINNED", "main", "thinned"]

#: Lines of ``EVERY PATH::FUNCTION``.
THINNED = Path(__file__).parent / "thinned_tests.txt"

MOST, MOST_EMULATED, SECONDS, LONG = 8, 4, 0.25, 1.0

#: Not thinned: the five architectures, checks of the repository itself, and kernels that only x86-64 has.
WHOLE = (
    *("test_architectures", "tools_docs", "import_circles", "tools_imports", "known_issues"),
    *("cpu_tails", "cpu_product_ways", "cpu_tile_registers", "packed_constants"),
)

#: Files of tests that also run on the emulated ARM processor, where nothing is thinned: all kinds of kernels must have
#: been called there (`tools/emulation`).
EMULATED = (
    *("cpu_kinds", "cpu_ops", "cpu_random", "cpu_kernels", "cpu_math", "cpu_products", "cpu_few_rows"),
    *("lowering_scans", "long_sorts", "packed_products", "inductor_lower_attention.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", help="append a line for each test: seconds of a processor and its name")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Written at once: a run that is cut off leaves what it has measured."""
    before = _used()
    result = yield
    if path := item.config.getoption("--times"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        with open(path + worker, "a", encoding="utf-8") as file:
            file.write(f"{_used() - before:.3f}\t{item.nodeid}\n")
    return result


def _used() -> float:
    if resource is None:
        return 0.0
    both = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def thinned(lines: Sequence[str]) -> dict[str, int]:
    """Every how many-th parameter of a test function is kept, from lines of seconds and names."""
    times = dict[str, list[float]]()
    for line in lines:
        seconds, _, name = line.rstrip("\n").partition("\t")
        times.setdefault(name.partition("[")[0], []).append(float(seconds))
    found = dict[str, int]()
    for name, each in sorted(times.items()):
        kept = 1 if sum(each) >= LONG else 2
        if len(each) > kept and sum(each) >= SECONDS and not any(part in name for part in WHOLE):
            most = MOST_EMULATED if any(part in name for part in EMULATED) else MOST
            found[name] = min(most, max(2, len(each) // kept))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write the list anew; functions in it that were not measured, or had been thinned when they were, stay."""
    parser = argparse.ArgumentParser(prog="python -m tools.times_of_tests", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="times of runs with `--whole`, or of what is not thinned yet"
    )
    parser.add_argument("--list", type=Path, default=THINNED, help="the list that is written")
    chosen = parser.parse_args(argv)
    known = chosen.list.read_text(encoding="utf-8").splitlines() if chosen.list.exists() else []
    found = {name: int(every) for every, name in (line.split(" ", 1) for line in known)}
    lines = [line for path in chosen.files for line in path.read_text(encoding="utf-8").splitlines()]
    for name, every in thinned(lines).items():
        found[name] = max(every, found.get(name, 0))  # one that was thinned when it was measured had few parameters
    chosen.list.write_text("".join(f"{found[name]} {name}\n" for name in sorted(found)), encoding="utf-8")
    print(f"{len(found)} test functions are thinned")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
