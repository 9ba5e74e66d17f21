"""A slow, plain runner of captured graphs, and a comparison with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aotkit_aot_trace import Capture, FunctionalLayer, TraceOptions, capture
from aotkit_functionalize.lazy_bits import with_lazy_bits, without_lazy_bits
from aotkit_functionalize.metadata import GraphMetadata
from aotkit_functionalize.records import MutationKind, OutputKind, ViewSpec


class _Joint(torch.autograd.Function):
    """Runs the joint graph twice: for the forward outputs with zero tangents, and again for the gradients."""

    @staticmethod
    def forward(ctx: Any, captured: Capture, symbols: dict[str, int], *args: Any) -> tuple[Any, ...]:
        metadata = captured.metadata
        ctx.captured, ctx.symbols = captured, symbols
        ctx.args = [without_lazy_bits(a.detach()).clone() if _is_tensor(a) else a for a in args]
        ctx.set_materialize_grads(True)
        zeros = [_tangent(t.meta, symbols) for t in metadata.tangents]
        outputs = captured.graph(*[_restored(a, b) for a, b in zip(ctx.args, args, strict=True)], *zeros)
        outputs = [o.detach() if _is_tensor(o) else o for o in outputs[: metadata.num_forward_outputs]]
        ctx.mark_non_differentiable(
            *[o for o, d in zip(outputs, metadata.forward_requires_grad, strict=True) if _is_tensor(o) and not d]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        metadata = ctx.captured.metadata
        given = []
        for record in metadata.tangents:
            laid_out = _tangent(record.meta, ctx.symbols)
            given.append(laid_out.copy_(tangents[record.forward_output]))
        results = ctx.captured.graph(*ctx.args, *given)
        return None, None, *results[metadata.num_forward_outputs :]


def _restored(copy: Any, original: Any) -> Any:
    """The copy with the original's strides, so that the graph sees the layout it was captured for."""
    return without_lazy_bits(original.detach()) if _is_tensor(original) else original


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tangent(meta: Any, symbols: dict[str, int]) -> torch.Tensor:
    sizes, strides = _values(meta.sizes, symbols), _values(meta.strides, symbols)
    return torch.empty_strided(sizes, strides, dtype=getattr(torch, meta.dtype)).zero_()


def _value(dim: int | str, symbols: dict[str, int]) -> int:
    return dim if isinstance(dim, int) else eval(dim, {"__builtins__": {}, "min": min, "max": max}, dict(symbols))


def _values(dims: Sequence[int | str], symbols: dict[str, int]) -> tuple[int, ...]:
    return tuple(_value(d, symbols) for d in dims)


def bound_symbols(metadata: GraphMetadata, args: Sequence[Any], *, of_output: bool = False) -> dict[str, int]:
    """Values of the symbols for these arguments, or (those that depend on data) for these forward outputs."""
    found = {}
    for binding in metadata.symbols:
        if binding.of_output is not of_output:
            continue
        arg = args[binding.input_index]
        match binding.source:
            case "int":
                found[binding.name] = arg
            case "size":
                found[binding.name] = arg.shape[binding.dim]
            case "stride":
                found[binding.name] = arg.stride(binding.dim)
            case "storage_offset":
                found[binding.name] = arg.storage_offset()
    return found


def regenerate(base: torch.Tensor, view: ViewSpec, symbols: dict[str, int]) -> torch.Tensor:
    """The view that the record describes."""
    if base.requires_grad and not view.requires_grad:
        base = base.detach()
    dtype = getattr(torch, view.dtype)
    sizes, strides = _values(view.sizes, symbols), _values(view.strides, symbols)
    base = without_lazy_bits(base)
    first = base.storage_offset() * base.element_size() // dtype.itemsize + _value(view.offset_delta, symbols)
    if base.dtype.is_complex and not dtype.is_complex:
        base = torch.view_as_real(base)
    elif dtype.is_complex and not base.dtype.is_complex:
        base = torch.view_as_complex(base)
    elif base.dtype != dtype:
        base = base.view(dtype)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not view.under_no_grad):
        result = with_lazy_bits(base.as_strided(sizes, strides, first), view.conj, view.neg)
    return result.requires_grad_(True) if view.requires_grad and not result.requires_grad else result


