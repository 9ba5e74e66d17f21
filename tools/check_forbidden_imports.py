"""Find what the product may not use: the stack it replaces, pickle, and submodules of sibling packages.

    python -m tools.check_forbidden_imports [file or folder ...]

Reads syntax trees, never imports anything. Seen are import statements at any depth (also inside functions and under
`TYPE_CHECKING`), `importlib.import_module("...")` and `__import__("...")` with a literal, attribute chains such as
`torch._inductor.config` (through `import torch as t` too), and `getattr(torch, "_inductor")`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.statements import statements
from tools.workspace import PACKAGES, PUBLIC_MODULES, ROOT, import_name, source_files

#: Dotted name -> what to do instead. A name stands for itself and everything below it.
FORBIDDEN = {
    "torch._functorch": "it is what aotkit replaces; use make_fx, FunctionalTensorMode and our own packages",
    "functorch": "it is what aotkit replaces; use torch.func or our own packages",
    "torch._inductor": "it is what aotkit replaces; lower through aotkit_inductor_lower",
    "torch._dynamo.backends.common": "it pulls torch._functorch; register through torch._dynamo.register_backend",
    "torch._dynamo.backends.inductor": "it pulls torch._inductor",
    "torch.fx._graph_pickler": "it pickles; write graphs with aotkit_partition.dump_graph",
    "torch.load": "it unpickles; read data formats only",
    "torch.save": "it pickles; write data formats only",
    "pickle": "entries and artifacts are data only; use JSON, text or plain bytes",
    "_pickle": "entries and artifacts are data only; use JSON, text or plain bytes",
    "cloudpickle": "entries and artifacts are data only",
    "dill": "entries and artifacts are data only",
    "marshal": "entries and artifacts are data only",
    "shelve": "it pickles",
}

IMPORT_FUNCTIONS = {"importlib.import_module", "__import__", "importlib.util.find_spec", "importlib.__import__"}
OUR_NAMES = {import_name(folder) for folder in PACKAGES}
PUBLIC = {f"{import_name(folder)}.{module}" for folder, modules in PUBLIC_MODULES.items() for module in modules}


@dataclass(frozen=True, slots=True)
class Violation:
    """One use of a forbidden name."""

    path: Path
    line: int
    name: str
    reason: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.name}: {self.reason}"


def forbidden_reason(name: str) -> str | None:
    """Why a dotted name may not be used, or None."""
    for prefix, reason in FORBIDDEN.items():
        if name == prefix or name.startswith(prefix + "."):
            return reason
    return None


def sibling_reason(name: str, owner: str | None) -> str | None:
    """Why a dotted name of another package of ours may not be imported, or None."""
    top, _, rest = name.partition(".")
    if rest and top in OUR_NAMES and owner is not None and top != owner and name not in PUBLIC:
        return f"other packages import from the root of `{top}`, or from a module that is public by name"
    return None


class _Uses(ast.NodeVisitor):
    """Collects (line, dotted name, is an import of a module) of everything a file refers to."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.found: list[tuple[int, str, bool]] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name, True) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self.found.append((node.lineno, node.module, True))
            self.found += [(node.lineno, f"{node.module}.{alias.name}", False) for alias in node.names]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.found.append((node.lineno, name, False))

    def visit_Call(self, node: ast.Call) -> None:
        function = self.dotted(node.func)
        first = node.args[0] if node.args else None
        if function in IMPORT_FUNCTIONS and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self.found.append((node.lineno, first.value, True))
        if function == "getattr" and len(node.args) >= 2:
            base, attribute = self.dotted(node.args[0]), node.args[1]
            if base and isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                self.found.append((node.lineno, f"{base}.{attribute.value}", False))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "run_decompositions":
            self.found.append((node.lineno, "run_decompositions", False))
        self.generic_visit(node)

    def dotted(self, node: ast.expr) -> str | None:
        """`t._inductor.config` with `import torch as t` -> `torch._inductor.config`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])


def imported_aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name it was imported as; only names whose meaning an import changes."""
    aliases = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def check_source(text: str, path: Path, owner: str | None = None) -> list[Violation]:
    """All violations in one file's text; `owner` is the import name of the package that holds it."""
    tree = ast.parse(text, filename=str(path))
    uses = _Uses(imported_aliases(tree))
    uses.visit(tree)
    violations: dict[tuple[int, str], Violation] = {}
    for line, name, is_import in uses.found:
        reason = forbidden_reason(name)
        if name == "run_decompositions":
            reason = "exported programs are captured, not decomposed, by torch.export"
        if reason is None and is_import:
            reason = sibling_reason(name, owner)
        if reason is not None:
            violations.setdefault((line, reason), Violation(path, line, name, reason))
    return sorted(violations.values(), key=lambda violation: violation.line)


def owner_of(path: Path) -> str | None:
    """The import name of the package whose `src` folder holds a file."""
    parts = path.parts
    for index, part in enumerate(parts[:-1]):
        if part == "src" and parts[index + 1] in OUR_NAMES:
            return parts[index + 1]
    return None


def check_files(paths: Iterable[Path]) -> Iterator[Violation]:
    """All violations in these files."""
    for path in paths:
        yield from check_source(path.read_text(encoding="utf-8"), path, owner_of(path))


def main(arguments: list[str]) -> int:
    """Print each violation; the exit status says whether there was one."""
    if arguments:
        roots = [Path(argument).resolve() for argument in arguments]
        files = [f for root in roots for f in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    else:
        files = list(source_files())
    violations = list(check_files(files))
    for violation in violations:
        print(violation)
    print(f"forbidden imports: {len(files)} files read, {len(violations)} violations")
    return 1 if violations or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
