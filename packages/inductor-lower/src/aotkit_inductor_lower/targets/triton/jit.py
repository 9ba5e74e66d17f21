"""A kernel's text to a Triton function: for the compiler, or for the interpreter. Triton is imported here, lazily."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...ops.dtypes import to_torch_dtype
from ...symbolic import Symbol, SymbolKind
from .errors import TritonMissing
from .interpreted import interpreter_functions, interpreter_libm, whole_number
from .records import KernelSource
from .worker import define, jit_namespace

__all__ = ["interpret_kernel", "jit_function", "program_count", "run_interpreted", "standalone_text", "triton_module"]

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice as libm

jit = triton.jit


"""
_INTERPRETER = threading.RLock()  # the interpreter patches Triton's module while it runs


def standalone_text(source: KernelSource) -> str:
    """The kernel as a module that needs nothing but Triton."""
    return HEADER + source.text


def triton_module() -> Any:
    """Triton itself. Raises :class:`TritonMissing`."""
    try:
        import triton
    except ImportError as error:
        raise TritonMissing() from error
    return triton


def jit_function(source: KernelSource) -> Any:
    """The kernel as a Triton JIT function. Raises :class:`TritonMissing`."""
    triton_module()
    return define(source.text, source.name, jit_namespace())


def interpret_kernel(
    source: KernelSource,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    *,
    replace_functions: bool = True,
) -> None:
    """Run a kernel on CPU tensors (by buffer name; each begins where its buffer's memory begins), which it writes.

    ``replace_functions`` off runs the device functions themselves in the interpreter where it can: slow.
    """
    arguments: list[Any] = []
    for argument in source.parameters:
        if argument.kind == "size":
            arguments.append((sizes or {})[argument.name])
        elif argument.kind == "scratch":
            extent = argument.extent.evaluate(_environment(sizes))
            arguments.append(torch.empty(extent, dtype=to_torch_dtype(argument.dtype)))
        else:
            arguments.append(_flat(tensors[argument.name], to_torch_dtype(argument.dtype)))
    run_interpreted(source, arguments, program_count(source, sizes), replace_functions=replace_functions)


def run_interpreted(
    source: KernelSource, arguments: Sequence[Any], count: int, *, replace_functions: bool = True
) -> None:
    """Run ``count`` program instances on arguments in the kernel's order: CPU tensors and integers."""
    run = _interpreted(source, replace_functions)
    given = [whole_number(a) if isinstance(a, int) else a for a in arguments]  # as wide as on a device
    with _INTERPRETER, _overflow_unchecked(), np.errstate(all="ignore"):
        if count:
            run[(count,)](*given, **dict(source.config.blocks))


@contextmanager
def _overflow_unchecked() -> Iterator[None]:
    """Without what finds out, at each sum of integers, whether it overflowed: the interpreter computes it also where
    it tells nobody, which is whenever it does not debug."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
    try:
        yield
    finally:
        interpreter_builder.options = options


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All memory from the tensor's first element on, as a flat tensor of ``dtype``."""
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    usable = (whole.numel() - start) // dtype.itemsize * dtype.itemsize
    return whole[start : start + usable].view(dtype) if usable else torch.empty(1, dtype=dtype)


def _environment(sizes: Mapping[str, int] | None) -> dict[Symbol, int]:
    return {Symbol(name, SymbolKind.SIZE): value for name, value in (sizes or {}).items()}


def program_count(source: KernelSource, sizes: Mapping[str, int] | None = None) -> int:
    """How many program instances a launch has."""
    env, count = _environment(sizes), 1
    for size, block in source.grid:
        count *= -(-size.evaluate(env) // (source.config.block(block) if block else 1))
    return count


def _range(*bounds: Any, **hints: Any) -> range:
    """``range``, or ``tl.range``, of the interpreter's scalars, of which its own takes none with newer numpys."""
    return range(*(int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds))


def _interpreted(source: KernelSource, replace_functions: bool) -> Any:
    triton = triton_module()
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    namespace: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "libm": interpreter_libm(),
        "jit": InterpretedFunction,
        "range": _range,
    }
    run = define(source.text.replace("tl.range(", "range("), source.name, namespace)
    replaced: Mapping[str, Callable[..., Any]] = interpreter_functions()
    if not replace_functions:
        replaced = {name: f for name, f in replaced.items() if name.startswith(("f32_to", "check"))}
    namespace.update({name: f for name, f in replaced.items() if name in namespace})
    return run
