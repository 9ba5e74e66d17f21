"""Small changes of ATen graphs: another constant, operand, operator, type, layout, user, or one step more or less.

A change is a record, so that a graph can be changed by some of those that were drawn for it: what is shrunk is a list.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["Mutation", "apply", "draw_mutation", "look_at"]

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUMBERS = (0, 1, -1, 2, 0.5, -0.25, -1e4, 1e4, -math.inf, math.inf, torch.finfo(torch.float32).min, 1e-6)

#: Operators of one signature, any of which may stand where another does.
_FAMILIES: tuple[tuple[Any, ...], ...] = (
    tuple(getattr(aten, name).Tensor for name in ("lt", "le", "gt", "ge", "eq", "ne")),
    tuple(getattr(aten, name).Scalar for name in ("lt", "le", "gt", "ge", "eq", "ne")),
    tuple(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    (aten.tril.default, aten.triu.default),
    (aten.sum.dim_IntList, aten.mean.dim),
    (aten.amax.default, aten.amin.default),
    tuple(getattr(aten, n).default for n in ("exp", "sigmoid", "tanh", "relu", "neg", "abs", "sqrt", "rsqrt", "erf")),
    tuple(getattr(aten, name).default for name in ("round", "floor", "ceil", "trunc")),
    tuple(getattr(aten, name).Tensor for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    tuple(getattr(aten, name).default for name in ("logical_and", "logical_or", "logical_xor")),
    (aten.maximum.default, aten.minimum.default),
    (aten._softmax.default, aten._log_softmax.default),
    (aten.any.dim, aten.all.dim),
)
_PLACES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_FAMILY = {target: family for family in _FAMILIES for target in family}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. ``node`` is named; ``place``: which argument of it (a number or a keyword), if one is meant;
    ``value``: the new argument, or the name of a node, an operator or a step in :data:`_STEPS`."""

    kind: str
    node: str
    place: int | str = 0
    value: Any = None

    def __str__(self) -> str:
        return f"{self.kind} {self.node}[{self.place}]: {self.value}"


