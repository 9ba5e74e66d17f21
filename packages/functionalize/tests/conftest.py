"""An oracle: a function run over functional tensors that hold real ones, and what its records make of the results.

Nothing is recorded and nothing is compiled: the forward values and gradients come out of the functional run itself, so
what differs from eager mode is the fault of the records, or of the functional layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from aotkit_functionalize import FunctionalLayer, collect_metadata, function_inputs, functional_layer
from aotkit_functionalize.lazy_bits import with_lazy_bits, without_lazy_bits
from aotkit_functionalize.metadata import GraphMetadata
from aotkit_functionalize.records import InputInfo, MutationKind, OutputInfo, OutputKind, ViewSpec
from aotkit_functionalize.tracing import below_functional_layer, from_functional, to_functional
from aotkit_functionalize.view_methods import view_method

Program = Callable[..., Sequence[Any]]
Make = Callable[[], Sequence[Any]]


@pytest.fixture(params=list(FunctionalLayer), ids=lambda layer: layer.value)
def layer(request: Any) -> FunctionalLayer:
    """Both functional layers."""
    chosen: FunctionalLayer = request.param
    return chosen


@pytest.fixture
def same_as_eager(layer: FunctionalLayer) -> Callable[[Program, Make], GraphMetadata]:
    """``check(fn, make)``: the records, applied to a functional run of ``fn(*make())``, give what eager mode gives.

    ``memory=False``: a result with a backward of its own comes out of the graph as a view, which forward values that
    were copied are not.
    """
    return lambda fn, make, memory=True: _check(fn, make, layer, memory)


def _check(fn: Program, make: Make, layer: FunctionalLayer, memory: bool = True) -> GraphMetadata:
    torch.manual_seed(0)
    expected = _seen(list(make()), fn)
    torch.manual_seed(0)
    found: list[GraphMetadata] = []

    def by_records(*args: Any) -> list[Any]:
        before = torch.is_grad_enabled()
        run = _Run(fn, args, layer)
        torch.set_grad_enabled(before)
        found.append(run.record.metadata)
        return _applied(run, args)

    ours = _seen(list(make()), by_records)
    if "gradients" in expected:  # eager mode refuses to take them
        ours, expected = (_without(facts, "gradient") for facts in (ours, expected))
    if not memory:
        ours, expected = (_without(facts, "memory", "counters", " after ") for facts in (ours, expected))
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()
    for name, want in expected.items():
        got = ours[name]
        if name.endswith("requires grad") and None in (want, got):
            continue
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert got == want, f"{name}: {want} in eager mode, {got} by the records"
    metadata = found[0]
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    return metadata


def _without(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if not any(part in name for part in names)}


def _seen(args: list[Any], call: Program) -> dict[str, Any]:
    """Everything that a caller sees of one call."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    versions = [a._version for a in tensors]
    edges = [get_gradient_edge(a) for a in tensors if a.requires_grad]
    grad_mode = torch.is_grad_enabled()
    try:
        outputs = list(call(*args))
        facts: dict[str, Any] = {"grad mode": torch.is_grad_enabled()}
    finally:
        torch.set_grad_enabled(grad_mode)
    facts["versions"] = [a._version - before for a, before in zip(tensors, versions, strict=True)]
    for index, value in enumerate([*tensors, *outputs]):
        if not isinstance(value, Tensor):
            facts[f"{index}"] = value
            continue
        geometry = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.untyped_storage().nbytes())
        facts[f"{index} geometry"] = geometry if index < len(tensors) else geometry[:2] + geometry[3:4]
        facts[f"{index} bits"] = (value.is_conj(), value.is_neg())
        facts[f"{index} requires grad"] = None if _claims(value) else value.requires_grad
        facts[f"{index} value"] = value.detach().clone()
    everything = [*tensors, *(o for o in outputs if isinstance(o, Tensor))]
    storages = [t.untyped_storage()._cdata for t in everything]
    facts["memory"] = [storages.index(s) for s in storages]
    facts["identity"] = [next(i for i, other in enumerate(everything) if other is t) for t in everything]
    facts |= _gradients(everything, edges)
    facts["counters"] = [next(i for i, other in enumerate(everything) if _shared_counter(t, other)) for t in everything]
    facts |= _after_writes(everything)
    return facts


def _claims(value: Tensor) -> bool:
    """Whether ``value`` is a view taken under ``no_grad`` that says that it requires grad; no gradient flows there."""
    try:
        return value.requires_grad and value._is_view() and value.grad_fn is None
    except RuntimeError:  # written to since
        return True


