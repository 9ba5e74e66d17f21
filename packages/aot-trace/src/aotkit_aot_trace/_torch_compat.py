"""The only place that names torch's private tracing functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.effects import has_effects
from torch._library.opaque_object import is_opaque_type
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    is_fake,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols, rebind_unbacked
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils.stateless import _reparametrize_module as replaced_tensors
from torch.utils._pytree import tree_map
from torch.utils._sympy.symbol import SymT, symbol_is_type

from aotkit_functionalize import Unsupported, lazy_bits

from ._kept_calls import drop_dead_code, keep_checks
from ._untold_sizes import make_sizes_in_pairs

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "allow_numbers",
    "called_name",
    "current_tracer",
    "current_tracer_or_none",
    "drop_dead_code",
    "enable_python_dispatcher",
    "evaluate_symint",
    "fake_mode_of_subgraphs",
    "get_current_node_meta",
    "graphs_hold_generators",
    "has_effects",
    "is_dense",
    "is_fake",
    "is_random",
    "is_recording",
    "is_without_memory",
    "keep_checks",
    "known",
    "lift_constant",
    "memory_format_of",
    "numbers_as_before",
    "pre_dispatch_functional_mode",
    "preserve_node_meta",
    "python_kernel_above_autograd",
    "rebind_sizes",
    "record_now",
    "record_operator",
    "replaced_tensors",
    "run_make_fx",
    "scattered_strides",
    "spectra_are_laid_out",
    "symbols_of",
    "to_pre_dispatch_functional",
    "track",
    "untraced",
    "unwatched",
    "with_known_condition",
    "with_known_float",
    "without_autocast",
    "without_compiled_autograd",
    "without_saving_hooks",
]

DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)


def run_make_fx(
    fn: Callable[..., Any],
    args: list[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    pre_dispatch: bool = False,
) -> torch.fx.GraphModule:
    """Record ``fn(*args)``; ``args`` are fake tensors of the active mode. Code of the module is made when needed."""

    def told(*placeholders: Any) -> Any:
        make_sizes_in_pairs(current_tracer())
        return fn(*placeholders)

    trace = make_fx(
        told,
        decomposition_table=decompositions,
        tracing_mode="real",
        pre_dispatch=pre_dispatch,
        _disable_torch_fn_metadata_mode=True,
    )
    with _use_lazy_graph_module(True):
        return trace(*args)


def pre_dispatch_functional_mode() -> AbstractContextManager[Any]:
    """Context in which functional tensors are functionalized before autograd sees their operations."""
    return FunctionalTensorMode(pre_dispatch=True, export=True)


def to_pre_dispatch_functional(value: torch.Tensor) -> torch.Tensor:
    """A functional tensor over ``value`` inside of :func:`pre_dispatch_functional_mode`."""
    return FunctionalTensor.to_functional(value)


_ABOVE_AUTOGRAD = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def python_kernel_above_autograd(op: Any, kernel: Callable[..., Any] | None) -> Iterator[None]:
    """In this context ``kernel``, or the operator itself, runs where torch has a Python kernel in autograd's place."""
    found = {key: op.py_kernels[key] for key in _ABOVE_AUTOGRAD if key in op.py_kernels}
    if not found:
        yield
        return
    try:
        for key in found:
            del op.py_kernels[key]
            if kernel is not None:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
        yield
    finally:
        op.py_kernels.update(found)
        op._dispatch_cache.clear()


def is_without_memory(value: torch.Tensor | None) -> bool:
    """Whether it is one of the zeros that stand for themselves (``torch._efficientzerotensor``)."""
    return value is not None and torch._C._dispatch_keys(value).has(torch._C.DispatchKey.ZeroTensor)


def current_tracer() -> Any:
    """The tracer of the recording in progress."""
    mode = get_proxy_mode()
    assert mode is not None, "no recording is in progress"
    return mode.tracer


def current_tracer_or_none() -> Any:
    """The tracer of the recording in progress, or ``None``."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def allow_numbers() -> None:
    """From here on, to the end of the recording (:func:`numbers_as_before`), numbers that the fake mode's tensors hold,
    and places that depend on them, are symbols, also where Dynamo was not told to capture such reads
    (``capture_scalar_outputs``). Views are made again later, so it is not for one read only."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is not None:
        mode.allow_scalar_outputs = True


@contextmanager
def numbers_as_before(mode: Any) -> Iterator[None]:
    """Context that takes back at its end what :func:`allow_numbers` allowed ``mode``."""
    before = mode.allow_scalar_outputs
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before


