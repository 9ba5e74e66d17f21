"""Pass: custom operators that write to their arguments, and Triton kernels of the user's, are called as they are.

Capture makes ``op(x)``, which writes to ``x``, a higher-order call that is given ``x`` and returns its new value; what
runs it copies ``x`` first. Before that call. After the operator itself, on a copy of ``x`` where the old value is still
wanted, else on ``x``. An input is written to where nothing but the copy back into it comes after that.

Calls of operators with sizes that are not known stay, and so do values with gaps, of which no copy has the layout. A
call of a kernel is replaced if no old value of what it writes to is wanted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..ops.aten import is_view
from ..ops.positions import same_number
from ..passes import Pass, PassContext
from .node_facts import escaping_nodes, same_tensor_type
from .replace import fake_result, replace_node
from .written_views import WrittenViews, root_of, views_written_back

__all__ = ["LAUNCH_USER_KERNELS", "PASS", "call_custom_writers", "has_custom_writers", "launch_in_place"]

aten = torch.ops.aten
_WRAPPERS = (auto_functionalized, auto_functionalized_v2)


def has_custom_writers(gm: GraphModule) -> bool:
    """Whether the graph holds such calls. Looks at targets only."""
    return any(node.target in _WRAPPERS for node in gm.graph.nodes)


def call_custom_writers(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A new graph with as many of the calls as can be replaced by the operators themselves; ``gm`` without any."""
    if not has_custom_writers(gm):
        return gm
    graph = _copy(gm)
    for node in list(graph.nodes):
        if node.target in _WRAPPERS and _is_known(node):
            _replace(graph, node, ctx)
    graph.lint()
    return GraphModule(gm, graph)


