"""Putting a fault into a process: into functions that exist already, or into a module that will be imported.

A function that exists keeps its identity and gets other code; whoever holds it (tables, decorators, closures) sees the
fault. What ran when the module was imported is not changed by that, so faults there go through the import.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

__all__ = ["CannotPatch", "import_instead", "live_functions", "patch_live"]


class CannotPatch(Exception):
    """The fault changes more than the code of functions that exist."""


def live_functions(files: Iterable[Path]) -> Mapping[str, list[FunctionType]]:
    """The functions of the process that were made in these files."""
    wanted = {str(file) for file in files}
    found: dict[str, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()  # what was set aside is not among the objects
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename in wanted:
            found[thing.__code__.co_filename].append(thing)
    return found


def patch_live(functions: Iterable[FunctionType], original: CodeType, mutated: CodeType) -> None:
    """Give the functions of a module the mutated code. Raises :class:`CannotPatch` where that is not enough."""
    before, after = list(_codes(original)), list(_codes(mutated))
    if [code.co_qualname for code in before] != [code.co_qualname for code in after]:
        raise CannotPatch("the fault adds or removes a function")
    changed = {old: new for old, new in zip(before[1:], after[1:]) if old != new}
    patched = 0
    for function in functions:
        code = changed.get(function.__code__)
        if code is None:
            continue
        try:
            function.__code__ = code
        except ValueError as error:  # another number of closed-over variables
            raise CannotPatch(str(error)) from error
        patched += 1
    if not patched:
        raise CannotPatch("no function of the process has the mutated code")


def import_instead(file: Path, code: CodeType) -> None:
    """From now on, importing ``file`` runs ``code``. For a process that ends afterwards."""
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if self.path == str(file) else read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