def _gradients(everything: Sequence[Tensor], edges: Sequence[Any]) -> dict[str, Any]:
    """Of a loss of all that requires grad, with respect to the arguments as they came in."""
    values = list({id(t): t for t in everything if t.requires_grad}.values())
    if not values or not edges:
        return {}
    loss = torch.zeros((), dtype=torch.float64)
    try:
        for value in values:
            generator = torch.Generator().manual_seed(7)
            real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            weight = torch.randn(real.shape, generator=generator, dtype=torch.float64)
            loss = loss + (real.double() * weight).sum()
        found = torch.autograd.grad(loss, edges, allow_unused=True)
    except RuntimeError as error:  # a value that the backward needs was written to
        return {"gradients": str(error).partition(":")[0][:60]}
    return {f"gradient {k}": torch.zeros(()) if g is None else g.resolve_conj() for k, g in enumerate(found)}


def _after_writes(everything: Sequence[Tensor]) -> dict[str, Any]:
    """What all tensors hold after each of them was written to, one after the other."""
    facts = {}
    for number, value in enumerate(everything):
        if 0 not in value.stride():
            with torch.no_grad():
                value.fill_(number + 3)
            facts |= {f"{k} after write {number}": t.detach().clone() for k, t in enumerate(everything)}
    return facts


def _shared_counter(a: Tensor, b: Tensor) -> bool:
    before = b._version
    torch.autograd.graph.increment_version(a.detach() if a.requires_grad else a)
    return b._version != before


class _Run:
    """A functional run and its records, with plain forward values; asked for gradients, it takes them functionally."""

    def __init__(self, fn: Program, args: Sequence[Any], layer: FunctionalLayer) -> None:
        memory: dict[int, Any] = {}
        plain = [_copied(without_lazy_bits(a.detach()), memory) if isinstance(a, Tensor) else a for a in args]
        before = torch.is_grad_enabled()
        self.layer = layer
        with functional_layer(layer) as storages:
            self.inputs = function_inputs(plain, args)
            outputs = list(fn(*(i.value for i in self.inputs)))
            modes = (before, torch.is_grad_enabled())
            self.record = collect_metadata(self.inputs, outputs, grad_mode=modes, storages=storages)
            self.functional = list(self.record.forward_values)
            self.record.forward_values = [_plain(v) for v in self.functional]

    def gradients(self, tangents: Sequence[Any]) -> list[Tensor | None]:
        """Of the differentiable inputs, for gradients of all forward values."""
        with functional_layer(self.layer):
            given = [
                (self.functional[t.forward_output], to_functional(tangents[t.forward_output]))
                for t in self.record.metadata.tangents
                if tangents[t.forward_output] is not None
            ]
            leaves = [i.leaf for i in self.inputs if i.leaf is not None]
            values, grads = zip(*given, strict=True) if given else ((), ())
            found = torch.autograd.grad(values, leaves, grads, allow_unused=True, retain_graph=True)
            return [None if g is None else _plain(g) for g in found]


def _copied(value: Tensor, memory: dict[int, Any]) -> Tensor:
    """A tensor of its own that lies in a copy of the storage, one for all that share it."""
    storage = value.untyped_storage()
    copy = memory.setdefault(storage._cdata, None) or storage.clone()
    memory[storage._cdata] = copy
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(copy, value.storage_offset(), value.shape, value.stride())


def _plain(value: Any) -> Any:
    """A copy in its own memory, expanded as the value is."""
    if not isinstance(value, Tensor):
        return value
    value = from_functional(value.resolve_conj().resolve_neg())
    with below_functional_layer(), torch.no_grad():
        part = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
        own = torch.empty_strided(part.shape, part.stride(), dtype=value.dtype).copy_(part)
        return own.expand(value.shape)


class _Graph(torch.autograd.Function):
    """Gives differentiable forward values their history."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> Any:
        values, wanted = run.record.forward_values, run.record.metadata.forward_requires_grad
        plain = [v for v, w in zip(values, wanted, strict=True) if isinstance(v, Tensor) and not w]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return None, *ctx.run.gradients(tangents)


class _Lent(torch.autograd.Function):
    """Memory with the history of another tensor."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, memory: Tensor) -> Tensor:
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _applied(run: _Run, args: Sequence[Any]) -> list[Any]:
    metadata = run.record.metadata
    if metadata.is_training:
        wanted = [args[i] for i in metadata.differentiable_inputs]
        forward = list(_Graph.apply(run, *wanted))
    else:
        forward = list(run.record.forward_values)
    for info in metadata.inputs:
        _write_back(info, args, forward)
    results: list[Any] = [None] * len(metadata.outputs)
    for output in sorted(metadata.outputs, key=lambda o: o.kind is OutputKind.ALIAS_OF_OUTPUT):
        results[output.index] = _result(output, metadata, args, forward, results)
    for effect in metadata.effects:
        assert effect.kind == "grad_mode"
        torch.set_grad_enabled(bool(effect.value))
    return results


