"""Find modules of a package that import each other in a circle.

    python -m tools.import_circles

An import counts wherever it stands, also in a function. What only a type checker reads (`if TYPE_CHECKING:`) is told
apart: it breaks nothing, but such a file cannot be read without the other one either.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tools.statements import statements_in
from tools.workspace import load_packages

__all__ = ["circles", "import_graph", "main"]

Graph = Mapping[str, frozenset[str]]
Import = ast.Import | ast.ImportFrom


def import_graph(source: Path, typing: bool) -> Graph:
    """Module -> modules of the same package that it imports. ``source`` is the package's folder; ``typing``: imports
    for type checkers, too. Names are relative to the package, its root is ``""``."""
    modules = {_name(source, path): path for path in sorted(source.rglob("*.py"))}
    return {
        name: frozenset(_imports(name, path, source.name, modules, typing)) - {name} for name, path in modules.items()
    }


def _name(source: Path, path: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path, package: str, modules: Collection[str], typing: bool) -> Iterator[str]:
    for node, only_typing in _read(path.read_text(encoding="utf-8")):
        if only_typing and not typing:
            continue
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        else:
            here = [package, *name.split(".")] if name else [package]
            here = here if path.name == "__init__.py" else here[:-1]
            base = ".".join([*(here[: len(here) - node.level + 1] if node.level else []), *filter(None, [node.module])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            named = [module if module.removeprefix(f"{package}.") in modules else base for module in inner]
        for module in named:
            if module.partition(".")[0] == package:
                yield from _with_folders(module.partition(".")[2], name, modules)


def _with_folders(module: str, importer: str, modules: Collection[str]) -> Iterator[str]:
    """The module, and the folders that Python imports on the way, except those that the importer is in."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        found = ".".join(parts[:count])
        if found in modules and not f"{importer}.".startswith(f"{found}."):
            yield found


@cache
def _read(text: str) -> Sequence[tuple[Import, bool]]:
    """The import statements of a source, each with whether only type checkers read it."""
    return tuple(_found(ast.parse(text), False))


def _found(tree: ast.AST, typing: bool) -> Iterator[tuple[Import, bool]]:
    for node in statements_in(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typing
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for part, only in ((node.body, True), (node.orelse, typing)):
                yield from _found(ast.Module(part, []), only)
        else:
            yield from _found(node, typing)


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module, each sorted."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_modules: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        open_modules.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in open_modules:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            position = open_modules.index(module)
            found.append(sorted(open_modules[position:]))
            del open_modules[position:]

    for module in graph:
        if module not in number:
            visit(module)
    return sorted(circle for circle in found if len(circle) > 1)


def main() -> None:
    """Print the circles of each package."""
    for name, package in load_packages().items():
        for typing in (False, True):
            for circle in circles(import_graph(package.source, typing)):
                print(f"{name}{' (with imports for type checkers)' if typing else ''}: {', '.join(circle)}")


if __name__ == "__main__":
    main()
