"""A wrapper plan and compiled code -> a callable."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ._dynamo_frames import hide_from_dynamo
from ._observer import SILENT, Observer
from ._torch_compat import (
    autocast_enabled,
    fast_apply,
    forward_ad,
    is_transformed,
    profiler,
    record_range,
    set_grad_enabled,
    transforms_active,
    unsafe_view,
)
from .boxed import BoxedCallable, ensure_boxed, is_boxed
from .compiled_autograd import cooperation
from .donated import keep_donated, own_memory, storages
from .double_backward import Gradients, drop_values, gradients_with_history, histories, remember
from .emit import emit_call, emit_profiled_call
from .emit_autograd import emit_autograd
from .enabled_grad import with_grad_enabled
from .errors import PlanError
from .foreign_tangents import is_foreign, take_tangent, with_foreign_tangents
from .forward_adapters import Around, RandomSource, bind_around
from .lazy_backward import LazyBackward, Missing
from .operations import functions_of
from .packed import layouts_if_packed, unpacked
from .placed_arguments import placed
from .plan import CallSpec, WrapperPlan
from .runtime import (
    keep_values,
    own_outputs,
    refuse_duals,
    refuse_transform,
    without_autocast,
    write_late,
    wrong_count,
    zero_tangent,
)
from .source import Source
from .subclasses.bind import bind_subclasses

__all__ = ["backward_of", "bind"]

_FEW_STEPS = 2  # of a version counter: each is a call

# What emitted code may call beside the compiled graph; the keys are its global names.
_RUNTIME: dict[str, Any] = {
    "_Tensor": torch.Tensor,
    "_autocast_enabled": autocast_enabled,
    "_coerce_tangent": take_tangent,
    "_drop_values": drop_values,
    "_forward_ad": forward_ad,
    "_histories": histories,
    "_is_transformed": is_transformed,
    "_is_foreign": is_foreign,
    "_is_grad_enabled": torch.is_grad_enabled,
    "_keep_donated": keep_donated,
    "_keep_values": keep_values,
    "_layouts_if_packed": layouts_if_packed,
    "_own_memory": own_memory,
    "_own_outputs": own_outputs,
    "_placed": placed,
    "_profiler": profiler,
    "_record_range": record_range,
    "_refuse_duals": refuse_duals,
    "_refuse_transform": refuse_transform,
    "_remember": remember,
    "_set_grad_enabled": set_grad_enabled,
    "_storages": storages,
    "_transforms_active": transforms_active,
    "_unpacked": unpacked,
    "_unsafe_view": unsafe_view,
    "_without_autocast": without_autocast,
    "_wrong_count": wrong_count,
    "_write_late": write_late,
    "_zero_tangent": zero_tangent,
    **{name: getattr(math, name) for name in ("ceil", "floor", "isqrt", "pow", "sqrt", "trunc")},
}


class _SourceLoader:
    """Lets tracebacks show lines of emitted code, without a registration that would outlive it."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, name: str) -> str:
        return self._source


