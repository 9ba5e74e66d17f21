"""Which tests could notice a mutant."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.workspace import ROOT

from .coverage import Coverage
from .groups import package_files
from .sample import Mutant

__all__ = ["Selector"]


@dataclass
class Selector:
    """Tests by mutant, the most promising first, as many as fit into ``budget`` seconds of their usual time."""

    package: str
    coverage: Coverage
    budget: float
    killers: Counter[tuple[str, str]] = field(default_factory=Counter)  # (file and function, test), also (file, test)
    trees: dict[str, ast.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for file in package_files(self.package):
            self.trees[file.relative_to(ROOT).as_posix()] = ast.parse(file.read_text())

    def is_live(self, mutant: Mutant) -> bool:
        """Whether the mutated code runs in tests only, and not when it is imported."""
        site = mutant.site
        runs = self.coverage.runs_at_import(mutant.file, site.first_line, site.last_line)
        return site.in_function and not runs

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests to run, in order: those that killed another mutant of the function, then in turn from all test
        functions, as the parameters of one ask for much the same. Each is given as much time as the others, and those
        named after the file more; those that killed in the file come first in their function, and then the fastest."""
        site = mutant.site
        if self.is_live(mutant):
            found = self.coverage.tests(mutant.file, site.first_line, site.last_line)
            found = found or self._callers(mutant)
        else:
            found = self._users(mutant)
        place = f"{mutant.file} {site.function}"
        words = set(mutant.file.removesuffix(".py").replace("_", "/").split("/")[-3:])
        file = mutant.file
        found = sorted(found, key=lambda t: (-self.killers[file, t], self.coverage.seconds[t], t))
        spent: dict[str, float] = defaultdict(float)  # by test function
        turn: dict[str, float] = {}
        for test in found:
            function = test.partition("[")[0]
            spent[function] += self.coverage.seconds[test]
            turn[test] = spent[function] / (1 + 2 * _named(test, words))
        found.sort(key=lambda t: (-self.killers[place, t], turn[t]))
        chosen: list[str] = []
        total = 0.0
        for test in found:
            total += self.coverage.seconds[test]
            if chosen and total > self.budget:
                break
            chosen.append(test)
        return chosen

    def killed(self, mutant: Mutant, test: str) -> None:
        """Remember what killed a mutant."""
        self.killers[f"{mutant.file} {mutant.site.function}", test] += 1
        self.killers[mutant.file, test] += 1

    def _callers(self, mutant: Mutant) -> list[str]:
        """Tests that enter the function: what runs first in its forty-first call was not measured."""
        line = mutant.site.line
        around = [f for f in _functions(self.trees[mutant.file]) if f.lineno <= line <= (f.end_lineno or line)]
        if not around:
            return []
        inner = max(around, key=lambda function: function.lineno)
        return self.coverage.tests(mutant.file, inner.body[0].lineno, inner.end_lineno or line)

    def _users(self, mutant: Mutant) -> list[str]:
        """Tests that run a function which uses what a statement at module level defines; all of the module's else."""
        tree = self.trees[mutant.file]
        line = mutant.site.line
        top = next(node for node in tree.body if node.lineno <= line <= (node.end_lineno or line))
        names = set(_defined(top))
        names |= {name for node in tree.body if names & _used(node) for name in _defined(node)}
        found: set[str] = set()
        for file, other in self.trees.items():
            if file != mutant.file and not names & _imported(other):
                continue
            for function in _functions(other):
                if names & (_used(function) | {function.name}):
                    found |= set(self.coverage.tests(file, function.body[0].lineno, function.end_lineno or line))
        if not found:
            found = set(self.coverage.tests(mutant.file, 1, len((ROOT / mutant.file).read_text().splitlines())))
        return list(found)


def _named(test: str, words: set[str]) -> int:
    """How many of the words are in the name of the test's file."""
    return len(words.intersection(test.partition(".py")[0].rpartition("/")[2].split("_")))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.AST):
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _used(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _imported(tree: ast.Module) -> set[str]:
    return {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
