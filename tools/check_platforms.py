"""Nothing in the packages may keep them from being imported on macOS or Windows.

    python -m tools.check_platforms

Looks at every source file: modules that only POSIX systems have must not be imported where the file is imported, and
functions that only they have must not be used unless the same function asks with ``hasattr``, ``getattr`` or
``sys.platform`` first. What is not a matter of names (whether the code runs there) this cannot tell.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.statements import statements
from tools.workspace import PACKAGES, load_package

_MODULES = "crypt fcntl grp nis posix pty pwd readline resource spwd syslog termios tty"
_OS = """
    chown fchmod fchown fork forkpty getegid geteuid getgid getpgid getuid killpg mkfifo nice O_CLOEXEC O_DIRECTORY
    O_NOFOLLOW register_at_fork sched_getaffinity sched_setaffinity setsid sysconf uname wait3 wait4 WEXITSTATUS
"""
_SIGNAL = "SIGKILL SIGALRM SIGHUP SIGUSR1 SIGUSR2 SIGCHLD alarm setitimer pthread_kill"

#: Modules of the standard library that Windows lacks.
POSIX_MODULES = frozenset(_MODULES.split())

#: Functions and constants by module that Windows lacks.
POSIX_NAMES = {"os": frozenset(_OS.split()), "signal": frozenset(_SIGNAL.split())}


#: A file without one of these words has nothing that Windows lacks, and need not be parsed.
_ANY = re.compile(rf"\b(?:{'|'.join(sorted(POSIX_MODULES.union(*POSIX_NAMES.values())))})\b")


def problems_in(source: str) -> Iterator[tuple[int, str]]:
    """Line and words for each thing in a file that stands in the way."""
    if not _ANY.search(source):
        return
    tree = ast.parse(source)
    for node in _at_import(tree):
        for name in _imported(node):
            if name in POSIX_MODULES:
                yield node.lineno, f"{name} is imported with the file, and Windows has no such module"
    for function in [tree, *(n for n in statements(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))]:
        asked = _asked_for(function)
        for used in _own_nodes(function):
            if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name):
                known = POSIX_NAMES.get(used.value.id, frozenset())
                if used.attr in known and used.attr not in asked and "platform" not in asked:
                    yield used.lineno, f"{used.value.id}.{used.attr} is not on Windows, and nothing asks before"


def _at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the file is imported, but those that a ``try`` or an ``if`` decides on."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.ClassDef):
            yield from statement.body


def _imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.split(".")[0]]
    return []


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, or of a file, without those of the functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def _asked_for(function: ast.AST) -> set[str]:
    """Names that the function asks for before it uses them."""
    asked: set[str] = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            asked.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.platform":
            asked.add("platform")
    return asked


def main() -> int:
    """Look at all packages."""
    found = 0
    for name in PACKAGES:
        package: Path = load_package(name).source
        for path in sorted(package.rglob("*.py")):
            for line, words in problems_in(path.read_text()):
                print(f"{path}:{line}: {words}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
