"""Strides that writes must not change, and shapes that are changed in place.

Note [Writes keep strides]
    Functionalization replaces a write by a new value, which need not have the strides of the old one: ``masked_fill``
    of a transposed tensor is contiguous, and everything computed from a tensor with gaps is dense. In eager mode a
    write changes no strides. So a value that was dense is laid out again as it was (a copy, where strides did change).
    One with gaps has none from then on, but its dimensions in the same order. The strides that it has in eager mode are
    remembered: what ``reshape`` and ``contiguous`` give there, a view or a copy, is asked of an empty tensor with those
    strides, and what is a view only of the new values is copied.

Note [Shapes changed in place]
    When the version counter of a tensor has moved, autograd makes the gradient function of each of its views anew: in
    eager mode by strides, for functional tensors by taking the view again, of the tensor as it is now. After ``t_()``
    that is another view, and a wrong gradient. A change of shape writes nothing, so here it does not move the counter
    (:attr:`Layouts.reshapes` notes it instead). A *write* does, after it or before: a view is taken again when it is
    used for the first time after the write. Older views that are used after both, where a gradient is wanted, are
    refused. They are told from newer ones by the views that they were made by. So are older views that no strides
    describe (negated ones, parts of complex numbers): eager mode takes these again of the new shape, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import Unsupported
from .lazy_bits import has_lazy_bits, lazy_bits, same_with_bits
from .overlap import covers

__all__ = ["EXPANSIONS", "RESHAPES", "STRIDE_DEPENDENT", "Layouts", "before_reshapes", "view_exists",
           "without_expansion"]  # fmt: skip

RESHAPES = frozenset(("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"))
"""In-place operations that change sizes and strides and no element."""

EXPANSIONS = frozenset(("expand", "expand_as", "broadcast_to"))
"""Views that repeat elements, if they do anything."""

STRIDE_DEPENDENT = frozenset(
    ("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "contiguous", "as_strided")
)
"""Views whose existence, or elements, depend on the strides of what they are taken of."""


_NOT_BY_STRIDES = ("_neg_view", "_conj", "view_as_real", "view_as_complex", "view_dtype")


@dataclass(slots=True)
class Layouts:
    """What is known of layouts in one run; keys are storage identities.

    Attributes:
        reshapes: tensors that changed their shape in place, as often as they did, each with autograd's count by then.
        unseen: those of ``reshapes`` that require grad and changed where grad mode was off, unseen by autograd.
        reshaped: tensors that changed their shape in place while views of them were alive.
        written: storages that were written to while there were views of them.
        stale: those of ``reshaped`` whose older views are refused: the views by which they are made of their storage.
        relaid: storages with gaps that were written to, so that values have other strides than in eager mode, with
            sizes and strides there; without them where views lead to the tensor that was written to.
        strided: storages with gaps of which an ``as_strided`` view was taken.
        beyond: storages of which ``as_strided`` took a view that leads beyond the elements of another view.
        outside: storages of which ``as_strided`` took a view that leads beyond the elements of the whole tensor.
        moved: storages whose new values begin elsewhere than the memory does.
        grad_mode: as it was when the function was called.
        finished: the function has returned; what is done with its tensors now is no use of them.
    """

    reshapes: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    unseen: list[torch.Tensor] = field(default_factory=list)
    reshaped: dict[int, torch.Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    stale: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    relaid: dict[int, tuple[Any, Any] | None] = field(default_factory=dict)
    strided: set[int] = field(default_factory=set)
    beyond: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    finished: bool = False

    def reshape(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation of :data:`RESHAPES`; see Note [Shapes changed in place]."""
        target = args[0]
        if target.is_inference():
            return func(*args, **kwargs)
        if self.grad_mode and not torch.is_grad_enabled() and _has_history(target):
            raise Unsupported(
                f"a value of sizes {tuple(target.shape)} that requires grad is changed in shape in place "
                f"({func.__name__}) where grad mode is off",
                "its gradient keeps the old shape, and in eager mode reaches the wrong elements",
                "Use the operation that returns a new tensor instead (t(), unsqueeze(), ..)",
            )
        if torch.is_grad_enabled() and target.requires_grad and target._is_view():
            raise Unsupported(
                f"a view of sizes {tuple(target.shape)} is changed in shape in place ({func.__name__})",
                "autograd would take the gradient of it in the shape that it had before",
                "Use the operation that returns a new tensor instead (t(), unsqueeze(), ..)",
            )
        identity = compat.storage_identity(target)
        if identity in self.strided and self._wants_gradient(target):
            raise Unsupported(
                f"a tensor with gaps between its elements is changed in shape in place ({func.__name__}) "
                "after a view of it was taken by as_strided()",
                "autograd would take the gradient of the view of the elements in the gaps too",
                "Use the operation that returns a new tensor instead (t(), unsqueeze(), ..)",
            )
        before = target.dim()
        with torch.autograd._unsafe_preserve_version_counter(target), compat.with_lazy_bits_as_they_are():
            result = func(*args, **kwargs)
        if len(args) + len(kwargs) > 1 and func.__name__.startswith("squeeze_"):
            _check_squeezed(target, before)
        self.reshapes.append((target, torch.autograd._get_sequence_nr()))
        if target.requires_grad and not torch.is_grad_enabled():
            self.unseen.append(target)
        if compat.functional_views(compat.inner_wrapper(target)) > 0:
            self.reshaped[identity] = target
            if identity in self.written and self._wants_gradient(target):
                self.stale[identity] = compat.views_of_storage(compat.inner_wrapper(target))
        return result

    def count_reshapes(self, value: torch.Tensor) -> int:
        """By how much changes of shape would have moved the version counter of ``value``."""
        return sum(compat.share_version_counter(value, reshaped) for reshaped, _ in self.reshapes)

    def check_saved(self, functions: Iterable[Any]) -> None:
        """Refuse backward functions that saved a tensor before it changed its shape: they would get the new shape."""
        for function in functions if self.reshapes else ():
            number = function._sequence_nr()
            for saved in _saved_tensors(function):
                if any(saved is target and number < moment for target, moment in self.reshapes):
                    raise Unsupported(
                        "a value that the gradient needs is changed in shape in place before the backward",
                        "the backward fails in eager mode as well",
                        "Use the operation that returns a new tensor instead (t(), unsqueeze(), ..)",
                    )

    def view(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``name``, of :data:`STRIDE_DEPENDENT`; see Note [Writes keep strides]."""
        target = args[0]
        identity = compat.storage_identity(target)
        if identity not in self.relaid:
            result = func(*args, **kwargs)
            if name in ("view", "view_as") and result.dtype == target.dtype:
                _refuse_what_does_not_exist(target, result)
            if name == "as_strided":
                root = _root(target)
                dense = _layout(root)[1]
                if not dense:
                    self.strided.add(identity)
                if target._is_view() and not (_layout(target)[1] and covers(_plain(target), _plain(result))):
                    self.beyond.add(identity)
                if not (dense and covers(_plain(root), _plain(result))):
                    if compat.has_data_mutation(compat.inner_wrapper(target)):
                        raise _outside()
                    self.outside.add(identity)
            return result
        if name == "as_strided":
            raise _other_elements()
        result = func(*args, **kwargs)
        is_view = compat.storage_identity(result) == identity
        if is_view == _is_view_of(self.relaid[identity], name, func, args, kwargs):
            return result
        if not is_view:
            raise _not_told(name)
        memory_format = kwargs.get("memory_format", args[1] if name == "contiguous" and len(args) > 1 else None)
        return result.clone(memory_format=memory_format or torch.contiguous_format)

    def check_uses(self, values: Iterable[Any]) -> None:
        """Refuse values whose gradient functions autograd would make anew, wrongly, and views by ``as_strided`` of what
        lies elsewhere by now."""
        for value in values:
            if isinstance(value, list | tuple):
                self.check_uses(value)
            elif isinstance(value, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(value)):
                identity = compat.storage_identity(value)
                if identity in self.moved and compat.is_view_through(compat.inner_wrapper(value), "as_strided"):
                    raise _other_elements()
                if self._is_lost(value, identity):
                    raise _outside()
                if self._is_taken_again(value, identity):
                    raise _wrong_view()
                made_by = self.stale.get(identity)
                if made_by is not None and value.requires_grad and _is_older(value, made_by):
                    raise _wrong_view()

    def check_outputs(self, outputs: Iterable[Any]) -> None:
        """Refuse views whose gradient is another one in eager mode, where autograd makes their functions anew."""
        for output in outputs if self.outside or self.reshaped else ():
            if isinstance(output, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(output)):
                identity = compat.storage_identity(output)
                if self._is_lost(output, identity) and self._wants_gradient(output):
                    raise _outside()
                if self._is_taken_again(output, identity):
                    raise _wrong_view()

    def _is_lost(self, value: torch.Tensor, identity: int) -> bool:
        """Whether ``value`` looks at memory beside a tensor that was replaced by a new value since."""
        wrapper = compat.inner_wrapper(value)
        return (
            identity in self.outside
            and compat.has_data_mutation(wrapper)
            and compat.is_view_through(wrapper, "as_strided")
        )

    def _is_taken_again(self, value: torch.Tensor, identity: int) -> bool:
        """Whether eager mode takes the gradient of ``value``, a view without strides, of a shape that came later."""
        reshaped = self.reshaped.get(identity)
        if reshaped is None or not self._wants_gradient(value):
            return False
        wrapper = compat.inner_wrapper(value)
        strange = any(compat.is_view_through(wrapper, name) for name in _NOT_BY_STRIDES)
        return strange and _is_older(value, compat.views_of_storage(compat.inner_wrapper(reshaped)))

    def write(
        self, target: torch.Tensor, func: Callable[..., Any], args: Any, kwargs: Any, *, other_layout: bool = False
    ) -> Any:
        """Run an operation that writes to ``target``; see Note [Writes keep strides].

        ``other_layout``: also the new value of a contiguous tensor may lie otherwise (it is an ``out`` argument).
        """
        identity = compat.storage_identity(target)
        reshaped = self.reshaped.get(identity)
        if reshaped is not None:
            self._check_age(target, reshaped)
        root = _root(target)
        if root.requires_grad:
            _check_view_of_gradient(target, root)
        if identity in self.beyond and self._wants_gradient(root, target):
            raise _of_the_whole()
        if compat.functional_views(compat.inner_wrapper(root)) > 0:
            self.written.add(identity)
        keeps = root is target and not other_layout and _plain(root).is_contiguous()
        before = None if keeps else _layout(root)
        start = _plain(root).storage_offset()
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if not any(words in str(error) for words in ("Cannot view a tensor", "view size is not compatible")):
                raise
            raise _no_such_view(target, error) from error
        _restore_bits(root)
        if not compat.is_known(_plain(root).storage_offset() == start):
            self.moved.add(identity)
        if before is not None:
            self._restore(root, before)
            compat.sync(target)  # has the strides of the new value until the view is taken again
        if reshaped is not None and self._wants_gradient(target, reshaped):
            self.stale[identity] = compat.views_of_storage(compat.inner_wrapper(reshaped))
            self._check_age(target, reshaped)
        return result

    def _check_age(self, target: torch.Tensor, reshaped: torch.Tensor) -> None:
        """Refuse a write to a view that is older than the change of shape, where a gradient is wanted."""
        made_by = compat.views_of_storage(compat.inner_wrapper(reshaped))
        if self._wants_gradient(target, reshaped) and _is_older(target, made_by):
            raise _wrong_view()

    def _wants_gradient(self, *values: torch.Tensor) -> bool:
        return (self.grad_mode or torch.is_grad_enabled()) and any(value.requires_grad for value in values)

    def _restore(self, root: torch.Tensor, before: tuple[tuple[Any, ...], bool]) -> None:
        strides, dense = before
        compat.sync(root)
        wrapper = compat.inner_wrapper(root)
        if len(strides) != root.dim() or compat.unwrap_inner(wrapper).stride() == strides:
            return
        if compat.is_view_through(wrapper, "unfold") and not compat.is_base(wrapper):
            raise Unsupported(
                "windows made by unfold() of a tensor that is not contiguous are detached and written to",
                "the new values have other strides than the memory",
                "Make the tensor contiguous first",
            )
        if not dense:
            identity = compat.storage_identity(root)
            if identity in self.strided:
                raise _other_elements()
            self.relaid[identity] = (tuple(root.shape), strides) if compat.is_base(wrapper) else None
        order = sorted(range(root.dim()), key=lambda i: strides[i], reverse=True)
        back = [order.index(i) for i in range(root.dim())]
        with compat.below_functional_modes(), torch.no_grad():
            plain = compat.unwrap_inner(wrapper)
            ordered = plain.permute(order)
            if ordered.is_contiguous():
                return
            value = same_with_bits(ordered.contiguous().permute(back), *lazy_bits(plain))  # a copy has no bits
        compat.replace_value(wrapper, value)
        compat.sync(root)


def _check_squeezed(squeezed: torch.Tensor, before: int) -> None:
    """Refuse ``squeeze_(dim)`` of tensors with lazy bits that are not contiguous.

    Eager mode resizes such a tensor and writes its elements into the same memory anew, one after the other.
    """
    if squeezed.dim() == before or not has_lazy_bits(squeezed):
        return
    step: Any = 1
    for size, stride in zip(reversed(squeezed.shape), reversed(squeezed.stride()), strict=True):
        if not compat.is_known(stride == step):
            raise Unsupported(
                f"a conjugated or negated view with the strides {tuple(squeezed.stride())} is squeezed in place",
                "eager mode writes its elements into its memory anew, one after the other",
                "Use squeeze(), or squeeze_() before conj()",
            )
        step = step * size


def _restore_bits(root: torch.Tensor) -> None:
    """See Note [Lazy bits]."""
    wanted, plain = lazy_bits(root), _plain(root)
    if lazy_bits(plain) == wanted:
        return
    with compat.below_functional_modes(), torch.no_grad():
        value = same_with_bits(plain, *wanted)
    compat.replace_value(compat.inner_wrapper(root), value)
    compat.sync(root)


def _saved_tensors(function: Any) -> Iterator[Any]:
    """What a backward function saved, without what it refuses to give."""
    names = [name for name in dir(function) if name == "saved_tensors" or name.startswith("_saved_")]
    for name in names:
        try:
            saved = getattr(function, name)
        except RuntimeError:  # written to since, or freed; the backward says so
            continue
        yield from saved if isinstance(saved, list | tuple) else (saved,)


def _wrong_view() -> Unsupported:
    return Unsupported(
        "a tensor changes its shape in place, and is written to or has views that no strides describe; "
        "a view that is older than that is used",
        "its gradient would be taken of the wrong elements",
        "Use the operation that returns a new tensor instead (t(), unsqueeze(), ..)",
    )


def _other_elements() -> Unsupported:
    return Unsupported(
        "a tensor with gaps between its elements, or one that does not begin where its storage does, is written to "
        "and viewed by as_strided()",
        "the new values lie elsewhere, so that the view would show other elements",
        "Make it contiguous first, or use indexing",
    )


def _outside() -> Unsupported:
    return Unsupported(
        "a tensor is written to of which as_strided() takes a view beyond its elements",
        "the new value holds its elements only, and in eager mode the gradient becomes that of all the memory",
        "Pass the tensor that holds all of it, or use indexing",
    )


def _of_the_whole() -> Unsupported:
    return Unsupported(
        "a tensor is written to of which as_strided() took a view beyond the elements of another view",
        "from then on autograd takes it of the whole tensor in eager mode",
        "Use indexing, or as_strided() of the whole tensor",
    )


def _no_such_view(target: torch.Tensor, error: Exception) -> Unsupported:
    return Unsupported(
        f"a view of sizes {tuple(target.shape)} of a tensor that is not contiguous is written to",
        f"the new values have other strides, of which there is no such view ({str(error).splitlines()[0]})",
        "Make the tensor contiguous first",
    )


def _not_told(name: str) -> Unsupported:
    return Unsupported(
        f"a tensor with gaps between its elements is written to, and then {name}() taken of it",
        "the new values have other strides, and whether that is a view or a copy in eager mode is not known",
        "Make it contiguous first, or change a copy",
    )


def _is_view_of(layout: tuple[Any, Any] | None, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether ``func`` gives a view, where the tensor that its first argument is a view of has sizes and strides."""
    if layout is None:
        raise _not_told(name)
    target, *others = (compat.inner_wrapper(a) if isinstance(a, torch.Tensor) else a for a in args)
    with compat.below_functional_modes(), compat.untraced(), torch.no_grad():
        others = [compat.unwrap_inner(a) if isinstance(a, torch.Tensor) else a for a in others]
        source = compat.replay_views(target, compat.unwrap_inner(target).new_empty_strided(*layout))
        try:
            return bool(torch._C._is_alias_of(source, func(source, *others, **kwargs)))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:  # as in eager mode
            raise _not_told(name) from error


def _is_older(value: torch.Tensor, made_by: tuple[Any, ...]) -> bool:
    """Whether ``value`` is not made by the views ``made_by`` and then perhaps others."""
    return compat.views_of_storage(compat.inner_wrapper(value))[: len(made_by)] != made_by


def _check_view_of_gradient(target: torch.Tensor, root: torch.Tensor) -> None:
    """Refuse a write whose gradient autograd takes by ``as_strided`` of a gradient that begins elsewhere."""
    begins_at_zero = isinstance(root.storage_offset(), int) and root.storage_offset() == 0
    if not begins_at_zero and compat.is_view_through(compat.inner_wrapper(target), "as_strided"):
        raise Unsupported(
            "a view made by as_strided() of a tensor that does not begin where its storage does is written to",
            "its gradient would be taken of other elements",
            "Use indexing, or as_strided() of a clone",
        )


_IN_PLACE = re.compile(r"(T|Transpose|Unsqueeze|AsStrided)Backward[1-9]|SqueezeBackward[3-9]")


def before_reshapes(function: Any) -> Iterator[Any]:
    """A gradient function, and those of the same tensor before each of its last changes of shape in place."""
    while function is not None:
        yield function
        function = function.next_functions[0][0] if _IN_PLACE.fullmatch(function.name()) else None


def _has_history(target: torch.Tensor) -> bool:
    """Whether autograd knows how ``target`` was computed; not of an input as it came in."""
    own = target.grad_fn if target.requires_grad else None
    return own is not None and not isinstance(own, torch.autograd.function.BackwardCFunction)


def _root(target: torch.Tensor) -> torch.Tensor:
    """The tensor whose view ``target`` is, as far as autograd knows; else ``target``."""
    return target if target._base is None else target._base


def _plain(value: torch.Tensor) -> torch.Tensor:
    compat.sync(value)
    return compat.unwrap_inner(compat.inner_wrapper(value))


def _layout(root: torch.Tensor) -> tuple[tuple[Any, ...], bool]:
    """Strides, and whether they are dense."""
    plain = _plain(root)
    return plain.stride(), compat.is_dense(plain)


def _refuse_what_does_not_exist(target: torch.Tensor, view: torch.Tensor) -> None:
    """torch's tracing gives views that no strides describe, of tensors with a dimension of size one in their midst."""
    if any(isinstance(n, int) and n == 1 for n in target.shape) and not view_exists(_plain(target), view.shape):
        raise Unsupported(
            f"a tensor of sizes {tuple(target.shape)} is viewed with sizes {tuple(view.shape)}",
            "no strides reach its elements in that order; eager mode raises, too",
            "Use reshape() instead, which copies where it has to",
        )


def view_exists(plain: torch.Tensor, sizes: Iterable[Any]) -> bool:
    """Whether ``plain`` has a view of other sizes: each run of dimensions that one stride counts is split anew."""
    if 0 in plain.shape:
        return True
    runs: list[Any] = []
    step: Any = None
    for size, stride in zip(reversed(plain.shape), reversed(plain.stride()), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if runs and compat.is_known(stride == step):
            runs[-1] = runs[-1] * size
        else:
            runs.append(size)
        step = stride * size
    left = [size for size in sizes if not (isinstance(size, int) and size == 1)]
    for run in runs:
        count: Any = 1
        while left and not compat.is_known(count == run):
            count = count * left.pop()
        if not compat.is_known(count == run):
            return False
    return True


def without_expansion(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An operation of :data:`EXPANSIONS`; where it repeats no element, a view that may be written to exactly."""
    result = func(*args, **kwargs)
    source = args[0]
    return source.view(result.shape) if compat.is_known(result.numel() == source.numel()) else result
