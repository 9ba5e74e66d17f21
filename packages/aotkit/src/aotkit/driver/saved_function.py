"""A function that was compiled and saved, loaded: it runs without Dynamo, and without any stage of a compile.

What this module imports is what a deployed process needs; see Note [What is loaded].

Note [What a saved function runs]
    Dynamo's own bytecode is kept: it takes the graph's inputs out of the arguments, calls the graph, puts results
    together and does what else the function did (attributes that were set, lists that grew). It is for one version of
    Python, and is code as much as the native code of the kernels is: a file is to be trusted like a shared library.
    With a signing key nothing of it is looked at before the signature holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aotkit_cache import CacheError
from aotkit_cache.sealed import unseal

from .._dynamo_frames import hide_from_dynamo
from ..artifact.graph_inputs import InputCheck
from ..artifact.kept_facts import KeptFacts
from ..artifact.quick_calls import QuickCall
from ..artifact.quick_checks import MOST_WRITTEN
from ..artifact.saved_checks import CheckTree, tree_of_rows
from ..artifact.straight_code import StraightCode, straight_code
from ..artifact.torch_state import call_unwatched, outside_of_modes, state_of_call, tell_state
from ..artifact.values import value_from_json, value_to_json
from ..errors import PackageError
from .process import collections_put_off
from .saved_graph import SavedGraph, load_graph_sections

__all__ = ["DYNAMO_HELPERS", "FORMAT", "SavedFunction", "function_of_block", "load_compiled_function"]

FORMAT = 1


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    object.__getattribute__(owner, "__dict__")[name] = value


def _delete_attribute(owner: Any, name: str) -> None:
    del object.__getattribute__(owner, "__dict__")[name]


# What Dynamo's bytecode calls of its own module of helpers, for which all of Dynamo would be imported.
DYNAMO_HELPERS: Mapping[str, Callable[..., Any]] = {
    "call_size": lambda value, dim: value.size(dim),
    "call_stride": lambda value, dim: value.stride(dim),
    "call_storage_offset": lambda value: value.storage_offset(),
    "dict_getitem": dict.__getitem__,
    "iter_next": next,
    "list_getitem": list.__getitem__,
    "object_delattr_ignore_descriptor": _delete_attribute,
    "object_new": object.__new__,
    "object_setattr_ignore_descriptor": _set_attribute,
    "record_pregraph_bytecode_enter": lambda: None,
    "record_pregraph_bytecode_exit": lambda entered: None,
    "to_subclass": lambda value, kind: value.as_subclass(kind),
}


_GATHERED = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
_DO_NOTHING = [DYNAMO_HELPERS[f"record_pregraph_bytecode_{end}"] for end in ("enter", "exit")]


@collections_put_off()
def load_compiled_function(
    path: str | os.PathLike[str],
    *,
    signing_key: bytes | str | None = None,
    namespace: Mapping[str, Any] | None = None,
    check_sources: bool = True,
) -> SavedFunction:
    """Load what :func:`aotkit.saved.save_compiled_function` wrote. Neither Dynamo nor a stage of a compile is imported.

    Args:
        path: the file. It holds code, which runs in this process: load only files that you trust.
        signing_key: a file that was not signed with it is refused unread.
        namespace: the function's global variables, where they are not those of the module that it was in.
        check_sources: compare the source of what was traced, as far as its modules are loaded here.

    Raises :class:`PackageError` if the file is damaged, was made for another torch, Python or processor, lacks the
    signature, or if the source of a traced function or a custom operator has changed since.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise PackageError(f"can't read {os.fspath(path)}: {error}") from error
    with outside_of_modes(), torch.inference_mode(False):  # it serves other calls, too
        return function_of_block(data, os.fspath(path), signing_key, namespace, check_sources)[0]


def function_of_block(
    data: bytes,
    origin: str,
    signing_key: bytes | str | None,
    namespace: Mapping[str, Any] | None,
    check_sources: bool = True,
) -> tuple[SavedFunction, Mapping[str, Any]]:
    """The function in a sealed block, and what the block says beside it. ``origin``: what errors call the block; for
    the rest see :func:`load_compiled_function`. Raises :class:`PackageError`."""
    try:
        entry = unseal(data, signing_key)
    except CacheError as error:
        raise PackageError(f"{origin} can't be used: {error}") from error
    meta: Any = entry.meta
    function = meta.get("function")
    if function is None:
        raise PackageError(f"{origin} holds no compiled function")
    if (function["format"], function["python"]) != (FORMAT, sys.implementation.cache_tag):
        raise PackageError(
            f"{origin} was saved by {function['python']} in format {function['format']}; this is "
            f"{sys.implementation.cache_tag}, which reads format {FORMAT}. Compile it again"
        )
    if check_sources:
        _check_sources(function["sources"])
    graph = load_graph_sections(entry.sections, meta)
    try:
        return SavedFunction(graph, function, namespace), meta
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PackageError(f"{origin} can't be loaded: {error}") from error