def forget_sizes() -> None:
    """Fake tensors remember the sizes that depend on their data (``nonzero``); a graph that is run once more over the
    same fakes makes them anew, so that they can be bound once more."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is not None:
        mode.epoch += 1


def rebind_sizes(node: torch.fx.Node, result: Any) -> None:
    """The sizes that depend on data, which ``node`` has made anew, are those Dynamo has made for it before."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert mode is not None, "no fake mode is active"
    for symbol in node.meta["unbacked_bindings"]:
        _refuse_size_of_an_input(symbol, mode.shape_env.replace(symbol), mode.shape_env)
    rebind_unbacked(mode.shape_env, node, result)
    tracer = current_tracer_or_none()
    if tracer is None:
        return
    # The tracer knows each by the name that it was made under, and is asked for it by the other.
    known = tracer.sympy_expr_tracker
    for symbol in list(known):
        renamed = mode.shape_env.replace(symbol)
        if renamed.is_symbol:
            known.setdefault(renamed, known[symbol])


def _refuse_size_of_an_input(symbol: Any, settled: Any, shape_env: Any) -> None:
    symbols = settled.free_symbols
    if symbols and settled is not symbol and not any(map(shape_env.is_unbacked_symint, symbols)):
        raise Unsupported(
            f"a number that depends on data is said to be the dynamic size {settled} of an input",
            "torch writes that size in its place, also in the check, which would compare it with itself",
            "Check it against a size that is fixed, or leave the check out",
        )


def symbols_of(sizes: Iterable[Any]) -> set[Any]:
    """The symbols that occur in ``sizes``."""
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def known(value: Any) -> Any:
    """The number that a symbolic one stands for, under a guard of Dynamo.

    0 is guarded by two comparisons: an equation would make 0 of the symbol wherever it is, also where -0.0 was passed,
    which equals it."""
    if not isinstance(value, torch.SymFloat | torch.SymInt) or not value.node.has_hint():
        return value
    if isinstance(value, torch.SymFloat) and value.node.hint == 0 and value <= 0 and value >= 0:
        return 0.0
    return float(value) if isinstance(value, torch.SymFloat) else int(value)


def is_zero(value: Any) -> bool:
    """Whether a value is the float 0, of either sign."""
    return type(value) is float and value == 0


def with_known_float(value: Any) -> Any:
    """An integer or a condition that depends on a symbolic float as a plain one, under a guard of Dynamo."""
    if not isinstance(value, torch.SymInt | torch.SymBool) or not value.node.has_hint():
        return value
    if not any(symbol_is_type(symbol, SymT.FLOAT) for symbol in value.node.expr.free_symbols):
        return value
    return int(value) if isinstance(value, torch.SymInt) else bool(value)


def with_known_condition(value: Any) -> Any:
    """A condition on sizes as a plain bool, under a guard; anything else as it is."""
    return bool(value) if isinstance(value, torch.SymBool) and value.node.has_hint() else value


def record_now(values: Iterable[Any]) -> None:
    """Settle which nodes give the SymInts: a later one, of the backward say, may have a size of the same symbol."""
    tracer = current_tracer()
    for value in values:
        if isinstance(value, torch.SymInt):
            proxy = get_proxy_slot(value, tracer)
            proxy.force()
            tracer.symnode_tracker[value] = proxy


def is_dense(plain: torch.Tensor) -> bool:
    """Whether the elements fill a range of the storage; ``False`` where that depends on the elements of a tensor."""
    if free_unbacked_symbols(plain):
        return is_non_overlapping_and_dense_or_false(plain)
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(plain))


def is_recording() -> bool:
    """Whether a recording is in progress."""
    return get_proxy_mode() is not None


def untraced() -> AbstractContextManager[Any]:
    """Context whose operations are not recorded."""
    return disable_proxy_modes_tracing()


def unwatched() -> AbstractContextManager[Any]:
    """Context for a look at tensors, which no torch-function mode is told of."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def without_autocast() -> AbstractContextManager[Any]:
    """Context in which no device's autocast applies."""
    return torch._C._DisableAutocast()  # type: ignore[no-any-return]


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Context in which autograd runs its functions itself, whether or not compiled autograd is in use."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None or not module.compiled_autograd_enabled:
        return nullcontext()
    context: AbstractContextManager[Any] = module._disable()
    return context


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Context in which the user's saved-tensor hooks do not apply: they are for what is saved when the graph runs."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


class SavedTensorHooks:
    """Hooks that call ``note`` for each tensor that autograd saves between ``begin`` and ``end``, and change nothing.

    They work inside of :func:`without_saving_hooks` too.
    """

    def __init__(self, note: Callable[[], None]) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            note()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._before: bool | None = None

    def begin(self) -> None:
        """Put them on top of those that are in place."""
        self._before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
        self._hooks.__enter__()

    def end(self) -> None:
        """Take them away, if they are in place."""
        if self._before is not None:
            self._hooks.__exit__(None, None, None)
            torch._C._autograd._saved_tensors_hooks_set_tracing(self._before)
            self._before = None


