"""What ``torch.compile(...).aot_compile(...)`` gave, in a file of ours that is read without Dynamo."""

from __future__ import annotations

import builtins
import dis
import hashlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..artifact.package_file import write_block
from ..artifact.saved_checks import identity_row, path_text
from ..artifact.torch_state import state_of_call
from ..artifact.values import NoForm, value_to_json
from ..driver.saved_by_torch import SavedByTorch
from ..driver.saved_function import DYNAMO_HELPERS, FORMAT
from ..driver.saved_graph import graph_to_sections
from ..errors import PackageError
from ..frontend.guard_rows import UnknownGuard, guard_rows

__all__ = ["block_of", "row_as_data", "save_compiled_function"]

_HELPERS = "torch._dynamo.utils"


def save_compiled_function(
    compiled: Callable[..., Any], path: str | os.PathLike[str], *, signing_key: bytes | str | None = None
) -> str:
    """Write a compiled function to a file, which is loaded without Dynamo by :func:`.load_compiled_function`::

        compiled = torch.compile(f, fullgraph=True, backend="aotkit").aot_compile(((x,), {}))
        aotkit.saved.save_compiled_function(compiled, "f.aotkit")

    Args:
        compiled: what ``aot_compile`` returned, for a function or for the ``forward`` of a module.
        path: the file to write, replaced if it exists. Parameters and buffers of modules are not in it.
        signing_key: at least 16 secret bytes, or characters; loading then wants the same.

    Returns ``path``. Raises ``TypeError`` for anything but a function compiled by this backend, :class:`PackageError`
    for what has no form in a file.
    """
    write_block(path, *block_of(compiled), signing_key)
    return os.fspath(path)