def launch_in_place(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A new graph in which kernels write to what they are given, where nobody wants its old values; ``gm`` without
    calls of Triton kernels that copy what the kernels write to."""
    if not any(_is_kernel(node) for node in gm.graph.nodes):
        return gm
    graph = _copy(gm)
    for node in list(graph.nodes):
        if _is_kernel(node) and ctx.fuel.take():
            _launch(graph, node)
    _erase_copies_to_itself(graph)
    graph.lint()
    return GraphModule(gm, graph)


def _copy(gm: GraphModule) -> Graph:
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    source = next(iter(gm.graph.find_nodes(op="output")))
    graph.output(returned).meta.update(source.meta)
    return graph


def _is_kernel(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "triton_kernel_wrapper_functional"


def _launch(graph: Graph, node: Node) -> None:
    settings = dict(node.kwargs)
    names: Any = settings.pop("tensors_to_clone")
    given: Any = settings["kwargs"]
    written = [given[name] for name in names]
    place = {other: number for number, other in enumerate(graph.nodes)}
    escaping = escaping_nodes(graph)
    results = {user: given[user.args[1]] for user in node.users}
    if not all(_dies(base, node, place, escaping, 1, WrittenViews(base)) for base in written):
        return
    if not all(_lies_alike(user, base) for user, base in results.items()):
        return
    with graph.inserting_before(node):
        launch = graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), settings)
    launch.meta = {key: value for key, value in node.meta.items() if key != "val"}
    for user, base in results.items():
        user.replace_all_uses_with(base)
        graph.erase_node(user)
    graph.erase_node(node)


def _lies_alike(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return same_tensor_type(a, b) and same_number(x.storage_offset(), y.storage_offset())


def _erase_copies_to_itself(graph: Graph) -> None:
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if copy.args[0] is copy.args[1]:
            copy.replace_all_uses_with(copy.args[0])
            graph.erase_node(copy)


def _is_known(node: Node) -> bool:
    """Whether the operator takes plain arguments and all sizes are known."""
    if not isinstance(node.args[0], torch._ops.OpOverload):
        return False
    if any(user.target is not operator.getitem for user in node.users):
        return False  # an operator with the tag ``out``: its only result is returned as it is
    values = [used.meta.get("val") for used in node.all_input_nodes]
    if not values or not all(isinstance(value, FakeTensor) and _is_static(value) for value in values):
        return False
    if not any(name.endswith(("_storage_offset", "_slice_dim")) for name in node.kwargs):
        return True
    # Views told by where they lie in the storage of a base, as torch's own capture tells them.
    bases = [base.meta["val"] for base in _written(node)[0] if base is not None]
    return all(aten.is_non_overlapping_and_dense.default(b) and b.storage_offset() == 0 for b in bases)


def _is_static(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset()))


def _replace(graph: Graph, node: Node, ctx: PassContext) -> None:
    written, name = _written(node)
    place = {other: number for number, other in enumerate(graph.nodes)}
    in_place = _written_in_place(node, written, place, escaping_nodes(graph))
    copied = [base is not None and root_of(base) not in in_place for base in written]
    kept = [base for base, copy in zip(written, copied, strict=True) if base is not None and copy]
    # A copy of a tensor with gaps has another layout.
    if not all(aten.is_non_overlapping_and_dense.default(base.meta["val"]) for base in kept) or not ctx.fuel.take():
        return
    # Each in memory of its own: equal values of what was different memory may be one node.
    pairs = zip(written, copied, strict=True)
    targets = [_copy_before(graph, node, base) if base is not None and copy else base for base, copy in pairs]
    results = _call(graph, node, name, _with_written(node, targets))
    for user in list(node.users):
        value = results[user.args[1]]  # type: ignore[index]
        if value is not None:
            replace_node(user, value)
        graph.erase_node(user)
    graph.erase_node(node)
    for found in in_place.values():
        for result in found.results:
            result.replace_all_uses_with(found.root)
        for step in reversed(found.steps):
            graph.erase_node(step)
    _erase_copies_to_itself(graph)


def _copy_before(graph: Graph, node: Node, base: Node) -> Node:
    with graph.inserting_before(node):
        copy = graph.call_function(aten.clone.default, (base,), {"memory_format": torch.preserve_format})
    copy.meta = {key: value for key, value in base.meta.items() if key != "tensor_meta"}
    copy.meta["val"] = fake_result(copy)
    return copy


def _written_in_place(
    node: Node, written: list[Node | None], place: dict[Node, int], escaping: set[Node]
) -> dict[Node, WrittenViews]:
    """The values of whose memory the operator may write to its part, each with what becomes of it; Note [Views written
    to in place]."""
    # The older wrapper gives lists where it is given lists.
    news = {user.args[1]: user for user in node.users} if node.target is auto_functionalized_v2 else {}
    first = len(node.meta.get("val", written)) - len(written)
    by_root: dict[Node, list[tuple[Node, Node | None]]] = {}
    for position, base in enumerate(written, first):
        if base is not None:
            by_root.setdefault(root_of(base), []).append((base, news.get(position)))
    found: dict[Node, WrittenViews] = {}
    for root, pairs in by_root.items():
        whole = [base for base, _ in pairs] == [root]
        views = WrittenViews(root) if whole else views_written_back(pairs)
        if views is not None and _dies(root, node, place, escaping, len(pairs), views):
            found[root] = views
    return found


def _written(node: Node) -> tuple[list[Node | None], str]:
    """The tensors whose new values the call returns, and which of its arguments say how many stay as they are."""
    if node.target is auto_functionalized_v2:
        return list(node.kwargs["_all_bases"]), "_only_clone_these_bases"  # type: ignore[arg-type]
    found: list[Node | None] = []
    for name in _written_names(node):
        value = node.kwargs.get(name)
        found += list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[arg-type, list-item]
    return found, "_only_clone_these_tensors"


def _written_names(node: Node) -> list[str]:
    op: Any = node.args[0]
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _with_written(node: Node, targets: list[Node | None]) -> dict[str, Any]:
    """The call's arguments with these nodes, in the order of :func:`_written`, as what it writes to."""
    if node.target is auto_functionalized_v2:
        return {**node.kwargs, "_all_bases": targets}
    kwargs = dict(node.kwargs)
    left = iter(targets)
    for name in _written_names(node):
        value = kwargs.get(name)
        new = [next(left) for _ in value] if isinstance(value, list | tuple) else next(left)
        if name in kwargs:
            kwargs[name] = new
    return kwargs


def _dies(root: Node, call: Node, place: dict[Node, int], escaping: set[Node], count: int, views: WrittenViews) -> bool:
    """Whether nothing reads the old value after the call, and its memory belongs to this graph or is to be written.

    ``count``: so many of the call's arguments are memory of ``root`` to write to; the others must not be.
    """
    family = [root]
    for view in family:
        family += [user for user in view.users if _is_view_call(user) and user is not call and user not in family]
    if sum(used in family for used in _flat((call.args, call.kwargs))) > count:
        return False
    later = {user for view in family for user in view.users if place[user] > place[call]}
    later -= {*views.steps, *family}
    if root.op == "placeholder":
        back = {user for user in later if user.target is aten.copy_.default and user.args[0] is root}
        results = {root, *call.users, *views.steps}
        return bool(back) and later == back and escaping.isdisjoint(results)
    target = root.target
    fresh = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and not is_view(root)
    fresh = fresh or (target is operator.getitem and isinstance(root.args[0], Node) and _is_kernel(root.args[0]))
    return fresh and not later


def _flat(tree: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(tree, found.append)
    return found


def _is_view_call(node: Node) -> bool:
    return node.op == "call_function" and is_view(node)


def _call(graph: Graph, node: Node, untouched: str, arguments: dict[str, Any]) -> list[Node | None]:
    """The operator's call with views of what it writes to, traced by running the wrapper's own definition."""
    given = list(dict.fromkeys(_flat((node.args, arguments))))

    def run(*values: Any) -> list[Any]:
        env = dict(zip(given, values, strict=True))
        kwargs = torch.fx.map_arg(arguments, lambda used: env[used])
        wrapper: Any = node.target
        dense: Callable[..., Any] = wrapper.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
        return list(dense(node.args[0], **{untouched: ()}, **kwargs))

    fake = [used.meta["val"] for used in given]
    with torch.no_grad(), fake[0].fake_mode:
        traced = make_fx(run)(*fake)
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda used: env[used])
                env[inner].meta = {**{k: v for k, v in node.meta.items() if k != "val"}, **inner.meta}
    (output,) = traced.graph.find_nodes(op="output")
    return [env[result] if isinstance(result, Node) else None for result in output.args[0]]


PASS = Pass(
    "call-custom-writers",
    call_custom_writers,
    why="an operator that writes is called as it is, where nobody wants the old value no copy is made",
)
LAUNCH_USER_KERNELS = Pass(
    "launch-user-kernels",
    launch_in_place,
    why="kernels of the user's write to what they are given, not to copies",
)
