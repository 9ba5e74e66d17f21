"""One sample in eager mode and compiled, and what a caller can see of either."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit import Options, Recorder
from aotkit.driver.context import CompileContext
from aotkit.driver.specializations import Specializations, flat_function, flatten_call, structure_of
from aotkit.driver.stages import own_stages
from aotkit.torch_api.aot_function import rebuilt
from aotkit_inductor_lower import LowerOptions, compile_graph

from .program import DIRECT, Sample, invoke, values_of

__all__ = ["Run", "compiled", "fakes_agree", "merged", "observe"]

RNG_SEED = 11
TRITON = LowerOptions(processor="triton-interpreter")


@dataclass(slots=True)
class Run:
    """Facts of one call: results, gradients and the arguments afterwards, each by the name of a reference."""

    results: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None


def observe(sample: Sample, call: Callable[..., Any], again: bool = False, given: Sequence[Any] | None = None) -> Run:
    """Run on new arguments, or on ``given`` ones."""
    run = Run()
    given = sample.arguments(again) if given is None else given
    tensors = given[: len(sample.tensors)]
    torch.manual_seed(RNG_SEED)
    try:
        outputs = call(*given)
        if sample.entry == "training":
            _gradients(run, sample, tensors, outputs)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        run.error = error
        return run
    named = {t.name: value for t, value in zip(sample.tensors, tensors, strict=True)}
    named |= {repr(ref): value for ref, value in zip(sample.outputs, outputs, strict=True)}
    if sample.entry not in DIRECT:
        _aliases(run, named)
    for name, value in named.items():
        run.results[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return run


def _gradients(run: Run, sample: Sample, tensors: Sequence[Any], outputs: Sequence[Any]) -> None:
    starts = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    leaves = [(t.name, value) for t, value in zip(sample.tensors, tensors, strict=True) if t.grad]
    if not starts or not leaves:
        return
    weights = [_weights(o, number) for number, o in enumerate(starts)]
    found = torch.autograd.grad(starts, [value for _, value in leaves], weights, allow_unused=True)
    for (name, _), gradient in zip(leaves, found, strict=True):
        run.results[f"gradient of {name}"] = gradient


def _weights(output: torch.Tensor, number: int) -> torch.Tensor:
    made = torch.cos(torch.arange(output.numel()) * 0.9 + number).to(output.dtype).view(output.shape)
    return torch.empty_like(output).copy_(made)  # laid out like the output, as a backward is compiled for


def _aliases(run: Run, named: dict[str, Any]) -> None:
    """For each tensor the first that shares its storage, and where in that storage it begins."""
    first: dict[int, tuple[str, int]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            begin = int(tensor.storage_offset()) * tensor.element_size()
            owner, start = first.setdefault(tensor.untyped_storage()._cdata, (name, begin))
            run.aliases[name] = f"{begin - start} bytes into {owner}"


# --- what compiles ----------------------------------------------------------------------------------------------


def compiled(sample: Sample) -> Callable[..., Any]:
    """The compiled function, to be called with arguments; compiling may happen in the first call."""
    return _ENTRIES[sample.entry](sample)


def _direct(sample: Sample, options: LowerOptions | None = None) -> Callable[..., Any]:
    """The calls as nodes of a graph, straight into the generator of kernels."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    nodes: dict[str, Any] = {}
    with mode:
        for tensor in sample.tensors:
            made = tensor.make()
            nodes[tensor.name] = graph.placeholder(tensor.name)
            nodes[tensor.name].meta["val"] = mode.from_tensor(made.detach(), static_shapes=True)
        for call in sample.calls:
            values = {name: _meta(node) for name, node in nodes.items()}
            target: Any = torch.ops
            for part in call.op.split("."):
                target = getattr(target, part)
            args = tuple(_nodes(a, nodes) for a in call.args)
            node = graph.call_function(target, args, {k: _nodes(v, nodes) for k, v in call.kwargs})
            node.meta["val"] = result = invoke(call, values)
            nodes[call.result] = node
            if call.parts is not None:
                parts = [graph.call_function(operator.getitem, (node, i)) for i in range(call.parts)]
                for part_node, value in zip(parts, result, strict=True):
                    part_node.meta["val"] = value
                nodes[call.result] = parts
    graph.output(tuple(_nodes(ref, nodes) for ref in sample.outputs))
    code = compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), options=options)
    return lambda *args: code([a.detach() if isinstance(a, torch.Tensor) else a for a in args])