def next_sequence_number() -> int:
    """The number that the next backward function gets."""
    return int(torch._C._autograd._get_sequence_nr())


def has_saved(function: Any) -> bool:
    """Whether a backward function of autograd's saved a tensor."""
    return any(name.startswith("_raw_saved_") for name in dir(function)) or bool(getattr(function, "saved_tensors", ()))


def in_checkpoint() -> bool:
    """Whether a region of ``torch.utils.checkpoint`` runs, where its hooks don't apply."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__


def stops_early(arguments: Mapping[str, Any]) -> bool:
    """Whether a checkpointed region that is called with these runs again only as far as it is needed."""
    everywhere = torch.utils.checkpoint._enable_checkpoint_early_stop
    return bool(arguments.get("early_stop", True) if everywhere is None else everywhere)


@contextmanager
def fake_mode_of_subgraphs(fake_mode: Any) -> Iterator[None]:
    """Context in which operators with subgraphs record those under ``fake_mode``.

    Before torch 2.12 they take the one that Dynamo has put into its tracing context, which is another than ours where
    the recording runs on tensors of its own. Later versions ask the recording.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fake_mode is fake_mode:
        yield
        return
    before, context.fake_mode = context.fake_mode, fake_mode
    try:
        yield
    finally:
        context.fake_mode = before


def track(value: Any, proxy: torch.fx.Proxy, tracer: Any) -> None:
    """From now on ``value`` stands for ``proxy`` in the recording."""
    with untraced():
        track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def record_operator(
    op: Any, args: tuple[Any, ...], fake_result: Callable[[], Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """A node that calls ``op``, without running it: its value is what ``fake_result`` makes."""
    tracer = current_tracer()
    proxies, named = tree_map(tracer.unwrap_proxy, (args, dict(kwargs or {})))
    with untraced():
        result = fake_result()
    track(result, tracer.create_proxy("call_function", op, proxies, named), tracer)
    return result


def called_name(node: torch.fx.Node) -> str:
    """What a node calls, by the name that functions, methods and all overloads of an operator of torch's share."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        target = target.overloadpacket
    return str(getattr(target, "__name__", target))


def lift_constant(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor for a real one that the function holds on to; the recording refers to it as an attribute."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert mode is not None, "no fake mode is active"
    proxy_mode = get_proxy_mode()
    with untraced(), unset_fake_temporarily():
        real = lazy_bits.without_lazy_bits(value.detach())
    with untraced():
        fake = mode.from_tensor(real, static_shapes=True)
    if proxy_mode is not None:
        node = cast(torch.fx.Node, proxy_mode.tracer.create_arg(real))
        track(fake, torch.fx.Proxy(node, proxy_mode.tracer), proxy_mode.tracer)
    return lazy_bits.with_lazy_bits(cast(torch.Tensor, fake), value.is_conj(), value.is_neg())


def get_current_node_meta() -> dict[str, Any]:
    """Meta of the user's node that is being run."""
    return fx_traceback.get_current_meta()


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def evaluate_symint(value: Any, symbols: Mapping[str, int]) -> tuple[str, str] | None:
    """A SymInt for given values of its symbols, in the form of a constant; ``None`` for anything else."""
    if not isinstance(value, torch.SymInt):
        return None
    expression = value.node.expr.subs({s: symbols[str(s)] for s in value.node.expr.free_symbols if str(s) in symbols})
    return ("int", str(expression))


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """The format of eager's batch norm of ``x``: channels last if ``x`` is so, also with odd strides of dimensions of
    size one, where ``torch._prims_common``, and eager's other operators, say contiguous."""
    for rank, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and x.is_contiguous(memory_format=last) and not x.is_contiguous():
            return last
    return torch._prims_common.suggest_memory_format(x)


def graphs_hold_generators() -> bool:
    """Whether a node's arguments may be generators of random numbers: from torch 2.13 on."""
    return is_opaque_type(torch.Generator)


def scattered_strides(x: torch.Tensor, result: torch.Tensor) -> tuple[Any, ...]:
    """The strides of a copy of ``x`` that something was put into, where ``result`` is a fake one. Before torch 2.12
    fake kernels keep dimensions that repeat elements; eager gives each element a place of its own."""
    repeats = any(type(step) is int and step == 0 and not _is_one(size) for size, step in zip(x.shape, x.stride()))
    if not repeats:
        return result.stride()
    with untraced():
        return x.clone().stride()


def spectra_are_laid_out() -> bool:
    """Whether fake kernels tell how spectra lie in memory: from torch 2.12 on. Before, they tell others than eager's,
    for several dimensions also such as lay elements over each other, or fail."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


keep_checks()
