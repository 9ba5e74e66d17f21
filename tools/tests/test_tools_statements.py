"""tools.statements finds what `ast.walk` finds of statements, in the order of the source."""

from __future__ import annotations

import ast

from tools.statements import statements
from tools.workspace import source_files

SOURCE = """
@decorated(lambda: 1)
class A(B):
    async def f(self):
        async with x as y:
            async for z in y: import a
            else: from b import c
        try: import d
        except* E: import e
        else: import f
        finally: import g
def h():
    while x:
        if y: break
        elif z: continue
        else: return [i for i in (lambda: j)()]
    match x:
        case [1, *_] if y:
            try: pass
            except (E, F) as error: raise
        case _:
            with x: del y
"""


def test_all_statements_are_found_wherever_they_stand() -> None:
    files = [path.read_text(encoding="utf-8") for path in list(source_files())[:40]]
    for text in [SOURCE, *files]:
        found = [node for node in statements(ast.parse(text)) if isinstance(node, ast.stmt)]
        walked = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        assert sorted(map(ast.dump, found)) == sorted(map(ast.dump, walked))
        assert [node.lineno for node in found] == sorted(node.lineno for node in found)
