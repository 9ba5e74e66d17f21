"""Arguments that overlap, one of them mutated: capture over one base that covers them all.

Note [Synthetic bases]
    ``f(a, x[:4], x[2:6])`` that writes to its second argument changes its third. A functional graph over three
    separate inputs cannot know. So the graph is captured over ``(x, a)`` instead: bases first, then the other
    arguments. Inside, the arguments are taken anew as views of the base, which functionalization keeps
    consistent; outside, the base is one mutated input like any other, and writing its new value back changes
    the caller's views, which share its memory. Which part of the base an argument is becomes part of the graph, so
    it is checked at each call. All arguments over one storage go into one base, also those that overlap no other:
    writing back the whole base would otherwise undo what is written to them.

    The base is the tensor that autograd knows as the base of all of them, or of those that require grad if the others
    lie within it (they were detached). Else it is a flat tensor over the storage, which is right where none of them
    requires grad. Arguments may have another dtype than the base: they are then views of it in their own dtype.
    Symbolic sizes of arguments that are no graph inputs any more are passed to the graph as integers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .base_views import base_of, common_base, dtype_name, root, take_member, view_of
from .contract import Dim, ViewSpec, bind_symbols, dims
from .dims import symbols_of
from .errors import UnsupportedOverlapError
from .inputs import BaseSpec, InputPlan, MemberView
from .operations.symbols import BindSymbol

__all__ = ["PreparedFunction", "graph_inputs", "plan_synthetic_bases"]


def plan_synthetic_bases(input_plan: InputPlan, flat_args: Sequence[Any], groups: Iterable[Iterable[int]]) -> InputPlan:
    """The plan with one synthetic base for each storage that one of ``groups`` names.

    Args:
        input_plan: from :func:`.prepare_inputs`.
        flat_args: all the caller's arguments.
        groups: arguments that overlap, one of them mutated, counted among the *distinct* arguments.

    Raises:
        UnsupportedOverlapError: no common base that autograd could see, or offsets that no base of their dtype has.
    """
    kept = input_plan.kept
    named = {kept[position] for group in groups for position in group}
    chosen = [group for group in input_plan.overlaps if named & set(group)]
    missing = named - {index for group in chosen for index in group}
    if missing:
        raise UnsupportedOverlapError(f"arguments {sorted(missing)} share their storage with no other argument")
    bases = tuple(_base_spec(group, flat_args) for group in chosen)
    return replace(input_plan, bases=bases, symbols=_symbols(bases, flat_args))


def _symbols(bases: Sequence[BaseSpec], flat_args: Sequence[Any]) -> tuple[BindSymbol, ...]:
    """Where the symbols are read by which the members are parts of their bases."""
    views = [member.view for base in bases for member in base.views]
    wanted = symbols_of(d for v in views for d in (*v.sizes, *v.strides, v.offset_delta))
    wanted |= symbols_of(base.numel for base in bases if base.flat)  # the size of the storage, which no member may tell
    if not wanted:
        return ()
    bound = {b.name: b for b in bind_symbols(flat_args)}
    if wanted - bound.keys():
        raise UnsupportedOverlapError(
            f"arguments share memory, one of them is mutated, and the sizes {sorted(wanted - bound.keys())} by which "
            "they are parts of it cannot be read from any argument; compile with static shapes"
        )
    found = [bound[name] for name in sorted(wanted)]
    return tuple(BindSymbol(b.name, f"in{b.input_index}", b.source, b.dim) for b in found)


def _base_spec(group: Sequence[int], flat_args: Sequence[Any]) -> BaseSpec:
    tensors = [flat_args[index] for index in group]
    base = root(tensors, [f"argument {i}" for i in group])
    views = tuple(MemberView(i, view_of(t, base, f"argument {i}")) for i, t in zip(group, tensors, strict=True))
    flat = base is not common_base(tensors)
    (numel,) = dims([base.numel()])
    return BaseSpec(views, dtype_name(base), numel, flat)


def graph_inputs(input_plan: InputPlan, flat_args: Sequence[Any]) -> list[Any]:
    """The values that a graph is captured over (and called with): bases, symbols, then the other distinct arguments.

    Takes real or fake tensors. Raises like :func:`plan_synthetic_bases`.
    """
    input_plan.select(flat_args)  # checks the number of arguments
    bases = []
    values = {s.symbol: s.read(flat_args[_index(s)]) for s in input_plan.symbols}
    symbolic = not all(isinstance(v, int) for v in values.values())
    for base in input_plan.bases:
        names = [f"in{index}" for index in base.members]
        members = [flat_args[i] for i in base.members]
        if symbolic:  # they are the very tensors that the plan was made for
            bases.append(root(members, names, base.flat))
        else:
            bases.append(base_of(members, [v.view for v in base.views], " ".join(names), base.flat, values))
    extra = (values[s.symbol] for s in input_plan.extra_symbols)
    return [*bases, *extra, *(flat_args[i] for i in input_plan.others)]


def _index(symbol: BindSymbol) -> int:
    return int(symbol.value.removeprefix("in"))


class PreparedFunction:
    """``function`` over flat arguments as a function of :func:`graph_inputs`, to be captured.

    After a run, ``returned_inputs`` holds the (output, argument) pairs where the function returned a member of
    a synthetic base itself, and ``restrided`` the members whose sizes or strides it changed in place, as they are in
    the end; :meth:`finish` adds them to the input plan.
    """

    def __init__(self, function: Callable[..., Any], input_plan: InputPlan) -> None:
        self.function = function
        self.input_plan = input_plan
        self.returned_inputs: tuple[tuple[int, int], ...] = ()
        self.restrided: tuple[MemberView, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        plan = self.input_plan
        first, end = len(plan.bases), len(plan.bases) + len(plan.extra_symbols)
        bases, others = inputs[:first], inputs[end:]
        values = dict(zip(plan.others, others, strict=True))
        symbols = {s.symbol: value for s, value in zip(plan.extra_symbols, inputs[first:end], strict=True)}
        symbols |= {s.symbol: values[_index(s)] for s in plan.symbols if s.source == "int"}
        members: dict[int, tuple[Tensor, ViewSpec, Any]] = {}
        for base, spec in zip(bases, plan.bases, strict=True):
            for member in spec.views:
                taken = take_member(base, member.view, symbols)
                members[member.index] = (taken, member.view, taken.storage_offset())
                values[member.index] = taken
        outputs = self.function(*plan.expand([values[i] for i in plan.kept]))
        changed = [_restrided(index, *member) for index, member in members.items()]
        self.restrided = tuple(m for m in changed if m is not None)
        identity = {id(tensor): index for index, (tensor, _, _) in members.items()}
        self.returned_inputs = tuple((i, identity[id(o)]) for i, o in enumerate(outputs) if id(o) in identity)
        return outputs

    def finish(self) -> InputPlan:
        """The input plan with what the last run showed, for :func:`.build_plan`."""
        return replace(self.input_plan, returned_inputs=self.returned_inputs, restrided=self.restrided)


def _restrided(index: int, tensor: Tensor, view: ViewSpec, begin: Any) -> MemberView | None:
    """How member ``index`` lies after the call, counted from where it began; ``None`` if as before."""
    sizes, strides = dims(tensor.size()), dims(tensor.stride())
    delta: Dim = dims([tensor.storage_offset() - begin])[0]
    if (sizes, strides, delta) == (view.sizes, view.strides, 0):
        return None
    if view.requires_grad:
        raise UnsupportedOverlapError(
            f"argument {index} shares memory with a mutated argument, requires grad, and its sizes or strides are "
            "changed in place; pass a clone of it"
        )
    return MemberView(index, replace(view, sizes=sizes, strides=strides, offset_delta=delta))
