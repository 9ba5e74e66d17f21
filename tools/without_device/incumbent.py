"""The kernels that Inductor generates for a model on a CUDA device, without one.

Its own pipeline runs as a user gets it. Modules that it writes are not run but for the function that calls kernels,
whose launches are kept. Where it would measure on the device, products of odd sizes are padded, and of several sizes of
a kernel's tile all are kept.
"""

from __future__ import annotations

import linecache
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .kernels import Call, Choice, Graph, Launch, computes, distinct_bytes
from .models import on_fake_device, step
from .pretend import ARCH
from .traffic import Argument, Helpers, namespace

__all__ = ["incumbent_graphs"]


def incumbent_graphs(name: str) -> list[Graph]:
    """Its forward and backward of a training step."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering

    patterns: tuple[Any, ...] = (joint_graph, post_grad)
    for module in patterns:  # traced with tensors, which there are on the host
        module.lazy_init = _on_host(module.lazy_init)
    folder: Any = joint_graph.UniformValueConstantFolder
    folder.run = _folded(folder.run)
    texts: list[str] = []

    def keep(self: Any) -> Any:
        texts.append(self.codegen()[0].value)
        return types.SimpleNamespace(call=lambda args: None, __file__="", key="", path="")

    GraphLowering.compile_to_module = keep  # type: ignore[method-assign]

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        with (
            config.patch(force_disable_caches=True, force_shape_pad=True),
            functorch_config.patch(force_non_lazy_backward_lowering=True),
        ):
            compile_fx(module, inputs)
        raise _Done

    with on_fake_device(name) as (model, batch):
        try:
            step(model, batch, backend)
        except Exception as error:
            if not isinstance(error, _Done) and "_Done" not in str(error):
                raise
        torch._dynamo.reset()
        return [_graph(part, text) for part, text in zip(("forward", "backward"), texts, strict=True)]


class _Done(Exception):
    """Both graphs are compiled."""


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None, *args, **kwargs: function(torch.device("cpu"), *args, **kwargs)


class _OnHost(torch.utils._python_dispatch.TorchDispatchMode):
    """Constants are folded with tensors of the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        host = torch.device("cpu")
        given = {k: host if isinstance(v, torch.device) else v for k, v in (kwargs or {}).items()}
        return function(*(host if isinstance(a, torch.device) else a for a in args), **given)


def _folded(run: Callable[..., Any]) -> Callable[..., Any]:
    def folded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return run(self, *args, **kwargs)

    return folded


class _Kernel:
    """A kernel of a module; ``run`` keeps its arguments."""

    def __init__(self, kept: list[Launch], name: str, text: str) -> None:
        self.kept, self.name, self.text = kept, name, text
        filename = f"<inductor {name}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        found: dict[str, Any] = {"__file__": filename, "__name__": f"inductor_{name}"}
        quiet = text.replace("triton_helpers.set_driver_to_gpu()", "")  # same number of lines
        exec(compile(quiet, filename, "exec"), found)
        self.tuner = found[name]

    def run(self, *given: Any, stream: Any = None) -> None:
        """A launch."""
        del stream
        chosen = self.tuner.configs[0].kwargs
        names = [n for n in self.tuner.triton_meta["signature"] if n not in chosen]
        arguments: dict[str, Argument | int] = {}
        for name, value in zip(names, given, strict=True):
            arguments[name] = _argument(name, value) if isinstance(value, torch.Tensor) else int(value)
        text = self.tuner.fn.src
        sizes = [(n, a.elements if isinstance(a, Argument) else a) for n, a in arguments.items()]
        choices = tuple(self._choice(config, arguments) for config in self.tuner.configs)
        key = f"{text[text.index('(') :]}{sizes}{[(c.grid, sorted(c.constants.items())) for c in choices]}"
        self.kept.append(
            Launch(key, self.name, text, self._define, arguments, choices, self.tuner.fn.starting_line_number)
        )

    def _define(self, tl: Any) -> Callable[..., None]:
        plain = _helpers()
        names = namespace(tl, triton_helpers=plain, libdevice=Helpers(), tl_math=Helpers(), math=math)
        names |= dict.fromkeys(re.findall(r"_triton_helper_fn\w+", self.tuner.fn.src), None)  # how a scan combines
        exec(compile(self.tuner.fn.src, f"<inductor {self.name} traced>", "exec"), names)
        function: Callable[..., None] = names[self.tuner.fn.fn.__name__]
        return function

    def _choice(self, config: Any, arguments: Mapping[str, Argument | int]) -> Choice:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        numbers = {n: a for n, a in arguments.items() if isinstance(a, int)}
        grid = GridExpr.from_meta(self.tuner.inductor_meta, config).eval_slow({**numbers, **config.kwargs})
        return Choice(tuple(grid), dict(config.kwargs), 32 * config.num_warps, lambda: self._compiled(config))

    def _compiled(self, config: Any) -> tuple[str, bytes, str]:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        meta = self.tuner.triton_meta
        constants = {**meta["constants"], **config.kwargs}
        source = ASTSource(self.tuner.fn, meta["signature"], constants, meta["configs"][0])
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "debug": True}
        made = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
        return made.asm["ptx"], made.asm["cubin"], made.metadata.name


