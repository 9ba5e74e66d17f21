"""Compile a function or a module with compilers and a partitioner of one's choice, without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from aotkit_aot_trace.callables import FunctionalCall, named_tensors
from aotkit_partition import default_partition

from ..driver.bugs import is_bug, line_of_function, note_bug, raise_bug
from ..driver.context import CompileContext, Stages
from ..driver.specializations import (
    Specializations,
    compile_variable,
    example_fakes,
    flat_function,
    flatten_call,
    next_name,
    rebuilder,
    structure_of,
)
from ..driver.stages import Compiler, Partitioner, custom_stages
from ..environment import read_environment
from ..frontend.drawn_floats import take_drawn_floats
from ..frontend.sources import check_sources
from ..frontend.tracing_context import publish_parameters
from ..recorder import Recorder
from .live_module import LiveModule

__all__ = ["aot_function", "aot_module", "aot_module_simplified", "settings_of_compile"]


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool | None = False,
    enable_log: bool = True,
) -> Callable[..., Any]:
    """Compile ``fn`` (any pytree of tensors in and out) on its first call; torch's ``aot_function`` signature.

    ``fw_compiler(graph, example_inputs)`` and ``bw_compiler`` (default: the same) get functional ATen graphs and return
    a callable, boxed (``_boxed_call = True``: one list that it empties) or not. ``partition_fn(joint, joint_inputs,
    num_fwd_outputs=n)`` is ours or torch's own. ``inference_compiler`` (default: ``fw_compiler``) gets graphs that
    need no backward. ``decompositions`` are applied while tracing; none by default. ``num_params_buffers``: so many
    leading flat arguments are in the same memory, and of the same size, at every call.
    ``keep_inference_input_mutations``: a graph without a backward writes to its inputs itself (``copy_`` at its end),
    where autograd has no interest in them. ``dynamic=True`` makes sizes and integers symbolic. ``enable_log``:
    graphs are logged and dumped as ``AOTKIT_LOG``, ``AOTKIT_DUMP`` and ``TORCH_LOGS`` say.

    The compiled result is kept for later calls. Calls that it was not made for (another structure, dtype, size,
    grad mode, autocast) compile a further one, where torch's function would go on with the first.

    Idea: AOTAutograd (the PyTorch 2 paper, ASPLOS 2024).
    """

    stages = custom_stages(fw_compiler, bw_compiler, inference_compiler, partition_fn, decompositions)
    specializations = Specializations.of(
        lambda key: rebuilt(*flat_function(fn, structure_of(key))),
        lambda: settings_of_compile(stages, num_params_buffers, keep_inference_input_mutations, enable_log),
        dynamic=bool(dynamic),
        num_static=num_params_buffers,
        line=line_of_function(fn),
    )

    @wraps(fn, updated=())
    def compiled(*args: Any, **kwargs: Any) -> Any:
        outputs, rebuild = specializations.call(*flatten_call(args, kwargs))
        return rebuild(outputs)

    return compiled


def aot_module(
    mod: nn.Module,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool | None = False,
    enable_log: bool = True,
) -> nn.Module:
    """A module that behaves as ``mod`` and runs compiled; arguments as of :func:`aot_function`.

    Parameters and buffers are read from ``mod`` at every call, so replaced ones are seen, and so is ``train()`` or
    ``eval()``: each compiles its own graphs once. ``orig_module`` of the result is ``mod``.
    Raises ``AssertionError`` if a parameter or a buffer is a fake tensor.
    """
    stages = custom_stages(fw_compiler, bw_compiler, inference_compiler, partition_fn, decompositions)
    return _AOTModule(mod, stages, keep_inference_input_mutations, bool(dynamic), enable_log)


class _AOTModule(nn.Module):
    def __init__(self, mod: nn.Module, stages: Stages, keep_mutations: bool, dynamic: bool, log: bool) -> None:
        super().__init__()
        self.orig_module = mod
        self._stages = stages
        self._settings = (keep_mutations, dynamic, log)
        self._live = LiveModule(mod)
        self._specializations: dict[int, Specializations] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names, values, training = self._live.read()
        flat, spec = flatten_call(args, kwargs)
        count = len(names)
        found = self._specializations.get(count) or self._specializations.setdefault(count, self._new(count))
        outputs, rebuild = found.call([*values, *flat], (spec, names, training))
        return rebuild(outputs)

    def _new(self, num_static: int) -> Specializations:
        keep_mutations, dynamic, log = self._settings

        def flatten_for(structure: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
            spec, names, _ = structure
            call = FunctionalCall(self.orig_module, names, strict_out_tuple=False)
            return rebuilt(*flat_function(call, structure_of(spec), len(names)))

        return Specializations.of(
            flatten_for,
            lambda: settings_of_compile(self._stages, num_static, keep_mutations, log),
            dynamic=dynamic,
            num_static=num_static,
            line=line_of_function(self.orig_module),
        )


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
) -> Callable[..., Any]:
    """Compile a module of flat arguments for ``args``, now; what a frontend wants that has its own guards.

    No structures are looked for: ``args`` are flat, and ``mod`` returns a tuple or list. Parameters and buffers are
    read once and put before the arguments of every call. Sizes are symbolic if the arguments are fake tensors of a
    mode with symbols. Within a ``TracingContext`` what was found is published there. Other arguments as of
    :func:`aot_function`.

    Returns ``forward(*args)`` with ``zero_grad``, ``named_parameters`` and ``named_buffers`` of ``mod``; for
    Dynamo's wrapper of a graph with nested arguments ``forward(list)``, which empties the list.

    Raises ``RuntimeError`` if the module returns something else, ``AssertionError`` if Dynamo's sources of the
    arguments do not match them.
    """
    named = named_tensors(mod)
    params_flat = list(named.values())
    check_sources(mod, list(named), len(params_flat) + len(args))
    publish_parameters(params_flat)
    mod, args = take_drawn_floats(mod, args)
    full_args = [*params_flat, *args]
    stages = custom_stages(fw_compiler, bw_compiler, inference_compiler, partition_fn, decompositions)
    ctx = settings_of_compile(stages, len(params_flat), keep_inference_input_mutations)
    call = FunctionalCall(mod, list(named))
    try:
        boxed, _ = compile_variable(call, full_args, ctx, dynamic=False, num_static=len(params_flat))
    except Exception as error:
        if not is_bug(error):
            raise
        if ctx.options.fallback == "error":
            raise_bug(error, line_of_function(mod))
        boxed = _checked_eagerly(call, full_args, error)
        note_bug(error, line_of_function(mod), ctx.recorder)

    def forward(*runtime_args: Any) -> Any:
        return boxed([*params_flat, *runtime_args])

    def boxed_forward(runtime_args: list[Any]) -> Any:
        flat = [*params_flat, *runtime_args]
        runtime_args.clear()
        return boxed(flat)

    boxed_forward._boxed_call = True  # type: ignore[attr-defined]
    chosen: Any = boxed_forward if isinstance(mod, torch._dynamo.utils.GmWrapper) else forward
    chosen.zero_grad = mod.zero_grad
    chosen.named_parameters = mod.named_parameters
    chosen.named_buffers = mod.named_buffers
    return chosen  # type: ignore[no-any-return]


def _checked_eagerly(call: FunctionalCall, args: Sequence[Any], error: Exception) -> Callable[[list[Any]], Any]:
    """The module itself, if it can be called with such arguments: otherwise the error is its own, and is raised."""
    mode, fakes = example_fakes(args, dynamic=False)
    try:
        with mode, torch.no_grad():
            call(*fakes)
    except Exception:  # noqa: BLE001  # whatever the module raises
        raise error from None
    return lambda values: call(*values)


def rebuilt(
    function: Callable[..., Any], out_spec: Callable[[], pytree.TreeSpec]
) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A flat function with what puts its results together, instead of their structure."""
    return function, lambda: rebuilder(out_spec())


def settings_of_compile(stages: Stages, num_static: int, keep_mutations: bool, log: bool = True) -> CompileContext:
    """Options and log targets from the environment, a new name, and what the caller says about inputs."""
    environment = read_environment()
    recorder = Recorder(log=environment.log, dump_dir=environment.dump_dir) if log else Recorder()
    name = next_name()
    return CompileContext(
        environment.options(),
        recorder.of_graph(name),
        stages,
        name,
        num_static=num_static,
        keep_input_mutations=keep_mutations,
        publish=log,
    )
