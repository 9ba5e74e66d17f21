"""Where each output of the function comes from: fresh memory, an input, or memory shared with other outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import takewhile
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from . import _torch_compat as compat
from .custom_backward import carries_gradient, has_custom_backward
from .errors import Unsupported
from .inputs import FunctionInput
from .layouts import before_reshapes
from .overlap import covers
from .records import Dim, OutputKind, ViewSpec
from .symbols import dim, dims
from .wrap import below_functional_layer, from_functional

__all__ = [
    "OutputSource",
    "OutputSources",
    "carries_gradient",
    "gradient_reaches",
    "leads_beyond",
    "output_sources",
    "shares_storage",
    "through_custom_function",
    "view_spec",
]

_CONSTANTS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class OutputSource:
    """Where one output comes from: its kind, and the index of its base (see ``OutputInfo.base``).

    ``same_as`` is the index of an output that is the very same fresh tensor and comes from the graph.
    """

    kind: OutputKind
    base: int | None = None
    same_as: int | None = None


@dataclass(slots=True)
class OutputSources:
    """The sources of all outputs, and the intermediate bases they ask for."""

    sources: list[OutputSource] = field(default_factory=list)
    bases: list[torch.Tensor] = field(default_factory=list)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two functional tensors are views of one storage."""
    return compat.storage_identity(a) == compat.storage_identity(b)


def output_sources(inputs: Sequence[FunctionInput], outputs: Sequence[Any]) -> OutputSources:
    """Classify flat outputs (functional tensors, SymInts, constants)."""
    by_object = {id(i.value): i.index for i in inputs if i.is_tensor}
    by_storage: dict[int, int] = {}
    tensors = [i for i in inputs if i.is_tensor]
    for entered in sorted(tensors, key=lambda i: compat.storage_identity(i.value) != i.entry_storage):
        by_storage.setdefault(compat.storage_identity(entered.value), entered.index)
    left = {i.entry_storage for i in tensors} - by_storage.keys()
    result = OutputSources()
    groups: dict[int, list[int]] = {}
    for index, output in enumerate(outputs):
        source = _first_source(index, output, by_object, by_storage)
        if source.base is not None and has_custom_backward(output, inputs[source.base].value):
            _check_not_written(index, inputs[source.base])
            result.sources.append(OutputSource(OutputKind.FRESH))
            continue
        result.sources.append(source)
        if result.sources[-1].kind is OutputKind.FRESH:
            if left and compat.storage_identity(output) in left:
                raise Unsupported(
                    f"output {index} is a view of the storage that an input had before it was given another one",
                    "no argument looks at that storage after the call",
                    "Return a clone of the view",
                )
            groups.setdefault(compat.storage_identity(output), []).append(index)
    for members in groups.values():
        if len(members) > 1:
            _share(members, outputs, result)
    return result


def _first_source(index: int, output: Any, by_object: dict[int, int], by_storage: dict[int, int]) -> OutputSource:
    if output is None or isinstance(output, _CONSTANTS):
        return OutputSource(OutputKind.CONSTANT)
    if isinstance(output, torch.SymInt | torch.SymBool):
        return OutputSource(OutputKind.SYMINT)
    if compat.is_fake_tensor(output):
        raise Unsupported(
            f"output {index} shares the memory of another output, and both were computed from numbers alone",
            "the functional layer sees a tensor that no tensor went into when it is returned, not before",
            "Return a clone of one of them",
        )
    if not isinstance(output, torch.Tensor) or not compat.is_inner_wrapper(compat.inner_wrapper(output)):
        raise Unsupported(
            f"output {index} is a {type(output).__name__}",
            "a captured function returns strided tensors, ints, None, bools, floats and strings",
            "Return tensors, and register containers as pytrees so that they are flattened",
        )
    if output.layout is not torch.strided:
        raise Unsupported(
            f"output {index} has layout {output.layout}", "only strided tensors can be returned", "Return .to_dense()"
        )
    if id(output) in by_object:
        return OutputSource(OutputKind.INPUT, by_object[id(output)])
    base = by_storage.get(compat.storage_identity(output))
    if base is not None:
        return OutputSource(OutputKind.ALIAS_OF_INPUT, base)
    return OutputSource(OutputKind.FRESH)


def _check_not_written(index: int, entered: FunctionInput) -> None:
    if compat.has_data_mutation(compat.inner_wrapper(entered.value)):
        raise Unsupported(
            f"output {index} shares the memory of input {entered.index}, which is written to, and has a backward "
            "of its own (a user's autograd function, or a hook)",
            "the graph would have to return the caller's memory and write to it as well",
            "Return a clone of it",
        )


def _share(members: list[int], outputs: Sequence[Any], result: OutputSources) -> None:
    """Give the outputs ``members``, which share a storage, one base.

    Note [Choosing the base of outputs that share memory]
        The base has to hold every element of the others, and to carry their gradient. An output that is
        nobody's view serves best, because then eager's own aliasing is reproduced; else the tensor that
        autograd calls their base becomes an extra forward output; else any output that is large enough.

        The parts that one ``unbind``, ``split`` or ``chunk`` returns do not overlap, and autograd lets nobody write to
        them in place. They need no base; with one, the gradient of each part would fill a tensor of the base's size.
    """
    tensors = [outputs[i] for i in members]
    if _parts_of_one_operation(tensors):
        return
    owner = next((i for i in members if _is_nobodys_view(outputs[i]) and _can_be_base(outputs[i], tensors)), None)
    if owner is None:
        base = next((t._base for t in tensors if t._base is not None and _can_be_base(t._base, tensors)), None)
        if base is not None:
            for index in members:
                if not has_custom_backward(outputs[index], base):
                    result.sources[index] = OutputSource(OutputKind.ALIAS_OF_INTERMEDIATE, len(result.bases))
            result.bases.append(base)
            return
        owner = next((i for i in members if _can_be_base(outputs[i], tensors)), None)
    if owner is None:
        raise Unsupported(
            f"outputs {', '.join(map(str, members))} are views of one tensor that is not returned itself",
            "no tensor is known that covers all of them and carries their gradient",
            "Return the tensor they are views of as well, or return clones",
        )
    for index in members:
        if outputs[index] is outputs[owner] and index != owner:
            result.sources[index] = OutputSource(OutputKind.FRESH, same_as=owner)
        elif index != owner and not has_custom_backward(outputs[index], outputs[owner]):
            result.sources[index] = OutputSource(OutputKind.ALIAS_OF_OUTPUT, owner)