def _argument(name: str, tensor: torch.Tensor) -> Argument:
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return Argument(name, tensor.dtype.itemsize, int(elements), tensor.dtype.is_floating_point)


def _graph(part: str, text: str) -> Graph:
    from torch._inductor.async_compile import AsyncCompile

    launches: list[Launch] = []
    calls: list[Call] = []
    made = AsyncCompile.triton, AsyncCompile.wait
    AsyncCompile.triton = lambda self, name, source, **_: _Kernel(launches, name, source)  # type: ignore[method-assign]
    AsyncCompile.wait = lambda self, scope: None  # type: ignore[method-assign]
    module: dict[str, Any] = {"__name__": f"inductor_{part}", "__file__": ""}
    try:
        exec(compile(text, f"<inductor {part}>", "exec"), module)
    finally:
        AsyncCompile.triton, AsyncCompile.wait = made  # type: ignore[method-assign]
    module |= {
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "get_raw_stream": lambda device: 0,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
        "reinterpret_tensor": lambda tensor, size, stride, offset=0: torch.as_strided(tensor, size, stride, offset),
        "extern_kernels": _Calls(calls),
    }
    arguments = module["get_args"]()
    launches.clear()
    with _Counted(calls):
        module["call"](arguments)
    return Graph(part, tuple(launches), tuple(calls))


class _Calls:
    """`extern_kernels`: each call is counted."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" not in kwargs:
                return getattr(torch.ops.aten, name)(*args, **kwargs)
            out = kwargs.pop("out")
            self._calls.append(Call(name, _bytes((args, kwargs)), _bytes(out)))
            return out

        return call


class _Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls of ATen that compute."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if computes(str(function)):
            written = [
                value
                for a, value in zip(function._schema.arguments, args, strict=False)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            self.calls.append(Call(str(function), _bytes((args, kwargs)), _bytes(written or result)))
        return result


def _bytes(values: Any) -> float:
    """Of all tensors among values."""
    found = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return float(sum(distinct_bytes(t.shape, t.stride(), t.dtype.itemsize) for t in found))


def _helpers() -> Helpers:
    """Inductor's device functions, as far as more than the shape matters."""
    import numpy as np

    from .traffic import Array

    def array(value: Any) -> Array:
        return np.asarray(value).view(Array)

    def along(value: Any, axis: Any) -> Any:
        return array(np.asarray(value).take(0, axis=int(axis)))

    def welford(mean: Any, m2: Any, weight: Any, axis: Any) -> Any:
        return tuple(along(v, axis) for v in (mean, m2, weight))

    return Helpers(
        promote_to_tensor=array,
        div_floor_integer=lambda a, b: array(np.asarray(a) // np.asarray(b)),
        remainder_integer=lambda a, b: array(np.asarray(a) % np.asarray(b)),
        max2=along,
        min2=along,
        any=along,
        welford=welford,
        welford_combine=lambda *values: values[:3],
        welford_reduce=lambda value, mean, m2, weight, first: (mean, m2, weight),
        max_with_index=lambda value, index, axis: (along(value, axis), along(index, axis)),
        min_with_index=lambda value, index, axis: (along(value, axis), along(index, axis)),
        online_softmax_reduce=lambda top, total, axis, *_: (along(top, axis), along(total, axis)),
        online_softmax_combine=lambda top, total, *_: (top, total),
        online_softmax_combine_with_sum=lambda top, total, *_: (top, total),
        sort_with_index=lambda value, index, *_, **__: (value, index),
        device_assert_then=lambda condition, message, value: value,
    )
