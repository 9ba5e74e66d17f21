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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .contract import Dim, ViewSpec, bind_symbols, dims
from .dims import evaluate, evaluate_all, symbols_of
from .errors import AliasingChangedError, UnsupportedOverlapError
from .inputs import BaseSpec, InputPlan, MemberView
from .member_views import take_member
from .operations import BindSymbol
from .overlap import byte_range

__all__ = ["PreparedFunction", "base_of", "graph_inputs", "plan_synthetic_bases"]


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
    base = _root(tensors, [f"argument {i}" for i in group])
    views = tuple(MemberView(i, _view_of(t, base, f"argument {i}")) for i, t in zip(group, tensors, strict=True))
    flat = base is not _common_base(tensors)
    (numel,) = dims([base.numel()])
    return BaseSpec(views, _dtype_name(base), numel, flat)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _view_of(member: Tensor, base: Tensor, name: str) -> ViewSpec:
    offset: Any = base.storage_offset()
    if member.dtype != base.dtype:
        offset = offset * base.element_size()
        if offset % member.element_size():
            raise UnsupportedOverlapError(
                f"{name} has dtype {member.dtype} and shares memory with a mutated argument of dtype {base.dtype}, "
                "which does not begin at a whole number of its elements; pass a clone of one of them"
            )
        offset = offset // member.element_size()
    (delta,) = dims([member.storage_offset() - offset])
    sizes, strides = dims(member.size()), dims(member.stride())
    bits = {"conj": member.is_conj(), "neg": member.is_neg()}
    return ViewSpec(_dtype_name(member), sizes, strides, delta, member.requires_grad, **bits)


def _common_base(members: Sequence[Tensor]) -> Tensor | None:
    """The tensor that autograd knows as the base of all members, or of those that require grad if it covers all."""
    roots = [m if m._base is None else m._base for m in members]
    if any(m.requires_grad and not r.requires_grad for m, r in zip(members, roots, strict=True)):
        return None  # a leaf over a part of the base: no gradient reaches it through the base
    if all(r is roots[0] for r in roots):
        same_dtype = all(m.dtype == roots[0].dtype for m in members)
        return roots[0] if same_dtype or _is_dense(roots[0]) else None
    with_grad = [r for r, m in zip(roots, members, strict=True) if m.requires_grad]
    if not with_grad or any(r is not with_grad[0] for r in with_grad):
        return None
    # The others were detached from it: the same memory, and no history.
    return with_grad[0] if _covers(with_grad[0], members) else None


def _covers(base: Tensor, members: Sequence[Tensor]) -> bool:
    """Whether the dense tensor ``base`` holds every element of ``members``; not where that depends on a symbol."""
    numbers = [n for t in (base, *members) for n in (*t.size(), *t.stride(), t.storage_offset())]
    if not all(isinstance(n, int) for n in numbers) or not _is_dense(base):
        return False
    low, high = byte_range(base)
    ranges = [byte_range(m) for m in members if m.numel()]
    return all(low <= first and end <= high for first, end in ranges)


def _root(members: Sequence[Tensor], names: Sequence[str], flat: bool | None = None) -> Tensor:
    """The tensor that all members are views of: as autograd has it, else a flat one over the storage.

    ``flat``: which of both it has to be.
    """
    common = None if flat else _common_base(members)
    if common is not None:
        return common
    if flat is False:
        raise AliasingChangedError(
            f"arguments {', '.join(names)} were views of one tensor when the graph was captured and are not now; "
            "capture the function again with these arguments"
        )
    if any(m.requires_grad for m in members):
        raise UnsupportedOverlapError(
            f"{', '.join(names)} share memory, one of them is mutated and one requires grad, but they are no views of "
            "one tensor as far as autograd knows; make them views of one tensor by torch operations, or pass clones"
        )
    # Of the smallest elements, so that the others are made of whole numbers of them.
    first = min(members, key=lambda m: m.element_size())
    storage = first.untyped_storage()
    count = storage.nbytes() // first.element_size()
    # Of a fake tensor this is a fake one again.
    return first.new_empty(0).set_(storage, 0, (count,), (1,))


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def base_of(
    members: Sequence[Tensor], views: Sequence[ViewSpec], names: str, flat: bool, symbols: Mapping[str, int]
) -> Tensor:
    """The synthetic base of ``members``, if each is still the part of it that the graph was captured for."""
    argument_names = names.split()
    first = members[0].untyped_storage()._cdata
    if any(m.untyped_storage()._cdata != first for m in members):
        raise AliasingChangedError(
            f"arguments {', '.join(argument_names)} shared memory when the graph was captured and do not now; capture "
            "the function again with these arguments"
        )
    base = _root(members, argument_names, flat)
    for member, view, name in zip(members, views, argument_names, strict=True):
        if _view_of(member, base, name) != (_with_values(view, symbols) if symbols else view):
            raise AliasingChangedError(
                f"argument {name} is another part of the memory it shares with {', '.join(argument_names)} than when "
                "the graph was captured; capture the function again with these arguments"
            )
    return base


def _with_values(view: ViewSpec, symbols: Mapping[str, int]) -> ViewSpec:
    return replace(
        view,
        sizes=evaluate_all(view.sizes, symbols),
        strides=evaluate_all(view.strides, symbols),
        offset_delta=evaluate(view.offset_delta, symbols),
    )


def graph_inputs(input_plan: InputPlan, flat_args: Sequence[Any]) -> list[Any]:
    """The values that a graph is captured over (and called with): bases, symbols, then the other distinct arguments.

    Takes real or fake tensors. Raises like :func:`plan_synthetic_bases`.
    """
    input_plan.select(flat_args)  # checks the number of arguments
    bases = []
    values = {s.symbol: _read(s, flat_args) for s in input_plan.symbols}
    symbolic = not all(isinstance(v, int) for v in values.values())
    for base in input_plan.bases:
        names = [f"in{index}" for index in base.members]
        members = [flat_args[i] for i in base.members]
        if symbolic:  # they are the very tensors that the plan was made for
            bases.append(_root(members, names, base.flat))
        else:
            bases.append(base_of(members, [v.view for v in base.views], " ".join(names), base.flat, values))
    extra = (values[s.symbol] for s in input_plan.extra_symbols)
    return [*bases, *extra, *(flat_args[i] for i in input_plan.others)]


def _read(symbol: BindSymbol, flat_args: Sequence[Any]) -> Any:
    value = flat_args[_index(symbol)]
    if symbol.source == "int":
        return value
    read = getattr(value, symbol.source)
    return read() if symbol.dim is None else read(symbol.dim)


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