_SEVERAL_VIEWS = ("UnbindBackward", "SplitBackward", "SplitWithSizesBackward")


def _parts_of_one_operation(members: Sequence[torch.Tensor]) -> bool:
    """Whether autograd knows ``members`` as different results of one operation that returns several views."""
    if not all(carries_gradient(m) for m in members) or len({id(m) for m in members}) < len(members):
        return False
    function = members[0].grad_fn
    return (
        function is not None
        and function.name().startswith(_SEVERAL_VIEWS)
        and all(m.grad_fn is function for m in members)
        and len({m.output_nr for m in members}) == len(members)
    )


def _is_nobodys_view(output: torch.Tensor) -> bool:
    return output._base is None and compat.is_base(compat.inner_wrapper(output))


def _can_be_base(base: torch.Tensor, members: Sequence[torch.Tensor]) -> bool:
    if any(carries_gradient(m) for m in members) and not carries_gradient(base):
        return False
    plain = from_functional(base)
    if not compat.is_dense(plain):
        return False
    return all(m is base or covers(plain, from_functional(m)) or _is_cut_of(base, m) for m in members)


def _is_cut_of(base: torch.Tensor, member: torch.Tensor) -> bool:
    """Whether ``member``, whose size depends on data so that nothing is proven of it, was made of the whole ``base`` by
    view operations: none but ``as_strided`` leads beyond the elements of what it is taken of."""
    if not compat.depends_on_data(from_functional(member)) or not _is_nobodys_view(base):
        return False
    return not compat.is_view_through(compat.inner_wrapper(member), "as_strided")


def through_custom_function(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the gradient of ``value``, a view of ``base``, passes through a custom ``autograd.Function``.

    Taking the view again would give it another gradient.
    """
    seen: set[Any] = {base.grad_fn}
    waiting = [value.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        if isinstance(function, BackwardCFunction) or type(function).__name__ == "CppFunction":
            return function.name() != "_EnterBackward"
        seen.add(function)
        waiting.extend(parent for parent, _ in function.next_functions)
    return False


def leads_beyond(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether ``value`` was made of ``base`` by views of which one, by ``as_strided``, leads to elements that the view
    does not have which it is taken of."""
    wrapper = compat.inner_wrapper(value)
    if not compat.is_view_through(wrapper, "as_strided"):
        return False
    before, after = (compat.views_of_storage(compat.inner_wrapper(each)) for each in (base, value))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    if shared < len(before):
        # The base changed its shape since then: eager mode takes older views by strides, of the base as it is now.
        return False
    plain, start = from_functional(value), from_functional(base)
    with compat.untraced(), below_functional_layer(), torch.no_grad():
        sources = list(compat.sources_of_views(wrapper, "as_strided", start, len(before)))
        return any(not (compat.is_dense(source) and covers(source, plain)) for source in sources)


def gradient_reaches(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient given to ``value`` reaches ``base``, whose view it is.

    It does not if a view in between was taken under ``no_grad``. A view may be older than a change of the base's shape
    in place, which has a gradient function of its own.
    """
    if not carries_gradient(value) or base.grad_fn is None:
        return False
    ends = set(before_reshapes(base.grad_fn))
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        function = waiting.pop()
        if function in ends:
            return True
        if function is not None and function not in seen:
            seen.add(function)
            waiting.extend(parent for parent, _ in function.next_functions)
    return False


def view_spec(
    view: torch.Tensor,
    base: torch.Tensor,
    *,
    requires_grad: bool,
    under_no_grad: bool = False,
    detached: bool = False,
    own_version: bool = False,
    bits: tuple[bool, bool] | None = None,
) -> ViewSpec:
    """How plain tensor ``view`` is made of plain tensor ``base``; refuses what strides cannot tell.

    ``bits``: see Note [Lazy bits]; by default those of ``view``.
    """
    conj, neg = bits or (view.is_conj(), view.is_neg())
    return ViewSpec(
        dtype=str(view.dtype).removeprefix("torch."),
        sizes=dims(view.shape),
        strides=dims(view.stride()),
        offset_delta=_offset_delta(view, base),
        requires_grad=requires_grad,
        under_no_grad=under_no_grad,
        detached=detached,
        own_version=own_version,
        conj=conj,
        neg=neg,
    )


def _offset_delta(view: torch.Tensor, base: torch.Tensor) -> Dim:
    ratio = Fraction(base.element_size(), view.element_size())
    begin = base.storage_offset() * ratio.numerator
    if ratio.denominator == 1:
        return dim(view.storage_offset() - begin)
    if isinstance(begin, int) and begin % ratio.denominator == 0:
        return dim(view.storage_offset() - begin // ratio.denominator)
    raise Unsupported(
        f"a {base.dtype} tensor is viewed as {view.dtype}",
        "its offset in the storage is not known to be a whole number of the larger elements",
        "Return a copy instead of the view",
    )
