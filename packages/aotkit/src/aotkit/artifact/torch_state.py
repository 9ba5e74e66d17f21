"""What of torch's global state a compile reads, as key parts; nothing here is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from aotkit_cache import Uncacheable

from ..errors import GuardError

__all__ = [
    "CALL_STATE",
    "autocast_state",
    "call_unwatched",
    "cuda_capabilities",
    "default_device",
    "default_dtype",
    "is_watched",
    "outside_of_modes",
    "quick_state",
    "settings",
    "state_of_call",
    "tell_state",
    "torch_state",
]


def autocast_state() -> tuple[tuple[tuple[str, bool, str], ...], bool, int]:
    """Per device whether autocast is on and its dtype; whether it caches casts; how deep it is nested."""
    names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = tuple((d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in names)
    return devices, torch.is_autocast_cache_enabled(), nesting


def cuda_capabilities(named: bool) -> tuple[tuple[int, int], ...]:
    """What the CUDA devices of this process can, if it uses one; ``named``: the graph will."""
    if not (torch.cuda.is_initialized() or (named and torch.cuda.is_available())):
        return ()
    return tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def is_watched() -> bool:
    """Whether a mode of the user's (``TorchDispatchMode``, ``TorchFunctionMode``) sees each call, and may change it.

    Not torch's own modes: those that trace, and the one of ``torch.set_default_device``.
    """
    if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
        return False
    dispatch = any(getattr(mode, "_mode_key", None) is None for mode in _get_current_dispatch_mode_stack())
    return dispatch or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context in which no mode of the caller's is active: what a compile does is none of its business, and what is
    compiled serves other calls too. Classes with functions of their own (``fx.Proxy``) keep them."""
    functions = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(functions):
            _push_mode(mode)


def call_unwatched(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, of which function modes see nothing: they see functions that a user calls."""
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return function(*args)
    return function(*args)


def torch_state() -> dict[str, Any]:
    """Everything that decides what the same graph and inputs become, by name.

    Raises :class:`Uncacheable` where code of the user's sees or changes what is traced.
    """
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    if modes:
        raise Uncacheable(f"the dispatch mode {modes[-1]} is active, which sees each operation that is traced")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise Uncacheable("hooks on saved tensors are active, which are part of what is compiled")
    return {
        "grad_mode": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": autocast_state(),
        "anomaly_mode": torch.is_anomaly_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        **settings(),
    }


def settings() -> dict[str, Any]:
    """What decides what code becomes of a graph that was captured, by name. ATen reads these when it runs."""
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._C._get_deterministic_fill_uninitialized_memory(),
        ),
        "matmul_precision": _precisions(),
        "matmul_reduced": (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            tuple(torch._C._get_sdp_priority_order()),
        ),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
    }


_SETS_DEFAULT_DTYPE = threading.RLock()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which ``dtype`` is torch's default. It is set, for all threads, only where it is another one, by one
    thread at a time: another would take what this one sets for what was there before, and leave it so."""
    if torch.get_default_dtype() is dtype:
        yield
        return
    with _SETS_DEFAULT_DTYPE:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _precisions() -> tuple[str, ...]:
    """What products and convolutions of float32 may lose: as one setting, and as torch's newer ones by library have it.

    Where one of the newer ones was set, torch refuses to tell the one setting.
    """
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        whole = "by library"
    asked = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
    told = [str(torch._C._get_fp32_precision_getter(*which)) for which in asked]
    return (whole, *("ieee" if each == "none" else each for each in told))  # which is what nothing set means


def state_of_call() -> dict[str, Any]:
    """The state of torch that decides what a call means, as plain data."""
    autocast: list[Any] = []
    if torch._C._is_any_autocast_enabled():
        devices, caches, nesting = autocast_state()
        active = [list(entry) for entry in devices if entry[1]]
        autocast = [active, caches, nesting] if active else []
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": autocast,
        "dtype": str(torch.get_default_dtype()),
        "device": default_device(),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
    }


def quick_state() -> tuple[Any, ...] | None:
    """The same state as a few values that are equal if it is; ``None`` where that would take a closer look."""
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack() or _context() is not None:
        return None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def default_device() -> str:
    """The default device's name. Nearly always there is no mode that could set one; else torch looks, which takes as
    long as reading all other state."""
    plain = torch._C._len_torch_function_stack() == 0
    return "cpu" if plain and _context() is None else str(torch.get_default_device())


def _context() -> Any:
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


CALL_STATE = {
    "grad": "whether gradients are on",
    "inference": "whether inference mode is on",
    "autocast": "autocast",
    "dtype": "the default dtype",
    "device": "the default device",
    "deterministic": "whether algorithms are deterministic",
}


def tell_state(here: Any, saved: Any) -> None:
    """Raise :class:`GuardError`: in what two states of a call differ, both in the form of ``value_to_json``."""
    now, then = (dict(state["dict"]) for state in (here, saved))
    for name, what in CALL_STATE.items():
        if now.get(name) != then.get(name):
            raise GuardError(f"torch is in another state than when the function was compiled: {what} differs")
