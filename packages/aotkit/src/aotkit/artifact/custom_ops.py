"""The custom operators that a graph calls, as a saved function or a package names them: schemas and digests of their
Python.

Note [Operators of the user's in a saved function]
    A saved function calls such an operator by its name, and what it computes is what the loading process defines. But
    its fake kernel and its gradient were looked at when the graph was compiled. So both sides have to agree on the
    schema and on the source of the Python functions that ``torch.library.custom_op`` was given; an operator that was
    defined in another way has to be listed in the option ``cacheable`` with a version when the function is saved. A
    package, which has no gradients and may outlive a library of operators in C++, does with the schema there.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from aotkit_cache import Uncacheable

from ..errors import PackageError

__all__ = ["COLLECTIVES", "TORCHS_OWN", "check_operators", "operators_of"]

# Operators of other namespaces run code that no version of torch names.
TORCHS_OWN = frozenset({"aten", "prims", "prim", "prim_ops", "inductor", "rngprims", "quantized", "mkldnn", "c10d"})

#: torch's as well; each call names its group, which the process that runs it must have.
COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd"})

_PARTS = ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn")


def operators_of(gm: torch.fx.GraphModule, versions: Sequence[str], needs_source: bool = True) -> list[dict[str, str]]:
    """One record per custom operator in ``gm`` and the graphs in it. ``versions``: see ``Options.cacheable``.

    If it ``needs_source``, raises :class:`Uncacheable` for one of which neither the source nor a version is known.
    """
    listed = dict(entry.partition("@")[::2] for entry in versions)
    found: dict[str, dict[str, str]] = {}
    for target in _targets(gm):
        name = target._schema.name
        if name.split("::")[0] in TORCHS_OWN or str(target) in found:
            continue
        digest = _digest(name)
        torchs_own = name.split("::")[0] in COLLECTIVES
        if needs_source and digest is None and not torchs_own and name.replace("::", ".") not in listed:
            raise Uncacheable(
                f"the graph calls the custom operator {name}, whose Python source is not known; list it in the option "
                "'cacheable' with a version of your own"
            )
        found[str(target)] = {
            "name": name,
            "overload": target._overloadname,
            "schema": str(target._schema),
            "source": digest or "",
        }
    return list(found.values())


def check_operators(records: Sequence[dict[str, str]]) -> None:
    """Raise :class:`PackageError` for an operator that this process does not have, or has in another form."""
    for record in records:
        namespace, _, name = record["name"].partition("::")
        packet: Any = getattr(getattr(torch.ops, namespace), name, None)
        overload = None if packet is None else getattr(packet, record["overload"], None)
        if overload is None:
            raise PackageError(
                f"the file calls the custom operator {record['name']}, which this process does not have; "
                "import the module that defines it first"
            )
        if str(overload._schema) != record["schema"]:
            raise PackageError(
                f"the custom operator {record['name']} has the schema {overload._schema} here, and had "
                f"{record['schema']} when the file was made; compile it again"
            )
        if record["source"] and _digest(record["name"]) != record["source"]:
            raise PackageError(
                f"the source of the custom operator {record['name']} has changed since the file was made; compile it "
                "again"
            )


def _targets(gm: torch.fx.GraphModule) -> Iterator[OpOverload]:
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                target = node.target
                if isinstance(target, torch._ops.OpOverloadPacket):
                    target = getattr(target, target.overloads()[0])
                if isinstance(target, OpOverload):
                    yield target


def _digest(name: str) -> str | None:
    """Digest of the sources of what defines an operator; ``None`` if it is not all of Python with a source."""
    module = sys.modules.get("torch._library.custom_ops")
    definition = None if module is None else module.OPDEFS.get(name)
    if definition is None:
        return None
    functions = [getattr(definition, part, None) for part in _PARTS]
    functions += [kernel for _, kernel in sorted(getattr(definition, "_backend_fns", {}).items(), key=_device)]
    digest = hashlib.sha256()
    for function in functions:
        if function is None:
            digest.update(b"\0none")
            continue
        try:
            text = inspect.getsource(inspect.unwrap(function))
        except (OSError, TypeError):
            return None
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()


def _device(entry: tuple[Any, Any]) -> str:
    return str(entry[0])
