"""What one rank assumed when it compiled for all: facts that each of the others can look at, or a refusal.

Note [What ranks may differ in]
    Ranks that load a compile trace nothing, so whatever Dynamo took for a constant must be the same on them. What it
    found in arguments becomes rows in any case (Note [Checks of a saved function]). Here so does what it found in
    global variables, from the module that they are in; the function's own code, defaults and variables of enclosing
    functions are compared as a whole. Dynamo asks some functions while it traces and keeps no guard of their answers:
    the number of the rank, and the environment, which mostly tells it. Code that names one of these is refused, and
    so is a function whose result Dynamo is told to take for constant.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..artifact.saved_checks import identity_row, named_row
from ..artifact.values import NoForm
from ..errors import CompileError
from ..frontend.guard_rows import IDENTITIES, GuardRow, UnknownGuard, is_about_torch, rows_of_value, source_path
from .compile_to_save import KeptGuards
from .save_compiled import row_as_data

__all__ = ["RankGuards"]

#: Functions, methods and variables that tell ranks apart and that Dynamo asks without a guard. ``rank``: if called.
_TELL_RANKS = frozenset(
    (
        *("get_rank", "get_group_rank", "get_global_rank", "get_local_rank", "get_node_local_rank", "get_coordinate"),
        *("getRank", "get_worker_info", "environ", "environb", "getenv", "getenvb", "getpid", "gethostname", "uname"),
        *("_get_rank", "_rank_not_in_group", "current_device"),
    )
)


class RankGuards(KeptGuards):
    """A filter of guards that also keeps those on global variables and on classes, as rows for :meth:`facts`."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, str, list[list[Any]], Any]] = []
        self._refused: list[str] = []
        self._modules: dict[str, str] = {}

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        """As torch asks: per guard whether torch keeps it."""
        self._noted.clear()
        self._refused.clear()
        return super().__call__(guards)

    def _keeps(self, guard: Any) -> bool:
        name, value = guard.orig_guard.name, guard.value
        self._look_at(name, value)
        seen_elsewhere = is_about_torch(name) or name.startswith("G['__builtins_dict") or _is_setting(name)
        if (guard.is_global or "type(" in name) and not seen_elsewhere:
            try:
                root, path = source_path(name)
            except UnknownGuard:
                self._refused.append(f"the value of {name}")
            else:
                if isinstance(value, types.ModuleType) and len(path) == 1:
                    self._modules[path[0][1]] = value.__name__
                self._noted.append((guard.orig_guard, root, path, value))
        return super()._keeps(guard)

    def _look_at(self, name: str, value: Any) -> None:
        function = getattr(value, "__func__", value)
        if getattr(function, "__name__", None) in _TELL_RANKS:
            self._refused.append(f"{function.__name__}(), which may differ between ranks")
        if isinstance(function, types.FunctionType):
            if getattr(function, "_dynamo_marked_constant", False):
                self._refused.append(f"what {name} returns while it is traced")
            if not str(function.__module__).startswith("torch."):
                self._refused += [f"{found}, which may differ between ranks" for found in _named_in(function.__code__)]

    def facts(self, compiled: Any, fn: Callable[..., Any]) -> dict[str, list[Any]]:
        """Rows about ``globals``, where the first step of each path is a module, and about classes of ``arguments``.

        Raises :class:`CompileError` where something was taken for a constant that other ranks can't look at.
        """
        artifacts = compiled._artifacts
        aliases = {**dict(artifacts.runtime_env.import_sources), **self._modules}
        places = _Places(aliases, getattr(fn, "__globals__", {}).get("__name__", ""))
        refused = [*self._refused, *_told_by_sources(artifacts.source_info)]
        rows: dict[str, list[Any]] = {"globals": [], "arguments": []}
        for guard, root, path, value in self._noted:
            if root == "L" and path[0][1] in fn.__code__.co_freevars:
                continue  # these are compared as a whole
            try:
                found = [_row(*row) for row in _rows_of(guard, root, path, value, places)]
                rows["globals" if root == "G" else "arguments"] += found
            except (UnknownGuard, NoForm) as error:
                refused.append(f"{guard.name} ({error})")
        if refused:
            raise CompileError(
                f"one rank can't compile it for the others: it depends on {refused[0]}. Pass what differs as an "
                "argument, or compile with torch.compile(backend='aotkit', options={'share_compiles': True}), where "
                "each rank traces"
            )
        return rows