def block_of(compiled: Callable[..., Any], *, with_main: bool = False) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Named bytes and JSON metadata of a compiled function. ``with_main``: sources of the main program are compared as
    well where it is loaded, since it is the same there. Raises as :func:`save_compiled_function` does."""
    artifacts = getattr(compiled, "_artifacts", None)
    graph = getattr(artifacts, "compiled_fn", None)
    if artifacts is None or not isinstance(graph, SavedByTorch):
        raise TypeError(
            "save_compiled_function takes what torch.compile(..., backend='aotkit').aot_compile(...) returned, not a "
            f"{type(compiled).__name__}"
        )
    sections, meta = graph_to_sections(graph.graph)
    try:
        function = _function(artifacts, getattr(compiled, "_extra_globals", None) or {})
    except (NoForm, UnknownGuard) as error:
        raise PackageError(f"the compiled function can't be saved: it depends on {error}") from error
    function["sources"] = list(_sources(artifacts.source_info, {"torch"} if with_main else {"torch", "__main__"}))
    meta["function"] = function
    return sections, meta


def _function(artifacts: Any, namespace: dict[str, Any]) -> dict[str, Any]:
    from .._torch_compat import read_guards

    runtime = artifacts.runtime_env
    code = runtime.bytecode
    read = _names_read(code)
    known, outside = {}, []
    for name in sorted(read - {artifacts.backend_id}):
        if name in runtime.import_sources:
            module = runtime.import_sources[name]
            known[name] = {"helpers": None} if module == _HELPERS else {"module": module}
            if module == _HELPERS:
                _check_helpers(code, name)
        elif name in runtime.used_globals or name in namespace:
            value = namespace[name] if name in namespace else runtime.used_globals[name]
            try:
                known[name] = value_to_json(value)
            except NoForm:
                outside.append(name)
        else:
            outside.append(name)
    return {
        "format": FORMAT,
        "python": sys.implementation.cache_tag,
        "name": artifacts.original_code.co_qualname,
        "module": str(namespace.get("__name__", "")),
        "code": value_to_json(code),
        "graph": artifacts.backend_id,
        "globals": known,
        "outside": outside,
        "closure": _cells(code, runtime.closure or ()),
        "defaults": value_to_json(runtime.argdefs),
        "keyword_defaults": value_to_json(dict(runtime.kwdefaults or {}) or None),
        "state": value_to_json(state_of_call()),
        "checks": [
            row
            for row in _checks(read_guards(artifacts.guards_state).output_graph, artifacts)
            if row[0][0][1] not in code.co_freevars  # these are kept as they are
        ],
    }


def _cells(code: types.CodeType, closure: Any) -> list[Any]:
    """Values of variables of enclosing functions; ``None`` for those that were inlined and are not read any more."""
    read = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_DEREF", "LOAD_CLOSURE")}
    cells = []
    for name, cell in zip(code.co_freevars, closure, strict=True):
        try:
            cells.append(value_to_json(cell.cell_contents) if name in read else None)
        except NoForm as error:
            what = f"the variable {name!r} of an enclosing function, {error}; pass it as an argument"
            raise NoForm(what) from None
    return cells


def _checks(traced: Any, artifacts: Any) -> list[Any]:
    graph = artifacts.compiled_fn.graph
    inputs = frozenset(entry.source for entry in graph.contract.inputs)
    rows = []
    for path, kind, expected in artifacts.compiled_fn.identities:
        if kind == "unknown":
            raise UnknownGuard(f"the very object {expected}")
        rows.append([path, kind, expected])
    for path, kind, expected in guard_rows(traced.guards, traced.local_scope, inputs):
        rows.append(row_as_data(path, kind, expected))
    return rows


def row_as_data(path: Any, kind: str, expected: Any) -> list[Any]:
    """A row of a guard in the form that a file holds. Raises :class:`UnknownGuard` or :class:`NoForm`."""
    if kind == "identity":
        row = identity_row(path, expected)
        if row is None:
            raise UnknownGuard(f"the very object {path_text(path)}")
        return row
    if kind == "type":
        return [path, kind, [expected.__module__, expected.__qualname__]]
    if kind == "tensor":
        return [path, kind, [str(expected.dtype), list(expected.shape), str(expected.device), expected.requires_grad]]
    if kind == "keys":
        return [path, kind, [value_to_json(key) for key in expected]]
    return [path, kind, value_to_json(expected) if kind == "equal" else expected]


def _names_read(code: types.CodeType) -> set[str]:
    """Names that the code, or code within it, reads of its globals."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for step in dis.get_instructions(code):
        if step.opname.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_")):
            raise NoForm(f"the instruction {step.opname} in what Dynamo generated")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_read(constant)
    return {name for name in names if not hasattr(builtins, name)}


def _check_helpers(code: types.CodeType, alias: str) -> None:
    """Of Dynamo's helpers only those may be used that the loader has a version of. From torch 2.15 on Dynamo keeps the
    module that they are in in a local variable."""
    held = {("LOAD_GLOBAL", alias)}
    for step, following in itertools.pairwise(dis.get_instructions(code)):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        kind = "LOAD_GLOBAL" if step.opname == "LOAD_GLOBAL" else "LOAD_FAST" if "LOAD_FAST" in step.opname else ""
        if not any((kind, name) in held for name in names):
            continue
        if following.opname == "STORE_FAST":
            held.add(("LOAD_FAST", following.argval))
        elif following.argval not in DYNAMO_HELPERS:
            raise NoForm(f"Dynamo's helper {following.argval} at run time")


def _sources(info: Any, without: set[str]) -> Iterator[list[Any]]:
    """Digests of the lines of every function that was traced, ``without`` those of these packages."""
    for source in sorted(info.inlined_sources, key=lambda s: (s.module, s.firstlineno)):
        if source.module.split(".")[0] in without:
            continue
        file = getattr(sys.modules.get(source.module), "__file__", None)
        if file is not None and os.path.isfile(file):
            lines = Path(file).read_bytes().splitlines()[source.firstlineno - 1 : source.lastlineno]
            digest = hashlib.sha256(b"\n".join(lines)).hexdigest()
            yield [source.module, source.firstlineno, source.lastlineno, digest]