def _meta(node: Any) -> Any:
    return [part.meta["val"] for part in node] if isinstance(node, list) else node.meta["val"]


def _nodes(arg: Any, nodes: dict[str, Any]) -> Any:
    return values_of(arg, nodes)


def _function(sample: Sample) -> Callable[..., Any]:
    """What ``torch.compile`` would do with the graph of the calls, without Dynamo."""
    function, dynamic = sample.function(), sample.entry == "dynamic"
    options = Options(fallback="error", cache=False)
    context = CompileContext(options, Recorder(), own_stages(), "sample", publish=False)
    specializations = Specializations.of(
        lambda key: rebuilt(*flat_function(function, structure_of(key))),
        lambda: context,
        dynamic=dynamic,
        num_static=0,
    )

    def call(*args: Any) -> Any:
        outputs, rebuild = specializations.call(*flatten_call(args, {}))
        return rebuild(outputs)

    return call


def _dynamo(sample: Sample) -> Callable[..., Any]:
    torch._dynamo.reset()
    options: Any = {"fallback": "error", "cache": False}
    return torch.compile(sample.function(), backend="aotkit", options=options, dynamic=False)


_ENTRIES: dict[str, Callable[[Sample], Callable[..., Any]]] = {
    "direct": _direct,
    "function": _function,
    "training": _function,
    "dynamic": _function,
    "dynamo": _dynamo,
    "triton": lambda sample: _direct(sample, TRITON),
}


def fakes_agree(sample: Sample, again: bool = False) -> list[torch.Tensor] | Exception:
    """What torch's own fake kernels say of the sample: results without data, or the error they raise, for sizes that
    are symbols as well where the sample is compiled for such."""
    if sample.entry == "dynamic":
        symbolic = _run_on_fakes(sample, again, FakeTensorMode(shape_env=ShapeEnv()))
        if isinstance(symbolic, Exception):
            return symbolic
    return _run_on_fakes(sample, again, FakeTensorMode())


def _run_on_fakes(sample: Sample, again: bool, mode: FakeTensorMode) -> list[torch.Tensor] | Exception:
    def fake(arg: torch.Tensor) -> torch.Tensor:
        if mode.shape_env is None:
            return mode.from_tensor(arg.detach())
        sizes: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * arg.dim())
        return mode.from_tensor(arg.detach(), symbolic_context=sizes)

    given = [fake(arg) if isinstance(arg, torch.Tensor) else arg for arg in sample.arguments(again)]
    with mode, torch.no_grad() if not sample.grads else nullcontext():
        try:
            return sample.function()(*given)
        except Exception as error:  # noqa: BLE001 - it is the answer
            return error


# --- several samples as one program -----------------------------------------------------------------------------


def merged(samples: Sequence[Sample]) -> Sample:
    """One program that makes the calls of all; names begin with the number of the sample they are from."""
    tensors, calls, outputs, numbers = [], [], [], []
    for index, sample in enumerate(samples):
        rename = _Renamed(f"s{index}_")
        tensors += [replace(t, name=rename.name(t.name)) for t in sample.tensors]
        numbers += [replace(n, name=rename.name(n.name)) for n in sample.numbers]
        calls += [rename.call(c) for c in sample.calls]
        outputs += [rename.value(ref) for ref in sample.outputs]
    first = samples[0]
    return Sample(first.seed, tuple(tensors), tuple(calls), tuple(outputs), tuple(numbers), first.entry, first.goal)


@dataclass(frozen=True, slots=True)
class _Renamed:
    prefix: str

    def name(self, name: str) -> str:
        return self.prefix + name

    def call(self, call: Any) -> Any:
        kwargs = tuple((k, self.value(v)) for k, v in call.kwargs)
        args = tuple(self.value(a) for a in call.args)
        return replace(call, result=self.name(call.result), args=args, kwargs=kwargs)

    def value(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self.value(item) for item in arg]
        return replace(arg, name=self.name(arg.name)) if hasattr(arg, "name") and hasattr(arg, "__slots__") else arg