def _write_back(info: InputInfo, args: Sequence[Any], forward: Sequence[Any]) -> None:
    arg = args[info.index]
    if not isinstance(arg, Tensor):
        return
    before = arg._version
    if info.mutation in (MutationKind.METADATA, MutationKind.DATA_AND_METADATA):
        view = info.new_view
        assert view is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not view.under_no_grad):
            arg.as_strided_(view.sizes, view.strides, arg.storage_offset() + int(view.offset_delta))
    if info.updated_output is not None:
        new = forward[info.updated_output]
        if info.mutation_hidden_from_autograd:
            arg.data.copy_(new)
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not info.mutation_under_no_grad):
                arg.copy_(new)
    if info.sets_requires_grad is not None:
        arg.requires_grad_() if info.sets_requires_grad else arg.detach_()
    for _ in range(info.version_steps - (arg._version - before)):
        torch.autograd.graph.increment_version(arg)


def _result(
    output: OutputInfo, metadata: GraphMetadata, args: Sequence[Any], forward: list[Any], results: list[Any]
) -> Any:
    if output.same_as is not None and results[output.same_as] is not None:
        return results[output.same_as]
    position = len(forward) - len(metadata.intermediate_bases)
    match output.kind:
        case OutputKind.CONSTANT:
            return output.constant
        case OutputKind.FRESH | OutputKind.SYMINT:
            assert output.graph_output is not None
            value = forward[output.graph_output]
            if output.meta is not None:
                value = with_lazy_bits(value, output.meta.conj, output.meta.neg)
            return value.requires_grad_() if output.is_new_leaf else value
        case OutputKind.INPUT:
            return args[output.base or 0]
        case OutputKind.ALIAS_OF_INPUT:
            base = args[output.base or 0]
        case OutputKind.ALIAS_OF_OUTPUT:
            base = results[output.base or 0]
        case OutputKind.ALIAS_OF_INTERMEDIATE:
            base = forward[position + (output.base or 0)]
    assert output.view is not None
    if output.graph_output is None:
        return _regenerated(base, output.view)
    memory = _regenerated(base.detach(), replace(output.view, requires_grad=False, under_no_grad=False))
    return _Lent.apply(forward[output.graph_output], memory)


def _regenerated(base: Tensor, view: ViewSpec) -> Tensor:
    dtype = getattr(torch, view.dtype)
    detached = view.detached or (base.requires_grad and not view.requires_grad and not view.under_no_grad)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not view.under_no_grad):
        plain = without_lazy_bits(base.detach() if detached and not view.detached else base)
        sizes, strides, delta = view.sizes, view.strides, int(view.offset_delta)
        if plain.is_complex() and not dtype.is_complex:
            plain = torch.view_as_real(plain)
        if dtype.is_complex and not plain.is_complex():
            doubled = tuple(2 * int(stride) for stride in strides)
            pairs = plain.as_strided((*sizes, 2), (*doubled, 1), plain.storage_offset() + 2 * delta)
            result = torch.view_as_complex(pairs)
        else:
            result = plain.as_strided(sizes, strides, plain.storage_offset() + delta)
        result = with_lazy_bits(result, view.conj, view.neg)
    if view.detached:
        result = result.data if view.own_version else result.detach()
    return result.requires_grad_(True) if view.requires_grad and not result.requires_grad else result


def as_taken(base: Tensor, view: Tensor) -> Tensor:
    """``view`` of ``base``, taken by the operation that :func:`.view_method` names."""
    from aotkit_functionalize.aliases import view_spec
    from aotkit_functionalize.symbols import tensor_meta

    spec = view_spec(view, base, requires_grad=False)
    method, order = view_method(tensor_meta(base), spec)
    if method == "permute":
        return base.permute(order)
    if method == "as_strided":
        return base.as_strided(view.shape, view.stride(), view.storage_offset())
    return getattr(base, method)(view.shape)