def _is_setting(name: str) -> bool:
    """Whether it is a setting by which torch traces (from 2.15 on, ``compile_on_one_rank`` of collectives): others
    load what was traced."""
    return name.startswith("G['__import_torch_dot_") and ".config._config['" in name


@dataclass(frozen=True, slots=True)
class _Places:
    """Which module a global variable of the trace is, or is in. ``home``: the module of the function itself."""

    modules: Mapping[str, str]
    home: str

    def located(self, path: list[list[Any]]) -> list[list[Any]]:
        """The path from the module on."""
        (_, variable), *steps = path
        if variable in self.modules:
            return [["local", self.modules[variable]], *steps]
        return [["local", self.home], ["attr", variable], *steps]


def _rows_of(guard: Any, root: str, path: list[list[Any]], value: Any, places: _Places) -> Iterator[GuardRow]:
    kind = guard.create_fn_name()
    if root == "G":
        path = places.located(path)
    if isinstance(value, torch.distributed.ProcessGroup):
        yield path, "identity", value
    elif isinstance(value, types.ModuleType) and kind in IDENTITIES:
        yield path, "equal", value
    elif kind == "DUPLICATE_INPUT":
        source: Any = (getattr(guard.create_fn, "keywords", None) or {}).get("source_b")
        other, its_path = source_path(source.name() if callable(source.name) else source.name)
        if (root, other) != ("G", "G"):
            raise UnknownGuard(f"{kind} on {guard.name}")
        yield path, "same", places.located(its_path)
    elif kind != "HASATTR":
        yield from rows_of_value(guard, path, value)
    else:
        raise UnknownGuard(f"{kind} on {guard.name}")


def _row(path: Any, kind: str, expected: Any) -> list[Any]:
    if kind == "identity" and identity_row(path, expected) is None:
        found = named_row(path, expected)
        if found is not None:
            return found
    return row_as_data(path, kind, expected)


def _named_in(code: types.CodeType) -> Iterator[str]:
    """What tells ranks apart and is named in the code, or in code within it."""
    yield from sorted(_TELL_RANKS & {*code.co_names})
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_in(constant)


def _told_by_sources(info: Any) -> Iterator[str]:
    """What tells ranks apart and is named in the sources of the functions that were traced."""
    for source in sorted(info.inlined_sources, key=lambda s: (s.module, s.firstlineno)):
        if source.module.startswith("torch._dynamo."):
            continue
        text = "".join(_lines(source))
        for name in _names_in(text):
            where = f"{source.module}, lines {source.firstlineno} to {source.lastlineno - 1}"
            yield f"{name}, which may differ between ranks ({where})"


def _lines(source: Any) -> list[str]:
    content = getattr(source, "content", None)
    if not isinstance(content, str):
        file = getattr(sys.modules.get(source.module), "__file__", None)
        if file is None:
            return []
        with open(file, encoding="utf-8") as opened:
            content = opened.read()
    return content.splitlines(keepends=True)[source.firstlineno - 1 : source.lastlineno - 1]


def _names_in(text: str) -> Iterator[str]:
    """Names of the code in ``text``, without comments and strings, of those that tell ranks apart."""
    words: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NAME, tokenize.OP):
                words.append(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError):  # lines cut out of a file: look at all of them
        words = re.findall(r"\w+|[^\w\s]", text)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in _TELL_RANKS or (word == "rank" and following == "("):
            yield word
