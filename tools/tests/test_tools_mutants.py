"""The mutation testing driver: what it mutates, how a fault gets into a process, what it makes of the outcome."""

from __future__ import annotations

import ast
import functools
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tools.mutants import patch, sample
from tools.mutants.coverage import Coverage, LineTracer, bits, lines_of
from tools.mutants.follow import same_mutants
from tools.mutants.groups import GROUPS, Group
from tools.mutants.journal import EQUIVALENT, Journal, Verdict, equivalents, report, share_killed
from tools.mutants.operators import mutate, sites
from tools.mutants.select_tests import Selector
from tools.mutants.supervise import supervise
from tools.workspace import load_package

SOURCE = '''"""Docstring 1."""
import logging
LIMIT = 3
def f(x: int, y: "int" = 2) -> int:
    """Docstring 2."""
    if x < LIMIT and not y:
        x += 1
    for k in range(x):
        if k in (4, 5):
            continue
        y = max(y, g(k, x))
    return y - x
def g(a, b):
    if a == b:
        raise ValueError(f"equal: {a + 7}")
    logging.info("%s", a + 8)
    return a * b if a > 0 else -a
class C:
    def __repr__(self):
        return "C" * 9
    def act(self, out):
        out.append(self)
        out.sort(reverse=True)
'''


def mutants(source: str) -> dict[str, set[str]]:
    """Operator -> "before -> after"."""
    found: dict[str, set[str]] = {}
    for site in sites(ast.parse(source)):
        found.setdefault(site.operator, set()).add(f"{site.before} -> {site.after}".replace("\n", "; "))
    return found


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("comparison", "if a == b: -> if a != b:"),
        ("comparison", "if x < LIMIT and (not y): -> if x <= LIMIT and (not y):"),
        ("comparison", "if k in (4, 5): -> if k not in (4, 5):"),
        ("arithmetic", "x += 1 -> x -= 1"),
        ("arithmetic", "return y - x -> return y + x"),
        ("and/or", "if x < LIMIT and (not y): -> if x < LIMIT or not y:"),
        ("drop operand", "if x < LIMIT and (not y): -> if not y:"),
        ("drop unary", "if x < LIMIT and (not y): -> if x < LIMIT and y:"),
        ("negate condition", "if x < LIMIT and (not y): -> if not (x < LIMIT and (not y)):"),
        ("constant", "LIMIT = 3 -> LIMIT = 4"),
        ("constant", "out.sort(reverse=True) -> out.sort(reverse=False)"),
        ("other function", "y = max(y, g(k, x)) -> y = min(y, g(k, x))"),
        ("swap arguments", "y = max(y, g(k, x)) -> y = max(y, g(x, k))"),
        ("remove statement", "out.append(self) -> pass"),
        ("remove statement", "raise ValueError(f'equal: {a + 7}') -> pass"),
        ("break/continue", "continue -> break"),
        ("return None", "return y - x -> return None"),
        ("early return", "out.append(self) -> return; out.append(self)"),
    ],
)
def test_each_kind_of_fault_is_made(operator: str, expected: str) -> None:
    assert expected in mutants(SOURCE)[operator]


def test_texts_that_no_test_should_look_at_are_left_alone() -> None:
    changed = "\n".join(text for texts in mutants(SOURCE).values() for text in texts)
    for silent in ("Docstring", "a + 6", "a - 7", "a + 9", "'C'", "import"):
        assert silent not in changed
    assert not mutants("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    LIMIT = 3\n")
    assert not mutants("def f(a, b):\n    assert a < b\n    zip(a, b, strict=True)\n").keys() - {
        "remove statement", "early return"
    }  # fmt: skip


def test_operands_of_which_the_order_means_nothing_are_not_exchanged() -> None:
    swapped = mutants("def f(op, a, b):\n    return op('add', a, b) + op('sub', a, b)\n")["swap arguments"]
    assert swapped == {"return op('add', a, b) + op('sub', a, b) -> return op('add', a, b) + op('sub', b, a)"}