def look_at(gm: GraphModule, tensors: Sequence[torch.Tensor]) -> None:
    """Write what each node is, for these inputs, into ``meta["seen"]``: raises what eager mode does."""

    class Looking(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            if n.target in _UNCHECKED:
                _UNCHECKED[n.target](*self.fetch_args_kwargs_from_env(n))
            value = super().run_node(n)
            n.meta["seen"] = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
            return value

    with torch.no_grad():
        Looking(gm).run(*tensors)


def _check_attention(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    query, key, value = args[:3]
    mask, (batch, heads, queries, width) = kwargs.get("attn_mask"), query.shape
    if any(each.stride(-1) != 1 or each.dtype != query.dtype for each in args[:3]):
        raise ValueError("rows with gaps")
    if key.shape != value.shape or (*key.shape[:2], key.shape[3]) != (batch, heads, width):
        raise ValueError("other sizes")
    if mask is not None and (mask.dim() not in (2, 4) or mask.stride(-1) != 1 or mask.dtype != query.dtype):
        raise ValueError("another mask")
    if mask is not None:
        mask.expand(batch, heads, queries, key.shape[2])


def _check_attention_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    _check_attention(args[1:4], kwargs)
    query, rows = args[1], (args[0], args[4], args[5][..., None].expand(args[1].shape))
    if any(each.shape != query.shape or each.dtype != query.dtype for each in rows):
        raise ValueError("other sizes")


def _check_packed(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    x, weight, *group, scales = args
    if not (x.is_contiguous() and weight.is_contiguous() and scales.is_contiguous()) or x.dim() != 2:
        raise ValueError("rows with gaps")
    if group and (x.shape[1] % group[0] or scales.shape != (x.shape[1] // group[0], weight.shape[0], 2)):
        raise ValueError("other scales")
    if 2 * weight.shape[1] != x.shape[1] * (1 if group else 2) or (not group and scales.shape != weight.shape[:1]):
        raise ValueError("other sizes")


def _check_pooled(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    image, places = args[1], args[-1]
    if places.shape != args[0].shape or places.min() < 0 or places.max() >= image.shape[-1] * image.shape[-2]:
        raise ValueError("other places")


def _check_groups(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    ends = kwargs["offs"] if "offs" in kwargs else args[2]
    if (ends.diff() < 0).any() or ends[0] < 0 or ends[-1] != args[0].shape[0]:
        raise ValueError("other groups")


def _check_batch_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    x, *channels, training = args[:6]
    if not training and (channels[2] is None or channels[3] is None):
        raise ValueError("no statistics")
    if any(each is not None and (each.shape != x.shape[1:2] or not each.is_contiguous()) for each in channels):
        raise ValueError("other channels")


def _check_batch_norm_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    rows, x, weight, *running, mean, invstd, training = args[:8]
    read = (mean, invstd) if training else running
    if rows.shape != x.shape or any(each is None for each in read):
        raise ValueError("no statistics")
    _check_batch_norm((x, weight, None, *read, training), kwargs)


#: Calls below the checks of torch's own functions, which read any memory if operands don't fit.
_UNCHECKED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _check_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _check_attention_backward,
    aten._weight_int8pack_mm.default: _check_packed,
    aten._weight_int4pack_mm_for_cpu.default: _check_packed,
    aten.max_pool2d_with_indices_backward.default: _check_pooled,
    aten._grouped_mm.default: _check_groups,
    aten.native_batch_norm.default: _check_batch_norm,
    aten.native_batch_norm_backward.default: _check_batch_norm_backward,
}


# --- steps that are put between a value and who reads it --------------------------------------------------------


def _step(*calls: tuple[Any, tuple[Any, ...]]) -> Callable[[Graph, Node], Node]:
    def write(graph: Graph, x: Node) -> Node:
        for target, more in calls:
            x = graph.call_function(target, (x, *more))
        return x

    return write


def _cast(dtype: torch.dtype) -> Callable[[Graph, Node], Node]:
    def write(graph: Graph, x: Node) -> Node:
        made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        return graph.call_function(aten._to_copy.default, (made,), {"dtype": x.meta["seen"][1]})

    return write


def _turned(graph: Graph, x: Node) -> Node:
    made = graph.call_function(aten.transpose.int, (x, -1, -2))
    made = graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
    return graph.call_function(aten.transpose.int, (made, -1, -2))


def _first_expanded(graph: Graph, x: Node) -> Node:
    shape = x.meta["seen"][0]
    made = graph.call_function(aten.slice.Tensor, (x, -1, 0, 1))
    return graph.call_function(aten.expand.default, (made, list(shape)))


def _hidden(graph: Graph, x: Node) -> Node:
    return graph.call_function(aten.mul.Tensor, (x, graph.call_function(aten.gt.Scalar, (x, 0))))


def _two_readers(graph: Graph, x: Node) -> Node:
    twice = graph.call_function(aten.mul.Tensor, (x, 2))
    return graph.call_function(aten.sub.Tensor, (twice, x))


def _by_place(graph: Graph, x: Node) -> Node:
    size, dtype = x.meta["seen"][0][-1], x.meta["seen"][1]
    places = graph.call_function(aten.arange.start_step, (1, size + 1, 1), {"dtype": dtype})
    return graph.call_function(aten.mul.Tensor, (x, places))


def _halved_in_place(graph: Graph, x: Node) -> Node:
    graph.call_function(aten.mul_.Tensor, (x, 0.5))
    return x


def _row_in_place(graph: Graph, x: Node) -> Node:
    graph.call_function(aten.fill_.Scalar, (graph.call_function(aten.select.int, (x, 0, 0)), 0.25))
    return x


_ANY = {
    "clone": _step((aten.clone.default, ())),
    "detach": _step((aten.detach.default, ())),
    "flip": _step((aten.flip.default, ([-1],))),
    "flip the first": _step((aten.flip.default, ([0],))),
    "roll": _step((aten.roll.default, ([1], [-1]))),
    "other memory": _turned,
    "the first, expanded": _first_expanded,
    "a part": _step((aten.slice.Tensor, (-1, 0, 1))),
    "all but one": _step((aten.slice.Tensor, (-1, 1, 1 << 62))),
    "tril": _step((aten.tril.default, ())),
    "tril below": _step((aten.tril.default, (-1,))),
    "transposed": _step((aten.transpose.int, (-1, -2))),
    "transposed firsts": _step((aten.transpose.int, (0, 1))),
}
_OF_NUMBERS = {
    "negative": _step((aten.neg.default, ())),
    "plus 1": _step((aten.add.Tensor, (1,))),
    "times -0.5": _step((aten.mul.Tensor, (-0.5,))),
    "times 3": _step((aten.mul.Tensor, (3,))),
    "half": _step((aten.div.Tensor, (2,))),
    "positive part": _step((aten.relu.default, ())),
    "absolute": _step((aten.abs.default, ())),
    "clamped": _step((aten.clamp.default, (-0.75, 1.5))),
    "tanh": _step((aten.tanh.default, ())),
    "by its sign": _hidden,
    "by place": _by_place,
    "two readers": _two_readers,
    "bfloat16 and back": _cast(torch.bfloat16),
    "float64 and back": _cast(torch.float64),
    "whole numbers and back": _cast(torch.int32),
    "halved in place": _halved_in_place,
    "a row in place": _row_in_place,
}
_OF_BOOLS = {"not": _step((aten.logical_not.default, ()))}
_STEPS: dict[str, Callable[[Graph, Node], Node]] = {**_ANY, **_OF_NUMBERS, **_OF_BOOLS}


# --- drawing ----------------------------------------------------------------------------------------------------


def draw_mutation(gm: GraphModule, draw: random.Random) -> Mutation | None:
    """A change of this graph, which :func:`look_at` has seen; ``None`` if there is none of the kind that was drawn.

    The kind is drawn first, and then one of the nodes that can be changed so: what only few nodes have (a diagonal, a
    number that hides) is changed as often as what all have.
    """
    kind = draw.choice(_RARE if draw.random() < 0.1 else _KINDS)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    draw.shuffle(calls)
    return next(filter(None, (kind(node, draw) for node in calls)), None)


def _is_dim(node: Node, place: int) -> bool:
    return "dim" in _schema(node)[place].name if _schema(node) else False


def _schema(node: Node) -> Any:
    return node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()


def _number(node: Node, draw: random.Random) -> Mutation | None:
    """Another constant."""
    places = [n for n, value in enumerate(node.args) if _is_constant(value)]
    if not places or not _schema(node):
        return None
    place = draw.choice(places)
    value: Any = node.args[place]
    return Mutation("constant", node.name, place, _other(value, _schema(node)[place], draw))


def _fraction(node: Node, draw: random.Random) -> Mutation | None:
    """Another number where there is a fraction, or an infinity."""
    places = [n for n, value in enumerate(node.args) if isinstance(value, float)]
    if not places or not _schema(node):
        return None
    place = draw.choice(places)
    value: Any = node.args[place]
    return Mutation("constant", node.name, place, draw.choice((*_NUMBERS, -value, 2 * value, value + 1, value / 2)))


def _is_constant(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(each, int) for each in value)
    return isinstance(value, int | float)


def _other(value: Any, argument: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list | tuple):
        changed = list(value)
        k = draw.randrange(len(changed))
        if draw.random() < 0.4:
            j = draw.randrange(len(changed))
            changed[k], changed[j] = changed[j], changed[k]
        elif draw.random() < 0.3 and "dim" in argument.name:
            changed.pop(k)
        else:
            changed[k] += draw.choice((-1, 1))
        return changed
    if "dim" in argument.name:
        return draw.choice([n for n in range(-4, 4) if n != value])
    if str(argument.type) in ("int", "Optional[int]") or "int" in str(argument.type).lower():
        return value + draw.choice((-1, 1))
    return draw.choice((*_NUMBERS, -value, 2 * value, value + 1, value / 2))


def _keyword(node: Node, draw: random.Random) -> Mutation | None:
    """Another number of a keyword, or one where none is given."""
    names = [each.name for each in _schema(node) if each.kwarg_only and "float" in str(each.type)]
    names += [name for name, value in node.kwargs.items() if isinstance(value, int | float) and name not in names]
    numbers = (0.0, *map(float, _NUMBERS))
    return Mutation("default", node.name, draw.choice(names), draw.choice(numbers)) if names else None


def _moved(node: Node, draw: random.Random) -> Mutation | None:
    """As many elements, which begin elsewhere."""
    known = node.target is aten.slice.Tensor and all(isinstance(each, int) for each in node.args[2:4])
    return Mutation("moved", node.name, 2, draw.choice((-1, 1, 4))) if known and len(node.args) > 3 else None


def _another_part(node: Node, draw: random.Random) -> Mutation | None:
    """One more result, which is another one of the same call."""
    if node.target is not operator.getitem:
        return None
    return Mutation("another part", node.name, draw.choice([n for n in range(4) if n != node.args[1]]))


def _another_view(node: Node, draw: random.Random) -> Mutation | None:
    """The same operator on other dimensions, of as many elements."""
    shape = (node.meta.get("seen") or ((),))[0]
    operands = [place for place, each in _operands(node) if each.meta["seen"][0] == shape]
    if len(shape) < 3 or not operands or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    return Mutation("another view", node.name, draw.choice(operands), tuple(draw.sample(range(len(shape)), len(shape))))


def _default(node: Node, draw: random.Random) -> Mutation | None:
    """Another value than the default of an argument that is not given."""
    schema = _schema(node)
    left = [
        (each.name if each.kwarg_only else n, each)
        for n, each in enumerate(schema)
        if isinstance(each.default_value, int | float)
        and not (each.kwarg_only and isinstance(each.default_value, bool))  # how a call is made, not what it gives
        and each.name not in node.kwargs
        and (each.kwarg_only or n == len(node.args))
    ]
    if not left:
        return None
    place, argument = draw.choice(left)
    return Mutation("default", node.name, place, _other(argument.default_value, argument, draw))


def _swap(node: Node, draw: random.Random) -> Mutation | None:
    """Two operands exchanged."""
    places = [n for n, value in enumerate(node.args) if isinstance(value, Node)]
    if len(places) < 2:
        return None
    first, second = draw.sample(places, 2)
    return Mutation("exchange", node.name, first, second)


def _family(node: Node, draw: random.Random) -> Mutation | None:
    """Another operator."""
    others = [target for target in _FAMILY.get(node.target, ()) if target is not node.target]
    return Mutation("operator", node.name, 0, draw.choice(others)) if others else None


def _operands(node: Node) -> list[tuple[int, Node]]:
    return [(n, v) for n, v in enumerate(node.args) if isinstance(v, Node) and v.meta.get("seen")]


def _step_before(node: Node, draw: random.Random) -> Mutation | None:
    """A step between an operand and this node."""
    operands = _operands(node)
    if not operands:
        return None
    place, operand = draw.choice(operands)
    names = [*_ANY, *(_OF_BOOLS if operand.meta["seen"][1] == torch.bool else _OF_NUMBERS)]
    return Mutation("step before", node.name, place, draw.choice(names))


def _other_operand(node: Node, draw: random.Random) -> Mutation | None:
    """Another value of the same sizes and type."""
    operands = _operands(node)
    if not operands:
        return None
    place, operand = draw.choice(operands)
    before = []
    for each in node.graph.nodes:
        if each is node:
            break
        if each is not operand and each.meta.get("seen") == operand.meta["seen"]:
            before.append(each.name)
    return Mutation("other operand", node.name, place, draw.choice(before)) if before else None


def _without(node: Node, draw: random.Random) -> Mutation | None:
    """The first operand of the same sizes in place of this node."""
    same = [place for place, each in _operands(node) if each.meta["seen"] == node.meta.get("seen")]
    return Mutation("without", node.name, draw.choice(same)) if same else None


def _returned(node: Node, draw: random.Random) -> Mutation | None:
    """One more result."""
    return Mutation("returned", node.name) if node.meta.get("seen") else None


def _cast_constant(node: Node, draw: random.Random) -> Mutation | None:
    """Another type of a copy or a constant."""
    dtype = node.kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype) and not (node.target in _PLACES and node.meta.get("seen")):
        return None
    others = (*_FLOATS, torch.int32, torch.int64, torch.bool, torch.int8, torch.uint8)
    return Mutation("default", node.name, "dtype", draw.choice([each for each in others if each is not dtype]))


_Kind = Callable[[Node, random.Random], "Mutation | None"]
_RARE: tuple[_Kind, ...] = (_moved, _another_part, _another_view)
_KINDS: tuple[_Kind, ...] = (
    *(_number, _fraction, _default, _default, _swap, _family, _family, _step_before, _step_before, _step_before),
    *(_other_operand, _without, _returned, _cast_constant, _keyword),
)


# --- applying ---------------------------------------------------------------------------------------------------


def apply(gm: GraphModule, mutation: Mutation) -> None:
    """Change the graph, if the nodes that are named are there: another change may have taken them away."""
    named = {node.name: node for node in gm.graph.nodes}
    node = named.get(mutation.node)
    if node is None or (mutation.kind == "other operand" and mutation.value not in named):
        return
    reads = isinstance(mutation.place, int) and mutation.kind not in ("default", "operator", "returned", "another part")
    if reads and mutation.place >= len(node.args):  # type: ignore[operator]
        return
    _APPLY[mutation.kind](node, mutation, named)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def _set(node: Node, mutation: Mutation, value: Any) -> None:
    if isinstance(mutation.place, str):
        node.kwargs = {**node.kwargs, mutation.place: value}
        return
    args = list(node.args)
    args[mutation.place : mutation.place + 1] = [value]
    node.args = tuple(args)


def _do_exchange(node: Node, mutation: Mutation, _: Any) -> None:
    args = list(node.args)
    first, second = int(mutation.place), mutation.value
    if second < len(args):
        args[first], args[second] = args[second], args[first]
    node.args = tuple(args)


def _do_step(node: Node, mutation: Mutation, _: Any) -> None:
    operand: Any = node.args[mutation.place]  # type: ignore[index]
    if isinstance(operand, Node) and operand.meta.get("seen"):
        with node.graph.inserting_before(node):
            _set(node, mutation, _STEPS[mutation.value](node.graph, operand))


def _do_without(node: Node, mutation: Mutation, _: Any) -> None:
    operand = node.args[mutation.place]  # type: ignore[index]
    if isinstance(operand, Node):
        node.replace_all_uses_with(operand)


def _do_return(node: Node, _mutation: Mutation, _: Any) -> None:
    (output,) = node.graph.find_nodes(op="output")
    results: Any = output.args[0]
    output.args = ([*results, node],)


def _do_move(node: Node, mutation: Mutation, _: Any) -> None:
    first, last = (int(each) + mutation.value for each in node.args[2:4])  # type: ignore[arg-type]
    node.args = (*node.args[:2], first, last, *node.args[4:])


def _do_part(node: Node, mutation: Mutation, named: Any) -> None:
    with node.graph.inserting_after(node):
        part = node.graph.call_function(operator.getitem, (node.args[0], mutation.place))
    _do_return(part, mutation, named)


def _do_view(node: Node, mutation: Mutation, _: Any) -> None:
    operand: Any = node.args[mutation.place]  # type: ignore[index]
    if not (isinstance(operand, Node) and operand.meta.get("seen")):
        return
    graph, shape = node.graph, list(operand.meta["seen"][0])
    with graph.inserting_before(node):
        seen = graph.call_function(aten.reshape.default, (operand, [shape[dim] for dim in mutation.value]))
    _set(node, mutation, seen)
    with graph.inserting_after(node):
        back = graph.call_function(aten.reshape.default, (node, shape))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _do_target(node: Node, mutation: Mutation, _: Any) -> None:
    node.target = mutation.value


_APPLY: dict[str, Callable[[Node, Mutation, dict[str, Node]], None]] = {
    "constant": lambda node, mutation, _: _set(node, mutation, mutation.value),
    "default": lambda node, mutation, _: _set(node, mutation, mutation.value),
    "exchange": _do_exchange,
    "operator": _do_target,
    "step before": _do_step,
    "other operand": lambda node, mutation, named: _set(node, mutation, named[mutation.value]),
    "without": _do_without,
    "returned": _do_return,
    "moved": _do_move,
    "another part": _do_part,
    "another view": _do_view,
}
