"""``create_graph=True``: gradients that are connected to what they depend on, and can be differentiated again.

Note [Second derivatives]
    A compiled backward is opaque to autograd. When it is run with grad mode on, it is not run at all: the gradients
    come from another compiled graph, which computes them from the graph's inputs, the saved tensors and the
    tangents, and has a backward of its own. That graph is made when it is first asked for, by the function that
    :class:`Gradients` holds; it has the same form as the first, so third derivatives work in the same way.

    Autograd has to know what the gradients depend on, so the inputs must be at hand as tensors with their history.
    Most are saved anyway. Parameters are found through the edges of the graph (``AccumulateGrad.variable``). Of other
    differentiable inputs the forward keeps the history without the memory: they are saved, and their values dropped
    at once by a pair of saved-tensor hooks (unless the user has such hooks, who would see them). Values that were not
    saved are looked for through weak references; the graph seldom needs them, and if it does and they are gone (or
    were written to), the second derivative is refused.

Note [A refusal has to be connected]
    Where no second graph can be made the compiled backward runs. If its gradients simply did not require grad,
    ``torch.autograd.grad(.., allow_unused=True)`` would answer ``None`` for a second derivative that is not zero. So
    they get a node whose backward raises, with edges to everything they may depend on. Where a second graph has
    derivatives of some gradients only, the others get such nodes: no derivative of those leads through these.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._torch_compat import autocast_enabled, saving_hooks
from .boxed import BoxedCallable
from .contract import GraphMetadata, InputKind
from .dims import evaluate_all
from .donated import keep_donated
from .errors import CallingConventionError, DoubleBackwardError
from .packed import unpacked
from .plan import CallSpec
from .runtime import without_autocast, write_late
from .tangents import filled

__all__ = ["GradientRequest", "Gradients", "refusing"]

_ADVICE = (
    "Run this part of the model in eager (torch.compiler.disable), or leave out create_graph=True if no second "
    "derivative is needed"
)


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """The values that a graph of gradients is asked for: see :class:`Gradients`.

    Attributes:
        inputs: of the graph; one whose value is gone is a tensor on the meta device.
        saved: tensors that the forward saved.
        tangents: those of the compiled backward that have come.
        symbols: values of the symbolic sizes.
        lost: inputs whose values are gone, and why.
        missing: numbers of the tangents that have not come, because the loss does not depend on their outputs.
    """

    inputs: tuple[Any, ...]
    saved: tuple[Tensor, ...]
    tangents: tuple[Tensor, ...]
    symbols: Mapping[str, int]
    lost: Mapping[int, str]
    missing: tuple[int, ...] = ()


@dataclass
class Gradients:
    """The gradients of a compiled graph as compiled graphs themselves, one per kind of call.

    Attributes:
        metadata: of the graph.
        compile: makes a boxed callable of ``[*inputs, *saved, *tangents]`` that returns one gradient or ``None`` per
            differentiable input, differentiable with respect to inputs and tangents that require grad.
    """

    metadata: GraphMetadata
    compile: Callable[[GradientRequest], BoxedCallable]
    _compiled: dict[Any, BoxedCallable | Exception] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, request: GradientRequest) -> BoxedCallable | Exception:
        """The callable for ``request``, or why there is none."""
        sizes = tuple(sorted(request.symbols.items()))
        key = (sizes, tuple(t.requires_grad for t in request.tangents), frozenset(request.lost), request.missing)
        found = self._compiled.get(key)
        if found is None:
            with self._lock:
                found = self._compiled.get(key)
                if found is None:
                    found = self._compiled[key] = self._make(request)
        return found

    def _make(self, request: GradientRequest) -> BoxedCallable | Exception:
        try:
            return self.compile(request)
        except Exception as error:  # noqa: BLE001  # first derivatives are right; told to who asks for a second
            # Kept for later calls, so without its traceback, which holds on to the tensors of this one.
            return DoubleBackwardError(
                str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            )


def remember(box: Sequence[Any], positions: Sequence[int]) -> list[tuple[Any, int]]:
    """Weak references to inputs that are not saved, with their versions."""
    return [(weakref.ref(t), -1 if t.is_inference() else t._version) for t in (box[i] for i in positions)]


def histories(box: Sequence[Any], positions: Sequence[int]) -> list[Tensor | None]:
    """Inputs to save for their history: those that are no leaves. Leaves are found by the edges."""
    if saving_hooks(False):
        return []
    return [None if t.is_leaf else t for t in (box[i] for i in positions)]


def drop_values(node: Any, first: int) -> None:
    """Keep of the saved tensors from number ``first`` on only what autograd knows of them."""
    if node is None:
        return
    for saved in node._raw_saved_tensors[first:]:
        try:
            saved.register_hooks(_described, _stand_in)
        except RuntimeError:  # nothing was saved: a leaf
            continue


def _described(value: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return value.size(), value.dtype, value.device


def _stand_in(description: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    size, dtype, device = description
    return torch.empty((), dtype=dtype, device=device).expand(size)


def gradients_with_history(
    call: CallSpec, backward: Any, gradients: Gradients | None
) -> Callable[[Any, list[Tensor | None]], tuple[Tensor | None, ...]]:
    """The function that emitted backwards call when grad mode is on; see the notes above."""

    def run(ctx: Any, tangents: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        saved = unpacked(ctx) if call.num_saved_tensors or call.kept_inputs else ()
        values, kept = saved[: call.num_saved_tensors], saved[call.num_saved_tensors :]
        inputs = _Inputs(call, gradients.metadata if gradients is not None else None, ctx)
        inputs.collect(values, kept)
        reason: Any = None
        symbols = dict(zip((b.symbol for b in call.backward_symbols), getattr(ctx, "symbols", ()), strict=True))
        if call.backward_mutated_inputs:
            reason = DoubleBackwardError("its backward writes to inputs")
        elif gradients is not None:
            request = inputs.request(gradients.metadata, values, tangents, symbols)
            compiled = gradients.get(request)
            if not isinstance(compiled, Exception):
                stand_ins = [inputs.histories.get(i, v) for i, v in enumerate(request.inputs)]
                ctx.maybe_clear_saved_tensors()
                return (None, *compiled([*stand_ins, *values, *request.tangents]))
            reason = compiled
        symints = getattr(ctx, "symints", ())
        late = ctx.late if call.backward_mutated_inputs else []
        box = [*symints, *values, *filled(call, tangents, symbols), *late]
        keep_donated(box, len(symints), call.donated, ())
        ctx.maybe_clear_saved_tensors()
        without = call.unreached([tangent is None for tangent in tangents])
        return _refusing(call, backward, box, late, ([*inputs.histories.values(), *tangents], without, reason))

    return run


class _Inputs:
    """The inputs of one call as far as they can be had in its backward."""

    def __init__(self, call: CallSpec, metadata: GraphMetadata | None, ctx: Any) -> None:
        self.call, self.metadata, self.ctx = call, metadata, ctx
        self.histories: dict[int, Tensor] = {}
        self.values: dict[int, Any] = {}

    def collect(self, saved: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Fill ``histories`` (differentiable inputs as autograd knows them) and ``values`` (as they were)."""
        call, ctx = self.call, self.ctx
        for position, value in zip(call.saved_inputs, saved, strict=False):
            if position >= 0:
                self.values[position] = value
        self.values |= dict(zip(call.scalar_inputs, getattr(ctx, "scalars", ()), strict=False))
        for position, (reference, version) in zip(call.unsaved_inputs, getattr(ctx, "unsaved", ()), strict=False):
            value = reference()
            if value is not None and (version < 0 or value._version == version):
                self.values[position] = value
        histories = dict(zip(call.kept_inputs, kept, strict=False))
        if call.keeps_values:
            self.values |= histories
        for position, (node, _) in zip(call.differentiable_inputs, ctx.next_functions, strict=False):
            known = self.values.get(position)
            history: Any = getattr(node, "variable", None)
            if not isinstance(history, Tensor):  # no leaf
                history = known if known is not None and known.requires_grad else histories.get(position)
            if history is not None:
                self.histories[position] = history

    def request(
        self,
        metadata: GraphMetadata,
        saved: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
        symbols: Mapping[str, int],
    ) -> GradientRequest:
        """What :meth:`collect` found, with stand-ins for what is gone."""
        inputs: list[Any] = []
        lost: dict[int, str] = {}
        for info in metadata.inputs:
            value = self.values.get(info.index)
            if info.kind is not InputKind.TENSOR or (isinstance(value, Tensor) and not value.is_meta):
                inputs.append(value)
                continue
            assert info.meta is not None
            sizes, strides = (evaluate_all(dims, symbols) for dims in (info.meta.sizes, info.meta.strides))
            dtype = getattr(torch, info.meta.dtype.removeprefix("torch."))
            inputs.append(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"))
            lost[info.index] = "it was not needed by the backward, and has been freed or written to since the forward"
        for index in self.call.differentiable_inputs:
            if index not in self.histories:
                raise DoubleBackwardError(
                    f"differentiable input {index} of a compiled graph was freed, or is no leaf as it was when the "
                    f"graph was captured, so gradients cannot be connected to it. {_ADVICE}"
                )
        given = tuple(tangent for tangent in tangents if tangent is not None)
        missing = tuple(number for number, tangent in enumerate(tangents) if tangent is None)
        return GradientRequest(tuple(inputs), tuple(saved), given, symbols, lost, missing)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Hands gradients on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], why: str, cause: Any, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.why, ctx.cause = why, cause
        # detach: a gradient may be a saved tensor or a tangent itself, which must not be given this node.
        return tuple(grad.detach() for grad in grads if grad is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise DoubleBackwardError(
            f"a gradient that a compiled graph computed was differentiated again, and {ctx.why}. {_ADVICE}"
        ) from ctx.cause


def refusing(compiled: BoxedCallable, refused: Mapping[int, str]) -> BoxedCallable:
    """``compiled`` gradients, where those whose numbers are ``refused`` raise, and say why, when differentiated."""

    def run(args: list[Any]) -> list[Tensor | None]:
        sources = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
        grads = list(compiled(args))
        for number, reason in refused.items():
            if grads[number] is not None:
                why = f"the graph has no derivative of this one: {reason}"
                (grads[number],) = _RefuseSecondDerivative.apply([grads[number]], why, None, *sources)
        return grads

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _refusing(
    call: CallSpec,
    backward: Any,
    box: list[Any],
    late: Sequence[Tensor],
    refusal: tuple[Sequence[Tensor | None], Sequence[int], Any],
) -> tuple[Tensor | None, ...]:
    """``refusal``: what the gradients depend on, the inputs that get none, and why there is no second derivative."""
    sources, without, reason = refusal
    run = backward.get()
    with torch.no_grad():
        grads = run(box) if not autocast_enabled() else without_autocast(run, box)
    if len(grads) != len(call.graph_inputs):
        raise CallingConventionError(
            f"this graph was compiled for {len(call.graph_inputs)} gradients, but there are {len(grads)}"
        )
    if late:
        write_late(late, [grads[i] for i in call.backward_mutated_inputs], call.backward_version_steps)
    wanted = [None if i in without else grads[i] for i in call.differentiable_inputs]
    sources = [source for source in sources if source is not None and source.requires_grad]
    said = "the graph was bound without a way to make them" if reason is None else str(reason)
    why = f"this graph has first derivatives only: {said}"
    connected = iter(_RefuseSecondDerivative.apply(wanted, why, reason, *sources))
    return (None, *(None if grad is None else next(connected) for grad in wanted))
