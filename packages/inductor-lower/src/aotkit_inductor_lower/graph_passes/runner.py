"""The ordered list of graph passes, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule

from .._torch_compat import lazy_graph_module
from ..errors import UnknownPassError
from ..options import LowerOptions
from .channels_last import prefer_channels_last
from .common_subexpressions import merge_common_subexpressions
from .fold_uniform import fold_uniform_values
from .fuse_attention import fuse_attention, fuse_masked_attention
from .merge_splits_and_cats import join_splits_and_cats
from .reinplace import write_in_place
from .remove_noops import remove_noops
from .reuse_reductions import reuse_reductions
from .simplify import simplify

__all__ = ["GRAPH_PASSES", "GraphPass", "pass_names", "run_graph_passes"]


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A named pass. ``run`` changes a graph that the runner owns and returns how many rewrites it made; it stops at
    ``fuel`` rewrites. ``after`` names passes that must come earlier in the list. ``fast`` runs instead under
    ``numerics="fast"``."""

    name: str
    run: Callable[[Graph, int], int]
    after: tuple[str, ...] = ()
    fast: Callable[[Graph, int], int] | None = None


GRAPH_PASSES: tuple[GraphPass, ...] = (
    GraphPass("remove-noops", remove_noops),
    GraphPass("fold-uniform", fold_uniform_values, after=("remove-noops",)),
    GraphPass("attention", fuse_attention, after=("remove-noops",), fast=fuse_masked_attention),
    GraphPass("simplify", simplify, after=("remove-noops", "fold-uniform")),
    GraphPass("splits-and-cats", join_splits_and_cats, after=("simplify",)),
    GraphPass("reuse-reductions", reuse_reductions, after=("simplify",)),
    GraphPass("common-subexpressions", merge_common_subexpressions, after=("simplify", "splits-and-cats")),
    GraphPass("channels-last", prefer_channels_last, after=("common-subexpressions",)),
    GraphPass("write-in-place", write_in_place, after=("common-subexpressions", "channels-last")),
)


def pass_names() -> tuple[str, ...]:
    """The names that ``LowerOptions.disable`` knows, in the order in which the passes run."""
    return tuple(each.name for each in GRAPH_PASSES)


def check_order(passes: Sequence[GraphPass]) -> None:
    """Raises ``ValueError`` if a pass stands before one it must come after, or if a name is used twice."""
    seen: set[str] = set()
    for each in passes:
        missing = [name for name in each.after if name not in seen]
        if missing or each.name in seen:
            raise ValueError(f"pass {each.name} must come after {', '.join(missing) or 'nothing of its own name'}")
        seen.add(each.name)


def run_graph_passes(gm: GraphModule, options: LowerOptions, passes: Sequence[GraphPass] = GRAPH_PASSES) -> GraphModule:
    """The graph with all passes run that ``options`` does not disable. ``gm`` itself stays as it is.

    Raises :class:`UnknownPassError` for a disabled name that is no pass.
    """
    check_order(passes)
    unknown = sorted(set(options.disable) - {each.name for each in passes})
    if unknown:
        known = ", ".join(each.name for each in passes)
        raise UnknownPassError(f"there is no pass named {', '.join(unknown)} to leave out; the passes are {known}")
    chosen = [each for each in passes if each.name not in options.disable]
    if not chosen or has_inner_mutation(gm):
        return gm
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    source = next(node for node in gm.graph.nodes if node.op == "output")
    graph.output(returned).meta.update(source.meta)
    _write_numbers(graph)
    fuel = options.fuel if options.fuel is not None else 1 << 62
    for each in chosen:
        run = each.fast if options.numerics == "fast" and each.fast is not None else each.run
        made = run(graph, fuel)
        fuel -= made
        if made:
            drop_dead_nodes(graph)
    drop_dead_nodes(graph)
    return lazy_graph_module(gm, graph)


def _write_numbers(graph: Graph) -> None:
    """Bools in the place of integers become these: eager's operators take them, Python functions do not."""
    for node in graph.nodes:
        given = (*node.args, *node.kwargs.values())
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(isinstance(arg, bool | list) for arg in given):
            continue
        types = {a.name: str(a.type) for a in schema.arguments}
        named = zip(types.values(), node.args, strict=False)
        node.args = tuple(_as_number(arg) if "int" in type_ else arg for type_, arg in named)
        node.kwargs = {k: _as_number(arg) if "int" in types[k] else arg for k, arg in node.kwargs.items()}


def _as_number(arg: Any) -> Any:
    if isinstance(arg, bool):
        return int(arg)
    return [_as_number(item) for item in arg] if isinstance(arg, list) else arg


def drop_dead_nodes(graph: Graph) -> None:
    """torch's elimination, which looks at the operator of every node, where there is something to eliminate."""
    if any(not node.users and node.op not in ("placeholder", "output") for node in graph.nodes):
        graph.eliminate_dead_code()


def has_inner_mutation(gm: GraphModule) -> bool:
    """Whether something but copies into inputs writes memory. Such graphs are lowered as they are."""
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            target = node.args[0] if node.args else None
            if schema.name != "aten::copy_" or getattr(target, "op", None) != "placeholder":
                return True
    return False