def test_every_mutant_compiles_and_differs_from_the_source() -> None:
    tree = ast.parse(SOURCE)
    found = list(sites(tree))
    assert len(found) > 30 and ast.unparse(tree) == ast.unparse(ast.parse(SOURCE))
    for site in found:
        changed = mutate(tree, site)
        compile(changed, "mutant", "exec")
        assert ast.unparse(changed) != ast.unparse(tree)


def test_a_sample_is_stable_when_other_code_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    before = {m.key: m.site for m in sample.mutants_of(file)}
    file.write_text(SOURCE.replace("LIMIT = 3", "OTHER = 7\n\nLIMIT = 3").replace("y - x", "y * x"))
    after = {m.key: m.site for m in sample.mutants_of(file)}
    assert len(before) == len(list(sites(ast.parse(SOURCE))))
    assert {site.before for key, site in before.items() if key not in after} == {"return y - x"}


def test_mutants_of_renamed_code_are_the_same_ones() -> None:
    before = sample.mutants_of_text("a.py", SOURCE)
    text = SOURCE.replace("LIMIT", "MOST").replace("return y - x", "return y * x")
    after = {m.key: m for m in sample.mutants_of_text("b.py", text)}
    same = same_mutants(before, list(after.values()))
    assert not {m.key for m in before} & set(after)
    assert {m.site.before for m in before if m.key not in same} == {"return y - x"}
    for mutant in before:
        if mutant.key in same:
            assert after[same[mutant.key]].site.before == mutant.site.before.replace("LIMIT", "MOST")


#: Of a folder, where all of a real group would take seconds each time.
SMALL = Group("memory", "inductor-lower", ("memory",))
_found_once = functools.cache(sample.mutants_of)


