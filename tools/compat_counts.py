"""What came of tests, by pytest's XML: a test that is left out is refused by this torch, or is for another machine."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["REFUSED", "Counts", "count", "count_by_file"]

#: What the reason of a skipped test says if it is for the version of torch, and not for the machine.
REFUSED = re.compile(r"torch before 2\.\d\d|before torch 2\.\d\d")


class Counts(NamedTuple):
    """How many tests passed, failed, ask for what this torch cannot do (``refused``), and for a processor, a device or
    a system that is not here (``elsewhere``)."""

    passed: int
    failed: int
    refused: int
    elsewhere: int


def count(report: str) -> Counts:
    """Of a whole run. One without a report, or without a test, is a failure."""
    cases = list(ElementTree.fromstring(report).iter("testcase")) if report else []
    return _added(map(_of_case, cases)) if cases else Counts(0, 1, 0, 0)


def count_by_file(report: str, paths: Sequence[str]) -> dict[str, Counts]:
    """Of each of the files that ran. What cannot be told apart is an error."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in paths}
    found: dict[str, list[Counts]] = {path: [] for path in paths}
    for case in ElementTree.fromstring(report).iter("testcase"):
        named = case.get("classname") or case.get("name") or ""  # a file that cannot be collected has no class
        (path,) = (path for module, path in modules.items() if f"{named}.".startswith(f"{module}."))
        found[path].append(_of_case(case))
    return {path: _added(cases) for path, cases in found.items()}


def _of_case(case: ElementTree.Element) -> Counts:
    if case.find("failure") is not None or case.find("error") is not None:
        return Counts(0, 1, 0, 0)
    skipped = case.find("skipped")
    if skipped is None:
        return Counts(1, 0, 0, 0)
    said = f"{skipped.get('message', '')} {skipped.text or ''}"
    return Counts(0, 0, 1, 0) if REFUSED.search(said) else Counts(0, 0, 0, 1)


def _added(cases: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(Counts(0, 0, 0, 0), *cases, strict=True)))
