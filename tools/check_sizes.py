"""Say where files and functions are longer than is easy to read, and keep parameter lists short.

    python -m tools.check_sizes [--shrink]

Limits are in tools/budgets.toml. A long file or function is a warning: size is a hint, and code is not cut up to please
a number. Parameters beyond the limit fail, unless tools/size_exceptions.toml names them. An exception holds the present
number: growth fails, and so does an exception that is larger than needed, so that the list only shrinks. `--shrink`
lowers or drops exceptions, it never adds one.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.statements import statements_in
from tools.workspace import PACKAGES, ROOT, source_files

WARNED = ("file_lines", "function_lines")
EXCEPTIONS_HEADER = (
    "# What has more than tools/budgets.toml allows, with its number. This file only shrinks: an entry that is larger\n"
    "# than what it names, or names nothing, fails the check "
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
        for child in statements_in(node):
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


def problems_of(sizes: list[Size], limit: int, exceptions: dict[str, int]) -> tuple[list[str], dict[str, int]]:
    """Which functions have too many parameters, and the exceptions still needed, at the number they now have."""
    largest: dict[str, int] = {}
    for size in sizes:  # overloads and branches may define a name twice: the largest counts
        if size.kind == "parameters":
            largest[size.where] = max(size.value, largest.get(size.where, 0))
    problems: list[str] = []
    needed: dict[str, int] = {}
    for where, value in sorted(largest.items()):
        allowed = exceptions.get(where)
        if value > max(limit, allowed or 0):
            problems.append(f"{where}: {value} parameters, allowed are {allowed or limit}")
        if allowed is not None and value > limit:
            needed[where] = min(value, allowed)
    for where, allowed in exceptions.items():
        if needed.get(where) != allowed:
            problems.append(f"{where}: the exception of {allowed} parameters is no longer needed")
    return problems, needed


def package_totals(root: Path) -> dict[str, int]:
    """Lines of source per package."""
    totals = dict.fromkeys(PACKAGES, 0)
    for path in source_files(root):
        folder = path.relative_to(root / "packages").parts[0]
        totals[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return totals


def long_parts(sizes: list[Size], limits: dict[str, int]) -> list[str]:
    """A sentence for each file and function beyond its limit."""
    return [
        f"{size.where}: {size.value} lines, more than {limits[size.kind]} are hard to read"
        for size in sizes
        if size.kind in WARNED and size.value > limits[size.kind]
    ]


def write_exceptions(path: Path, needed: dict[str, int]) -> None:
    """Write the exceptions file."""
    entries = "".join(f'"{where}" = {value}\n' for where, value in sorted(needed.items()))
    path.write_text(f"{EXCEPTIONS_HEADER}\n[parameters]\n{entries}", encoding="utf-8")


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print what is long and what has too many parameters; the exit status says whether anything has."""
    limits = tomllib.loads((root / "tools" / "budgets.toml").read_text(encoding="utf-8"))["limits"]
    exceptions_path = root / "tools" / "size_exceptions.toml"
    exceptions = tomllib.loads(exceptions_path.read_text(encoding="utf-8"))["parameters"]
    sizes = [
        size
        for path in source_files(root)
        for size in measure(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]
    problems, needed = problems_of(sizes, limits["parameters"], exceptions)
    if "--shrink" in arguments:
        write_exceptions(exceptions_path, needed)
        problems, _ = problems_of(sizes, limits["parameters"], needed)
    for warning in long_parts(sizes, limits):
        print(f"warning: {warning}")
    for problem in problems:
        print(problem)
    print("lines: " + ", ".join(f"{name} {lines}" for name, lines in package_totals(root).items()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