@pytest.fixture
def found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutants of a file, which take seconds, are looked for in the first draw only."""
    monkeypatch.setattr(sample, "mutants_of", _found_once)


def test_known_mutants_are_drawn_first(found_once: None) -> None:
    drawn = sample.draw(SMALL)
    last = [mutant.key for mutant in drawn[-3:]]
    assert {mutant.key for mutant in sample.draw(SMALL, 3, known=last)} == set(last)


def test_groups_hold_the_sources_that_they_name() -> None:
    names = {file.name for file in GROUPS["loop-passes"].files()}
    assert {"split_loops.py", "fuse_kernels.py", "alignment.py"} <= names and "pointwise.py" not in names
    for group in GROUPS.values():
        assert group.files()


def test_a_live_function_gets_the_fault_whoever_holds_it(tmp_path: Path) -> None:
    text = "def make(n):\n    def inner(x):\n        return x + n\n    return inner\nTABLE = {1: lambda x: x - 1}\n"
    file = tmp_path / "module.py"
    file.write_text(text)
    namespace: dict[str, Any] = {}
    original = compile(text, str(file), "exec", dont_inherit=True)
    exec(original, namespace)
    made = namespace["make"](10)
    gc.freeze()
    for site in sites(ast.parse(text)):
        if site.operator == "arithmetic":
            code = compile(mutate(ast.parse(text), site), str(file), "exec", dont_inherit=True)
            patch.patch_live(patch.live_functions([file])[str(file)], original, code)
            break
    assert made(1) == -9 and namespace["make"](3)(5) == 2 and namespace["TABLE"][1](5) == 4
    with pytest.raises(patch.CannotPatch, match="no function"):
        patch.patch_live([], original, original)


def test_tests_that_ask_for_different_things_come_first() -> None:
    source = load_package("inductor-lower").source
    (file,) = source.rglob("split_reductions.py")
    mutant = next(mutant for mutant in sample.mutants_of(file) if mutant.site.in_function)
    seconds = {"a::f[1]": 0.1, "a::f[2]": 0.1, "b::g": 0.3, "test_split.py::h[1]": 0.4, "test_split.py::h[2]": 0.8}
    lines = {mutant.file: bits([mutant.site.first_line])}
    coverage = Coverage(seconds={**seconds, "far": 0.1}, lines=dict.fromkeys(seconds, lines))
    selector = Selector("inductor-lower", coverage, budget=60)
    assert selector.tests(mutant) == ["a::f[1]", "test_split.py::h[1]", "a::f[2]", "b::g", "test_split.py::h[2]"]
    selector.killed(mutant, "b::g")
    assert selector.tests(mutant)[:3] == ["b::g", "a::f[1]", "test_split.py::h[1]"]
    selector.budget = 0.5
    assert selector.tests(mutant) == ["b::g", "a::f[1]"]


def test_outcomes_of_forks_are_told_apart() -> None:
    def work(task: str, send: Any) -> None:
        send(test=task, limit=0.2)
        if task == "hang":
            while True:
                pass
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "raise":
            raise LookupError("in the driver")
        send(result="survived")

    results, seconds = {}, {}
    began = time.monotonic()

    def done(task: str, message: dict[str, Any]) -> None:
        results[task], seconds[task] = message["result"], message["seconds"]

    supervise(["live", "hang", "die", "raise"], work, done, jobs=4)
    assert results == {"live": "survived", "hang": "timeout", "die": "crash", "raise": "error"}
    assert 0.2 <= seconds["hang"] < 5 and seconds["live"] < 0.2
    assert time.monotonic() - began < 60


def test_lines_are_traced_and_followed_through_changes(tmp_path: Path) -> None:
    source = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    file = tmp_path / "traced.py"
    file.write_text(source)
    namespace: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), namespace)
    tracer = LineTracer([file])
    tracer.start()
    try:
        namespace["f"](True)
    finally:
        found = tracer.stop()
    assert found == {str(file): {2, 3}}
    coverage = Coverage(texts={"f": source}, seconds={"t": 0.5, "u": 0.1})
    coverage.lines = {"t": {"f": bits(found[str(file)])}, "u": {"f": bits([2, 4])}}
    coverage.at_import = {"f": bits([1])}
    coverage.write(tmp_path / "c.json")
    read = Coverage.read(tmp_path / "c.json")
    assert read == coverage
    read.follow({"f": "import os\n\n" + source.replace("return 2", "return 3")})
    assert [lines_of(read.lines[t]["f"]) for t in ("t", "u")] == [[4, 5], [4, 6]]
    assert read.tests("f", 4, 4) == ["u", "t"] and read.tests("f", 5, 5) == ["t"]
    assert read.runs_at_import("f", 3, 3) and not read.runs_at_import("f", 4, 6)
    read.follow({"renamed": source})
    read.write(tmp_path / "c.json")
    assert Coverage.read(tmp_path / "c.json").lines == {"t": {}, "u": {}}


def test_equivalent_mutants_have_reasons_and_do_not_count(tmp_path: Path, found_once: None) -> None:
    reasons = equivalents(EQUIVALENT)
    assert all(len(key) == 12 and len(reason.split()) >= 4 for key, reason in reasons.items())
    group = SMALL
    drawn = sample.draw(group, 4)
    assert drawn == sample.draw(group, 9)[:4] and drawn != sample.draw(group, 4, seed=1)
    journal = Journal(tmp_path / "j.jsonl")
    for mutant, result in zip(drawn, ("killed", "timeout", "survived", "not covered"), strict=True):
        journal.add(Verdict(mutant.key, result))
    journal = Journal(tmp_path / "j.jsonl")
    assert share_killed(drawn, journal, {}) == (2, 4)
    assert share_killed(drawn, journal, {drawn[2].key: "because"}) == (2, 3)
    text = report(group.name, drawn, journal, {drawn[2].key: "because"}, diffs=True)
    assert "66.7 % of those that are not equivalent" in text
    assert f"{drawn[3].key} not covered" in text and f"{drawn[2].key} equivalent: because" in text
    assert text.index(drawn[3].key) < text.index(drawn[2].key) and drawn[0].key not in text