def run_captured(captured: Capture, args: Sequence[Any]) -> list[Any]:
    """Call the graph and do afterwards what the metadata says."""
    metadata = captured.metadata
    symbols = bound_symbols(metadata, args)
    if metadata.is_training:
        forward = list(_Joint.apply(captured, symbols, *args))
    else:
        with torch.no_grad():
            forward = list(captured.graph(*[without_lazy_bits(a) if _is_tensor(a) else a for a in args]))
    assert len(forward) == metadata.num_forward_outputs
    symbols |= bound_symbols(metadata, forward, of_output=True)
    for info in metadata.inputs:
        _write_back(info, args[info.index], forward, symbols)
    results: list[Any] = [None] * len(metadata.outputs)
    for output in sorted(metadata.outputs, key=lambda o: o.kind is OutputKind.ALIAS_OF_OUTPUT):
        if output.same_as is not None and results[output.same_as] is not None:
            results[output.index] = results[output.same_as]
            continue
        results[output.index] = _result(output, metadata, args, forward, results, symbols)
    for effect in metadata.effects:
        assert effect.kind in ("grad_mode", "token")
        if effect.kind == "grad_mode":
            torch._C._set_grad_enabled(bool(effect.value))
    return results


def _write_back(info: Any, arg: Any, forward: list[Any], symbols: dict[str, int]) -> None:
    if info.mutation in (MutationKind.METADATA, MutationKind.DATA_AND_METADATA):
        view = info.new_view
        arg.as_strided_(
            _values(view.sizes, symbols),
            _values(view.strides, symbols),
            arg.storage_offset() + _value(view.offset_delta, symbols),
        )
    if info.updated_output is None:
        return
    new = forward[info.updated_output]
    if info.mutation_hidden_from_autograd:
        arg.data.copy_(new)
    elif info.mutation_under_no_grad:
        with torch.no_grad():
            arg.copy_(new)
    else:
        arg.copy_(new)


def _result(
    output: Any, metadata: GraphMetadata, args: Sequence[Any], forward: list[Any], results: list[Any], symbols: Any
) -> Any:
    match output.kind:
        case OutputKind.CONSTANT:
            return output.constant
        case OutputKind.SYMINT:
            return forward[output.graph_output]
        case OutputKind.FRESH:
            return with_lazy_bits(forward[output.graph_output], output.meta.conj, output.meta.neg)
        case OutputKind.INPUT:
            return args[output.base]
        case OutputKind.ALIAS_OF_INPUT:
            return regenerate(args[output.base], output.view, symbols)
        case OutputKind.ALIAS_OF_OUTPUT:
            return regenerate(results[output.base], output.view, symbols)
        case OutputKind.ALIAS_OF_INTERMEDIATE:
            position = metadata.num_forward_outputs - len(metadata.intermediate_bases) + output.base
            return regenerate(forward[position], output.view, symbols)
    raise AssertionError(output.kind)


def _inputs(make: Callable[[], Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """Leaves and, for those that require grad, arguments that may be changed in place."""
    torch.manual_seed(0)
    leaves = list(make())
    args = []
    for leaf in leaves:
        if _is_tensor(leaf) and leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter):
            arg = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).copy_(leaf)
            args.append(arg)
        else:
            args.append(leaf)
    return leaves, args


