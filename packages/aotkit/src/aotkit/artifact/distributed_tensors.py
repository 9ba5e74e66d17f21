"""What a compile reads of meshes and of torch's distributed tensors, as parts of a cache key.

Note [Distributed tensors in a key]
    How a graph over distributed tensors is traced depends on the mesh: which groups its collectives name, and which
    part of a tensor this rank has, where parts are uneven or an operation counts from a rank's first row. So the key
    has the ranks of the mesh, this rank's place in it and the names of the groups; that of the mesh that it was cut out
    of, too, since a redistribution over several dimensions takes the group of a flattened mesh where there is one.
    The entries of two ranks therefore differ. What decides how operators are spread is torch's, unless a user
    registered a rule: such rules have no version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from aotkit_cache import Uncacheable

__all__ = ["describe_mesh", "is_mesh", "meshes_of", "state_of_distributed_tensors"]

_TOLD = ("_get_root_mesh", "_flatten_mapping", "_layout")


def is_mesh(value: Any) -> bool:
    """Whether ``value`` is a device mesh."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.DeviceMesh)


def meshes_of(values: Sequence[Any]) -> Iterator[Any]:
    """Meshes among a graph's inputs, and those that tensors among them are spread over."""
    for value in values:
        mesh = getattr(value, "device_mesh", None) if isinstance(value, torch.Tensor) else value
        if is_mesh(mesh):
            yield mesh


def describe_mesh(mesh: Any) -> dict[str, Any]:
    """A mesh as plain data; see Note [Distributed tensors in a key].

    Raises :class:`Uncacheable` for one that this process is not of, or that has no groups.
    """
    if not all(hasattr(mesh, name) for name in _TOLD):
        raise Uncacheable("meshes of this version of torch do not tell what they are cut out of")
    root = mesh._get_root_mesh()
    flattened = {name: _own(part) for name, part in sorted(root._flatten_mapping.items())}
    return {"mesh": _own(mesh), "of": _own(root), "flattened": flattened}


def _own(mesh: Any) -> dict[str, Any]:
    place = mesh.get_coordinate()
    names = getattr(mesh, "_dim_group_names", None)
    if place is None or names is None:
        raise Uncacheable(f"{mesh} is a mesh that this process is not of, or has no process groups")
    return {
        "device": mesh.device_type,
        "layout": str(mesh._layout),
        "ranks": mesh.mesh.tolist(),
        "dimensions": mesh.mesh_dim_names,
        "place": list(place),
        "groups": [[name, torch.distributed.get_backend(_group(name))] for name in names],
    }


def _group(name: str) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name)


def state_of_distributed_tensors(values: Sequence[Any], graph: str, allowed: Mapping[str, str]) -> dict[str, Any]:
    """What of torch's state decides how operators on distributed tensors are traced.

    Nothing, unless the graph's inputs ``values`` or its text have some. ``allowed``: see ``Options.cacheable``.
    Raises :class:`Uncacheable` where operators are spread by rules of a user's.
    """
    if next(meshes_of(values), None) is None and "torch.distributed.tensor" not in graph:
        return {}
    from torch.distributed import device_mesh
    from torch.distributed.tensor import DTensor, _random, _redistribute

    dispatcher = DTensor._op_dispatcher
    if theirs := next(_rules_of_users(dispatcher, allowed), None):
        raise Uncacheable(
            f"distributed tensors are spread by a rule of the user's for {theirs}, whose code no version of torch "
            "names; list the operator in the option 'cacheable' with a version of your own"
        )
    tracker = _random._rng_tracker
    return {
        "rank": [torch.distributed.get_rank(), torch.distributed.get_world_size()],
        "current": [describe_mesh(mesh) for mesh in device_mesh._mesh_resources.mesh_stack],
        "implicit_replication": dispatcher._allow_implicit_replication,
        "redistribution": [
            getattr(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", None),
            getattr(_redistribute, "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION", None),
            _compiles_for_all_ranks(),
        ],
        "random": None if tracker is None else [type(tracker).__qualname__, tracker.distribute_region_enabled],
    }


def _compiles_for_all_ranks() -> bool | None:
    """Whether Dynamo traces so that a graph serves all ranks; from torch 2.15 on the setting has moved."""
    homes: tuple[Any, ...] = (torch.compiler.config, getattr(torch.distributed, "config", None))
    return next((home.compile_on_one_rank for home in homes if hasattr(home, "compile_on_one_rank")), None)


def _rules_of_users(dispatcher: Any, allowed: Mapping[str, str]) -> Iterator[str]:
    """Operators whose rule (how they are spread, or run) is not torch's, and which ``allowed`` does not name."""
    propagator = dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    for table in (*(getattr(propagator, name, {}) for name in tables), dispatcher._custom_op_handlers):
        for operator, rule in table.items():
            name = operator._schema.name.replace("::", ".")
            if not _is_torchs(rule) and name not in allowed:
                yield name


def _is_torchs(rule: Any) -> bool:
    if isinstance(rule, functools.partial):  # as torch keeps what register_sharding was given
        return _is_torchs(rule.func) and all(_is_torchs(given) for given in rule.args)
    function = getattr(rule, "func", rule)  # of the record that torch keeps for rules by dimension
    return str(getattr(function, "__module__", "")).split(".")[0] == "torch"
