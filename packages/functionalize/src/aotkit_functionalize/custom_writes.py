"""Custom operators that write to their arguments.

Note [What a custom operator writes to]
    torch's mode makes ``op(x)``, which writes to ``x``, a higher-order call that is given the base of ``x`` and how
    ``x`` lies in the base's storage: sizes, strides and an offset, or a slice. Neither an element type nor lazy bits,
    and both ways of telling count from the start of the storage. But the base may begin elsewhere: an argument at each
    call, and any value once a pass puts an equal one in its place. So views are given to torch's mode as tensors of
    their own, and what they hold afterwards is written back through the view.

    What else the operator is given is the old value then. Where that may be memory that the operator writes to, eager
    mode shows it the new one, so this is refused; so are views that overlap, both written to. One tensor that is given
    twice to be written to is one base.

Note [What a kernel of the user's writes to]
    A launch of a Triton kernel is made functional by a copy of each tensor that the kernel writes to, one by one. By
    hand, the kernel sees through one argument what it wrote through another that shares memory with it; of the copies
    it does not. So this is refused, also for one tensor that is given twice: where the kernel reads it only before it
    writes there, the copies would do, but nothing says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import Unsupported
from .overlap import definitely_disjoint, in_disjoint_windows

__all__ = ["call_custom_writer", "is_custom_writer", "refuse_shared_memory"]


@lru_cache(maxsize=4096)
def is_custom_writer(func: Any) -> bool:
    """Whether ``func`` is an operator that writes to arguments and is functionalized by a higher-order call."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "prim", "prims"):
        return False
    return bool(func._schema.is_mutable) and not func._can_decompose() and compat.can_auto_functionalize(func)


def call_custom_writer(
    mode: compat.FunctionalTensorMode, run: Callable[..., Any], func: Any, args: Any, kwargs: Any
) -> Any:
    """``run(args, kwargs)``, torch's own way through the mode; see Note [What a custom operator writes to]."""
    given = _by_name(func, args, kwargs)
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    targets = list(_tensors(given.get(name) for name in written))
    _check_overlap(func, targets, _tensors(value for name, value in given.items() if name not in written))
    apart: dict[int, compat.FunctionalTensor] = {}
    for target in targets:
        if target._base is not None or not compat.is_base(target.elem):
            compat.sync(target)
            apart[id(target)] = compat.FunctionalTensor(compat.wrap_inner(compat.unwrap_inner(target.elem)), mode)
    if not apart:
        return _own_results(func, given, run(args, kwargs))
    result = run(_with(args, apart), _with(kwargs, apart))
    for target in targets:
        if id(target) in apart:
            compat.sync(apart[id(target)])
            compat.replace_value(target.elem, compat.unwrap_inner(apart[id(target)].elem))
    return _own_results(func, given, result)


def refuse_shared_memory(what: str, given: Mapping[str, Any], find_written: Callable[[], Iterable[str]]) -> None:
    """See Note [What a kernel of the user's writes to].

    Args:
        what: names the launch in the refusal.
        given: its arguments by name; tensors are functional.
        find_written: gives the names of those that it writes to. Asked only if some share memory.

    Raises :class:`Unsupported` if one that is written to may share memory with another argument.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, compat.FunctionalTensor)}
    storages = {name: compat.storage_identity(value) for name, value in tensors.items()}
    pairs = [(a, b) for a, b in combinations(tensors, 2) if storages[a] == storages[b]]
    shared = [(a, b) for a, b in pairs if not _are_apart(_plain(tensors[a]), _plain(tensors[b]))]
    written = set(find_written()) if shared else set()
    for pair in shared:
        if not written.isdisjoint(pair):
            raise Unsupported(
                f"{what} writes to memory that its arguments {pair[0]} and {pair[1]} may share",
                "captured, it writes to a copy of each, and reads through one what it did not write through the other",
                "Give it tensors that do not overlap",
            )


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


def _tensors(values: Iterable[Any]) -> Iterator[compat.FunctionalTensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, compat.FunctionalTensor):
            yield value


def _with(value: Any, apart: dict[int, compat.FunctionalTensor]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_with(item, apart) for item in value)
    if isinstance(value, dict):
        return {name: _with(item, apart) for name, item in value.items()}
    return apart.get(id(value), value)


def _own_results(func: Any, given: dict[str, Any], result: Any) -> Any:
    """``result`` with the arguments themselves where the schema says that these are returned."""
    returns = func._schema.returns
    names = {str(a.alias_info.before_set): a.name for a in func._schema.arguments if a.alias_info is not None}
    own = [given[names[str(r.alias_info.before_set)]] if r.alias_info is not None else None for r in returns]
    if all(value is None for value in own):
        return result
    if len(returns) == 1:
        return own[0]
    return type(result)(mine if mine is not None else item for mine, item in zip(own, result, strict=True))


def _check_overlap(
    func: Any, targets: list[compat.FunctionalTensor], others: Iterable[compat.FunctionalTensor]
) -> None:
    by_storage: dict[int, list[compat.FunctionalTensor]] = {}
    for target in targets:
        by_storage.setdefault(compat.storage_identity(target), []).append(target)
    for storage, members in by_storage.items():
        unlike = [m for k, m in enumerate(members) if all(m is not earlier for earlier in members[:k])]
        plain = [_plain(member) for member in unlike]
        pairs = [(a, b) for k, a in enumerate(plain) for b in plain[:k]]
        others = list(others)
        pairs += [(a, _plain(o)) for o in others if compat.storage_identity(o) == storage for a in plain]
        if not all(_are_apart(a, b) for a, b in pairs):
            raise Unsupported(
                f"{func} writes to memory that others of its arguments may share",
                "captured, it is given the old values of these",
                "Give it clones of the arguments that it reads, or write to one after the other",
            )


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    return definitely_disjoint(a, b) or in_disjoint_windows(a, b)


def _plain(value: compat.FunctionalTensor) -> torch.Tensor:
    compat.sync(value)
    return compat.unwrap_inner(value.elem)
