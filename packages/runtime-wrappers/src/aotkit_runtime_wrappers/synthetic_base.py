"""Arguments that overlap, one of them mutated: capture over one base that covers them all.

Note [Synthetic bases]
    ``f(a, x[:4], x[2:6])`` that writes to its second argument changes its third. A functional graph over three
    separate inputs cannot know. So the graph is captured over ``(x, a)`` instead: bases first, then the other
    arguments. Inside, the arguments are taken anew as views of the base, which functionalization keeps
    consistent; outside, the base is one mutated input like any other, and writing its new value back changes
    the caller's views, which share its memory. Which part of the base an argument is becomes part of the graph, so
    it is checked at each call. All arguments over one storage go into one base, also those that overlap no other:
    writing back the whole base would otherwise undo what is written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .contract import ViewSpec
from .dims import evaluate, evaluate_all
from .errors import AliasingChangedError, UnsupportedOverlapError
from .inputs import BaseSpec, InputPlan, MemberView

__all__ = ["PreparedFunction", "base_of", "graph_inputs", "plan_synthetic_bases"]


def plan_synthetic_bases(input_plan: InputPlan, flat_args: Sequence[Any], groups: Iterable[Iterable[int]]) -> InputPlan:
    """The plan with one synthetic base for each storage that one of ``groups`` names.

    Args:
        input_plan: from :func:`.prepare_inputs`.
        flat_args: all the caller's arguments.
        groups: arguments that overlap, one of them mutated, counted among the *distinct* arguments.

    Raises:
        UnsupportedOverlapError: different dtypes, symbolic sizes, or no common base that autograd could see.
    """
    kept = input_plan.kept
    named = {kept[position] for group in groups for position in group}
    chosen = [group for group in input_plan.overlaps if named & set(group)]
    missing = named - {index for group in chosen for index in group}
    if missing:
        raise UnsupportedOverlapError(f"arguments {sorted(missing)} share their storage with no other argument")
    return replace(input_plan, bases=tuple(_base_spec(group, flat_args) for group in chosen))


def _base_spec(group: Sequence[int], flat_args: Sequence[Any]) -> BaseSpec:
    tensors = [flat_args[index] for index in group]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors}
    if len(dtypes) > 1:
        raise UnsupportedOverlapError(
            f"arguments {tuple(group)} share memory under different dtypes ({', '.join(sorted(dtypes))}) and one "
            "is mutated; pass a clone of one of them"
        )
    for index, tensor in zip(group, tensors, strict=True):
        if not all(isinstance(d, int) for d in (*tensor.size(), *tensor.stride(), tensor.storage_offset())):
            raise UnsupportedOverlapError(
                f"argument {index} shares memory with a mutated argument and has symbolic sizes; which part of the "
                "base it is has to be known at capture. Compile with static shapes, or pass a clone"
            )
    base = _root(tensors, [f"argument {i}" for i in group])
    views = tuple(MemberView(i, _view_of(t, base)) for i, t in zip(group, tensors, strict=True))
    flat = all(base is not tensor and base is not tensor._base for tensor in tensors)
    return BaseSpec(views, dtypes.pop(), base.numel(), flat)


def _view_of(member: Tensor, base: Tensor) -> ViewSpec:
    delta: Any = member.storage_offset() - base.storage_offset()
    dtype = str(member.dtype).removeprefix("torch.")
    return ViewSpec(dtype, tuple(member.size()), tuple(member.stride()), delta, member.requires_grad)


def _root(members: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """The tensor that all members are views of: as autograd has it, else a flat one over the storage."""
    roots = [m if m._base is None else m._base for m in members]
    if all(root is roots[0] for root in roots) and roots[0].dtype == members[0].dtype:
        return roots[0]
    if any(m.requires_grad for m in members):
        raise UnsupportedOverlapError(
            f"{', '.join(names)} share memory, one of them is mutated and one requires grad, but they are no views of "
            "one tensor as far as autograd knows; make them views of one tensor by torch operations, or pass clones"
        )
    storage = members[0].untyped_storage()
    count = storage.nbytes() // members[0].element_size()
    # Of a fake tensor this is a fake one again.
    return members[0].new_empty(0).set_(storage, 0, (count,), (1,))


def base_of(members: Sequence[Tensor], views: Sequence[ViewSpec], names: str) -> Tensor:
    """The synthetic base of ``members``, if each is still the part of it that the graph was captured for."""
    argument_names = names.split()
    first = members[0].untyped_storage()._cdata
    if any(m.untyped_storage()._cdata != first for m in members):
        raise AliasingChangedError(
            f"arguments {', '.join(argument_names)} shared memory when the graph was captured and do not now; capture "
            "the function again with these arguments"
        )
    base = _root(members, argument_names)
    for member, view, name in zip(members, views, argument_names, strict=True):
        if _view_of(member, base) != view:
            raise AliasingChangedError(
                f"argument {name} is another part of the memory it shares with {', '.join(argument_names)} than when "
                "the graph was captured; capture the function again with these arguments"
            )
    return base


def graph_inputs(input_plan: InputPlan, flat_args: Sequence[Any]) -> list[Any]:
    """The values that a graph is captured over (and called with): bases, then the other distinct arguments.

    Takes real or fake tensors. Raises like :func:`plan_synthetic_bases`.
    """
    input_plan.select(flat_args)  # checks the number of arguments
    bases = []
    for base in input_plan.bases:
        names = [f"in{index}" for index in base.members]
        bases.append(base_of([flat_args[i] for i in base.members], [v.view for v in base.views], " ".join(names)))
    return [*bases, *(flat_args[i] for i in input_plan.others)]


class PreparedFunction:
    """``function`` over flat arguments as a function of :func:`graph_inputs`, to be captured.

    After a run, ``returned_inputs`` holds the (output, argument) pairs where the function returned a member of
    a synthetic base itself; :meth:`finish` adds them to the input plan.
    """

    def __init__(self, function: Callable[..., Any], input_plan: InputPlan) -> None:
        self.function = function
        self.input_plan = input_plan
        self.returned_inputs: tuple[tuple[int, int], ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        plan = self.input_plan
        bases, others = inputs[: len(plan.bases)], inputs[len(plan.bases) :]
        values = dict(zip(plan.others, others, strict=True))
        members: dict[int, tuple[Tensor, ViewSpec]] = {}
        for base, spec in zip(bases, plan.bases, strict=True):
            for member in spec.views:
                members[member.index] = (_take(base, member.view), member.view)
                values[member.index] = members[member.index][0]
        outputs = self.function(*plan.expand([values[i] for i in plan.kept]))
        for index, (tensor, view) in members.items():
            if tuple(tensor.size()) != view.sizes or tuple(tensor.stride()) != view.strides:
                raise UnsupportedOverlapError(
                    f"argument {index} shares memory with a mutated argument and its own sizes or strides are changed "
                    "in place; pass a clone of it"
                )
        identity = {id(tensor): index for index, (tensor, _) in members.items()}
        self.returned_inputs = tuple((i, identity[id(o)]) for i, o in enumerate(outputs) if id(o) in identity)
        return outputs

    def finish(self) -> InputPlan:
        """The input plan with what the last run showed, for :func:`.build_plan`."""
        return replace(self.input_plan, returned_inputs=self.returned_inputs)


def _take(base: Tensor, view: ViewSpec) -> Tensor:
    member = base if view.requires_grad or not base.requires_grad else base.detach()
    sizes, strides, delta = (
        evaluate_all(view.sizes, {}),
        evaluate_all(view.strides, {}),
        evaluate(view.offset_delta, {}),
    )
    return member.as_strided(sizes, strides, base.storage_offset() + delta)