def _sharing(values: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Which tensors share memory, and how far apart they begin."""
    tensors = [(i, v) for i, v in enumerate(values) if _is_tensor(v)]
    found = []
    for i, a in tensors:
        for j, b in tensors:
            if i < j and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0:
                found.append((i, j, b.data_ptr() - a.data_ptr()))
    return found


def _gradients(leaves: list[Any], values: Sequence[Any]) -> list[Any]:
    terms = []
    for value in values:
        if _is_tensor(value) and value.requires_grad:
            generator = torch.Generator().manual_seed(7)
            weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value = torch.view_as_real(value.resolve_conj()).sum(-1) if value.is_complex() else value
            terms.append((value.double() * weight).sum())
    wanted = [x for x in leaves if _is_tensor(x) and x.requires_grad and x.is_leaf]
    if not terms or not wanted:
        return []
    return list(torch.autograd.grad(sum(terms), wanted, allow_unused=True))


def compare_with_eager(
    fn: Callable[..., Any],
    make: Callable[[], Sequence[Any]],
    *,
    options: TraceOptions | None = None,
    make_call: Callable[[], Sequence[Any]] | None = None,
    tolerance: float = 1e-5,
    versions: bool = True,
) -> Capture:
    """Capture ``fn`` on ``make()``, run it on ``make_call()``, and compare everything the caller can see with eager."""
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return fn(*args)

    captured = capture(counted, _inputs(make)[1], options=options)
    assert calls == 1, "the function has to run once"
    assert GraphMetadata.from_json(captured.metadata.to_json()) == captured.metadata
    captured.graph.graph.lint()
    make_call = make_call or make
    grad_mode = torch.is_grad_enabled()
    sides = []
    for call in (fn, lambda *a: run_captured(captured, a)):
        leaves, args = _inputs(make_call)
        before = [a._version if _is_tensor(a) else None for a in args]
        try:
            outputs = list(call(*args))
            after = torch.is_grad_enabled()
        finally:
            torch._C._set_grad_enabled(grad_mode)
        moved = [versions and v is not None and a._version != v for a, v in zip(args, before, strict=True)]
        sides.append((leaves, args, outputs, after, moved))
    _same(*sides, tolerance)
    return captured


def _same(eager: Any, ours: Any, tolerance: float) -> None:
    (leaves, args, outputs, mode, moved), (leaves_, args_, outputs_, mode_, moved_) = eager, ours
    assert mode == mode_, "grad mode afterwards"
    assert moved == moved_, f"version counters moved: {moved} in eager, {moved_} captured"
    assert len(outputs) == len(outputs_)
    everything, everything_ = [*args, *outputs], [*args_, *outputs_]
    for number, (a, b) in enumerate(zip(everything, everything_, strict=True)):
        what = f"input {number}" if number < len(args) else f"output {number - len(args)}"
        _same_value(a, b, what, tolerance)
    identity = [[o is v for v in everything] for o in outputs]
    assert identity == [[o is v for v in everything_] for o in outputs_], "identity of outputs"
    assert _sharing(everything) == _sharing(everything_), "which tensors share memory"
    for a, b in zip(_gradients(leaves, everything), _gradients(leaves_, everything_), strict=True):
        assert (a is None) == (b is None) or not (a if b is None else b).any(), (
            "an input has a gradient on one side only"
        )
        if a is not None and b is not None:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m: f"gradient: {m}")
    _same_after_writes(everything, everything_, tolerance)


def _same_value(a: Any, b: Any, what: str, tolerance: float) -> None:
    assert type(a) is type(b) or (_is_tensor(a) and _is_tensor(b)), f"{what}: {type(a)} and {type(b)}"
    if not _is_tensor(a):
        assert a == b, what
        return
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} and {b.shape} {b.dtype}"
    assert a.numel() == 0 or a.stride() == b.stride(), f"{what}: strides {a.stride()} and {b.stride()}"
    # A view of an intermediate taken under no_grad claims requires_grad in eager, though no gradient flows through it.
    claim = a._is_view() and a.grad_fn is None and b.grad_fn is None
    assert a.requires_grad == b.requires_grad or claim, f"{what}: requires_grad {a.requires_grad}, {b.requires_grad}"
    assert a.is_leaf == b.is_leaf or not a.requires_grad, f"{what}: is_leaf"
    torch.testing.assert_close(b.detach(), a.detach(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def _same_after_writes(values: list[Any], values_: list[Any], tolerance: float) -> None:
    """Write into one tensor after the other and see the same effect on all the others."""
    for number, (a, b) in enumerate(zip(values, values_, strict=True)):
        if not _is_tensor(a) or a.is_inference() or 0 in a.stride():
            continue
        with torch.no_grad():
            a.fill_(number + 3)
            b.fill_(number + 3)
        for other, (c, d) in enumerate(zip(values, values_, strict=True)):
            if _is_tensor(c):
                what = f"value {other} after writing into value {number}"
                torch.testing.assert_close(d.data, c.data, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")  # noqa: B023


@pytest.fixture(params=list(FunctionalLayer), ids=lambda layer: layer.value)
def layer(request: Any) -> FunctionalLayer:
    """Both of torch's functionalizations."""
    return request.param


@pytest.fixture
def check(layer: FunctionalLayer) -> Callable[..., Capture]:
    """Static and dynamic capture of a function, each compared with eager; returns the static capture."""

    def run(fn: Callable[..., Any], make: Callable[[], Sequence[Any]], **kwargs: Any) -> Capture:
        static = compare_with_eager(fn, make, options=TraceOptions(layer=layer), **kwargs)
        compare_with_eager(fn, make, options=TraceOptions(layer=layer, dynamic=True), **kwargs)
        return static

    return run


@pytest.fixture
def compare() -> Callable[..., Capture]:
    """See :func:`compare_with_eager`."""
    return compare_with_eager


@pytest.fixture
def run_graph() -> Callable[..., list[Any]]:
    """See :func:`run_captured`."""
    return run_captured