def bind(
    plan: WrapperPlan,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    observer: Observer = SILENT,
    gradients: Gradients | None = None,
    backward_graph: torch.fx.GraphModule | Callable[[], torch.fx.GraphModule] | None = None,
    random: RandomSource | None = None,
    specialize: Callable[[Missing], Callable[..., Any] | None] | None = None,
) -> BoxedCallable:
    """Generate and return the function that the user's call ends up in.

    Args:
        plan: from :func:`.build_plan`, or read back from JSON.
        forward: compiled graph, boxed (or not: then it is wrapped): a list of graph inputs in, a list or
            tuple of forward outputs, saved tensors and saved SymInts out. One that writes to its inputs and moves no
            version counter doing so may say that by a true attribute ``moves_no_versions``.
        backward: compiled backward: ``[*saved symints, *saved tensors, *tangents]`` in, one gradient or ``None`` per
            graph input out. Or a function without any parameter that makes it: it is called at the first
            backward, once, see :class:`.LazyBackward`. A training plan needs one, an inference plan takes none.
        observer: told of the events ``wrappers.bind`` (``source``, ``seconds``) and ``wrappers.lazy_backward``
            (``seconds``).
        gradients: makes second derivatives; without it they are refused.
        backward_graph: the backward as FX, or a function that makes it when it is asked for, for compiled autograd;
            without it Dynamo leaves the backward alone.
        random: where seed and offset come from, for plans with a :class:`.RandomState`.
        specialize: given which tangents the first backward lacks, makes a backward that takes ``None`` in their place,
            or gives ``None``: then ``backward`` runs, with zeros. Not asked for tangents that are tensor subclasses.

    Returns:
        A boxed callable: takes the list of the caller's flat arguments and empties it, returns the list of flat
        outputs. Its ``source`` is the generated Python, its ``plan`` the plan. It may be called from several threads.
    """
    start = time.perf_counter()
    out = Source(counts_writes=_counts_writes(plan, forward))
    lazy = backward_of(backward, plan.call, observer, specialize) if plan.call.training else None
    code = bind_around(plan.call, Around(ensure_boxed(forward), lazy), random, _execute)
    namespace: dict[str, Any] = {**_RUNTIME, **functions_of((*plan.prologue, *plan.epilogue))}
    namespace.update(_forward=code.forward, _backward=code.backward)
    adapters = ""
    if plan.call.subclasses is not None:
        adapters = bind_subclasses(plan.call.subclasses, namespace)
        _execute(adapters, namespace)
    if plan.call.training:
        namespace["_gradients_with_history"] = gradients_with_history(plan.call, namespace["_backward"], gradients)
        draws = plan.call.random is not None and plan.call.random.backward_offset is not None
        at_hand = None if draws or plan.call.donated else backward_graph
        namespace["_with_foreign_tangents"] = with_foreign_tangents(plan.call, namespace["_backward"], at_hand)
        emit_autograd(plan.call, out)
    emit_call(plan, out)
    namespace["_profiled"] = _profiled_call(plan, out, namespace)
    namespace.update(out.constants)
    _execute(out.text, namespace)
    if plan.call.training:
        shared = cooperation(plan.call, at_hand)
        # A compiled function may call backward(); then Dynamo looks at every Python frame that autograd enters.
        hide_from_dynamo(namespace["backward"])
        methods = {name: staticmethod(namespace[name]) for name in ("forward", "backward")} | shared
        apply = fast_apply(type("CompiledGraph", (torch.autograd.Function,), methods))
        namespace["_apply"] = with_grad_enabled(apply, namespace["forward"]) if plan.call.enables_grad else apply
    call: Any = namespace["call"]
    call._boxed_call = True
    call.source = code.source + adapters + out.text
    call.plan = plan
    observer.event("wrappers.bind", {"seconds": time.perf_counter() - start, "source": call.source})
    bound: BoxedCallable = call
    return bound


def _counts_writes(plan: WrapperPlan, forward: Callable[..., Any]) -> bool:
    """Whether compiled code says (attribute ``moves_no_versions``) that it writes to memory beside torch, and few steps
    of each counter are due."""
    says = bool(getattr(forward, "moves_no_versions", False))
    if not says or not plan.epilogue:
        return says
    from .operations.versions import SetVersion  # a plan without operations needs none of their modules

    steps = [operation.steps for operation in plan.epilogue if isinstance(operation, SetVersion)]
    return max(steps, default=0) <= _FEW_STEPS


def _profiled_call(plan: WrapperPlan, known: Source, namespace: dict[str, Any]) -> BoxedCallable:
    """The call while a profiler records. It is generated when one does for the first time."""
    constants, counts_writes = known.constants, known.counts_writes

    def first_time(args: list[Any]) -> Any:
        out = Source(constants=dict(constants), counts_writes=counts_writes)
        emit_profiled_call(plan, out)
        generated = {**namespace, **out.constants}
        _execute(out.text, generated)
        namespace["_profiled"] = generated["profiled_call"]
        return generated["profiled_call"](args)

    return first_time


def backward_of(
    backward: Callable[..., Any] | None,
    call: CallSpec,
    observer: Observer = SILENT,
    specialize: Callable[[Missing], Callable[..., Any] | None] | None = None,
) -> LazyBackward:
    """A compiled backward, or what makes one, in the form that both end in.

    A backward takes at least one tangent, so a function without parameters is one that makes it.
    """
    if backward is None:
        raise PlanError("a training plan needs a backward: compiled, or a function without parameters that makes it")
    if not is_boxed(backward) and _has_no_parameters(backward):
        return LazyBackward(backward, observer, specialize, call.unreached)
    compiled = backward
    lazy = LazyBackward(lambda: compiled, unreached=call.unreached)
    lazy.get()
    return lazy


def _has_no_parameters(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions may have no signature
        return False


def _execute(source: str, namespace: dict[str, Any]) -> None:
    name = f"aotkit_wrapper_{abs(hash(source)):x}"
    namespace["__name__"] = name
    namespace["__loader__"] = _SourceLoader(source)
    exec(compile(source, f"{name}.py", "exec"), namespace)  # our own text; dims.py let only arithmetic through