class _Checked(Exception):
    """Ends a call that only looks at its arguments."""


class SavedFunction:
    """A loaded function: call it as the one that was compiled; a module's forward takes the module first.

    Attributes:
        graph: the compiled graph.
        name: of the function that was compiled.
    """

    def __init__(self, graph: SavedGraph, described: Mapping[str, Any], namespace: Mapping[str, Any] | None) -> None:
        assert graph.contract is not None
        self.graph, self._check_inputs = graph, InputCheck(graph.contract)
        self.name = str(described["name"])
        names = {name: _global(form) for name, form in described["globals"].items()}
        names.update(namespace or {})
        names.update(_outside(described, names))
        self._graph_name = described["graph"]
        names[self._graph_name] = self._call_graph
        cells = tuple(types.CellType(value_from_json(form)) for form in described["closure"])
        code = value_from_json(described["code"])
        defaults = value_from_json(described["defaults"])
        self._function = types.FunctionType(code, names, self.name, defaults, cells)
        self._function.__kwdefaults__ = value_from_json(described["keyword_defaults"])
        self._signature = inspect.signature(self._function)
        self._names = tuple(self._signature.parameters)
        self._fewest, self._more = _quickly_bound(self._signature)
        self._state = described["state"]
        self._state_passed: dict[str, Any] = {}
        self._rows = described["checks"]
        self._all = tree_of_rows(self._rows)
        self._often: dict[frozenset[str], CheckTree] = {frozenset(): self._all}
        self._checked = weakref.WeakKeyDictionary[nn.Module, dict[str, KeptFacts]]()  # by argument
        self._straight: StraightCode | None = None
        self._quick: QuickCall | None = None
        self._noted = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run. Raises :class:`aotkit.GuardError` for a call that the function was not compiled for."""
        given = self._given(args, kwargs)
        quick = self._quick
        found = None if quick is None else quick.found(given)
        if quick is not None and found is not None:
            return quick.run(found, self._run)
        self.check(*args, **kwargs)
        self._note_quick_call(given)
        return self._function(*args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise :class:`aotkit.GuardError` if a call is not what was compiled, as far as can be told before it begins.

        See Note [Checks of a saved function]; sizes are looked at in the call itself, before anything is computed.
        """
        arguments = self.arguments(*args, **kwargs)
        state = state_of_call()
        if state != self._state_passed:
            here = value_to_json(state)
            if here != self._state:
                tell_state(here, self._state)
            self._state_passed = state
        modules = {name: value for name, value in arguments.items() if isinstance(value, nn.Module)}
        kept = [self._checked.get(module, {}).get(name) for name, module in modules.items()]
        if all(facts is not None and facts.hold() for facts in kept):
            self._tree_for(frozenset(modules)).check_often(arguments)
            return
        self._all.check(arguments)
        for (name, module), facts in zip(modules.items(), kept, strict=True):
            if facts is not None:
                facts.renew({name: module})
                continue
            rows = [row for row in self._rows if row[0][0][1] == name and not _is_for_every_call(row, {name})]
            self._checked.setdefault(module, {})[name] = KeptFacts(rows, {name: module})

    def _tree_for(self, modules: frozenset[str]) -> CheckTree:
        """Facts for every call, where the arguments of these names are modules that were looked at."""
        if modules not in self._often:
            self._often[modules] = tree_of_rows([row for row in self._rows if _is_for_every_call(row, modules)])
        return self._often[modules]

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """The arguments of a call by name, with defaults."""
        return dict(zip(self._names, self._given(args, kwargs), strict=True))

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The same without names, in the order of the parameters."""
        if not kwargs and len(args) >= self._fewest:
            if self._more:
                return (*args[: self._fewest], args[self._fewest :], *({} for _ in self._more[1:]))
            if len(args) == self._fewest:
                return args
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def check_call(self, *args: Any, **kwargs: Any) -> None:
        """Raise :class:`aotkit.GuardError` if a call is not what was compiled, the graph's inputs included: what comes
        before the graph is run, the graph is not."""
        self.check(*args, **kwargs)
        function = self._function
        names = {**function.__globals__, self._graph_name: self._only_check}
        dry = types.FunctionType(function.__code__, names, self.name, function.__defaults__, function.__closure__)
        dry.__kwdefaults__ = function.__kwdefaults__
        with contextlib.suppress(_Checked):
            dry(*args, **kwargs)

    def _only_check(self, *values: Any) -> Any:
        self._check_inputs(values)
        raise _Checked

    def _call_graph(self, *values: Any) -> Any:
        return self._run(values)

    def _run(self, values: tuple[Any, ...]) -> Any:
        return call_unwatched(self._run_unwatched, values)

    def _run_unwatched(self, values: tuple[Any, ...]) -> Any:
        return self.graph.call_placed(values, self._check_inputs(values))

    def _note_quick_call(self, given: tuple[Any, ...]) -> None:
        """From the second call on that has passed; see Note [Quick calls]."""
        self._noted += 1
        if self._noted == 2:
            self._straight = straight_code(self._function, self._graph_name, _DO_NOTHING)
        if 1 < self._noted <= MOST_WRITTEN and self._straight is not None:
            scope = dict(zip(self._names, given, strict=True))
            modules = frozenset(name for name, value in scope.items() if isinstance(value, nn.Module))
            kept = tuple(self._checked[scope[name]][name] for name in modules)
            self._quick = self._tree_for(modules).quick_call(scope, self._straight, kept) or self._quick

    def __repr__(self) -> str:
        return f"<saved function {self.name}, compiled for {self.graph.artifact.kind}>"


def _quickly_bound(signature: inspect.Signature) -> tuple[int, tuple[str, ...]]:
    """How many arguments by position are one each, and the names of ``*args`` and ``**kwargs`` behind them, for
    functions that have no other parameters. Else a number that no call has."""
    parameters = signature.parameters.values()
    one = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [p for p in parameters if p not in one]
    plain = [p.kind for p in more] in ([], _GATHERED[:1], _GATHERED)
    return (len(one), tuple(p.name for p in more)) if plain else (sys.maxsize, ())


def _is_for_every_call(row: Any, modules: Container[str]) -> bool:
    """Rows about values that a caller passes, and about training modes; the rest of a module that is an argument is
    looked at once."""
    path, kind, _ = row
    inside = path[0][1] in modules and any(step[1] in ("_modules", "config") for step in path[1:])
    return not inside or path[-1][1] == "training" or kind == "tensor"


def _global(form: Any) -> Any:
    if isinstance(form, dict) and "helpers" in form:
        return types.SimpleNamespace(**DYNAMO_HELPERS)
    value = value_from_json(form)
    if isinstance(value, types.ModuleType) and value.__name__ == "torch.autograd.profiler":
        # Asked, from torch 2.15 on, whether to call helpers, which do nothing here.
        return types.SimpleNamespace(**{**vars(value), "_is_profiler_enabled": False})
    return value


def _outside(described: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Global variables that are no data, from the module that the function was in."""
    wanted = [name for name in described["outside"] if name not in known]
    if not wanted:
        return {}
    module = described["module"]
    found = sys.modules.get(module)
    if found is None and module not in ("", "__main__"):
        found = importlib.import_module(module)
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing:
        raise KeyError(
            f"the function reads the global variables {', '.join(missing)} of the module {module!r}; pass them by "
            "namespace={...}"
        )
    return {name: getattr(found, name) for name in wanted}


def _check_sources(sources: Any) -> None:
    """Raise :class:`PackageError` where the lines of a traced function are others in a module that is loaded here."""
    lines: dict[str, list[bytes] | None] = {}
    for module, first, last, digest in sources:
        if module not in lines:
            file = getattr(sys.modules.get(module), "__file__", None)
            lines[module] = Path(file).read_bytes().splitlines() if file and os.path.isfile(file) else None
        text = lines[module]
        if text is not None and hashlib.sha256(b"\n".join(text[first - 1 : last])).hexdigest() != digest:
            raise PackageError(
                f"the source of {module}, lines {first} to {last}, has changed since the function was compiled; "
                "compile it again, or pass check_sources=False"
            )


hide_from_dynamo(SavedFunction.__call__, "the kernels of a saved function are no part of a graph")
