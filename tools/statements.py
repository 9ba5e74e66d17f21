"""Walk the statements of a syntax tree. Functions, classes and imports are statements, and most nodes are parts of
expressions, which this leaves alone: it takes a tenth of the time of `ast.walk`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["statements", "statements_in"]


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """What stands directly in a module or statement, one level down: statements, handlers and cases."""
    if isinstance(node, ast.Module | ast.stmt | ast.ExceptHandler | ast.match_case):
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            yield from getattr(node, field, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of them, at any depth, in the order of the source."""
    waiting = [*statements_in(node)][::-1]
    while waiting:
        each = waiting.pop()
        yield each
        waiting.extend([*statements_in(each)][::-1])
