"""Keep files, functions, parameter lists and packages at a size that can be read.

    python -m tools.check_sizes [--shrink]

Limits are in tools/budgets.toml, exceptions in tools/size_exceptions.toml. An exception holds the present size: growth
fails, and so does an exception that is larger than needed, so that the list only shrinks. `--shrink` lowers or drops
exceptions, it never adds one.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, source_files

KINDS = ("file_lines", "function_lines", "parameters")
EXCEPTIONS_HEADER = (
    "# What is larger than tools/budgets.toml allows, with its present size. This file only shrinks: an entry that is\n"
    "# larger than what it names, or names nothing, fails the check "
    "(`python -m tools.check_sizes --shrink` lowers them).\n"
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

#: A function registered for an operator takes the operator's arguments: their number is the schema's choice, not ours.
SCHEMA_DECORATORS = {"lowers"}


@dataclass(frozen=True, slots=True)
class Size:
    """One measured thing: a file (`path`) or a function (`path::Class.function`)."""

    kind: str
    where: str
    value: int


def function_lines(node: FunctionNode) -> int:
    """Lines from `def` to the end, its docstring left out."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def parameter_count(node: FunctionNode) -> int:
    """Number of parameters, a leading self or cls left out."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def follows_a_schema(node: FunctionNode) -> bool:
    """Whether the function is registered as the rule of an operator: `@TABLE.lowers(aten.add.Tensor)`."""
    for decorator in node.decorator_list:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in SCHEMA_DECORATORS:
            return True
    return False


def measure(text: str, where: str) -> Iterator[Size]:
    """The sizes of a file and of every function in it, nested ones and methods too."""
    yield Size("file_lines", where, len(text.splitlines()))

    def walk(node: ast.AST, prefix: str) -> Iterator[Size]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, FunctionNode):
                    yield Size("function_lines", f"{where}::{name}", function_lines(child))
                    if not follows_a_schema(child):
                        yield Size("parameters", f"{where}::{name}", parameter_count(child))
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(ast.parse(text), "")


def problems_of(
    sizes: list[Size], limits: dict[str, int], exceptions: dict[str, dict[str, int]]
) -> tuple[list[str], dict[str, dict[str, int]]]:
    """What is wrong, and the exceptions that are still needed at the size they now have."""
    largest: dict[tuple[str, str], int] = {}
    for size in sizes:  # overloads and branches may define a name twice: the largest counts
        key = (size.kind, size.where)
        largest[key] = max(size.value, largest.get(key, 0))
    problems: list[str] = []
    needed: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for (kind, where), value in sorted(largest.items()):
        allowed = exceptions.get(kind, {}).get(where)
        if value > max(limits[kind], allowed or 0):
            problems.append(f"{where}: {value} {kind.replace('_', ' ')}, allowed are {allowed or limits[kind]}")
        if allowed is not None and value > limits[kind]:
            needed[kind][where] = min(value, allowed)
    for kind in KINDS:
        for where, allowed in exceptions.get(kind, {}).items():
            if needed[kind].get(where) != allowed:
                problems.append(f"{where}: the exception of {allowed} {kind.replace('_', ' ')} is no longer needed")
    return problems, needed


def package_totals(root: Path) -> dict[str, int]:
    """Lines of source per package."""
    totals = dict.fromkeys(PACKAGES, 0)
    for path in source_files(root):
        folder = path.relative_to(root / "packages").parts[0]
        totals[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return totals


def over_budget(totals: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """A sentence for each package that is larger than its budget or has none."""
    found = [f"packages/{name} has no line budget" for name in totals if name not in budgets]
    found += [
        f"packages/{name}/src: {lines} lines, the budget is {budgets[name]}"
        for name, lines in totals.items()
        if name in budgets and lines > budgets[name]
    ]
    return found


def write_exceptions(path: Path, needed: dict[str, dict[str, int]]) -> None:
    """Write the exceptions file."""
    blocks = [EXCEPTIONS_HEADER]
    for kind in KINDS:
        entries = "".join(f'"{where}" = {value}\n' for where, value in sorted(needed[kind].items()))
        blocks.append(f"[{kind}]\n{entries}")
    path.write_text("\n".join(blocks), encoding="utf-8")


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print what is too large; the exit status says whether anything is."""
    budgets = tomllib.loads((root / "tools" / "budgets.toml").read_text(encoding="utf-8"))
    exceptions_path = root / "tools" / "size_exceptions.toml"
    exceptions = tomllib.loads(exceptions_path.read_text(encoding="utf-8"))
    sizes = [
        size
        for path in source_files(root)
        for size in measure(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]
    problems, needed = problems_of(sizes, budgets["limits"], exceptions)
    if "--shrink" in arguments:
        write_exceptions(exceptions_path, needed)
        problems, _ = problems_of(sizes, budgets["limits"], needed)
    totals = package_totals(root)
    problems += over_budget(totals, budgets["package_lines"])
    for problem in problems:
        print(problem)
    print("lines: " + ", ".join(f"{name} {lines}/{budgets['package_lines'][name]}" for name, lines in totals.items()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
