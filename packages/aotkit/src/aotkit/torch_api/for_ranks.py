"""One rank compiles a function for all ranks of a group: the others load it, and neither trace nor import Dynamo.

Note [A compile for all ranks]
    The first rank of the group compiles and writes the block that :func:`.save_compiled_function` would write to a file
    to the group's store, with what it assumed (Note [What ranks may differ in]). Every rank loads it, the first one,
    too; looks whether all of that holds for its own function, arguments and global variables; runs what comes before
    the graph, so that the graph's inputs are checked; and then tells the others, as ranks that compile do
    (Note [How ranks agree]). So either all have the function or all have an error, before any of them runs it.
"""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotkit_cache.sealed import seal
from aotkit_cache.stores import DistributedStore, own_signing_key

from ..artifact.saved_checks import code_digest, tree_of_rows
from ..artifact.values import same_json, value_to_json
from ..driver import ranks
from ..driver.saved_function import function_of_block
from ..environment import read_environment
from ..errors import CompileError, GuardError, RanksDisagree

if TYPE_CHECKING:
    from ..driver.saved_function import SavedFunction
    from ..options import Options

__all__ = ["compile_for_ranks"]

_ORIGIN = "what the first rank compiled"


def compile_for_ranks(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
    dynamic: bool | None = None,
    options: Options | None = None,
) -> SavedFunction:
    """Compile one call of a function or a module on the first rank of a group, for all of its ranks, each of which
    calls this with a function and arguments of its own::

        step = aotkit.saved.compile_for_ranks(model, (x,))
        step(model, x).sum().backward()

    Args:
        fn: a function, a method or a module, as :func:`compile_to_save` takes them: one graph, its backward included.
        args: example arguments; those of each rank have the sizes and types of the first one's.
        kwargs: those that are passed by name.
        group: a process group; the default one. With a single rank this is a compile and a load.
        dynamic: as of ``torch.compile``.
        options: of the compile; the environment's by default. ``rank_timeout``: seconds to wait for other ranks.

    Returns the loaded function, which takes a module as its first argument. Ranks on several machines need the same
    ``AOTKIT_CACHE_KEY``. Raises :class:`CompileError` for what can't be compiled, or not by one rank for another;
    :class:`PackageError` where the block can't run here, :class:`GuardError` where this rank's arguments or variables
    are others; and where that happens on another rank, :class:`RanksDisagree`.
    """
    chosen = options or read_environment().options()
    calls = dict(kwargs or {})
    exchange = ranks.Exchange.open(_name_of(group), chosen.rank_timeout)
    if exchange is None:
        data = _compiled(fn, args, calls, dynamic, chosen)
        return _loaded(data, fn, args, calls)
    try:
        data = _shared(exchange, lambda: _compiled(fn, args, calls, dynamic, chosen))
        function = _loaded(data, fn, args, calls)
    except Exception as error:
        if not isinstance(error, RanksDisagree):
            exchange.post_failure(f"{type(error).__name__}: {error}", False)
        raise
    collectives = function.graph.artifact.collectives()
    same = ranks.versions()
    exchange.post_rows([*same, *(c.call for c in collectives)], [*same, *map(str, collectives)])
    exchange.finish()
    if exchange.rank == 0:  # all ranks have loaded it
        _store_of(exchange).delete("function")
    return function


def _name_of(group: Any) -> str | None:
    """The name of the group, or ``None`` without one."""
    if group is None:
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        group = distributed.group.WORLD
    return str(torch.distributed.distributed_c10d._world.pg_names[group])  # a group made in Python knows no name


def _shared(exchange: ranks.Exchange, compiled: Callable[[], bytes]) -> bytes:
    """The block that the first rank gives to all; nothing, if it could not make one."""
    store = _store_of(exchange)
    if exchange.rank == 0:
        data = b""
        try:
            data = compiled()
        finally:
            store.put("function", data)
        return data
    if not exchange.wait_for(lambda: store.stat("function") is not None):
        raise CompileError(f"the first rank compiled nothing within {exchange.timeout:g} s")
    data = store.get("function") or b""
    if not data:
        exchange.finish()  # raises what the first rank says
        raise CompileError("the first rank compiled nothing")
    return data


def _store_of(exchange: ranks.Exchange) -> DistributedStore:
    return DistributedStore(exchange.store, prefix=exchange.prefix)


def _compiled(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: bool | None, options: Options
) -> bytes:
    from .compile_to_save import call_module, compile_keeping
    from .rank_guards import RankGuards
    from .save_compiled import block_of

    facts, kept = _facts_of(fn), RankGuards()
    compiled = compile_keeping(kept, fn, args, kwargs, dynamic=dynamic, options=options)
    rows = kept.facts(compiled, call_module if isinstance(fn, nn.Module) else getattr(fn, "__func__", fn))
    sections, meta = block_of(compiled, with_main=True)
    meta["ranks"] = {**rows, "function": facts}
    return seal(sections, meta, own_signing_key())


def _loaded(data: bytes, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> SavedFunction:
    """The function, if all that the first rank assumed holds here."""
    function, meta = function_of_block(data, _ORIGIN, own_signing_key(), None)
    assumed = meta["ranks"]
    mine = json.loads(json.dumps(_facts_of(fn)))
    for name, value in assumed["function"].items():
        if not same_json(mine.get(name), value):
            raise GuardError(f"{function.name} has other {name} on this rank than on the first one")
    rows = assumed["globals"]
    tree_of_rows(rows).check({name: importlib.import_module(name) for name in {path[0][1] for path, _, _ in rows}})
    if isinstance(fn, nn.Module):
        args = (fn, *args)
    tree_of_rows(assumed["arguments"]).check(function.arguments(*args, **kwargs))
    function.check_call(*args, **kwargs)
    return function


def _facts_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Code, defaults and variables of enclosing functions, to be compared; of a module all that is among the rows.

    Raises :class:`CompileError` for what has no form as data.
    """
    if isinstance(fn, nn.Module):
        return {}
    function: Any = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType):
        raise CompileError(f"one rank compiles a function, a method or a module for all, not a {type(fn).__name__}")
    try:
        return {
            "code": code_digest(function.__code__),
            "defaults": value_to_json(function.__defaults__),
            "keyword defaults": value_to_json(dict(function.__kwdefaults__ or {})),
            "variables of enclosing functions": [value_to_json(c.cell_contents) for c in function.__closure__ or ()],
        }
    except ValueError as error:
        raise CompileError(
            f"one rank can't compile {function.__qualname__} for the others: a default, or a variable of an enclosing "
            f"function, is no plain data ({error}); pass it as an argument"
        ) from error
